"""Warnings during training: nothing is learned, or something else is rewarded than what is wanted.

Each is an event of ``guards.jsonl`` and a warning when its condition begins to hold, and a warning when the run ends.
"""

import dataclasses
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindrlhf.algorithms.advantages import NO_SIGNAL_RANGE
from mindrlhf.checkpoint.algorithm_state import LearningState
from mindrlhf.config.reward import REWARD_MODEL_NAME
from mindrlhf.config.schema import AnyConfig, GrpoConfig
from mindrlhf.evaluation.heldout import Evaluation, paired
from mindrlhf.evaluation.statistics import bootstrap_interval
from mindrlhf.observe.records import ALARM, ALARM_OVER, GUARDS_NAME, JsonlWriter
from mindrlhf.rollout.samples import Sample, groups_that_teach, verifier_names
from mindrlhf.system.terminal import visible

MIN_STEPS = 5  # or all of a shorter run
NEAR_ONE = 0.95
SLOW_SHARE = 0.2  # of the time of a step, spent waiting for verifiers
_SHOWN_CHARS = 60
NO_SIGNAL, NO_LOSS, NOT_RISEN, FALLEN = "no_signal", "no_loss", "not_risen", "fallen"
_NEAR_HIGHEST = "reward near its highest value"  # counted, but no alarm of its own


class Events:
    """``guards.jsonl``, and a warning on the console for each event; see ``JsonlWriter`` for ``first_step``."""

    def __init__(self, output_dir: Path, *, first_step: int):
        self.path = output_dir / GUARDS_NAME
        self._writer = JsonlWriter(self.path, first_step=first_step)

    def write(self, step: int, event: str, warning: str, **values: Any) -> None:
        """Write an event of a step and warn of it, unless the warning is empty."""
        self._writer.write({"step": step, "event": event, **values})
        if warning:
            warn(warning)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def warn(text: str) -> None:
    """Print a line of warning."""
    print(f"warning: {visible(text)}", file=sys.stderr, flush=True)


class Condition(NamedTuple):
    """A condition of one step that is told when it has held for some steps.

    Attributes:
        text: the warning, from the number of steps for which the condition has held.
        after: steps until it is told.
        from_start: it has to hold in every step since the run began; else in the last ones.
        stop_after: steps until it stops the run; 0: never.
        remedy: ends the message of a run that is stopped.
    """

    name: str
    holds: bool
    text: Callable[[int], str]
    after: int
    from_start: bool = False
    stop_after: int = 0
    remedy: str = ""


class LossAlarm:
    """Warns while all losses and gradients are 0; keeps the state that all alarms share.

    Attributes:
        failure: why the run must stop, "" while it may go on.
    """

    def __init__(self, config: AnyConfig, events: Events, state: LearningState, num_steps: int = 0):
        self.failure = ""
        self._events = events
        self._state = state
        self._needed = min(MIN_STEPS, num_steps or MIN_STEPS)
        self._from_start = {"after": self._needed, "from_start": True}

    def review_losses(self, step: int, losses: Iterable[tuple[float, float]]) -> None:
        """Look at loss and gradient norm of all updates of a step, from 1."""
        is_zero = all(loss == norm == 0 for loss, norm in losses)
        self.watch(step, Condition(NO_LOSS, is_zero, _no_loss, **self._from_start))

    def close(self) -> None:
        """Repeat the warnings whose conditions still hold when the run ends."""
        state = self._state
        for text in state.raised.values():
            warn(f"at the end of the run: {text}")
        if state.raised.keys() & {NO_SIGNAL, NO_LOSS}:
            num_steps = max(state.held.get(NO_SIGNAL, 0), state.held.get(NO_LOSS, 0))
            warn(f"nothing was learned in {num_steps} steps: the model is what it was")

    def watch(self, step: int, condition: Condition) -> None:
        """Begin or end the alarm of a condition of a step."""
        num_steps = self._count(condition.name, condition.holds, condition.from_start)
        if num_steps >= condition.after:
            self._begin(step, condition.name, condition.text(num_steps))
        elif not num_steps:
            self._end(step, condition.name)
        if 0 < condition.stop_after <= num_steps:
            self.failure = self.failure or f"step {step}: {condition.text(num_steps)}{condition.remedy}"

    def _count(self, name: str, holds: bool, from_start: bool = False) -> int:
        """Return for how many steps a condition has held; one that had to from the start counts no more once broken."""
        before = self._state.held.get(name, 0)
        now = before + 1 if holds and before >= 0 else -1 if from_start else 0
        self._state.held[name] = now
        return max(0, now)

    def _begin(self, step: int, name: str, text: str) -> None:
        if name not in self._state.raised:
            self._events.write(step, ALARM, f"step {step}: {text}", alarm=name, text=text)
        self._state.raised[name] = text

    def _end(self, step: int, name: str) -> None:
        if self._state.raised.pop(name, ""):
            self._events.write(step, ALARM_OVER, "", alarm=name)


class LearningAlarm(LossAlarm):
    """Looks at rewards and evaluations as well."""

    def __init__(self, config: GrpoConfig, events: Events, state: LearningState, num_steps: int = 0):
        super().__init__(config, events, state, num_steps)
        algorithm, reward = config.algorithm, config.reward
        # A teacher is listened to whatever the rewards are.
        rewards_count = algorithm.options.get("distill_reward_weight", 0) > 0
        self._learns_from_rewards = algorithm.advantage != "distill" or rewards_count
        weights = reward.verifier_weight or (1.0,) * len(reward.verifier_function)
        # The scores of a reward model have no highest one.
        self._highest = sum(weight for weight in weights if weight > 0) if not reward.model_path else 0.0

    def review_rewards(self, step: int, samples: Sequence[Sample]) -> None:
        """Look at the rewards of all samples that a step, from 1, generated, whether trained on or not."""
        for name in verifier_names(samples):
            for condition in self._of_verifier(name, [sample for sample in samples if name in sample.reward.parts]):
                self.watch(step, condition)
        if self._learns_from_rewards and any(sample.reward.parts for sample in samples):
            self.watch(step, Condition(NO_SIGNAL, not _has_signal(samples), _no_signal, **self._from_start))
        mean = np.mean([sample.reward.total for sample in samples])
        self._count(_NEAR_HIGHEST, self._highest > 0 and mean >= NEAR_ONE * self._highest)

    def _of_verifier(self, name: str, samples: Sequence[Sample]) -> Iterator[Condition]:
        scored = [sample for sample in samples if name not in sample.reward.failures]
        if not scored:
            return
        values = np.array([sample.reward.parts[name] for sample in scored])
        first = self._state.first_values.setdefault(name, float(values[0]))
        is_constant = bool(np.abs(values - first).max() <= NO_SIGNAL_RANGE)
        yield Condition(f"constant {name}", is_constant, partial(_constant, name, first, scored[0]), **self._from_start)
        is_cut = all(sample.completion.finish_reason == "length" for sample in scored)
        is_paid = name != REWARD_MODEL_NAME and is_cut and bool(values.mean() >= NEAR_ONE)
        yield Condition(f"paid_cut {name}", is_paid, partial(_paid_cut, name), self._needed)

    def review_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Look whether held-out accuracy has fallen, or not risen while the reward is near its highest value."""
        if not evaluations:
            return
        last = evaluations[-1]
        comparable = [evaluation for evaluation in evaluations if evaluation.is_comparable(last)]
        first, best = comparable[0], max(comparable, key=lambda evaluation: evaluation.accuracy)
        before, after = paired(best, last)
        if bootstrap_interval(after - before).high < 0:
            self._begin(
                last.step,
                FALLEN,
                f"held-out accuracy by {last.verifier} is {last.accuracy:.1%}, and was {best.accuracy:.1%} at step "
                f"{best.step}: if the reward has risen since, it pays for something else; look at the responses in "
                "samples.jsonl",
            )
        else:
            self._end(last.step, FALLEN)
        num_steps = self._state.held.get(_NEAR_HIGHEST, 0)
        if num_steps >= MIN_STEPS and last.step > first.step and last.accuracy < NEAR_ONE:
            before, after = paired(first, last)
            rise = bootstrap_interval(after - before)
            if not rise.low > 0:
                self._begin(
                    last.step,
                    NOT_RISEN,
                    f"the reward has been near its highest value for {num_steps} steps, but held-out accuracy by "
                    f"{last.verifier} is {last.accuracy:.1%}, which is no rise since step {first.step} "
                    f"({first.accuracy:.1%}): what is rewarded is not what is wanted; look at the responses in "
                    "samples.jsonl",
                )
                return
        self._end(last.step, NOT_RISEN)


def _constant(verifier: str, value: float, sample: Sample, num_steps: int) -> str:
    said = (
        f"verifier {verifier} gave {value:g} to all samples of {num_steps} steps: it tells no response from another; "
        f"one ends with {sample.response_text[-_SHOWN_CHARS:]!r}"
    )
    if not (answer := sample.prompt.answer):
        return f"{said}, and its prompt has no reference answer: name their column to 'mindrlhf data build'"
    return f"{said}, and its reference is {answer[:_SHOWN_CHARS]!r}: look whether the verifier can compare the two"


def _paid_cut(verifier: str, num_steps: int) -> str:
    return (
        f"verifier {verifier} gave {NEAR_ONE} or more on average for {num_steps} steps, while all responses were "
        "truncated at rollout.max_response_length: it pays for answers that were never finished; raise it, or look at "
        "the responses in samples.jsonl"
    )


def _no_loss(num_steps: int) -> str:
    return f"loss and gradient were 0 in all updates of {num_steps} steps, which leave the model as it was"


def _no_signal(num_steps: int) -> str:
    return (
        f"in {num_steps} steps no group had samples with different rewards, so that there is nothing to learn "
        "from: look at the responses in samples.jsonl, and give prompts that are sometimes answered right"
    )


def _has_signal(samples: Sequence[Sample]) -> bool:
    """Return whether rewards differ within a group; where each prompt has one sample, among all."""
    if len({sample.group for sample in samples}) == len(samples):
        samples = [dataclasses.replace(sample, group=0) for sample in samples]
    return bool(groups_that_teach(samples)[1].any())


class SlowRewards:
    """Measures how long steps wait for verifiers, and warns once when that is a large part of them."""

    def __init__(self, num_workers: int | None):
        self._num_workers = num_workers
        self._last: deque[tuple[float, float]] = deque(maxlen=MIN_STEPS)  # seconds waited and all, of a step
        self._has_warned = False

    def review(self, step: int, waited_s: float | None, timings: Mapping[str, float]) -> dict[str, float]:
        """Return the share of a step in which the ranks waited for verifiers, all responses being there.

        Where samples are made beside the loop, it counts where the ranks waited for samples.
        """
        if waited_s is None:
            return {}
        whole_s = timings["timing/all"]
        waited_s = min(waited_s, timings.get("timing/rollout", timings.get("timing/rollout_wait", 0.0)))
        self._last.append((waited_s, whole_s))
        share = float(np.divide(*np.sum(self._last, axis=0)))
        if share > SLOW_SHARE and len(self._last) == MIN_STEPS and not self._has_warned:
            self._has_warned = True
            warn(f"step {step}: {share:.0%} of the last {MIN_STEPS} steps was waiting for verifiers: {self._remedy()}")
        return {"timing/reward_share": waited_s / whole_s}

    def _remedy(self) -> str:
        cores = len(os.sched_getaffinity(0))
        if self._num_workers is not None and self._num_workers < cores:
            return f"'reward.num_workers' is {self._num_workers}: give {cores}, one for each core, or leave it out"
        return (
            f"'reward.num_workers' is {self._num_workers or cores}, with {cores} cores: take a faster verifier, or "
            "where it asks a server more workers; 'mindrlhf rewards check' says how fast it is"
        )
