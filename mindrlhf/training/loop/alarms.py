"""The alarm of a run that learns nothing, or something else than what it is rewarded for: said while it happens.

Each alarm is an event of ``guards.jsonl`` and a warning when it begins, and once more a warning when the run ends.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from mindrlhf.algorithms.advantages import NO_SIGNAL_RANGE, groups_with_signal
from mindrlhf.checkpoint.algorithm_state import LearningState
from mindrlhf.config.reward import REWARD_MODEL_NAME
from mindrlhf.config.schema import AnyConfig, GrpoConfig
from mindrlhf.evaluation.heldout import Evaluation
from mindrlhf.evaluation.statistics import bootstrap_interval
from mindrlhf.observe.records import ALARM, ALARM_OVER
from mindrlhf.rollout.samples import Sample, verifier_names
from mindrlhf.training.loop.guards import Events, Guard, warn
from mindrlhf.training.loop.step import Step

MIN_STEPS = 5  # or all of a shorter run
NEAR_ONE = 0.95
SLOW_SHARE = 0.2  # of the time of a step, spent waiting for verifiers
_SHOWN_CHARS = 60
# Verifiers that compare with no reference; and those that take something off, to which 0 is what all is well with.
_WITHOUT_REFERENCES = ("format", "length_reward", "reasoning_steps", "environment_reward")
_PENALTY = "penalty"
NO_SIGNAL, NO_LOSS, NOT_RISEN = "no_signal", "no_loss", "not_risen"


class LossAlarm(Guard):
    """Watches whether any update has a loss or a gradient; what all alarms have in common.

    Args:
        config: of the run.
        events: where the alarms go.
        state: of the run so far; changed in place.
        num_steps: of the run; 0 when unknown.
    """

    def __init__(self, config: AnyConfig, events: Events, state: LearningState, num_steps: int = 0):
        self._events = events
        self._state = state
        self._needed = min(MIN_STEPS, num_steps or MIN_STEPS)
        self._stops = config.run.fail_without_signal

    def review_losses(self, step: int, losses: Iterable[tuple[float, float]]) -> None:
        """Look at loss and gradient norm of all updates of a step, from 1."""
        state = self._state
        state.with_loss += sum(not (loss == 0 and norm == 0) for loss, norm in losses)
        state.num_updated += 1
        self._watch(step, NO_LOSS, 0 if state.with_loss else state.num_updated, self._no_loss)

    def close(self) -> None:
        """Say once more what still holds when the run ends."""
        state = self._state
        for text in state.raised.values():
            warn(f"at the end of the run: {text}")
        if state.raised.keys() & {NO_SIGNAL, NO_LOSS}:
            warn(f"nothing was learned in {max(state.steps, state.num_updated)} steps: the model is what it was")

    def _watch(self, step: int, kind: str, num_steps: int, say: Callable[..., str], *about: object) -> None:
        """Begin an alarm that has held for so many steps, or end one that holds no more."""
        if num_steps >= self._needed:
            self._begin(step, kind, say(num_steps, *about))
        elif not num_steps:
            self._end(step, kind)

    def _begin(self, step: int, kind: str, text: str) -> None:
        if kind not in self._state.raised:
            self._events.write(step, ALARM, f"step {step}: {text}", alarm=kind, text=text)
        self._state.raised[kind] = text
        if self._stops and kind in (NO_SIGNAL, NO_LOSS):
            self.failure = self.failure or f"step {step}: {text} (run.fail_without_signal is true)"

    def _end(self, step: int, kind: str) -> None:
        if self._state.raised.pop(kind, ""):
            self._events.write(step, ALARM_OVER, "", alarm=kind)

    @staticmethod
    def _no_loss(num_steps: int) -> str:
        return f"loss and gradient were 0 in all updates of {num_steps} steps, which leave the model as it was"


class LearningAlarm(LossAlarm):
    """Watches whether there is anything to learn from, and whether the reward is for what it should be for."""

    def __init__(self, config: GrpoConfig, events: Events, state: LearningState, num_steps: int = 0):
        super().__init__(config, events, state, num_steps)
        algorithm, reward = config.algorithm, config.reward
        # A teacher is listened to whatever the rewards are.
        self._learns_from_rewards = algorithm.advantage != "distill" or algorithm.distill_reward_weight > 0
        weights = reward.verifier_weight or (1.0,) * len(reward.verifier_function)
        # The scores of a reward model have no highest one.
        self._most = sum(weight for weight in weights if weight > 0) if not reward.model_path else 0.0

    def review_rewards(self, step: int, samples: Sequence[Sample]) -> None:
        """Look at what the verifiers gave, and whether any group had a signal."""
        state = self._state
        state.steps += 1
        for name in verifier_names(samples):
            asked = [one for one in samples if name in one.reward.parts and name not in one.reward.failures]
            if asked:
                self._review_verifier(step, name, asked)
        is_scored = any(sample.reward.parts for sample in samples)
        if self._learns_from_rewards and is_scored:
            state.with_signal += _has_signal(samples)
            state.num_judged += 1
            self._watch(step, NO_SIGNAL, 0 if state.with_signal else state.num_judged, self._no_signal)
        totals = np.array([sample.reward.total for sample in samples])
        is_near = self._most > 0 and totals.mean() >= NEAR_ONE * self._most
        state.steps_near_one = state.steps_near_one + 1 if is_near else 0

    def review_update(self, step: Step, number: int) -> bool:
        """Look whether loss and gradients are 0; the alarm itself is no reason to count the update."""
        if number == len(step.updates) - 1:
            self.review_losses(step.number, [(one.loss, one.grad_norm) for one in step.updates])
        return False

    def review_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Look whether held-out accuracy has risen while the reward is near its highest value."""
        if not evaluations:
            return
        last = evaluations[-1]
        first = next(one for one in evaluations if one.is_comparable(last))
        is_high = self._state.steps_near_one >= MIN_STEPS and last.step > first.step
        if is_high and last.accuracy < NEAR_ONE:
            rise = bootstrap_interval(last.scores.mean(axis=1) - first.scores.mean(axis=1))
            if not rise.low > 0:
                self._begin(
                    last.step,
                    NOT_RISEN,
                    f"the reward has been near its highest value for {self._state.steps_near_one} steps, but held-out "
                    f"accuracy by {last.verifier} is {last.accuracy:.1%}, which is no rise since step {first.step} "
                    f"({first.accuracy:.1%}): what is rewarded is not what is wanted; look at the samples with "
                    "'mindrlhf view'",
                )
                return
        self._end(last.step, NOT_RISEN)

    def _review_verifier(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        state, values = self._state, np.array([sample.reward.parts[name] for sample in samples])
        if name not in state.varied:
            value = state.constant.setdefault(name, float(values[0]))
            if np.ptp(values) > NO_SIGNAL_RANGE or abs(values[0] - value) > NO_SIGNAL_RANGE:
                state.varied.append(name)
                del state.constant[name]
            else:
                state.num_constant[name] = state.num_constant.get(name, 0) + len(values)
        is_constant = name in state.constant and not (_PENALTY in name and state.constant[name] == 0)
        self._watch(step, f"constant {name}", state.steps if is_constant else 0, self._constant, name, samples)
        is_cut = all(sample.completion.finish_reason == "length" for sample in samples)
        is_paid = name != REWARD_MODEL_NAME and is_cut and values.mean() >= NEAR_ONE
        state.steps_paid_cut[name] = state.steps_paid_cut.get(name, 0) + 1 if is_paid else 0
        self._watch(step, f"paid_cut {name}", state.steps_paid_cut[name], self._paid_cut, name)

    def _constant(self, num_steps: int, name: str, samples: Sequence[Sample]) -> str:
        value, count = self._state.constant[name], self._state.num_constant[name]
        said = f"verifier {name} gave {value:g} to all {count:,} samples of {num_steps} steps"
        if value > 0 or any(word in name for word in _WITHOUT_REFERENCES):
            return f"{said}: it tells none from another; one ends with {samples[0].response_text[-_SHOWN_CHARS:]!r}"
        shown = next((sample for sample in samples if sample.prompt.answer), None)
        if shown is None:
            return f"{said}, whose prompts have no reference answers: name their column to 'mindrlhf data build'"
        response = shown.response_text[-_SHOWN_CHARS:]
        return (
            f"{said}: no response matched its reference; one reference is {shown.prompt.answer[:_SHOWN_CHARS]!r}, its "
            f"response ends with {response!r}: look whether the references are what the verifier compares with"
        )

    @staticmethod
    def _paid_cut(num_steps: int, name: str) -> str:
        return (
            f"verifier {name} gave {NEAR_ONE} or more on average for {num_steps} steps, while all responses were "
            "truncated at rollout.max_response_length: it pays for answers that were never finished; raise it, or look "
            "at the samples with 'mindrlhf view'"
        )

    @staticmethod
    def _no_signal(num_steps: int) -> str:
        return (
            f"in {num_steps} steps no group had samples with different rewards, so that there is nothing to learn "
            "from: look at the samples with 'mindrlhf view', and give prompts that are sometimes answered right"
        )


def _has_signal(samples: Iterable[Sample]) -> bool:
    """Whether rewards differ within a group; where each prompt has one sample, among all."""
    rewards = np.array([sample.reward.total for sample in samples])
    groups = np.array([sample.group for sample in samples])
    if len(np.unique(groups)) == len(groups):
        groups = np.zeros_like(groups)
    return bool(groups_with_signal(rewards, groups)[1].any())


class SlowRewards:
    """Measures how long steps wait for verifiers, and says once when that is a large part of them.

    Args:
        num_workers: `reward.num_workers`.
    """

    def __init__(self, num_workers: int | None):
        self._num_workers = num_workers
        self._last: deque[tuple[float, float]] = deque(maxlen=MIN_STEPS)  # seconds waited and all, of a step
        self._is_said = False

    def review(self, step: int, waited_s: float | None, timings: Mapping[str, float]) -> dict[str, float]:
        """Return the share of a step in which the ranks waited for verifiers, all responses being there.

        Where samples are made beside the loop, it counts where the ranks waited for samples.

        Args:
            step: its number.
            waited_s: for verifiers; None without any.
            timings: seconds of the stages of the step.
        """
        if waited_s is None:
            return {}
        whole_s = timings["timing/all"]
        waited_s = min(waited_s, timings.get("timing/rollout", timings.get("timing/rollout_wait", 0.0)))
        self._last.append((waited_s, whole_s))
        share = float(np.divide(*np.sum(self._last, axis=0)))
        if share > SLOW_SHARE and len(self._last) == MIN_STEPS and not self._is_said:
            self._is_said = True
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
