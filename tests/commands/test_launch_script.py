"""A stranger's launch script: the words that bash makes of it, and nothing else of this machine."""

import pytest

from mindrlhf.commands import launch_script
from mindrlhf.commands.launch_script import commands_of
from mindrlhf.errors import UserError


@pytest.mark.parametrize(
    ("script", "words"),
    [
        # A script's requests before it runs are met when it runs.
        ('if [ $# -lt 2 ]; then echo usage; exit 1; fi\nN=${1:-4}\nshift 2\nrun a.n=$N "$@"', ["a.n=4"]),
        ('[ -z "$BASE" ] && exit 2\nN=3\nrun a.n=$N', ["a.n=3"]),
        ("set -euo pipefail\nN=2\ncd /x || exit 1\nsource env.sh\nfalse\nrun a.n=$N", ["a.n=2"]),
        ("case ${X:-gpu} in npu) N=1;; gpu) ;; *) exit 1;; esac\nrun a.n=${N:-5}", ["a.n=5"]),
        ("python3 -c 'import torch_npu' && D=npu || D=gpu\nrun a.n=$D", ["a.n=npu"]),
        # Commands within commands, logs, the background.
        ('A=1 run a.x=3 "b.y=p q" | tee "log $X" 2>&1', ["a.x=3", "b.y=p q"]),
        ("run a.x=1 > logs/$(date +%s).log 2>&1 &", ["a.x=1"]),
        ('CMD="run a.a=1 b.b=2"\neval $CMD', ["a.a=1", "b.b=2"]),
        ("exec run a.a=1", ["a.a=1"]),
        ("srun bash -c 'run a.a=1'", ["a.a=1"]),
        ("f() { local n=$1; run a.n=$n; return 0; }\nf 7\n", ["a.n=7"]),
        ("A=(a.k=1 a.b=[*])\nA+=(a.c='x y')\nrun \"${A[@]}\" a.d=$((2**3))", ["a.k=1", "a.b=[*]", "a.c=x y", "a.d=8"]),
        ("N=$(basename a/b/c.sh)\nrun a.n=${N%.sh} a.m='${data.size}'", ["a.n=c", "a.m=${data.size}"]),
        # Only the shell of the run knows these: they stand for themselves.
        ("run a.k=$(nproc --all) a.h=$HOME/x", ["a.k=$(nproc)", "a.h=$HOME/x"]),
        ("run a.p=$(pwd) a.v=$OUT/y", ["a.p=$PWD", "a.v=$OUT/y"]),
        ("set -u\n: ${BASE:?set it}\nX=$BASE/${Y:-z}\nrun a.k=$X a.l=$1", ["a.k=$BASE/z", "a.l="]),
    ],
)  # fmt: skip
def test_words_of_a_script(script, words):
    ran = [command[1:] for command in commands_of(script) if command[0] == "run"]
    assert ran == [words]


def test_many_and_long_words_arrive_whole():
    script = "A=()\nfor i in {1..300}; do A+=(a.k$i=" + "x" * 200 + "); done\nrun ${A[@]} | tee log_a.b=1"
    (words,) = commands_of(script)
    assert words == ["run", *(f"a.k{i}={'x' * 200}" for i in range(1, 301))]


def test_a_script_reaches_no_program_file_or_network(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    script = (
        f"read -r S < {secret}\necho x > {tmp_path}/written\nexec 3<>/dev/tcp/127.0.0.1/22 && N=open\n"
        f"/usr/bin/env > {tmp_path}/environment\nPATH=/usr/bin:/bin\ncat /etc/hostname > {tmp_path}/host\n"
        f'run a.s="$S" a.n=${{N:-closed}} a.h="$(</etc/shadow)"'
    )
    ran = [command for command in commands_of(script) if command[0] == "run"]
    assert [word.partition("=")[2] for word in ran[0][1:]] == ["", "closed", ""]
    assert list(tmp_path.iterdir()) == [secret]


@pytest.mark.parametrize("script", ["while :; do :; done", "A=a; while :; do A=$A$A; done", "f() { f & f; }; f"])
def test_a_script_that_does_not_end_is_refused(script, monkeypatch):
    monkeypatch.setattr(launch_script, "_LIMITS", launch_script.SandboxLimits(time_s=1.0))
    try:
        assert commands_of(script) == []  # bash itself gave up
    except UserError as error:
        assert "give the resolved YAML" in str(error)


@pytest.mark.parametrize("words", ["'x\\0'", "'3\\0a\\0'", "'\\377\\0'", '"%s" "' + "9" * 5000 + '"'])
def test_a_script_that_writes_words_of_its_own_is_refused(words):
    with pytest.raises(UserError, match="descriptor 9"):
        commands_of(f"printf {words} >&9\nrun a.k=1")


def test_without_bash_the_fix_is_named(monkeypatch):
    monkeypatch.setattr(launch_script, "_MAIN", launch_script._MAIN.replace("/bin/bash", "/none/bash"))
    with pytest.raises(UserError, match="bash cannot be run .*give the resolved YAML"):
        commands_of("run a.k=1")


def test_output_has_a_bound():
    with pytest.raises(UserError, match="output limit"):
        commands_of(f"for i in {{1..1000}}; do run --x {'y' * 2000}; done")


def test_where_the_sandbox_is_weak_the_fix_is_named(monkeypatch):
    monkeypatch.setattr(launch_script, "active_layers", lambda: frozenset({"limits", "watcher"}))
    with pytest.raises(UserError, match="give the resolved YAML"):
        commands_of("run a.k=1")
