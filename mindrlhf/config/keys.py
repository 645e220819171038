"""Declarations of config keys: default, range, and the sentence that documents it."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

REQUIRED = dataclasses.MISSING
TASKS = ("train", "sft", "dpo", "reward-model")  # commands that train
# What holds for every key with numbers, where it has no closer bounds: what 32 bits hold, and what the arithmetic of
# single precision and the timers of the operating system take.
_MAX_MEANT_CHARS = 64  # a comparison takes the product of the lengths
MAX_INTEGER, MAX_NUMBER, MIN_NUMBER, MAX_SECONDS = 2**31 - 1, 1e9, 1e-30, 2e6


_GPUS = ("gpu", "cuda", "rocm", "xpu", "tpu", "mps")
# What people call a choice elsewhere; "" for what looks like one and means another.
_OTHER_NAMES = {
    **dict.fromkeys(("npu", "davinci", "cann", "huawei", "910b", "ascend910b"), "ascend"),
    **dict.fromkeys(_GPUS, ""),
    **dict.fromkeys(("bf16", "half"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "full", "single"), "float32"),
    "fp16": "float16",
    "reinforce++": "reinforce_pp",
    "reinforce++_baseline": "reinforce_pp_baseline",
    "tb": "tensorboard",
    "weights_and_biases": "wandb",
    "cos": "cosine",
    "warmup_stable_decay": "wsd",
}

# Keys of earlier releases, and what to do. Those without effect never changed what a run computes: its checkpoint goes
# on without them.
REMOVED_WITHOUT_EFFECT = {
    "rollout.stall_timeout_s": "delete it; a server that is silent for a minute is replaced",
    "rollout.kv_cache_gib": "use rollout.engine_args: {kv_cache_memory_bytes: N}",
    "rollout.start_timeout_s": "delete it; a server has 900 s to come up",
    "rollout.weights_transport": "delete it; nodes get whole tensors",
    "reward.every_node": "delete it; verifiers run on every node",
    "tools.every_node": "delete it; agents run on every node",
    "run.fail_without_signal": "delete it; a run without signal is a warning",
    "observe.run_name": "delete it; trackers take the last folder of run.output_dir",
}
REMOVED = REMOVED_WITHOUT_EFFECT | {
    "algorithm.scale_rewards": "use algorithm.advantage: dr_grpo for false",
    "algorithm.overlong_penalty": "delete it; algorithm.overlong_buffer takes 1 at the limit",
    "algorithm.rest_epochs": "delete it; no prompt rests",
    "correction.mask_low": "use correction.mask_bounds: [LOW, HIGH]",
    "correction.mask_high": "use correction.mask_bounds: [LOW, HIGH]",
    "guard.max_failed_steps": "use guard.max_unscored, a share of samples",
    "msprobe.first_step": "use msprobe.config_path: FILE, a config of msprobe's own",
    "msprobe.last_step": "use msprobe.config_path: FILE, a config of msprobe's own",
    "optimizer.momentum": "delete it; muon's is 0.95",
    "parallel_config.micro_batch_interleave_num": "delete it",
    "profiler.ranks": "delete it; all ranks are recorded",
    "reward.gates": "write a verifier that calls both",
    "rollout.draft_tokens": "delete it; no tokens are drafted",
    "training.pack": "use training.packing: none for false",
}


def choice_hint(value: object, choices: Iterable[object]) -> str:
    """Return how a message about a wrong choice ends: the one that was meant, or why there is none; may be empty."""
    if near := nearest_choice(value, choices):
        return f"; did you mean '{near}'?"
    return "; no trainer runs on a GPU" if str(value).lower().partition(":")[0] in _GPUS else ""


def nearest_choice(value: object, choices: Iterable[object]) -> str | None:
    """Return which of a few values was meant, by its meaning and then by its letters; None where neither tells."""
    names = {_plain_name(str(choice)): str(choice) for choice in choices}
    word = re.sub(r"[\s-]+", "_", str(value).strip().lower())
    if word in _OTHER_NAMES:
        return names.get(_plain_name(_OTHER_NAMES[word]))
    if _plain_name(word) in names:
        return names[_plain_name(word)]
    near = difflib.get_close_matches(_plain_name(word), names, n=1) if len(word) <= _MAX_MEANT_CHARS else []
    return names[near[0]] if near else None


def _plain_name(text: str) -> str:
    return re.sub(r"[\s_-]+", "", text.lower())


class RunConfig(Protocol):
    """A whole config, as the rules beside a section read the others: ``config.rollout.dtype``.

    Its classes are in :mod:`mindrlhf.config.schema`, which is made of the sections, so that these cannot name them.
    """

    def __getattr__(self, section: str) -> Any: ...


def key(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] = (),
    exclusive_minimum: bool = False,
    is_model: bool = False,
    read_with: str = "",
    on_ascend: Any = None,
) -> Any:
    """Declare one key of a section.

    Args:
        default: value when the YAML leaves the key out; ``REQUIRED`` when it may not.
        doc: what the key means, with its unit; it goes to docs/config.md as it stands.
        minimum, maximum: closed bounds of a number (``exclusive_minimum`` opens the lower one).
        choices: the allowed values, when they are few.
        is_model: a directory, or the name of a model on a hub, which becomes its directory in the hub's cache.
        read_with: the condition under which anything reads the key; see :mod:`mindrlhf.config.unread`.
        on_ascend: the default with `run.device: ascend`; None where it is ``default`` there too.
    """
    metadata = {
        "doc": doc,
        "minimum": minimum,
        "maximum": maximum,
        "choices": tuple(choices),
        "exclusive_minimum": exclusive_minimum,
        "is_model": is_model,
        "read_with": read_with,
        "on_ascend": on_ascend,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, doc: str, *, read_with: str = "") -> Any:
    """Declare a nested section whose keys are the fields of ``cls``; all of them have the condition ``read_with``."""
    return dataclasses.field(default_factory=cls, metadata={"doc": doc, "section": cls, "read_with": read_with})
