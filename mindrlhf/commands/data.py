"""``mindrlhf data``: build prompt files and show what is in them, and fetch data sets from hubs."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from mindrlhf.commands.vocabulary import add_template_options, allow_json, model_directory, print_json
from mindrlhf.hub.cache import DATASETS
from mindrlhf.system.terminal import visible

NUM_SHOWN_IDS = 32
MAX_SHOWN_NAMES = 12


def register(subparsers) -> None:
    """Add ``data build``, ``data show`` and ``data get``."""
    parser = subparsers.add_parser("data", help="build prompt files and look into them")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _register_build(actions)
    show = actions.add_parser("show", help="print the header and the first records of a prompt file")
    show.add_argument("file", metavar="FILE")
    show.add_argument("--num", type=int, default=3, metavar="N", help="records to print (default: 3)")
    show.add_argument(
        "--tokenizer",
        type=model_directory,
        metavar="DIR",
        help="decode with this tokenizer, which must be the file's own",
    )
    allow_json(show)
    show.add_argument("--images", metavar="DIR", help="write the images of these records there, as PNG")
    show.set_defaults(run=run_show)
    summary = "fetch a data set from Hugging Face or ModelScope, or make one of reasoning-gym"
    examples = "openai/gsm8k, or reasoning-gym:chain_sum"
    get = register_get(actions, DATASETS, summary, examples)
    get.add_argument("--size", type=int, default=1000, metavar="N", help="records that are made (default: 1000)")
    get.add_argument("--seed", type=int, default=0, metavar="N", help="of the records that are made (default: 0)")


def register_get(actions, kind: str, summary: str, example: str) -> argparse.ArgumentParser:
    """Add ``get``, which fetches what is of a ``kind``, and return its parser."""
    get = actions.add_parser("get", help=summary)
    get.add_argument("name", metavar="OWNER/NAME", help=f"name on the hub, such as {example}")
    get.add_argument(
        "--from",
        dest="hub",
        choices=("huggingface", "modelscope"),
        default="huggingface",
        help="which hub (default: huggingface)",
    )
    get.add_argument("--revision", default="", metavar="NAME", help="branch, tag or commit (default: the hub's)")
    get.add_argument("--output", default="", metavar="DIR", help="put it there (default: into the hub's cache)")
    get.set_defaults(run=run_get, kind=kind, says="fetching")
    return get


def _register_build(actions) -> None:
    build = actions.add_parser("build", help="turn JSONL, JSON or Parquet files into a MindRecord prompt file")
    build.add_argument("--input", nargs="+", required=True, metavar="FILE", help=".jsonl, .json or .parquet")
    build.add_argument("--output", required=True, metavar="FILE", help="the MindRecord file to write")
    build.add_argument(
        "--tokenizer", type=model_directory, required=True, metavar="DIR", help="Hugging Face directory"
    )
    build.add_argument(
        "--handler",
        default="gsm8k",
        metavar="NAME",
        help="gsm8k (default), deepscaler, dapo_math_17k, orca_pairs, ultrafeedback, hh_rlhf, trl, geo3k, verl or "
        "map_keys",
    )
    keys = "for map_keys; also answer, response, rejected, verifier, images"
    build.add_argument("--map", type=parse_key_map, default={}, metavar="question=KEY,...", help=keys)
    build.add_argument(
        "--keep",
        default="",
        metavar="[NAME=]KEY,...",
        help="columns to keep for rewards, tools and environments, which get them by name",
    )
    build.add_argument(
        "--template",
        default="chat",
        metavar="NAME",
        help="chat (default: the tokenizer's own), plain, r1, the name of one of the tokenizer's own, or a Jinja file",
    )
    add_template_options(build)
    build.add_argument("--system", metavar="TEXT", help="system prompt in place of the template's own")
    build.add_argument(
        "--task",
        choices=("prompts", "sft", "preference"),
        default="prompts",
        help="sft stores a response too, preference two",
    )
    build.add_argument("--max-prompt-length", type=int, required=True, metavar="N", help="tokens; longer are dropped")
    build.add_argument(
        "--max-length", type=int, metavar="N", help="for sft and preference: tokens of prompt + response"
    )
    build.add_argument("--processes", type=int, metavar="N", help="processes that encode (default: one per core)")
    _add_choices_of_records(build)
    allow_json(build)
    build.add_argument(
        "--min-pixels", type=int, metavar="N", help="of an image once resized (default: preprocessor_config.json's)"
    )
    build.add_argument("--max-pixels", type=int, metavar="N", help="likewise; 784 pixels are one token of Qwen2.5-VL")
    build.add_argument(
        "--image-root", metavar="DIR", help="where image files lie that the data names (default: beside the data file)"
    )
    says = None if sys.stderr.isatty() else "building"  # a terminal has a bar
    build.set_defaults(run=run_build, says=says)


def _add_choices_of_records(build) -> None:
    build.add_argument("--skip-bad", action="store_true", help="count bad records instead of stopping at the first")
    build.add_argument(
        "--deduplicate",
        action="store_true",
        help="leave out records that equal an earlier one: prompt, answer, responses, kept columns",
    )
    build.add_argument(
        "--keep-control-tokens",
        action="store_true",
        help="let <|im_end|> and the like in the data become tokens (default: escaped with a space, with a warning)",
    )
    build.add_argument(
        "--own-helpers", action="store_true", help="take unit tests that need code_execution.allow_own_helpers"
    )


def parse_key_map(text: str) -> dict[str, str]:
    """Return ``{"question": "q", "answer": "a"}`` for ``question=q,answer=a``."""
    pairs = [item.partition("=") for item in text.split(",")]
    for name, equals, key in pairs:
        if not (name and equals and key):
            raise argparse.ArgumentTypeError(f"expected question=KEY,answer=KEY, got {text!r}")
    return {name: key for name, _, key in pairs}


def run_build(arguments) -> int:
    """Build a prompt file and print what became of the records."""
    from mindrlhf.data.build import build_prompts
    from mindrlhf.data.handlers import parse_columns

    report = build_prompts(
        arguments.input,
        arguments.output,
        arguments.tokenizer,
        handler=arguments.handler,
        key_map=arguments.map,
        template=arguments.template,
        system=arguments.system,
        task=arguments.task,
        max_prompt_length=arguments.max_prompt_length,
        max_length=arguments.max_length,
        num_workers=arguments.processes,
        skip_bad=arguments.skip_bad,
        keep_control_tokens=arguments.keep_control_tokens,
        min_pixels=arguments.min_pixels,
        max_pixels=arguments.max_pixels,
        image_root=arguments.image_root,
        template_options=dict(arguments.template_option),
        columns=parse_columns(arguments.keep),
        deduplicate=arguments.deduplicate,
        allow_own_helpers=arguments.own_helpers,
    )
    if arguments.json:
        print_json(asdict(report))
    else:
        print_report(report)
    if report.num_with_control_tokens:
        what = (
            "kept: they can end a turn and forge another"
            if arguments.keep_control_tokens
            else "escaped with a space, as in < |im_end|> (--keep-control-tokens keeps them)"
        )
        share = f"{report.num_with_control_tokens} of {report.header.num_read} records"
        print(f"warning: control tokens in the texts of {share}, {what}", file=sys.stderr)
    for line in look_warnings(report.header.look):
        _print(f"warning: {line}", file=sys.stderr)
    return 0


def _print(text: str, **options) -> None:
    print(visible(text), **options)


def look_warnings(look: dict) -> list[str]:
    """Return what of the data as a whole wants a look before a run, a line each."""
    lines = []
    if contradictory := look.get("contradictory"):
        lines.append(
            "prompts with answers that contradict each other, or are spelled in two ways: "
            f"{contradictory['prompts']:,}, such as {contradictory['example']}"
        )
    if look.get("no_answers"):
        unread = f" (unused columns: {_counted(look['unread'])})" if "unread" in look else ""
        lines.append(
            f"no record has an answer{unread}: verifiers that compare with one refuse the file; name its field as in "
            "--handler map_keys --map question=QUESTION,answer=ANSWER"
        )
    if unrendered := look.get("template"):
        lines.append(f"not in the prompts: {_counted(unrendered)}: of so many records the template leaves it out")
    return lines


def _counted(counts: dict[str, int], limit: int = MAX_SHOWN_NAMES) -> str:
    shown = [f"{name} ({count:,})" for name, count in list(counts.items())[:limit]]
    return ", ".join([*shown, *([f"{len(counts) - limit} more"] if len(counts) > limit else [])])


def print_report(report) -> None:
    """Print a ``BuildReport`` in a few lines."""
    header = report.header
    duplicates = f", {header.look['deduplicated']} duplicates" if "deduplicated" in header.look else ""
    _print(
        f"records    {header.num_kept} kept of {header.num_read} read "
        f"({header.num_too_long} too long, {header.num_bad} bad{duplicates})"
    )
    for example in report.bad_examples:
        _print(f"  bad      {example}")
    _print_look(header.look, header.num_bad)
    _print(f"begin      {report.begin}")
    if images := header.images:
        _print(
            f"images     {images.num_images} in {images.num_records} records, at most {images.most_images} in one and "
            f"{images.most_tokens} tokens each"
        )
    _print(f"time       {report.elapsed_s:.1f} s")
    _print(f"written    {report.path}")


def _print_look(look: dict, num_bad: int) -> None:
    """Print what stands out in the data as a whole, in a line for each kind."""
    if num_bad and len(look.get("bad", {})) > 1:
        _print(f"  bad, why {_counted(look['bad'])}")
    if repeated := look.get("repeated"):
        _print(
            f"repeated   {repeated['prompts']:,} prompts are repeated ({repeated['records']:,} records); "
            f"{repeated['first']} most often, {repeated['most']:,} times"
        )
    if duplicates := look.get("duplicates"):
        what = "records are exact duplicates of earlier ones (--deduplicate leaves them out)"
        _print(f"           {duplicates:,} {what}")
    if without := look.get("without_answer"):
        _print(f"answers    missing in {without:,} records")
    if "notes" in look:
        _print(f"answers    {_counted(look['notes'])}")
    if "unread" in look:
        _print(f"left out   columns {_counted(look['unread'])} (--keep keeps them for rewards)")
    for name in ("prompt", "response"):
        if shares := look.get(f"{name}_tokens"):
            _print(f"{name + ' len':10} {', '.join(f'{share} {length}' for share, length in shares.items())} tokens")


def run_show(arguments) -> int:
    """Print the header and the first records of a prompt file, decoded when the tokenizer is given."""
    from mindrlhf.data.mindrecord import PromptFile
    from mindrlhf.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    prompts = PromptFile.open(arguments.file, tokenizer.fingerprint if tokenizer else None)
    records = prompts.read(range(min(arguments.num, len(prompts))))
    if arguments.json:
        found = {"header": asdict(prompts.header), "records": [_plain(record, tokenizer) for record in records]}
        return print_json(found)
    for name, value in asdict(prompts.header).items():
        if name == "template_source" and value:
            value = f"{len(value)} characters (--json prints them)"
        if name != "look" and value not in ("", (), {}, None):
            _print(f"{name:22} {', '.join(map(str, value)) if isinstance(value, tuple) else value}")
    _print_look(prompts.header.look, prompts.header.num_bad)
    for number, record in enumerate(records):
        _print(f"\n--- {record.source_id}")
        _print(f"answer    {record.answer}")
        for name, value in record.extra.items():
            _print(f"{name:9} {json.dumps(value, ensure_ascii=False)}")
        _print_ids("prompt", record.prompt_ids, tokenizer, is_prompt=True)
        _print_images(record, number, arguments.images)
        if len(record.response_ids):
            _print_ids("response", record.response_ids, tokenizer)
        if len(record.rejected_ids):
            _print_ids("rejected", record.rejected_ids, tokenizer)
    return 0


def _plain(record, tokenizer) -> dict:
    """Return a record as JSON values: token ids as lists, and their texts when there is a tokenizer; of images their
    heights and widths."""
    found = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in asdict(record).items()}
    found["image_files"] = [image.shape[:2] for image in record.images]
    for name in ("prompt", "response", "rejected") if tokenizer else ():
        found[f"{name}_text"] = tokenizer.decode(getattr(record, f"{name}_ids"), skip_special_tokens=False)
    return found


def _print_images(record, number: int, directory: str | None) -> None:
    """Print the sizes of a record's images; write them into ``directory`` if it is given."""
    for image_number, (pixels, file) in enumerate(zip(record.images, record.image_files)):
        where = ""
        if directory is not None:
            path = Path(directory, f"{number:06d}_{image_number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file)
            where = f"  {path}"
        _print(f"image     {pixels.shape[1]} x {pixels.shape[0]} pixels{where}")


def _print_ids(label: str, ids, tokenizer, is_prompt: bool = False) -> None:
    from mindrlhf.data.pictures.reader import shown_ids

    _print(f"{label:9} {len(ids)} tokens")
    if tokenizer:
        _print(tokenizer.decode(shown_ids(ids, tokenizer) if is_prompt else ids, skip_special_tokens=False))
    else:
        rest = " ..." if len(ids) > NUM_SHOWN_IDS else ""
        _print(" ".join(map(str, ids[:NUM_SHOWN_IDS])) + rest)


def run_get(arguments: argparse.Namespace) -> int:
    """Fetch a model or a data set and print its directory."""
    from mindrlhf.hub.cache import fetch

    if arguments.kind == DATASETS and arguments.name.startswith("reasoning-gym:"):
        return _make_tasks(arguments)
    options = {"revision": arguments.revision, "output": arguments.output}
    directory = fetch(arguments.name, arguments.kind, arguments.hub, **options)
    print(directory)
    return 0


def _make_tasks(arguments: argparse.Namespace) -> int:
    from mindrlhf.rewards.verifiers.reasoning_gym import make_tasks
    from mindrlhf.system.files import whole_file

    name = arguments.name.partition(":")[2]
    path = Path(arguments.output or ".") / f"{name}-{arguments.size}-seed{arguments.seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, "w") as file:
        for record in make_tasks(name, arguments.size, arguments.seed):
            file.write(json.dumps(record) + "\n")
    print(
        f"{arguments.name}: {arguments.size} records; build them with --handler map_keys --map "
        "question=question,answer=answer, and score them with reasoning_gym_score",
        file=sys.stderr,
    )
    print(path)
    return 0
