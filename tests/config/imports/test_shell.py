"""Scripts followed without running them: the words are those that bash itself makes of the same script."""

import random
import subprocess

import pytest

from mindrlhf.config.imports.arithmetic import ArithmeticMistakeError, evaluate
from mindrlhf.config.imports.shell import commands_of
from mindrlhf.config.imports.shell_syntax import SyntaxMistakeError
from mindrlhf.config.imports.shell_values import unknown_part

SHOW = 'show() { for word in "$@"; do printf \'%s\\0\' "$word"; done; }\n'


def of_bash(script: str) -> list[str] | None:
    """The words of every `show` of a script, as bash gives them to it; None where it complains."""
    done = subprocess.run(
        ["bash", "--norc", "-f", "-c", SHOW + script], capture_output=True, text=True, timeout=60, env={}, check=False
    )
    return None if done.stderr else done.stdout.split("\0")[:-1]


def of_ours(script: str) -> list[str]:
    return [word for words in commands_of(script) if words[0] == "show" for word in words[1:]]


class Scripts:
    """Scripts at random, of all forms that are followed."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def pick(self, *makers):
        maker = self.rng.choice(makers)
        return maker() if callable(maker) else maker

    def name(self):
        return self.rng.choice("ABCD")

    def word(self, extra="/"):
        return "".join(self.rng.choices("abx01_.-" + extra, k=self.rng.randint(1, 5)))

    def number(self):
        return self.pick(lambda: str(self.rng.randint(0, 40)), "N", "0x1F", "010")

    def sum(self, depth=2):
        if not depth or not self.rng.randint(0, 2):
            return self.number()
        left, right = self.sum(depth - 1), self.sum(depth - 1)
        operator = self.pick(
            "+", "-", "*", "<", ">=", "==", "&&", "||", "|", "&", "^", "<<1+", "*2**", "/7+", "%5-", "?3:"
        )
        return self.pick(
            f"{left} {operator} {right}", f"({left}{operator}{right})", f"-({left})", f"!{left}", f"~{left}"
        )

    def pattern(self):
        return self.pick("a", "?", "a*", "*b", "x", "[ab]", "*/", "b", "$D")

    def operator(self, depth):
        inner = self.expansion(depth - 1) if depth and self.rng.random() < 0.5 else self.word()
        return self.pick(
            "", f":-{inner}", f"-{inner}", f":+{inner}", f"+{inner}", f":={inner}", f"#{self.pattern()}",
            f"##{self.pattern()}", f"%{self.pattern()}", f"%%{self.pattern()}", f"/a/{self.word('')}",
            f"//b/{self.word('')}", "//x", f"/#a/{self.word('')}", f"/%b/{self.word('')}", "^^", ",,", "^", ",",
            f":{self.rng.randint(0, 3)}", f":{self.rng.randint(0, 3)}:{self.rng.randint(0, 3)}", ": -1",
        )  # fmt: skip

    def expansion(self, depth=2):
        name = self.name()
        return self.pick(
            lambda: f"${{{name}{self.operator(depth)}}}",
            f"${{{name}}}", f"${{#{name}}}", "${R[1]}", "${R[0]%a}", "${#R[@]}", f"${{Z{self.pick(':-', '-', ':=')}q}}",
            lambda: f"$(({self.sum()}))", f"$(echo {name.lower()} ${name})", "`echo z`", "$(basename a/b/c.sh)",
        )  # fmt: skip

    def value(self):
        text = "".join(self.pick(self.word, self.expansion) for _ in range(self.rng.randint(1, 3)))
        return self.pick(
            text,
            text,
            f'"{text} {text}"',
            f"'{self.word()} $A'",
            f'{text}"$B"',
            f'"a\\"{text}"',
            "\\$A",
            f"$'t\\n'{text}",
        )

    def condition(self):
        name, value = self.name(), self.word()
        return self.pick(
            f'[ -z "${name}" ]', f'[ -n "${name}" ]', f'[ "${name}" = "{value}" ]', f'test "${name}" != b',
            f"[[ ${name} == a* || ${name} != *b ]]", f'[[ -n ${name} && ! "$B" == "$C" ]]', "[ $N -gt 7 ]",
            f"(( N < {self.number()} ))", "! false", "true && false", "true", '[ ! "$A" ]',
        )  # fmt: skip

    def block(self, depth):
        return "\n".join(self.statement(depth - 1) for _ in range(self.rng.randint(1, 2)))

    def statement(self, depth=2):
        name = self.name()
        plain = [
            lambda: f"{name}={self.value()}",
            lambda: f"export {name}={self.value()}  # {self.word()}",
            lambda: f"{name}+={self.value()}",
            lambda: f"R=({self.value()} {self.value()}\n  # it's a remark\n {self.word()})",
            lambda: f"R+=({self.value()})",
            lambda: f"N=$(({self.sum()}))",
            lambda: f"(( N = {self.sum()} ))",
            lambda: f"{self.condition()} && {name}={self.value()}",
            lambda: f"{self.condition()} || {name}={self.value()}",
            lambda: f'show {self.value()} \\\n  "${{R[@]}}" k=${name} > /dev/stdout',
            lambda: f'show ${{R[@]}} "${{R[*]}}" "${{R[@]:1}}"; show "{self.expansion()}"',
            lambda: f": ${{{name}:={self.word()}}}",
            'set -- p q; show $1 "$#" "$@"; shift; show "$@"',
            'show "$@"; show ${1:-none}',
            lambda: f"read -r unused <<EOF\n{self.word()} $(( ' EOF\nEOF",
        ]
        blocks = [
            lambda: (
                f"if {self.condition()}; then\n{self.block(depth)}\nelif {self.condition()}\nthen {self.block(depth)}\n"
                f"else\n{self.block(depth)}\nfi"
            ),
            lambda: (
                f"case ${name} in\n  a*|x) {self.block(depth)} ;;\n  '')\n{self.block(depth)}\n;;\n"
                f"  *) {self.block(depth)};;\nesac"
            ),
            lambda: f"for {name} in {self.word()} $A; do\n{self.block(depth)}\ndone",
            lambda: f"f() {{\n{self.block(depth)}\n{name}=$1\n}}\nf {self.value()}",
            lambda: f"while false; do {self.block(depth)}; done",
            lambda: f"{{ {self.block(depth)}\n}}",
        ]
        return self.pick(*plain, *(blocks if depth else []))

    def script(self):
        lines = [self.statement() for _ in range(self.rng.randint(1, 6))]
        last = 'show "$A" "$B" "$C" "$D" "$N" "${R[@]}"\n'
        return "\n".join(["A=a1 B= C=xab/b D=b N=9", "R=(r1 'r 2')", *lines, last])


@pytest.mark.parametrize("part", range(4))
def test_words_are_those_of_bash(part):
    compared = 0
    for seed in range(part * 150, part * 150 + 150):
        script = Scripts(seed).script()
        expected = of_bash(script)
        if expected is not None:  # else bash itself refuses it: a division by zero, a slice that ends before it begins
            compared += 1
            assert of_ours(script) == expected, script
    assert compared > 100, compared


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 * 4", 14),
        ("-7 / 2", -3),
        ("-7 % 2", -1),
        ("2 ** 3 ** 2", 512),
        ("1 ? 2 : 3", 2),
        ("010 + 0x10", 24),
        ("~0 & 7", 7),
    ],
)
def test_arithmetic_is_that_of_c(text, value):
    assert evaluate(text, lambda name: "") == value


@pytest.mark.parametrize(
    "text", ["", "1 +", "(1", "1/0", "9**99", "1 << 64", "++N", "9223372036854775807 + 1", "x", "1 2", "((" * 99]
)
def test_what_is_no_number_is_refused(text):
    with pytest.raises(ArithmeticMistakeError):
        evaluate(text, lambda name: "")


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("run k=$(nproc --all)", "$(nproc --all)"),
        ("run k=`date +%s`", "`date +%s`"),
        ("X=$(nproc)\nY=${X//a/b}\nrun k=$Y/b", "$(nproc)"),
        ("run k=$1", "$1"),
        ("run k=$HOME/x", "$HOME"),
        ("run k=${HOME}", "$HOME"),
        ("X=1\nif command -v npu-smi; then X=2; fi\nrun k=$X", "2 or 1, by command -v npu-smi"),
        ("X=1\n[ -f here ] && X=2\nrun k=$X", "2 or 1, by [ -f here ]"),
        ('X=1\ncase "$(uname)" in L*) X=2;; D*) X=3;; esac\nrun k=$X', "2 or 3 or 1, by $(uname)"),
        ("for n in $(seq 1 3); do X=$n; done\nrun k=$X", "for n in $(seq 1 3) or nothing, by for n in $(seq 1 3)"),
        ("read -r X < file\nrun k=$X", "read X"),
        ("A=(k=1 b=2)\nif grep -q x y; then A+=(k=3); fi\nrun ${A[@]}", "3 or nothing, by grep -q x y"),
    ],
)
def test_what_only_the_shell_knows_is_named(script, part):
    (words,) = [words for words in commands_of(script) if words[0] == "run"]
    assert [found for word in words if (found := unknown_part(word))] == [part]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        # What a script asks for before it runs is given when it runs.
        ('if [ $# -lt 2 ]; then echo usage; exit 1; fi\nN=${1:-4}\nshift 2\nrun n=$N "$@"', ["run", "n=4"]),
        ('[ -z "$BASE" ] && exit 2\n: "${BASE:?set it}"\nN=3\nrun n=$N', ["run", "n=3"]),
        ("N=2\ncd /x || exit 1\nrun n=$N", ["run", "n=2"]),
        ("case ${X:-gpu} in npu) N=1;; gpu) ;; *) exit 1;; esac\nrun n=${N:-5}", ["run", "n=5"]),
        # Environment and local assignments, commands within commands.
        ('A=1 B=2 run x=3 | tee "log $X" 2>&1', ["run", "x=3"]),
        ('CMD="run a=1 b=2"\neval $CMD', ["run", "a=1", "b=2"]),
        ("srun bash -c 'run a=1'", ["run", "a=1"]),
        ("local_run() { local n=$1; run n=$n; return 0; }\nlocal_run 7\n", ["run", "n=7"]),
        (
            "run a='${data.size}' b=\\${other.key} c=${third.key}",
            ["run", "a=${data.size}", "b=${other.key}", "c=${third.key}"],
        ),
    ],
)
def test_a_script_is_followed_as_it_is_meant(script, words):
    found = [one for one in commands_of(script) if one[0] == "run"]
    assert found == [words]


@pytest.mark.parametrize(
    "script",
    ["if true; then", "case x in", "a='", 'a="', "a=$(", "a=${", "for x in", "f() (", ")", "done", "x ((", "((" * 200],
)
def test_what_is_no_script_is_refused_in_a_line(script):
    with pytest.raises(SyntaxMistakeError):
        commands_of(script)


def test_a_script_that_does_not_end_is_refused():
    for script in ("f() { f; }\nf", "for a in 1 2 3 4 5 6 7 8; do " * 8 + "x" + "; done" * 8):
        with pytest.raises(SyntaxMistakeError, match="calls|end"):
            commands_of(script)
    assert unknown_part(commands_of("A=aaaaaaaa\n" + "A=$A$A$A$A\n" * 30 + "run $A")[-1][-1])
