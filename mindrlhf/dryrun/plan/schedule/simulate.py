"""What devices of a run wait for, by an event simulation of its schedules: in step, off-policy, by partial rollout.

Every schedule is the product's own: see docs/async.md. Lengths within a group are drawn independently, which makes
groups less alike than they are; nothing else takes time but what :class:`Rates` has.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.dryrun.plan.schedule.lengths import ResponseLengths
from mindrlhf.dryrun.plan.schedule.rates import Rates

NUM_STEPS = 6
_SEED = 0
_MOST_SPLITS = 8
_AHEAD = (1, 2)
_IN_FLIGHT = (1.25, 1.5, 2.0)
MAX_SPANS = 4


@dataclass(frozen=True)
class Outcome:
    """One schedule.

    Attributes:
        name: in words.
        keys: the config keys that make it.
        num_rollout_devices: devices that do nothing but generate; 0 where all devices do both.
        seconds: of a step, on average.
        idle: share of the device time in which a device neither decodes a full batch nor trains.
    """

    name: str
    keys: dict[str, int | float]
    num_rollout_devices: int
    seconds: float
    idle: float


def simulate(rates: Rates, lengths: ResponseLengths) -> list[Outcome]:
    """Return the outcome of every schedule, with the best split of devices for those that split them."""
    mean = lengths.mean
    ideal_s = rates.ideal_rollout_s(mean) + rates.train_s
    switch_s = rates.switch_s(mean)
    num_servers = rates.layout.world_size // rates.tensor_parallel
    shared_s = rates.train_s + 2 * switch_s

    def outcome(name: str, keys: dict[str, int | float], num_devices: int, seconds: float) -> Outcome:
        return Outcome(name, keys, num_devices, seconds, 1 - ideal_s / seconds)

    drawn_s = [_drain(rates, batch) for batch in _batches(rates, lengths, num_servers)]
    found = [outcome("in step", {"rollout.off_policy_steps": 0}, 0, float(np.mean(drawn_s)) + shared_s)]
    for num_in_flight in _IN_FLIGHT:
        span = segment_tokens(lengths)
        seconds = _in_spans(rates, lengths, num_servers, num_in_flight, span) + shared_s
        keys = {"rollout.segment_tokens": span, "rollout.in_flight": num_in_flight, "rollout.max_segments": MAX_SPANS}
        found.append(outcome(f"partial rollout, {num_in_flight:g} in flight", keys, 0, seconds))
    splits = [
        (keys, num_devices, [_drain(rates, batch) for batch in _batches(rates, lengths, servers)], train_s)
        for keys, num_devices, servers, train_s in _splits(rates)
    ]
    for ahead in _AHEAD:
        options = [
            outcome(
                f"off-policy by {ahead}",
                keys | {"rollout.off_policy_steps": ahead},
                devices,
                _ahead(drawn, train_s, switch_s, ahead),
            )
            for keys, devices, drawn, train_s in splits
        ]
        if options:
            found.append(min(options, key=lambda one: one.seconds))
    return found


def sampling_seconds(rates: Rates, lengths: ResponseLengths) -> float:
    """Return the seconds until the last response of a step is there, all servers having their share of it."""
    return _drain(rates, next(_batches(rates, lengths, rates.layout.world_size // rates.tensor_parallel)))


def segment_tokens(lengths: ResponseLengths) -> int:
    """Return a span that most responses fit in twice: the median, as a round number."""
    digits = 10 ** max(0, math.floor(math.log10(lengths.median)) - 1)
    return max(1, min(lengths.limit - 1, round(lengths.median / digits) * digits))


def _splits(rates: Rates) -> Iterator[tuple[dict[str, int | float], int, int, float]]:
    """Yield ways to give replicas of the trained model to servers: keys, devices, servers, seconds of training."""
    replicas = rates.layout.data_parallel
    size = rates.layout.world_size // replicas
    counts = sorted({round(count) for count in np.linspace(1, replicas - 1, _MOST_SPLITS)}) if replicas > 1 else []
    for count in counts:
        num_devices = count * size
        if num_devices % rates.tensor_parallel:
            continue
        servers = num_devices // rates.tensor_parallel
        keys = {"parallel_config.data_parallel": replicas - count, "rollout.num_replicas": servers}
        yield keys, num_devices, servers, rates.train_s * replicas / (replicas - count)


def _batches(rates: Rates, lengths: ResponseLengths, num_servers: int) -> Iterator[list[np.ndarray]]:
    """Yield the lengths that each server gets in each step; all numbers of servers get the same responses."""
    rng = np.random.default_rng(_SEED)
    for _ in range(NUM_STEPS):
        drawn = lengths.draw(rng, rates.num_prompts * rates.num_generations)
        groups = drawn.reshape(rates.num_prompts, rates.num_generations)
        yield [groups[server::num_servers].ravel() for server in range(num_servers)]


def _drain(rates: Rates, batch: Sequence[np.ndarray]) -> float:
    """Return the seconds until the last server has decoded its responses."""
    return max(_server_s(rates, lengths.tolist()) for lengths in batch)


def _server_s(rates: Rates, lengths: list[float]) -> float:
    """Return the seconds in which one server decodes responses; a free slot is filled at once."""
    running, waiting = lengths[: rates.slots], lengths[rates.slots :][::-1]
    heapq.heapify(running)
    decoded = seconds = 0.0  # tokens of a sequence that has run from the beginning on
    while running:
        end = running[0]
        seconds += (end - decoded) * rates.decode_step_s(len(running))
        decoded = end
        if waiting:
            heapq.heapreplace(running, decoded + waiting.pop())
        else:
            heapq.heappop(running)
    return seconds


def _ahead(drawn_s: Sequence[float], train_s: float, switch_s: float, ahead: int) -> float:
    """Return the seconds of a step when batch i is drawn with the weights of update i - 1 - ``ahead``."""
    server_end, updates = 0.0, [0.0] * (ahead + 1)  # an update's end by its number; those before the first are at 0
    for seconds in [*drawn_s, *drawn_s]:
        server_end = max(server_end, updates[-1 - ahead]) + seconds
        updates.append(max(server_end, updates[-1]) + train_s + switch_s)
    first = len(updates) - len(drawn_s)
    return (updates[-1] - updates[first - 1]) / len(drawn_s)


def _in_spans(rates: Rates, lengths: ResponseLengths, num_servers: int, in_flight: float, span: int) -> float:
    """Return the seconds of a step's rollout when long responses go on in the next one."""
    rng = np.random.default_rng(_SEED)
    # Of a group: tokens that its responses still need, tokens that they have, and steps that it has been in.
    groups: list[tuple[np.ndarray, np.ndarray, int]] = []
    times = []
    for _ in range(2 * NUM_STEPS):
        for _ in range(max(0, round(in_flight * rates.num_prompts) - len(groups))):
            groups.append((lengths.draw(rng, rates.num_generations), np.zeros(rates.num_generations), 0))
        seconds = sum(float(has[needs > 0].sum()) for needs, has, _ in groups) * rates.prefill_s / num_servers
        while sum(not needs.any() for needs, _, _ in groups) < rates.num_prompts:
            seconds += _round(rates, groups, num_servers, span)
        whole = [index for index, (needs, _, _) in enumerate(groups) if not needs.any()][: rates.num_prompts]
        groups = [(needs, has, age + 1) for index, (needs, has, age) in enumerate(groups) if index not in set(whole)]
        times.append(seconds)
    return float(np.mean(times[NUM_STEPS:]))


def _round(rates: Rates, groups: list[tuple[np.ndarray, np.ndarray, int]], num_servers: int, span: int) -> float:
    """Decode up to ``span`` tokens of every response, all of one that has its last version; return the seconds."""
    batch: list[list[float]] = [[] for _ in range(num_servers)]
    for index, (needs, has, age) in enumerate(groups):
        tokens = needs.copy() if age >= MAX_SPANS - 1 else np.minimum(needs, span)
        batch[index % num_servers] += tokens[tokens > 0].tolist()
        has += tokens
        needs -= tokens
    return max(_server_s(rates, lengths) for lengths in batch)
