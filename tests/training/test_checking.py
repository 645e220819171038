"""Config check finds what train, sft and dpo find before a device: every kind of damage, key by key."""

import dataclasses
import functools
import json
import re
import sys
import typing
from pathlib import Path

import pytest
import yaml
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.cli import build_parser, main
from mindrlhf.config.load import CONFIG_LOADERS, CONFIGS
from mindrlhf.config.parse import dotted_keys, write_config
from mindrlhf.data.packing import choose_row_length
from mindrlhf.errors import STOPPED, UserError
from mindrlhf.rollout import vllm_options
from mindrlhf.training.preflight import check_grpo_inputs, check_offline_inputs, group_row
from mindrlhf.training.preflight.facts import host_memory
from mindrlhf.training.preflight.run import check_run
from mindrlhf.weights.open import open_tensors

RANK_CHECKS = {"train": check_grpo_inputs, "sft": check_offline_inputs, "dpo": check_offline_inputs}


# Half the time went into building the parser, which is the same for every command line.
one_parser = functools.cache(build_parser)


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Run a command with a config, without ranks, and return its exit code and what it found, line by line."""
    monkeypatch.setattr("mindrlhf.launch.launch.launch", lambda *_, **__: 0)
    monkeypatch.setattr("mindrlhf.cli.build_parser", one_parser)

    def _run(command: list[str], content: dict, *options: str) -> tuple[int, set[str]]:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        code = main([*command, str(path), *options])
        errors = capsys.readouterr().err.splitlines()
        head = re.compile(r"^mindrlhf [\w-]+: (error|warning: it would not start on this machine): ")
        return code, {head.sub("", line) for line in errors}

    return _run


def damages(hint, metadata) -> list:
    """Values that are wrong for a key, or right and far from usual."""
    kind = next((one for one in typing.get_args(hint) if one is not type(None)), hint)
    kind = kind if kind in (int, float, bool, str) else str
    if metadata["choices"]:
        return [metadata["choices"][-1], "nonsense"]
    if kind is bool:
        return [True, "perhaps"]
    if kind is str:
        return ["no/such/thing", {"a": [1]}]
    return [-1, 0, 7, 10**6, "many"]


@pytest.mark.timeout(3600)  # all of the keys, nightly
@pytest.mark.parametrize("task", RANK_CHECKS)
def test_what_a_run_finds_before_a_device_config_check_finds_too(task, contents, run, tmp_path):
    num_found = 0
    cases = [
        (dotted, value)
        for dotted, field, hint in dotted_keys(CONFIGS[task])
        for value in damages(hint, field.metadata)
        if dotted not in ("run.output_dir", "checkpoint.save_dir")
    ]
    cases = cases if RUNS_SLOW_TESTS else cases[::12]
    for dotted, value in cases:
        section, _, key = dotted.partition(".")
        content = {**contents[task], section: {**contents[task].get(section, {}), key: value}}
        code, found = run([task], content)
        check_code, check_found = run(["config", "check"], content, "--kind", task)
        assert found <= check_found, f"{dotted}: {value}"
        assert (code == 2) == bool(found) and all(map(is_a_line, found)), f"{dotted}: {value}: {found}"
        assert (check_code == 2) <= (code == 2)
        # What the ranks find by themselves, and the server's start, is in what the launcher found.
        try:
            config = CONFIG_LOADERS[task](tmp_path / "config.yaml")
            inputs = RANK_CHECKS[task](config)
            if task == "train":
                options = {"python": config.rollout.python, "max_model_len": inputs.row_lengths[-1]}
                server = vllm_options.VllmOptions(model_dir=config.model.path, log_path="", **options)
                vllm_options.check_options(server)
        except UserError as error:
            assert code == 2, f"{dotted}: {value}: only the ranks found: {error}"
        num_found += bool(found)
    assert len(cases) > num_found > len(cases) / 3


def is_a_line(message: str) -> bool:
    return bool(message) and "Traceback" not in message and "Error:" not in message


def test_every_mistake_is_told_at_once(contents, run):
    content = contents["train"]
    content["training"] |= {"chunk_size": "two", "batchsize": 4}
    content["model"] = {"path": "nowhere"}
    content["algorithm"] = {"num_generations": 1, "kl_estimator": "k2"}
    content["rollout"]["python"] = "no-python"
    code, found = run(["train"], content, "--workers", "600")
    assert code == 2
    words = ("'training.chunk_size'", "'training.batchsize'", "'nowhere'", "num_generations' is 1", "kl_estimator'")
    for word in (*words, "'no-python'", "--workers is 600"):
        assert sum(word in line for line in found) == 1, word
    assert len(found) == 7


def test_a_stand_in_value_is_blamed_for_nothing(contents, run):
    """Without model.path there is no model to check; nothing is said about the one called ''."""
    del contents["train"]["model"]
    assert run(["train"], contents["train"])[1] == {
        "key 'model.path' is required: Hugging Face directory of the actor (config.json and safetensors)"
    }


@pytest.mark.parametrize("task", RANK_CHECKS)
def test_the_config_that_a_run_wrote_is_a_config(task, contents, run, tmp_path):
    run([task], contents[task])
    config = CONFIG_LOADERS[task](tmp_path / "config.yaml")
    write_config(config, tmp_path)
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert run(["config", "check"], written) == (0, set())
    assert run([task], written) == (STOPPED, set())  # nothing was started
    assert CONFIG_LOADERS[task](tmp_path / "config.yaml") == config


def test_a_config_of_another_task_is_recognised(contents, run, tmp_path):
    path = tmp_path / "config.yaml"
    code, found = run(["train"], contents["dpo"])
    assert code == 2 and len(found) == 1 and f"use `mindrlhf dpo {path}`" in found.pop()
    assert run(["config", "check"], contents["dpo"]) == (0, set())
    assert "use `mindrlhf train " in run(["sft"], contents["train"])[1].pop()


def test_an_npu_that_is_not_there_is_an_obstacle_and_no_mistake(contents, run, monkeypatch):
    monkeypatch.setattr("mindrlhf.launch.machine._npu_paths", list)
    contents["sft"]["run"]["device"] = "ascend"
    code, found = run(["sft"], contents["sft"])
    assert code == 2 and [line for line in found if "this machine has no NPU" in line] == list(found)
    assert run(["config", "check"], contents["sft"]) == (0, found)


@pytest.mark.parametrize(("num_ranks", "num_errors"), [(1, 0), (4, 0), (5, 1), (600, 1)])
def test_more_ranks_than_cores_are_questioned(contents, run, monkeypatch, num_ranks, num_errors):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    contents["sft"]["training"] = {"rows_per_step": num_ranks, "micro_batch_size": 1}
    options = ("--workers", str(num_ranks))
    code, found = run(["sft"], contents["sft"], *options)
    assert (code, len(found)) == (2 if num_errors else STOPPED, num_errors)  # nothing was started
    assert run(["sft"], contents["sft"], *options, "--oversubscribe") == (STOPPED, set())


def test_what_nodes_for_rollout_only_cannot_do_is_told(contents, run):
    contents["train"].setdefault("rollout", {}).update(off_policy_steps=1, segment_tokens=8)
    contents["train"]["tools"] = {"names": ["python"]}
    contents["train"]["lora"] = {"rank": 4}
    assert not [line for line in run(["config", "check"], contents["train"], "--elastic")[1] if "elastic" in line]
    contents["train"]["rollout"].update(off_policy_steps=0, weight_buffer_gib=1)
    code, found = run(["config", "check"], contents["train"], "--elastic")
    (line,) = [line for line in found if "--elastic" in line]
    assert "'rollout.weight_buffer_gib' = 1.0 does not go with --elastic:" in line and line.endswith("set it to 0")
    code, found = run(["train"], contents["train"], "--elastic", "--master", "127.0.0.1:8118")
    assert code == 2 and line in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 3}, "'rollout.tensor_parallel' is 3, more than the 2 devices of a node but no number of"),
        ({"tensor_parallel": 4, "num_replicas": 2}, "takes 4 nodes of 2 devices, and the run has 2: set num_replicas"),
        ({"num_replicas": 3}, "'rollout.num_replicas' is 3, which does not divide over 2 nodes: set it to 2"),
        ({"tensor_parallel": 4}, None),
        ({"tensor_parallel": 2, "num_replicas": 4}, None),
    ],
)
def test_servers_that_cannot_be_laid_over_the_nodes_are_told(contents, run, changes, message):
    contents["train"]["rollout"] |= changes
    nodes = ("--nodes", "2")
    code, found = run(["config", "check"], contents["train"], "--workers", "2", *nodes)
    lines = {line for line in found if "rollout." in line}
    assert len(lines) == (message is not None) and all(message in line for line in lines)
    if message is not None:
        assert code == 2
        place = (*nodes, "--node-rank", "0", "--master", "127.0.0.1:8118")
        code, found = run(["train"], contents["train"], "--workers", "2", "--oversubscribe", *place)
        assert code == 2 and lines <= found


def test_what_servers_over_nodes_cannot_do_is_told(contents, run):
    contents["train"]["rollout"]["tensor_parallel"] = 4
    contents["train"]["profiler"] = {"steps": [1], "tools": ["vllm"]}
    sizes = ("--workers", "2", "--nodes", "2")
    found = run(["config", "check"], contents["train"], *sizes, "--elastic")[1]
    assert any("'profiler.tools' has vllm, but servers of rollout.tensor_parallel 4 lie over" in line for line in found)
    assert any("servers that lie over several nodes does not go with --elastic" in line for line in found)
    found = run(["config", "check"], contents["train"], "--workers", "4", "--elastic")[1]
    assert not any("profiler" in line or "--elastic" in line for line in found), "on one machine it all works"


def test_a_sandbox_that_is_too_weak_is_told_by_config_check(contents, run, monkeypatch):
    monkeypatch.setattr("mindrlhf.sandbox.server.active_layers", lambda: frozenset({"user"}))
    contents["train"]["reward"]["verifier_function"] = "code_execution"
    code, found = run(["config", "check"], contents["train"])
    assert code == 0 and len(found) == 1 and "sandbox.allow_weak" in found.pop()


def test_other_nodes_than_the_first_judge_the_same_config(contents, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(contents["sft"]))
    first, second = (check_run("sft", path, num_ranks=2, num_nodes=2, node=node) for node in (0, 1))
    assert first == dataclasses.replace(second, mistakes=first.mistakes, obstacles=first.obstacles)
    assert second.mistakes.messages == second.obstacles.messages == []


@pytest.mark.parametrize(
    ("packing", "num_generations", "max_response_length", "given", "expected"),
    [
        ("shared_prompts", 8, 16, (), (176,)),  # a prompt of 45 tokens and 8 responses of 16: one graph
        ("shared_prompts", 8, 122, (), (1024,)),
        ("shared_prompts", 8, 123, (), (288, 336)),  # longer than both 1,024 tokens and a pair
        ("shared_prompts", 2, 1000, (), (2048,)),
        ("shared_prompts", 8, 16, (64, 96), (64, 96)),
        ("shared_prompts", 1, 16, (), (112, 128)),
        ("best_fit", 8, 16, (), (112, 128)),
        ("first_fit", 8, 16, (), (64,)),
    ],
)
def test_a_row_holds_a_whole_group_where_prompts_are_shared(
    config, packing, num_generations, max_response_length, given, expected
):
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, packing=packing, sequence_lengths=given),
        algorithm=dataclasses.replace(config.algorithm, num_generations=num_generations),
        rollout=dataclasses.replace(config.rollout, max_response_length=max_response_length),
    )
    longest = 45 + max_response_length
    lengths = given or group_row(config, longest)
    is_fitted = packing != "first_fit"
    assert choose_row_length(lengths, longest, "a sample", "cpu", is_fitted=is_fitted) == expected


def test_a_server_takes_the_longest_sample_not_the_longest_row(config):
    shared = dataclasses.replace(config, training=dataclasses.replace(config.training, packing="shared_prompts"))
    inputs = check_grpo_inputs(shared)
    longest = inputs.prompts.header.longest_prompt + shared.rollout.max_response_length
    assert inputs.row_lengths[-1] >= longest + 7 * shared.rollout.max_response_length
    assert longest <= inputs.max_model_len < longest + 16
    assert check_grpo_inputs(config).max_model_len == check_grpo_inputs(config).row_lengths[-1]


def test_memory_is_estimated_by_the_sizes_of_the_model(config):
    """Against sums by hand: all weights and an adapter of a model whose parameters are counted from its tensors."""
    tensors = open_tensors(config.model.path)
    num_parameters = sum(tensors.info(name).num_elements for name in tensors.names())
    whole = host_memory(config, 64, 64, 2)
    adapted = dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=4))
    low_rank = host_memory(adapted, 64, 64, 2)
    assert whole.shared == 4 * num_parameters
    num_adapted = num_parameters - (whole.trainer - low_rank.trainer) / 12
    assert 0 < num_adapted < num_parameters and num_adapted == int(num_adapted)
    assert whole.total == 2 * whole.trainer + whole.server + whole.shared
    rows = host_memory(config, 128, 64, 2).trainer - whole.trainer
    # One layer, 16 channels, 2 heads: 14 * 16 + 3 * 32 + 2 * heads * length numbers a token, of 4 sequences.
    heads = json.loads((Path(config.model.path) / "config.json").read_text())["num_attention_heads"]
    assert rows == 4 * 4 * (128 * (320 + 2 * heads * 128) - 64 * (320 + 2 * heads * 64))
    assert re.fullmatch(r"about \d+\.\d GiB of memory: a trainer .*, a server .*, shared weights .*", str(whole))


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("import no_such_package\ndef f(completion, answer): return 1.0", 2, "does not load: ModuleNotFoundError"),
        ("def f(prompts, completions, **kw): return [1.0]", 2, "cannot be called as"),  # as TRL calls it
        ("def f(completion): return 1.0", 2, "too many positional arguments"),
        ("def f(completions, answer, **kw): return [1.0]", 2, "cannot be called as"),
        ("def f(completion, answer): return 'good'", 2, "returned 'good', which is no finite number"),
        ("def f(completion, answer): return float('nan')", 2, "returned nan, which is no finite number"),
        ("def f(completion, answer): return scroe(completion)", 2, "raises NameError: name 'scroe' is not defined"),
        ("def f(completion, answer):\n    import no_such_package", 2, "raises ModuleNotFoundError: No module named"),
        ("def f(completion, answer): raise ConnectionError('refused')", 0, "refused (such samples are left out"),
        ("import os\ndef f(completion, answer): os._exit(3)", 0, "f: worker died: exit code 3"),
        ("def f(completion, answer): return completion.split('<answer>')[1]", 0, "worth reward.failure_value, 0"),
        ("def f(completion, answer): return completion == answer", 0, ""),
        ("def f(completion, answer, *, turn_texts): return [0.5 for _ in turn_texts]", 0, ""),
    ],
)
def test_reward_functions_are_called_once(contents, tmp_path, capsys, source, code, words):
    (tmp_path / "reward.py").write_text(source)
    contents["train"]["reward"] = {"verifier_function": f"{tmp_path / 'reward.py'}:f"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(contents["train"]))
    assert main(["config", "check", str(tmp_path / "config.yaml")]) == code
    said = capsys.readouterr()
    line = said.err if code else next((line for line in said.out.splitlines() if line.startswith("called with")), "")
    assert words in line and bool(line) == bool(words)


@pytest.mark.parametrize(("source", "code"), [("", 0), ("import no_such_package\n", 2)])
def test_an_agent_is_loaded_in_its_interpreter(contents, tmp_path, capsys, monkeypatch, source, code):
    monkeypatch.setattr("mindrlhf.training.preflight.conversation_template", lambda *_: None)  # the tokenizer has none
    (tmp_path / "agent.py").write_text(source + "def solve(record, base_url, api_key): return 1.0\n")
    contents["train"] |= {"reward": {"verifier_function": "environment_reward"}}
    contents["train"]["tools"] = {"agent": f"{tmp_path / 'agent.py'}:solve", "agent_python": sys.executable}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(contents["train"]))
    assert main(["config", "check", str(tmp_path / "config.yaml")]) == code
    assert (
        not code or "does not load: ModuleNotFoundError: No module named 'no_such_package'" in capsys.readouterr().err
    )


def test_a_reward_function_that_waits_keeps_no_run_waiting(contents, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mindrlhf.training.preflight.rewards._CALL_LIMIT_S", 0.5)
    (tmp_path / "reward.py").write_text("import time\ndef f(completion, answer): time.sleep(1000)")
    contents["train"]["reward"] = {"verifier_function": f"{tmp_path / 'reward.py'}:f", "timeout_s": 900}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(contents["train"]))
    assert main(["config", "check", str(tmp_path / "config.yaml")]) == 0
    assert "as response, f: timeout" in capsys.readouterr().out
