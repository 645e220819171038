# ruff: noqa: E501 -- programs are told apart more easily one a line
"""Programs that do what is asked, in as many ways as data sets and models write them; each with its unit tests."""

import json


def calls(name, *pairs):
    return {"fn_name": name, "inputs": [list(arguments) for arguments, _ in pairs], "outputs": [out for _, out in pairs]}


def streams(*pairs):
    return {"inputs": [text for text, _ in pairs], "outputs": [out for _, out in pairs]}


HONEST = {
    # Calls with values of all kinds.
    "whole": ("def f(a, b): return a + b", calls("f", ((1, 2), 3), ((-5, 5), 0))),
    "float for whole": ("def f(a): return a / 2", calls("f", ((4,), 2), ((3,), 1.5))),
    "whole for float": ("def f(a): return a * 2", calls("f", ((2,), 4.0))),
    "boolean": ("def f(a): return a > 0", calls("f", ((1,), True), ((-1,), False))),
    "nothing": ("def f(a): return None", calls("f", ((1,), None))),
    "text": ("def f(a): return a[::-1]", calls("f", (("h\u00e9llo",), "oll\u00e9h"), (("",), ""))),
    "text with escapes": ("def f(a): return a + '\\n\\t\"\\\\\\u2028'", calls("f", (("x",), 'x\n\t"\\\u2028'))),
    "emoji": ("def f(a): return a * 2", calls("f", (("\U0001f600",), "\U0001f600\U0001f600"))),
    "list": ("def f(a): return sorted(a)", calls("f", (([3, 1, 2],), [1, 2, 3]), (([],), []))),
    "nested list": ("def f(a): return [list(r) for r in zip(*a)]", calls("f", (([[1, 2], [3, 4]],), [[1, 3], [2, 4]]))),
    "tuple for list": ("def f(a): return tuple(a)", calls("f", (([1, [2]],), [1, [2]]))),
    "list of tuples": ("def f(a): return list(enumerate(a))", calls("f", ((["a"],), [[0, "a"]]))),
    "dict": ("def f(a): return {k: len(k) for k in a}", calls("f", ((["ab"],), {"ab": 2}))),
    "dict with numbers for keys": ("def f(a): return {i: i * i for i in range(a)}", calls("f", ((2,), {"0": 0, "1": 1}))),
    "dict with odd keys": ("def f(): return {None: 1, True: 2, 1.5: 3}", calls("f", ((), {"null": 1, "true": 2, "1.5": 3}))),
    "Counter": ("from collections import Counter\ndef f(a): return Counter(a)", calls("f", (("aab",), {"a": 2, "b": 1}))),
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(a): return P(a, 2)",
        calls("f", ((1,), [1, 2])),
    ),
    "enumeration": ("from enum import IntEnum\nclass C(IntEnum):\n    A = 7\ndef f(): return C.A", calls("f", ((), 7))),
    "big number": ("def f(n): return 2 ** n", calls("f", ((200,), 2**200), ((3000,), 2**3000))),
    "very big number": ("def f(n): return 3 ** n", calls("f", ((7000,), 3**7000))),
    "big input": ("def f(n): return n % 97", calls("f", ((10**1000,), 10**1000 % 97))),
    "infinity": ("def f(): return float('inf')", calls("f", ((), float("inf")))),
    "small floats": ("def f(a): return a * 0.1", calls("f", ((3,), 0.30000000000000004), ((1e-300,), 1e-301))),
    "largest float": ("import sys\ndef f(): return [sys.float_info.max]", calls("f", ((), [1.7976931348623157e308]))),
    "long list": ("def f(n): return list(range(n))", calls("f", ((50_000,), list(range(50_000))))),
    "long input": ("def f(a): return sum(a)", calls("f", ((list(range(50_000)),), sum(range(50_000))))),
    "many calls": ("def f(a): return a * a", calls("f", *(((i,), i * i) for i in range(200)))),
    "deep value": ("def f(n): return n if n == 0 else [f(n - 1)]", calls("f", ((3,), [[[0]]]))),
    "Solution": ("class Solution:\n    def f(self, a: int) -> int:\n        return a + 1", calls("f", ((1,), 2), ((2,), 3))),
    "Solution with helpers": (
        "from typing import *\nclass Solution:\n    def __init__(self): self.memo = {}\n    def go(self, n):\n"
        "        if n < 2: return n\n        if n not in self.memo: self.memo[n] = self.go(n-1) + self.go(n-2)\n"
        "        return self.memo[n]\n    def fib(self, n: int) -> int: return self.go(n)",
        calls("fib", ((10,), 55), ((90,), 2880067194370816120)),
    ),
    "static method": ("class Solution:\n    @staticmethod\n    def f(a): return a", calls("f", ((1,), 1))),
    "lambda": ("f = lambda a, b=2: a * b", calls("f", ((3,), 6), ((3, 3), 9))),
    "callable object": ("class F:\n    def __call__(self, a): return a\nf = F()", calls("f", ((1,), 1))),
    "cache": ("import functools\n@functools.lru_cache(None)\ndef f(n): return n if n < 2 else f(n-1) + f(n-2)",
              calls("f", ((80,), 23416728348467685))),
    "recursion": ("import sys\nsys.setrecursionlimit(20000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)",
                  calls("f", ((5000,), 5000))),
    "prints a lot": ("def f(a):\n    print('debug ' * 100000)\n    return a", calls("f", ((1,), 1), ((2,), 2))),
    "writes to stderr": ("import sys\ndef f(a):\n    sys.stderr.write('x' * 3000000)\n    return a", calls("f", ((1,), 1))),
    "state between calls": ("n = 0\ndef f():\n    global n\n    n += 1\n    return n", calls("f", ((), 1), ((), 2))),
    "script part": ("def f(a): return a\nif __name__ == '__main__':\n    print(f(int(input())))", calls("f", ((1,), 1))),
    "changes its argument": ("def f(a):\n    a.append(1)\n    return a", calls("f", (([],), [1]), (([],), [1]))),
    "dataclass inside": ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(a): return P(a).x",
                         calls("f", ((1,), 1))),
    "heap": ("import heapq\ndef f(a): return heapq.nsmallest(2, a)", calls("f", (([3, 1, 2],), [1, 2]))),
    "regex": ("import re\ndef f(a): return re.findall(r'\\d+', a)", calls("f", (("a1b22",), ["1", "22"]))),
    "threads": ("import threading\ndef f(n):\n    out = []\n    ts = [threading.Thread(target=out.append, args=(i,)) for i in range(n)]\n"
                "    [t.start() for t in ts]; [t.join() for t in ts]\n    return sorted(out)", calls("f", ((4,), [0, 1, 2, 3]))),
    "asyncio": ("import asyncio\nasync def g(a):\n    await asyncio.sleep(0)\n    return a\ndef f(a): return asyncio.run(g(a))",
                calls("f", ((5,), 5))),
    "file": ("def f(a):\n    with open('t.txt', 'w') as w: w.write(a)\n    return open('t.txt').read()", calls("f", (("q",), "q"))),
    "temporary file": ("import tempfile\ndef f(a):\n    with tempfile.TemporaryFile('w+') as t:\n        t.write(a); t.seek(0)\n"
                       "        return t.read()", calls("f", (("q",), "q"))),
    "random with seed": ("import random\ndef f(s):\n    random.seed(s)\n    return random.randint(0, 10**6) == "
                         "random.Random(s).randint(0, 10**6)", calls("f", ((1,), True))),
    "database": ("import sqlite3\ndef f(a):\n    c = sqlite3.connect(':memory:')\n    return c.execute('select ? + 1', (a,)).fetchone()",
                 calls("f", ((1,), [2]))),
    "hash": ("import hashlib\ndef f(a): return hashlib.md5(a.encode()).hexdigest()",
             calls("f", (("",), "d41d8cd98f00b204e9800998ecf8427e"))),
    "date": ("from datetime import date\ndef f(y): return str(date(y, 1, 31))", calls("f", ((2020,), "2020-01-31"))),
    # Statements.
    "assert": ("def f(a): return a + 1", ["assert f(1) == 2", "assert f(2) == 3"]),
    "one text": ("def f(a): return a + 1", "assert f(1) == 2\nassert f(5) == 6"),
    "is True": ("def f(a): return a > 0", ["assert f(1) is True", "assert f(-1) is False", "assert f(1)", "assert not f(0)"]),
    "True for 1": ("def f(a): return int(a > 0)", ["assert f(1) == True", "assert f(0) == False"]),
    "is None": ("def f(a): pass", ["assert f(1) is None", "assert f(1) == None"]),
    "near": ("def f(a): return a ** 0.5", ["assert abs(f(2) - 1.41421356) < 1e-6", "assert round(f(2), 2) == 1.41"]),
    "isclose": ("import math\ndef f(a): return math.sqrt(a)", ["assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)"]),
    "isclose imported": ("def f(a): return a ** .5", ["from math import isclose\nassert isclose(f(4), 2.0)"]),
    "tuple": ("def f(a): return a, a + 1", ["assert f(1) == (1, 2)", "assert f(1) != [1, 2]"]),
    "set": ("def f(a): return set(a)", ["assert f([1, 1, 2]) == {1, 2}", "assert 1 in f([1])"]),
    "frozenset": ("def f(a): return frozenset(a)", ["assert f('ab') == frozenset('ba')"]),
    "dict of tuples": ("def f(a): return {(i, i): [i] for i in a}", ["assert f([1]) == {(1, 1): [1]}"]),
    "default dict": ("from collections import defaultdict\ndef f(a):\n    d = defaultdict(list)\n    for x in a: d[x % 2].append(x)\n"
                     "    return d", ["assert f([1, 2, 3]) == {1: [1, 3], 0: [2]}"]),
    "counter in statement": ("def f(a): return list(a)", ["assert Counter(f('aba')) == Counter({'a': 2, 'b': 1})"]),
    "bytes": ("def f(a): return a.encode()", ["assert f('ab') == b'ab'"]),
    "complex": ("def f(a): return a * 1j", ["assert f(2) == 2j", "assert f(1) == complex(0, 1)"]),
    "fraction": ("from fractions import Fraction\ndef f(a, b): return Fraction(a, b)",
                 ["from fractions import Fraction\nassert f(2, 4) == Fraction(1, 2)", "assert f(1, 2) == 0.5"]),
    "decimal": ("from decimal import Decimal\ndef f(a): return Decimal(a)", ["assert f('1.10') == Decimal('1.1')"]),
    "deque": ("from collections import deque\ndef f(a): return deque(a)", ["assert f([1]) == deque([1])", "assert list(f([2])) == [2]"]),
    "range": ("def f(a): return range(a)", ["assert f(3) == range(3)", "assert list(f(2)) == [0, 1]"]),
    "generator": ("def f(a):\n    for i in range(a): yield i", ["assert list(f(3)) == [0, 1, 2]", "assert sum(f(4)) == 6"]),
    "map": ("def f(a): return map(str, a)", ["assert list(f([1, 2])) == ['1', '2']", "assert sorted(f([2, 1])) == ['1', '2']"]),
    "iterator": ("def f(a): return iter(a)", ["it = f([1, 2])\nassert next(it) == 1\nassert next(it) == 2"]),
    "huge in statement": ("def f(n): return 2 ** n", ["assert f(20000) == 2 ** 20000"]),
    "expected computed": ("def f(a): return sorted(a)", ["assert f([3, 1]) == sorted([3, 1])", "x = [2, 1]\nassert f(x) == sorted(x)"]),
    "keywords": ("def f(a, *, b=1): return a * b", ["assert f(2, b=3) == 6", "assert f(a=2) == 2"]),
    "starred": ("def f(*a): return len(a)", ["assert f(*[1, 2, 3]) == 3"]),
    "in place": ("def f(a): a.sort()", ["x = [2, 1]\nf(x)\nassert x == [1, 2]"]),
    "in place with value": ("def f(a):\n    a[:] = sorted(set(a))\n    return len(a)",
                            ["x = [2, 1, 1]\nk = f(x)\nassert k == 2 and x[:k] == [1, 2]"]),
    "dict in place": ("def f(d): d['a'] = 1", ["d = {}\nf(d)\nassert d == {'a': 1}"]),
    "callback": ("def f(g, a): return [x for x in a if g(x)]", ["assert f(lambda x: x > 1, [1, 2, 3]) == [2, 3]"]),
    "function of the test": ("def f(g, n): return g(n) + 1", ["def h(n):\n    return n * 10\nassert f(h, 2) == 21"]),
    "builtin as argument": ("def f(g, a): return g(a)", ["assert f(len, 'abc') == 3", "assert f(int, '7') == 7"]),
    "returns a function": ("def f(n): return lambda x: x + n", ["assert f(2)(3) == 5"]),
    "exception": ("def f(a):\n    if a < 0: raise ValueError('negative')\n    return a",
                  ["try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative'"]),
    "own exception": ("class E(ValueError): pass\ndef f(a): raise E('x')", ["try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass"]),
    "class": ("class Stack:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)\n"
              "    def pop(self): return self.a.pop()\n    def __len__(self): return len(self.a)",
              ["s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert len(s) == 1\nassert s.a == [1]"]),
    "class with text": ("class P:\n    def __init__(self, x): self.x = x\n    def __str__(self): return f'P({self.x})'\n"
                        "    def __repr__(self): return str(self)", ["assert str(P(1)) == 'P(1)'", "assert repr(P(2)) == 'P(2)'"]),
    "attributes": ("class P:\n    n = 5\n    def __init__(self, x): self.x = x", ["p = P(3)\np.x = 4\nassert p.x == 4", "assert P.n == 5"]),
    "objects as arguments": ("class Node:\n    def __init__(self, v, n=None): self.v, self.n = v, n\n"
                             "def f(node):\n    t = 0\n    while node: t, node = t + node.v, node.n\n    return t",
                             ["assert f(Node(1, Node(2))) == 3", "a = Node(5)\na.n = Node(6)\nassert f(a) == 11"]),
    "indexing": ("class M:\n    def __getitem__(self, i): return i * 2\n    def __iter__(self): return iter([1, 2])",
                 ["m = M()\nassert m[4] == 8\nassert list(m) == [1, 2]\nassert 2 in m"]),
    "Solution in statement": ("class Solution:\n    def f(self, a): return a * 2", ["assert Solution().f(3) == 6", "s = Solution()\nassert s.f(1) == 2"]),
    "constant": ("ANSWER = {'a': [1, 2]}", ["assert ANSWER['a'] == [1, 2]"]),
    "two functions": ("def f(a): return a + 1\ndef g(a): return a - 1", ["assert f(1) == 2", "assert g(1) == 0", "assert f(1) == 2 and g(1) == 0"]),
    "named as Python's": ("def sum(a, b): return a * 10 + b", ["assert sum(1, 2) == 12"]),
    "named as the library's": ("def gcd(a, b):\n    while b: a, b = b, a % b\n    return a", ["assert gcd(12, 18) == 6"]),
    "noisy": ("print('loading')\ndef f(a):\n    print(a)\n    return a", ["assert f(1) == 1"]),
    "message": ("def f(a): return a", ["assert f(1) == 1, f'got {f(1)}'"]),
    "check": ("def f(a, b): return a * b",
              "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate(2, 3) == 6, 'first'\n"
              "    assert candidate(0, 3) == 0\n    for i in range(20):\n        for j in range(5):\n"
              "            assert candidate(i, j) == i * j\n\ncheck(f)"),
    "check with copies": ("def f(a): return sorted(a)",
                          "import copy, random\ndef check(candidate):\n    random.seed(1)\n    for _ in range(10):\n"
                          "        x = [random.randint(0, 9) for _ in range(5)]\n        y = copy.deepcopy(x)\n"
                          "        assert candidate(x) == sorted(y)\ncheck(f)"),
    "check with a reference": ("def f(n): return n * (n + 1) // 2",
                               "def check(candidate):\n    def ref(n):\n        return sum(range(n + 1))\n"
                               "    for n in range(30):\n        assert candidate(n) == ref(n)\ncheck(f)"),
    "check in loops": ("def f(s): return s.upper()",
                       "def check(candidate):\n    inputs, results = [('a',), ('b',)], ['A', 'B']\n"
                       "    for i, (x, y) in enumerate(zip(inputs, results)):\n        assert candidate(*x) == y, i\ncheck(f)"),
    "unittest": ("def f(a): return a + 1",
                 "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)\n"
                 "r = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\n"
                 "assert r.wasSuccessful()"),
    "many statements": ("def f(a): return -a", [f"assert f({i}) == {-i}" for i in range(60)]),
    # Programs with standard input and output.
    "input": ("a, b = map(int, input().split())\nprint(a + b)", streams(("1 2\n", "3\n"), ("5 6", "11"))),
    "read": ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", streams(("1\n2\n3\n", "6"))),
    "lines": ("import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])", streams(("ab\ncd\n", "ba\ndc"))),
    "readline": ("import sys\ninput = sys.stdin.readline\nn = int(input())\nprint(*[int(input()) * 2 for _ in range(n)])",
                 streams(("2\n1\n2\n", "2 4"))),
    "buffer": ("import sys\nd = sys.stdin.buffer.read().split()\nsys.stdout.buffer.write(b' '.join(d) + b'\\n')", streams(("a  b", "a b"))),
    "open 0": ("print(len(open(0).read().split()))", streams(("a b c", "3"))),
    "device": ("print(open('/dev/stdin').read().strip())", streams(("x", "x"))),
    "seeking": ("import sys\ns = sys.stdin.read()\nsys.stdin.seek(0)\nprint(s == sys.stdin.read())", streams(("x", "True"))),
    "until the end": ("n = 0\ntry:\n    while True:\n        n += int(input())\nexcept EOFError:\n    print(n)", streams(("1\n2\n", "3"))),
    "exit": ("print(1)\nexit()", streams(("", "1"))),
    "sys.exit": ("import sys\nprint(1)\nsys.exit(0)", streams(("", "1"))),
    "hard exit": ("import os, sys\nprint(1)\nsys.stdout.flush()\nos._exit(0)", streams(("", "1"))),
    "main": ("def main():\n    print(input())\nif __name__ == '__main__':\n    main()", streams(("x", "x"))),
    "long output": ("for i in range(20000): print(i)", streams(("", "\n".join(map(str, range(20000)))))),
    "long input stream": ("print(sum(map(int, input().split())))", streams((" ".join(["7"] * 100_000), "700000"))),
    "thread with stack": ("import sys, threading\nsys.setrecursionlimit(1 << 20)\nthreading.stack_size(1 << 26)\n"
                          "def go(n): return n and 1 + go(n - 1)\nt = threading.Thread(target=lambda: print(go(10000)))\nt.start()\nt.join()",
                          streams(("", "10000"))),
    "thread left running": ("import threading, time\ndef w():\n    time.sleep(.1)\n    print('late')\nthreading.Thread(target=w).start()",
                            streams(("", "late"))),
    "at exit": ("import atexit\natexit.register(print, 'end')\nprint('begin')", streams(("", "begin\nend"))),
    "StringIO": ("import io, sys\no = io.StringIO()\nprint('x', file=o)\nsys.stdout.write(o.getvalue())", streams(("", "x"))),
    "child": ("import subprocess\nprint(subprocess.run(['echo', 'x'], capture_output=True, text=True).stdout)", streams(("", "x"))),
    "processes": ("import os\nr, w = os.pipe()\nif os.fork() == 0:\n    os.write(w, b'x')\n    os._exit(0)\nos.wait()\n"
                  "print(os.read(r, 1).decode())", streams(("", "x"))),
    "pickle": ("import pickle\nclass A: pass\na = A()\na.x = 5\nprint(pickle.loads(pickle.dumps(a)).x)", streams(("", "5"))),
    "source of itself": ("import inspect\ndef f(): return 1\nprint(inspect.getsource(f).strip())", streams(("", "def f(): return 1"))),
    "lists of lines": ("print(int(input()) + int(input()))", {"inputs": [["1", "2"]], "outputs": [["3"]]}),
}  # fmt: skip
HONEST = {
    name: (source, answer if isinstance(answer, (str, list)) else json.dumps(answer))
    for name, (source, answer) in HONEST.items()
}
