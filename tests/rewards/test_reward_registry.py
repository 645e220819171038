import pytest

from mindrlhf.errors import UserError
from mindrlhf.rewards import registry


def written(tmp_path, source, name="mine.py"):
    path = tmp_path / name
    path.write_text(source)
    return path


def test_built_in_verifiers_are_found():
    # Of a module each, and of a folder below; the others are asked for by their own tests.
    assert {"accuracy_reward", "code_execution", "llm_judge"} <= {*registry.built_in_names()}
    verifier = registry.resolve("length_reward")
    assert verifier.name == "length_reward"
    assert verifier.reads.context == ("finish_reason", "num_tokens")


def test_a_function_of_a_file_is_found(tmp_path):
    path = written(tmp_path, "def score(completion, answer, *, prompt, bonus=2): return len(prompt) + bonus")
    verifier = registry.resolve(f"{path}:score")
    assert (verifier.name, verifier.reads.context) == ("score", ("prompt",))
    assert verifier.function("", "", prompt="abc") == 5


def test_a_function_that_takes_any_context_gets_all_of_it(tmp_path):
    path = written(tmp_path, "def score(completion, answer, **context): return 0")
    assert registry.resolve(f"{path}:score").reads.context == ("prompt", "finish_reason", "num_tokens")


def test_a_file_may_import_its_neighbour(tmp_path):
    written(tmp_path, "FACTOR = 3", name="neighbour_of_mine.py")
    path = written(tmp_path, "import neighbour_of_mine as n\ndef score(completion, answer): return n.FACTOR")
    assert registry.resolve(f"{path}:score").function("", "") == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acuracy_reward", "unknown verifier 'acuracy_reward': did you mean accuracy_reward"),
        ("zzz", f"did you mean {' or '.join(registry.built_in_names())}?"),
        ("missing.py:f", "there is no file missing.py"),
        ("missing.py", "missing.py:function"),
        ("missing.py:", "path/to/file.py:function"),
        ("missing.py:a-b", "path/to/file.py:function"),
    ],
)
def test_unknown_names_are_user_errors(name, message):
    for function in (registry.check, registry.resolve):
        with pytest.raises(UserError) as caught:
            function(name)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(completion, answer): return 1", "has no function 'f'; it has other"),
        ("f = 3", "has no function 'f'; it has none"),
        ("def f(completion", "does not load: SyntaxError"),
        ("1 / 0", "does not load: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "does not load: SystemExit: 3"),
        ("async def f(completion, answer): return 1", "is async: return the number itself"),
        ("def f(completion): return 1", "cannot be called as f(completion, answer)"),
        ("def f(completion, answer, tokens, /): return 1", "it may take prompt, finish_reason, num_tokens"),
    ],
)
def test_files_that_hold_no_verifier_are_user_errors(tmp_path, source, message):
    path = written(tmp_path, source)
    with pytest.raises(UserError) as caught:
        registry.resolve(f"{path}:f")
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


OPTIONED = """
def f(completion, answer, *, prompt, ratio: float = 0.5, count: int = 3, is_on: bool = False, name: str = "n"): return 0
def g(completion, answer, *, needed: "float"): return needed
"""


def test_options_are_converted_to_the_types_of_the_parameters(tmp_path):
    path = written(tmp_path, OPTIONED)
    texts = {"ratio": "2", "count": "7", "is_on": "True", "name": "1.5"}
    assert registry.resolve(f"{path}:f", texts).options == {"ratio": 2.0, "count": 7, "is_on": True, "name": "1.5"}
    assert registry.resolve(f"{path}:g", {"needed": "1e-3"}).function("", "", needed=1e-3) == 1e-3


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("f", {"rate": "1"}, "has no option 'rate'; it has ratio, count, is_on, name"),
        ("f", {"prompt": "1"}, "has no option 'prompt'"),
        ("f", {"ratio": "x"}, "is 'x': it must be a number"),
        ("f", {"ratio": "nan"}, "is 'nan': it must be a number"),
        ("f", {"count": "1.5"}, "is '1.5': it must be an integer"),
        ("f", {"is_on": "1"}, "is '1': it must be true or false"),
    ],
)
def test_wrong_options_are_user_errors(tmp_path, function, options, message):
    path = written(tmp_path, OPTIONED)
    with pytest.raises(UserError) as caught:
        registry.resolve(f"{path}:{function}", options)
    assert message in str(caught.value)


def test_options_of_built_in_verifiers_that_have_no_default_must_be_set():
    with pytest.raises(UserError, match="needs the option 'overlong_penalty.buffer': set it in reward.options"):
        registry.resolve("overlong_penalty", {"max_length": "8"})


def test_names_and_weights_are_split():
    assert registry.parse_verifiers("a, b", "1.0,0.5") == (["a", "b"], [1.0, 0.5])


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        ("a,b", "1.0", r"2 verifiers \(a, b\) but 1 weights \(1.0\)"),
        ("a", "x", "weight 'x' is not a number"),
        ("a", "", "weight '' is not a number"),
        ("a", "nan", "must be a finite number"),
        ("a,", "1,1", "no empty ones"),
        ("", "1", "at least one verifier"),
        ("a,a", "1,1", "'a': name each verifier once"),
        ("one.py:f,two.py:f", "1,1", "'f': name each verifier once"),
    ],
)
def test_selections_that_make_no_sense_are_user_errors(names, weights, message):
    with pytest.raises(UserError, match=message):
        registry.parse_verifiers(names, weights)
