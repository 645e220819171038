"""A rollout engine of one's own: the example's samples against a plain pass in float64, and what is refused."""

import json
from pathlib import Path

import pytest
from rollout_probes import ask_probe
from tiny_models import tiny_model

from mindrlhf.config.load import load_grpo_config
from mindrlhf.errors import UserError
from mindrlhf.sandbox.user_files import find_engine

ROOT = Path(__file__).parents[2]
PATH = f"{ROOT}/examples/engine/transformers_engine.py:TransformersEngine"


def test_samples_are_of_the_distribution_that_a_plain_pass_has(rollout_python, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny_model(initializer_range=0.3)))
    found = ask_probe("engine_probe.py", rollout_python, tmp_path, {"path": PATH}, load_format="auto", max_num_seqs=4)
    assert found.pop("again")
    for own in found.values():
        assert len(own) == 6
        for _, tokens, logprobs, expected, allowed, reason in own:
            assert logprobs == pytest.approx(expected, abs=2e-5)
            assert all(allowed)
            assert (reason == "stop") == (tokens[-1] == 7) and (reason == "stop" or len(tokens) == 12)
    # Limits take tokens away, and are no constant.
    assert [own[1] for own in found["plain"]] != [own[1] for own in found["few"]]
    assert len({tuple(own[1]) for own in found["plain"]}) == 6


@pytest.mark.parametrize(
    "engine, said",
    [
        ("sglang", "'rollout.engine' is sglang: write vllm, or path/to/file.py:Class"),
        ("none.py:Engine", "'rollout.engine': none.py cannot be read: No such file or directory"),
        (f"{PATH}s", "has no class 'TransformersEngines'; it has Sequence, TransformersEngine"),
        (f"{ROOT}/setup.py:Engine", "setup.py has no class 'Engine'; it has none"),
        ("README.md:Engine", "write vllm, or path/to/file.py:Class"),
    ],
)
def test_what_is_no_engine_is_refused(engine, said):
    with pytest.raises(UserError) as caught:
        find_engine(engine)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_python_is_refused(tmp_path):
    (tmp_path / "engine.py").write_text("class Engine(:\n")
    with pytest.raises(UserError, match="engine.py is not Python"):
        find_engine(f"{tmp_path / 'engine.py'}:Engine")


@pytest.mark.parametrize("key", ["profiler.tools=vllm", "training.replay_routing=true"])
def test_what_only_vllm_has_is_refused_beside_another(key):
    name = key.partition("=")[0]
    with pytest.raises(UserError, match=f"'rollout.engine' is {PATH}, but '{name}' is vLLM's: remove one of them"):
        load_grpo_config(ROOT / "examples/sanity/config.yaml", [f"rollout.engine={PATH}", key], world_size=1)
