"""`mindrlhf doctor --device`: the rungs one after the other, up to the first that breaks, and a report to send."""

import html
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
    log.write_text(said)
    what = RUNGS[name].__doc__.splitlines()[0]
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
    """Write ``doctor.json`` and ``doctor.html``."""
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
    rows = "".join(_row(one) for one in climbed)
    facts = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in head.items())
    (directory / "doctor.html").write_text(_PAGE.format(facts=facts, rows=rows), encoding="utf-8")


def _row(one: Climbed) -> str:
    words = [f"{name}: {_shown(value)}" for name, value in one.found.items() if value != []]
    words += [f"{word}: {text}" for word, text in (("cause", one.cause), ("fix", one.fix)) if text]
    said = "".join(f"<li>{html.escape(word)}</li>" for word in words)
    cells = f"<td>{one.number}</td><td class={one.status}>{one.status}</td><td>{html.escape(one.name)}</td>"
    return f"<tr>{cells}<td>{one.seconds:.0f} s</td><td>{html.escape(one.what)}<ul>{said}</ul></td></tr>"


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


_PAGE = """<!doctype html><html lang=en><meta charset=utf-8><title>mindrlhf doctor --device</title>
<meta name=viewport content="width=device-width"><style>
:root {{ color-scheme: light dark; --line: light-dark(#ddd, #444); }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
td:nth-child(4) {{ white-space: nowrap; }}
td, th {{ border-top: 1px solid var(--line); padding: .5rem .6rem; text-align: left; vertical-align: top; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; overflow-wrap: anywhere; }}
dt {{ opacity: .7; }} dd {{ margin: 0; }} ul {{ margin: .3rem 0 0; padding-left: 1.1rem; overflow-wrap: anywhere; }}
.ok {{ color: light-dark(#107040, #60d090); }} .failed {{ color: light-dark(#b02020, #ff8080); font-weight: 600; }}
.skipped {{ opacity: .6; }}
</style><h1>mindrlhf doctor --device</h1><dl>{facts}</dl>
<table><tr><th>#<th>result<th>rung<th>time<th>what was tried, and found</tr>{rows}</table></html>
"""


_COUNT = "import torch, torch_npu; print(torch.npu.device_count())"


def count_devices(device: str, wanted: int, python: str) -> int:
    """Return how many devices to try: ``wanted``, or when it is 0 all NPUs of this machine, or two ranks on a CPU.

    Raises:
        UserError: there are not so many.
    """
    if device == "cpu":
        return wanted or 2
    try:
        ended = subprocess.run([python, "-c", _COUNT], capture_output=True, text=True, timeout=300)
        seen = int(ended.stdout.split()[-1]) if ended.returncode == 0 and ended.stdout.strip() else 0
    except (OSError, subprocess.TimeoutExpired):
        seen = 0
    there = seen or len(list(Path("/dev").glob("davinci[0-9]*")))
    if not there:
        raise UserError(
            "no NPU on this machine: there is no /dev/davinci0, and the rollout environment sees none either; "
            "mindrlhf doctor says what is missing, and --device cpu tries the same on the CPU"
        )
    if wanted > there:
        raise UserError(f"--npus {wanted}: this machine has {there}")
    return wanted or there
