"""The settings of `adapter_config.json`, in PEFT's format, that matter here."""

import logging
from dataclasses import replace
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.specs import ParameterRule
from mindrlhf.specs.lora import AdaptedRules, LoraOptions
from mindrlhf.system.sizes import read_json_object
from mindrlhf.weights.hf import ADAPTER_CONFIG_NAME

CONFIG_NAME = ADAPTER_CONFIG_NAME
PREFIX = "base_model.model."
# Settings of PEFT's LoraConfig that change what an adapter computes, and the only values that are computed here.
_PLAIN = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "use_qalora": (False,),
    "use_bdlora": (False, None),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
}
# Ways to begin that leave the base as it is: B is 0, or the adapter is what it is.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
# Ways to begin that move a part of the base into the adapter: PiSSA (arXiv:2404.02948), OLoRA (arXiv:2406.01775),
# LoftQ (arXiv:2310.08659), CorDA (arXiv:2406.05223), LoRA-GA (arXiv:2407.05000).
_MOVING_STARTS = ("pissa", "olora", "loftq", "corda", "lora_ga")
# What tells where an adapter is, how it was trained, or what its tensors' names tell too.
_HARMLESS = frozenset(
    (
        *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
        *("peft_version", "r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules"),
        *("modules_to_save", "layers_to_transform", "layers_pattern", "init_lora_weights", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core"),
        *("qalora_group_size", "ensure_weight_tying"),
    )
)
_logger = logging.getLogger(__name__)


def read_options(path: Path) -> LoraOptions:
    """Return rank, alpha and scaling of an adapter; what is targeted shows in the names of its tensors.

    Raises:
        UserError: the file is damaged, or the adapter computes something else than W + s B A.
    """
    config = read_json_object(path)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path} has peft_type={config.get('peft_type')!r}: only 'LORA' is read")
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            raise UserError(f"{path} has {key}={config[key]!r}: only {plain[0]!r} is supported")
    _check_start(path, config.get("init_lora_weights", True))
    unknown = [key for key in config if key not in _PLAIN and key not in _HARMLESS and config[key]]
    if unknown:
        _logger.warning(
            "%s has %s=%r, which is not known here: it is merged as W + s B A all the same",
            path,
            unknown[0],
            config[unknown[0]],
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not alpha > 0:
        raise UserError(f"{path} has r={rank!r} and lora_alpha={alpha!r}: both must be numbers above 0")
    return LoraOptions(rank, float(alpha), (), bool(config.get("use_rslora")))


def _check_start(path: Path, start: object) -> None:
    """Check that what an adapter began with has left the base model as it was.

    Raises:
        UserError: it has not, or it is not known whether.
    """
    name = start.lower() if isinstance(start, str) else start
    if isinstance(name, str) and name.startswith(_MOVING_STARTS):
        raise UserError(
            f"{path} has init_lora_weights={start!r}, which changes the base model too: convert the adapter to plain "
            "LoRA with PEFT (save_pretrained with path_initial_model_for_weight_conversion); where the base that you "
            "give is the changed one, set init_lora_weights to true"
        )
    if not any(name is one or name == one and isinstance(one, str) for one in _PLAIN_STARTS):
        raise UserError(
            f"{path} has init_lora_weights={start!r}, of which it is not known whether it changes the base model too: "
            "set it to true if it does not"
        )
    if name == "eva":
        _logger.warning("%s has init_lora_weights='eva': A began from data, the base model is taken as it is", path)


def saved_rules(adapted: AdaptedRules) -> list[ParameterRule]:
    """Return the rules of what an adapter's files hold, under PEFT's names."""
    return [replace(rule, hf_names=tuple(PREFIX + name for name in rule.hf_names)) for rule in adapted.trained()]
