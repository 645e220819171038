"""What does not go together, each with its reason: the one table of which the checks and docs/async.md are made.

What is not in it goes together: tools, environments, adapters, images, dynamic sampling, reward models, critics, ReMax
and nodes for rollout only, in step, off-policy, by segments and asynchronously.
"""

import dataclasses
import json
from collections.abc import Iterator, Set
from typing import NamedTuple

from mindrlhf.config.keys import RunConfig
from mindrlhf.errors import Rules

# What a run has beside its keys: whoever checks knows.
IMAGES = "a vision-language model"
DEEP_IMAGES = "a vision-language model whose images go to several layers"
ELASTIC = "--elastic"
SHARDED = "a model sharded over ranks"
SPANNING = "servers that lie over several nodes"
REPLAY = "training.replay_routing"  # a key, but judged with the model: configs of other stacks are imported with it
_SETTINGS = (IMAGES, DEEP_IMAGES, ELASTIC, SHARDED, SPANNING, REPLAY)


class Refusal(NamedTuple):
    """Features that are refused together: keys away from their default, or at the value behind "=", or settings."""

    features: tuple[str, ...]  # the first is what the message names
    reason: str
    fix: str


_JUDGED = "vLLM itself would judge the guesses, and its log-probabilities were found wrong then"
_RECORDED = "experts are recorded in a server of one process"
REFUSALS = (
    Refusal(
        ("rollout.weight_buffer_gib", "rollout.off_policy_steps"),
        "new weights wait until the servers are done, so that the buffer must hold all of them",
        "set it to 0",
    ),
    Refusal(
        ("algorithm.dynamic_sampling", "reward.model_path", "rollout.off_policy_steps"),
        "whether a group teaches is decided while the training ranks, on which a reward model scores, are busy",
        "set one of them to its default, or score with verifiers",
    ),
    Refusal(
        ("memory.offload_optimizer", "rollout.off_policy_steps"),
        "no generator takes turns with training on its devices",
        "remove it",
    ),
    Refusal(
        ("profiler.vllm", "rollout.off_policy_steps"),
        "servers work on several steps at once, and a trace is of one",
        "set it to false",
    ),
    Refusal(("reward.model_path", IMAGES), "a reward model reads text only", "use verifiers"),
    Refusal(
        ("training.packing=shared_prompts", IMAGES), "positions of images are of whole sequences", "set it to best_fit"
    ),
    Refusal(
        ("parallel_config.pipeline_stage", DEEP_IMAGES),
        "the stages would have to hand images on to each other",
        "set it to 1",
    ),
    Refusal(("lora.rank", IMAGES), "adapters are of text models so far", "remove it"),
    Refusal(
        (REPLAY, "run.device=ascend"), "MindFormers' routers for Ascend take none", "set it to false"
    ),
    Refusal((REPLAY, "rollout.tensor_parallel"), _RECORDED, "set it to false"),
    Refusal(
        (REPLAY, "rollout.draft_tokens"),
        "experts of tokens that are only guessed would be recorded",
        "set it to false",
    ),
    Refusal(
        (REPLAY, "msprobe.level=L0"), "single cells are run without it", "set one of them otherwise"
    ),
    Refusal(
        ("rollout.weight_buffer_gib", ELASTIC), "a node that joins takes the weights from a whole buffer", "set it to 0"
    ),
    Refusal((SHARDED, ELASTIC), "rank 0, from which nodes take the weights, has a part of them", "leave out --elastic"),
    Refusal(
        (SPANNING, ELASTIC), "a node comes and goes with all of its servers", "set rollout.tensor_parallel to its ranks"
    ),
)


def refusal_rules(config: RunConfig, settings: Set[str] = frozenset()) -> Rules:
    """Rules of the table: those of keys alone; with ``settings``, of the constants above, those that need some."""
    for features, reason, fix in REFUSALS:
        needed = {one for one in features if one in _SETTINGS}
        if bool(needed) == bool(settings) and needed <= settings:
            shown = [_shown(config, one) for one in features]
            first, *others = shown
            is_together = all(one is not None for one in shown)
            yield is_together, f"{first} does not go with {' and '.join(map(str, others))}: {reason}; {fix}"


def _shown(config: RunConfig, feature: str) -> str | None:
    """Return how a message shows a feature, None where the run has not got it."""
    if feature in _SETTINGS:
        return feature
    key, _, value = feature.partition("=")
    section_name, _, name = key.partition(".")
    section = getattr(config, section_name, None)
    if section is None:  # training on fixed data has fewer
        return None
    given = getattr(section, name)
    default = next(one.default for one in dataclasses.fields(section) if one.name == name)
    is_on = str(given) == value if value else given != default
    return f"'{key}' = {given if isinstance(given, str) else json.dumps(given)}" if is_on else None


def refusal_table() -> Iterator[str]:
    """Yield the lines of the table in Markdown, as docs/async.md has it."""
    yield "| not together | because | instead |"
    yield "|---|---|---|"
    for features, reason, fix in REFUSALS:
        names = [f"`{one.replace('=', ': ')}`" if "." in one else one for one in features]
        yield f"| {', '.join(names)} | {reason} | {fix} |"
