"""Run by the rollout interpreter: transformers' VLMs on segments with images; logits, rows and gradients.

Usage: vl_reference.py MODEL_DIR...; reads MODEL_DIR/inputs.npz, writes expected.npz. The inputs are, for segment n,
`ids/n` [tokens], `weights/n` [tokens - 1] of the labels' log-probabilities, and `pixels/n` [patches, channels] and
`grids/n` [images, 3], both only of segments with images.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForImageTextToText


def write_reference(model_dir: str, inputs: dict[str, np.ndarray]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32).eval()
    saved, loss = {}, 0.0
    for number in range(sum(name.startswith("ids/") for name in inputs)):
        ids = torch.from_numpy(inputs[f"ids/{number}"].astype(np.int64))
        options = {}
        if f"pixels/{number}" in inputs:
            options = {
                "pixel_values": torch.from_numpy(inputs[f"pixels/{number}"]),
                "image_grid_thw": torch.from_numpy(inputs[f"grids/{number}"]),
                "mm_token_type_ids": (ids == model.config.image_token_id).int()[None],
            }
            seen = model.model.get_image_features(options["pixel_values"], options["image_grid_thw"])
            # With DeepStack further rows, side by side.
            parts = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]
            rows = torch.cat([torch.cat(list(by_image)) for by_image in parts], 1)
            saved |= {f"rows/{number}": rows.detach().numpy()}
        logits = model(input_ids=ids[None], **options).logits[0]
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        loss = loss - (logprobs * torch.from_numpy(inputs[f"weights/{number}"])).sum()
        saved |= {f"logits/{number}": logits.detach().numpy(), f"logprobs/{number}": logprobs.detach().numpy()}
    loss.backward()
    saved["loss"] = loss.detach().numpy()
    for name, parameter in model.named_parameters():
        checkpoint_name = name
        if model.config.model_type != "qwen3_vl":
            checkpoint_name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        saved[f"gradient/{checkpoint_name}"] = parameter.grad.numpy()
    np.savez(f"{model_dir}/expected.npz", **saved)


torch.set_num_threads(1)
for directory in sys.argv[1:]:
    write_reference(directory, dict(np.load(f"{directory}/inputs.npz")))
