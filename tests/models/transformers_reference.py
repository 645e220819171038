"""Run by the rollout interpreter: random transformers models, their weights, logits and gradients, in directories.

Usage: transformers_reference.py OUT_DIR CONFIGS_JSON, the second a JSON object of config by name of sub-directory.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def write_reference(out_dir: Path, config_options: dict) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**config_options)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Far from the initial values, so that a forgotten bias or norm shows.
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.mean() if "norm" in name else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # As large as differences of scores, so that it changes who is chosen.
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    input_ids = torch.randint(0, config.vocab_size, (3, 12))
    logits = model(input_ids).logits
    logits.square().mean().backward()
    model.save_pretrained(out_dir)
    np.savez(out_dir / "logits.npz", input_ids=input_ids.numpy().astype(np.int32), logits=logits.detach().numpy())
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients.update(_checkpoint_tensors(name, parameter.grad.numpy()))
    np.savez(out_dir / "gradients.npz", **gradients)


def _checkpoint_tensors(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """By names of checkpoint files: experts, which transformers stacks, one by one."""
    prefix, is_expert, part = name.partition(".experts.")
    if not is_expert:
        return {name: array}
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    return {
        f"{prefix}.experts.{expert}.{short}.weight": piece
        for expert, stacked in enumerate(array)
        for short, piece in zip(names, np.split(stacked, len(names)))
    }


torch.set_num_threads(1)
for name, options in json.loads(sys.argv[2]).items():
    write_reference(Path(sys.argv[1]) / name, options)
