"""Off-policy sampling: a thread of rank 0 has the samples of later steps generated while a step is trained on.

Which weights generate what follows from step counts alone. Let v(i) be the weights that step i, from 0, begins with.
With `rollout.off_policy_steps` k, step i trains on samples of v(max(0, i - k)). It does one thing after the other:

    load v(0), sample steps 0 to k, load v(1), sample step k + 1, load v(2), ...

so that weights reach the generator between two steps' samples only, never at a moment that a clock decides. Before
the loop publishes v(i + 1), it waits until v(i) is loaded and the samples of step i + 1 are there. With k = 1 nothing
is then being generated: a server that dies on the way finds its weights in the weight buffer still.

A checkpoint holds the samples that are not trained on, since the weights that generated them are gone. What step i
asks for is generated with v(i), which are the checkpoint's own: a resumed run asks for it again and gets the same.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from mindrlhf.checkpoint.algorithm_state import OffPolicyState
from mindrlhf.checkpoint.leftover import LeftoverSample
from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.rollout.samples import Sample
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.leftover import from_leftover, to_leftover
from mindrlhf.training.loop.sampling.busy import BusyTime
from mindrlhf.training.loop.sampling.in_step import Rollout
from mindrlhf.training.loop.step import StepSamples

# What a checkpoint says of each sample beside its values: the place of its step, and in which list of it it is.
_PLACE, _LIST = "ahead_place", "ahead_list"


class SamplingOffPolicy:
    """Takes the place of :class:`mindrlhf.training.loop.sampling.in_step.SamplingInStep`; see there for the methods.

    Args:
        rollout: makes the samples; its generator and prompts are the thread's, but while ``settle`` says otherwise.
        progress: of the run.
        ahead: k, from 1.
        num_steps: of the run; nothing is sampled for later ones.
        needs_greedy: whether to generate the likeliest responses as well.
        wait_stage: context around each wait for samples.
    """

    sleeps = False

    def __init__(
        self,
        rollout: Rollout,
        progress: Progress,
        *,
        ahead: int,
        num_steps: int,
        needs_greedy: bool,
        wait_stage: Callable[[], contextlib.AbstractContextManager[None]],
    ):
        self._rollout = rollout
        self._prompts = rollout.prompts.beside_the_loop()
        self._progress = progress
        self._ahead = ahead
        self._num_steps = num_steps
        self._needs_greedy = needs_greedy
        self._wait_stage = wait_stage
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._busy = BusyTime()
        self._steps: dict[int, Future[StepSamples]] = {}  # asked for and not yet trained on, in order
        self._load: Future[None] | None = None  # the last
        self._version = 0  # of the weights that what is asked for next will be of
        self._leftover: list[Sample] = []  # by dynamic sampling; the thread's
        self._has_begun = False
        self._num_ready = 0
        self._restore()

    def load(self, version: int, bucket: int) -> None:
        """Have the generator take the weights that are in the weight buffer, after what it was asked for before.

        They are there whole: a bucket could not wait for that.
        """
        assert bucket == 0, "the weight buffer holds a part of the weights"
        self._version = version
        self._load = self._submit(self._rollout.generator.update_weights, version)

    def sample(self, index: int) -> StepSamples:
        """Ask for the samples of step ``index + ahead``, and return those of step ``index``.

        Raises:
            StopRequested: before the first step that this process does, as nothing is lost by it.
        """
        self._busy.begin_step()
        if self._has_begun:
            self._ask(index)
        else:
            with self._rollout.prompts.interruptible():
                self._ask(index)
                self._wait([self._steps[index]])
        self._has_begun = True
        sampled = self._steps.pop(index).result()
        self._num_ready = sum(step.done() for step in self._steps.values())
        return sampled

    def keep_leftover(self, samples: StepSamples) -> None:
        """Do nothing: the thread has used what was left over."""

    def free_buffer(self, next_step: int) -> None:
        """Return when the published weights are loaded, and the samples of step ``next_step``, if any, are there."""
        self._wait([found for found in (self._load, self._steps.get(next_step)) if found])

    def settle(self) -> None:
        """Wait for all that was asked for, and put it into ``progress`` as a checkpoint holds it."""
        self._wait([*self._steps.values(), *([self._load] if self._load else [])])
        sampled = [step.result() for step in self._steps.values()]
        self._progress.leftover = [one for place, step in enumerate(sampled) for one in _to_leftover(step, place)]
        self._progress.algorithm.ahead = OffPolicyState(
            versions=[step.version for step in sampled],
            num_stale=[step.num_stale for step in sampled],
            num_without_signal=[step.num_without_signal for step in sampled],
        )

    def metrics(self, timings: Mapping[str, float]) -> dict[str, float]:
        """Return how busy ranks and servers were since the step began, and how many later steps' samples were ready."""
        return {**self._busy.idle_metrics(timings), "async/queue": float(self._num_ready)}

    def close(self) -> None:
        """Break off what is being generated, and end the thread."""
        self._rollout.generator.cancel()
        self._thread.shutdown(cancel_futures=True)

    def _ask(self, index: int) -> None:
        """Ask for all samples up to those of step ``index + ahead`` that are neither here nor asked for."""
        for step in range(index, min(index + self._ahead + 1, self._num_steps)):
            if step > max(self._steps, default=index - 1):
                self._steps[step] = self._submit(self._sample, step, self._version)

    def _sample(self, step: int, version: int) -> StepSamples:
        start_s = time.perf_counter()
        samples = self._prompts.sample(step, self._leftover, needs_greedy=self._needs_greedy)
        self._leftover = samples.leftover
        versions = {sample.completion.weights_version for sample in (*samples.generated, *samples.greedy)}
        assert versions <= {version}, f"samples of step {step + 1} must be of weights {version}, but are of {versions}"
        return replace(samples, version=version, rollout_s=time.perf_counter() - start_s)

    def _submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        def do() -> Any:
            with self._busy.counting():
                return work(*arguments)

        return self._thread.submit(do)

    def _wait(self, futures: list[Future]) -> None:
        """Wait for all; if one has failed, raise its exception at once: what comes after it would fail too."""
        with self._wait_stage():
            wait(futures, return_when="FIRST_EXCEPTION")
            for future in futures:
                if future.done():
                    future.result()

    def _restore(self) -> None:
        """Take up the samples of a checkpoint."""
        state = self._progress.algorithm.ahead
        for place, sampled in enumerate(_from_leftover(self._progress.leftover, state) if state else []):
            self._steps[self._progress.step + place] = future = Future()
            future.set_result(sampled)
            self._leftover = sampled.leftover


def _to_leftover(samples: StepSamples, place: int) -> list[LeftoverSample]:
    lists = {"generated": samples.generated, "greedy": samples.greedy}
    if samples.used is not samples.generated:  # with dynamic sampling
        lists |= {"used": samples.used, "leftover": samples.leftover, "dropped": samples.dropped}
    return [
        LeftoverSample({**kept.record, _PLACE: place, _LIST: name}, kept.arrays)
        for name, members in lists.items()
        for kept in to_leftover(members)
    ]


def _from_leftover(leftover: list[LeftoverSample], state: OffPolicyState) -> list[StepSamples]:
    """Return what ``_to_leftover`` was called on, a step after the other.

    Raises:
        DamagedDirectory: the samples are not those of as many steps as the state tells of.
    """
    lists: list[dict[str, list[Sample]]] = [{} for _ in state.versions]
    for item in leftover:
        record = dict(item.record)
        place, name = record.pop(_PLACE, -1), record.pop(_LIST, "")
        if not (isinstance(place, int) and 0 <= place < len(lists)):
            raise DamagedDirectory(f"the checkpoint is damaged: a sample is of step {place!r} of {len(lists)} to come")
        lists[place].setdefault(name, []).extend(from_leftover([LeftoverSample(record, item.arrays)]))
    sampled = []
    for members, version, stale, useless in zip(
        lists, state.versions, state.num_stale, state.num_without_signal, strict=True
    ):
        generated = members.get("generated", [])
        samples = StepSamples(
            generated=generated,
            used=members.get("used", generated),
            num_stale=stale,
            num_without_signal=useless,
            leftover=members.get("leftover", []),
            dropped=members.get("dropped", []),
            greedy=members.get("greedy", []),
            version=version,
        )
        sampled.append(samples)
    return sampled
