"""The sections `model` and `lora`."""

from dataclasses import dataclass

from mindrlhf.config.keys import REQUIRED, key
from mindrlhf.errors import Rules
from mindrlhf.specs.lora import ROLES, LoraOptions


@dataclass(frozen=True)
class ModelSection:
    """The model to train."""

    path: str = key(REQUIRED, "Hugging Face directory of the actor (config.json and safetensors)", is_model=True)
    reference_path: str = key(
        "",
        "Hugging Face directory of the reference model; empty means `model.path`",
        is_model=True,
        read_with="algorithm.beta or dpo.loss",
    )
    random_init: bool = key(
        False, "ignore weights in `model.path`, initialise them from `run.seed`; needs only config.json"
    )
    param_dtype: str = key("float32", "type of the trained parameters", choices=("float32", "bfloat16"))
    compute_dtype: str = key(
        "float32", "type of the matrix products; CPU has float32 kernels only", choices=("float32", "bfloat16")
    )
    recompute: bool = key(False, "recompute each layer's activations in the backward pass to save memory")


@dataclass(frozen=True)
class LoraSection:
    """Low-rank adapters are trained in the place of all weights, those of a critic included; see docs/lora.md."""

    rank: int | None = key(None, "rank of the adapters; null trains all weights", minimum=1)
    alpha: float = key(16.0, "an adapter's product is multiplied by alpha / rank", minimum=0, exclusive_minimum=True)
    rank_stabilised: bool = key(False, "multiply by alpha / sqrt(rank) instead (rsLoRA)")
    targets: tuple[str, ...] = key(
        (),
        "which matrices of a layer have adapters: attention, mlp (dense layers and shared experts); empty means all "
        "that the model has",
        choices=ROLES,
    )
    path: str = key("", "adapter of `model.path`, in PEFT's format, to begin with; empty begins anew")

    @property
    def options(self) -> LoraOptions | None:
        """The adapters' options; None when all weights are trained."""
        if self.rank is None:
            return None
        return LoraOptions(self.rank, self.alpha, self.targets, self.rank_stabilised)


def lora_rules(lora: LoraSection) -> Rules:
    yield len(set(lora.targets)) < len(lora.targets), (
        f"'lora.targets' names a role twice: {', '.join(lora.targets)}: name each once"
    )
