"""Models that give a score instead of tokens: reward models and critics, one per architecture of language models."""

from dataclasses import replace

from mindrlhf.specs.model import ModelSpec
from mindrlhf.specs.rules import OUTPUT, ParameterRule

SCORE_NAME = "score.weight"

_SCORE = ParameterRule((SCORE_NAME,), SCORE_NAME, "copy", lambda dims: ((1, dims.hidden_size),), shard_axis=None)


def scorer_of(spec: ModelSpec) -> ModelSpec:
    """Return the spec whose output is one number for each token; Hugging Face calls it ForSequenceClassification.

    It has no vocabulary projection, whatever `tie_word_embeddings` says.
    """
    return replace(
        spec,
        name=f"{spec.name}_scorer",
        hf_architecture=scorer_architecture(spec.hf_architecture),
        parameter_rules=(*(rule for rule in spec.parameter_rules if rule is not OUTPUT), _SCORE),
        is_scorer=True,
    )


def scorer_architecture(architecture: str) -> str:
    """Return Hugging Face's name of the scoring form of a language model; of one that sees, what it would be."""
    for suffix in ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification"):
        architecture = architecture.removesuffix(suffix)
    return f"{architecture}ForSequenceClassification"
