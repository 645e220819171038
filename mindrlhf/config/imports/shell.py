"""What a launch script would run, found without running anything.

Variables, their defaults, arrays, conditions, loops over lists and functions are followed; what only a shell can tell
(the environment, arguments, other programs, what a file holds) stays in the words as a mark with its source text. The
script is taken to run without arguments, with none of its variables set before.
"""

import copy
import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from mindrlhf.config.imports.arithmetic import ArithmeticMistakeError, evaluate
from mindrlhf.config.imports.shell_syntax import (
    ASSIGNMENT,
    Body,
    Case,
    Chain,
    Command,
    For,
    Function,
    Group,
    If,
    Node,
    Not,
    SyntaxMistakeError,
    While,
    parse,
    skip,
    words_of,
)
from mindrlhf.config.imports.shell_values import (
    END,
    FIELD,
    ONE_UNSET,
    UNKNOWN,
    UNSET,
    Value,
    ansi,
    compare,
    either,
    is_unknown,
    is_unset,
    items_of,
    mark,
    trimmed,
    unknown_part,
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"\$\{([!#]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)\}", re.DOTALL)
_DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}
# Commands of which a script takes for granted that they succeed.
_SUCCEED = {"cd", "mkdir", "source", ".", "pip", "pip3", "echo", "ray", "sleep", "set", "ulimit", "conda", "rm", "cp"}
_SUCCEED |= _DECLARATIONS | {"true", ":", "pushd", "popd", "unset", "shift", "chmod", "printf"}
MAX_STEPS, MAX_CHARS, MAX_CALLS = 20_000, 100_000, 20


@dataclass
class State:
    """Variables and functions at one point of a script; ``ended`` is how: `return`, `exit` or `failed`, else empty."""

    variables: dict[str, Value] = field(default_factory=dict)
    functions: dict[str, Node] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    ended: str = ""


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each command that a script may run, in order; builtins of the shell are left out.

    Raises:
        SyntaxMistakeError: the text is no shell script, or does not end.
    """
    text = re.sub(f"[{UNKNOWN}{UNSET}{END}]", "", text.replace("\r\n", "\n"))
    try:
        interpreter = _Interpreter()
        interpreter.run(parse(text))
    except RecursionError:
        raise SyntaxMistakeError("blocks within each other are too many") from None
    return interpreter.commands


class _Interpreter:
    def __init__(self) -> None:
        self.state = State()
        self.commands: list[list[str]] = []
        self.steps = 0
        self.calls = 0

    # Commands and blocks. Each returns whether it succeeds: None where only the shell knows.

    def run(self, body: Body) -> bool | None:
        status: bool | None = True
        for node in body:
            if self.state.ended:
                return status
            status = self._run_node(node)
        return status

    def _run_node(self, node: Node) -> bool | None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SyntaxMistakeError(f"it does not end within {MAX_STEPS:,} commands")
        match node:
            case Command():
                return self._command(node.words)
            case Chain():
                return self._chain(node)
            case Not():
                status = self._run_node(node.node)
                return None if status is None else not status
            case If():
                return self._if(node.branches)
            case Case():
                return self._case(node)
            case For():
                return self._for(node)
            case While():
                status = self.run(node.condition)
                if status is not node.is_until:
                    self._alternatives([node.body, []], self._shown(node.condition))
                return None
            case Group():
                return self.run(node.body)
            case Function():
                self.state.functions[node.name] = node.body
                return True

    def _chain(self, node: Chain) -> bool | None:
        status = self._run_node(node.first)
        for operator, following in node.rest:
            if self.state.ended:
                return status
            if operator == "|":
                status = self._run_node(following)
                status = None
            elif status is None:
                self._alternatives([[following], []], self._shown([node.first]))
            elif status is (operator == "&&"):
                status = self._taken([following])
        return status

    def _taken(self, body: Body) -> bool | None:
        """Run what a condition asks for, unless it ends the script as failed: then whoever ran it had set more."""
        before = copy.deepcopy(self.state)
        status = self.run(body)
        if self.state.ended == "failed":
            self.state = before
            return None
        return status

    def _if(self, branches: list[tuple[Body | None, Body]]) -> bool | None:
        for number, (condition, body) in enumerate(branches):
            status = True if condition is None else self.run(condition)
            if self.state.ended:
                return None
            if status:
                return self._taken(body)
            if status is None:
                rest = branches[number + 1 :]
                return self._alternatives([body, [If(rest)] if rest else []], self._shown(condition))
        return True

    def _case(self, node: Case) -> bool | None:
        subject = self._text(node.subject)
        if unknown_part(subject) is None or is_unset(subject):
            subject = "" if is_unset(subject) else subject
            for patterns, body in node.branches:
                if any(fnmatch.fnmatchcase(subject, self._text(pattern)) for pattern in patterns):
                    return self._taken(body)
            return True
        bodies = [body for _, body in node.branches]
        has_all = any("*" in patterns for patterns, _ in node.branches)
        return self._alternatives(bodies if has_all else [*bodies, []], subject)

    def _for(self, node: For) -> bool | None:
        words = [] if node.words is None else [one for word in node.words for one in self._fields(word)]
        if node.words is None or any(map(unknown_part, words)):
            source = f"for {node.name} in {' '.join(node.words or [])}"
            if _NAME.fullmatch(node.name):
                self.state.variables[node.name] = mark(source)
            return self._alternatives([node.body, []], source)
        for word in words:
            if _NAME.fullmatch(node.name):
                self.state.variables[node.name] = word
            self.run(node.body)
        return True

    def _alternatives(self, bodies: list[Body], reason: str) -> None:
        """Run each from here, and go on with what they agree on; ``reason`` is what only the shell can decide by."""
        start, ends = self.state, []
        for body in bodies:
            self.state = copy.deepcopy(start)
            self.run(body)
            ends.append(self.state)
        going_on = [state for state in ends if not state.ended]
        self.state = going_on[0] if going_on else ends[0]
        found = [state.variables for state in going_on]
        for name in {name for variables in found for name in variables}:
            values = [variables.get(name) for variables in found]
            if any(value != values[0] for value in values):
                self.state.variables[name] = either(values, unknown_part(reason) or reason)
        for other in going_on[1:]:
            self.state.functions |= other.functions

    def _shown(self, condition: Body) -> str:
        """Return what a condition asks, in short."""
        node = condition[0] if condition else None
        while isinstance(node, Chain | Not):
            node = node.first if isinstance(node, Chain) else node.node
        return " ".join(node.words) if isinstance(node, Command) else "what other programs say"

    # Simple commands.

    def _command(self, words: list[str]) -> bool | None:
        count = 0
        while count < len(words) and ASSIGNMENT.fullmatch(words[count]):
            count += 1
        if count == len(words):
            for word in words:
                self._assign(word)
            return True
        words = words[count:]
        if words[0].startswith("(("):
            return self._condition_of_number(words[0][2:-2])
        if words[0].startswith("[["):
            return self._double_test(words_of(words[0][2:-2]))
        if words[0] in _DECLARATIONS:
            for word in words[1:]:
                if ASSIGNMENT.fullmatch(word):
                    self._assign(word)
            return True
        expanded = [one for word in words for one in self._fields(word)]
        return self._builtin(expanded) if expanded else True

    def _builtin(self, words: list[str]) -> bool | None:
        name, arguments = words[0], words[1:]
        if name in ("[", "test"):
            return self._test(arguments[:-1] if name == "[" else arguments)
        if name in ("exit", "return"):
            is_failure = name == "exit" and arguments[:1] != ["0"]
            self.state.ended = "failed" if is_failure else name
            return None
        if name in ("false", "true", ":"):
            return name != "false"
        if name in self.state.functions:
            return self._call(name, arguments)
        if name == "set" and "--" in arguments:
            self.state.arguments = arguments[arguments.index("--") + 1 :]
        elif name == "shift":
            self.state.arguments = self.state.arguments[1:]
        elif name == "unset":
            for one in arguments:
                self.state.variables.pop(one, None)
        elif name in ("read", "mapfile", "readarray", "printf", "let"):
            for one in arguments if name != "printf" else arguments[1:2] if arguments[:1] == ["-v"] else []:
                if _NAME.fullmatch(one):
                    self.state.variables[one] = mark(f"{name} {one}")
        elif name == "eval":
            return self._run_text(" ".join(arguments))
        else:
            self.commands.append(words)
            self._run_nested(words)
        return True if name in _SUCCEED else None

    def _run_nested(self, words: list[str]) -> None:
        """`bash -c "..."`, also behind another program."""
        for at, word in enumerate(words[:-2]):
            is_shell = word.rpartition("/")[2] in ("bash", "sh")
            if is_shell and re.fullmatch(r"-[a-z]*c", words[at + 1]) and any(map(str.isspace, words[at + 2])):
                self._run_text(words[at + 2])

    def _run_text(self, text: str) -> bool | None:
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise SyntaxMistakeError(f"more than {MAX_CALLS} `eval` or `bash -c`")
        try:
            return self.run(parse(text))
        except SyntaxMistakeError:
            return None

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise SyntaxMistakeError(f"more than {MAX_CALLS} calls of functions")
        outer, self.state.arguments = self.state.arguments, arguments
        status = self._run_node(self.state.functions[name])
        self.state.arguments = outer
        if self.state.ended == "return":
            self.state.ended = ""
        return status

    def _assign(self, word: str) -> None:
        name, index, is_added, raw = ASSIGNMENT.fullmatch(word).groups()
        if raw.startswith("(") and raw.endswith(")"):
            value = self._array(raw[1:-1])
        else:
            value = self._text(raw)
        before = self.state.variables.get(name)
        if index is not None:
            table = dict(before) if isinstance(before, dict) else dict(zip(map(str, range(10**6)), items_of(before)))
            self.state.variables[name] = table | {self._text(index): value if isinstance(value, str) else ""}
            return
        if is_added and isinstance(value, str) and not isinstance(before, list | dict):
            value = (before or "") + value
        elif is_added:
            value = [*items_of(before), *items_of(value)]
        if sum(map(len, items_of(value))) > MAX_CHARS:
            value = mark(word)
        self.state.variables[name] = value

    def _array(self, raw: str) -> Value:
        words = words_of(raw)
        pairs = [re.fullmatch(r"\[([^\]]*)\]=(.*)", word, re.DOTALL) for word in words]
        if words and all(pairs):
            return {self._text(pair[1]): self._text(pair[2]) for pair in pairs}
        return [one for word in words for one in self._fields(word)]

    # Conditions.

    def _condition_of_number(self, text: str) -> bool | None:
        assigned = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", text, re.DOTALL)
        if assigned:
            name, operator, rest = assigned.groups()
            value = self._number(f"({name}){operator}({rest})" if operator else rest)
            self.state.variables[name] = mark(f"(({text}))") if value is None else str(value)
            return value is None or value != 0
        value = self._number(text)
        if value is None:
            for name in re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--)", text):
                self.state.variables[name] = mark(f"(({text}))")
        return None if value is None else value != 0

    def _number(self, text: str) -> int | None:
        text = self._text(text)
        try:
            return None if unknown_part(text) else evaluate(text, lambda name: _plain(self.state.variables.get(name)))
        except ArithmeticMistakeError:
            return None

    def _double_test(self, words: list[str]) -> bool | None:
        """`[[ ... ]]`: words without splitting, joined with ``&&`` and ``||``."""
        for joint in ("||", "&&"):
            if joint in words:
                at = words.index(joint)
                first, second = self._double_test(words[:at]), self._double_test(words[at + 1 :])
                known = {first, second} - {None}
                if (joint == "||") in known:
                    return joint == "||"
                return None if None in (first, second) else joint == "&&"
        if any(one in ("(", ")", "=~") for one in words):
            return None
        return self._test([self._text(word) for word in words], is_pattern=True)

    def _test(self, words: list[str], is_pattern: bool = False) -> bool | None:
        """`test`: None where only the shell knows. A variable that nothing set is empty."""
        words = [ONE_UNSET.sub("", word) for word in words]
        if words[:1] == ["!"]:
            status = self._test(words[1:], is_pattern)
            return None if status is None else not status
        if any(map(unknown_part, words)):
            return None
        if len(words) < 2:
            return bool(words and words[0])
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return (words[1] == "") is (words[0] == "-z")
        if len(words) == 2 and words[0] == "-v":
            return words[1] in self.state.variables
        if len(words) == 3:
            return compare(*words, is_pattern)
        return None

    # Words.

    def _text(self, raw: str) -> str:
        """Return a word in one piece, as behind `=`."""
        return "".join(value if isinstance(value, str) else " ".join(value) for value, _ in self._expand(raw))

    def _fields(self, raw: str) -> list[str]:
        """Return the fields that a word of a command becomes."""
        fields: list[str] = []
        current: str | None = None
        for value, is_quoted in self._expand(raw):
            if isinstance(value, str) and is_quoted:
                current = (current or "") + value
                continue
            parts = value if is_quoted else [one for item in items_of(value) for one in FIELD.findall(item)]
            text = value if isinstance(value, str) else ""
            if text[:1].isspace() and current is not None:
                fields.append(current)
                current = None
            for number, part in enumerate(parts):
                if number:
                    fields.append(current or "")
                    current = None
                current = (current or "") + part
            if text[-1:].isspace() and current is not None:
                fields.append(current)
                current = None
        return fields if current is None else [*fields, current]

    def _expand(self, raw: str, in_quotes: bool = False) -> Iterator[tuple[str | list[str], bool]]:
        """Yield the parts of a word: text, or the items of an array; and whether it stays in one piece."""
        at = 0
        while at < len(raw):
            char, end = raw[at], skip(raw, at) if raw[at] in "\\'\"$`" else at + 1
            source = raw[at:end]
            if char == "\\":
                if source != "\\\n":
                    is_kept = in_quotes and source[1:] not in tuple('$`"\\')
                    yield source if is_kept else source[1:], True
            elif char == "'" and not in_quotes:
                yield source[1:-1], True
            elif source.startswith("$'") and len(source) > 2 and not in_quotes:
                yield ansi(source[2:-1]), True
            elif char == '"' and not in_quotes:
                parts = list(self._expand(source[1:-1], in_quotes=True))
                yield from parts or [("", True)]
            elif char in "$`" and len(source) > 1:
                yield self._substitute(source, in_quotes), in_quotes
            elif char == "$" and (match := re.match(r"\$([A-Za-z_]\w*|[\d@*#?$!-])", raw[at:])):
                end = at + match.end()
                yield self._substitute("${" + match[1] + "}", in_quotes), in_quotes
            else:
                yield source, True
            at = end

    def _substitute(self, source: str, in_quotes: bool) -> str | list[str]:
        if source.startswith("$((") and source.endswith("))"):
            number = self._number(source[3:-2])
            return mark(source) if number is None else str(number)
        if source.startswith(("$(", "`")):
            return self._output(source)
        match = _PARAMETER.fullmatch(source)
        if match is None or match[4].startswith(".") or match[2].isalpha() and re.match(r":(?=[^-=+?\d\s$])", match[4]):
            return source  # of Hydra, not of the shell: ${other.key}, ${oc.env:X}
        sign, name, index, operator = match.groups()
        value = self._value(name, index)
        if sign == "#":
            length = len(value) if index in ("@", "*") and value is not None else len("".join(items_of(value)))
            return mark(source) if is_unknown(value) else str(length)
        if sign == "!":
            value = self._value(value, None) if isinstance(value, str) and _NAME.fullmatch(value) else mark(source)
        result = self._operate(value, operator, name, index, source) if operator else value
        if result is None:
            plain = f"${name}" if not index else source
            return mark(plain, UNSET)
        if isinstance(result, str):
            return result
        items = items_of(result)
        if index in ("@", "*") or name in ("@", "*"):
            return " ".join(items) if in_quotes and "*" in (index, name) else items
        return items[0] if items else ""

    def _value(self, name: str, index: str | None) -> Value | None:
        if name in ("@", "*"):
            return list(self.state.arguments)
        if name == "#":
            return str(len(self.state.arguments))
        if name == "?":
            return "0"
        if name.isdigit() and name != "0":
            given = self.state.arguments
            return given[int(name) - 1] if int(name) <= len(given) else None
        value = self.state.variables.get(name)
        if not _NAME.fullmatch(name) or name in ("RANDOM", "SECONDS"):
            return mark(f"${name}")
        if index in (None, "@", "*") or value is None:
            return value
        index = self._text(index)
        if isinstance(value, dict):
            return value.get(index, "")
        number, items = self._number(index), items_of(value)
        if number is None:
            return mark(f"${{{name}[{index}]}}")
        return items[number] if -len(items) <= number < len(items) else ""

    def _operate(self, value: Value | None, text: str, name: str, index: str | None, source: str) -> Value | None:
        """Apply what stands behind the name of a parameter, ``:-1`` for instance."""
        match = re.match(r"(:?)([-=+?])", text)
        if match:
            is_missing = is_unset(value) or bool(match[1]) and not any(items_of(value))
            word = text[match.end() :]
            if match[2] == "+":
                return "" if is_missing else self._text(word)
            if not is_missing:
                return value
            if match[2] == "?":
                return None
            value = self._text(word)
            if match[2] == "=" and _NAME.fullmatch(name) and index is None:
                self.state.variables[name] = value
            return value
        if value is None:
            return None
        if name in ("@", "*") or index in ("@", "*"):
            return (
                self._part(items_of(value), text)
                if text.startswith(":")
                else [self._edit(item, text, source) for item in items_of(value)]
            )
        return self._edit(items_of(value)[0] if items_of(value) else "", text, source)

    def _part(self, items: list[str], text: str) -> list[str]:
        offset, _, length = text[1:].partition(":")
        start, count = self._number(offset), self._number(length) if length else len(items)
        start = max((start or 0) - (items is self.state.arguments), 0)
        return items[start : start + max(count or 0, 0)]

    def _edit(self, value: str, text: str, source: str) -> str:
        if unknown_part(value) or len(value) > 2000:
            return value if unknown_part(value) else mark(source)
        if text.startswith(("#", "%")):
            return trimmed(value, text[0], text[1:2] == text[0], self._text(text.lstrip(text[0])))
        if text in ("^^", ",,"):
            return value.upper() if text == "^^" else value.lower()
        if text in ("^", ","):
            return (value[:1].upper() if text == "^" else value[:1].lower()) + value[1:]
        if text.startswith("/"):
            return self._replaced(value, text, source)
        if text.startswith(":"):
            offset, _, length = text[1:].partition(":")
            start, count = self._number(offset), self._number(length) if length else len(value)
            if start is not None and count is not None:
                tail = value[start:] if -len(value) <= start else ""
                return tail[:count]
        return mark(source)

    def _replaced(self, value: str, text: str, source: str) -> str:
        kind = text[1:2] if text[1:2] in ("/", "#", "%") else ""
        old, _, new = text[1 + len(kind) :].replace("\\/", "\ue003").partition("/")
        old, new = (self._text(one).replace("\ue003", "/") for one in (old, new))
        if not old or unknown_part(old + new) or old.count("*") > 2 or old.count("[") > 2:
            return value if not old else mark(source)
        pattern = fnmatch.translate(old).removeprefix("(?s:").rpartition(")")[0]
        pattern = {"#": rf"\A(?:{pattern})", "%": rf"(?:{pattern})\Z"}.get(kind, pattern)
        return re.sub(pattern, lambda _: new, value, count=0 if kind == "/" else 1, flags=re.DOTALL)

    def _output(self, source: str) -> str:
        """Return what a command prints, where that is plain: `echo`, `basename`, `dirname`."""
        inner = source[2:-1] if source.startswith("$(") else source[1:-1]
        try:
            nodes = parse(inner)
        except SyntaxMistakeError:
            return mark(source)
        if len(nodes) != 1 or not isinstance(nodes[0], Command) or not nodes[0].words or re.search("[<>]", inner):
            return mark(source)
        words = [one for word in nodes[0].words for one in self._fields(word)]
        if not words or any(map(unknown_part, words)) or any(word.startswith("-") for word in words[1:]):
            return mark(source)
        if words[0] == "echo":
            return " ".join(words[1:])
        if words[0] in ("basename", "dirname") and len(words) == 2:
            folder, _, last = words[1].rstrip("/").rpartition("/")
            return last if words[0] == "basename" else folder or "."
        return mark(source)


def _plain(value: Value | None) -> str:
    return value if isinstance(value, str) else ""
