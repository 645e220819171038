import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from mindrlhf.errors import UserError
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput, RewardResult

pytestmark = pytest.mark.timeout(120)

# Does what the completion says, and otherwise rewards its length.
VERIFIERS = '''
import os, signal, subprocess, sys, time
from mindrlhf.sandbox import time_limit


def obedient(completion, answer):
    if completion == "hang":
        time.sleep(1000)
    if completion == "compute":  # holds the interpreter lock: no signal handler or thread would run
        return float(len(str(9**9**9)))
    if completion == "spawn":
        child = subprocess.Popen(["sleep", "1000"])
        with open(answer, "w") as f:
            f.write(str(child.pid))
        time.sleep(1000)
    if completion == "daemon":  # leaves the process group, and its parent
        if os.fork() == 0:
            os.setsid()
            pid = os.fork()
            if pid == 0:
                time.sleep(1000)
            with open(answer, "w") as f:
                f.write(str(pid))
            os._exit(0)
        os.wait()
        time.sleep(1000)
    if completion == "daemon and exit":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open(answer, "w") as f:
            f.write(str(child.pid))
        os._exit(4)
    if completion == "fork":  # the child keeps the worker's pipes open
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
        with open(answer, "w") as f:
            f.write(str(pid))
        os._exit(4)
    if completion == "exit":
        os._exit(3)
    if completion == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "sys.exit":
        sys.exit("enough")
    if completion.startswith("raise"):
        raise KeyError("no such thing")
    if completion == "allocate":
        return float(len(bytearray(1 << 30)))
    if completion == "print":
        print("[[0, [1.0]]]", flush=True)
        return float(sys.stdin.read() == "")
    if completion == "nap":
        time.sleep(0.05)
    if completion == "import":
        with time_limit.uncounted():
            time.sleep(5)
    if completion.startswith("return "):
        return {"nan": float("nan"), "inf": float("-inf"), "none": None, "text": "1.0", "list": [1.0],
                "true": True, "huge": 10**400, "large": 1e30}[completion[7:]]
    return float(len(completion))


def of_context(completion, answer, *, num_tokens, prompt, finish_reason):
    return num_tokens * 100 + len(prompt) * 10 + (finish_reason == "length")


def scaled(completion, answer, *, factor: float = 1.0, bonus: int = 0):
    return len(completion) * factor + bonus


def meeting(completion, answer):
    """Returns when two processes have come to the directory ``answer``."""
    open(os.path.join(answer, str(os.getpid())), "w").close()
    while len(os.listdir(answer)) < 2:
        time.sleep(0.01)
    return float(os.getpid())


def pid(completion, answer):
    return float(os.getpid())
'''


@pytest.fixture
def verifier_file(tmp_path) -> Path:
    path = tmp_path / "user_verifiers.py"
    path.write_text(VERIFIERS)
    return path


def open_pool(verifiers, weights, by_choice=(), options=(), **limits) -> RewardPool:
    selection = Selection(tuple(verifiers), tuple(weights), tuple(by_choice), dict(options))
    return RewardPool(selection, **limits)


def inputs(*completions: str, answer: str = "") -> list[RewardInput]:
    return [RewardInput(100 + i, completion, answer) for i, completion in enumerate(completions)]


def wait_until_gone(pid: int, limit_s: float = 30.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_scores_in_input_order_with_weights():
    samples = [
        RewardInput(7, "<think>a</think><answer>42.0</answer>", "42", num_tokens=1024),
        RewardInput(3, "#### 42", "42", num_tokens=3072),
        RewardInput(5, "", "42"),
    ]
    with open_pool(["accuracy_reward", "format_reward", "length_reward"], [1.0, 0.5, -2.0]) as pool:
        results = pool.score(samples)
        assert pool.score([]) == []
    names = ("accuracy_reward", "format_reward", "length_reward")
    assert results == [
        RewardResult(7, dict(zip(names, (1.0, 1.0, 0.5))), 0.5),
        RewardResult(3, dict(zip(names, (1.0, 0.0, 0.25))), 0.5),
        RewardResult(5, dict(zip(names, (0.0, 0.0, 0.0))), 0.0),
    ]


def test_many_samples_over_several_workers_and_calls(verifier_file):
    with open_pool([f"{verifier_file}:obedient"], [1.0], num_workers=3) as pool:
        for num_samples in (1, 2, 63, 65, 3000):
            results = pool.score([RewardInput(i, "x" * (i % 700), "") for i in range(num_samples)])
            assert [result.total for result in results] == [i % 700 for i in range(num_samples)]
            assert [result.index for result in results] == list(range(num_samples))


def test_results_stream_while_others_are_submitted(verifier_file):
    with open_pool([f"{verifier_file}:obedient"], [1.0]) as pool:
        assert list(pool.results()) == []
        pool.submit(RewardInput(0, "x", ""))
        seen = []
        for result in pool.results():
            seen.append((result.index, result.total))
            if result.index < 20:
                pool.submit(RewardInput(result.index + 1, "x" * (result.index + 2), ""))
        assert seen == [(i, i + 1.0) for i in range(21)]


def test_a_result_comes_before_its_slower_neighbours(verifier_file):
    with open_pool([f"{verifier_file}:obedient"], [1.0], timeout_s=5.0) as pool:
        for sample in inputs("nap", "hang"):
            pool.submit(sample)
        results = pool.results()
        assert next(results).index == 100
        assert [result.failures for result in results] == [{"obedient": "timeout"}]


def test_workers_run_side_by_side(verifier_file, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    with open_pool([f"{verifier_file}:meeting"], [1.0], num_workers=2, timeout_s=60.0) as pool:
        pids = {result.total for result in pool.score(inputs("a", "b", "c", "d", answer=str(place)))}
    assert len(pids) == 2
    assert all(wait_until_gone(int(pid)) for pid in pids)


@pytest.fixture
def cores(monkeypatch):
    """Have this process count so many cores: ``cores(number)``."""
    return lambda number: monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(number)))


def test_while_samples_wait_there_are_more_workers_up_to_one_for_each_core(verifier_file, tmp_path, cores):
    cores(3)
    place = tmp_path / "place"
    place.mkdir()
    # The first sample is not done before a second worker comes; the last ones keep three at work.
    with open_pool([f"{verifier_file}:meeting"], [1.0], num_workers=None, timeout_s=60.0) as pool:
        assert pool._pool._num_at_start == 1
        assert len({result.total for result in pool.score(inputs(*"abcd", answer=str(place)))}) == 2
    with open_pool([f"{verifier_file}:obedient"], [1.0], num_workers=None, timeout_s=60.0) as pool:
        results = pool.score(inputs(*["nap"] * 100))
        assert [result.total for result in results] == [3.0] * 100
        assert 2 <= len(pool._pool._workers) <= 3


def test_verifiers_that_keep_up_have_one_worker(verifier_file, cores, monkeypatch):
    cores(8)
    monkeypatch.setattr("mindrlhf.sandbox.pool.PATIENCE_S", 60.0)  # however busy the machine of the test
    with open_pool([f"{verifier_file}:pid"], [1.0], num_workers=None) as pool:
        assert len({result.total for result in pool.score(inputs(*["x"] * 300))}) == 1


@pytest.mark.parametrize("completion", ["hang", "compute"])
def test_a_hanging_verifier_costs_its_part_and_its_time_only(verifier_file, completion):
    samples = inputs("a", "bb", completion, "dddd")
    verifiers = [f"{verifier_file}:obedient", "format_reward"]
    with open_pool(verifiers, [1.0, 1.0], timeout_s=4.0, failure_value=-5.0) as pool:
        results = pool.score(samples)
    assert [result.parts["obedient"] for result in results] == [1.0, 2.0, -5.0, 4.0]
    assert [result.parts["format_reward"] for result in results] == [0.0] * 4
    assert [result.total for result in results] == [1.0, 2.0, -5.0, 4.0]
    late = {"obedient": "timeout"}
    assert [result.failures for result in results] == [{}, {}, late, {}]


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("spawn", "timeout"),
        ("daemon", "timeout"),
        ("fork", "worker died: exit code 4"),
        ("daemon and exit", "worker died: exit code 4"),
    ],
)
def test_children_of_a_verifier_die_with_its_worker(verifier_file, tmp_path, completion, reason):
    note = tmp_path / "pid"
    limit_s = 5.0 if reason == "timeout" else 60.0
    with open_pool([f"{verifier_file}:obedient"], [1.0], timeout_s=limit_s) as pool:
        results = pool.score(inputs("a", completion, "bb", answer=str(note)))
        assert [result.failures.get("obedient") for result in results] == [None, reason, None]
        assert wait_until_gone(int(note.read_text()))


def test_dying_workers_are_replaced(verifier_file):
    with open_pool([f"{verifier_file}:obedient", "format_reward"], [1.0, 1.0], num_workers=2) as pool:
        results = pool.score(inputs("a", "exit", "bb", "crash", "ccc", *["exit"] * 5, "dddd"))
        again = pool.score(inputs("a"))
    reasons = [result.failures.get("obedient") for result in results]
    exited = "worker died: exit code 3"
    assert reasons == [None, exited, None, "worker died: signal SIGSEGV", None, *[exited] * 5, None]
    assert [results[i].total for i in (0, 2, 4, 10)] == [1.0, 2.0, 3.0, 4.0]
    assert again[0].total == 1.0


def test_an_idle_worker_that_is_killed_is_replaced(verifier_file):
    with open_pool([f"{verifier_file}:pid"], [1.0]) as pool:
        first = pool.score(inputs("a"))[0].total
        os.kill(int(first), signal.SIGKILL)
        second = pool.score(inputs("b"))[0]
    assert second.failures == {}
    assert second.total != first


def test_exceptions_and_rewards_that_are_no_finite_numbers_cost_the_part(verifier_file):
    reasons = {"raise": "KeyError: 'no such thing'", "sys.exit": "SystemExit: enough"}
    shown = {"nan": "nan", "inf": "-inf", "none": "None", "text": "'1.0'", "list": "[1.0]", "huge": "1" + 79 * "0"}
    reasons |= {f"return {kind}": f"returned {value}, which is no finite number" for kind, value in shown.items()}
    reasons["return large"] = "returned 1e+30, which is beyond 1e+15"
    with open_pool([f"{verifier_file}:obedient"], [2.0], failure_value=-1.0) as pool:
        *failed, boolean, last = pool.score(inputs(*reasons, "return true", "aa"))
    for index, (result, reason) in enumerate(zip(failed, reasons.values(), strict=True), 100):
        assert result == RewardResult(index, {"obedient": -1.0}, -2.0, {"obedient": reason})
    assert (boolean.total, last.total, boolean.failures | last.failures) == (2.0, 4.0, {})


def test_failures_are_logged_with_their_samples(verifier_file, tmp_path):
    log = tmp_path / "failures.jsonl"
    completions = ("raise", "a", "return nan", "hang", "raise" + "x" * 10_000 + "y")
    samples = [RewardInput(i, text, "the answer", prompt="why \ud800?") for i, text in enumerate(completions)]
    verifiers = [f"{verifier_file}:obedient", "format_reward"]
    with open_pool(verifiers, [1.0, 1.0], timeout_s=4.0, failure_log=log) as pool:
        pool.score(samples)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(record["index"], record["reason"]) for record in records] == [
        (0, "KeyError: 'no such thing'"),
        (2, "returned nan, which is no finite number"),
        (3, "timeout"),
        (4, "KeyError: 'no such thing'"),
    ]
    assert "[... 6006 characters ...]" in records[3]["completion"]
    assert records[3]["completion"].endswith("xy")
    assert {record["verifier"] for record in records} == {"obedient"}
    shared = {"prompt": "why \ud800?", "answer": "the answer"}
    assert records[0].items() >= {"completion": "raise", **shared}.items()


def test_prompts_choose_their_verifiers(verifier_file):
    verifiers = ["format_reward", f"{verifier_file}:obedient", f"{verifier_file}:of_context"]
    samples = [
        RewardInput(0, "abc", "", num_tokens=2, verifiers=("obedient",)),
        RewardInput(1, "abc", "", num_tokens=2, verifiers=("of_context",)),
        RewardInput(2, "abc", "", num_tokens=2, verifiers=("obedient", "of_context")),
        RewardInput(3, "abc", "", num_tokens=2),
        RewardInput(4, "hang", "", verifiers=("obedient",)),
    ]
    with open_pool(verifiers, [1.0, 10.0, 0.5], by_choice=["obedient", "of_context"], timeout_s=4.0) as pool:
        results = pool.score(samples)
        with pytest.raises(UserError, match="choose the verifier 'obedeint', which is not in reward.by_choice"):
            pool.score([RewardInput(0, "abc", "", verifiers=("obedeint",))])
    assert [result.parts for result in results] == [
        {"format_reward": 0.0, "obedient": 3.0},
        {"format_reward": 0.0, "of_context": 200.0},
        {"format_reward": 0.0, "obedient": 3.0, "of_context": 200.0},
        {"format_reward": 0.0},
        {"format_reward": 0.0, "obedient": 0.0},
    ]
    assert [result.total for result in results] == [30.0, 100.0, 130.0, 0.0, 0.0]
    assert results[4].failures == {"obedient": "timeout"}


def test_options_reach_their_verifier(verifier_file):
    with open_pool([f"{verifier_file}:scaled"], [1.0], options={"scaled.factor": "2.5", "scaled.bonus": "1"}) as pool:
        assert pool.score(inputs("abcd"))[0].total == 11.0


def test_verifiers_run_in_an_environment_of_their_own(tmp_path):
    venv.create(tmp_path / "own", with_pip=False)
    (packages,) = tmp_path.glob("own/lib/python*/site-packages")
    (packages / "only_there.py").write_text("VALUE = 2.5\n")
    (tmp_path / "file.py").write_text(
        "import importlib.util, only_there\n"
        "def value(completion, answer):\n"
        "    return only_there.VALUE + (importlib.util.find_spec('numpy') is not None)\n"
    )
    selection = Selection((f"{tmp_path / 'file.py'}:value", "accuracy_reward"), (1.0, 10.0))
    with pytest.raises(UserError, match="No module named 'only_there'"), RewardPool(selection):
        pass
    python = str(tmp_path / "own" / "bin" / "python")
    with RewardPool(dataclasses.replace(selection, python=python)) as pool:
        assert pool.score([RewardInput(0, "It is 4.", "4")])[0].total == 12.5
    with pytest.raises(UserError, match="'reward.python' is /none: there is no such program"):
        RewardPool(dataclasses.replace(selection, python="/none"))


def test_a_worker_may_not_take_all_memory(verifier_file):
    with open_pool([f"{verifier_file}:obedient"], [1.0], memory_limit_mib=300) as pool:
        results = pool.score(inputs("allocate", "aa"))
    assert results[0].failures["obedient"].startswith("MemoryError")
    assert results[1].total == 2.0


def test_printing_and_reading_do_not_disturb_the_pool(verifier_file):
    with open_pool([f"{verifier_file}:obedient"], [1.0]) as pool:
        assert [result.total for result in pool.score(inputs("print", "aa"))] == [1.0, 2.0]


def test_slow_imports_are_not_counted(verifier_file):
    with open_pool([f"{verifier_file}:obedient"], [1.0], timeout_s=4.0) as pool:
        assert pool.score(inputs("import"))[0] == RewardResult(100, {"obedient": 6.0}, 6.0, {})


def test_context_reaches_the_verifiers_that_name_it(verifier_file):
    sample = RewardInput(0, "abc", "", prompt="1234", finish_reason="length", num_tokens=7)
    with open_pool([f"{verifier_file}:obedient", f"{verifier_file}:of_context"], [1.0, 1.0]) as pool:
        assert pool.score([sample])[0].parts == {"obedient": 3.0, "of_context": 741.0}


def test_large_and_odd_texts_pass_unchanged(verifier_file):
    texts = ["x" * 10_000_000, "\ud800\n\r\u2028\x00", "\U0001f600" * 300_000]
    with open_pool([f"{verifier_file}:obedient"], [1.0]) as pool:
        assert [result.total for result in pool.score(inputs(*texts))] == [len(text) for text in texts]


def test_hostile_answers_do_not_stall_the_pool():
    completions = ["{" * 10_000_000, "\\boxed{" * 1_000_000, "#### " + "(" * 300, "#### 9**9**9", "#### 42"]
    with open_pool(["accuracy_reward"], [1.0], timeout_s=20.0) as pool:
        results = pool.score(inputs(*completions, answer="42"))
    assert [result.total for result in results] == [0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verifiers": ["format_rewards"]}, "did you mean format_reward"),
        (
            {"verifiers": ["{file}:nothing"]},
            "has no function 'nothing'; it has obedient, of_context, scaled, meeting, pid",
        ),
        ({"weights": [1.0, 2.0]}, "1 verifiers"),
        ({"weights": [math.inf]}, "finite number"),
        ({"num_workers": 0}, "0 processes for verifiers"),
        ({"timeout_s": 0.0}, "time limit"),
        ({"failure_value": math.nan}, "failed verifiers is nan"),
        ({"options": {"format_reward.bonus": "1"}}, "no option 'bonus'; it has none"),
        ({"options": {"{file}:scaled.bonus": "1"}}, "'reward.options' names the verifier 'scaled'"),
    ],
)
def test_bad_options_are_user_errors(verifier_file, options, message):
    options = {"verifiers": ["format_reward"], "weights": [1.0], **options}
    options["verifiers"] = [name.replace("{file}", str(verifier_file)) for name in options["verifiers"]]
    with pytest.raises(UserError, match=message):
        open_pool(**options)


def test_close_ends_hanging_workers_and_may_be_repeated(verifier_file):
    pool = open_pool([f"{verifier_file}:pid"], [1.0])
    pid = int(pool.score(inputs("a"))[0].total)
    pool.submit(inputs("b")[0])
    pool.close()
    pool.close()
    assert wait_until_gone(pid)
    with pytest.raises(AssertionError, match="closed"):
        pool.submit(inputs("c")[0])


def test_workers_do_not_outlive_a_killed_parent(verifier_file):
    script = f"""
import time
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput
selection = Selection(("{verifier_file}:pid", "{verifier_file}:obedient"), (1.0, 1.0))
pool = RewardPool(selection, timeout_s=1000.0)
print(int(pool.score([RewardInput(0, "a", "")])[0].parts["pid"]), flush=True)
pool.submit(RewardInput(1, "compute", ""))
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker_pid = None
    try:
        worker_pid = int(parent.stdout.readline())
        time.sleep(0.3)
        parent.kill()
        assert wait_until_gone(worker_pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        if worker_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker_pid, signal.SIGKILL)
