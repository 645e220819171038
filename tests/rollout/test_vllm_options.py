"""What is checked before a rollout server is started."""

import json
import sys

import pytest
from tiny_models import tiny_model

from mindrlhf.config.rollout import RolloutSection
from mindrlhf.errors import UserError
from mindrlhf.launch.launch import worker_environment
from mindrlhf.rollout.vllm_options import (
    VllmOptions,
    check_head_size,
    check_linear_attention,
    check_python,
    server_environment,
)

MODEL = tiny_model(
    hidden_size=64, intermediate_size=64, vocab_size=100, rms_norm_eps=1e-06, rope_theta=10000.0,
    tie_word_embeddings=True,
)  # fmt: skip


def test_heads_that_the_attention_on_a_cpu_cannot_compute_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with pytest.raises(UserError, match="heads of 16 channels, but vLLM's attention on a CPU is for 32, 64, "):
        check_head_size(str(tmp_path), "cpu")
    check_head_size(str(tmp_path), "ascend")
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_attention_heads": 2}))
    check_head_size(str(tmp_path), "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "heads of 32 and 128 channels .* set rollout.dtype to float32"),
        ({"engine_args": {"speculative_config": {"method": "ngram"}}}, "has speculative_config"),
        ({"engine_args": {"enable_prefix_caching": True}}, "has enable_prefix_caching"),
    ],
)
def test_what_linear_attention_on_a_cpu_cannot_do_is_refused(tmp_path, options, message):
    model = {**MODEL, "architectures": ["Qwen3_5ForCausalLM"], "linear_key_head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(UserError, match=message):
        check_linear_attention(str(tmp_path), "cpu", RolloutSection(**options))
    check_linear_attention(str(tmp_path), "cpu", RolloutSection())
    check_linear_attention(str(tmp_path), "ascend", RolloutSection(**options))
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    check_linear_attention(str(tmp_path), "cpu", RolloutSection(**options))


def environment_of(monkeypatch, device, env=(), **around):
    """The variables of a server's process whose parent has ``around`` and whose `rollout.env` is ``env``."""
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    return server_environment(VllmOptions("python", "model", "", device=device, env=dict(env)), "/private")


def test_a_server_on_ascend_finds_cann_s_packages_and_no_others(monkeypatch, tmp_path):
    """CANN's set_env.sh puts its `python/site-packages`, with `acl`, on PYTHONPATH."""
    cann = tmp_path / "cann-9.1.0"
    (cann / "python").mkdir(parents=True)
    (tmp_path / "latest").symlink_to(cann)
    entries = f"{cann}/python/site-packages:{tmp_path}/trainer:{tmp_path}/latest/opp:{tmp_path}/cann-9.1.0-other:"
    around = {"ASCEND_HOME_PATH": str(tmp_path / "latest"), "PYTHONPATH": entries}
    own = "/private/packages"
    found = environment_of(monkeypatch, "ascend", **around)["PYTHONPATH"]
    assert found == f"{own}:{cann}/python/site-packages:{tmp_path}/latest/opp"
    given = environment_of(monkeypatch, "ascend", {"PYTHONPATH": "/mine"}, **around)["PYTHONPATH"]
    assert given == f"{own}:/mine:{cann}/python/site-packages:{tmp_path}/latest/opp", "joined, or mindrlhf is missing"
    other = {"ASCEND_HOME_PATH": "/other", "PYTHONPATH": "/other/python"}
    assert environment_of(monkeypatch, "ascend", other, **around)["PYTHONPATH"] == f"{own}:/other/python"
    monkeypatch.delenv("ASCEND_HOME_PATH")
    assert environment_of(monkeypatch, "cpu")["PYTHONPATH"] == own


def test_hccl_s_ports_are_chosen_by_the_system_unless_somebody_says_otherwise(monkeypatch):
    """CANN: unset, every process on an NPU listens on port 16666 of it, and on 60000 and on of its host."""
    names = ("HCCL_NPU_SOCKET_PORT_RANGE", "HCCL_HOST_SOCKET_PORT_RANGE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert [environment_of(monkeypatch, "ascend")[name] for name in names] == ["auto", "auto"]
    assert [worker_environment(8, {})[name] for name in names] == ["auto", "auto"]
    assert not set(names) & environment_of(monkeypatch, "cpu").keys()
    chosen = dict.fromkeys(names, "60000-60050")
    assert [worker_environment(8, {})[name] for name in names] == ["auto", "auto"]
    found = environment_of(monkeypatch, "ascend", {names[0]: "61000-61050"}, **chosen)
    assert [found[name] for name in names] == ["61000-61050", "60000-60050"]
    assert [worker_environment(8, {})[name] for name in names] == ["60000-60050", "60000-60050"]


def test_what_a_rank_or_a_shell_sets_for_others_does_not_reach_a_server(monkeypatch):
    around = {"HCCL_DETERMINISTIC": "true", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    assert not around.keys() & environment_of(monkeypatch, "ascend", **around).keys()
    asked = {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64"}
    assert environment_of(monkeypatch, "ascend", asked, **around).items() >= asked.items()


def test_names_of_engine_args_are_those_of_the_vllm_that_is_installed(monkeypatch, tmp_path):
    with pytest.raises(UserError, match=r"which has no vllm: set rollout\.python"):
        check_python(sys.executable)
    with pytest.raises(UserError, match="which has no numpy and no vllm"):
        check_python("/bin/true")
    check_python(sys.executable, "engines/own.py:Engine")
    source = tmp_path / "vllm" / "engine" / "arg_utils.py"
    source.parent.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('nothing is imported')")
    source.write_text("class EngineArgs:\n    enforce_eager: bool = False\n    @property\n    def a(self): ...")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_python(sys.executable, "vllm", {"enforce_eager": True})
    with pytest.raises(UserError, match="has enforce_eagre, .* has not: did you mean enforce_eager?"):
        check_python(sys.executable, "vllm", {"enforce_eagre": True})
