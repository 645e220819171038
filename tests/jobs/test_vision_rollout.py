"""A real vLLM server on tiny random Qwen2.5-VL models, compared with transformers in the rollout interpreter."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from slow_tests import SLOW
from tiny_vl import IMAGE, TURN_END, VISION_END, VISION_START, TinyVl, weights_of, write_tiny_vl

from mindrlhf.rollout.pool import ServerPool
from mindrlhf.rollout.servers import Server
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer

pytestmark = pytest.mark.timeout(480)
ROOT = Path(__file__).resolve().parents[2]
SAMPLING = SamplingParams(max_tokens=12, stop_token_ids=(TURN_END,))
OLD, NEW = TinyVl(seed=0), TinyVl(seed=1)
FAMILIES = [TinyVl(family="qwen2_vl", seed=2), TinyVl(family="qwen3_vl", vision_depth=3, layers=3, seed=3)]
TOLERANCE = 1e-5


def picture(height, width, seed):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def request(number, sizes, num_samples=3):
    images = tuple(picture(height, width, number) for height, width in sizes)
    ids = []
    for height, width in sizes:
        ids += [VISION_START, *[IMAGE] * (height * width // 784), VISION_END]
    ids += np.random.default_rng(number).integers(0, 200, 10).tolist()
    return GenerationRequest(number, tuple(ids), num_samples, seed=number, images=images)


# One image, another of more than one window with partial ones, two in a prompt, text alone; the first image again.
REQUESTS = [
    request(0, [(56, 84)]),
    request(1, [(140, 168)]),
    request(2, [(56, 56), (84, 112)]),
    request(3, []),
    request(0, [(56, 84)], 2),
]
REQUESTS[-1] = GenerationRequest(4, REQUESTS[0].prompt_ids + (65, 66), 2, seed=4, images=REQUESTS[0].images)

REFERENCE = """
import json, sys
import numpy as np, torch
from transformers import AutoModelForImageTextToText
from mindrlhf.images.patches import patch_rows
from mindrlhf.specs import find_spec
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], dtype=torch.float32)
arrays = np.load(sys.argv[2])
config = json.load(open(sys.argv[1] + "/config.json"))
geometry = find_spec(config).dims(config).vision.geometry
for number, (prompt, response, names) in enumerate(json.load(sys.stdin)):
    ids = torch.tensor([prompt + response])
    images = [arrays[name] for name in names]
    seen = {}
    if images:
        rows = [patch_rows(pixels, geometry) for pixels in images]
        grids = [(1, pixels.shape[0] // 14, pixels.shape[1] // 14) for pixels in images]
        seen = dict(pixel_values=torch.from_numpy(np.concatenate(rows)), image_grid_thw=torch.tensor(grids))
        seen["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, **seen).logits[0]
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    print(json.dumps(logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()))
"""

ENGINE = """
import json, os, sys
import numpy as np
from mindrlhf.rollout.sent_images import with_digests
from mindrlhf.rollout.server import cpu_engine as engines
config, requests = json.load(sys.stdin)
arrays = np.load(sys.argv[2])
engine = getattr(engines, sys.argv[1])(config)
arrays = dict(arrays)
images = with_digests([[arrays[name] for name in names] for _, names, _, _ in requests])
for version, buffer in enumerate(sys.argv[3:]):
    if buffer:
        engine.update_weights(version, buffer)
    prompts, _, nums, seeds = zip(*requests)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [258]}
    engine.submit(prompts, nums, seeds, [12] * len(requests), sampling, images)
    while engine.num_pending:
        for sample in engine.step():
            values = [sample.request_id, sample.token_ids.tolist(), sample.logprobs.tolist()]
            print("sample", json.dumps([version, *values]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(scope="module")
def models(directory):
    return {model: write_tiny_vl(directory / f"model{model.seed}", model) for model in (OLD, NEW)}


@pytest.fixture(scope="module")
def images_file(directory):
    path = directory / "images.npz"
    np.savez(path, **{f"{r.request_id}_{n}": pixels for r in REQUESTS for n, pixels in enumerate(r.images)})
    return path


def environment():
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ours |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return os.environ | ours


def check(python, model_dir, images_file, samples):
    """Compare log-probabilities with transformers; ``samples`` are (request, token ids, log-probabilities)."""
    # A random model may write an image token itself, which transformers takes for an image that is missing.
    ends = [next((n for n, token in enumerate(ids) if token == IMAGE), len(ids)) for _, ids, _ in samples]
    samples = [(r, ids[:end], logprobs[:end]) for (r, ids, logprobs), end in zip(samples, ends) if end]
    cases = [
        [list(r.prompt_ids), list(map(int, ids)), [f"{r.request_id}_{n}" for n in range(len(r.images))]]
        for r, ids, _ in samples
    ]
    ended = subprocess.run(
        [python, "-c", REFERENCE, str(model_dir), str(images_file)],
        input=json.dumps(cases), capture_output=True, text=True, timeout=300, env=environment(),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    wanted = [np.array(json.loads(line)) for line in ended.stdout.splitlines()]
    for (_, _, logprobs), want in zip(samples, wanted, strict=True):
        np.testing.assert_allclose(logprobs, want, rtol=0, atol=TOLERANCE)
    assert np.concatenate(wanted).std() > 0.5, "a flat distribution would agree with anything"


def generate(generator, requests=REQUESTS):
    by_id = {r.request_id: r for r in requests}
    completions = sorted(generator.generate(requests, SAMPLING), key=lambda c: (c.request_id, c.sample_index))
    assert [(c.request_id, c.sample_index) for c in completions] == [
        (r.request_id, i) for r in requests for i in range(r.num_samples)
    ]
    return [(by_id[c.request_id], c.token_ids, c.logprobs) for c in completions]


def start(python, models, log_path, **changes):
    options = VllmOptions(python, str(models[OLD]), str(log_path), max_model_len=160, max_num_seqs=16, kv_cache_gib=0.1)
    return Server.start(dataclasses.replace(options, **changes))


def make_buffer(model=OLD):
    infos = [TensorInfo(name, "float32", tensor.shape) for name, tensor in weights_of(model).items()]
    return WeightBuffer.create(infos)


def push(buffer, model, version):
    buffer.begin(version)
    for name, tensor in weights_of(model).items():
        buffer.write(name, tensor)
    buffer.commit()


@SLOW
@pytest.mark.parametrize("model", FAMILIES, ids=lambda model: model.family)
def test_other_families_agree_with_transformers(rollout_python, images_file, directory, model):
    model_dir = write_tiny_vl(directory / f"family{model.seed}", model)
    with make_buffer(model) as buffer:
        log = directory / f"family{model.seed}.log"
        with start(rollout_python, {OLD: model_dir}, log) as generator:
            generator.node.servers.buffer_path = buffer.path
            for version in (1, 2):
                push(buffer, model, version)
                generator.update_weights(version)
                check(rollout_python, model_dir, images_file, generate(generator))


@SLOW
@pytest.mark.parametrize("engine", ["VllmEngine", "CpuEngine"])
def test_each_engine_agrees_with_transformers(rollout_python, models, images_file, directory, engine):
    config = {"model_dir": str(models[NEW]), "dtype": "float32", "device": "cpu", "load_format": "auto", "seed": 0}
    config |= {"enable_sleep": False, "max_model_len": 160, "max_num_seqs": 16, "tensor_parallel_size": 1}
    config |= {"gpu_memory_utilization": 0.2, "kv_cache_gib": 0.1, "profile_dir": ""}
    config |= {"record_routing": False, "tokenizer_dir": "", "span": None, "engine_args": {}}
    requests = [
        (list(r.prompt_ids), [f"{r.request_id}_{n}" for n in range(len(r.images))], r.num_samples, r.seed)
        for r in REQUESTS
    ]
    with make_buffer() as buffer:
        push(buffer, OLD, 1)
        ended = subprocess.run(
            [rollout_python, "-c", ENGINE, engine, str(images_file), "", buffer.path],
            input=json.dumps([config, requests]), capture_output=True, text=True, timeout=400, env=environment(),
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = [
        json.loads(line.removeprefix("sample ")) for line in ended.stdout.splitlines() if line.startswith("sample ")
    ]
    assert len(lines) == 2 * sum(r.num_samples for r in REQUESTS)
    for version, model in enumerate((NEW, OLD)):
        samples = [(REQUESTS[index], ids, logprobs) for own, index, ids, logprobs in lines if own == version]
        check(rollout_python, models[model], images_file, samples)


@SLOW
def test_several_servers_share_the_prompts_and_give_the_same_samples(rollout_python, models, directory):
    with make_buffer() as buffer:
        push(buffer, NEW, 1)
        generators = [start(rollout_python, models, directory / f"pool{n}.log") for n in range(2)]
        try:
            pool = ServerPool(generators, num_restarts=0)
            for generator in generators:
                generator.node.servers.buffer_path = buffer.path
            pool.update_weights(1)
            together, alone = generate(pool), generate(generators[0])
        finally:
            for generator in generators:
                generator.close()
    same = 0
    for (_, ids, logprobs), (_, others, other_logprobs) in zip(together, alone, strict=True):
        if np.array_equal(ids, others):
            same += 1
            np.testing.assert_allclose(logprobs, other_logprobs, rtol=0, atol=TOLERANCE)
    # Kernels may round differently for another number of rows, which rarely moves a token over a boundary.
    assert same >= len(alone) - 1


@SLOW
def test_a_server_of_two_ranks_agrees_with_transformers(rollout_python, models, images_file, directory):
    with make_buffer() as buffer:
        with start(rollout_python, models, directory / "two_ranks.log", tensor_parallel_size=2) as generator:
            generator.node.servers.buffer_path = buffer.path
            for version, model in enumerate((OLD, NEW), 1):
                push(buffer, model, version)
                generator.update_weights(version)
                check(rollout_python, models[model], images_file, generate(generator))
