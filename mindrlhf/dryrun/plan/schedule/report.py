"""`mindrlhf plan --async`: the schedules of a run side by side, and the one to take."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from mindrlhf.dryrun.plan.plan import Plan
from mindrlhf.dryrun.plan.schedule.lengths import ResponseLengths
from mindrlhf.dryrun.plan.schedule.rates import Rates, estimate_rates
from mindrlhf.dryrun.plan.schedule.simulate import NUM_STEPS, Outcome, simulate

# Older samples cost accuracy that no simulation knows: a schedule must gain this much over the one before it.
_WORTHWHILE = 0.05


@dataclass(frozen=True)
class ScheduleReport:
    """What the simulation found.

    Attributes:
        outcomes: of every schedule; the first is in step.
        chosen: the one to take.
    """

    lengths: ResponseLengths
    rates: Rates
    outcomes: tuple[Outcome, ...]
    chosen: Outcome


def compare_schedules(plan: Plan, found: ResponseLengths) -> ScheduleReport:
    """Simulate the schedules of a plan's run, with responses of these lengths."""
    rates = estimate_rates(plan, found.mean)
    outcomes = simulate(rates, found)
    return ScheduleReport(found, rates, tuple(outcomes), choose(outcomes))


def choose(outcomes: list[Outcome]) -> Outcome:
    """Return the quickest, but of two that are about as quick the one that is listed first."""
    chosen = outcomes[0]
    for outcome in outcomes[1:]:
        if outcome.seconds < (1 - _WORTHWHILE) * chosen.seconds:
            chosen = outcome
    return chosen


def schedule_rows(report: ScheduleReport) -> list[tuple[str, ...]]:
    """Return a table: schedule, devices that generate only, seconds of a step, times as fast, idle share, keys."""
    first = report.outcomes[0].seconds
    return [
        ("", "servers on", "s/step", "x", "idle", "keys"),
        *(
            (
                f"{'* ' if one is report.chosen else '  '}{one.name}",
                f"{one.num_rollout_devices} of {report.rates.layout.world_size}" if one.num_rollout_devices else "all",
                f"{one.seconds:.1f}",
                f"{first / one.seconds:.2f}",
                f"{one.idle:.0%}",
                " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in one.keys.items()),
            )
            for one in report.outcomes
        ),
    ]


def schedule_notes(report: ScheduleReport) -> list[str]:
    """Return what the table was made from, and what to do with it."""
    lengths, rates, chosen = report.lengths, report.rates, report.chosen
    notes = [
        f"Responses: median {lengths.median:.0f}, sigma {lengths.sigma:.2f}, mean {lengths.mean:.0f}, at most "
        f"{lengths.limit} tokens ({lengths.source}).",
        f"A server decodes {rates.slots} sequences at once; a decoding step takes {1e3 * rates.decode_step_s(1):.0f} "
        f"ms for one, {1e3 * rates.decode_step_s(rates.slots):.0f} ms for all. Training takes {rates.train_s:.1f} s "
        "of a step on all devices.",
        f"Simulated over {NUM_STEPS} steps with round rates: read the ratios, not the seconds.",
    ]
    if chosen is report.outcomes[0]:
        return [*notes, "Recommended: stay in step; nothing else gains 5 %."]
    advice = " ".join(f"{name}={value}" for name, value in chosen.keys.items())
    notes.append(f"Recommended: {advice}")
    if chosen.num_rollout_devices:
        workers = rates.layout.world_size - chosen.num_rollout_devices
        notes.append(
            f"The ranks are then --workers {workers}, and the servers have devices of their own (rollout.env). Plan "
            "them once more: fewer replicas hold more each."
        )
    return notes


def schedule_json(report: ScheduleReport) -> dict[str, Any]:
    """Return the numbers of the text; seconds and tokens."""
    rates = dataclasses.asdict(report.rates)
    del rates["layout"]
    return {
        "lengths": dataclasses.asdict(report.lengths) | {"mean": report.lengths.mean},
        "rates": rates,
        "schedules": [dataclasses.asdict(one) for one in report.outcomes],
        "recommended": report.chosen.name,
    }
