"""Run in the rollout environment: what transformers and vLLM compute with exported models.

Usage: export_reference.py transformers|vllm MODEL_DIR... ; prints one line of JSON, by directory.

Of language models the log-probabilities of the tokens of two rows (padded to one batch in transformers), of models that
score what they give each row in a batch, and alone.
"""

import json
import sys
from pathlib import Path

ROWS = [[11, 12, 13, 14, 15, 16], [21, 22, 23]]


def in_transformers(path):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    def whole(kind):
        model, info = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        assert not any(info.values()), info
        return model.eval()

    if "score" in Path(path).name:
        model = whole(AutoModelForSequenceClassification)
        batch = torch.full((2, 6), model.config.pad_token_id)
        for row, tokens in zip(batch, ROWS):
            row[: len(tokens)] = torch.tensor(tokens)
        alone = [model(torch.tensor([tokens])).logits[0, 0].item() for tokens in ROWS]
        mask = (batch != model.config.pad_token_id).long()
        return [model(batch, attention_mask=mask).logits[:, 0].tolist(), alone]
    model = whole(AutoModelForCausalLM)
    return [
        model(torch.tensor([tokens])).logits[0].log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].tolist()
        for tokens in ROWS
    ]


def in_vllm(path):
    from vllm import LLM, SamplingParams

    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 32}
    prompts = [{"prompt_token_ids": tokens} for tokens in ROWS]
    if "score" in Path(path).name:
        engine = LLM(path, runner="pooling", **options)
        found = engine.classify(prompts, use_tqdm=False)
        return [[one.outputs.probs[0] for one in found]]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = LLM(path, **options).generate(prompts, sampling, use_tqdm=False)
    return [
        [entry[token].logprob for entry, token in zip(one.prompt_logprobs[1:], tokens[1:])]
        for one, tokens in zip(found, ROWS)
    ]


def main():
    run = {"transformers": in_transformers, "vllm": in_vllm}[sys.argv[1]]
    print("\n" + json.dumps({Path(path).name: run(path) for path in sys.argv[2:]}))


if __name__ == "__main__":
    main()
