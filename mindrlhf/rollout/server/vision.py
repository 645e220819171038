"""Vision-language models in vLLM without torchvision, tokenizer or Hugging Face processor.

The trainer sends token ids that hold one image token for each cell of an image, and the pixels of each image in their
final size. Patches are cut here, by the same code as in the trainer, and go to vLLM as what its processor would have
made of them. vLLM's model class imports processors that need torchvision; nothing of it is called, so empty modules
take its place while they are imported.
"""

import dataclasses
import functools
import importlib
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs, ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from mindrlhf.images.geometry import VisionGeometry
from mindrlhf.images.patches import patch_rows
from mindrlhf.images.positions import image_starts
from mindrlhf.rollout.sent_images import SentImage
from mindrlhf.specs import find_spec

# vLLM's module of each family, and how names of its classes begin.
_FAMILIES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
_TORCHVISION = [f"torchvision{part}" for part in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]


def hf_config_of(model_dir: str) -> dict:
    """Return config.json of a model, which the process that starts a server has checked."""
    return json.loads(Path(model_dir, "config.json").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class VisionModel:
    """Settings of a vision-language model in the server."""

    image_token: int
    geometry: VisionGeometry

    @classmethod
    def of(cls, model_dir: str) -> "VisionModel | None":
        """Return what config.json says, or None when the model sees nothing.

        Raises:
            UserError: a vision-language model, of an unknown architecture.
        """
        hf_config = hf_config_of(model_dir)
        if hf_config.get("vision_config") is None:
            return None
        vision = find_spec(hf_config).dims(hf_config).vision
        return cls(vision.image_token, vision.geometry)

    def engine_arguments(self, max_model_len: int) -> dict[str, Any]:
        """Return the arguments of vLLM's engine for this model, whose class is registered too."""
        register()
        arguments = {"limit_mm_per_prompt": {"image": _most_images(max_model_len), "video": 0}}
        arguments |= {"skip_mm_profiling": True, "mm_processor_cache_gb": 0}
        # Releases that can normalise inside the model do so unless told otherwise; what is sent is normalised.
        if "mm_device_do_normalize" in {field.name for field in dataclasses.fields(EngineArgs)}:
            arguments["mm_device_do_normalize"] = False
        return arguments

    def item(self, image: SentImage) -> MultiModalKwargsItem:
        """Return what vLLM's model takes of an image: normalised patches, and how many there are in each direction."""
        rows, columns = self.geometry.token_grid(*image.pixels.shape[:2])
        patches = torch.from_numpy(patch_rows(image.pixels, self.geometry))
        grid = torch.tensor([(1, rows * self.geometry.merge, columns * self.geometry.merge)])
        flat = MultiModalFieldConfig.flat("image", [slice(0, len(patches))])
        batched = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        return MultiModalKwargsItem(
            {
                "pixel_values": flat.build_elems("pixel_values", patches)[0],
                "image_grid_thw": batched.build_elems("image_grid_thw", grid)[0],
            }
        )

    def features(
        self, prompt: Sequence[int], images: Sequence[SentImage], items: dict[str, MultiModalKwargsItem]
    ) -> list[MultiModalFeatureSpec]:
        """Return the images of a prompt, each with its place among the tokens.

        Args:
            items: by digest, those of the batch; what is not there is added.

        Raises:
            ValueError: the image tokens of the prompt are not those of the images.
        """
        grids = [self.geometry.token_grid(*image.pixels.shape[:2]) for image in images]
        found = []
        for image, start, (rows, columns) in zip(images, image_starts(prompt, grids, self.image_token), grids):
            if image.digest not in items:
                items[image.digest] = self.item(image)
            found.append(
                MultiModalFeatureSpec(
                    data=items[image.digest],
                    modality="image",
                    identifier=image.digest,
                    mm_position=PlaceholderRange(offset=start, length=rows * columns),
                    mm_hash=image.digest,
                )
            )
        return found


def _most_images(max_model_len: int) -> int:
    """The most images of a prompt: each takes one token and the two around it at least."""
    return max(1, max_model_len // 3)


@functools.cache
def register() -> None:
    """Have vLLM take the models' classes as they are, with processors that know limits and need no tokenizer.

    Every process of vLLM has to call this; those that it starts itself do so by a plugin, see ``write_plugin``.
    """
    for module, prefix in zip(_import_models(), _FAMILIES.values()):
        _register(prefix, *(getattr(module, f"{prefix}{part}") for part in _PARTS))


_PARTS = ("ForConditionalGeneration", "ProcessingInfo", "MultiModalProcessor", "DummyInputsBuilder")


def _register(prefix: str, model: type, known: type, processor: type, builder: type) -> None:
    class Info(known):
        def get_supported_mm_limits(self):
            return {"image": _most_images(self.ctx.model_config.max_model_len)}

        def get_mm_max_tokens_per_item(self, seq_len, mm_counts):
            return {"image": self.ctx.model_config.max_model_len}

    class Processor(processor):
        requires_tokenizer = False

    MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=builder)(model)
    # A class, not its name: names are looked into by a process of their own, which lacks all this.
    ModelRegistry.register_model(f"{prefix}{_PARTS[0]}", model)


def _import_models() -> list[types.ModuleType]:
    import_processors()
    return [importlib.import_module(f"vllm.model_executor.models.{name}") for name in _FAMILIES]


def import_processors() -> None:
    """Import transformers' processors that vLLM's modules of these families want, also where torchvision is missing."""
    # These ask whether it is there: before it seems so.
    import transformers.image_processing_backends
    import transformers.video_processing_utils

    names = () if transformers.utils.is_torchvision_available() else _TORCHVISION
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    for parent, child in zip(names, names[1:]):
        setattr(sys.modules[parent], child.rpartition(".")[2], sys.modules[child])
    try:
        import transformers.models.qwen2_vl.image_processing_qwen2_vl
        import transformers.models.qwen2_vl.video_processing_qwen2_vl  # noqa: F401
    finally:
        for name in names:
            del sys.modules[name]
