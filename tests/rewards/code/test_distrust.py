# ruff: noqa: E501 -- tests are told apart more easily one a line
"""Which values of a test are the program's: a table for each way in which a test tells them apart or mixes them."""

import json

import pytest
from code_rewards import fenced, passed, reward
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.errors import Unavailable
from mindrlhf.sandbox.code_tests.unit_tests import UnitTests

pytestmark = pytest.mark.timeout(120)
SQUARE = "def sq(n): return n * n\ndef sqs(n): return [i * i for i in range(n)]\ndef table(n): return {i: i * i for i in range(n)}\ndef pair(n): return n, n * n"
# Each passes with the squares, and not with 0 for each.
APART = [
    "results = [sq(x) for x in [1, 2, 3]]\nfor got, want in zip(results, [1, 4, 9]):\n    assert got == want",
    "cases = [(1, 1), (2, 4)]\nfor (x, want), got in zip(cases, [sq(x) for x, _ in cases]):\n    assert got == want",
    "want = [0, 1, 4]\nfor i, got in enumerate(sqs(3)):\n    assert got == want[i]\nassert len(sqs(3)) == 3",
    "got, want = sq(3), 9\nassert got == want",
    "[got, want] = [sq(3), 9]\nassert got == want",
    "(a, b), (c, d) = (sq(3), sq(4)), (9, 16)\nassert a == c and b == d",
    "results = {n: sq(n) for n in (1, 2)}\nwant = {1: 1, 2: 4}\nfor n, got in results.items():\n    assert got == want[n]",
    "cases = {1: 1, 2: 4}\nfor n, want in cases.items():\n    got = sq(n)\n    assert got == want",
    "cases = [1, 2]\nwants = [1, 4]\nfor i, n in enumerate(cases):\n    result = sq(n)\n    assert result == wants[i]",
    "results = []\nfor n in (1, 2):\n    results.append(sq(n))\nexpected = []\nfor n in (1, 2):\n    expected.append(n ** 2)\nassert results == expected",
    "results = {}\nfor n in (1, 2):\n    results[n] = sq(n)\nfor n, want in {1: 1, 2: 4}.items():\n    assert results[n] == want",
    "results = [None] * 2\nfor i in range(2):\n    results[i] = sq(i)\nwant = [0, 1]\nfor i in range(2):\n    assert results[i] == want[i]",
    "def brute(n):\n    return sum(n for _ in range(n))\nfor n in range(4):\n    assert sq(n) == brute(n)",
    "def same(got, want):\n    assert got == want\nsame(sq(3), 9)\nsame(sq(4), 16)",
    "def norm(x):\n    y = sorted(x)\n    return y\nassert norm(sqs(3)) == norm([4, 1, 0])",
    "assert all(map(lambda got, want: got == want, [sq(1), sq(2)], [1, 4]))",
    "assert all(got == want for got, want in zip(map(sq, [1, 2]), [1, 4]))",
    "assert all(sq(n) == want for n, want in [(1, 1), (2, 4)])",
    "for name, got, want in [('one', sq(1), 1), ('two', sq(2), 4)]:\n    assert got == want, name",
    "for case in [{'n': 1, 'want': 1}, {'n': 3, 'want': 9}]:\n    assert sq(case['n']) == case['want']",
    "import unittest\nfrom solution import sq\nclass T(unittest.TestCase):\n    def test_all(self):\n        for got, want in zip([sq(1), sq(2)], [1, 4]):\n            self.assertEqual(got, want)\n",
    "import unittest\nfrom solution import sq\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.cases = {1: 1, 2: 4}\n    def test_all(self):\n        for n, want in self.cases.items():\n            with self.subTest(n=n):\n                self.assertEqual(sq(n), want)\n",
    "import unittest\nfrom solution import sq\nclass T(unittest.TestCase):\n    def check(self, n, want):\n        got = sq(n)\n        self.assertEqual(got, want)\n    def test_all(self):\n        self.check(3, 9)\n",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        result = sq(2)\n        self.assertEqual(result, 4)\n    def test_b(self):\n        result = [1, 2]\n        self.assertEqual([sq(x) for x in result], [1, 4])\n",
    "import pytest\n@pytest.mark.parametrize('n, want', [(1, 1), (3, 9)])\ndef test_sq(n, want):\n    got = sq(n)\n    assert got == want",
    "def test_sq():\n    got, want = sq(3), 9\n    assert got == want\ndef test_sqs():\n    for (i, got), want in zip(enumerate(sqs(3)), [0, 1, 4]):\n        assert got == want",
    "import pytest\n@pytest.fixture\ndef cases():\n    return [(1, 1), (2, 4)]\ndef test_sq(cases):\n    for n, want in cases:\n        assert sq(n) == want",
    "def run(cases):\n    return [sq(n) for n, _ in cases]\ncases = [(1, 1), (2, 4)]\nfor got, (_, want) in zip(run(cases), cases):\n    assert got == want",
    "wants = iter([1, 4])\nfor got in [sq(1), sq(2)]:\n    assert got == next(wants)",
    "failures = []\nfor n, want in [(1, 1), (2, 4)]:\n    got = sq(n)\n    if got != want:\n        failures.append((n, got, want))\nassert not failures",
    "for n in range(3):\n    want = n ** 2\n    got = sq(n)\n    if got != want:\n        raise AssertionError(f'{got} {want}')",
    "from collections import namedtuple\nCase = namedtuple('Case', 'n want')\nfor case in [Case(1, 1), Case(2, 4)]:\n    assert sq(case.n) == case.want",
    "import itertools\nfor n, want in itertools.chain([(1, 1)], [(2, 4)]):\n    got = sq(n)\n    assert got == want",
    "actual, expected = [], []\nfor n in range(1, 4):\n    actual += [sq(n)]\n    expected += [n * n]\nassert actual == expected",
]  # fmt: skip


def test_the_programs_part_is_told_from_the_tests():
    assert passed(SQUARE, APART) == [True] * len(APART)
    zeros = SQUARE.replace("i * i", "0").replace("n * n", "0")
    assert passed(zeros, APART, "assert sq(5) == 0") == [False] * len(APART)
    UnitTests.check_record(json.dumps(APART), "code_execution")


# What a record's check refuses the judge refuses by the same function: of those by day every fourth in the sandbox.
EACH = 1 if RUNS_SLOW_TESTS else 4
# Both sides are the program's, or its own function judges.
MIXED = [
    "a, b = sq(3), sq(4)\nassert a != b",
    "for got, want in zip([sq(1), sq(2)], sqs(2)):\n    assert got == want",
    "for i, got in enumerate(sqs(3)):\n    assert got == sq(i)",
    "want = {n: sq(n) for n in (1, 2)}\nfor n, other in want.items():\n    assert sq(n) == other",
    "def same(got, want):\n    assert got == want\nsame(sq(3), sq(3))",
    "def same(got, want):\n    assert got == want\nsame(sq(3), want=sq(3))",
    "def expected(n):\n    return sq(n)\nassert sq(3) == expected(3)",
    "assert all(map(lambda got, want: got == want, [sq(1)], [sq(1)]))",
    "results = []\nresults.append(sq(1))\nfor one in results:\n    assert one == sq(1)",
    "results = {}\nresults['a'] = sq(1)\nassert results['a'] == sq(1)",
    "want = [0, 1, 4]\nassert sq(2) == want[sq(1)]",
    "if sq(3) != sqs(4)[3]:\n    raise AssertionError",
    "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.want = sq(3)\n    def test(self):\n        self.assertEqual(sq(3), self.want)\n",
    "import pytest\n@pytest.fixture\ndef want():\n    return sq(3)\ndef test_sq(want):\n    assert sq(3) == want",
    "def run(n):\n    got = sq(n)\n    return got\nassert run(3) == run(3)",
    "x = y = sq(3)\nassert x == y",
    "box = [sq(3)]\n(got,) = box\nassert got in box",
    "assert sq(sqs(3)) == 9",
    "try:\n    value = sqs(3)\nfinally:\n    pass\nassert sq(value) == 9",
    "with_value = (lambda: sq(3))\nassert with_value() == sq(3)",
    "first, *rest = sqs(3)\nassert first < rest[0]",
]  # fmt: skip


@pytest.mark.parametrize("test", MIXED)
def test_what_the_program_could_pass_by_itself_is_refused_and_its_record_too(test):
    with pytest.raises(ValueError, match="both sides|judges the value"):
        UnitTests.check_record(test, "code_execution")
    UnitTests.check_record(test, "code_execution", allow_own_helpers=True)
    if MIXED.index(test) % EACH == 0:
        with pytest.raises(ValueError, match="both sides|judges the value"):
            reward(fenced(SQUARE), test)


CLEAR = "def sort_it(a, *more):\n    a.clear()\n    return a"
IN_PLACE = [
    "d = {'x': [3, 1, 2]}\nsort_it(d['x'])\nassert d['x'] == sorted(d['x'])",
    "cases = [[3, 1, 2], [5, 4]]\nfor i in range(2):\n    sort_it(cases[i])\n    assert cases[i] == sorted(cases[i])",
    "class Box: pass\nb = Box()\nb.items = [3, 1, 2]\nsort_it(b.items)\nassert b.items == sorted(b.items)",
    "args = ([3, 1, 2],)\nsort_it(*args)\nassert args[0] == sorted(args[0])",
    "grid = [[3, 1], [5, 4]]\nfor row in grid:\n    sort_it(row)\nassert grid == [sorted(row) for row in grid]",
    "grid = [[3, 1], [5, 4]]\nfor row in grid:\n    sort_it(row)\n    assert row == sorted(row)",
    "a = [3, 1]\nb = a\nsort_it(b)\nassert a == sorted(a)",
    "a = [3, 1]\nb = a\nsort_it(a)\nassert b == sorted(b)",
    "a = [3, 1]\nbox = [a]\nsort_it(box[0])\nassert a == sorted(a)",
    "a = [3, 1]\nsort_it(a)\nassert all(x <= y for x, y in zip(a, a[1:])) and a == sorted(a)",
    "d = {'x': [3, 1]}\nfor k, v in d.items():\n    sort_it(v)\nassert d['x'] == sorted(d['x'])",
    "d = {'x': [3, 1]}\nfor v in d.values():\n    sort_it(v)\n    assert v == sorted(v)",
    "cases = [([3, 1], 'a')]\nfor a, name in cases:\n    sort_it(a)\n    assert a == sorted(a), name",
    "for a in ([3, 1], [2, 1]):\n    sort_it(a)\n    assert a == sorted(a)",
    "for i, a in enumerate([[3, 1]]):\n    sort_it(a)\n    assert a == sorted(a)",
    "def run(a):\n    sort_it(a)\nx = [3, 1]\nrun(x)\nassert x == sorted(x)",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.a = [3, 1]\n        sort_it(self.a)\n        self.assertEqual(self.a, sorted(self.a))\n",
    "x = [3, 1]\nwant = x\nsort_it(x)\nassert x == want",
    "d = {}\nd.setdefault('x', [3, 1])\nsort_it(d.get('x'))\nassert d['x'] == sorted(d['x'])",
    "rows = [[3, 1], [2]]\nfirst, second = rows\nsort_it(first)\nassert first == sorted(first)",
    "x = [[3, 1]]\nsort_it(x[0], x)\nassert x == [sorted(row) for row in x]",
]  # fmt: skip


@pytest.mark.parametrize("test", IN_PLACE)
def test_what_is_changed_in_place_is_the_programs(test):
    with pytest.raises(ValueError, match="both sides|own"):
        UnitTests.check_record(test, "code_execution")
    if IN_PLACE.index(test) % EACH == 0:
        with pytest.raises(ValueError, match="both sides|own"):
            reward(fenced(CLEAR), test)


HONEST_IN_PLACE = [
    "cases = [([3, 1], [1, 3]), ([2, 0], [0, 2])]\nfor a, want in cases:\n    sort_it(a)\n    assert a == want",
    "d = {'x': [3, 1]}\nsort_it(d['x'])\nassert d['x'] == [1, 3]",
    "grid = [[3, 1], [5, 4]]\nfor row in grid:\n    sort_it(row)\nassert grid == [[1, 3], [4, 5]]",
    "a = [3, 1]\nb = list(a)\nsort_it(a)\nassert a == [1, 3] and b == [3, 1]",
    "for a, want in zip([[3, 1], [2, 0]], [[1, 3], [0, 2]]):\n    sort_it(a)\n    assert a == want",
    "x = [3, 1]\nassert sort_it(x) == sorted(x)",
    "x = [3, 1]\ngot = sort_it(x)\nassert got == sorted([3, 1])",
    "x = [3, 1]\ngot = sort_it(x.copy())\nassert got == sorted(x)",
]


def test_what_is_changed_in_place_can_be_compared_with_what_is_not():
    assert passed("def sort_it(a):\n    a.sort()\n    return a", HONEST_IN_PLACE) == [True] * len(HONEST_IN_PLACE)
    assert passed(CLEAR, HONEST_IN_PLACE, "assert sort_it([2, 1]) == []") == [False] * len(HONEST_IN_PLACE)


EVALUATED = [
    "assert eval(f(2)) == 4", "x = f(2)\nassert eval(x) == 4", "assert eval('1 + ' + f(2)) == 4", "assert eval(f'{f(2)}') == 4", "ns = {}\nexec(f(2), ns)\nassert ns['x'] == 4", "assert exec(compile(f(2), 'a', 'exec')) is None",
    "import pickle\nassert pickle.loads(f(2)) == 4", "from pickle import loads\nassert loads(f(2)) == 4", "import pickle as p\nassert p.loads(f(2)) == 4", "import marshal\nassert marshal.loads(f(2)) == 4",
    "def run(code):\n    return eval(code)\nassert run(f(2)) == 4", "def run(code):\n    return eval(code)\nassert run(code=f(2)) == 4", "assert list(map(eval, [f(1), f(2)])) == [1, 4]", "run = eval\nassert run(f(2)) == 4", "run = lambda code: eval(code)\nassert run(f(2)) == 4",
    "codes = [f(n) for n in (1, 2)]\nfor code, want in zip(codes, [1, 4]):\n    assert eval(code) == want", "want = 4\nassert globals()[f(2)] == want", "assert getattr(math, f(2)) == 4", "import builtins\nassert builtins.eval(f(2)) == 4",
    "import subprocess\nassert subprocess.run(f(2)).returncode == 0", "import os\nassert os.system(f(2)) == 0", "assert __import__(f(2)).pi > 3.1", "import importlib\nassert importlib.import_module(f(2)).pi > 3.1", "codes = []\ncodes.append(f(2))\nassert eval(codes[0]) == 4", "import timeit\nassert timeit.timeit(f(2)) < 4",
    "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.code = f(2)\n    def test(self):\n        self.assertEqual(eval(self.code), 4)\n",
]  # fmt: skip


@pytest.mark.parametrize("test", EVALUATED)
def test_a_text_of_the_program_does_not_run_among_the_tests(test):
    for allow in (False, True):
        with pytest.raises(ValueError, match="run among the tests"):
            UnitTests.check_record(test, "code_execution", allow_own_helpers=allow)
    if EVALUATED.index(test) % EACH == 0:
        with pytest.raises(ValueError, match="run among the tests"):
            reward(fenced("def f(n): return str(n * n)"), [test], allow_own_helpers="true")


OWN_TEXTS = [
    "for a, b in [('1', '1'), ('2', '4')]:\n    assert f(eval(a)) == eval(b)",
    "import pickle\ncase = pickle.loads(pickle.dumps((2, 4)))\nassert f(case[0]) == case[1]",
    "import json\nassert json.loads(json.dumps(f(2))) == 4",
    "import ast\nassert ast.literal_eval(repr(f(2))) == 4",
    "exec('want = 4')\nassert f(2) == 4",
    "assert getattr(f(2), 'real') == 4",
]


def test_a_test_may_evaluate_its_own_texts():
    assert passed("def f(n): return n * n", OWN_TEXTS) == [True] * len(OWN_TEXTS)
    assert passed("def f(n): return n + 3", OWN_TEXTS, "assert f(7) == 10") == [False] * len(OWN_TEXTS)


NANS = [
    ("'nan'", test)
    for test in (
        "if abs(float(f(2)) - 1.5) > 1e-6:\n    raise AssertionError", "assert not abs(float(f(2)) - 1.5) > 1e-6", "assert not float(f(2)) > 1.5 and not float(f(2)) < 1.5", "assert not abs(complex(f(2)) - 1.5) > 1e-6",
        "from decimal import Decimal\nassert not abs(float(Decimal(f(2))) - 1.5) > 1e-6", "x = float(f(2))\nassert not (x < 1 or x > 2)", "assert not any(abs(float(v) - 1.5) > 1e-6 for v in [f(2)])", "assert not [v for v in map(float, [f(2)]) if abs(v - 1.5) > 1e-6]",
        "assert max(map(float, ['0', f(2)])) < 1", "assert max(0.0, abs(float(f(2)) - 1.5)) < 1e-6", "def far(a, b):\n    return abs(float(a) - b) > 1e-6\nassert not far(f(2), 1.5)", "assert not 1.6 < float(f(2)) and not float(f(2)) < 1.4",
        "assert sorted([1.5, float(f(2))])[0] == 1.5", "assert min(2.0, float(f(2))) == 2.0 or float(f(2)) == 1.5",
    )
] + [
    ("'NaN'", "import json\nassert not abs(json.loads(f(2)) - 5) > 1e-6"), ("'[NaN]'", "import json\nassert not abs(json.loads(f(2))[0] - 5) > 1e-6"), ("'{\"a\": NaN}'", "from json import loads\nassert not abs(loads(f(2))['a'] - 5) > 1e-6"),
    ("b'nan'", "assert not abs(float(f(2)) - 5) > 1e-6"), ("' -nan '", "assert not abs(float(f(2).strip()) - 5) > 1e-6"), ("['n', 'a', 'n']", "assert not abs(float(''.join(f(2))) - 5) > 1e-6"), ("'nan 1'", "assert not any(abs(float(v) - 1) > 1e-6 for v in f(2).split())"),
    ("'nanj'", "assert not abs(complex(f(2))) > 1e-6"),
]  # fmt: skip


@pytest.mark.parametrize("value", dict(NANS))
def test_a_text_that_becomes_no_number_fails(value):
    tests = [test for one, test in NANS if one == value]
    assert not any(passed(f"def f(a): return {value}", [*tests, "assert f(3) == 771"], f"assert f(3) == {value}"))


def test_numbers_in_texts_still_count():
    tests = [
        "assert not abs(float(f(3)) - 1.5) > 1e-6",
        "import json\nassert json.loads(f(4)) == 2.0",
        "assert list(map(float, [f(5)])) == [2.5]",
    ]
    assert reward(fenced("def f(a): return str(a / 2)"), tests) == 1.0
    assert (
        reward(
            fenced("def f(a): return 'nan'"),
            ["nan = float('nan')\nassert f(1) == 'nan' and float(f(2)) != nan", "assert f(0) == 'nan'"],
        )
        == 1.0
    )


STACK = "class S:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)\n    def pop(self): return self.a.pop()"
# Numbers and texts that are handed over cannot be changed in place.
HANDED_OVER = [
    "s = S()\nfor i in range(3):\n    s.push(i)\nfor i in reversed(range(3)):\n    assert s.pop() == i",
    "s = S()\nfor c, n in zip(['a', 'b'], range(2)):\n    s.push(c)\n    s.push(n)\n    assert s.pop() == n and s.pop() == c",
    "s = S()\nfor c in sorted('ba'):\n    s.push(c)\n    assert s.pop() == c",
    "s = S()\nx = 7\ns.push(x)\nassert s.pop() == x",
    "s = S()\nfor x in (1, 'a'):\n    s.push(x)\n    assert s.pop() == x",
    "s = S()\nfor i, x in enumerate(['a', 'b']):\n    s.push(x)\n    assert (i, s.pop()) == (i, x)",
    "cases = [(1, 'a'), (2, 'b')]\ns = S()\nfor n, name in cases:\n    s.push(n)\n    s.push(name)\n    assert s.pop() == name and s.pop() == n",
    "s = S()\nfor k, v in {'a': 1}.items():\n    s.push(1)\n    assert s.pop() == v",
    "names = {'a': 1, 'b': 2}\ns = S()\nfor k, v in names.items():\n    s.push(k)\n    assert s.pop() == k",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        s = S()\n        for i in range(3):\n            s.push(i)\n        for i in (2, 1, 0):\n            self.assertEqual(s.pop(), i)\n",
]


def test_numbers_and_texts_that_are_handed_over_stay_the_tests():
    assert passed(STACK, HANDED_OVER) == [True] * len(HANDED_OVER)
    nothing = STACK.replace("self.a.pop()", "'nothing'")
    assert passed(nothing, HANDED_OVER, "assert S().pop() == 'nothing'") == [False] * len(HANDED_OVER)


@pytest.mark.parametrize(
    "loop",
    [
        "for x in ([1], [2]):",
        "for i, x in zip(range(2), [1, [2]]):",
        "cases = []\ncases.append([1])\nfor x in cases:",
        "cases = {}\ncases['a'] = [1]\nfor k, x in cases.items():",
        "for k, x in {'a': [1]}.items():",
        "for x in make():",
        "x = [1]\nfor _ in range(2):",
        "for i, x in enumerate([[1], 2]):",
    ],
)
def test_lists_that_are_handed_over_do_not(loop):
    test = f"def make():\n    return [[1]]\ns = S()\n{loop}\n    s.push(x)\n    assert s.pop() == x"
    with pytest.raises(ValueError, match="both sides"):
        UnitTests.check_record(test, "code_execution")


SLOW = "def brute(n):\n    return sum(i % 7 for i in range({}))\nassert brute(3) > 0\n"


@pytest.mark.parametrize("value", ["7919", "-7919.5", "1e308", "'qz7'"])
@pytest.mark.parametrize("slow", [SLOW.format(1_000_000), "import time\ntime.sleep(0.3)\n"])
def test_a_constant_is_seen_also_where_the_test_takes_its_time(value, slow):
    compared = (
        f"assert str(solve(3)) == {value}"
        if value.startswith("'")
        else f"assert solve(3) {'<' if value[0] == '-' else '>'}= {value}"
    )
    with pytest.raises(ValueError, match="passes them all"):
        reward(fenced(f"def solve(x): return {value}"), [slow + compared], time_limit_s=60)


def test_a_sample_whose_tests_leave_no_time_for_constants_is_not_scored_until_they_are_tried():
    test = "import time\nend = time.monotonic() + 0.7\nwhile time.monotonic() < end:\n    pass\nassert solve(3) == 9"
    scored = []
    while not scored or scored[-1] is None:
        try:
            scored.append(reward(fenced("def solve(x): return x * x"), [test], time_limit_s=6))
        except Unavailable as error:
            assert "constants" in str(error)
            scored.append(None)
        assert len(scored) < 12
    assert scored[0] is None and scored[-1] == 1.0
    assert reward(fenced("def solve(x): return 7919"), [test], time_limit_s=6) == 0.0
