"""What `adapter_config.json` of an adapter in PEFT's format says, as far as it matters here."""

from dataclasses import replace
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.specs import ParameterRule
from mindrlhf.specs.lora import AdaptedRules, LoraOptions
from mindrlhf.weights.hf import read_json_object

CONFIG_NAME = "adapter_config.json"
PREFIX = "base_model.model."
# Settings of PEFT that change what an adapter computes, and the only values that are computed here.
_PLAIN = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
}


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
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not alpha > 0:
        raise UserError(f"{path} has r={rank!r} and lora_alpha={alpha!r}: both must be numbers above 0")
    return LoraOptions(rank, float(alpha), (), bool(config.get("use_rslora")))


def saved_rules(adapted: AdaptedRules) -> list[ParameterRule]:
    """Return the rules of what an adapter's files hold, under PEFT's names."""
    return [replace(rule, hf_names=tuple(PREFIX + name for name in rule.hf_names)) for rule in adapted.trained()]
