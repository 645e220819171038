"""`mindrlhf weights`: convert, inspect and make model directories."""

import argparse
from pathlib import Path

from mindrlhf.commands.vocabulary import allow_json, model_directory


def register(subparsers) -> None:
    """Add the `weights` command."""
    parser = subparsers.add_parser("weights", help="convert, inspect and make model directories")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    to_mindformers = actions.add_parser("import", help="Hugging Face directory to MindFormers names and layouts")
    to_mindformers.add_argument("source", type=model_directory, metavar="HF_DIR")
    to_mindformers.set_defaults(run=_import, says="converting")

    to_hugging_face = actions.add_parser("export", help="MindFormers directory back to Hugging Face")
    to_hugging_face.add_argument("source", metavar="MF_DIR")
    to_hugging_face.set_defaults(run=_export, says="converting")

    convert = actions.add_parser("convert", help="GGUF file, or Hugging Face directory, to another dtype; dequantises")
    convert.add_argument("source", type=model_directory, metavar="HF_DIR", help="or FILE.gguf, with its tokenizer")
    convert.set_defaults(run=_convert, says="converting")

    random = actions.add_parser("random", help="randomly initialised Hugging Face directory")
    random.add_argument("--config", required=True, metavar="CONFIG_JSON", help="a config.json, or a directory with one")
    random.add_argument("--seed", type=int, default=0)
    random.add_argument(
        "--tokenizer", type=model_directory, metavar="DIR", help="copy the tokenizer files from here"
    )
    random.set_defaults(run=_random, says="making weights")

    adapter = actions.add_parser("merge-adapter", help="add an adapter in PEFT's format to its model")
    adapter.add_argument(
        "source", type=model_directory, metavar="HF_DIR", help="the model that it was trained on; stays as it is"
    )
    adapter.add_argument("adapter", metavar="ADAPTER_DIR", help="adapter_config.json and adapter_model.safetensors")
    adapter.set_defaults(run=_merge_adapter, says="merging")

    for action in (to_mindformers, to_hugging_face, convert, random, adapter):
        _add_output(action, "DIR", "output directory; must not exist yet")
        action.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="dtype of the files")

    _register_sharding(actions)

    inspect = actions.add_parser("inspect", help="sizes, dtypes and layout of a model directory, checked")
    inspect.add_argument("source", type=model_directory, metavar="DIR")
    allow_json(inspect)
    inspect.set_defaults(run=_inspect, says="reading")


def _register_sharding(actions) -> None:
    shard = actions.add_parser("shard", help="shard a Hugging Face directory into one directory per rank")
    shard.add_argument("source", type=model_directory, metavar="HF_DIR")
    shard.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="convert the parameters")
    shard.add_argument("--optimizer", default="", metavar="FILE", help="optimizer.safetensors of a run, sharded too")
    shard.set_defaults(run=_shard, says="sharding")

    reshard = actions.add_parser("reshard", help="reshard a sharded directory for another layout")
    reshard.add_argument("source", metavar="SHARDED")
    reshard.set_defaults(run=_shard, dtype=None, optimizer="", says="resharding")

    for action in (shard, reshard):
        layout = action.add_mutually_exclusive_group(required=True)
        layout.add_argument(
            "--parallel", metavar="LAYOUT", help="dp=2,mp=2,pp=2[,cp=1][,ep=1][,opt=1][,vocab_emb_dp=0]"
        )
        layout.add_argument("--strategy", metavar="DIR", help="strategy files, as `mindrlhf strategy` writes them")
        action.add_argument("--format", choices=("safetensors", "ckpt"), default="safetensors")
        _add_output(action, "DIR", "output; an interrupted run is continued")

    merge = actions.add_parser("merge", help="put a sharded directory together to a Hugging Face directory")
    merge.add_argument("source", metavar="SHARDED")
    _add_output(merge, "HF_DIR", "output directory; must not exist yet")
    merge.add_argument(
        "--optimizer-out", default="", metavar="FILE", help="also write the optimiser state to this file"
    )
    merge.set_defaults(run=_merge, says="merging")

    verify = actions.add_parser("verify", help="prove that a sharded directory is whole: coverage and checksums")
    verify.add_argument("source", metavar="SHARDED")
    verify.add_argument("--against", default="", metavar="HF_DIR", help="compare with the original byte by byte")
    allow_json(verify)
    verify.set_defaults(run=_verify, says="verifying")

    for action in (shard, reshard, merge, verify):
        action.add_argument(
            "--processes", type=int, metavar="N", help="threads that read and write; each holds about one tensor"
        )


def _add_output(parser: argparse.ArgumentParser, metavar: str, help_text: str) -> None:
    parser.add_argument("--output", required=True, metavar=metavar, help=help_text)


def _workers(arguments: argparse.Namespace) -> dict[str, int]:
    return {"num_workers": arguments.processes} if arguments.processes else {}


def _shard(arguments: argparse.Namespace) -> int:
    from mindrlhf.shards.shard import shard_directory

    shard_directory(
        arguments.source,
        arguments.output,
        parallel=arguments.parallel,
        strategy=arguments.strategy,
        file_format=arguments.format,
        dtype=arguments.dtype,
        optimizer_file=arguments.optimizer,
        report=print,
        **_workers(arguments),
    )
    print(f"wrote {arguments.output}")
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from mindrlhf.shards.merge import merge_directory

    merge_directory(arguments.source, arguments.output, optimizer_file=arguments.optimizer_out, **_workers(arguments))
    print(f"wrote {arguments.output}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    import dataclasses
    import json

    from mindrlhf.shards.verify import verify_directory

    found = verify_directory(arguments.source, against=arguments.against, **_workers(arguments))
    print(json.dumps(dataclasses.asdict(found), indent=1) if arguments.json else found)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from mindrlhf.weights.directories import import_directory

    import_directory(arguments.source, arguments.output, arguments.dtype)
    print(f"wrote {arguments.output}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from mindrlhf.weights.directories import export_directory

    export_directory(arguments.source, arguments.output, arguments.dtype)
    print(f"wrote {arguments.output}")
    return 0


def _merge_adapter(arguments: argparse.Namespace) -> int:
    from mindrlhf.weights.adapters.merge import merge_adapter

    merge_adapter(arguments.source, arguments.adapter, arguments.output, arguments.dtype)
    print(f"wrote {arguments.output}")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from mindrlhf.weights.fp8 import convert_directory
    from mindrlhf.weights.gguf_model import convert_gguf
    from mindrlhf.weights.hf import GGUF_ENDING

    is_gguf = arguments.source.endswith(GGUF_ENDING) or Path(arguments.source).is_file()
    convert = convert_gguf if is_gguf else convert_directory
    convert(arguments.source, arguments.output, arguments.dtype)
    print(f"wrote {arguments.output}")
    return 0


def _random(arguments: argparse.Namespace) -> int:
    from mindrlhf.errors import UserError
    from mindrlhf.weights.convert import export_hf, random_hf_weights
    from mindrlhf.weights.hf import read_json_object

    path = Path(arguments.config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"--config {arguments.config} does not exist: give a config.json")
    hf_config = read_json_object(path)
    export_hf(
        random_hf_weights(hf_config, arguments.seed),
        hf_config,
        arguments.output,
        dtype=arguments.dtype or "float32",
        tokenizer_dir=arguments.tokenizer,
    )
    print(f"wrote {arguments.output}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    import json

    from mindrlhf.weights.directories import describe_directory

    text = describe_directory(arguments.source)
    print(json.dumps(dict(line.split(maxsplit=1) for line in text.splitlines()), indent=1) if arguments.json else text)
    return 0
