"""One `ModelSpec` per architecture: how MindFormers builds it, its weight names, and how each weight is sharded.

Everything here is plain data and Python: it imports neither MindSpore nor MindFormers, so that conversion,
planning and the weight buffer can read it anywhere. A new architecture is one more entry of `SPECS`.
"""

from mindrlhf.errors import UserError
from mindrlhf.specs.deepseek import DEEPSEEK_V3
from mindrlhf.specs.dims import (
    CHUNK_TOKENS,
    ExpertDims,
    LatentDims,
    LinearDims,
    Llama3Dims,
    ModelDims,
    VisionDims,
    YarnDims,
)
from mindrlhf.specs.gemma import GEMMA3
from mindrlhf.specs.glm import GLM4, GLM4_MOE
from mindrlhf.specs.llama import LLAMA, MISTRAL
from mindrlhf.specs.model import ModelSpec, with_num_layers
from mindrlhf.specs.qwen import QWEN2, QWEN3, QWEN3_MOE
from mindrlhf.specs.qwen3_5 import QWEN3_5, WITH_VISION
from mindrlhf.specs.qwen_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from mindrlhf.specs.rules import Matrices, ParameterRule
from mindrlhf.specs.scoring import scorer_architecture, scorer_of

__all__ = [
    "CHUNK_TOKENS",
    "DEEPSEEK_V3",
    "GEMMA3",
    "GLM4",
    "GLM4_MOE",
    "LLAMA",
    "MISTRAL",
    "QWEN2",
    "QWEN2_5_VL",
    "QWEN2_VL",
    "QWEN3",
    "QWEN3_5",
    "QWEN3_MOE",
    "QWEN3_VL",
    "SPECS",
    "ExpertDims",
    "LatentDims",
    "LinearDims",
    "Llama3Dims",
    "Matrices",
    "ModelDims",
    "ModelSpec",
    "ParameterRule",
    "VisionDims",
    "YarnDims",
    "find_spec",
    "has_linear_attention",
    "scorer_config",
    "with_num_layers",
]

_TEXT_MODELS = (QWEN2, QWEN3, QWEN3_5, QWEN3_MOE, LLAMA, MISTRAL, GLM4, GEMMA3, GLM4_MOE, DEEPSEEK_V3)
_LANGUAGE_MODELS = (*_TEXT_MODELS, QWEN2_5_VL, QWEN2_VL, QWEN3_VL)
SPECS = {spec.hf_architecture: spec for spec in (*_LANGUAGE_MODELS, *map(scorer_of, _LANGUAGE_MODELS))}


def find_spec(hf_config: dict) -> ModelSpec:
    """Return the spec that serves `architectures[0]` of a config.json.

    Raises:
        UserError: the architecture is missing or unknown.
    """
    architectures = hf_config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(architecture, str) or architecture not in SPECS:
        raise UserError(
            f"config.json has architectures={architectures!r}: supported language models are "
            f"{', '.join(spec.hf_architecture for spec in _LANGUAGE_MODELS)}; {_way_out(architecture, hf_config)}"
        )
    return SPECS[architecture]


def has_linear_attention(hf_config: dict) -> bool:
    """Return whether a config.json, also of a model without a spec, is of Qwen3.5 as it is served here."""
    return QWEN3_5.hf_architecture in (hf_config.get("architectures") or ())


def _way_out(architecture: object, hf_config: dict) -> str:
    """Return what can be done about an architecture that has no spec."""
    if architecture == WITH_VISION:
        return "make a text model of this one: mindrlhf weights convert DIR --output DIR"
    if not isinstance(architecture, str):
        meant = [spec for spec in _LANGUAGE_MODELS if spec.name == hf_config.get("model_type")]
    else:
        meant = [spec for name, spec in SPECS.items() if name.casefold() == architecture.casefold()]
    if meant:
        return f'write "architectures": ["{meant[0].hf_architecture}"]'
    return "take a model of one of them, or add this one as docs/families.md describes"


def scorer_config(hf_config: dict) -> dict:
    """Return the config.json of the scoring form of a model, which transformers and vLLM load as well."""
    architecture = scorer_architecture(find_spec(hf_config).hf_architecture)
    labels = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    return {**hf_config, "architectures": [architecture], **labels, "tie_word_embeddings": False}
