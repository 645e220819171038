"""Templates are programs of others: what they may take, and that one which takes more harms no other."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from mindrlhf.errors import UserError
from mindrlhf.sandbox import template_process
from mindrlhf.sandbox.limits import landlock
from mindrlhf.sandbox.template_process import TemplateFailure, find_variables, render

NOW = {"strftime_now": "2024-07-26"}
CHAT = ([{"role": "user", "content": "hi"}], NOW)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 3 s of processor",
        ),
        ("{{ (messages | length + 6) ** (9 ** 9) }}", "more than 3 s of processor"),
        ("{{ 'a' * 10 ** 10 }}", "MiB of memory"),
        (
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "MiB of memory",
        ),
        ("{{ 'a' * 20000000 }}", "20000004 characters, above 16777216"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('a\nb' * 1000) }}", "TemplateError: a ba b"),
        ("{{ messages.append(1) }}", "SecurityError"),
    ],
)
def test_what_passes_a_limit_is_a_failure_and_the_next_chat_is_rendered(source, reason):
    bad = "{% if messages[0].content == 'bad' %}" + source + "{% endif %}fine"
    chats = [([{"role": "user", "content": text}], NOW) for text in ("good", "bad", "good")]
    first, failure, last = render(bad, chats)
    assert (first, last) == ("fine", "fine") and isinstance(failure, TemplateFailure)
    assert reason in str(failure) and "\n" not in str(failure) and len(str(failure)) < 600


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{" + "(" * 500, "{{ " + "(" * 100_000 + "}}", "{{ " + "9" * 5000 + " }}"]
)
def test_what_cannot_be_compiled_has_a_reason(source):
    with pytest.raises(TemplateFailure, match=r"line \d+: |Error: "):
        find_variables(source)
    assert find_variables("{{ messages }}{{ strftime_now('%Y') }}") == {"messages", "strftime_now"}


@pytest.mark.skipif(not landlock.version(), reason="the kernel has no Landlock")
def test_the_process_opens_no_file_outside_pythons_modules(tmp_path):
    (tmp_path / "secret").write_text("secret")
    code = (
        "import json, sys\n"
        "from mindrlhf.sandbox import template_process as t\n"
        "t._give_up_rights()\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        open(path, 'rb').close(); print('opened')\n"
        "    except PermissionError:\n"
        "        print('refused')\n"
    )
    paths = [str(tmp_path / "secret"), "/etc/passwd", json.__file__]
    ended = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["refused", "refused", "opened"], ended.stderr


def test_a_killed_process_costs_one_chat_and_says_so():
    render("{{ messages }}", [CHAT])
    os.kill(template_process._process.pid, signal.SIGKILL)
    (answer,) = render("{{ messages[0].content }}", [CHAT])
    assert isinstance(answer, TemplateFailure) and "SIGKILL" in str(answer)
    assert render("{{ messages[0].content }}", [CHAT]) == ["hi"]


def test_threads_get_their_own_answers():
    def ask(number):
        chats = [([{"role": "user", "content": f"{number} {index}"}], NOW) for index in range(20)]
        answers[number] = render("{{ messages[0].content }}" + " " * number, chats)

    answers = {}
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {n: [f"{n} {i}" + " " * n for i in range(20)] for n in range(8)}


def test_it_ends_with_the_process_that_started_it():
    code = (
        "from mindrlhf.sandbox import template_process as t\n"
        "t.find_variables('x')\n"
        "print(t._process.pid, flush=True)\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid = int(ended.stdout)
    deadline = threading.Event()
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}"):
            return
        deadline.wait(0.1)
    pytest.fail(f"process {pid} goes on")


def test_without_transformers_it_says_what_to_install(monkeypatch):
    template_process._stop()
    monkeypatch.setattr(template_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install transformers"):
        find_variables("x")
