"""The grammar of a shell script, as far as launch scripts use it: text to commands, branches, loops and functions.

After "Shell Command Language" of POSIX.1-2017 and the arrays, `[[` and `((` of bash. Words stay as they are written;
`shell.py` expands them. Redirections and the text of here-documents are left out: they set no variable.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

_ENDS = set(" \t\n;&|()<>")
_OPERATORS = (";;&", ";;", ";&", ";", "&&", "||", "|&", "|", "&", "(", ")", "\n")
_REDIRECTION = re.compile(r"&>>?|<<<|<<-?|<&|>&|>>|>\||<>|<|>")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)
_ARRAY_BEGINS = re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])?\+?=")
_CLOSING = {"then", "elif", "else", "fi", "do", "done", "esac", "}"}
MAX_DEPTH = 60


class SyntaxMistakeError(Exception):
    """The text is no shell script."""


@dataclass(frozen=True)
class Command:
    """Words as they are written, assignments before and after the name included."""

    words: list[str]


@dataclass(frozen=True)
class Chain:
    """Nodes with what joins each to those before it: ``&&``, ``||`` or ``|``."""

    first: "Node"
    rest: list[tuple[str, "Node"]]


@dataclass(frozen=True)
class Not:
    node: "Node"


@dataclass(frozen=True)
class If:
    """Conditions with what each guards; that of `else` has none."""

    branches: list[tuple["Body | None", "Body"]]


@dataclass(frozen=True)
class Case:
    subject: str
    branches: list[tuple[list[str], "Body"]]


@dataclass(frozen=True)
class For:
    """``words`` is None where the loop counts (`for ((...))`) or goes over the arguments."""

    name: str
    words: list[str] | None
    body: "Body"


@dataclass(frozen=True)
class While:
    condition: "Body"
    body: "Body"
    is_until: bool


@dataclass(frozen=True)
class Group:
    body: "Body"


@dataclass(frozen=True)
class Function:
    name: str
    body: "Node"


Node = Command | Chain | Not | If | Case | For | While | Group | Function
Body = list[Node]


def skip(text: str, start: int, depth: int = 0) -> int:
    """Return where the quoted text, expansion or single character that begins at ``start`` ends.

    Raises:
        SyntaxMistakeError: it does not.
    """
    if depth > MAX_DEPTH:
        raise SyntaxMistakeError("quotes and expansions within each other are too many")
    if text[start] == "\\":
        return min(start + 2, len(text))
    if text[start] == "'" or text.startswith("$'", start):
        return _skip_single(text, start)
    if text[start] == '"':
        return _skip_until(text, start + 1, '"', '\\$`"', depth)
    if text[start] == "`":
        return _skip_until(text, start + 1, "`", "\\", depth)
    if text.startswith("${", start):
        return _skip_until(text, start + 2, "}", "\\'\"$`", depth)
    if text.startswith("$(", start):
        return skip_parentheses(text, start + 1, depth)
    return start + 1


def _skip_single(text: str, start: int) -> int:
    has_escapes = text[start] == "$"
    at = start + 1 + has_escapes
    while at < len(text):
        if text[at] == "'":
            return at + 1
        at += 2 if has_escapes and text[at] == "\\" else 1
    raise _unfinished(text, start)


def _skip_until(text: str, at: int, closing: str, special: str, depth: int) -> int:
    start = at
    while at < len(text):
        if text[at] == closing:
            return at + 1
        at = skip(text, at, depth + 1) if text[at] in special else at + 1
    raise _unfinished(text, start)


def skip_parentheses(text: str, start: int, depth: int = 0) -> int:
    """Return where the parenthesis that opens at ``start`` has closed."""
    at, open_ones = start, 0
    while at < len(text):
        if text[at] == "#" and text[at - 1] in " \t\n(":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        open_ones += {"(": 1, ")": -1}.get(text[at], 0)
        at = skip(text, at, depth + 1) if text[at] not in "()" else at + 1
        if not open_ones:
            return at
    raise _unfinished(text, start)


def _unfinished(text: str, start: int) -> SyntaxMistakeError:
    line = text.count("\n", 0, start) + 1
    return SyntaxMistakeError(f"what begins in line {line} ({text[max(start - 1, 0) : start + 20]!r}) never ends")


@dataclass
class _Lexer:
    """Words and operators of a text."""

    text: str
    at: int = 0
    tokens: list[tuple[str, str]] = field(default_factory=list)
    heredocs: list[str] = field(default_factory=list)

    def run(self) -> list[tuple[str, str]]:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                self.at = self._line_end()
            elif self._take_redirection():
                continue
            elif operator := next((one for one in _OPERATORS if self.text.startswith(one, self.at)), None):
                self._take_operator(operator)
            else:
                self.tokens.append(("word", self._take_word()))
        return self.tokens

    def _line_end(self) -> int:
        end = self.text.find("\n", self.at)
        return len(self.text) if end < 0 else end

    def _take_redirection(self) -> bool:
        match = _REDIRECTION.match(self.text, self.at)
        if match is None or self.text.startswith(("<(", ">("), self.at):
            return False
        if self.at and self.text[self.at - 1].isdigit() and self.tokens and self.tokens[-1][1].isdigit():
            self.tokens.pop()  # the number of a descriptor
        self.at = match.end()
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        target = self._take_word()
        if match[0] in ("<<", "<<-"):
            self.heredocs.append(re.sub(r"['\"\\]", "", target))
        return True

    def _take_operator(self, operator: str) -> None:
        if operator == "(" and self.text.startswith("((", self.at):
            end = skip_parentheses(self.text, self.at)
            if self.text[end - 2 : end] == "))":
                self.tokens.append(("word", self.text[self.at : end]))
                self.at = end
                return
        self.tokens.append(("operator", operator))
        self.at += len(operator)
        if operator == "\n":
            for delimiter in self.heredocs:
                self._skip_heredoc(delimiter)
            self.heredocs.clear()

    def _skip_heredoc(self, delimiter: str) -> None:
        while self.at < len(self.text):
            end = self._line_end()
            line, self.at = self.text[self.at : end], end + 1
            if line.strip() == delimiter:
                return

    def _take_word(self) -> str:
        text, start = self.text, self.at
        if re.match(r"\[\[\s", text[start : start + 3]):
            return self._take_test()
        while self.at < len(text):
            char = text[self.at]
            if char == "(" and (
                _ARRAY_BEGINS.fullmatch(text[start : self.at]) or text[self.at - 1 : self.at] in tuple("?*+@!<>")
            ):
                self.at = skip_parentheses(text, self.at)
            elif char in "<>" and text.startswith("(", self.at + 1):
                self.at += 1
            elif char in _ENDS:
                break
            else:
                self.at = skip(text, self.at)
        return text[start : self.at]

    def _take_test(self) -> str:
        start = self.at
        while self.at < len(self.text):
            if re.match(r"\s\]\]", self.text[self.at : self.at + 3]):
                self.at += 3
                return self.text[start : self.at]
            self.at = skip(self.text, self.at)
        raise _unfinished(self.text, start)


class _Parser:
    def __init__(self, text: str):
        self.tokens = _Lexer(text).run()
        self.at = 0
        self.depth = 0

    def _peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        token = self._peek()
        self.at += 1
        return token

    def _is_word(self, *texts: str) -> bool:
        kind, text = self._peek()
        return kind == "word" and text in texts

    def _is_operator(self, *texts: str) -> bool:
        kind, text = self._peek()
        return kind == "operator" and text in texts

    def _expect(self, text: str) -> None:
        if self._next()[1] != text:
            raise SyntaxMistakeError(f"{text!r} is missing")

    def body(self, *closing: str) -> Body:
        """Read until one of the words or operators ``closing``, which stays unread; until the end for none."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise SyntaxMistakeError("blocks within each other are too many")
        nodes: Body = []
        while True:
            while self._is_operator(";", "&", "\n"):
                self.at += 1
            kind, text = self._peek()
            if kind == "end" or text in closing:
                break
            if kind == "word" and text in _CLOSING or kind == "operator" and text not in ("(",):
                raise SyntaxMistakeError(f"{text!r} stands where a command should")
            nodes.append(self._chain())
        if closing and self._peek()[0] == "end":
            raise SyntaxMistakeError(f"{' or '.join(map(repr, closing))} is missing")
        self.depth -= 1
        return nodes

    def _chain(self) -> Node:
        first, rest = self._node(), []
        while self._is_operator("&&", "||", "|", "|&"):
            operator = self._next()[1]
            while self._is_operator("\n"):
                self.at += 1
            rest.append((operator.rstrip("&") if operator == "|&" else operator, self._node()))
        return Chain(first, rest) if rest else first

    def _node(self) -> Node:
        blocks: dict[str, Callable[[], Node]] = {
            "if": self._if,
            "case": self._case,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "function": self._function,
            "{": lambda: self._group("}"),
        }
        if self._is_operator("("):
            self.at += 1
            return self._group(")")
        if self._is_word("!"):
            self.at += 1
            return Not(self._node())
        kind, text = self._peek()
        if kind == "word" and text in blocks:
            self.at += 1
            return blocks[text]()
        return self._command()

    def _group(self, closing: str) -> Node:
        body = self.body(closing)
        self._expect(closing)
        return Group(body)

    def _if(self) -> Node:
        branches: list[tuple[Body | None, Body]] = []
        while True:
            condition = self.body("then")
            self._expect("then")
            branches.append((condition, self.body("elif", "else", "fi")))
            closing = self._next()[1]
            if closing == "else":
                branches.append((None, self.body("fi")))
                self._expect("fi")
            if closing != "elif":
                return If(branches)

    def _case(self) -> Node:
        subject = self._next()[1]
        self._skip_lines()
        self._expect("in")
        branches = []
        while True:
            self._skip_lines()
            if self._is_word("esac") or self._peek()[0] == "end":
                self._expect("esac")
                return Case(subject, branches)
            patterns = []
            while not self._is_operator(")"):
                kind, text = self._next()
                if kind == "end":
                    raise SyntaxMistakeError("'esac' is missing")
                if kind == "word":
                    patterns.append(text)
            self._expect(")")
            branches.append((patterns, self.body(";;", ";&", ";;&", "esac")))
            if not self._is_word("esac"):
                self.at += 1

    def _for(self) -> Node:
        name, words = self._next()[1], None
        self._skip_lines()
        if self._is_word("in"):
            self.at += 1
            words = []
            while self._peek()[0] == "word":
                words.append(self._next()[1])
        while self._is_operator(";", "\n"):
            self.at += 1
        closing = "}" if self._is_word("{") else "done"
        self._expect("{" if closing == "}" else "do")
        body = self.body(closing)
        self._expect(closing)
        return For(name, words, body)

    def _while(self) -> Node:
        is_until = self.tokens[self.at - 1][1] == "until"
        condition = self.body("do")
        self._expect("do")
        body = self.body("done")
        self._expect("done")
        return While(condition, body, is_until)

    def _function(self) -> Node:
        name = self._next()[1]
        if self._is_operator("("):
            self.at += 1
            self._expect(")")
        self._skip_lines()
        return Function(name, self._node())

    def _command(self) -> Node:
        words = []
        while self._peek()[0] == "word":
            words.append(self._next()[1])
        if self._is_operator("("):
            if len(words) != 1:
                raise SyntaxMistakeError(f"'(' stands behind {' '.join(words)[:40]!r}")
            self.at += 1
            self._expect(")")
            self._skip_lines()
            return Function(words[0], self._node())
        if not words and self._peek()[0] != "end":
            raise SyntaxMistakeError(f"{self._peek()[1]!r} stands where a command should")
        return Command(words)

    def _skip_lines(self) -> None:
        while self._is_operator("\n"):
            self.at += 1


def parse(text: str) -> Body:
    """Return the commands of a script.

    Raises:
        SyntaxMistakeError: it is none.
    """
    return _Parser(text).body()


def words_of(text: str) -> list[str]:
    """Return the words of an array's parentheses, or of a test's brackets, as they are written."""
    return [text for kind, text in _Lexer(text).run() if text != "\n"]
