"""One `ModelSpec` per architecture: how MindFormers builds it, its weight names, and how each weight is sharded.

Everything here is plain data and Python: it imports neither MindSpore nor MindFormers, so that conversion,
planning and the weight buffer can read it anywhere. A new architecture is one more entry of `SPECS`.
"""

from mindrlhf.errors import UserError
from mindrlhf.specs.deepseek import DEEPSEEK_V3
from mindrlhf.specs.dims import ExpertDims, LatentDims, ModelDims, VisionDims, YarnDims
from mindrlhf.specs.model import ModelSpec, with_num_layers
from mindrlhf.specs.qwen import QWEN2, QWEN3, QWEN3_MOE
from mindrlhf.specs.qwen_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from mindrlhf.specs.rules import ParameterRule
from mindrlhf.specs.scoring import scorer_architecture, scorer_of

__all__ = [
    "DEEPSEEK_V3",
    "QWEN2",
    "QWEN2_5_VL",
    "QWEN2_VL",
    "QWEN3",
    "QWEN3_MOE",
    "QWEN3_VL",
    "SPECS",
    "ExpertDims",
    "LatentDims",
    "ModelDims",
    "ModelSpec",
    "ParameterRule",
    "VisionDims",
    "YarnDims",
    "find_spec",
    "scorer_config",
    "with_num_layers",
]

_LANGUAGE_MODELS = (QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V3, QWEN2_5_VL, QWEN2_VL, QWEN3_VL)
SPECS = {spec.hf_architecture: spec for spec in (*_LANGUAGE_MODELS, *map(scorer_of, _LANGUAGE_MODELS))}


def find_spec(hf_config: dict) -> ModelSpec:
    """Return the spec that serves `architectures[0]` of a config.json.

    Raises:
        UserError: the architecture is missing or unknown.
    """
    architectures = hf_config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(architecture, str) or architecture not in SPECS:
        raise UserError(f"config.json has architectures={architectures!r}: the supported ones are {', '.join(SPECS)}")
    return SPECS[architecture]


def scorer_config(hf_config: dict) -> dict:
    """Return the config.json of the scoring form of a model, which transformers and vLLM load as well."""
    architecture = scorer_architecture(find_spec(hf_config).hf_architecture)
    labels = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    return {**hf_config, "architectures": [architecture], **labels, "tie_word_embeddings": False}
