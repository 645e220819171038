"""`mindrlhf weights`: convert, inspect and make model directories."""

import argparse
from pathlib import Path


def register(subparsers) -> None:
    """Add the `weights` command."""
    parser = subparsers.add_parser("weights", help="convert, inspect and make model directories")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    to_mindformers = actions.add_parser("import", help="Hugging Face directory to MindFormers names and layouts")
    to_mindformers.add_argument("source", metavar="HF_DIR")
    to_mindformers.set_defaults(run=_import)

    to_hugging_face = actions.add_parser("export", help="MindFormers directory back to Hugging Face")
    to_hugging_face.add_argument("source", metavar="MF_DIR")
    to_hugging_face.set_defaults(run=_export)

    random = actions.add_parser("random", help="randomly initialised Hugging Face directory")
    random.add_argument("--config", required=True, metavar="CONFIG_JSON", help="a config.json, or a directory with one")
    random.add_argument("--seed", type=int, default=0)
    random.add_argument("--tokenizer-dir", help="copy the tokenizer files from here")
    random.set_defaults(run=_random)

    for action in (to_mindformers, to_hugging_face, random):
        action.add_argument("--out", required=True, metavar="DIR", help="output directory; must not exist yet")
        action.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="dtype of the files")

    inspect = actions.add_parser("inspect", help="sizes, dtypes and layout of a model directory, checked")
    inspect.add_argument("source", metavar="DIR")
    inspect.set_defaults(run=_inspect)


def _import(arguments: argparse.Namespace) -> int:
    from mindrlhf.weights.convert import import_directory

    import_directory(arguments.source, arguments.out, arguments.dtype)
    print(f"wrote {arguments.out}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from mindrlhf.weights.convert import export_directory

    export_directory(arguments.source, arguments.out, arguments.dtype)
    print(f"wrote {arguments.out}")
    return 0


def _random(arguments: argparse.Namespace) -> int:
    from mindrlhf.errors import UserError
    from mindrlhf.weights.convert import export_hf, random_hf_weights
    from mindrlhf.weights.hf import read_json_object

    path = Path(arguments.config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"--config {arguments.config} does not exist: give a config.json")
    if arguments.seed < 0:
        raise UserError(f"--seed {arguments.seed}: give a seed of 0 or more")
    hf_config = read_json_object(path)
    export_hf(
        random_hf_weights(hf_config, arguments.seed),
        hf_config,
        arguments.out,
        dtype=arguments.dtype or "float32",
        tokenizer_dir=arguments.tokenizer_dir,
    )
    print(f"wrote {arguments.out}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from mindrlhf.weights.convert import describe_directory

    print(describe_directory(arguments.source))
    return 0
