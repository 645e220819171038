"""The real vLLM-Ascend, driven by the product's own rollout server, on a machine that it takes for one with NPUs.

Device memory is the host's there, and operators run on the CPU (tests/helpers/fake_npu), where they take what an
NPU takes. Numbers are those of transformers in float32, to bfloat16.
"""

import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import layer_faults
import numpy as np
import pytest
import sanity_inputs
from fake_npu import build
from safetensors.numpy import save_file
from slow_tests import SLOW
from tiny_models import tiny_model
from tiny_vl import IMAGE, VISION_END, VISION_START, TinyVl, config_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mindrlhf.doctor import layers
from mindrlhf.doctor.ladder import climb
from mindrlhf.doctor.rungs import RUNGS, Ground
from mindrlhf.images.patches import patch_rows
from mindrlhf.rollout import servers
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.specs import find_spec
from mindrlhf.weights.convert import hf_shapes
from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer
from mindrlhf.weights.tensors import convert_dtype

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("MINDRLHF_ROLLOUT_PYTHON", str(ROOT / ".venv-rollout" / "bin" / "python"))
WHEELS_VARIABLE = "MINDRLHF_ASCEND_WHEELS"
pytestmark = [
    SLOW,
    pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="no rollout environment"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]
DENSE = layer_faults.MODEL | {"num_hidden_layers": 2, "max_position_embeddings": 1024, "torch_dtype": "bfloat16"}
MODELS = {
    "dense": DENSE,
    "experts": tiny_model("qwen3_moe", DENSE, attention_bias=False),
    "latent attention": tiny_model("deepseek_v3", DENSE),
}
# Heads of 128 channels, for which vLLM-Ascend turns by three positions in an operator of its own.
VISION = {
    family: config_of(TinyVl(family=family, vision_depth=3, layers=3, hidden=256, heads=2, kv_heads=1))
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
}
MODELS |= VISION
# Of log-probabilities at temperature 1 from transformers' in float32, servers computing in bfloat16: the mean, and the
# largest; a token that is between two experts may get the other.
MEAN_GAP, LARGEST_GAP, LARGEST_OF_EXPERTS = 0.01, 0.03, 0.3
NPU_BYTES = 2 << 30
RESERVED = NPU_BYTES // 2  # of the server's share; the cache takes the rest
PROMPTS = [list(range(5, 5 + length)) for length in (3, 17, 130)]
# A token for each byte, and pairs of letters; and a form that the model nearly keeps to, up to its end.
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
PAIRS = list(itertools.product("abcdefghijklmnopqrst", repeat=2))[: DENSE["vocab_size"] - len(LETTERS)]
VOCABULARY = {token: number for number, token in enumerate([*LETTERS, *map("".join, PAIRS)])}
TOKENIZER = Tokenizer(models.BPE(vocab=VOCABULARY, merges=PAIRS))
TOKENIZER.decoder = decoders.ByteLevel()
END, FORM = 7, r"[\x00-\x7f]{8}(st|no)"
SIZES = ([(56, 84)], [(140, 168)], [(56, 56), (84, 112)], [])  # of the images of a prompt, in pixels


@pytest.fixture(scope="session")
def fake_npu(tmp_path_factory):
    """The directory of the fake NPU: `python` takes the rollout interpreter's place."""
    wheels = os.environ.get(WHEELS_VARIABLE)
    if not wheels:
        wheels = str(tmp_path_factory.mktemp("wheels"))
        names = [f"{name.replace('_', '-')}=={version}" for name, version in (build.VERSIONS | build.OTHERS).items()]
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", wheels, *names]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if finished.returncode:
            pytest.skip(f"the wheels cannot be had: {finished.stderr.strip().splitlines()[-1]}")
    directory = tmp_path_factory.mktemp("npu") / "fake"
    build.build(Path(wheels), directory, PYTHON)
    return directory


def weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    """Random weights by name, as the bits of bfloat16."""
    random, made, spec = np.random.default_rng(seed), {}, find_spec(config)
    for name, shape in hf_shapes(spec, spec.dims(config)).items():
        values = random.normal(scale=0.05, size=shape).astype(np.float32)
        made[name] = convert_dtype(1 + values if "norm" in name else values, "float32", "bfloat16")
    return made


REFERENCE = """
import json, sys
import numpy as np, torch, transformers
sees = "vision_config" in json.load(open(sys.argv[1] + "/config.json"))
kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
model = kind.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="eager")
routers = {"output_router_logits": True} if model.config.model_type == "qwen3_moe" else {}
for prompt, response, patches, grid in json.load(sys.stdin):
    ids, seen = torch.tensor([prompt + response]), {}
    if patches:
        seen = dict(pixel_values=torch.from_numpy(np.load(patches)), image_grid_thw=torch.tensor(grid))
        seen["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        out = model(ids, **seen, **routers)
    logits = out.logits[0].double() / float(sys.argv[2])
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    chosen = [one.topk(model.config.num_experts_per_tok).indices.tolist() for one in out.get("router_logits") or ()]
    print(json.dumps([logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist(), chosen]))
"""


def prompt_requests(config: dict, directory: Path) -> tuple[list[GenerationRequest], list[tuple]]:
    """Requests of two samples, and for transformers: a file of patches, and the grid of each image."""
    if "vision_config" not in config:
        return [GenerationRequest(n, tuple(prompt), 2, seed=n) for n, prompt in enumerate(PROMPTS)], [("", ())] * 3
    random, spec = np.random.default_rng(0), find_spec(config)
    geometry = spec.dims(config).vision.geometry
    requests, seen = [], []
    for number, sizes in enumerate(SIZES):
        images = tuple(random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes)
        grids = [geometry.token_grid(*size) for size in sizes]
        ids = [[VISION_START, *[IMAGE] * (rows * columns), VISION_END] for rows, columns in grids]
        prompt = (*sum(ids, []), *random.integers(0, 200, 10).tolist())
        requests.append(GenerationRequest(number, prompt, 2, seed=number, images=images))
        path = directory / f"patches{number}.npy"
        np.save(path, np.concatenate([patch_rows(image, geometry) for image in images] or [np.zeros((0, 1))]))
        whole = [(1, rows * geometry.merge, columns * geometry.merge) for rows, columns in grids]
        seen.append((str(path) if images else "", whole))
    return requests, seen


def reference(model_dir: Path, tensors: dict, cases: list, temperature: float) -> list[tuple[list, list]]:
    """transformers' log-probabilities in float32 of each response, given its prompt and the patches of its images.

    And of each layer with routers the experts of each token.
    """
    wide = {name: convert_dtype(bits, "bfloat16", "float32") for name, bits in tensors.items()}
    save_file(wide, model_dir / "model.safetensors", metadata={"format": "pt"})
    command = [PYTHON, "-c", REFERENCE, str(model_dir), str(temperature)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 300}
    ended = subprocess.run(command, input=json.dumps(cases), **options)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


class Server:
    """A server on the fake NPU, and the buffer that it takes weights from."""

    def __init__(self, name: str, fake_npu: Path, directory: Path, num_devices: int, engine_args: dict, **env: str):
        self.config, self.directory, self.log = MODELS[name], directory, directory / "server.log"
        (directory / "config.json").write_text(json.dumps(self.config))
        TOKENIZER.save(str(directory / "tokenizer.json"))
        infos = [TensorInfo(name, "bfloat16", bits.shape) for name, bits in weights(self.config, 0).items()]
        self.buffer = WeightBuffer.create(infos)
        given = VllmOptions(
            str(fake_npu / "python"), str(directory), str(self.log), device="ascend", dtype="bfloat16",
            max_model_len=256, max_num_seqs=8, gpu_memory_utilization=0.6, kv_cache_gib=None, reserved_bytes=RESERVED,
            tensor_parallel_size=num_devices, enable_sleep=True, env=env, record_routing=name == "experts",
            start_timeout_s=500, tokenizer_dir=str(directory),
            engine_args=engine_args,
        )  # fmt: skip
        self.generator = servers.Server.start(given)
        self.generator.node.servers.buffer_path = self.buffer.path

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        self.generator.close()
        self.buffer.close()

    def publish(self, version: int) -> dict[str, np.ndarray]:
        tensors = weights(self.config, version)
        for bucket in range(self.buffer.num_buckets):
            self.buffer.begin(version, bucket)
            for name, bits in tensors.items():
                if self.buffer.wants(name):
                    self.buffer.write(name, bits)
            self.buffer.commit()
            self.generator.update_weights(version)
        return tensors

    def free_share(self, state: str) -> float:
        """The share of the NPU that was free when the server last said that it was "asleep" or "awake"."""
        said = re.findall(rf"mindrlhf: {state}: GiB free on each NPU: ([\d.]+) of ([\d.]+)", self.log.read_text())
        free, whole = map(float, said[-1])
        return free / whole

    def keeps_to_a_form(self, tensors: dict) -> None:
        """Samples are of a form, and the policy's tokens have its log-probabilities; others are the form's."""
        grammar = json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": FORM}})
        requests, _ = prompt_requests(self.config, self.directory)
        sampling = SamplingParams(max_tokens=24, stop_token_ids=(END,), grammar=grammar)
        done = list(self.generator.generate(requests, sampling))
        texts = [TOKENIZER.decode(one.token_ids.tolist()).removesuffix(TOKENIZER.decode([END])) for one in done]
        assert all(re.fullmatch(FORM, text, re.DOTALL) for text in texts), texts
        cases = [[requests[one.request_id].prompt_ids, one.token_ids.tolist(), "", ()] for one in done]
        expected = reference(self.directory, tensors, cases, 1.0)
        gaps = [one.logprobs - np.array(own)[one.is_generated] for one, (own, _) in zip(done, expected, strict=True)]
        shares = [one.is_generated.mean() for one in done]
        print(f"of a form {np.mean(shares):.0%} the policy's, {np.abs(np.concatenate(gaps)).mean():.1e} apart: {texts}")
        assert np.abs(np.concatenate(gaps)).mean() < MEAN_GAP and 0 < np.mean(shares) < 1

    def gaps(self, tensors: dict, temperature: float) -> np.ndarray:
        """How far log-probabilities are from transformers'."""
        requests, seen = prompt_requests(self.config, self.directory)
        sampling = SamplingParams(max_tokens=24, temperature=temperature)
        done = list(self.generator.generate(requests, sampling))
        assert len(done) == 2 * len(requests)
        # A random model may write an image token itself, which transformers takes for an image that is missing.
        responses = [one.token_ids.tolist() for one in done]
        ends = [ids.index(IMAGE) if "vision_config" in self.config and IMAGE in ids else len(ids) for ids in responses]
        responses = [ids[:end] for ids, end in zip(responses, ends)]
        own = zip(done, responses)
        cases = [[requests[one.request_id].prompt_ids, ids, *seen[one.request_id]] for one, ids in own if ids]
        logprobs = [one.logprobs[: len(ids)] for one, ids in zip(done, responses) if ids]
        expected = reference(self.directory, tensors, cases, temperature)
        gaps = np.concatenate([np.abs(one - own) for one, (own, _) in zip(logprobs, expected, strict=True)])
        if expected[0][1]:
            pairs = [(one.experts, np.array(chosen).swapaxes(0, 1)[:-1]) for one, (_, chosen) in zip(done, expected)]
            equal = np.concatenate([(np.sort(one) == np.sort(other)).all(-1).ravel() for one, other in pairs])
            print(f"experts of {equal.mean():.1%} of tokens are those of transformers")
            assert equal.mean() > 0.95
        print(f"temperature {temperature}: {len(cases)} samples, {gaps.mean():.1e} apart, at most {gaps.max():.1e}")
        return gaps


CASES = [
    ("dense", 1, "eager"), ("dense", 2, "eager"), ("dense", 1, "compiled"), ("dense", 1, "pieces"),
    ("experts", 1, "eager"), ("experts", 2, "eager"), ("experts", 1, "launches"),
    ("dense", 2, "launches"), ("latent attention", 1, "eager"), ("latent attention", 1, "launches"),
    ("qwen2_vl", 1, "eager"), ("qwen2_5_vl", 1, "eager"), ("qwen3_vl", 1, "eager"),
]  # fmt: skip


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name, num_devices, decoding", CASES)
def test_three_rounds_of_sleep_and_new_weights(name, num_devices, decoding, fake_npu, tmp_path, monkeypatch):
    on_fake_npus(monkeypatch, fake_npu, tmp_path)
    has_graphs = decoding != "eager"
    graphs = "launches" if decoding == "launches" else "compiled"
    env = {"FAKE_NPU_GRAPHS": graphs, "VLLM_DISABLE_COMPILE_CACHE": "1"} if has_graphs else {}
    pieces = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}} if decoding == "pieces" else {}
    largest = LARGEST_OF_EXPERTS if name in ("experts", "latent attention") else LARGEST_GAP
    with Server(name, fake_npu, tmp_path, num_devices=num_devices, engine_args=pieces, **env) as server:
        server.generator.wait_ready()
        said = re.findall(r"mindrlhf: KV cache ([\d.]+) GiB of each NPU's ([\d.]+)", server.log.read_text())
        assert said == [(f"{(0.6 * NPU_BYTES - RESERVED) / 2**30:.2f}", "2.00")], "share less what else is there"
        server.generator.sleep()
        for version, temperature in ((1, 1.0), (2, 0.5), (3, 1.0)):
            server.generator.wake()
            tensors = server.publish(version)
            gaps = server.gaps(tensors, temperature) * temperature
            assert gaps.mean() < MEAN_GAP and gaps.max() < largest
            if name == "dense" and version == 3:
                server.keeps_to_a_form(tensors)
            awake = server.free_share("awake")
            assert awake < 0.9, "cache and weights are there"
            server.generator.sleep()
            print(f"free: {awake:.3f} awake, {server.free_share('asleep'):.3f} asleep")
            assert server.free_share("asleep") >= 0.98
        log = server.log.read_text()
        assert bool(re.search("fake NPU: a graph of [0-9]+ launches is replayed", log)) == has_graphs
        captured = len(re.findall("fake NPU: a graph of [0-9]+ launches\n", log))
        num_pieces = 3 if pieces else int(has_graphs)  # before, between and behind the attention of two layers
        assert captured == 4 * num_pieces * num_devices, "once for each size"


BESIDE = """
import torch, torch_npu
free = torch.npu.mem_get_info(0)[0]
first = torch.empty(free // 2, dtype=torch.uint8, device="npu:0")
try:
    torch.empty(2 * free, dtype=torch.uint8, device="npu:0")
except RuntimeError as error:
    print(free, "out of memory" in str(error))
"""


def test_all_on_a_card_share_its_memory(fake_npu, tmp_path, monkeypatch):
    """A rank has half of it: what a server asks for beyond the rest is refused, until the rank gives it back."""
    on_fake_npus(monkeypatch, fake_npu, tmp_path)
    rank, memory = ctypes.CDLL(fake_npu / "cann" / "lib64" / "libascendcl.so"), ctypes.c_void_p()
    assert rank.aclrtMalloc(ctypes.byref(memory), ctypes.c_size_t(NPU_BYTES // 2), 0) == 0
    said = []
    for is_held in (True, False):
        if not is_held:
            rank.aclrtFree(memory)
        command = [fake_npu / "python", "-c", BESIDE]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        said.append(ended.stdout.split()[-2:])
    assert said == [[str(NPU_BYTES // 2), "True"], [str(NPU_BYTES), "True"]]


RECIPE, RANKS = ROOT / "examples" / "quickstart", ROOT / "tests" / "helpers" / "fake_npu" / "ranks"


@pytest.fixture(scope="session")
def problems(tmp_path_factory) -> Path:
    """The prompts of the quickstart."""
    directory = tmp_path_factory.mktemp("problems")
    numbers = ("--num-train", 1000, "--num-test", 150, "--seed", 1, "--levels", 1, 2)
    command = [sys.executable, RECIPE / "problems.py", "--out", directory, *numbers]
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, env=sanity_inputs.environment(), timeout=120)
    for split in ("train", "test"):
        files = ("--input", directory / f"{split}.jsonl", "--output", directory / f"{split}.mindrecord")
        form = ("--tokenizer", RECIPE / "checkpoint", "--handler", "gsm8k", "--template", "chat")
        sanity_inputs.run("data", "build", *files, *form, "--max-prompt-length", 96, timeout_s=120)
    return directory


def quickstart(fake_npu: Path, problems: Path, directory: Path, **options: object) -> list[dict]:
    """Run the quickstart, its ranks on the CPU and its server on the fake NPU, where it sleeps while they train.

    Returns:
        The metrics of its steps, of which each is checked: generator and trainer agree.
    """
    cann = fake_npu / "cann"
    values = {
        "run.output_dir": directory / "run", "data.train_file": problems / "train.mindrecord",
        "data.eval_file": problems / "test.mindrecord", "rollout.python": fake_npu / "python",
        "rollout.env": f"{{ASCEND_HOME_PATH: {cann}, PYTHONPATH: {cann / 'python'}}}",
        "rollout.dtype": "bfloat16", "checkpoint.every_steps": 0,
        **{name.replace("__", "."): value for name, value in options.items()},
    }  # fmt: skip
    command = sanity_inputs.command("train", RECIPE / "config.yaml", *(f"{k}={v}" for k, v in values.items()))
    path = os.pathsep.join(map(str, (RANKS, ROOT)))
    environment = sanity_inputs.environment() | {
        "MINDRLHF_TEST_SERVERS_ON": "ascend", "PYTHONPATH": path, "FAKE_NPU_BYTES": str(2 * NPU_BYTES),
        "FAKE_NPUS": "2", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "FAKE_NPU_LEDGER": str(directory / "ledger"),
    }  # fmt: skip
    ended = subprocess.run(
        [*command, "--workers", "2"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    log = (directory / "run" / "logs" / "rollout_0.log").read_text()
    said = re.findall(r"asleep: GiB free on each NPU: ([\d.]+) of ([\d.]+)", log)
    asleep = [float(free) / float(whole) for free, whole in said]
    metrics = sanity_inputs.read_lines(directory / "run" / "metrics.jsonl")
    steps = [line for line in metrics if "rollout_diff/max_abs" in line]
    assert len(asleep) >= len(steps) > 0 and min(asleep) >= 0.98
    assert max(line["rollout_diff/mean_abs"] for line in steps) < 0.05, "the server computes in bfloat16"
    return steps


@pytest.mark.timeout(1200)
def test_the_quickstart_learns_from_a_server_on_the_fake_npu(fake_npu, problems, tmp_path):
    options = {"run__max_steps": 30, "evaluation__every_steps": 30}
    assert len(quickstart(fake_npu, problems, tmp_path, **options)) == 30
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_prompts"] == 150
    assert summary["difference"]["low"] > 0, summary["difference"]
    assert summary["after"]["low"] > summary["before"]["high"], (summary["before"], summary["after"])


@pytest.mark.timeout(1200)
def test_adapters_are_trained_with_a_server_on_the_fake_npu(fake_npu, problems, tmp_path):
    """A server is given the merged weights, as on a CPU."""
    options = {"run__max_steps": 3, "evaluation__every_steps": 0, "evaluation__max_prompts": 10, "lora__rank": 8}
    steps = quickstart(fake_npu, problems, tmp_path, **options)
    assert len(steps) == 3 and (tmp_path / "run" / "final_adapter" / "adapter_model.safetensors").exists()


def on_fake_npus(monkeypatch, fake_npu: Path, directory: Path) -> None:
    """Have servers of this process take the machine for one with two NPUs, whose memory they share."""
    cann = fake_npu / "cann"
    monkeypatch.setenv("FAKE_NPU_LEDGER", str(directory / "ledger"))
    here = {"ASCEND_HOME_PATH": cann, "PYTHONPATH": cann / "python", "FAKE_NPU_BYTES": NPU_BYTES, "FAKE_NPUS": 2}
    for name, value in (here | {"TORCH_DEVICE_BACKEND_AUTOLOAD": 0}).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.timeout(1700)
def test_the_doctors_rungs_hold_on_the_fake_npu(fake_npu, tmp_path, monkeypatch):
    on_fake_npus(monkeypatch, fake_npu, tmp_path)
    monkeypatch.setenv("FAKE_NPU_BYTES", str(4 * NPU_BYTES))
    monkeypatch.setenv("MINDRLHF_TEST_SERVERS_ON", "ascend")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (RANKS, fake_npu / "cann" / "python", ROOT))))
    climbed = climb(Ground(str(tmp_path), "ascend", 2, str(fake_npu / "python")), [*RUNGS], print)
    assert [rung.name for rung in climbed if rung.status == "ok"] == [*RUNGS], climbed[-1]
    asleep = climbed[4].found["GiB free asleep, by round"]
    assert min(asleep) >= 0.98 * 4 * NPU_BYTES / 2**30


@pytest.mark.timeout(900)
def test_layers_on_the_fake_npu_are_those_of_our_cells_and_faults_are_found(fake_npu, tmp_path, monkeypatch):
    on_fake_npus(monkeypatch, fake_npu, tmp_path)
    model = layer_faults.write_model(tmp_path / "model")
    ground = Ground(str(tmp_path), "ascend", 1, str(fake_npu / "python"))
    layers.record_server(ground, str(model))
    layer_faults.check_each_is_found(ground, model)
