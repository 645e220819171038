# ruff: noqa: F821 -- values.py stands before this text when it runs
"""The side of the program under test: loads it and calls what it defines, as asked by the judge, who is elsewhere.

It shares the interpreter with the program, which may change it at will. That is no harm: no expected value comes here,
and what leaves is data that the program could as well have computed. Standard library only, after ``values.py``.

Descriptor 3 is a socket to the judge; both ways go lines of JSON. In: ``{"names": [...]}``, which the program defines,
and ``{"ask": kind, "of": target, ...}``. Out: first ``{"loaded": whether}``, then ``{"names": {name: kind}}``,
``{"value": data}``, ``{"raised": names of the exception's classes}`` or, between, ``{"call": number of the judge's
function, ...}``.

``exec`` is what this file is for: it runs untrusted code in a process that the sandbox holds.
"""

import builtins
import importlib
import json
import os
import re
import socket
import sys
import types
import typing

MAX_ITEMS = 1_000_000
# What LeetCode's page gives to a program without an import, by modules, beside the names of typing.
GIVEN = {
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby islice pairwise "
    "permutations product repeat starmap zip_longest",
    "math": "ceil comb factorial floor gcd hypot inf isqrt lcm log log2 pi sqrt",
    "operator": "itemgetter",
    "random": "randint randrange",
    "string": "ascii_letters ascii_lowercase ascii_uppercase",
    **dict.fromkeys(("datetime", "json", "re", "statistics", "sys", "time"), ""),
}


class Program:
    """The program's names, and the objects of its own that the judge knows by number."""

    def __init__(self, lines, send):
        self._lines, self._send = lines, send
        self._objects = []
        self.names = {}

    def load(self):
        with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:
            source = file.read()
        _give_library(set(re.findall(r"\w+", source)))
        # Not "__main__": what a script does when it is run is not under test.
        module = sys.modules["solution"] = types.ModuleType("solution")
        self.names = vars(module)
        exec(compile(source, "solution.py", "exec"), self.names)
        if os.path.exists("setup.py"):
            with open("setup.py", encoding="utf-8", errors="surrogatepass") as file:
                exec(compile(file.read(), "setup.py", "exec"), self.names)

    def reply(self, question):
        """Answer a question, or say what was raised."""
        try:
            return self._answer(question)
        except BaseException as error:  # SystemExit too
            reply = {"raised": [kind.__name__ for kind in type(error).__mro__], "text": _text_of(error)}
            try:
                return reply | {"args": encode(list(error.args), self._as_object), **self._as_object(error)}
            except BaseException:
                return reply

    def _answer(self, question):
        if "names" in question:
            return {"names": {name: _kind_of(self.names[name]) for name in question["names"] if name in self.names}}
        arguments = [decode(item, self._from_judge) for item in question.get("args", [])]
        keywords = {name: decode(item, self._from_judge) for name, item in question.get("kwargs", {}).items()}
        before = [json.dumps(item) for item in question.get("args", [])]
        value = self._ask(question["ask"], question["of"], arguments, keywords)
        reply = {"value": encode(value, self._as_object)}
        changed = {}
        for index, argument in enumerate(arguments):
            if isinstance(argument, (list, dict, set, bytearray)):
                data = encode(argument, self._as_object)
                if json.dumps(data) != before[index]:
                    changed[index] = data
        return reply | {"changed": changed} if changed else reply

    def _ask(self, kind, target, arguments, keywords):
        if kind == "function":
            # Problems of the kind "LeetCode" put the function into a class.
            owner = self.names
            function = owner[target] if target in owner else getattr(owner["Solution"](), target)
            return function(*arguments, **keywords)
        if kind == "name":
            return self.names[target]
        if kind == "call":
            return self._resolve(target)(*arguments, **keywords)
        if kind == "get":
            return getattr(self._resolve(target), arguments[0])
        if kind == "set":
            return setattr(self._resolve(target), *arguments)
        if kind == "item":
            return self._resolve(target)[arguments[0]]
        if kind == "items":
            items = []
            for item in self._resolve(target):
                items.append(item)
                if len(items) > MAX_ITEMS:
                    raise MemoryError("too many items")
            return items
        return {"len": len, "str": str, "repr": repr, "bool": bool, "int": int, "float": float, "next": next}[kind](
            self._resolve(target)
        )

    def _resolve(self, target):
        return self.names[target] if isinstance(target, str) else self._objects[target]

    def _as_object(self, value):
        for number, known in enumerate(self._objects):
            if known is value:
                return {"object": number}
        self._objects.append(value)
        return {"object": len(self._objects) - 1}

    def _from_judge(self, kind, content):
        if kind == "object":
            return self._objects[content]
        if kind == "name":
            return self.names[content]
        if kind == "builtin":
            return getattr(builtins, content)
        if kind != "function":
            raise ValueError(kind)

        def call_judge(*arguments):
            self._send({"call": content, "args": [encode(item, self._as_object) for item in arguments]})
            while "call" not in (reply := json.loads(self._lines.readline())):  # the function asks in its turn
                self._send(self.reply(reply))
            reply = reply["call"]
            if "raised" in reply:
                raise ValueError("the function raised " + reply["raised"])
            return decode(reply["value"], self._from_judge)

        return call_judge


def main():
    link = socket.socket(fileno=3)
    lines, writing = link.makefile("rb"), link.makefile("wb")

    def send(message):
        writing.write(json.dumps(message).encode() + b"\n")
        writing.flush()

    program = Program(lines, send)
    try:
        program.load()
    except BaseException:  # SystemExit too
        send({"loaded": False})
        return
    send({"loaded": True})
    for line in lines:
        send(program.reply(json.loads(line)))


def _give_library(words):
    """Let names that the program's text uses and may not import be builtins: they are none that it defines."""
    for name in words & set(typing.__all__):
        if name[0].isupper() and not hasattr(builtins, name):
            setattr(builtins, name, getattr(typing, name))
    for module, names in GIVEN.items():
        for name in words & {module, *names.split()}:
            if not hasattr(builtins, name):
                found = importlib.import_module(module)
                setattr(builtins, name, getattr(found, name) if name in names.split() else found)


def _kind_of(value):
    if isinstance(value, types.ModuleType):
        return "module"
    return "callable" if callable(value) else "value"


def _text_of(error):
    try:
        return str(error)[:500]
    except BaseException:
        return ""


main()
os._exit(0)
