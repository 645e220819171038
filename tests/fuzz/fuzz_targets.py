"""The table of everything that reads files and messages from outside, by the name that reports give it."""

import importlib.util
import json

from fuzz_checkpoints import checkpoint_arrays, checkpoint_manifest, checkpoint_state
from fuzz_config import config_file, config_override
from fuzz_data import mindrecord_header, mindrecord_index, mindrecord_pages, parquet, records
from fuzz_files import RECORDS
from fuzz_messages import judge_reply, tool_call, wire
from fuzz_run_files import run_records, samples_to_score
from fuzz_target import Target
from fuzz_tokenizers import chat_template, sentencepiece, tokenizer_file
from fuzz_weights import (
    gguf_file,
    hf_config,
    safetensors_file,
    safetensors_index,
    shard_ckpt,
    sharded_json,
    strategy_description,
    strategy_file,
)

from mindrlhf.data.handlers import RecordError
from mindrlhf.errors import UserError
from mindrlhf.rewards.judges.chat_client import ChatError
from mindrlhf.system.wire import ConnectionClosed, ProtocolError

_LINES = b"\n".join(json.dumps(record).encode() for record in RECORDS) + b"\n"

TARGETS = {
    "config file": Target(config_file),
    "config override": Target(config_override),
    "JSONL records": Target(records("case.jsonl", _LINES)),
    "JSON records": Target(records("case.json", json.dumps(RECORDS).encode())),
    "Parquet records": Target(parquet),
    "MindRecord header": Target(mindrecord_header),
    "MindRecord index": Target(mindrecord_index),
    "MindRecord pages": Target(mindrecord_pages),
    "safetensors file": Target(safetensors_file),
    "safetensors index": Target(safetensors_index),
    "model config.json": Target(hf_config),
    "checkpoint manifest": Target(checkpoint_manifest),
    "checkpoint state": Target(checkpoint_state),
    "checkpoint arrays": Target(checkpoint_arrays),
    "sharded manifests": Target(sharded_json),
    "sharded ckpt file": Target(shard_ckpt),
    "strategy file": Target(strategy_file),
    "strategy description": Target(strategy_description),
    "rollout message": Target(wire, (ConnectionClosed, ProtocolError)),
    "tool call": Target(tool_call, ()),
    "judge's reply": Target(judge_reply, (ChatError,)),
    "records of a run": Target(run_records),
    "samples to score": Target(samples_to_score),
    "tokenizer.json": Target(tokenizer_file("tokenizer.json")),
    "tokenizer_config.json": Target(tokenizer_file("tokenizer_config.json")),
    "SentencePiece model": Target(sentencepiece),
    "chat template": Target(chat_template, (UserError, RecordError)),
}
if importlib.util.find_spec("gguf") is not None:
    TARGETS["GGUF file"] = Target(gguf_file)
