# ruff: noqa: E501 -- programs are told apart more easily one a line
"""Unit tests in the forms in which data sets publish them, each with a right program and a wrong one; and what is refused.

Every text is written for this file in the style of what its name says, none is copied.
"""

ADD = "def add(a, b):\n    return a + b"
SUB = "def add(a, b):\n    return a - b"
FACTORIAL = "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)"
SOLUTION = "class Solution:\n    def total(self, nums: List[int], target: Optional[int] = None) -> int:\n        return sum(nums)"
NO_SOLUTION = SOLUTION.replace("sum(nums)", "len(nums)")
SUM_LINE = "print(sum(map(int, input().split())))"
NODE = "class Node:\n    def __init__(self, v):\n        self.v, self.next = v, None\ndef length(n):\n    return 0 if n is None else 1 + length(n.next)"
GUARDED = "def f(a):\n    if a < 0:\n        raise ValueError('negative value')\n    return a * 2"
COUNTER = "class Counter:\n    def __init__(self):\n        self.n = 0\n    def add(self, k=1):\n        self.n += k\n        return self.n"

# name: (right program, wrong program, tests)
FORMS = {
    "plain asserts": (ADD, SUB, "assert add(1, 2) == 3\nassert add(5, 5) == 10"),
    "MBPP test_list": (ADD, SUB, ["assert add(1, 2) == 3", "assert add(5, 5) == 10"]),
    "MBPP record": (ADD, SUB, {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""}),
    "MBPP test_imports": (ADD, SUB, {"test_list": ["assert math.isclose(add(1, 2), 3)"], "test_imports": ["import math"]}),
    "MBPP setup of objects": (NODE, NODE.replace("1 +", "2 +"), {"test_list": ["assert length(root) == 2"], "test_setup_code": "root = Node(1)\nroot.next = Node(2)"}),
    "MBPP setup of a class": ("def longest(pairs):\n    return max(p.b - p.a for p in pairs)", "def longest(pairs):\n    return 0",
                              {"test_list": ["assert longest([Pair(5, 24), Pair(1, 3)]) == 19"], "test_setup_code": "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b"}),
    "HumanEval check, called": (ADD, SUB, "def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)"),
    "HumanEval check and entry_point": (ADD, SUB, {"test": "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}),
    "HumanEval entry_point of Python's name": (FACTORIAL, "def factorial(n):\n    return n", {"test": "def check(candidate):\n    for n, e in ((5, 120), (0, 1)):\n        assert abs(candidate(n) - e) < 1e-6", "entry_point": "factorial"}),
    "LeetCode entry_point of a method": (SOLUTION, NO_SOLUTION, {"test": "def check(candidate):\n    assert candidate(nums=[1, 2], target=3) == 3\n    assert candidate([7]) == 7", "entry_point": "Solution().total"}),
    "pytest functions": (ADD, SUB, "def test_small():\n    assert add(1, 2) == 3\n\ndef test_big():\n    assert add(10 ** 9, 1) == 10 ** 9 + 1\n"),
    "pytest, some called": (ADD, SUB, "def test_small():\n    assert add(1, 2) == 3\n\ntest_small()\n"),
    "pytest class": (ADD, SUB, "class TestAdd:\n    def setup_method(self):\n        self.e = 3\n    def test_small(self):\n        assert add(1, 2) == self.e\n"),
    "pytest parametrize": (ADD, SUB, "import pytest\n\n@pytest.mark.parametrize('a, b, e', [(1, 2, 3), pytest.param(4, 5, 9, id='big')])\ndef test_add(a, b, e):\n    assert add(a, b) == e\n"),
    "pytest parametrized twice": (ADD, SUB, "import pytest\n@pytest.mark.parametrize('a', [1, 2])\n@pytest.mark.parametrize('b', [3, 4])\ndef test_add(a, b):\n    assert add(a, b) == sum((a, b))\n"),
    "pytest raises": (GUARDED, GUARDED.replace("raise ValueError('negative value')", "return 0"), "import pytest\ndef test_negative():\n    with pytest.raises(ValueError, match='negative'):\n        f(-1)\ndef test_two():\n    assert f(2) == 4\n"),
    "pytest approx": ("def half(x):\n    return x / 2", "def half(x):\n    return x / 2 + 1e-3", "import pytest\ndef test_half():\n    assert half(1) == pytest.approx(0.5)\n    assert [half(3)] == pytest.approx([1.5], abs=1e-5)\n"),
    "pytest fixture": (ADD, SUB, "import pytest\n@pytest.fixture\ndef one():\n    return 1\n@pytest.fixture\ndef two(one):\n    yield one + 1\ndef test_add(one, two):\n    assert add(one, two) == 3\n"),
    "pytest main": (ADD, SUB, "import pytest\ndef test_add():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n    pytest.main([__file__])\n"),
    "KodCode": (ADD, SUB, "from solution import add\n\ndef test_positive():\n    assert add(1, 2) == 3\n\ndef test_negative():\n    assert add(-1, -2) == -3\n"),
    "KodCode, renamed": (ADD, SUB, "from solution import add as plus\ndef test_plus():\n    assert plus(1, 2) == 3\n"),
    "KodCode, a name of Python's": (FACTORIAL, "def factorial(n):\n    return n", "from solution import factorial\ndef test_it():\n    assert factorial(5) == 120\n"),
    "import solution": (ADD, SUB, "import solution\nassert solution.add(1, 2) == 3\n"),
    "import solution as": (ADD, SUB, "import solution as s\ndef test_add():\n    assert s.add(1, 2) == 3\n"),
    "from solution import *": (ADD, SUB, "from solution import *\ndef test_add():\n    assert add(1, 2) == 3\n"),
    "unittest": (ADD, SUB, "import unittest\nclass TestAdd(unittest.TestCase):\n    def setUp(self):\n        self.e = 3\n    def test_add(self):\n        self.assertEqual(add(1, 2), self.e)\n"),
    "unittest main": (ADD, SUB, "import unittest\nfrom solution import add\nclass T(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\nif __name__ == '__main__':\n    unittest.main()\n"),
    "unittest main, not guarded": (ADD, SUB, "import unittest\nclass T(unittest.TestCase):\n    def test_add(self):\n        self.assertAlmostEqual(add(.1, .2), .3)\nunittest.main()\n"),
    "unittest imported by name": (ADD, SUB, "from unittest import TestCase\nclass Base(TestCase):\n    pass\nclass T(Base):\n    def test_add(self):\n        self.assertTrue(add(1, 2) == 3)\n        with self.assertRaises(TypeError):\n            add(1, 'a')\n"),
    "unittest subtests": (ADD, SUB, "import unittest\nclass T(unittest.TestCase):\n    def test_add(self):\n        for a, e in ((1, 2), (2, 3)):\n            with self.subTest(a=a):\n                self.assertEqual(add(a, 1), e)\n"),
    "script below __main__": (ADD, SUB, "if __name__ == '__main__':\n    assert add(1, 2) == 3\n"),
    "script with a main function": (ADD, SUB, "def main():\n    assert add(1, 2) == 3\n    print('ok')\nif __name__ == '__main__':\n    main()\n"),
    "script that raises": (ADD, SUB, "r = add(1, 2)\nif r != 3:\n    raise Exception(f'got {r}')\n"),
    "script that exits": (ADD, SUB, "import sys\nif add(1, 2) != 3:\n    sys.exit(1)\nsys.exit(0)\n"),
    "stateful class": (COUNTER, COUNTER.replace("+= k", "= k"), "def test_counter():\n    c = Counter()\n    assert c.add() == 1\n    assert c.add(2) == 3\n    assert c.n == 3\n"),
    "standard input": (SUM_LINE, "print(3)", {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}),
    "standard input in lines": (SUM_LINE, "print(3)", {"inputs": [["1 2"], ["3 4"]], "outputs": [["3"], ["7"]]}),
    "standard output as numbers": (SUM_LINE, "print(3)", {"inputs": ["1 2", "3 4"], "outputs": [3, 7]}),
    "APPS call": (ADD, SUB, {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}),
    "APPS call, wrapped": (ADD, SUB, {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}),
    "TACO call, wrapped lists": ("def pair(a):\n    return [a, a]", "def pair(a):\n    return [a]", {"fn_name": "pair", "inputs": [[1], [2]], "outputs": [[[1, 1]], [[2, 2]]]}),
    "call, lists of one": ("def one(a):\n    return [a]", "def one(a):\n    return []", {"fn_name": "one", "inputs": [[1], [2]], "outputs": [[1], [2]]}),
    "call with numbers for keys": ("def f(d):\n    return {k + 1: v for k, v in d.items()}", "def f(d):\n    return d", {"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [{"2": 2}]}),
    "call of a method": (SOLUTION, NO_SOLUTION, {"fn_name": "total", "inputs": [[[1, 2]], [[7]]], "outputs": [3, 7]}),
    "starter code without imports": (SOLUTION, NO_SOLUTION, ["assert Solution().total([1, 2]) == 3"]),
    "LiveCodeBench, standard input": (SUM_LINE, "print(3)", [{"input": "1 2\n", "output": "3", "testtype": "stdin"}, {"input": "3 4\n", "output": "7", "testtype": "stdin"}]),
    "LiveCodeBench, function": (SOLUTION, NO_SOLUTION, [{"input": "[1, 2]\n3", "output": "3", "testtype": "functional", "metadata": {"func_name": "total"}}, {"input": "[7]", "output": "7", "testtype": "functional", "metadata": {"func_name": "total"}}]),
    "LiveCodeBench record": (SOLUTION, NO_SOLUTION, {"public_test_cases": '[{"input": "[1, 2]\\n3", "output": "3", "testtype": "functional"}]', "private_test_cases": '[{"input": "[7]", "output": "7", "testtype": "functional"}]', "metadata": '{"func_name": "total"}'}),
    "test_cases": (SUM_LINE, "print(3)", {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n", "fn_name": None}, {"type": "stdin_stdout", "input": "3 4\n", "output": "7\n", "fn_name": None}]}),
    "verl's functional": (ADD, SUB, {"functional": "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"}),
    "verl's assert_case": (ADD, SUB, {"assert_case": ["assert add(1, 2) == 3"]}),
}  # fmt: skip

# tests: what is said of them
REFUSED = {
    "": "holds no unit tests",
    "# none": "asks nothing",
    "assert True": "asks nothing",
    "assert 1 + 1 == 2": "asks nothing",
    "import math\nassert math.factorial(5) == 120": "asks nothing",
    "from math import factorial\nassert factorial(5) == 120": "asks nothing",
    "from math import *\nassert factorial(5) == 120": "asks nothing",
    "print('hello')": "asks nothing",
    "print(add(1, 2))": "asserts anything",
    "add(1, 2)": "asserts anything",
    "result = add(1, 2)\nexpected = 3": "asserts anything",
    "add(1, 2) == 3": "asserts anything",
    "def run():\n    assert add(1, 2) == 3": "asserts anything",
    "class Checks:\n    def test_add(self):\n        assert add(1, 2) == 3": "asserts anything",
    "if __name__ == '__main__':\n    print(add(1, 2))": "asserts anything",
    "try:\n    add(1, 2)\nexcept Exception:\n    pass": "asserts anything",
    "def test_add():\n    return add(1, 2) == 3": "asserts anything",
    "def check(candidate):\n    assert candidate(1, 2) == 3": "is not called",
    "def check_all(candidate):\n    assert candidate(1, 2) == 3": "is not called",
    "import numpy as np\nassert add(1, 2) == 3": "imports 'numpy'",
    "from hypothesis import given\ndef test_add():\n    assert add(1, 2) == 3": "imports 'hypothesis'",
    "async def test_add():\n    assert add(1, 2) == 3": "asynchronous",
    "def test_add(tmp_path):\n    assert add(1, 2) == 3": "no fixture",
    "import pytest\n@pytest.mark.skip\ndef test_add():\n    assert add(1, 2) == 3": "asks nothing|asserts anything",
    "assert add(1, 2 == 3": "no Python",
    ">>> add(1, 2)\n3": "no Python",
    '["assert add(1, 2) == 3", "import math"]': "unit test 2 tests nothing",
    '{"test": "def check(candidate):\\n    assert candidate(1) == 1", "entry_point": "os.system(\'x\')"}': "entry_point",
    '{"test": 3}': "holds no unit tests",
    '{"inputs": ["1"], "outputs": [""]}': "every expected output is empty",
    '{"inputs": ["1", "2"], "outputs": ["\\n", " "]}': "every expected output is empty",
    '{"fn_name": "not a name", "inputs": [[1]], "outputs": [1]}': "no name of a function",
    '{"fn_name": "f", "inputs": ["[1"], "outputs": ["1"]}': "must be JSON",
    '[{"input": "1", "output": "1", "testtype": "functional"}]': "need the function's name",
    '[{"input": "1", "output": "1", "testtype": "stdin"}, {"input": "1", "output": "1", "testtype": "functional", "fn_name": "f"}]': "several kinds",
    '{"public_test_cases": "[]", "private_test_cases": "eJxrYJmayQABFTcAE0EDDA=="}': "compressed",
    '{"public_test_cases": "[]"}': "holds no unit tests",
    '{"test_cases": [{"input": "1"}]}': "must hold input and output",
    '{"assertions": ["x"]}': "holds no unit tests",
}  # fmt: skip
