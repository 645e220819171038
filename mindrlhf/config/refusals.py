"""Features that exclude each other, with the reasons: the table of which checks and docs/config.md are made.

All others go together: tools, environments, agents, adapters, dynamic sampling, reward models, critics, ReMax
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


_WRITTEN = "a response with an image token that the model wrote cannot be sent to the server again"
_LAG, _MODEL = "rollout.off_policy_steps", "reward.model_path"
REFUSALS = tuple(
    Refusal(*row)
    for row in (
        (
            ("algorithm.dynamic_sampling", _MODEL, _LAG),
            "whether a group teaches is decided while the ranks, on which a reward model scores, are busy",
            "set one of them to its default, or score with verifiers",
        ),
        (("memory.offload_optimizer", _LAG), "no generator takes turns with training on its devices", "remove it"),
        (("profiler.tools=vllm", _LAG), "servers work on several steps at once, and a trace is of one", "remove it"),
        (("tools.agent", IMAGES), "the endpoint takes text only", "leave the agent out"),
        ((REPLAY, "tools.agent"), "episodes carry no routing on", "set one of them to its default"),
        ((_MODEL, IMAGES), "a reward model reads text only", "use verifiers"),
        (("training.packing=shared_prompts", IMAGES), "image positions are of whole sequences", "set it to best_fit"),
        (("parallel_config.pipeline_stage", DEEP_IMAGES), "stages hand no images on to each other", "set it to 1"),
        (("rollout.segment_tokens", IMAGES), _WRITTEN, "set it to 0"),
        (("tools.names", IMAGES), _WRITTEN, "leave it out"),
        (("tools.environment", IMAGES), _WRITTEN, "leave it out"),
        (("lora.rank", IMAGES), "adapters are of text models so far", "remove it"),
        (
            (REPLAY, "run.device=ascend", "rollout.stop"),
            "vLLM returns the experts of samples that it ends itself",
            "leave the texts out",
        ),
        ((REPLAY, "parallel_config.pipeline_stage"), "experts were not tried with stages", "set it to 1"),
        (
            (REPLAY, "run.device=ascend", "training.packing=shared_prompts"),
            "experts come with whole sequences",
            "set it to best_fit",
        ),
        (("rollout.weight_buffer_gib", ELASTIC), "a node that joins takes weights from a whole buffer", "set it to 0"),
        ((SHARDED, ELASTIC), "rank 0, from which nodes take the weights, has a part of them", "leave out --elastic"),
        ((SPANNING, ELASTIC), "a node comes and goes with its servers", "set rollout.tensor_parallel to its ranks"),
    )
)


def refusal_rules(config: RunConfig, settings: Set[str] = frozenset()) -> Rules:
    """Rules of the table: those of keys alone; with ``settings``, of the constants above, those that need some."""
    for features, reason, fix in REFUSALS:
        needed = {feature for feature in features if feature in _SETTINGS}
        if bool(needed) == bool(settings) and needed <= settings:
            shown = [_shown(config, feature) for feature in features]
            first, *others = shown
            is_together = all(text is not None for text in shown)
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
    current = getattr(section, name)
    default = next(field.default for field in dataclasses.fields(section) if field.name == name)
    chosen = current if isinstance(current, tuple) else (str(current),)
    is_on = value in chosen if value else current != default
    return f"'{key}' = {current if isinstance(current, str) else json.dumps(current)}" if is_on else None


def refusal_table() -> Iterator[str]:
    """Yield the lines of the table in Markdown, as docs/config.md has it."""
    yield "| not together | because | instead |"
    yield "|---|---|---|"
    for features, reason, fix in REFUSALS:
        names = [f"`{name.replace('=', ': ')}`" if "." in name else name for name in features]
        yield f"| {', '.join(names)} | {reason} | {fix} |"
