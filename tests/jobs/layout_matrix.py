"""The layouts that compile tests go through, and the small models they cut."""

import dataclasses

from slow_tests import RUNS_SLOW_TESTS
from tiny_vl import TinyVl, config_of

from mindrlhf.config.training import ParallelSection
from mindrlhf.dryrun.compile.request import UPDATE, VALUE_UPDATE, CompileRequest
from mindrlhf.specs import scorer_config

SEQ_LENGTH, HIDDEN, VOCABULARY = 64, 128, 1024


def hf_config(architecture: str, num_layers: int, **changes) -> dict:
    """A model whose logits and weights are larger than its hidden states, so that gathering them shows."""
    if architecture in (SEES, SEES_CRITIC):
        sees = config_of(TinyVl(hidden=HIDDEN, heads=8, kv_heads=8, layers=num_layers, is_tied=False))
        return sees if architecture == SEES else scorer_config(sees)
    return {
        "architectures": [architecture],
        "hidden_size": HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "intermediate_size": 256,
        "tie_word_embeddings": False,
        **changes,
    }


QWEN2, QWEN3, LLAMA = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"
GLM4, GEMMA3 = "Glm4ForCausalLM", "Gemma3ForCausalLM"
GEMMA = {"sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24, "num_hidden_layers": 2}
CRITIC = "Qwen2ForSequenceClassification"
SEES, SEES_CRITIC = "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLForSequenceClassification"
SP = {"use_seq_parallel": True}
ZERO = {"enable_parallel_optimizer": True}
WHOLE = {"vocab_emb_dp": True}
ADAPTERS = {"rank": 4, "alpha": 8.0}


# (architecture, data, model, pipeline, context, further keys of parallel_config, changes of the model): what is counted
# by hand, and beside it as few as have each pair of an architecture, an axis, an option and a kind of training.
_ALL_LAYOUTS = {
    "qwen2-mp2": (QWEN2, 1, 2, 1, 1, {}, {}),
    "qwen2-dp2": (QWEN2, 2, 1, 1, 1, {}, {}),
    "qwen2-dp2-zero": (QWEN2, 2, 1, 1, 1, ZERO, {}),
    "qwen2-mp2-sp": (QWEN2, 1, 2, 1, 1, SP, {}),
    "qwen2-pp2": (QWEN2, 1, 1, 2, 1, {}, {}),
    "qwen2-dp2-mp4-whole": (QWEN2, 2, 4, 1, 1, WHOLE, {}),
    "qwen2-dp2-mp2-pp2-zero": (QWEN2, 2, 2, 2, 1, ZERO, {}),
    "qwen2-dp2-mp4-pp2-cp2-sp-zero": (QWEN2, 2, 4, 2, 2, SP | ZERO, {}),
    "qwen2-dp4-mp4-pp4-sp-zero": (QWEN2, 4, 4, 4, 1, SP | ZERO, {}),
    "qwen2-tied-dp2-mp2": (QWEN2, 2, 2, 1, 1, WHOLE, {"tie_word_embeddings": True}),
    "qwen2-tied-mp4-sp": (QWEN2, 1, 4, 1, 1, SP, {"tie_word_embeddings": True}),
    "qwen3-dp8-zero": (QWEN3, 8, 1, 1, 1, ZERO, {}),
    "qwen3-dp2-mp2-cp2": (QWEN3, 2, 2, 1, 2, {}, {}),
    "qwen3-dp2-mp2-cp2-zero-whole": (QWEN3, 2, 2, 1, 2, ZERO | WHOLE, {}),
    "qwen3-dp2-micro2": (QWEN3, 2, 1, 1, 1, {"micro_batch_num": 2}, {}),
    "qwen3-dp2-mp8-pp4-sp-zero": (QWEN3, 2, 8, 4, 1, SP | ZERO, {}),
    "llama-dp2-mp2-pp2-sp-zero": (LLAMA, 2, 2, 2, 1, SP | ZERO, {}),
    "glm4-dp2-mp2-pp2-sp-zero": (GLM4, 2, 2, 2, 1, SP | ZERO, {}),
    "gemma3-dp2-mp2-sp-zero": (GEMMA3, 2, 2, 1, 1, SP | ZERO, GEMMA),
    "gemma3-dp2-mp2-cp2": (GEMMA3, 2, 2, 1, 2, {}, GEMMA),
    "gemma3-dp2-mp2-shared": (GEMMA3, 2, 2, 1, 1, {}, GEMMA),
    # Rows whose samples share prompts.
    "qwen2-dp2-mp2-pp2-zero-shared": (QWEN2, 2, 2, 2, 1, ZERO, {}),
    "qwen3-dp2-mp2-cp2-shared": (QWEN3, 2, 2, 1, 2, {}, {}),
    # vision-language models, whose image rows come in as a parameter.
    "sees-dp2-mp2": (SEES, 2, 2, 1, 1, {}, {}),
    "sees-dp2-mp2-sp-whole-zero": (SEES, 2, 2, 1, 1, SP | WHOLE | ZERO, {}),
    # Models whose adapters are trained.
    "qwen2-mp2-adapted": (QWEN2, 1, 2, 1, 1, {}, {}),
    "qwen2-dp2-mp2-pp2-sp-zero-adapted": (QWEN2, 2, 2, 2, 1, SP | ZERO, {}),
    "qwen3-dp2-mp2-cp2-zero-adapted": (QWEN3, 2, 2, 1, 2, ZERO, {}),
    "critic-dp2-mp2-sp-adapted": (CRITIC, 2, 2, 1, 1, SP, {}),
    "sees-dp2-mp2-pp2-sp-zero": (SEES, 2, 2, 2, 1, SP | ZERO, {}),
    "sees-dp2-cp2": (SEES, 2, 1, 1, 2, {}, {}),
    # Logits in tiles, and recomputation: see _MEMORY.
    "qwen2-mp2-tiles": (QWEN2, 1, 2, 1, 1, {}, {}),
    "qwen2-dp2-mp2-pp2-cp2-sp-zero-tiles": (QWEN2, 2, 2, 2, 2, SP | ZERO, {}),
    "critic-mp2": (CRITIC, 1, 2, 1, 1, {}, {}),
    "critic-dp2-mp2-pp2-sp-whole-zero": (CRITIC, 2, 2, 2, 1, SP | WHOLE | ZERO, {}),
    "critic-sees-dp2-mp2": (SEES_CRITIC, 2, 2, 1, 1, {}, {}),
    "critic-sees-dp2-mp2-pp2-sp-zero": (SEES_CRITIC, 2, 2, 2, 1, SP | ZERO, {}),
}
# Keys of the section `memory`.
_MEMORY = {
    "qwen2-mp2-tiles": {"logit_tile": 24},
    "qwen2-dp2-mp2-pp2-cp2-sp-zero-tiles": {
        "logit_tile": 8,
        "recompute_layers": "0",
        "recompute_operators": ("attention", "norms", "activation"),
    },
}
# Two counted by hand, and one in which all axes take part; the others nightly.
_OF_EVERY_DAY = ("qwen2-mp2", "qwen2-dp2", "qwen2-dp2-mp4-pp2-cp2-sp-zero")
LAYOUTS = _ALL_LAYOUTS if RUNS_SLOW_TESTS else {name: _ALL_LAYOUTS[name] for name in _OF_EVERY_DAY}


def request(name: str) -> CompileRequest:
    """The last stage of a layout, which has decoder layers, the head and the loss; one layer per stage."""
    architecture, data, model, pipeline, context, keys, changes = _ALL_LAYOUTS[name]
    parallel = ParallelSection(
        **{
            "data_parallel": data,
            "model_parallel": model,
            "pipeline_stage": pipeline,
            "context_parallel": context,
            "micro_batch_num": pipeline,
            "vocab_emb_dp": False,
            **keys,
        }
    )
    stage_size = data * model * context
    return CompileRequest(
        hf_config=hf_config(architecture, pipeline, **changes),
        parallel=dataclasses.asdict(parallel),
        # Not the first rank of its stage: what only rank 0 gets right would go unnoticed.
        rank=stage_size * pipeline - 1,
        seq_length=SEQ_LENGTH,
        cell=VALUE_UPDATE if architecture in (CRITIC, SEES_CRITIC) else UPDATE,
        shared_prompts=name.endswith("-shared"),
        lora=ADAPTERS if name.endswith("-adapted") else None,
        memory=_MEMORY.get(name, {}),
    )
