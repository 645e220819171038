"""How long the phases of a step take: as the devices' maker promises, and as is assumed to be reached of that."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mindrlhf.dryrun.plan.cost import estimate_cost
from mindrlhf.dryrun.plan.memory import needs_logprobs
from mindrlhf.dryrun.plan.parameters import ELEMENT_BYTES, active_parameters
from mindrlhf.dryrun.plan.plan import Plan, prepare
from mindrlhf.dryrun.plan.schedule.lengths import ResponseLengths
from mindrlhf.dryrun.plan.schedule.rates import estimate_rates, filled_share, prompt_tokens
from mindrlhf.dryrun.plan.schedule.simulate import sampling_seconds
from mindrlhf.system.sizes import format_size

# Of the last responses, when the verifiers have those before them, and of sleep and wake (vLLM's, level 2): guesses.
_REWARDS_S, _WAKE_S = 1.0, 2.0
# What a thread sums up of a buffer, bytes/s: measured on one core of an EPYC.
_VERIFY_BYTES_PER_S = 20e9


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase of a step.

    Attributes:
        best_s: as the devices promise, with no cost of the host.
        assumed_s: as is assumed to be reached.
        how: what it follows from, in words.
    """

    phase: str
    best_s: float
    assumed_s: float
    how: str


@dataclass(frozen=True)
class StepTimes:
    """A step in sequence: no schedule hides a phase behind another here."""

    phases: tuple[PhaseTime, ...]
    lengths: ResponseLengths
    num_tokens: float
    num_devices: int

    @property
    def seconds(self) -> tuple[float, float]:
        """Of all phases, at best and as assumed."""
        return sum(one.best_s for one in self.phases), sum(one.assumed_s for one in self.phases)

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """Tokens of prompts and responses for each device and second, as assumed and at best."""
        best, assumed = self.seconds
        return self.num_tokens / assumed / self.num_devices, self.num_tokens / best / self.num_devices


def plan_times(plan: Plan, lengths: ResponseLengths) -> StepTimes:
    """Return the times of a plan's step, with responses of these lengths."""
    device = plan.machine.device
    best, assumed = (_Phases(plan, lengths, one) for one in (device.promised, device))
    phases = (PhaseTime(name, best.seconds[name], assumed.seconds[name], how) for name, how in assumed.how.items())
    num_samples = plan.batch.num_prompts * plan.config.algorithm.num_generations
    num_tokens = num_samples * (prompt_tokens(plan) + lengths.mean)
    return StepTimes(tuple(phases), lengths, num_tokens, plan.machine.world_size)


class _Phases:
    def __init__(self, plan: Plan, lengths: ResponseLengths, device):
        self.seconds: dict[str, float] = {}
        self.how: dict[str, str] = {}
        self._plan, self._device, self._lengths = plan, device, lengths
        self._sampling()
        self._training()
        self._transfers()

    def _add(self, phase: str, seconds: float, how: str) -> None:
        self.seconds[phase], self.how[phase] = seconds, how

    def _sampling(self) -> None:
        rates = estimate_rates(self._plan, self._lengths.mean, self._device)
        prompts = self._plan.batch.num_prompts * prompt_tokens(self._plan) * rates.prefill_s
        seconds = sampling_seconds(rates, self._lengths) + prompts / (rates.layout.world_size / rates.tensor_parallel)
        how = (
            f"prompts of {prompt_tokens(self._plan):.0f}, responses of {self._lengths.mean:.0f} tokens on average "
            f"({self._lengths.source}); weights and KV cache read once a token, {1e3 * self._device.decode_s:.0f} ms "
            "of host time each"
        )
        self._add("sampling", seconds, how)
        is_best = self._device.decode_s == 0
        how = "verifiers work while servers sample; a guess for the rest"
        self._add("rewards", 0.0 if is_best else _REWARDS_S, how)

    def _training(self) -> None:
        plan, config = self._plan, self._plan.config
        inputs, _ = prepare(config, plan.model, plan.machine)
        num_active = active_parameters(plan.model.known, plan.model.dims)
        cost = estimate_cost(inputs, num_active, 0.0, self._device)
        filled = filled_share(plan, self._lengths.mean)
        forward = cost.forward * filled * config.training.num_minibatches
        calls = cost.num_calls * filled
        rows = f"rows {filled:.0%} full: {calls * config.training.num_minibatches:.0f} calls of the graph"
        has_pass = needs_logprobs(inputs)
        self._add("old log-probs", forward * has_pass, rows if has_pass else "on-policy: none")
        has_reference = config.algorithm.beta > 0
        self._add("reference", forward * has_reference, rows if has_reference else "algorithm.beta is 0: none")
        how = f"{calls * plan.batch.num_updates:.0f} calls of {cost.seconds / cost.num_calls:.2f} s"
        self._add("update", cost.seconds * filled * plan.batch.num_updates, how)

    def _transfers(self) -> None:
        plan, config, rate = self._plan, self._plan.config, self._device.copied_bytes
        held = max(state.num_elements for state in plan.states) * ELEMENT_BYTES[config.rollout.dtype]
        verified = 0.0 if self._device.decode_s == 0 else plan.transfer.buffer_bytes / _VERIFY_BYTES_PER_S
        copied = (held + plan.rollout.weights) / rate
        how = (
            f"{format_size(held)} from each device, {format_size(plan.rollout.weights)} to each, at "
            f"{format_size(rate)}/s; buffers are summed up; {format_size(plan.transfer.most_received)} over the network"
        )
        self._add("publication", copied + verified + plan.transfer.seconds, how)
        state = max(one.moments + one.gradient_sums for one in plan.states) * config.memory.offload_optimizer
        state += max(one.moments for one in plan.states) * config.memory.swap_moments * plan.batch.num_updates
        how = f"{format_size(state)} both ways" if state else "state stays on the device"
        self._add("offload", 2 * state / rate, how)
        wake = 0.0 if self._device.decode_s == 0 else _WAKE_S
        self._add("sleep and wake", wake, "of the servers, a guess")


def time_rows(times: StepTimes) -> list[tuple[str, ...]]:
    """Return a table of phases: seconds at best, as assumed, and what they follow from."""
    best, assumed = times.seconds
    return [
        ("", "s at best", "s assumed", "from"),
        *((one.phase, f"{one.best_s:.1f}", f"{one.assumed_s:.1f}", one.how) for one in times.phases),
        ("step", f"{best:.1f}", f"{assumed:.1f}", ""),
    ]


def time_notes(times: StepTimes, words: str) -> Sequence[str]:
    """Return the throughput as a range, and what is assumed of the device."""
    low, high = times.tokens_per_s
    return (
        f"{low:,.0f} to {high:,.0f} tokens/s/NPU of prompts and responses: a range of assumptions, not measured",
        f"{words}. At best: all of it, and nothing for launches.",
    )


def times_json(times: StepTimes) -> dict:
    """Return the numbers of the text."""
    return dataclasses.asdict(times) | {"seconds": times.seconds, "tokens_per_s": times.tokens_per_s}
