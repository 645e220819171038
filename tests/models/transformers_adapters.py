"""Run by the rollout interpreter: adapters of random transformers models, in PEFT's format, and what they compute.

Usage: transformers_adapters.py OUT_DIR CONFIGS_JSON, the second a JSON object of config by name of sub-directory. Each
gets the base model, `adapter/` with random factors of every matrix of the layers but those of routed experts, and in
`expected.npz`, computed in float64 with W + s B A in the place of W, the logits and the gradients of the factors by
PEFT's names.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

RANK, ALPHA = 3, 5.0
PREFIX = "base_model.model."


def write_adapted(out_dir: Path, options: dict) -> None:
    torch.manual_seed(0)
    options = dict(options)
    is_stabilised = options.pop("rank_stabilised", False)
    config = transformers.AutoConfig.for_model(**options)
    # The grouped products of experts have no form in float64.
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(out_dir)
    model = model.double()
    weights = {name: one.detach() for name, one in model.named_parameters()}
    factors = {}
    for name, weight in weights.items():
        is_routed = ".experts." in name or name.endswith("mlp.gate.weight")
        if name.startswith("model.layers.") and weight.dim() == 2 and not is_routed:
            module = PREFIX + name.removesuffix(".weight")
            factors[f"{module}.lora_A.weight"] = torch.randn(RANK, weight.shape[1]).mul(0.2)
            factors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], RANK).mul(0.2)
    scale = ALPHA / (RANK**0.5 if is_stabilised else RANK)
    write_peft(out_dir / "adapter", factors, is_stabilised)
    leaves = {name: factor.double().requires_grad_() for name, factor in factors.items()}

    def adapted(name: str) -> torch.Tensor:
        module = PREFIX + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in leaves:
            return weights[name]
        return weights[name] + scale * leaves[f"{module}.lora_B.weight"] @ leaves[f"{module}.lora_A.weight"]

    parameters = {name: adapted(name) for name in weights}
    input_ids = torch.randint(0, model.config.vocab_size, (2, 12))
    logits = torch.func.functional_call(model, parameters, (input_ids,)).logits
    logits.square().mean().backward()
    gradients = {name: leaf.grad.numpy() for name, leaf in leaves.items()}
    arrays = {"input_ids": input_ids.numpy().astype(np.int32), "logits": logits.detach().numpy()}
    np.savez(out_dir / "expected.npz", **arrays, **gradients)


def write_peft(directory: Path, factors: dict, is_stabilised: bool) -> None:
    directory.mkdir()
    save_file(factors, directory / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "use_rslora": is_stabilised,
        "target_modules": "all-linear",
        "bias": "none",
        "lora_dropout": 0.05,  # of no account outside of training
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


torch.set_num_threads(1)
for name, options in json.loads(sys.argv[2]).items():
    write_adapted(Path(sys.argv[1]) / name, options)
