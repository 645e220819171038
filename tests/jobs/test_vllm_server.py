"""A real vLLM server on tiny random Qwen2 models, compared with transformers in the rollout interpreter."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from slow_tests import SLOW

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rollout.pool import ServerPool
from mindrlhf.rollout.servers import Server
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.system.processes import descendants, shared_memory_files
from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("MINDRLHF_ROLLOUT_PYTHON", str(ROOT / ".venv-rollout" / "bin" / "python"))
pytestmark = [
    pytest.mark.timeout(1600),
    pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="no rollout environment"),
]

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 300, 128, 2, 4, 2, 160
HEAD_DIM = HIDDEN // HEADS
STOP_IDS = (7, 8, 9)  # prompts hold larger ids only


def make_tensors(seed: int) -> dict[str, np.ndarray]:
    """Random weights, large enough that the distributions are far from uniform."""
    random = np.random.default_rng(seed)

    def normal(*shape, scale=0.1):
        return random.normal(scale=scale, size=shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN, scale=0.15)}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        for name, rows in (("q", HIDDEN), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, HIDDEN)
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = normal(rows)
        tensors[f"{prefix}self_attn.o_proj.weight"] = normal(HIDDEN, HIDDEN)
        tensors[f"{prefix}mlp.gate_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        tensors[f"{prefix}mlp.up_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = normal(HIDDEN, INTERMEDIATE)
        tensors[f"{prefix}input_layernorm.weight"] = 1 + normal(HIDDEN)
        tensors[f"{prefix}post_attention_layernorm.weight"] = 1 + normal(HIDDEN)
    tensors["model.norm.weight"] = 1 + normal(HIDDEN)
    return tensors


def write_model(directory: Path, tensors: dict[str, np.ndarray] | None) -> str:
    directory.mkdir()
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "intermediate_size": INTERMEDIATE, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def models(directory):
    """Model directories "old" and "new", of one architecture, and "bare", without weights."""
    yield {
        "old": write_model(directory / "old", make_tensors(0)),
        "new": write_model(directory / "new", make_tensors(1)),
        "bare": write_model(directory / "bare", None),
    }
    for process in REFERENCES.values():
        process.communicate()
    REFERENCES.clear()


def start(model_dir: str, log_path: Path, **changes) -> Server:
    options = VllmOptions(PYTHON, model_dir, str(log_path), max_model_len=160, max_num_seqs=32, kv_cache_gib=0.1)
    return Server.start(dataclasses.replace(options, **changes))


@pytest.fixture(scope="module")
def fresh(models, directory):
    """A server that read the new weights from their directory."""
    with start(models["new"], directory / "fresh.log", load_format="auto") as generator:
        yield generator


@pytest.fixture(scope="module")
def pushed(models, directory):
    """A server without weights of its own, and its buffer."""
    infos = [TensorInfo(name, "float32", tensor.shape) for name, tensor in make_tensors(0).items()]
    with WeightBuffer.create(infos) as buffer:
        with start(models["bare"], directory / "pushed.log", load_format="dummy") as generator:
            generator.node.servers.buffer_path = buffer.path
            yield generator, buffer


def push(generator, buffer, seed: int, version: int) -> None:
    buffer.begin(version)
    for name, tensor in make_tensors(seed).items():
        buffer.write(name, tensor)
    buffer.commit()
    generator.update_weights(version)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(10, VOCAB, length).tolist())


# Prompts within one cache block, on its edge, and over several.
REQUESTS = [GenerationRequest(10 + i, prompt(length, i), 4, seed=i) for i, length in enumerate((1, 5, 32, 33, 100))]
SAMPLING = SamplingParams(max_tokens=40, stop_token_ids=STOP_IDS)

REFERENCE = """
import json, sys
import numpy as np, torch, transformers
model = transformers.Qwen2ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
for line in sys.stdin:
    temperature, prompt, response = json.loads(line)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    print(json.dumps(logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()), flush=True)
"""
# By model directory, transformers at work, until their input ends.
REFERENCES: dict[str, subprocess.Popen] = {}


def reference_logprobs(model_dir: str, temperature: float, pairs: list) -> list[np.ndarray]:
    """transformers' log-probabilities of each response, given its prompt."""
    if model_dir not in REFERENCES:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        REFERENCES[model_dir] = subprocess.Popen([PYTHON, "-c", REFERENCE, model_dir], env=environment, **pipes)
    process, found = REFERENCES[model_dir], []
    for pair in pairs:
        process.stdin.write(json.dumps([temperature, *pair]) + "\n")
        process.stdin.flush()
        found.append(np.array(json.loads(process.stdout.readline())))
    return found


def begin_many(generator):
    """Samples that have begun to arrive, and are far more than can be on their way."""
    stream = generator.generate([GenerationRequest(0, prompt(6, 42), 4000, seed=5)], SamplingParams(max_tokens=90))
    next(stream)
    return stream


def collect(generator, requests=REQUESTS, sampling=SAMPLING) -> dict:
    completions = {(c.request_id, c.sample_index): c for c in generator.generate(requests, sampling)}
    assert set(completions) == {(r.request_id, i) for r in requests for i in range(r.num_samples)}
    return completions


def assert_same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for key, completion in left.items():
        np.testing.assert_array_equal(completion.token_ids, right[key].token_ids)
        np.testing.assert_allclose(completion.logprobs, right[key].logprobs, atol=2e-5)


def gaps_to_transformers(completions: dict, model_dir: str, requests=REQUESTS, temperature=1.0) -> np.ndarray:
    """How far the log-probability of each token is from that of transformers."""
    prompts = {request.request_id: list(request.prompt_ids) for request in requests}
    pairs = [[prompts[key[0]], completion.token_ids.tolist()] for key, completion in completions.items()]
    expected = np.concatenate(reference_logprobs(model_dir, temperature, pairs))
    return np.abs(np.concatenate([completion.logprobs for completion in completions.values()]) - expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(fresh, models, temperature):
    sampling = dataclasses.replace(SAMPLING, temperature=temperature)
    completions = collect(fresh, sampling=sampling)
    assert gaps_to_transformers(completions, models["new"], temperature=temperature).max() < 1e-4
    reasons = {completion.finish_reason for completion in completions.values()}
    assert reasons == {"stop", "length"}, "the test should meet both ends"
    for completion in completions.values():
        stopped = completion.token_ids[-1] in STOP_IDS
        assert not set(STOP_IDS) & set(completion.token_ids[:-1].tolist())
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.token_ids) == 40
        assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)


def test_frequencies_match_the_softmax_of_transformers(fresh, models):
    start_ids = prompt(6, 42)
    request = GenerationRequest(0, start_ids, 4000, seed=5)
    tokens = [int(c.token_ids[0]) for c in fresh.generate([request], SamplingParams(max_tokens=1))]
    # Every token once, as a response of length one, gives the whole distribution.
    logprobs = reference_logprobs(models["new"], 1.0, [[list(start_ids), [i]] for i in range(VOCAB)])
    probs = np.exp(np.concatenate(logprobs))
    assert abs(probs.sum() - 1) < 1e-4
    counts, expected = np.bincount(tokens, minlength=VOCAB), probs * len(tokens)
    common = expected >= 5
    assert common.sum() > 10
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    chi_square, degrees = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert chi_square < degrees + 4.5 * np.sqrt(2 * degrees)


def test_seeds_repeat(fresh):
    first = collect(fresh)
    assert_same(first, collect(fresh))
    others = collect(fresh, [dataclasses.replace(request, seed=request.seed + 100) for request in REQUESTS])
    same = sum(np.array_equal(others[key].token_ids, completion.token_ids) for key, completion in first.items())
    assert same <= len(first) // 4, "other seeds should give other samples"
    samples = [first[REQUESTS[-1].request_id, i].token_ids.tolist() for i in range(4)]
    assert len(set(map(tuple, samples))) == 4


def test_a_sample_does_not_depend_on_its_batch(fresh):
    together = collect(fresh)
    alone = collect(fresh, REQUESTS[2:3])
    # Kernels may round differently for another number of rows, which rarely moves a token over a boundary.
    same = [np.array_equal(alone[key].token_ids, together[key].token_ids) for key in alone]
    assert sum(same) >= len(same) - 1


def test_greedy_top_k_and_top_p(fresh):
    request = [GenerationRequest(0, prompt(20, 3), 8, seed=1)]
    greedy = collect(fresh, request, SamplingParams(max_tokens=10, temperature=0.0))
    top_1 = collect(fresh, request, SamplingParams(max_tokens=10, top_k=1))
    tiny_p = collect(fresh, request, SamplingParams(max_tokens=10, top_p=1e-6))
    for i in range(8):
        np.testing.assert_array_equal(top_1[0, i].token_ids, greedy[0, 0].token_ids)
        np.testing.assert_array_equal(tiny_p[0, i].token_ids, greedy[0, 0].token_ids)
        np.testing.assert_allclose(top_1[0, i].logprobs, 0, atol=1e-6)  # of the policy that was sampled
        assert greedy[0, i].logprobs.max() < 0


def test_more_samples_than_sequence_slots_and_cache(fresh):
    requests = [GenerationRequest(i, prompt(60, i), 25, seed=i) for i in range(8)]
    completions = collect(fresh, requests, SamplingParams(max_tokens=90))
    assert all(len(completion.token_ids) == 90 for completion in completions.values())


def test_updated_weights_equal_a_fresh_engine(fresh, pushed):
    generator, buffer = pushed
    push(generator, buffer, seed=0, version=1)
    old = collect(generator)
    assert {completion.weights_version for completion in old.values()} == {1}
    push(generator, buffer, seed=1, version=2)
    new = collect(generator)  # the same prompts: stale cached prefixes would show
    assert {completion.weights_version for completion in new.values()} == {2}
    assert_same(new, collect(fresh))
    assert any(not np.array_equal(new[key].token_ids, old[key].token_ids) for key in new)


@SLOW
def test_a_generator_in_bfloat16_has_the_weights_that_were_pushed_last(models, directory):
    infos = [TensorInfo(name, "bfloat16", tensor.shape) for name, tensor in make_tensors(0).items()]
    with WeightBuffer.create(infos) as buffer:
        with start(models["bare"], directory / "bfloat16.log", dtype="bfloat16") as generator:
            generator.node.servers.buffer_path = buffer.path
            push(generator, buffer, seed=0, version=1)
            earlier = collect(generator)
            push(generator, buffer, seed=1, version=2)
            completions = collect(generator)
            assert_same(collect(generator), completions)
    # 8 bits of precision in weights, activations and logits; other weights are far off.
    assert 1e-4 < gaps_to_transformers(completions, models["new"]).mean() < 0.05
    assert gaps_to_transformers(earlier, models["new"]).mean() > 1


@SLOW
def test_two_tensor_parallel_ranks_give_the_tokens_of_one(fresh, models, directory):
    # Greedy: the server's own sampler, whose tokens depend on nothing but seeds, works in one process only.
    greedy = SamplingParams(max_tokens=20, temperature=0.0)
    infos = [TensorInfo(name, "float32", tensor.shape) for name, tensor in make_tensors(0).items()]
    with WeightBuffer.create(infos) as buffer:
        with start(models["bare"], directory / "two_ranks.log", tensor_parallel_size=2) as generator:
            generator.node.servers.buffer_path = buffer.path
            push(generator, buffer, seed=0, version=1)
            push(generator, buffer, seed=1, version=2)
            assert_same(collect(generator, sampling=greedy), collect(fresh, sampling=greedy))
            # More tokens than vLLM reads in one step.
            many = [GenerationRequest(i, prompt(100, i), 1, seed=i) for i in range(30)]
            assert gaps_to_transformers(collect(generator, many), models["new"], many).max() < 1e-4
            server = generator._pids[0]
            workers = [process.pid for process in descendants(server)]
            segments = {path for worker in workers for path in shared_memory_files(worker)}
            assert segments, "its ranks talk through shared memory"
            assert len(workers) >= 2, "vLLM runs each rank in a process of its own"
            stream = begin_many(generator)
            os.kill(server, signal.SIGKILL)
            with pytest.raises(RunFailure, match=r"was killed by signal 9 \(SIGKILL\)"):
                list(stream)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(_is_alive(pid) for pid in workers):
        time.sleep(0.2)
    assert not [pid for pid in workers if _is_alive(pid)]
    assert not [path for path in segments if Path(path).exists()]


def test_a_wrong_version_is_an_error_and_the_server_goes_on(pushed):
    generator, buffer = pushed
    push(generator, buffer, seed=1, version=7)
    with pytest.raises(RunFailure, match="weights version 8 was asked for; the buffer .* holds version 7"):
        generator.update_weights(8)
    generator.stats()
    collect(generator)


def test_a_buffer_without_all_tensors_is_an_error(pushed):
    generator, buffer = pushed
    tensors = make_tensors(1)
    del tensors["model.norm.weight"]
    with WeightBuffer.create([TensorInfo(name, "float32", t.shape) for name, t in tensors.items()]) as partial:
        partial.begin(3)
        for name, tensor in tensors.items():
            partial.write(name, tensor)
        partial.commit()
        generator.node.servers.buffer_path = partial.path
        with pytest.raises(RunFailure, match="lacks tensors for model.norm.weight"):
            generator.update_weights(3)
    generator.node.servers.buffer_path = buffer.path
    push(generator, buffer, seed=1, version=9)


def test_leaving_a_generation_early_leaves_the_server_usable(fresh):
    expected = collect(fresh)
    stream = fresh.generate(REQUESTS, dataclasses.replace(SAMPLING, stop_token_ids=()))
    next(stream)
    stream.close()
    assert_same(collect(fresh), expected)


@pytest.mark.parametrize("length", [0, 121])
def test_a_prompt_that_does_not_fit_is_the_users_error(fresh, length):
    with pytest.raises(UserError, match=f"request 3 has {length} tokens; max_model_len 160 less max_tokens 40"):
        fresh.generate([GenerationRequest(3, (11,) * length, 1, seed=0)], SAMPLING)


@SLOW
def test_a_pool_gives_the_samples_of_its_generators(fresh, pushed):
    generator, buffer = pushed
    push(generator, buffer, seed=1, version=11)
    assert_same(collect(ServerPool([fresh, generator], num_restarts=0)), collect(fresh))


@SLOW
def test_a_killed_server_is_noticed_named_and_replaced(pushed):
    generator, buffer = pushed
    push(generator, buffer, seed=1, version=12)
    expected = collect(generator)
    stream = begin_many(generator)
    os.kill(generator._pids[0], signal.SIGKILL)
    with pytest.raises(RunFailure, match=r"was killed by signal 9 \(SIGKILL\); log .*pushed.log ends"):
        list(stream)
    generator.restart()
    assert_same(collect(generator), expected)


TRAINER = """
import sys, time
from mindrlhf.rollout.servers import Server
from mindrlhf.rollout.vllm_options import VllmOptions
generator = Server.start(VllmOptions(*sys.argv[1:4], load_format="auto", kv_cache_gib=0.1, max_model_len=160))
if sys.argv[4] == "ready":
    generator.wait_ready()
print(generator._pids[0], generator.node.servers._running[0].process.private_dir, flush=True)
time.sleep(300)
"""


@SLOW
@pytest.mark.parametrize("moment", ["ready", "starting"])
def test_a_killed_trainer_leaves_no_server_behind(models, directory, moment):
    arguments = [PYTHON, models["new"], str(directory / "orphan.log"), moment]
    with subprocess.Popen([sys.executable, "-c", TRAINER, *arguments], stdout=subprocess.PIPE, text=True) as trainer:
        server_pid, private_dir = trainer.stdout.readline().split()
        if moment == "starting":
            time.sleep(3)  # the interpreter is up then, and vLLM loading
        trainer.kill()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (_is_alive(int(server_pid)) or Path(private_dir).exists()):
        time.sleep(0.1)
    assert not _is_alive(int(server_pid))
    assert not Path(private_dir).exists()


def _is_alive(pid: int) -> bool:
    """Running, and not merely waiting for its parent to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
