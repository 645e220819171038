"""What a run's rewards follow besides correctness: the traces that a policy leaves which found a hole in its reward.

An audit of saved samples finds candidates to look at, and proves nothing: what correlates with reward may also be what
a right answer needs.
"""

import array
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindrlhf.config.parse import build, read_yaml
from mindrlhf.config.reward import RewardSection, SandboxSection
from mindrlhf.errors import UserError
from mindrlhf.evaluation.heldout import accuracy_of
from mindrlhf.observe.records import RecordFile
from mindrlhf.observe.samples import SampleRecord
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.registry import part_name
from mindrlhf.rewards.types import RewardInput, RewardResult
from mindrlhf.sandbox.server import check_for

MIN_SAMPLES = 20
NUM_PERMUTATIONS = 2000
# Correlations with a smaller p-value are reported, divided by their number (Bonferroni).
SIGNIFICANCE = 0.05
# Clusters are looked for among the samples at or above this quantile of the rewards.
HIGH_REWARD = 0.75
_PHRASE_WORDS = 4
_NUM_SHOWN = 5
_CODE = re.compile(r"```|\b(?:def|return|import|print|assert|lambda)\b|[{};]")
_TAG = re.compile(r"</?[A-Za-z][\w-]*>")


def _repeated_share(text: str) -> float:
    """The share of phrases of four words that occurred before in the text."""
    words = text.split()
    phrases = [tuple(words[i : i + _PHRASE_WORDS]) for i in range(len(words) - _PHRASE_WORDS + 1)]
    return 1.0 - len(set(phrases)) / len(phrases) if phrases else 0.0


def _share(pattern: re.Pattern[str]) -> Callable[[str], float]:
    return lambda text: sum(map(len, pattern.findall(text))) / max(1, len(text))


# name -> number of a completion
FEATURES: Mapping[str, Callable[[str], float]] = {
    "length in characters": len,
    "repeated phrases": _repeated_share,
    "digits": _share(re.compile(r"\d")),
    "code tokens": _share(_CODE),
    "tags": _share(_TAG),
    "lines": lambda text: text.count("\n") + 1,
}
# Rewritings that change nothing of what a completion says.
REWRITINGS: Mapping[str, Callable[[str], str]] = {
    "spaces at the end": lambda text: text + "  \n",
    "spaces at the beginning": lambda text: "\n " + text,
    "double spaces": lambda text: text.replace(" ", "  "),
    "upper case": str.upper,
    "a sentence at the end": lambda text: text + "\n\nI hope this helps.",
}


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of one feature with the reward.

    Attributes:
        feature: name in ``FEATURES``.
        within: "all samples", or the outcome within which it was measured: "right ones" or "wrong ones".
        rho: the correlation, from -1 to 1.
        p_value: share of random permutations of the rewards with a correlation at least as large.
        num_samples: how many it was measured on.
    """

    feature: str
    within: str
    rho: float
    p_value: float
    num_samples: int


@dataclass(frozen=True)
class Cluster:
    """Completions that are the same but for white space and case, and earned the highest rewards.

    They answered prompts with different reference answers: one text cannot be right for all of them.
    """

    completion: str  # one of them
    num_samples: int
    num_prompts: int  # different prompts among them
    share: float  # of all samples with such a reward


@dataclass(frozen=True)
class Flip:
    """A verifier that changed its mind because of a rewriting that changes nothing."""

    verifier: str
    rewriting: str
    num_samples: int
    num_flipped: int
    example: SampleRecord


@dataclass(frozen=True)
class Audit:
    """What was found in the samples of a run; see the module's docstring for what it is worth."""

    num_samples: int
    num_steps: int
    correlations: tuple[Correlation, ...]  # significant ones, strongest first
    clusters: tuple[Cluster, ...]  # largest first
    flips: tuple[Flip, ...]  # most frequent first
    num_rescored: int


class Scores(Protocol):
    """Scores samples; :class:`mindrlhf.rewards.pool.RewardPool` does."""

    def score(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """Return the results in the order of the samples."""


class Samples(Protocol):
    """Samples of a run; a list, or a file that is read as often as they are asked for."""

    def __iter__(self) -> Iterator[SampleRecord]: ...

    def __getitem__(self, number: int) -> SampleRecord: ...


class _Columns:
    """What the audit asks of all samples: numbers and digests, so that their texts need not be in memory.

    Attributes:
        features: float64 [samples, features].
        texts, prompts, answers: digests [samples]; equal texts of completions have the same but for white space and
            case.
    """

    def __init__(self, samples: Samples, accuracy: str):
        steps, rewards, is_right, features = (array.array(kind) for kind in "qdbd")
        texts, prompts, answers = [], [], []
        for sample in samples:
            steps.append(sample.step)
            rewards.append(sample.reward)
            is_right.append(sample.rewards.get(accuracy, 0.0) > 0.5)
            features.extend(float(of(sample.completion)) for of in FEATURES.values())
            for digests, text in (
                (texts, " ".join(sample.completion.lower().split())),
                (prompts, sample.prompt),
                (answers, sample.answer),
            ):
                digests.append(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest())
        self.steps, self.rewards = np.array(steps), np.array(rewards)
        self.is_right = np.array(is_right, bool)
        self.features = np.array(features).reshape(len(steps), len(FEATURES))
        self.texts, self.prompts, self.answers = texts, prompts, answers

    def __len__(self) -> int:
        return len(self.steps)


def audit(samples: Samples, accuracy: str, pool: Scores | None = None, *, max_rescored: int = 200) -> Audit:
    """Look for what a reward pays for besides being right.

    Args:
        samples: of a run; they are gone through once, and some are asked for again.
        accuracy: verifier that tells right from wrong; a sample is right if it gave more than half.
        pool: the run's verifiers, to score rewritten completions; None leaves that out.
        max_rescored: so many samples, spread over the run, are scored again.
    """
    columns = _Columns(samples, accuracy)
    numbers = np.unique(np.linspace(0, len(columns) - 1, max_rescored).astype(int)).tolist()
    chosen = [samples[number] for number in numbers] if pool is not None else []
    return Audit(
        num_samples=len(columns),
        num_steps=len(np.unique(columns.steps)),
        correlations=_correlations(columns),
        clusters=_clusters(columns, samples),
        flips=_flips(chosen, pool) if pool is not None else (),
        num_rescored=len(chosen),
    )


def _correlations(columns: _Columns) -> tuple[Correlation, ...]:
    rewards, is_right = columns.rewards, columns.is_right
    groups = {"all samples": np.ones(len(columns), bool), "right ones": is_right, "wrong ones": ~is_right}
    features = dict(zip(FEATURES, columns.features.T, strict=True))
    found = []
    for within, members in groups.items():
        if members.sum() < MIN_SAMPLES or np.ptp(rewards[members]) == 0:
            continue
        for name, values in features.items():
            if np.ptp(values[members]) > 0:
                rho, p_value = spearman(values[members], rewards[members])
                found.append(Correlation(name, within, rho, p_value, int(members.sum())))
    significant = [one for one in found if one.p_value <= SIGNIFICANCE / len(found)]
    return tuple(sorted(significant, key=lambda one: -abs(one.rho)))


def spearman(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Return Spearman's rank correlation, ties at their mean rank, and its p-value by permutation (two-sided).

    Args:
        first, second: float [n], each with at least two different values.
    """
    from scipy.stats import rankdata

    ranks = [rankdata(values) for values in (first, second)]
    a, b = ((one - one.mean()) / one.std() for one in ranks)
    rho = float(np.mean(a * b))
    rng = np.random.default_rng(0)
    permuted = np.array([np.mean(a * rng.permutation(b)) for _ in range(NUM_PERMUTATIONS)])
    # With the observed order among them, so that it is never 0 (Phipson and Smyth 2010).
    return rho, float((np.sum(np.abs(permuted) >= abs(rho) - 1e-12) + 1) / (NUM_PERMUTATIONS + 1))


def _clusters(columns: _Columns, samples: Samples) -> tuple[Cluster, ...]:
    """Find completions of the highest rewards that are the same for prompts with different answers."""
    if not len(columns):
        return ()
    high = np.flatnonzero(columns.rewards >= np.quantile(columns.rewards, HIGH_REWARD)).tolist()
    alike = defaultdict(list)
    for number in high:
        alike[columns.texts[number]].append(number)
    clusters = []
    for members in alike.values():
        prompts, answers = ({digests[one] for one in members} for digests in (columns.prompts, columns.answers))
        if len(prompts) > 1 and len(answers) > 1:
            completion = samples[members[0]].completion
            clusters.append(Cluster(completion, len(members), len(prompts), len(members) / len(high)))
    return tuple(sorted(clusters, key=lambda one: -one.num_samples))


def _flips(samples: Sequence[SampleRecord], pool: Scores) -> tuple[Flip, ...]:
    plain = pool.score([_input(index, sample) for index, sample in enumerate(samples)])
    flips = []
    for rewriting, rewrite in REWRITINGS.items():
        rewritten = [replace(sample, completion=rewrite(sample.completion)) for sample in samples]
        results = pool.score([_input(index, sample) for index, sample in enumerate(rewritten)])
        for verifier in plain[0].parts if plain else ():
            flipped = [
                sample
                for sample, before, after in zip(samples, plain, results)
                if before.parts.get(verifier) != after.parts.get(verifier)
            ]
            if flipped:
                flips.append(Flip(verifier, rewriting, len(samples), len(flipped), flipped[0]))
    return tuple(sorted(flips, key=lambda one: -one.num_flipped))


def _input(index: int, sample: SampleRecord) -> RewardInput:
    return RewardInput(
        index=index,
        completion=sample.completion,
        answer=sample.answer,
        prompt=sample.prompt,
        finish_reason=sample.finish_reason,
        extra=sample.extra,
    )


def audit_run(run_dir: Path, *, max_rescored: int = 200) -> Audit:
    """Audit the samples that a run has saved, with the verifiers of its config.

    A run whose rewards come from a reward model alone is audited without scoring anything again.

    Raises:
        UserError: the directory has no config or no samples, or they are damaged; the sandbox is too weak for programs.
    """
    if max_rescored < 1:
        raise UserError(f"{max_rescored} samples to score again: give at least 1")
    content = read_yaml(run_dir / "config.yaml")
    reward = build(RewardSection, content.get("reward") or {}, "reward.")
    evaluation = content.get("evaluation") or {}
    accuracy = accuracy_of(evaluation.get("verifier", ""), reward)
    path = run_dir / "samples.jsonl"
    if not path.is_file():
        raise UserError(f"{path} does not exist: give the directory of a run that saved samples")
    samples = _SavedSamples(path)
    if next(iter(samples), None) is None:
        raise UserError(f"{path} holds no samples: a run saves some at each step (observe.samples_per_step)")
    if not reward.verifier_function:
        return audit(samples, accuracy)
    check_for(reward.verifier_function, build(SandboxSection, content.get("sandbox") or {}, "sandbox.").allow_weak)
    with RewardPool.from_config(reward) as pool:
        return audit(samples, part_name(accuracy), pool, max_rescored=max_rescored)


class _SavedSamples:
    """Of a run, one at a time in memory."""

    def __init__(self, path: Path):
        self._path, self._records = path, RecordFile(path)

    def __iter__(self) -> Iterator[SampleRecord]:
        return (_sample(self._path, record) for record in self._records)

    def __getitem__(self, number: int) -> SampleRecord:
        return _sample(self._path, self._records[number])


def _sample(path: Path, record: Mapping[str, Any]) -> SampleRecord:
    names = [field.name for field in fields(SampleRecord) if field.default is field.default_factory is MISSING]
    missing = [name for name in names if name not in record]
    if missing:
        raise UserError(f"{path} holds a sample without '{missing[0]}': it is not of a run")
    return SampleRecord(**{name: record[name] for name in names}, extra=record.get("extra", {}))


def audit_text(found: Audit) -> str:
    """Return an audit as a user reads it."""
    lines = [f"{found.num_samples} samples of {found.num_steps} steps"]
    lines.append("\nWhat correlates with the reward (Spearman; significant ones)")
    lines += [
        f"  {one.rho:+.2f}  {one.feature}, in {one.within} (n = {one.num_samples}, p = {one.p_value:.2g})"
        for one in found.correlations
    ] or ["  nothing"]
    lines.append("\nHigh rewards for one text on prompts with different answers")
    lines += [
        f"  {one.num_samples} samples of {one.num_prompts} prompts ({one.share:.0%} of the high rewards): "
        f"{_short(one.completion)}"
        for one in found.clusters[:_NUM_SHOWN]
    ] or ["  none"]
    lines.append(f"\nRewards that flip under harmless rewriting ({found.num_rescored} samples scored again)")
    lines += [
        f"  {one.verifier}: {one.rewriting}, {one.num_flipped} of {one.num_samples}, such as "
        f"{_short(one.example.completion)}"
        for one in found.flips
    ] or ["  none"]
    return "\n".join(lines)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:50]} ... {text[-25:]}")
