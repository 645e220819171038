"""Rubrics: criteria with weights, and which of them a judge says a response meets."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_CRITERIA = 64
# "3: yes", "**3.** No", "- Criterion 3: yes, because ..."
_VERDICT = re.compile(r"^[\s*#>-]*(?:criterion\s+)?([0-9]{1,3})[\s*]*[:.)][\s*]*(yes|no)\b", re.I | re.M)


@dataclass(frozen=True)
class Criterion:
    """One thing that a response has (or, with a negative weight, should not have)."""

    text: str
    weight: float


@dataclass(frozen=True)
class Rubric:
    """The criteria of a problem, and its reference answer, if it has one."""

    criteria: tuple[Criterion, ...]
    reference: str = ""

    def reward(self, met: Sequence[bool]) -> float:
        """Return the weights of the criteria that are met over the sum of the positive ones, cut to 0 to 1.

        Source: HealthBench, Arora et al. 2025 (arXiv:2505.08775), section 2; as a reward: Gunjal et al. 2025
        (arXiv:2507.17746), "explicit aggregation".
        """
        best = math.fsum(criterion.weight for criterion in self.criteria if criterion.weight > 0)
        earned = math.fsum(criterion.weight for criterion, is_met in zip(self.criteria, met, strict=True) if is_met)
        return min(max(earned / best, 0.0), 1.0)


def parse_rubric(answer: str, shared: str = "") -> Rubric:
    """Return the rubric that a record's answer holds, or else the one ``shared`` by all records.

    A rubric is a JSON list of criteria, each a text (weight 1) or ``{"criterion": text, "weight": number}``. An answer
    may also be ``{"rubric": [...], "reference": text}``. With a shared rubric an answer that is neither is the
    reference.

    Raises:
        ValueError: there is no rubric, or it makes no sense.
    """
    value = _json(answer)
    if isinstance(value, dict) and "rubric" in value:
        unknown = sorted(value.keys() - {"rubric", "reference"})
        if unknown:
            raise ValueError(f"the rubric's record has the key {unknown[0]!r}; it takes 'rubric' and 'reference'")
        reference = value.get("reference", "")
        if not isinstance(reference, str):
            raise ValueError(f"'reference' of the rubric is a {type(reference).__name__}: it must be text")
        return Rubric(_criteria(value["rubric"]), reference)
    if isinstance(value, list) and not shared:
        return Rubric(_criteria(value))
    if not shared:
        raise ValueError(
            "the record's answer holds no rubric: give a JSON list of criteria, or the option rubric for all records"
        )
    return Rubric(_criteria(_json(shared)), answer)


def read_verdicts(reply: str, num_criteria: int) -> list[bool]:
    """Return what a judge's lines ``N: yes`` or ``N: no`` say of each criterion, in order.

    Raises:
        ValueError: a criterion is left out, contradicted or not there.
    """
    verdicts: dict[int, bool] = {}
    for number, word in _VERDICT.findall(reply):
        position, is_met = int(number), word.lower() == "yes"
        if not 1 <= position <= num_criteria:
            raise ValueError(f"the judge speaks of criterion {position}; there are {num_criteria}")
        if verdicts.setdefault(position, is_met) != is_met:
            raise ValueError(f"the judge says both yes and no to criterion {position}")
    missing = [str(number) for number in range(1, num_criteria + 1) if number not in verdicts]
    if missing:
        raise ValueError(f"the judge says nothing of criterion {', '.join(missing)}: {reply[-100:]!r}")
    return [verdicts[number] for number in range(1, num_criteria + 1)]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _criteria(value: Any) -> tuple[Criterion, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CRITERIA:
        raise ValueError(f"a rubric is a JSON list of 1 to {MAX_CRITERIA} criteria")
    criteria = tuple(_criterion(item, number) for number, item in enumerate(value, start=1))
    if not any(criterion.weight > 0 for criterion in criteria):
        raise ValueError("no criterion of the rubric has a positive weight: no response could earn anything")
    return criteria


def _criterion(item: Any, number: int) -> Criterion:
    if isinstance(item, str):
        item = {"criterion": item}
    if not isinstance(item, dict) or not {"criterion"} <= item.keys() <= {"criterion", "weight"}:
        raise ValueError(f"criterion {number} of the rubric must be text, or have 'criterion' and perhaps 'weight'")
    text, weight = item["criterion"], item.get("weight", 1)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"criterion {number} of the rubric has no text")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < abs(weight) <= 1e6:
        raise ValueError(f"the weight of criterion {number} is {weight!r}: it must be a number other than 0, up to 1e6")
    return Criterion(text.strip(), float(weight))
