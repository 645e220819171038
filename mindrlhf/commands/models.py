"""``mindrlhf models``: fetch models from hubs, and show what the files of one say."""

import argparse

from mindrlhf.commands.data import register_get
from mindrlhf.commands.vocabulary import allow_json, model_directory, print_json
from mindrlhf.hub.cache import MODELS
from mindrlhf.system.terminal import visible


def register(subparsers) -> None:
    """Add ``models get`` and ``models inspect``."""
    models = subparsers.add_parser("models", help="fetch models from Hugging Face or ModelScope, and look into them")
    actions = models.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "fetch a model; its name then stands wherever a model directory does"
    register_get(actions, MODELS, summary, "Qwen/Qwen2.5-7B-Instruct")
    summary = "what a model's files say of end tokens, bos, padding and templates, and which file"
    inspect = actions.add_parser("inspect", help=summary)
    inspect.add_argument("directory", type=model_directory, metavar="DIR")
    allow_json(inspect)
    inspect.set_defaults(run=run_inspect)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print each value, the file that it is from, and below it what contradicts it."""
    from dataclasses import asdict

    from mindrlhf.data.metadata import read_metadata

    facts = read_metadata(arguments.directory)
    if not any(fact.value == "none" for fact in facts if fact.name in ("tokenizer", "template")):
        facts += _conversation_facts(arguments.directory)
    if arguments.json:
        return print_json([asdict(fact) for fact in facts])
    width = max(len(fact.value) for fact in facts if len(fact.value) <= 60)
    for fact in facts:
        print(visible(f"{fact.name:17} {fact.value:{width}}  {fact.source}".rstrip()))
        print("".join(f"{'':17} ! {visible(note)}\n" for note in fact.notes), end="")
    return 0


def _conversation_facts(directory: str) -> list:
    """The text that the chat template makes of a conversation."""
    from mindrlhf.data.handlers import Example, Message, RecordError
    from mindrlhf.data.metadata import Fact
    from mindrlhf.data.templates import CHAT, load_template
    from mindrlhf.data.tokenizers import load_tokenizer
    from mindrlhf.errors import UserError
    from mindrlhf.tools.calls import dialect_of

    try:
        tokenizer = load_tokenizer(directory)
        template = load_template(CHAT, tokenizer)
        text = template.render(Example((Message("user", "MINDRLHF-QUESTION"),), ""))
    except (UserError, RecordError) as error:
        return [Fact("generation prompt", "none", "", (f"refused: {error}",))]
    source = tokenizer.template_files.get("default", "")
    prompt = text.rpartition("MINDRLHF-QUESTION")[2]
    for end in (tokenizer.chat_end_token, tokenizer.eos_token, "\n"):
        prompt = prompt.removeprefix(end or "")
    bos = tokenizer.bos_token
    notes = ()
    if tokenizer.bos_prefix and not text.startswith(tokenizer.bos_prefix):
        notes = (f"the tokenizer puts {tokenizer.bos_prefix!r} before a text, and the template does not",)
    elif bos and text.startswith(bos * 2):
        notes = (f"the template begins with {bos!r} twice",)
    return [
        Fact("generation prompt", repr(prompt), source, notes),
        Fact("calls of tools", dialect_of(template.source), source),
    ]
