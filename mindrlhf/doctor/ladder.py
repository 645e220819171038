"""`mindrlhf doctor --device`: the rungs one after the other, up to the first that breaks, and a report to send."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mindrlhf
from mindrlhf.doctor.rungs import FOUND_MARK, RUNGS, Ground
from mindrlhf.doctor.toy import write_inputs
from mindrlhf.errors import UserError

RUNG_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Climbed:
    """A rung that was tried. ``status`` is "ok", "skipped" or "failed"; a cause and what to do go with the last."""

    number: int
    name: str
    what: str
    status: str
    seconds: float
    found: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    fix: str = ""

    def to_text(self) -> str:
        """Return it as lines for a terminal."""
        lines = [
            f"  {self.number}  {self.status:<8} {self.name:<13} {self.seconds:5.0f} s",
            f"     {'':<8} {self.what}",
        ]
        lines += [f"     {'':<8} {name}: {_shown(value)}" for name, value in self.found.items() if value != []]
        lines += [f"     {'':<8} {word}: {text}" for word, text in (("cause", self.cause), ("fix", self.fix)) if text]
        return "\n".join(lines)


def choose_rungs(text: str) -> list[str]:
    """Return the names of ``text``, such as ``1,4-6`` or ``graph,train``; all when it is empty.

    Raises:
        UserError: there is no such rung.
    """
    names, chosen = list(RUNGS), set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        if part in RUNGS:
            chosen.add(part)
        elif first.isdecimal() and (last or first).isdecimal() and 1 <= int(first) <= int(last or first) <= len(names):
            chosen.update(names[int(first) - 1 : int(last or first)])
        else:
            raise UserError(f"--rungs {text}: no rung '{part}'; they are 1 to {len(names)}: {', '.join(names)}")
    return [name for name in names if name in chosen] if chosen else names


def climb(ground: Ground, names: Sequence[str], say: Callable[[str], None]) -> list[Climbed]:
    """Try the rungs in turn, each in a process of its own, until one fails; ``say`` gets the text of each."""
    directory = Path(ground.directory)
    write_inputs(directory, ground.num_devices)
    climbed = []
    for number, name in enumerate(RUNGS, 1):
        if name not in names:
            continue
        climbed.append(_try(ground, number, name))
        say(climbed[-1].to_text())
        write_report(directory, ground, climbed)
        if climbed[-1].status == "failed":
            break
    return climbed


def _try(ground: Ground, number: int, name: str) -> Climbed:
    start, log = time.monotonic(), Path(ground.directory) / f"{number}_{name}.log"
    command = [sys.executable, "-m", "mindrlhf.doctor.rungs", name, json.dumps(asdict(ground))]
    try:
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=RUNG_TIMEOUT_S,
            env={**os.environ, "GLOG_v": "3"},
        )
        said, code = ended.stdout, ended.returncode
    except subprocess.TimeoutExpired as expired:
        said, code = (expired.stdout or b"").decode(errors="replace"), None
    log.write_text(said, encoding="utf-8")
    what = (RUNGS[name].__doc__ or name).splitlines()[0]
    seconds = time.monotonic() - start
    answers = [line for line in said.splitlines() if line.startswith(FOUND_MARK)]
    if not answers:
        cause = f"no end within {RUNG_TIMEOUT_S:.0f} s" if code is None else f"the process ended with exit code {code}"
        return Climbed(number, name, what, "failed", seconds, {}, cause, f"see {log}")
    answer = json.loads(answers[-1].removeprefix(FOUND_MARK))
    if "cause" in answer:
        return Climbed(number, name, what, "failed", seconds, {}, answer["cause"], answer["fix"])
    found = answer["found"]
    skipped = found.pop("skipped", "")
    return Climbed(number, name, skipped or what, "skipped" if skipped else "ok", seconds, found)


def write_report(directory: Path, ground: Ground, climbed: Sequence[Climbed]) -> None:
    """Write ``doctor.json``, for a colleague or an issue."""
    head = {
        "mindrlhf": mindrlhf.__version__,
        "machine": f"{platform.machine()}, {platform.release()}",
        "device": f"{ground.device}, {ground.num_devices}",
        "python": f"{sys.executable}, {platform.python_version()}",
        "rollout python": ground.python,
        "CANN": os.environ.get("ASCEND_HOME_PATH", "none loaded"),
    }
    document = {"head": head, "rungs": [asdict(one) for one in climbed]}
    (directory / "doctor.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def count_devices(device: str, wanted: int) -> int:
    """Return how many devices to try: ``wanted``, or when it is 0 all NPUs of this machine, or two ranks on a CPU.

    Raises:
        UserError: there are not so many.
    """
    if device == "cpu":
        return wanted or 2
    there = len(list(Path("/dev").glob("davinci[0-9]*")))
    if not there:
        raise UserError(
            "no NPU on this machine: there is no /dev/davinci0; mindrlhf doctor says what is missing, and --device cpu "
            "tries the same on the CPU"
        )
    if wanted > there:
        raise UserError(f"--npus {wanted}: this machine has {there}")
    return wanted or there
