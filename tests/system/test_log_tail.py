from mindrlhf.system.files import last_lines


def test_the_last_lines_that_say_something(tmp_path):
    path = tmp_path / "log"
    assert last_lines(path, 3) == []
    path.write_bytes(b"one\n\ntwo  \n  three\n \nf\xff\n\n")
    assert last_lines(path, 3) == ["two", "  three", "f\ufffd"]
    assert last_lines(path, 9, lambda line: "o" in line) == ["one", "two"]


def test_of_a_large_log_only_the_end_is_read(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(200_000)))
    assert last_lines(path, 2) == ["line 199998", "line 199999"]
    assert last_lines(path, 2, lambda line: line in ("line 0", "line 199000")) == ["line 199000"]
