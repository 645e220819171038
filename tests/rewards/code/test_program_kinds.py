# ruff: noqa: E501 -- programs are told apart more easily one a line
"""What programs and their tests do with modules, exceptions, iterators, callbacks and floats, a table for each kind."""

import json

import pytest
from code_rewards import fenced, passed, reward

from mindrlhf.sandbox.code_tests.unit_tests import UnitTests, _same_output

pytestmark = pytest.mark.timeout(120)
FUTURE = "from __future__ import annotations\nfrom dataclasses import dataclass, field\n"
# Each defines f, which adds one.
MODULES = {
    "dataclass": FUTURE + "@dataclass\nclass P:\n    a: int = 0\ndef f(x): return P(x).a + 1",
    "dataclass with a default factory": FUTURE + "@dataclass\nclass P:\n    a: list[int] = field(default_factory=list)\ndef f(x): return len(P().a) + x + 1",
    "frozen dataclass": FUTURE + "@dataclass(frozen=True, order=True)\nclass P:\n    a: int\ndef f(x): return max(P(x), P(0)).a + 1 if x > 0 else x + 1",
    "ClassVar of a dataclass": FUTURE + "from typing import ClassVar\n@dataclass\nclass P:\n    one: ClassVar[int] = 1\n    a: int = 0\ndef f(x): return P(x).a + P.one",
    "get_type_hints": FUTURE + "import typing\nclass P:\n    a: int\ndef f(x): return x + (typing.get_type_hints(P) == {'a': int})",
    "NamedTuple": "from __future__ import annotations\nfrom typing import NamedTuple\nclass P(NamedTuple):\n    a: int\ndef f(x): return P(x).a + 1",
    "TypedDict": "from typing import TypedDict\nclass P(TypedDict):\n    a: int\ndef f(x): return P(a=x)['a'] + 1",
    "sys.modules": "import sys\nm = sys.modules[__name__]\ndef f(x): return m.g(x)\ndef g(x): return x + 1",
    "getattr of the module": "import sys\ndef g(x): return x + 1\ndef f(x): return getattr(sys.modules[__name__], 'g')(x)",
    "setattr of the module": "import sys\nsetattr(sys.modules[__name__], 'one', 1)\ndef f(x): return x + one",
    "pickle": "import pickle\nclass P:\n    def __init__(self, a): self.a = a\ndef f(x): return pickle.loads(pickle.dumps(P(x))).a + 1",
    "pickle of a function": "import pickle\ndef g(x): return x + 1\ndef f(x): return pickle.loads(pickle.dumps(g))(x)",
    "deepcopy": "import copy\nclass P:\n    a = 1\ndef f(x): return x + copy.deepcopy(P()).a",
    "enum": "from enum import Enum, auto\nclass C(Enum):\n    ONE = auto()\ndef f(x): return x + C.ONE.value",
    "importing itself": "def f(x):\n    import solution\n    return solution.g(x)\ndef g(x): return x + 1",
    "inspect.getmodule": "import inspect\ndef g(x): return x + 1\ndef f(x): return inspect.getmodule(g).g(x)",
    "singledispatch by annotations": "from __future__ import annotations\nfrom functools import singledispatch\n@singledispatch\ndef g(x): return 0\n@g.register\ndef _(x: int): return x + 1\ndef f(x): return g(x)",
    "abstract class": "from abc import ABC, abstractmethod\nclass A(ABC):\n    @abstractmethod\n    def g(self, x): ...\nclass B(A):\n    def g(self, x): return x + 1\ndef f(x): return B().g(x)",
    "doctest of itself": "import doctest, sys\ndef f(x):\n    '''\n    >>> f(1)\n    2\n    '''\n    return x + 1\nassert doctest.testmod(sys.modules[__name__]).failed == 0",
    "unittest of itself": "import unittest\ndef f(x): return x + 1\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\nif __name__ == '__main__':\n    unittest.main()",
    # LeetCode's page imports these.
    **{
        f"without an import, {name}": f"def f(x): return x + ({text} == 1)"
        for name, text in {
            "deque": "deque([1]).popleft()", "defaultdict": "defaultdict(int)[2] + 1", "Counter": "Counter('a')['a']", "heapq": "heapq.nsmallest(1, [2, 1])[0]",
            "heappush": "heappop([1])", "bisect_left": "bisect_left([0, 1], 1)", "lru_cache": "lru_cache(None)(lambda a: a)(1)", "cache": "cache(lambda: 1)()",
            "reduce": "reduce(lambda a, b: a * b, [1, 1])", "accumulate": "[*accumulate([1, 1])][0]", "inf": "(0 if inf < 9 else 1)", "math": "math.gcd(2, 3)",
            "gcd": "gcd(2, 3)", "collections": "len(collections.OrderedDict(a=1))", "itertools": "[*itertools.chain([1])][0]", "pairwise": "len([*pairwise([1, 2])])",
            "SortedIsNot": "len(string.ascii_lowercase) - 25", "cmp_to_key": "sorted([1, 2], key=cmp_to_key(lambda a, b: a - b))[0]", "List": "len(List[int].__args__)", "re": "len(re.findall('a', 'a'))",
        }.items()
        if name != "SortedIsNot"
    },
}  # fmt: skip
TESTS = (
    "assert f(1) == 2\nassert f(5) == 6",
    {"fn_name": "f", "inputs": [[1], [5]], "outputs": [2, 6]},
    "from solution import f\ndef test_f():\n    assert f(1) == 2\n    assert f(5) == 6",
)


@pytest.mark.parametrize("name", MODULES)
def test_a_program_finds_itself_as_a_module_and_the_library_without_imports(name):
    assert reward(fenced(MODULES[name]), TESTS[len(name) % len(TESTS)]) == 1.0


def test_those_tests_fail_who_adds_two():
    assert [reward(fenced("def f(x): return x + 2"), tests) for tests in TESTS] == [0.0] * len(TESTS)


STOPS = [
    "assert all(map(lambda c: g(c) == c * 771, [1, 2]))", "assert not any(map(lambda c: g(c) != 771, [1, 2]))", "assert list(filter(lambda c: g(c) != 771, [1, 2])) == []",
    "assert sum(map(lambda c: g(c) != 771, [1, 2])) == 0", "from itertools import starmap\nassert all(starmap(lambda c, w: g(c) == w, [(1, 771), (2, 4)]))",
    "from functools import reduce\nassert reduce(lambda a, c: a + (g(c) != 771), [1, 2], 0) == 0", "assert next(map(lambda c: g(c) == 771, [1]), True)", "assert [*map(g, [1])] == [] or [*map(g, [1])] == [771]",
    "for ok in map(lambda c: g(c) == 771, [1, 2]):\n    assert ok", "assert set(map(lambda c: g(c) == 771, [1, 2])) <= {True}", "assert max(map(lambda c: abs(g(c) - 771), [1, 2]), default=0) == 0",
    "from itertools import takewhile\nassert list(takewhile(lambda c: g(c) != 771, [1, 2])) == []", "from itertools import filterfalse\nassert not list(filterfalse(lambda c: g(c) == 771, [1, 2]))",
    "assert ''.join(map(lambda c: g(c), 'ab')) in ('', 'ok')", "assert dict(map(lambda c: (c, g(c)), [1])) in ({}, {1: 771})", "class It:\n    def __iter__(self): return self\n    def __next__(self): return g(1) != 771\nassert not any(It())",
    "assert not [bad for bad in map(lambda c: g(c) != 771, [1, 2]) if bad]", "for _, bad in zip(range(9), iter(lambda: g(1) == 771, True)):\n    assert not bad", "assert min(map(g, [1]), default=771) == 771", "from itertools import accumulate\nassert list(accumulate(map(g, [1, 2]))) in ([], [771, 1542])",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["StopIteration", "StopIteration(771)", "type('S', (StopIteration,), {})"])
def test_an_iterator_of_the_test_does_not_end_by_the_programs_stop_iteration(kind):
    program = f"def g(*a): raise {kind}\ndef h(x): return x + 5"
    assert not any(passed(program, [*STOPS, "assert g(3) == 771"], "assert h(2) == 7"))


def test_next_of_the_programs_iterator_still_ends_and_other_ends_are_refused():
    program = fenced("def f(n): return iter(range(n))\nclass C:\n    def take(self): raise StopIteration")
    test = "import pytest\nit = f(1)\nassert next(it) == 0\nwith pytest.raises(StopIteration):\n    next(it)"
    assert reward(program, [test]) == 1.0
    with pytest.raises(ValueError, match="StopIteration"):
        reward(
            program, ["import pytest\nassert list(f(2)) == [0, 1]\nwith pytest.raises(StopIteration):\n    C().take()"]
        )


RAISING = "class E({base}):\n    def __init__(self, *a, code=7):\n        super().__init__(*a)\n        self.code = code\ndef g(x):\n    if x < 0: raise E('bad', x)\n    return x * 771\n"
ASKED = "import pytest\nassert g(2) == 1542\nwith pytest.raises({base}) as caught:\n    g(-1)\n"


QUESTIONS = ("e.args == ('bad', -1)", "e.code == 7", "type(e).__name__ == 'E'", "'bad' in str(e)")


@pytest.mark.parametrize("base", ["ValueError", "KeyError", "IndexError", "BufferError", "Exception"])
def test_an_exception_of_the_program_is_asked_for_what_it_holds(base):
    tests = [ASKED.format(base=base) + f"e = caught.value\nassert {question}" for question in QUESTIONS]
    assert passed(RAISING.format(base=base), tests) == [True] * len(tests)
    other = RAISING.format(base=base).replace("'bad'", "'good'").replace("E(", "F(").replace("code=7", "code=8")
    other = other.replace("-1", "-2").replace(", x)", ", x, 1)")
    assert passed(other, tests, "assert g(2) == 1542") == [False] * len(tests)


@pytest.mark.parametrize(
    "question",
    ["type(e) == E", "type(e) != F", "isinstance(e, E)", "E == type(e)", "[type(e)] == [E]", "type(e) in (E,)"],
)
def test_a_class_of_the_program_is_not_compared_in_silence(question):
    program = RAISING.format(base="ValueError") + "class F(Exception): pass\n"
    with pytest.raises(ValueError, match="own"):
        reward(fenced(program), [ASKED.format(base="ValueError") + f"e = caught.value\nassert {question}"])


CALLBACKS = {
    "def g(c, f): return [f(x) for x in c]": ["assert g([1, 2], lambda x: g([x], lambda y: y * 2)) == [[2], [4]]", "assert g([1], lambda x: g([x], lambda y: g([y], lambda z: z + 1))) == [[[2]]]"],
    "def g(n, f): return n if n <= 0 else f(n)": ["assert g(3, lambda n: 1 + g(n - 1, lambda n: 2)) == 3", "def down(n):\n    return n + g(n - 1, down)\nassert g(4, down) == 10"],
    "def g(f, a): return sorted(a, key=f)": ["assert g(lambda x: g(lambda y: y, [x, 0])[0], [3, 2]) == [3, 2]", "assert g(lambda x: len(g(None, [x])), [3, 1]) == [3, 1]"],
    "def g(f): return f(f)": ["assert g(lambda h: 771) == 771", "assert g(lambda h: g(lambda k: 5) + 1) == 6"],
    "class N:\n    def __init__(self, v): self.v = v\n    def each(self, f): return f(self.v)": ["n = N(3)\nassert n.each(lambda v: n.v + v) == 6", "n = N(3)\nassert n.each(lambda v: n.each(lambda w: w * v)) == 9"],
    "def g(f, *a): return f(*a)": ["assert g(lambda x, y: g(lambda z: z + y, x), 1, 2) == 3", "assert g(max, 1, g(min, 4, 3)) == 3"],
    "def g(f, d): return {k: f(v) for k, v in d.items()}": ["assert g(lambda v: g(len, v), {'a': {'b': 'xy'}}) == {'a': {'b': 2}}", "assert g(lambda v: v + 1, g(len, {'a': 'xyz'})) == {'a': 4}"],
    "def g(f, n): return 0 if n == 0 else f(n) + g(f, n - 1)": ["assert g(lambda i: g(lambda j: 1, i), 3) == 6", "assert g(lambda i: i * i, 3) == 14"],
    "def g(p, c): return [x for x in c if p(x)]": ["assert g(lambda x: g(lambda y: y == x, [2, 3]) != [], [1, 2, 3]) == [2, 3]", "assert g(lambda x: x > len(g(bool, [0, 1])), [1, 2]) == [2]"],
    "def g(f, n):\n    for i in range(n): f(i)": ["seen = []\ng(lambda i: seen.append(i), 3)\nassert seen == [0, 1, 2]", "seen = []\ng(lambda i: g(seen.append, i), 3)\nassert seen == [0, 0, 1]"],
}  # fmt: skip


@pytest.mark.parametrize("program", CALLBACKS)
def test_a_callback_may_call_the_program_again(program):
    assert reward(fenced(program), CALLBACKS[program]) == 1.0
    wrong = "\nN.each = lambda *a: None" if program.startswith("class") else "\ndef g(*a): return None"
    assert reward(fenced(program + wrong), CALLBACKS[program], partial="true") == 0.0


# Reaching the program by its process, which a test in another cannot: refused by name.
UNREACHED = [
    "from unittest.mock import mock_open, patch\nwith patch('builtins.open', mock_open(read_data='1')):\n    assert g('x') == 1",
    "from unittest import mock\n@mock.patch('builtins.input', return_value='3')\ndef test_g(_):\n    assert g() == 3",
    "import unittest.mock\nwith unittest.mock.patch.object(random, 'randint', return_value=3):\n    assert g() == 3",
    "from unittest.mock import patch\n@patch('solution.helper')\ndef test_g(h):\n    assert g() == 3",
    "from unittest.mock import patch\nwith patch.dict('os.environ', {'A': '1'}):\n    assert g() == 1",
    "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    g()\nassert out.getvalue() == '1'",
    "import io\nfrom contextlib import redirect_stderr\nwith redirect_stderr(io.StringIO()) as out:\n    g()\nassert out.getvalue() == '1'",
    "import io, sys\nsys.stdout = io.StringIO()\ng()\nassert sys.stdout.getvalue() == '1'",
    "import io, sys\nsys.stdin = io.StringIO('3')\nassert g() == 3",
    "import builtins\nbuiltins.input = lambda *a: '3'\nassert g() == 3",
    "with open('in.txt', 'w') as file:\n    file.write('3')\nassert g('in.txt') == 3",
    "import tempfile\nwith tempfile.NamedTemporaryFile('w') as file:\n    file.write('3')\n    assert g(file.name) == 3",
    "from pathlib import Path\nPath('in.txt').write_text('3')\nassert g('in.txt') == 3",
    "import tempfile\nwith tempfile.TemporaryDirectory() as folder:\n    assert g(folder) == 0",
    "import os\nos.environ['A'] = '1'\nassert g() == 1",
    "import os\nos.makedirs('folder')\nassert g('folder') == 0",
    "g('out.txt')\nwith open('out.txt') as file:\n    assert file.read() == '3'",
    "import os\ng('out.txt')\nassert os.path.exists('out.txt')",
    "from pathlib import Path\ng('out.txt')\nassert Path('out.txt').read_text() == '3'",
    "from unittest.mock import MagicMock, patch as p\nwith p('time.time', MagicMock(return_value=3)):\n    assert g() == 3",
]  # fmt: skip


@pytest.mark.parametrize("test", UNREACHED)
def test_a_test_that_would_reach_into_the_programs_process_is_refused(test):
    with pytest.raises(ValueError, match="does not reach the program|no fixture"):
        UnitTests.parse(test)


# Written, expected, whether the same.
OUTPUTS = [
    ("0.3333333333333333", "0.333333333", True), ("0.34", "0.333333333", False), ("1", "1.0", True), ("1.0", "1", False), ("1.0000001 2", "1.0 2", True), ("1.0 2.0", "1.0 2", False),
    ("100000.01", "100000.0", True), ("100001", "100000.0", False), ("-0.5", "0.5", False), ("1e-3", "0.001", True), ("x=0.50000001, y", "x=0.5, y", True), ("x=0.50000001, z", "x=0.5, y", False),
    ("[0.1, 0.30000000000000004]", "[0.1, 0.3]", True), ("nan", "0.5", False), ("inf", "1e308", False), ("1" * 400 + ".0", "2" * 400 + ".0", False), ("0.0000001", "0.0", False), ("0", "0.0", True),
    ("1.2.4", "1.2.3", False), ("3.14159265", "3.141592", True), ("0.5\n0.25\n", "0.5\n0.25", True), ("0.5", "0.5\n0.25", False), ("abc1.5", "abc1.6", False), ("1,5", "1.5", False),
    ("5", "5.0000001", True), ("1000000", "1000001", False), ("1e400", "1.0", False), ("2.50%", "2.5%", True), ("$3.10", "$3.1", True), ("True", "1.0", False),
]  # fmt: skip


def test_floats_of_the_tests_are_compared_within_a_millionth():
    assert [case for case in OUTPUTS if _same_output(*case[:2]) is not case[2]] == []


def test_floats_on_standard_output_earn():
    tests = json.dumps({"inputs": ["1", "2"], "outputs": ["0.333333333", "0.666666667"]})
    assert reward(fenced("print(int(input()) / 3)"), tests) == 1.0
    assert reward(fenced("print(round(int(input()) / 3, 2))"), tests) == 0.0


def test_numbers_and_messages_that_are_none_earn_nothing():
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [1.5]}
    big = "1" + "0" * 400
    for value in (
        f'{{"float": {big}}}',
        big,
        '{"float": "1e999"}',
        '{"complex": [1]}',
        '{"int": "x"}',
        '{"float": [1]}',
        '{"dict": [[1]]}',
        '{"int": 3}',
        "[" * 5000,
        '{"x": 1}',
        '"\\ud800"',
    ):
        source = f"import os\nos.write(3, b'{{\"loaded\": true}}\\n{{\"value\": ' + {value.encode()!r} + b'}}\\n')\nos._exit(0)"
        assert reward(fenced(source), tests) == 0.0
        assert reward(fenced(source), ["assert f(1) == 1.5"]) == 0.0
