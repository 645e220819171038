"""Tasks of reasoning-gym (Apache-2.0), the extra `environments`: made by `mindrlhf data get`, and their own scores.

A record's answer is JSON, ``{"dataset": NAME, "entry": what the package's own scorer reads}``.
"""

import importlib.util
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.rewards.answers.extraction import behind_thoughts, last_boxed
from mindrlhf.rewards.registry import register_comparing
from mindrlhf.sandbox import time_limit

PREFIX = "reasoning-gym:"


@register_comparing
def reasoning_gym_score(completion: str, answer: str, *, prompt: str = "") -> float:
    """Return the score of the final answer by reasoning-gym's own scorer of the task, from 0 to 1.

    The final answer is the last ``<answer>...</answer>``, or else the last box, or all of it behind the thoughts.
    An answer that the scorer cannot read earns nothing.

    Raises:
        ValueError: the record's answer is of no task, or reasoning-gym is not installed.
    """
    task = json.loads(answer)
    if not isinstance(task, dict) or not {"dataset", "entry"} <= task.keys():
        raise ValueError(f"the reference answer {answer[:80]!r} is no task: make tasks with 'data get {PREFIX}NAME'")
    with time_limit.uncounted():
        package = _package()
        score = package.get_score_answer_fn(task["dataset"])
    text = behind_thoughts(completion, prompt)
    marked = (package.utils.extract_answer(text), last_boxed(text))
    given = next((one for one in marked if one is not None), text)
    try:
        return float(score(answer=given.strip(), entry=task["entry"]))
    except Exception:  # whatever a scorer stumbles over is the answer's fault
        return 0.0


def make_tasks(name: str, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield records of a data set of reasoning-gym, ``question`` and ``answer``: a function of name, size and seed.

    Raises:
        UserError: there is no such data set, it needs settings of its own, its scorer reads what JSON cannot hold, or
            the package is not installed.
    """
    package = _package()
    known = sorted(package.factory.DATASETS)
    if name not in known:
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
        raise UserError(f"reasoning-gym has no data set '{name}': did you mean {', '.join(near)}?")
    try:
        entries = package.create_dataset(name, size=size, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"reasoning-gym does not make '{name}' without settings of its own: {error}") from error
    score = package.get_score_answer_fn(name)
    for number in range(size):
        entry = entries[number]
        text = json.dumps({"dataset": name, "entry": entry}, default=repr)
        own = {"answer": entry["answer"], "entry": json.loads(text)["entry"]}
        if score(**own) != score(answer=entry["answer"], entry=entry):
            raise UserError(f"reasoning-gym's scorer of '{name}' reads what a JSON record cannot hold: take another")
        yield {"question": entry["question"], "answer": text}


def _package() -> ModuleType:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError("reasoning-gym is not installed: python -m pip install 'mindrlhf[environments]'")
    import reasoning_gym

    return reasoning_gym
