"""One finding of the doctor."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One finding. ``status`` is "ok", "warning" or "error"; ``fix`` is what to do when it is not "ok"."""

    section: str  # "training", "rollout" or "machine"
    name: str
    status: str
    finding: str
    fix: str = ""
