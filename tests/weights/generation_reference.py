"""Run in the rollout environment: what transformers generates from a model, and where vLLM would stop.

Usage: generation_reference.py MODEL_DIR START... ; prints one line of JSON.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams

model_dir, starts = sys.argv[1], [int(word) for word in sys.argv[2:]]
model = AutoModelForCausalLM.from_pretrained(model_dir)
generated = {}
for start in starts:
    found = model.generate(torch.tensor([[start]]), max_new_tokens=12, do_sample=False)
    generated[start] = found[0, 1:].tolist()
# As the server of vLLM makes the parameters of a request that names no stop tokens.
sampling = SamplingParams()
given = ModelConfig(model=model_dir).try_get_generation_config()
sampling.update_from_generation_config(given, AutoTokenizer.from_pretrained(model_dir).eos_token_id)
print(json.dumps({"generated": generated, "vllm": sorted(sampling.all_stop_token_ids)}))
