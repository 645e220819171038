"""Run by the rollout interpreter: logits of a base model under an adapter that `peft` loads, and of a merged model.

Usage: peft_logits.py BASE_DIR ADAPTER_DIR MERGED_DIR OUT_FILE
"""

import sys

import numpy as np
import torch
import transformers
from peft import PeftModel

base_dir, adapter_dir, merged_dir, out_file = sys.argv[1:]
torch.set_num_threads(1)


def load(directory: str):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


input_ids = torch.arange(3, 27).reshape(2, 12)
with torch.no_grad():
    base, merged = (load(directory)(input_ids).logits.numpy() for directory in (base_dir, merged_dir))
    adapted = PeftModel.from_pretrained(load(base_dir), adapter_dir).eval()(input_ids).logits.numpy()
np.savez(out_file, base=base, merged=merged, adapted=adapted)
