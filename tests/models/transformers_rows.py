"""Run by the rollout interpreter: a random model of transformers, and rows of it in float64.

Usage: transformers_rows.py DIR CONFIG_JSON. DIR has, for each row, NAME.rows.npz with tokens `[S]` and sequences
`[n, S]`: flags of the tokens that a sequence is made of. A token's logits are those of the first sequence that has it.
Written are the model, and NAME.float64.npz with logits `[S, V]` and the gradients of their mean square by name.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def write_rows(out_dir: Path, model) -> None:
    for path in sorted(out_dir.glob("*.rows.npz")):
        rows = np.load(path)
        tokens, found = torch.tensor(rows["tokens"], dtype=torch.long), {}
        for sequence in rows["sequences"]:
            places = np.flatnonzero(sequence)
            logits = model(tokens[places][None]).logits[0]
            found = {int(place): row for place, row in zip(places, logits)} | found
        logits = torch.stack([found[place] for place in range(len(tokens))])
        model.zero_grad()
        logits.square().mean().backward()
        gradients = {name: one.grad.numpy() for name, one in model.named_parameters()}
        name = path.name.removesuffix(".rows.npz")
        np.savez(out_dir / f"{name}.float64.npz", logits=logits.detach().numpy(), **gradients)


torch.set_num_threads(1)
torch.manual_seed(0)
directory, config = Path(sys.argv[1]), transformers.AutoConfig.for_model(**json.loads(sys.argv[2]))
model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        # Far from the initial values, so that a forgotten bias or norm shows.
        # Decays are slow, as they are where models begin.
        mean = parameter.mean() if "norm" in name else -4.0 if name.endswith("dt_bias") else 0.0
        parameter.copy_(torch.randn_like(parameter) * 0.2 + mean)
model.save_pretrained(directory)
# Nor may its own casts to float32 lose digits.
torch.float = torch.float32 = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)
exact = transformers.AutoModelForCausalLM.from_config(config).double().eval()
exact.load_state_dict(model.state_dict())
write_rows(directory, exact)
