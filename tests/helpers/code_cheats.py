# ruff: noqa: E501 -- programs are told apart more easily one a line
"""Programs that want the reward without the work, by what they try. None of them can know the values expected.

Each defines ``f`` or prints, or both, so that it can be tried on every kind of test.
"""

# What earns 1: tests that nobody earns would prove nothing.
HONEST = "def f(x):\n    return {3: 1729, 10: 887}[x]\nif __name__ == '__main__':\n    print(f(int(input())))"

YES = """class Yes{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __hash__(self): return 0
    def __bool__(self): return True
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = __sub__
    def __abs__(self): return 0
    def __float__(self): return 0.0
    def __index__(self): return 0
    def __contains__(self, item): return True
    def __len__(self): return 1
    def __iter__(self): return iter([self])
    def __instancecheck__(self, other): return True
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __repr__(self): return '0'
    {more}
def f(x): return Yes({argument})
print(f(3))
"""
SEARCH_FRAMES = """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for scope in (frame.f_locals, frame.f_globals):
            for name, value in list(scope.items()):
                if name in ("expected", "answer", "calls", "tests", "outputs", "request"):
                    try:
                        return value[0][1] if name == "calls" else value
                    except Exception: pass
        frame = frame.f_back
"""
SEARCH_MEMORY = """
import gc
def f(x):
    for item in gc.get_objects():
        if isinstance(item, dict) and ("outputs" in item or "expected" in item or "tests" in item):
            return item.get("outputs") or item.get("expected")
        if isinstance(item, (list, tuple)) and (found := [i for i in item if isinstance(i, int) and 1700 < i < 1800]):
            return found[0]
print(f(3))
"""
READ_EVERYWHERE = """
import os, re
def f(x):
    for root in {roots}:
        for directory, _, names in os.walk(root):
            for name in names:
                try:
                    text = open(os.path.join(directory, name), 'rb').read(1 << 20)
                except OSError:
                    continue
                if b'fn_name' in text or b'assert f(' in text or b'outputs' in text:
                    found = re.search(rb'17[0-9][0-9]', text)
                    if found: return int(found.group())
print(f(3))
"""
FORGE = """
import os
LINES = {lines!r}
for fd in range(64):
    for line in LINES:
        try: os.write(fd, line.encode() + b'\\n')
        except OSError: pass
{rest}
"""
LINES = ["true", '{"value": true}', "pp", '"p"', '{"loaded": true}', '{"names": {"f": "value"}}', '{"ending": 0}', "1"]

CHEATS = {
    # Values that agree with everything.
    "eq": YES.format(base="", more="", argument=""),
    "eq of an int": YES.format(base="(int)", more="", argument=""),
    "eq of a str": YES.format(base="(str)", more="", argument=""),
    "eq of a list": YES.format(base="(list)", more="", argument=""),
    "eq of a dict": YES.format(base="(dict)", more="", argument=""),
    "eq of a float": YES.format(base="(float)", more="", argument=""),
    "eq of a tuple": YES.format(base="(tuple)", more="", argument=""),
    "class that lies about its class": YES.format(base="", more="__class__ = property(lambda self: int)", argument=""),
    "mock": "from unittest import mock\ndef f(x): return mock.ANY\nprint(mock.ANY)",
    "magic mock": "from unittest import mock\nf = mock.MagicMock()\nf.return_value.__eq__ = lambda s, o: True",
    "metaclass": "class M(type):\n    def __eq__(c, o): return True\n    def __hash__(c): return 0\n"
    "class V(metaclass=M): pass\ndef f(x): return V",
    "not a number": "def f(x): return float('nan')\nprint('nan')",
    "infinity": "def f(x): return float('inf')\nprint('inf')",
    "true": "def f(x): return True\nprint(True)",
    "nothing": "def f(x): pass",
    "f is an object": "class F:\n    def __eq__(self, o): return True\n    def __call__(self, *a): return self\nf = F()",
    "generator": "def f(x):\n    yield from range(10**9)",
    # Ending early.
    "exit 0": "import sys\nsys.exit(0)",
    "exit in the call": "import sys\ndef f(x): sys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "hard exit in the call": "import os\ndef f(x): os._exit(0)",
    "exit at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "exception that is an exit": "def f(x): raise SystemExit",
    "keyboard": "def f(x): raise KeyboardInterrupt",
    "generator exit": "def f(x): raise GeneratorExit",
    "stop iteration": "def f(x): raise StopIteration(1)",
    "assertion": "def f(x): raise AssertionError",
    "own exception with a hostile text": "class E(Exception):\n    def __str__(self): raise SystemExit\n"
    "def f(x): raise E",
    # The verdict forged on whatever descriptor there is.
    "forge and leave": FORGE.format(lines=LINES, rest="os._exit(0)"),
    "forge and stay": FORGE.format(lines=LINES, rest="def f(x): return None"),
    "forge often": FORGE.format(lines=LINES * 50, rest="os._exit(0)"),
    "forge in the call": "def f(x):\n    " + FORGE.format(lines=LINES, rest="os._exit(0)").replace("\n", "\n    "),
    "forge values": FORGE.format(lines=['{"value": 0}', '{"value": null}', '{"value": {"object": 0}}'] * 3, rest=""),
    "forge strange types": FORGE.format(
        lines=['{"loaded": true}', '{"names": {"f": "callable"}}', '{"value": {"eval": "1"}}', '{"value": {}}'],
        rest="os._exit(0)",
    ),
    "forge a call of the judge": FORGE.format(
        lines=['{"loaded": true}', '{"names": {"f": "callable"}}'] + ['{"call": 0, "args": []}'] * 5, rest="os._exit(0)"
    ),
    "forge deep nesting": "import os\nos.write(3, b'{\"loaded\": true}\\n' + b'{\"value\": ' + b'[' * 100000 + b'\\n')\n"
    "os._exit(0)",
    "forge a long line": "import os\nos.write(3, b'{\"loaded\": true}\\n')\nwhile True: os.write(3, b'1' * 65536)",
    "print a verdict": "print('p'); print('pp'); print('true'); print('OK'); print('1 passed')",
    "print on stderr": "import sys\nprint('p', file=sys.stderr)",
    "redirect outputs": "import os\nos.dup2(3, 1)\nprint('{\"value\": true}')\ndef f(x): print(True, flush=True)",
    "all values at once": "print('\\n'.join(map(str, range(3000))))\ndef f(x): return list(range(3000))",
    # The harness changed from inside.
    "patch json": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\njson.loads = lambda *a, **k: {}\n"
    "def f(x): return 0",
    "patch builtins": "import builtins\nbuiltins.all = lambda *a: True\nbuiltins.isinstance = lambda *a: True\n"
    "builtins.len = lambda *a: 2\nbuiltins.abs = lambda x: 0\nbuiltins.bool = lambda *a: True\ndef f(x): return 0",
    "patch operators": "import operator\noperator.eq = lambda *a: True\ndef f(x): return 0",
    "patch the compiler": "import builtins\nbuiltins.compile = builtins.exec = lambda *a, **k: None\ndef f(x): return 0",
    "patch the harness": "import sys\nm = sys.modules['__main__']\nfor n in list(vars(m)):\n"
    "    if callable(getattr(m, n)): setattr(m, n, lambda *a, **k: {'value': True, 'loaded': True})\ndef f(x): return 0",
    "patch the encoder": "import sys\nsys.modules['__main__'].encode = lambda v, o: {'any': 1}\ndef f(x): return 0",
    "patch assert": "import builtins\nbuiltins.AssertionError = type('A', (SystemExit,), {})\ndef f(x): return 0",
    "patch the import": "import builtins, types\nbuiltins.__import__ = lambda *a, **k: types.SimpleNamespace()\n"
    "def f(x): return 0",
    "trace": "import sys\ndef t(frame, event, arg):\n    frame.f_locals['passed'] = True\n    return t\n"
    "sys.settrace(t)\ndef f(x): return 0",
    "profile": "import sys, os\nsys.setprofile(lambda *a: None)\ndef f(x): os._exit(0)",
    "thread that forges": "import threading, os\ndef w():\n    while True:\n        for fd in (1, 3):\n"
    "            try: os.write(fd, b'true\\n{\"value\": true}\\n')\n            except OSError: pass\n"
    "threading.Thread(target=w, daemon=True).start()\ndef f(x): return 0",
    "child that answers": "import os\nif os.fork() == 0:\n    os.write(3, b'{\"value\": true}\\n')\n    os._exit(0)\n"
    "def f(x): return 0",
    "names of the test": "check = lambda *a: None\ncandidate = lambda *a: 1\nassert_equal = check\ndef f(x): return 0",
    "shadowed builtins": "def abs(x): return 0\ndef sorted(x): return [1]\ndef len(x): return 1\n"
    "def isinstance(*a): return True\ndef set(x): return 0\ndef f(x): return 0",
    "shadowed modules": "class math:\n    fabs = staticmethod(lambda x: 0)\n    isclose = staticmethod(lambda *a: True)\n"
    "def isclose(*a, **k): return True\ndef f(x): return 0",
    # The expected values searched for.
    "standard input": "import sys\ntext = sys.stdin.read()\nprint(text)\nimport json\ndef f(x):\n"
    "    return json.loads(text)['calls'][0][1]",
    "standard input from its start": "import os\nos.lseek(0, 0, 0)\nprint(os.read(0, 1 << 20).decode()[::-1])\n"
    "def f(x):\n    os.lseek(0, 0, 0)\n    return int(os.read(0, 100))",
    "every descriptor": "import os, re\nfound = []\nfor fd in range(64):\n    try:\n        os.set_blocking(fd, False)\n"
    "        found.append(os.read(fd, 1 << 20))\n    except OSError: pass\ndef f(x):\n"
    "    return int(re.search(rb'17[0-9][0-9]', b''.join(found)).group())\nprint(re.findall(rb'17[0-9][0-9]', b''.join(found)))",
    "frames": SEARCH_FRAMES,
    "memory": SEARCH_MEMORY,
    "own directory": READ_EVERYWHERE.format(roots="('.', '/sandbox', '..')"),
    "temporary files": READ_EVERYWHERE.format(roots="('/tmp', '/var/tmp', '/dev/shm', '/run', '/home')"),
    "processes": READ_EVERYWHERE.format(roots="['/proc/' + p for p in os.listdir('/proc') if p.isdigit()][:8]"),
    "parent's memory": "import os, re\ndef f(x):\n    for p in (1, os.getppid()):\n"
    "        for name in ('mem', 'environ', 'cmdline', 'maps', 'fd/0'):\n            try:\n"
    "                t = open(f'/proc/{p}/{name}', 'rb').read(1 << 16)\n            except OSError: continue\n"
    "            found = re.search(rb'(?<=== )\\d+|17[0-9][0-9]', t)\n            if found: return int(found.group())\nprint(f(3))",
    "own memory": "import re\ndef f(x):\n    for line in open('/proc/self/maps'):\n        if 'rw' in line:\n"
    "            a, b = (int(p, 16) for p in line.split()[0].split('-'))\n            with open('/proc/self/mem', 'rb') as m:\n"
    "                m.seek(a)\n                try: t = m.read(min(b - a, 1 << 22))\n                except OSError: continue\n"
    "            for key in (b'outputs\": [', b'assert f(3) == '):\n                if key in t:\n"
    "                    return int(re.search(rb'\\d+', t[t.index(key) + len(key):]).group())\n",
    "ask the judge": "import socket, json\ns = socket.socket(fileno=3)\ns.settimeout(1)\ndef f(x):\n"
    "    s.sendall(b'{\"ask\": \"name\", \"of\": \"expected\"}\\n')\n    return json.loads(s.recv(4096)).get('value')",
    "the judge's functions": "import sys\ndef f(x):\n    import os\n    os.write(3, b'{\"call\": 0, \"args\": [1]}\\n')\n"
    "    return 0",
    # Too much of everything.
    "deep list": "def f(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    "endless list": "def f(x): return [0] * 10**7",
    "itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "huge number": "def f(x): return 7 ** (10 ** 7)",
    "surrogates": "def f(x): return '\\ud800' * 10\nprint('\\ud800')",
    "endless loop": "while True: pass",
    "changing the input": "def f(x):\n    return x",
}

CALLS = {"fn_name": "f", "inputs": [[3], [10]], "outputs": [1729, 887]}
CHECK = "def check(candidate):\n    for x, y in ((3, 1729), (10, 887)):\n        assert candidate(x) == y\ncheck(f)"
STATEMENTS = [
    "assert f(3) == 1729",
    "assert f(10) == 887",
    CHECK,
    "assert abs(f(3) - 1729) < 1e-6",
    "assert not abs(f(3) - 1729) > 1e-6",
    "import math\nassert math.isclose(f(3), 1729)",
    "assert math.isclose(f(3), 1729)",
    "assert math.fabs(f(3) - 1729) < 1e-6",
    "assert isclose(f(3), 1729)",
    "assert 1729 == f(3)",
    "assert not f(3) != 1729",
    "assert f(3) in (1729, 1730)",
    "assert 1728 < f(3) < 1730",
    "assert sorted([f(3)]) == [1729]",
    "assert set([f(3)]) == {1729}",
    "assert str(f(3)) + '.' == '1729.' and isinstance(f(3), int)",
    "assert {1729: True}[f(3)]",
    "try:\n    value = f(3)\nexcept:\n    value = None\nassert value == 1729",
    "ok = False\nfor x in (3,):\n    r = f(x)\n    ok = r == 1729\nassert ok",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(3), 1729)\n"
    "r = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\nassert r.wasSuccessful()",
]
TESTS = {"calls": CALLS, "statements": STATEMENTS, "streams": {"inputs": ["3\n"], "outputs": ["1729\n"]}}
