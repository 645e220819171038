"""Everything that reads files and messages from outside: valid input, how it is damaged, and what reads it."""

import json
import random
import socket
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from corruption import corrupt_bytes, corrupt_json, corrupt_safetensors
from fuzz_files import (
    RECORDS,
    REPOSITORY,
    SAMPLES,
    STEPS,
    SUMMARY,
    TEMPLATE,
    gguf_bytes,
    make_checkpoint,
    make_model,
    make_prompt_file,
    make_safetensors,
    make_sentencepiece,
    make_sharded,
    make_tokenizer,
    model_config,
)

from mindrlhf.data.handlers import RecordError
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rewards.judges.chat_client import ChatError
from mindrlhf.system.wire import ConnectionClosed, ProtocolError

Damage = Callable[[random.Random], bytes]
# The files of which a case damages one, each with its damage; and what then reads and uses them all.
Prepared = tuple[Mapping[Path, Damage], Callable[[], object]]


@dataclass(frozen=True)
class Target:
    """A parser under test, with the errors by which it may refuse."""

    prepare: Callable[[Path], Prepared]
    refusals: tuple[type[Exception], ...]


TARGETS: dict[str, Target] = {}


def target(name: str, refusals: tuple[type[Exception], ...] = (UserError, RunFailure), **options) -> Callable:
    """Enter a function in ``TARGETS``."""

    def enter(prepare):
        TARGETS[name] = Target(partial(prepare, **options), refusals)
        return prepare

    return enter


def as_bytes(path: Path) -> Damage:
    whole = path.read_bytes()
    return lambda rng: corrupt_bytes(rng, whole)


def as_json(path: Path) -> Damage:
    whole = path.read_bytes()
    tree = json.loads(whole)
    return lambda rng: corrupt_json(rng, tree) if rng.randrange(3) else corrupt_bytes(rng, whole)


def as_lines(path: Path) -> Damage:
    """JSON lines of which one is damaged, or all bytes."""
    lines = path.read_bytes().splitlines()

    def damage(rng):
        changed, number = list(lines), rng.randrange(len(lines))
        changed[number] = corrupt_json(rng, json.loads(lines[number]))
        return b"\n".join(changed) if rng.randrange(3) else corrupt_bytes(rng, b"\n".join(lines))

    return damage


def as_safetensors(path: Path) -> Damage:
    whole = path.read_bytes()
    return lambda rng: corrupt_safetensors(rng, whole)


def written(path: Path, content: bytes | dict | list) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def read_all(source) -> None:
    for name in source.names():
        source.info(name)
        source.read(name).sum(dtype=np.float64)


@target("config file")
def config_file(directory):
    import yaml

    from mindrlhf.config.load import load_grpo_config

    text = (REPOSITORY / "examples" / "quickstart" / "config.yaml").read_bytes()
    path, tree = written(directory / "config.yaml", text), yaml.safe_load(text)
    return {
        path: lambda rng: corrupt_bytes(rng, text) if rng.randrange(2) else corrupt_json(rng, tree)
    }, lambda: load_grpo_config(path)


@target("config override")
def config_override(directory):
    from mindrlhf.config.load import load_grpo_config

    path, override = REPOSITORY / "examples" / "quickstart" / "config.yaml", directory / "override"
    written(override, b"training.sequence_lengths=[64, 128]")
    return {override: as_bytes(override)}, lambda: load_grpo_config(
        path, [override.read_bytes().decode("utf-8", errors="surrogateescape")]
    )


@target("JSONL records", file="a.jsonl")
@target("JSON records", file="a.json")
@target("Parquet records", file="a.parquet")
def records(directory, file):
    import pyarrow.parquet

    from mindrlhf.data.handlers import HANDLERS, RecordError
    from mindrlhf.data.readers import RawRecord, read_records

    path = directory / file
    if file.endswith("l"):
        written(path, b"\n".join(json.dumps(record).encode() for record in RECORDS))
    elif file.endswith("n"):
        written(path, RECORDS)
    else:
        rows = [{"question": f"{index} + 1?", "answer": "1", "tags": ["a", None], "score": 0.5} for index in range(40)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="zstd")

    def use():
        for record in read_records(path):
            for handler in HANDLERS.values() if isinstance(record, RawRecord) else ():
                try:
                    handler(record.fields)
                except RecordError:
                    continue

    damages = {"jsonl": as_lines, "json": as_json, "parquet": as_bytes}
    return {path: damages[file.removeprefix("a.")](path)}, use


@target("MindRecord")
def mindrecord(directory):
    from mindrlhf.data.mindrecord import PromptFile, index_path

    path = make_prompt_file(directory)
    whole, index = path.read_bytes(), index_path(path).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    layout = json.loads(whole[8 : 8 + length])

    def damage(rng):
        if kind := rng.randrange(3):  # in the pages, or anywhere
            start = len(whole) // 4 * (kind - 1)
            return whole[:start] + corrupt_bytes(rng, whole[start:])
        changed = json.loads(json.dumps(layout))
        description = corrupt_json(rng, json.loads(changed["schema"][0]["desc"]))
        changed["schema"][0]["desc"] = description.decode("utf-8", errors="replace")
        text = json.dumps(changed).encode() if rng.randrange(2) else corrupt_json(rng, layout)
        head = (struct.pack("<Q", len(text)) + text).ljust(8 + length, b"\0")
        return head + whole[len(head) :]

    def use():
        PromptFile.open(path)
        assert path.read_bytes() == whole and index_path(path).read_bytes() == index, "damage was not noticed"

    return {path: damage, index_path(path): as_bytes(index_path(path))}, use


@target("safetensors file")
def safetensors_file(directory):
    from mindrlhf.weights.safetensors_file import SafetensorsFile

    path = make_safetensors(directory)
    return {path: as_safetensors(path)}, lambda: read_all(SafetensorsFile(path))


@target("safetensors index")
def safetensors_index(directory):
    from mindrlhf.weights.hf import INDEX_NAME, SafetensorsDirectory

    model = make_model(directory, max_shard_bytes=4096)
    return {model / INDEX_NAME: as_json(model / INDEX_NAME)}, lambda: read_all(SafetensorsDirectory(model))


@target("model config.json")
def hf_config(directory):
    from mindrlhf.specs import find_spec
    from mindrlhf.weights.hf import read_hf_config

    # Few layers and experts, because each has rules that a case goes through.
    few = {"num_hidden_layers": 4, "n_routed_experts": 16, "num_experts": 16, "n_group": 4, "topk_group": 4}
    paths = []
    for name in ("deepseek_v3/deepseek_v3_671b", "qwen3/qwen3_30b_a3b", "qwen2_5/qwen2_5_7b", "llama3_1/llama3_1_8b"):
        (directory / name).mkdir(parents=True)
        config = {key: few.get(key, value) for key, value in model_config(name).items()}
        paths.append(written(directory / name / "config.json", config))

    def use():
        for path in paths:
            config = read_hf_config(path.parent)
            spec = find_spec(config)
            dims = spec.dims(config)
            for rule in spec.rules(dims):
                rule.shape(dims)
                rule.mf_shape(dims)

    return {path: as_json(path) for path in paths}, use


@target("checkpoint")
def checkpoint(directory):
    from mindrlhf.checkpoint.manifest import MANIFEST_NAME, verify
    from mindrlhf.checkpoint.resume import check_resumable
    from mindrlhf.checkpoint.state import ARRAYS_NAME, STATE_NAME, read_progress, read_state
    from mindrlhf.data.stream import PromptStream
    from mindrlhf.weights.array_file import ArrayFile

    path = make_checkpoint(directory)
    manifest, state, arrays = path / MANIFEST_NAME, path / STATE_NAME, path / ARRAYS_NAME
    intact, config = manifest.read_bytes(), read_state(path).config

    def use():
        if manifest.read_bytes() != intact:
            return verify(path)
        found = read_state(path)
        check_resumable(found.config, config)
        PromptStream(100, found.seed).restore(found.prompt_stream)
        read_progress(path)
        loaded = ArrayFile(arrays)
        return [loaded[name].sum(dtype=np.float64) for name in loaded]

    return {manifest: as_json(manifest), state: as_json(state), arrays: as_safetensors(arrays)}, use


@target("sharded directory")
def sharded_directory(directory):
    from mindrlhf.shards.strategy_files import DESCRIPTION_NAME, check_strategy_directory, read_strategy
    from mindrlhf.specs import find_spec
    from mindrlhf.weights.hf import SHARDED_NAME
    from mindrlhf.weights.sharded import ShardedDirectory

    sharded = make_sharded(directory, "safetensors")
    config = json.loads((sharded / "config.json").read_bytes())
    spec = find_spec(config)
    dims = spec.dims(config)
    shapes = {rule.mf_name: rule.mf_shape(dims) for rule in spec.rules(dims)}
    strategy = sharded / "strategy" / "merged.ckpt"

    def use():
        read_all(ShardedDirectory(sharded))
        check_strategy_directory(sharded / "strategy", dims)
        layouts, _ = read_strategy(strategy, dims, shapes)
        for layout in layouts:
            assert layout.shard_shape and layout.writers() and layout.optimizer_shard_step >= 0, "a layout of no use"

    names = (SHARDED_NAME, "rank_0/manifest.json", "rank_1/manifest.json", f"strategy/{DESCRIPTION_NAME}")
    return {strategy: as_bytes(strategy), **{sharded / name: as_json(sharded / name) for name in names}}, use


@target("sharded ckpt file")
def shard_ckpt(directory):
    from mindrlhf.weights.shard_files import open_shard

    path = next(make_sharded(directory, "ckpt").glob("rank_0/*.ckpt"))
    return {path: as_bytes(path)}, lambda: read_all(open_shard(path, "ckpt"))


@target("records of a run")
def run_records(directory):
    from mindrlhf.debugging.run_diff import compare_runs
    from mindrlhf.observe.run_data import read_run

    course = [
        {"step": step, "samples": "ab" * 8, "loss": 0.5, "weights": "cd" * 8, "hash": "ef" * 8} for step in (1, 2, 3)
    ]
    run, other = directory / "run", directory / "other"
    for run_dir in (run, other):
        run_dir.mkdir()
        for name, lines in (("metrics", STEPS), ("samples", SAMPLES), ("trajectory", course)):
            written(run_dir / f"{name}.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        written(run_dir / "summary.json", SUMMARY)
    intact = (run / "trajectory.jsonl").read_bytes()

    def use():
        if (run / "trajectory.jsonl").read_bytes() != intact:
            return compare_runs(run, other)
        return read_run(run)

    lines = {path: as_lines(path) for path in sorted(run.glob("*.jsonl"))}
    return {**lines, run / "summary.json": as_json(run / "summary.json")}, use


@target("samples to score")
def samples_to_score(directory):
    from mindrlhf.rewards.sample_files import read_samples, scored_record
    from mindrlhf.rewards.types import RewardResult

    first = {"completion": "7", "answer": 7, "prompt": "3 + 4?", "finish_reason": "stop", "num_tokens": 2, "id": [1]}
    lines = [first, {"completion": "x", "answer": "y"}]
    path = written(directory / "samples.jsonl", b"\n".join(json.dumps(line).encode() for line in lines))

    def use():
        for line in read_samples(path):
            if isinstance(line, UserError):
                raise line
            json.dumps(scored_record(line, RewardResult(line.number, {"accuracy": 1.0}, 1.0)))

    return {path: as_lines(path)}, use


def use_tokenizer(directory: Path) -> None:
    from mindrlhf.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(directory)
    tokenizer.decode(tokenizer.encode("What is 3 + 4? <|im_end|> ü\ud7ff"))
    assert tokenizer.fingerprint and tokenizer.vocab_size >= 0, "a tokenizer of no use"


@target("tokenizer files")
def tokenizer_files(directory):
    model = make_tokenizer(directory)
    paths = [model / name for name in ("tokenizer.json", "tokenizer_config.json")]
    return {path: as_json(path) for path in paths}, lambda: use_tokenizer(model)


@target("SentencePiece model")
def sentencepiece(directory):
    path = make_sentencepiece(directory)
    return {path: as_bytes(path)}, lambda: use_tokenizer(path.parent)


@target("chat template", (UserError, RecordError))
def chat_template(directory):
    from mindrlhf.data.handlers import Example, Message
    from mindrlhf.data.templates import load_template
    from mindrlhf.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(make_tokenizer(directory))
    path = written(directory / "template.jinja", TEMPLATE)
    pieces = (b"{{", b"%}", b"|", b"[0]", b".__class__", b" if ", b" is ", b"(", b"9" * 5000, b"{{(" * 400)
    example = Example((Message("system", "s"), Message("user", "What is 3 + 4?")), "7")

    def damage(rng):
        position = rng.randrange(len(TEMPLATE))
        piece = rng.choice(pieces) if rng.randrange(2) else b""
        return corrupt_bytes(rng, TEMPLATE[:position] + piece + TEMPLATE[position:], max_edits=2)

    return {path: damage}, lambda: load_template(str(path), tokenizer).render(example)


@target("rollout message", (ConnectionClosed, ProtocolError))
def wire(directory):
    from mindrlhf.system.wire import receive_message, send_message

    arrays = {"ids": np.arange(24, dtype=np.int32).reshape(4, 6), "flags": np.ones(3, bool), "none": np.zeros((0, 5))}
    left, right = socket.socketpair()
    with left, right:
        send_message(left, {"method": "generate", "values": {"seed": 1}}, arrays)
        path = written(directory / "message", right.recv(1 << 16))
    whole, prefix = path.read_bytes(), struct.Struct("!4sIIQ")
    magic, text_size, _, _ = prefix.unpack_from(whole)
    tree, payload = json.loads(whole[prefix.size : prefix.size + text_size]), whole[prefix.size + text_size :]

    def damage(rng):
        if rng.randrange(3) == 0:
            return corrupt_bytes(rng, whole)
        text = corrupt_json(rng, tree)
        size = rng.choice((len(payload), len(payload), 0, 2**62))
        return prefix.pack(magic, len(text), zlib.crc32(text), size) + text + payload

    def use():
        left, right = socket.socketpair()
        with left, right:
            left.sendall(path.read_bytes())
            left.close()
            receive_message(right, timeout_s=20, max_payload_bytes=1 << 24)

    return {path: damage}, use


@target("tool call", ())
def tool_call(directory):
    from mindrlhf.tools.calls import CALL_END, CALL_START, ToolCall, answer_turn, parse_calls
    from mindrlhf.tools.worker import answer_call

    call = {"name": "add", "arguments": {"left": 3, "right": 4}}
    pieces = (CALL_START, CALL_END, "<tool_response>", "<|im_end|>", "{" * 3000, "1" * 5000, '"\\ud800"')
    path = written(directory / "turn", f"so {CALL_START}\n{json.dumps(call)}\n{CALL_END}".encode())

    def damage(rng):
        text = corrupt_json(rng, call).decode(errors="surrogateescape")
        turn = f"so {CALL_START}\n{text}\n{CALL_END}" * rng.randint(1, 2)
        for _ in range(rng.randrange(3)):
            position = rng.randrange(len(turn))
            turn = turn[:position] + rng.choice(pieces) + turn[position:]
        return turn.encode(errors="surrogateescape")

    def add(left: float, right: float = 1) -> float:
        return left + right

    def use():
        answers = []
        for found in parse_calls(path.read_bytes().decode(errors="surrogateescape")):
            is_call = isinstance(found, ToolCall)
            # The worker gets the call, and the pool the answer, as JSON.
            asked = json.loads(json.dumps([found.name, found.arguments])) if is_call else None
            answers.append(json.loads(json.dumps(answer_call({"add": add}, *asked)))[0] if is_call else found.text)
        assert answer_turn(answers, is_chat=True).count("</tool_response>") == len(answers), "an answer broke its frame"

    return {path: damage}, use


@target("judge's reply", (ChatError,))
def judge_reply(directory):
    from mindrlhf.rewards.judges import chat_client

    reply = {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Good.\nScore: 7"}}]}
    path = written(directory / "reply", reply)
    return {path: as_json(path)}, lambda: chat_client._content("http://judge", path.read_bytes()).splitlines()


@target("GGUF file")
def gguf_file(directory):
    from mindrlhf.weights.gguf_file import GgufFile

    path = written(directory / "case.gguf", gguf_bytes())

    def use():
        file = GgufFile(path)
        for name in file.tensors:
            file.read(name).sum(dtype=np.float64)
            file.release(name)

    return {path: as_bytes(path)}, use
