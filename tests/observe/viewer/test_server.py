"""The served page of samples: the same as the page of one file, in bounded memory."""

import contextlib
import json
import random
import threading
import tracemalloc
import urllib.error
import urllib.request
from urllib.parse import urlencode

import pytest
from test_page import HOSTILE, data_of, dom, items, make_run, needs_browser, record  # noqa: F401 (a fixture)

from mindrlhf.cli import main
from mindrlhf.errors import UserError
from mindrlhf.observe.viewer import server as server_module
from mindrlhf.observe.viewer.page import write_page
from mindrlhf.observe.viewer.server import SampleIndex, SampleServer


@contextlib.contextmanager
def serving(*run_dirs):
    server = SampleServer(list(run_dirs))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while get(server, "rows")["read"] < 1:
            pass
        yield server
    finally:
        server.close()
        thread.join()


def get(server, what, **wished):
    with urllib.request.urlopen(f"{server.url}{what}?{urlencode(wished)}", timeout=20) as answer:
        return json.loads(answer.read())


def made_records(num=300):
    rng = random.Random(0)
    return [
        record(
            index // 3,
            f"question {rng.randrange(20)} {'Ä' if index % 9 == 0 else ''}",
            f"completion {index} " + "so " * rng.randrange(30),
            rng.choice([0.0, 0.5, 1.0, None]),
            finish_reason=rng.choice(["stop", "length"]),
            rewards={"accuracy_reward": rng.choice([0.0, 1.0])} | ({"late": 0.25} if index > 100 else {}),
        )
        for index in range(num)
    ]


def expected(records, wished):
    """What the page shows, sample by sample."""
    verifier = wished.get("verifier", "")

    def score(one):
        return one["rewards"].get(verifier) if verifier else one["reward"]

    def change(one):
        same = [other for other in records if other["prompt"] == one["prompt"]]
        first = min(other["step"] for other in same)
        early = [score(other) or 0.0 for other in same if other["step"] == first]
        return 0.0 if one["step"] == first else (score(one) or 0.0) - sum(early) / len(early)

    def fits(one):
        low, high = float(wished.get("low", "-inf")), float(wished.get("high", "inf"))
        value = score(one)
        return (
            float(wished.get("from", 0)) <= one["step"] <= float(wished.get("to", 1e9))
            and (
                value is None
                and "low" not in wished
                and "high" not in wished
                or value is not None
                and low <= value <= high
            )
            and wished.get("ending", one["finish_reason"]) == one["finish_reason"]
            and any(wished.get("text", "").lower() in one[name].lower() for name in ("prompt", "completion"))
        )

    order = wished.get("order", "step")
    key = {
        "step": lambda one: one["step"],
        "score": score,
        "length": lambda one: len(one["completion"]),
        "change": change,
    }
    sign = -1 if order.startswith("-") else 1
    found = [(number, one) for number, one in enumerate(records) if fits(one)]
    return [number for number, one in sorted(found, key=lambda pair: sign * (key[order.lstrip("-")](pair[1]) or 0))]


@pytest.mark.parametrize(
    "wished",
    [
        {},
        {"from": "20", "to": "60", "order": "-score"},
        {"low": "0.5", "order": "score"},
        {"high": "0.4", "verifier": "late"},
        {"verifier": "accuracy_reward", "order": "-change"},
        {"order": "change", "ending": "length"},
        {"order": "-length", "text": "COMPLETION 1"},
        {"text": "ä", "order": "-step"},
        {"text": "no such words"},
    ],
)
def test_samples_are_chosen_and_sorted_as_in_the_page_of_one_file(make_run, wished):  # noqa: F811
    records = made_records()
    index = SampleIndex(make_run("run", records))
    index.read()
    assert index.find(wished).tolist() == expected(records, wished)


def test_answers_have_what_the_page_of_one_file_holds(make_run, tmp_path):  # noqa: F811
    records = made_records()
    one, two = make_run("one", records), make_run("two", records[40:80] + [record(500, "question 3 ", "far", 1.0)])
    page = data_of(write_page([one], tmp_path / "page.html"))["runs"][0]
    with serving(one, two) as server:
        rows = get(server, "rows", first=290)
        assert [row[0] for row in rows["rows"]] == list(range(290, 300)) and rows["total"] == rows["count"] == 300
        assert get(server, "rows", run=1)["total"] == 41
        for number in (0, 150, 299):
            seen = get(server, "sample", number=number, order="-score")
            row = page["rows"][number]
            assert seen["prompt"] == page["prompts"][row[1]]
            assert seen["row"][2:5] == row[2:5] and seen["row"][6:] == row[6:]
            named = [dict(zip(names, values)) for names, values in ((seen["verifiers"][0], seen["row"][5]),)]
            assert {name: value for name, value in named[0].items() if value is not None} == records[number]["rewards"]
            places = expected(records, {"order": "-score"})
            same = [at for at, other in enumerate(records) if other["prompt"] == records[number]["prompt"]]
            assert seen["history"] == [
                [places.index(at), records[at]["step"], records[at]["reward"], at == number] for at in same
            ]
            other = seen["other"]
            steps = [one["step"] for one in records[40:80] if one["prompt"] == records[number]["prompt"]]
            if steps:
                assert abs(other[0] - row[0]) == min(abs(step - row[0]) for step in steps)


def test_nobody_else_is_answered(make_run):  # noqa: F811
    with serving(make_run("run", made_records(3))) as server:
        root = f"http://{server.host}"
        for url, host in (
            (root, None),
            (f"{root}/rows", None),
            (f"{root}/wrong/rows", None),
            (f"{server.url}../../../etc/passwd", None),
            (f"{server.url}rows", "example.com"),
            (f"{server.url}rows?first=x", None),
            (f"{server.url}rows?run=7", None),
            (f"{server.url}sample?number=3", None),
            (f"{server.url}sample", None),
        ):
            request = urllib.request.Request(url, headers={"Host": host} if host else {})
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(request, timeout=20)
        with urllib.request.urlopen(server.url, timeout=20) as page:
            text = page.read().decode()
        assert "connect-src 'self'" in text and "completion 0" not in text


def test_mistakes_are_one_line_or_said_on_the_page(make_run, tmp_path, capsys):  # noqa: F811
    run = make_run("run", made_records(3))
    for arguments, words in (
        ([tmp_path / "none", "--serve"], "no samples in"),
        ([run, "--serve", "--output", "x.html"], "--serve and --output"),
        ([run, "--port", 70000], "--port is 70000"),
    ):
        assert main(["view", *map(str, arguments)]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(UserError, match="port .* cannot be used"), serving(run) as server:
        SampleServer([run], int(server.host.partition(":")[2]))
    for records, words in (([], "is empty"), ([{"step": 1}], "a line that is no sample")):
        with serving(make_run(words, records)) as server:
            assert words in get(server, "rows")["error"]


def test_memory_does_not_grow_with_the_texts(make_run):  # noqa: F811
    run = make_run("run", (record(step, f"p{step % 7}", "x" * 60_000, 1.0) for step in range(300)))
    tracemalloc.start()
    try:
        index = SampleIndex(run)
        index.read()
        assert index.find({"text": "xxx", "order": "-change"}).size == 300
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_first_rows_are_there_while_the_file_is_read(make_run, monkeypatch):  # noqa: F811
    may_go_on, add = threading.Event(), SampleIndex._add

    def slow(self, one):
        add(self, one)
        if self.num_samples == 5:
            may_go_on.wait(60)

    monkeypatch.setattr(server_module.SampleIndex, "_add", slow)
    server = SampleServer([make_run("run", made_records(9))])
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while (answer := get(server, "rows"))["total"] < 5:
            pass
        assert 0 < answer["read"] < 1 and len(answer["rows"]) == 5
    finally:
        may_go_on.set()
        server.close()
        thread.join()


@needs_browser
def test_a_browser_shows_the_same_as_of_the_page_of_one_file(make_run, tmp_path):  # noqa: F811
    records = [*made_records(), record(7, HOSTILE, HOSTILE, 1.0)]
    one, two = make_run("one", records), make_run("two", records[:60])
    page = write_page([one, two], tmp_path / "page.html")
    with serving(one, two) as server:
        for fragment in ("#order=-change", "#text=img%20src", "#from=10&to=12&verifier="):
            whole, served = dom(page, fragment), dom(server.url, fragment)
            assert items(served) == items(whole) and items(whole)
            assert "<img" not in served
            details = [text.partition('id="detail"')[2].partition("</article>")[0] for text in (whole, served)]
            assert details[0] == details[1]
