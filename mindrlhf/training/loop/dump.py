"""What msprobe compares of chosen steps, as rank 0 has them: samples, log-probabilities, advantages, loss."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindrlhf.config.observe import CELL_LEVEL, DEBUG_LEVEL, MsprobeSection
from mindrlhf.debugging.dump_files import StageDump
from mindrlhf.debugging.dump_paths import rank_dir

if TYPE_CHECKING:
    from mindrlhf.rollout.samples import Sample
    from mindrlhf.training.loop.policy import Policy
    from mindrlhf.training.loop.step import Step

# What the ranks were given, by the stage that computed it; the rest was made for the update.
_STAGE_OF = {"old_logprobs": "old_log_prob"}
_STAGE_OF |= dict.fromkeys(("reference_logprobs", "teacher_tokens", "teacher_logprobs"), "reference")


class StepDump:
    """Writes the inputs and results of each step in the range, and has the ranks write their cells.

    Args:
        section: what to dump; ``enabled`` is true.
        dump_dir: of the run.
        policy: keeps the batches of a step until the next one.
    """

    def __init__(self, section: MsprobeSection, dump_dir: Path, policy: "Policy"):
        self._section = section
        self._dump_dir = dump_dir
        self._policy = policy

    def is_due(self, step: int) -> bool:
        """Whether a step, from 1, is dumped."""
        return self._section.first_step <= step <= self._section.last_step

    def begin(self, step: int) -> None:
        """Have the ranks write the cells that the step runs; call it before they compute anything of it."""
        if self._section.level == CELL_LEVEL:
            self._policy.begin_dump(step)

    def finish(self, step: "Step") -> None:
        """Write the dump of a step, before its batches are gone.

        Raises:
            RunFailure: the disk refuses.
        """
        if self._section.level == CELL_LEVEL:
            self._policy.end_dump()
        entries: dict[str, list[tuple[str, Any]]] = {stage: [] for stage in ("rollout", *_STAGE_OF.values(), "update")}
        entries["rollout"] = _rollout(step.trained)
        for name, responses in self._token_arrays(step).items():
            entries[_STAGE_OF.get(name, "update")].append((name, responses))
        for number, update in enumerate(step.updates):
            batch = step.batches[number % len(step.batches)]
            entries["update"] += [
                ("logprobs", batch.responses(update.logprobs)),
                ("loss", np.array(update.loss)),
                ("grad_norm", np.array(float(update.grad_norm))),
            ]
        for stage, values in entries.items():
            if values and stage in self._section.stages:
                dump = StageDump(rank_dir(self._dump_dir, stage, step.number, 0), DEBUG_LEVEL, self._section.task)
                for name, value in values:
                    dump.add_values(name, value)
                dump.write()

    def _token_arrays(self, step: "Step") -> dict[str, list[np.ndarray]]:
        """Return what the ranks were given for each generated token: name -> an array for each sample."""
        found: dict[str, list[np.ndarray]] = {}
        for position, batch in enumerate(step.batches):
            held = self._policy.held_rows(position, batch)
            for name in held[0].tokens:
                found.setdefault(name, []).extend(batch.responses([rows.tokens[name] for rows in held]))
        return found


def _rollout(samples: Sequence["Sample"]) -> list[tuple[str, Any]]:
    return [
        ("prompts", [sample.prompt_text for sample in samples]),
        ("prompt_ids", [sample.prompt.prompt_ids for sample in samples]),
        ("responses", [sample.response_text for sample in samples]),
        ("response_ids", [sample.completion.token_ids for sample in samples]),
        ("rollout_logprobs", [sample.completion.logprobs for sample in samples]),
        ("rewards", [dict(sample.reward.parts) for sample in samples]),
        ("reward", np.array([sample.reward.total for sample in samples])),
    ]
