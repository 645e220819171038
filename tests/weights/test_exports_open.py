"""Each kind of export opens elsewhere: transformers and vLLM load it whole, and compute what the model computes."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from slow_tests import SLOW
from tiny_models import tiny_model

from mindrlhf.cli import main
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.specs import find_spec
from mindrlhf.specs.lora import LoraOptions
from mindrlhf.system.sizes import read_json_object
from mindrlhf.weights.adapters.merge import merge_adapter
from mindrlhf.weights.adapters.peft import adapter_config, adapter_shapes, write_adapter
from mindrlhf.weights.convert import export_hf, random_hf_weights

CHECKPOINT = Path(__file__).parents[2] / "examples" / "quickstart" / "checkpoint"
MODEL = tiny_model(vocab_size=512, num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
SCORER = MODEL | {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> Path:
    """A directory with one of each kind, of the same weights where they are of one architecture."""
    root = tmp_path_factory.mktemp("exports")
    export_hf(random_hf_weights(MODEL, 1), MODEL, root / "whole", tokenizer_dir=CHECKPOINT)
    export_hf(random_hf_weights(MODEL, 1), MODEL, root / "files", max_shard_bytes=1 << 15, tokenizer_dir=CHECKPOINT)
    export_hf(random_hf_weights(MODEL, 1), MODEL, root / "bfloat16", dtype="bfloat16", tokenizer_dir=CHECKPOINT)
    export_hf(random_hf_weights(SCORER, 1), SCORER, root / "score", tokenizer_dir=CHECKPOINT)
    export_hf(
        random_hf_weights(SCORER, 1), SCORER, root / "score_files", max_shard_bytes=1 << 15, tokenizer_dir=CHECKPOINT
    )
    for source, merged in (("whole", "merged"), ("score", "score_merged")):
        assert (
            main(["weights", "shard", str(root / source), "--parallel", "mp=2", "--output", str(root / "shards")]) == 0
        )
        assert main(["weights", "merge", str(root / "shards"), "--output", str(root / merged)]) == 0
        shutil.rmtree(root / "shards")
    assert main(["weights", "import", str(root / "whole"), "--output", str(root / "mf")]) == 0
    assert main(["weights", "export", str(root / "mf"), "--output", str(root / "exported")]) == 0
    assert (
        main(["weights", "convert", str(root / "files"), "--dtype", "float32", "--output", str(root / "converted")])
        == 0
    )
    spec, options = find_spec(MODEL), LoraOptions(4, 8.0)
    shapes = adapter_shapes(spec, spec.dims(MODEL), options)
    factors = [(name, np.zeros(shape, np.float32)) for name, shape in shapes.items()]
    config = adapter_config(spec, spec.dims(MODEL), options, str(root / "whole"))
    write_adapter(factors, shapes, config, root / "adapter")
    merge_adapter(root / "whole", root / "adapter", root / "adapted")
    for name in ("mf", "adapter"):
        shutil.rmtree(root / name)
    return root


def computed(run_in_rollout, library: str, root: Path, *names: str) -> dict:
    paths = [root / name for name in names or sorted(path.name for path in root.iterdir())]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    printed = run_in_rollout(Path(__file__).with_name("export_reference.py"), library, *paths, **environment)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.timeout(560)
def test_transformers_loads_each_kind_whole_and_computes_the_same(exports, run_in_rollout):
    found = computed(run_in_rollout, "transformers", exports)
    assert len(found) == 10
    for name, values in found.items():
        if name.startswith("score"):
            batch, alone = values
            assert batch == pytest.approx(alone, abs=1e-5) and batch == pytest.approx(found["score"][1], abs=1e-5)
            assert abs(alone[0] - alone[1]) > 1e-3
        else:
            for row, wanted in zip(values, found["whole"]):
                assert row == pytest.approx(wanted, abs=0.1 if name == "bfloat16" else 1e-5)
    assert math.exp(found["whole"][0][0]) < 0.5


@SLOW
@pytest.mark.timeout(560)
def test_vllm_loads_models_and_scorers_and_computes_the_same(exports, run_in_rollout):
    names = ("whole", "score")
    wanted = computed(run_in_rollout, "transformers", exports, *names)
    for name in names:  # an engine in each process
        (found,) = computed(run_in_rollout, "vllm", exports, name).values()
        for row, other in zip(found, wanted[name]):
            # vLLM gives the probability of a single label.
            other = [1 / (1 + math.exp(-score)) for score in other] if name == "score" else other
            assert row == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("name", ["score", "score_files", "score_merged"])
def test_a_model_that_scores_names_its_padding_and_other_models_need_none(exports, name):
    assert read_json_object(exports / name / "config.json")["pad_token_id"] == load_tokenizer(CHECKPOINT).pad_token_id
    assert "pad_token_id" not in read_json_object(exports / "whole" / "config.json")


def test_padding_that_the_config_names_stays_and_without_a_tokenizer_there_is_none(tmp_path):
    export_hf(random_hf_weights(SCORER, 1), SCORER | {"pad_token_id": 3}, tmp_path / "a", tokenizer_dir=CHECKPOINT)
    assert read_json_object(tmp_path / "a" / "config.json")["pad_token_id"] == 3
    export_hf(random_hf_weights(SCORER, 1), SCORER, tmp_path / "b")
    assert "pad_token_id" not in read_json_object(tmp_path / "b" / "config.json")
