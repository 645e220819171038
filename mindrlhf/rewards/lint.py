"""Checks of a reward function by running it: `mindrlhf rewards check`."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput, RewardResult

NUM_GROUPS = 32
# Below, a verifier holds up a batch of a thousand samples for over ten seconds on one worker.
MIN_SCORES_PER_S = 100
MAX_LENGTH_CORRELATION = 0.5
MIN_SAMPLES_FOR_CORRELATION = 10
MAX_FLAT_SHARE = 0.9
NUM_SHOWN = 3
HOSTILE_CHARS = 1_000_000


Finding = tuple[str, str]  # level, which is ok, warning (worth a look) or error (must be mended), and one line


def lint(verifier: str, samples: Sequence[RewardInput], options: dict[str, str], timeout_s: float) -> list[Finding]:
    """Score ``samples`` twice, in two processes and two orders, then hostile texts; return what was found.

    Samples with the same prompt and answer are one group.

    Raises:
        UserError: the verifier cannot be loaded.
    """
    selection = Selection((verifier,), (1.0,), options=options)
    with RewardPool(selection, timeout_s=timeout_s) as pool:
        pool.score(samples[:1])  # imports are not what is timed
        start_s = time.perf_counter()
        first = _score(pool, samples)
        elapsed_s = time.perf_counter() - start_s
    with RewardPool(selection, timeout_s=timeout_s) as pool:
        second = _score(pool, samples[::-1])[::-1]
        hostile = [replace(one, extra=samples[0].extra) for one in hostile_samples()]
        hostile_results = _score(pool, hostile)
        echoed = _score(pool, echoes(samples))
    good = np.array([not a.failures and not b.failures for a, b in zip(first, second)])
    rewards = np.array([result.total for result in first])
    rate = len(samples) / elapsed_s
    hint = f": use more reward.num_workers, or make it faster than {MIN_SCORES_PER_S}/s" * (rate < MIN_SCORES_PER_S)
    return [
        *_failures("error", "samples", samples, first, _named),
        *_determinism(samples, first, second),
        *_distribution(samples, rewards, good),
        ("warning" if hint else "ok", f"{rate:.0f} scores/s in one process{hint}"),
        *_failures("warning", "hostile texts", hostile, hostile_results, lambda sample: sample.prompt),
        *_echoing(echoed, rewards),
    ]


def example_samples() -> list[RewardInput]:
    """Groups of answers to sums: right in a box, right in prose and longer, wrong, and cut off."""
    samples = []
    for i in range(NUM_GROUPS):
        a, b = 17 + 3 * i, 40 + 7 * i
        steps = f"We add {a} and {b}. " * (1 + i % 5)
        completions = (
            f"<think>{steps}</think><answer>\\boxed{{{a + b}}}</answer>",
            f"{steps * 2}So the answer is {a + b}.",
            f"<think>{steps}</think><answer>\\boxed{{{a + b + 1}}}</answer>",
            steps,
        )
        for completion in completions:
            samples.append(
                RewardInput(
                    len(samples),
                    completion,
                    str(a + b),
                    f"What is {a} + {b}?",
                    "length" if completion is steps else "stop",
                    len(completion) // 4 + 1,
                )
            )
    return samples


def echoes(samples: Sequence[RewardInput]) -> list[RewardInput]:
    """The prompts of some samples as responses to themselves, whole and cut off."""
    one_each = list({(sample.prompt, sample.answer): sample for sample in samples if sample.prompt}.values())
    forms = (("{}", "stop"), ("The question is: {} To find it, we start by", "length"))
    return [
        replace(sample, completion=form.format(sample.prompt), finish_reason=reason)
        for sample in one_each[:NUM_GROUPS]
        for form, reason in forms
    ]


def hostile_samples() -> Iterator[RewardInput]:
    """Texts that a policy does not write on purpose, but does write."""
    texts = {
        "an empty text": "",
        "white space": " \n\t " * 10,
        "a million characters": "a" * HOSTILE_CHARS,
        "a million digits": "9" * HOSTILE_CHARS,
        "open brackets": "\\boxed{" + "{" * (HOSTILE_CHARS // 10),
        "tags without end": "<think><answer>" * (HOSTILE_CHARS // 100),
        "a tower of powers": "\\boxed{9**9**9} \\boxed{9^{9^{9}}}",
        "a lone surrogate and a NUL": "\ud800\x00",
        "an unclosed box": "so it is \\boxed{4",
    }
    for name, text in texts.items():
        yield RewardInput(0, text, "42", name, "length", len(text) // 4 + 1)


def _score(pool: RewardPool, samples: Sequence[RewardInput]) -> list[RewardResult]:
    """Return the results, where what could not be scored is a failure too."""
    return [
        replace(one, total=0.0, failures={"": one.unscored}) if one.unscored else one for one in pool.score(samples)
    ]


def _failures(
    level: str,
    what: str,
    samples: Sequence[RewardInput],
    results: Sequence[RewardResult],
    name: Callable[[RewardInput], str],
) -> Iterator[Finding]:
    failed = [(sample, *result.failures.values()) for sample, result in zip(samples, results) if result.failures]
    if not failed:
        yield "ok", f"gave a reward for all {len(samples)} {what}"
        return
    counts = Counter(reason for _, reason in failed)
    reasons = "; ".join(f"{reason} ({count}x)" for reason, count in counts.most_common(NUM_SHOWN))
    named = ", ".join(name(sample) for sample, _ in failed[:NUM_SHOWN])
    yield level, f"failed on {len(failed)} of {len(samples)} {what}, first {named}: {reasons}"


def _determinism(
    samples: Sequence[RewardInput], first: Sequence[RewardResult], second: Sequence[RewardResult]
) -> Iterator[Finding]:
    pairs = zip(samples, first, second)  # reasons of failures may name an address
    different = [(s, a, b) for s, a, b in pairs if a.total != b.total or bool(a.failures) != bool(b.failures)]
    if not different:
        yield "ok", "deterministic: the same rewards in another process and order"
        return
    sample, a, b = different[0]
    count, shown = f"{len(different)} of {len(samples)}", f"first {_named(sample)}: {a.total:g} and {b.total:g}"
    yield "error", f"not deterministic: {count} rewards differ in another process and order, {shown}"


def _distribution(samples: Sequence[RewardInput], rewards: np.ndarray, good: np.ndarray) -> Iterator[Finding]:
    """Range, correlation with length, groups without signal; of the samples that got a reward."""
    kept, rewards = [sample for sample, is_good in zip(samples, good) if is_good], rewards[good]
    if not kept:
        return
    low, high = rewards.min(), rewards.max()
    text = f"range {low:g} to {high:g}, mean {rewards.mean():.4g}, {len(np.unique(rewards))} different values"
    yield ("ok", text) if low < high else ("warning", f"every reward is {low:g}: nothing to learn")
    lengths = np.array([len(sample.completion) for sample in kept], np.float64)
    if len(kept) >= MIN_SAMPLES_FOR_CORRELATION and low < high and lengths.min() < lengths.max():
        correlation = np.corrcoef(rewards, lengths)[0, 1]
        is_strong = abs(correlation) > MAX_LENGTH_CORRELATION
        hint = ": the policy will learn to write " + ("more" if correlation > 0 else "less") if is_strong else ""
        yield "warning" if is_strong else "ok", f"correlation with length {correlation:+.2f}{hint}"
    groups = defaultdict(list)
    for sample, reward in zip(kept, rewards):
        groups[sample.prompt, sample.answer].append(reward)
    spreads = [max(group) - min(group) for group in groups.values() if len(group) > 1]
    if spreads:
        share = sum(spread == 0 for spread in spreads) / len(spreads)
        level = "warning" if share > MAX_FLAT_SHARE else "ok"
        yield level, f"{share:.0%} of {len(spreads)} groups have equal rewards, which give no gradient"


def _echoing(results: Sequence[RewardResult], rewards: np.ndarray) -> Iterator[Finding]:
    paid = sum(result.total >= rewards.max() > max(0.0, rewards.min()) for result in results if not result.failures)
    count = len(results)
    if paid:
        text = f"{paid} of {count} responses that only repeat the prompt earn the highest reward: it will be learned"
        yield "warning", text
    elif results:
        yield "ok", f"no high reward for {count} responses that only repeat the prompt"


def _named(sample: RewardInput) -> str:
    return f"sample {sample.index} ({sample.completion[:40]!r})"
