"""Columns of the prompts that reach reward functions by name."""

import inspect

import pytest

from mindrlhf.config.reward import RewardSection
from mindrlhf.data.handlers import SAMPLE_NAMES
from mindrlhf.errors import UserError
from mindrlhf.rewards import registry
from mindrlhf.rewards.lint import lint
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput, RewardResult
from mindrlhf.sandbox.user_files import declared_signature

FUNCTIONS = """
import functools


def by_level(completion, answer, level, *, weight: float = 1.0):
    return level * weight


def with_default(completion, answer, *, level=100, prompt):
    return level + len(prompt)


def with_all(completion, answer, **context):
    return len(context) + 10 * len(context.get("tags", ()))


def renamed(text, solution, **context):
    return len(context)


def plain(completion, answer):
    return 1.0


def both(completion, answer, *, completions, level):
    return completions.index(completion) + level


hidden = functools.partial(by_level, weight=2.0)
"""
SHAPES = """
def a(x, y, /, z, w=1, *rest, k, o=2, **more): ...
def b(x, *, k): ...
async def c(x=1): ...
class Game:
    def reset(self, answer, level, seed=0): ...
"""


@pytest.fixture
def verifier(tmp_path):
    path = tmp_path / "of_columns.py"
    path.write_text(FUNCTIONS)
    return lambda name: f"{path}:{name}"


def pool_of(*verifiers, **options) -> RewardPool:
    return RewardPool(Selection(verifiers, (1.0,) * len(verifiers), options=options))


def sample(index=0, completion="c", **extra) -> RewardInput:
    return RewardInput(index, completion, "a", prompt="four", completions=("b", completion), extra=extra)


def test_a_parameter_of_a_columns_name_gets_its_value(verifier):
    names = ("by_level", "with_default", "with_all", "plain", "both")
    with pool_of(*map(verifier, names)) as pool:
        results = pool.score([sample(level=3, tags=["x", "y"]), sample(level=4, tags=None or [])])
    # with_all is given prompt, finish_reason and num_tokens beside the two columns.
    assert [result.parts for result in results] == [
        dict(zip(names, (3.0, 7.0, 25.0, 1.0, 4.0))),
        dict(zip(names, (4.0, 8.0, 5.0, 1.0, 5.0))),
    ]
    assert not any(result.failures for result in results)


def test_a_default_stands_where_there_is_no_such_column(verifier):
    with pool_of(verifier("with_default"), verifier("with_all")) as pool:
        (result,) = pool.score([sample()])
    assert result.parts == {"with_default": 104.0, "with_all": 3.0}


def test_a_column_is_never_taken_for_the_completion(verifier):
    with pool_of(verifier("renamed")) as pool:
        (result,) = pool.score([sample(text="no", solution="no", other="yes")])
    assert result == RewardResult(0, {"renamed": 4.0}, 4.0)


def test_an_option_that_is_set_is_no_column(verifier):
    with pool_of(verifier("by_level"), **{"by_level.weight": "10"}) as pool:
        assert pool.score([sample(level=2, weight=1000)])[0].total == 20.0
    with pool_of(verifier("by_level")) as pool:
        assert pool.score([sample(level=2, weight=1000)])[0].total == 2000.0


def test_no_column_changes_an_option_of_a_built_in_verifier():
    right = RewardInput(0, "The answer is 42.5", "42", extra={"tolerance": 1.0})
    with pool_of("accuracy_reward") as pool:
        assert pool.score([right])[0].total == 0.0


def test_values_arrive_as_json_has_them(verifier, tmp_path):
    (tmp_path / "seen.py").write_text("def seen(completion, answer, *, value): return float(repr(value) == answer)")
    values = [None, True, -1, 1.5, "\ud800\x00", [1, [2]], {"a": {"b": None}}, "x" * 3_000_000]
    with pool_of(f"{tmp_path / 'seen.py'}:seen") as pool:
        results = pool.score([RewardInput(0, "", repr(value), extra={"value": value}) for value in values])
    assert [result.total for result in results] == [1.0] * len(values)


def test_a_parameter_that_nothing_gives_a_value_ends_the_run_with_what_there_is(verifier):
    with pool_of(verifier("plain"), verifier("hidden")) as pool:
        pool.submit(sample(level=1))
        with pytest.raises(UserError) as caught:
            pool.submit(sample(tags=[], lvl=1))
    message = str(caught.value)
    assert "of_columns.py:hidden' has the parameter 'level', which nothing gives a value" in message
    assert "the samples have the columns lvl, tags" in message and "prompt, finish_reason, num_tokens" in message
    assert "'hidden.level'" in message and "--keep level" in message and "\n" not in message


def test_check_says_so_too(verifier):
    samples = [sample(index, "x" * (index % 3), level=index % 4) for index in range(12)]
    assert [level for level, _ in lint(verifier("by_level"), samples, {}, 10.0)].count("error") == 0
    with pytest.raises(UserError, match="'level', which nothing gives a value: the samples have no columns"):
        lint(verifier("by_level"), [RewardInput(0, "", "")], {}, 10.0)


class Prompts:
    """A prompt file as the check sees it."""

    def __init__(self, columns=(), choices=()):
        self.path = "p.mindrecord"
        self.header = self
        self.columns, self.verifier_choices = columns, choices


def test_prompts_without_a_column_are_refused_before_anything_runs(verifier, tmp_path):
    def selection(*names, **keys):
        return Selection.from_config(RewardSection(verifier_function=tuple(map(verifier, names)), **keys))

    (tmp_path / "of_columns.py").write_text(FUNCTIONS + "\nraise SystemExit('it was run')\n")
    selection("by_level", "with_all", "both").check_prompts(Prompts(("level", "tags")))
    with pytest.raises(UserError, match="'level', which nothing gives a value: prompts of p.mindrecord have the col"):
        selection("plain", "both").check_prompts(Prompts(("tags",)))
    selection("with_default", "with_all", "plain", "hidden").check_prompts(Prompts())  # the last cannot be read
    selection("by_level", options={"by_level.weight": "3"}).check_prompts(Prompts(("level",)))
    # A verifier that no prompt chooses needs nothing.
    chosen = selection("plain", "by_level", by_choice=(verifier("by_level"),))
    chosen.check_prompts(Prompts(choices=("",)))
    with pytest.raises(UserError, match="have no columns"):
        chosen.check_prompts(Prompts(choices=("", "by_level")))
    Selection.from_config(RewardSection(verifier_function=("accuracy_reward", "no_such"))).check_prompts(Prompts())


def test_signatures_are_read_as_python_has_them(tmp_path):
    (tmp_path / "shapes.py").write_text(SHAPES)
    scope = {}
    exec(SHAPES, scope)
    for name, function in [(name, scope[name]) for name in "abc"] + [("Game.reset", scope["Game"].reset)]:
        read = declared_signature(tmp_path / "shapes.py", name).parameters.values()
        real = inspect.signature(function).parameters.values()
        assert [(p.name, p.kind, p.default is p.empty) for p in read] == [
            (p.name, p.kind, p.default is p.empty) for p in real
        ]
    (tmp_path / "made.py").write_text("import functools\n@functools.cache\ndef f(x): ...\ng = f\nclass H: ...\n")
    for name in ("f", "g", "H.reset", "none"):
        assert declared_signature(tmp_path / "made.py", name) is None
    (tmp_path / "broken.py").write_text("def f(")
    assert declared_signature(tmp_path / "broken.py", "f") is None
    assert declared_signature(tmp_path / "none.py", "f") is None


def test_the_names_that_columns_cannot_have_are_those_that_reward_functions_know():
    assert {*registry.CONTEXT_KEYWORDS, "completion", "answer"} == {*SAMPLE_NAMES}
    assert {*SAMPLE_NAMES} <= {*RewardInput.__dataclass_fields__}
