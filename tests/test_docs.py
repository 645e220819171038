"""The pages tell the truth where a machine can check it: links, commands, keys, metrics, arithmetic."""

import argparse
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from page_blocks import PAGES, ROOT, blocks, commands

from mindrlhf.cli import _parse, build_parser, main
from mindrlhf.config.parse import dotted_keys
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.data.packing import TokenSequence
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.launch.launch import _CLUSTER_DEFAULTS
from mindrlhf.observe import metrics as measure
from mindrlhf.observe.timing import throughput
from mindrlhf.rewards.judges.accounting import COUNTED
from mindrlhf.rewards.registry import CONTEXT_KEYWORDS
from mindrlhf.rollout.replicas import PYTHON_VARIABLE
from mindrlhf.training.batch import RowOptions, make_batch
from mindrlhf.training.loop.guards import MAX_SAVED_BATCHES

CONFIGS = (GrpoConfig, SftConfig, DpoConfig, RewardModelConfig)
KEYS = {dotted for config in CONFIGS for dotted, _, _ in dotted_keys(config)}
SECTIONS = {dotted.partition(".")[0] for dotted in KEYS}
# What pages name as a user's own.
NOT_OURS = {"path/to/file.py", "tools/search.py", "tools/search_server.py", "games/guess.py"}
NOT_OURS |= {"agents/solve.py", "agents/solve.sh"}
OF_A_RECORD = {"reward_model.ground_truth"}  # verl's data sets
FILE_ENDINGS = {"json", "jsonl", "md", "mindrecord", "py", "safetensors", "sh", "svg", "yaml"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _text(page: Path) -> str:
    return re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def _prose(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", _text(page), flags=re.DOTALL | re.MULTILINE)


def _command_lines(page: Path) -> list[list[str]]:
    """Words of every command in a code block, continued lines joined."""
    return [words for block in blocks(page) for words in commands(block)]


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _anchors(page: Path) -> set[str]:
    return set(map(_anchor, re.findall(r"^#+ (.*)$", _prose(page), flags=re.MULTILINE)))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in _anchors(linked), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_parse(page, capsys):
    for words in _command_lines(page):
        if words[0] != "mindrlhf":
            continue
        try:
            arguments = _parse(words[1:])
        except SystemExit:
            pytest.fail(f"{shlex.join(words)}: {capsys.readouterr().err}")
        assert callable(arguments.run)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_named_in_prose_exist(page):
    (subparsers,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for command in re.findall(r"`mindrlhf ([a-z-]+)", _prose(page)):
        assert command in subparsers.choices, f"there is no command mindrlhf {command}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_keys_exist(page):
    mentioned = re.findall(r"(?<![\w./*])([a-z_]+)\.([a-z_0-9]+)(?![\w/(])", _text(page))
    for section, key in mentioned:
        if section in SECTIONS and key not in FILE_ENDINGS and f"{section}.{key}" not in OF_A_RECORD:
            assert f"{section}.{key}" in KEYS, f"there is no key {section}.{key}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_named_in_commands_exist(page):
    own = re.compile(r"(?:examples|model_configs|scripts)/\S+")
    for words in _command_lines(page):
        for word in words:
            for path in own.findall(word.partition("=")[2] or word):
                file = ROOT / path.partition(":")[0]
                assert file.exists() or path == "scripts/quickstart.sh", f"{path} does not exist"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=_name)
def test_sources_and_tests_named_in_prose_exist(page):
    """Names in capitals stand for any."""
    for path, test in re.findall(r"`(?:mindrlhf/)?((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)(?:::(\w+))?", _prose(page)):
        if path in NOT_OURS:
            continue
        (file, *_) = [*filter(Path.is_file, (ROOT / path, ROOT / "mindrlhf" / path)), None]
        assert file is not None, f"{path} does not exist"
        assert not test or f"def {test}(" in file.read_text(encoding="utf-8"), f"{path} has no {test}"


@cache
def _documented_metrics() -> set[str]:
    rows = [line for line in _text(ROOT / "docs" / "metrics.md").splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def _reported_metrics() -> set[str]:
    rewards, ones = np.array([0.0, 1.0]), np.ones(2)
    reported = measure.combine_metrics(
        measure.reward_metrics(rewards, np.zeros(2, int), {"<verifier>": rewards}),
        measure.length_metrics(ones, ones, ones > 1),
        measure.rollout_diff_metrics(ones, ones, ones),
        measure.rollout_ratio_metrics([ones], [ones]),
        measure.packing_metrics([1], [8]),
    )
    # A metric or a stage that comes into another module of the loop is found as well.
    modules = {
        path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "mindrlhf" / "training" / "loop").rglob("*.py")
    }
    loop = "".join(modules.values())
    stages = re.findall(r'stage\("(\w+)"\)', loop)
    timings = {f"timing/{stage}": 1.0 for stage in stages} | {"timing/all": 1.0}
    rates = throughput(
        timings, mean_prompt_length=1, mean_response_length=1, num_prompts=1, num_samples=1, world_size=1
    )
    update = re.search(r"def update_metrics.*?(?=\ndef )", modules["report"], flags=re.DOTALL)[0]
    others = set(re.findall(r'^ +"([\w/]+)": ', update, flags=re.MULTILINE)) | {"reward/failures"}
    others |= set(re.findall(r'metrics\["([\w/]+)"\] = ', loop))
    others |= set(re.findall(r'"(value/\w+)"', modules["value_function"]))
    others |= set(re.findall(r'"(guard/\w+)"', loop)) | {f"judge/{name}" for name in COUNTED}
    others |= set(re.findall(r'"(samples/\w+)"', modules["leftover"]))
    others |= set(re.findall(r'"((?:async|packing|segments|staleness|timing)/\w+)": ', loop))
    tools = (ROOT / "mindrlhf" / "rollout" / "conversations.py").read_text(encoding="utf-8")
    others |= set(re.findall(r'"((?:agents|tools|turns)/\w+)": ', tools))
    others |= {name.format(role="<role>") for name in re.findall(r'f"(agents/[^"]+)"', tools)}
    others |= {name.format(name="<environment>") for name in re.findall(r'f"(environments/[^"]+)"', tools)}
    assert {"loss", "grad_norm", "recompiles"} <= others
    heldout = (ROOT / "mindrlhf" / "evaluation" / "heldout.py").read_text(encoding="utf-8")
    of_sets = re.search(r"def set_metrics.*?(?=\n    def )", heldout, flags=re.DOTALL)[0]
    for text, part in ((heldout.replace(of_sets, ""), "<verifier>"), (of_sets, "<set>")):
        others |= {re.sub(r"\{\w+\}", part, name) for name in re.findall(r'f?"(eval/[^"]+)"', text)}
    teachers = (ROOT / "mindrlhf" / "training" / "distillation" / "assignment.py").read_text(encoding="utf-8")
    others |= {name.format(source="<source>") for name in re.findall(r'f"(teacher/[^"]+)"', teachers)}
    return set(reported) | set(timings) | set(rates) | others


def test_every_metric_is_documented_and_no_other():
    documented, reported = _documented_metrics(), _reported_metrics()
    assert documented == reported, f"undocumented: {reported - documented}; unknown: {documented - reported}"


def test_the_worked_example_of_the_batch_arithmetic():
    chunk_size, num_rollouts, num_generations, num_minibatches, micro_batch_size, num_ranks = 8, 2, 8, 2, 4, 2
    num_samples = chunk_size * num_rollouts * num_generations
    per_update = num_samples // num_minibatches
    token_ids = np.zeros(128, np.int32)
    sequences = [TokenSequence(token_ids, token_ids, {}) for _ in range(per_update)]
    batch = make_batch(sequences, RowOptions((1024,), micro_batch_size, num_ranks, pack=True))
    num_rows = sum(rows.num_rows for rows in batch.micro_batches)
    assert all((rows.segment_ids > 0).all() for rows in batch.micro_batches), "no sequence is padding"
    assert (num_samples, per_update, num_rows, len(batch.micro_batches)) == (128, 64, 16, 4)
    per_rank = len(batch.micro_batches) // num_ranks
    num_steps = -(-1000 // (chunk_size * num_rollouts))
    page = _text(ROOT / "docs" / "concepts.md")
    assert f"16 * 8 = {num_samples} samples in a step" in page
    assert f"{num_minibatches} updates of {per_update} samples" in page
    assert f"4 samples fit a packed sequence, so an update has {num_rows} of them" in page
    division = f"{num_rows} / {micro_batch_size} = {len(batch.micro_batches)} micro-batches"
    assert f"{division}, {per_rank} for each rank" in page
    assert f"1,000 / 16, rounded up: {num_steps} steps" in page


# What the pages say of these things in the field's terms; the patterns are what they were called here once.
FIELD_TERMS = {
    r"(row lengths?|(packed|padding|plain) rows?|rows of [\d,]+( tokens)?)": "packed sequences, sequence length",
    r"image rows?": "image embeddings",
    r"([\d,]+|sampled|teacher's|other) words?|likeliest": "token, top-k tokens",
    r"cut": "sharded of a model, truncated of a response, divided of a batch",
    r"(models?|critics?|one) that (does not |do not )?sees?": "vision-language model",
    r"ahead": "off-policy (by k steps)",
    r"spans?|spanning": "segment of a response, bucket of parameters, multi-node server",
    r"exchang\w*": "weight sync, all-to-all",
    r"carriers?": "transport",
    r"boards?|seal(s|ed)?": "weight buffer, committed",
    r"doors?|guests?|keepers?|members?": "listener, rollout-only nodes, supervisor, peer",
    r"strangers?": "unauthenticated peer",
    r"leash": "limits",
    r"rooms?|floors?|house": "package, layer",
    r"pretend\w*": "simulated",
    r"stale": "off-policy",
    r"left ?over": "carried over",
    r"without signal": "zero-advantage",
    r"rehears\w*|lowering": "CPU emulation of compiled graphs",
    r"key data": "dump of msprobe",
    r"course": "metrics, schedule",
}
# The same words where they mean what they mean elsewhere; `code` may hold any name, old keys and metrics too.
ORDINARY = (r"of course", r"cut off", r"stale prefix cache", r"spans nodes")


def _private_words(text: str) -> list[str]:
    """Return what a text says in words that are not the field's, with the words to take instead."""
    prose = re.sub(r"^```.*?^```|`[^`]*`", " ", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)  # where links lead
    prose = re.sub("|".join(ORDINARY), " ", re.sub(r"\s+", " ", prose), flags=re.IGNORECASE)
    return [
        f"{found[0]}: {term}"
        for pattern, term in FIELD_TERMS.items()
        for found in re.finditer(rf"(?<![\w-])({pattern})(?![\w-])", prose, flags=re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=_name)
def test_pages_use_the_terms_of_the_field(page):
    assert _private_words(_text(page)) == []


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    below = [one for action in parser._subparsers._group_actions for one in action.choices.values()]
    return [parser, *(found for one in below for found in (_parsers(one) if one._subparsers else [one]))]


def test_the_help_of_commands_uses_the_terms_of_the_field():
    helps = {parser.prog: parser.format_help() for parser in _parsers(build_parser())}
    assert len(helps) > 25 and "mindrlhf weights shard" in helps
    assert {prog: words for prog, text in helps.items() if (words := _private_words(text))} == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Rows of 128 tokens are cut by the sampled\nword.", 3),
        ("An answer that was cut off, of course; see `rollout.ahead` and a server that spans nodes.", 0),
        ("```yaml\nrollout: {ahead: 1}\n```\nSampling ahead", 1),
        ("The rows of a table, five different words, and a keyboard.", 0),
    ],
)
def test_what_counts_as_a_term_of_the_field(text, number):
    assert len(_private_words(text)) == number


SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "mindrlhf").rglob("*.py"))
SCRIPTS = "\n".join(
    path.read_text(encoding="utf-8") for path in (*ROOT.glob("scripts/*.*"), *ROOT.glob("examples/**/*.py"))
)
# Files of others: of Hugging Face's directories, data sets and clusters; what a page tells its reader to write.
OTHERS_FILES = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "preprocessor_config.json", "chat_template.json", "vocab.json", "merges.txt", "model.safetensors",
    "trace_view.json", "a.jsonl", "code.jsonl", "tools.json", "system.txt", "hosts.txt", "my_run.yaml",
    "problems.jsonl", "my_rewards.py", "train.jsonl", "test.jsonl", "judge.sqlite", "plan.json", "plan.svg",
    "ours.yaml",
}  # fmt: skip
# Options of other programs.
OTHERS_OPTIONS = {"--device", "--shm-size", "--no-build-isolation", "--no-kill", "--signal", "--join", "--requeue"}


def _code(page: Path) -> list[str]:
    """What stands in backticks in the prose of a page."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"\n(?! *\n)", " ", _prose(page)))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_metrics_named_in_prose_are_reported(page):
    documented = _documented_metrics()
    groups = {name.partition("/")[0] for name in documented if "/" in name} - {"tools", "eval", "samples"}
    patterns = [re.sub("<[a-z]+>", r"[\\w.-]+", name) for name in documented]
    for name in _code(page):
        if re.fullmatch(r"[a-z_]+/[a-z_0-9@<>/]+", name) and name.partition("/")[0] in groups:
            is_reported = name in documented or any(re.fullmatch(pattern, name) for pattern in patterns)
            assert is_reported, f"there is no metric {name}"


@cache
def _options() -> set[str]:
    parsers = _parsers(build_parser())
    options = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    return options | OTHERS_OPTIONS | set(re.findall(r"(?<![\w-])--[a-z_][\w-]+", SCRIPTS))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_options_named_in_prose_exist(page):
    """Of this command and of the scripts; lines of other programs may name theirs."""
    others = re.compile(r"\b(pip|docker|msprobe|mlflow|pytest|srun|sbatch|swanlab|wandb) ")
    for text in _code(page):
        if not others.search(text):
            unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) - _options()
            assert unknown == set(), f"there is no option {unknown}"


@cache
def _names_in_the_repository() -> set[str]:
    folders = ("docs", "docker", "examples", "mindrlhf", "model_configs", "scripts", "tests")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")} | {"setup.py", "pytest.ini"}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_named_in_prose_are_written_or_there(page):
    """Names of files without a folder: the product's source has each, or the repository."""
    for name in _code(page):
        if re.fullmatch(r"[a-z_0-9]+\.(jsonl?|html|svg|db|log|md|sh|py|yaml|txt)", name):
            numbered = re.match(r"([a-z_]+_)\d+", name)  # worker_0.log is f"worker_{rank}.log" there
            is_written = name in SOURCES or (numbered and f"{numbered[1]}{{" in SOURCES)
            assert is_written or name in _names_in_the_repository() | OTHERS_FILES, f"nothing writes {name}"


def test_exit_codes_of_commands(tmp_path, capsys, monkeypatch):
    """What install.md, plan.md, faq.md, rewards.md and cluster.md say of them, by commands that take no time."""
    monkeypatch.chdir(ROOT)
    plan = ["plan", "examples/grpo/qwen2_5_7b_8npu.yaml", "--workers", "8"]
    (tmp_path / "mine.py").write_text("def wrong(completion, answer):\n    raise ValueError(1)\n")
    codes = {
        "fits": main(plan),
        "does not fit": main([*plan, "--device-memory", "20GB"]),
        "of a mistake": main([*plan, "optimizer.start_lr=x"]),
        "something must be mended": main(["rewards", "check", f"{tmp_path}/mine.py:wrong"]),
        "no config": main(["config", "check", str(tmp_path / "none.yaml")]),
    }
    assert codes == {
        "fits": 0,
        "does not fit": 1,
        "of a mistake": UserError.exit_code,
        "something must be mended": 1,
        "no config": UserError.exit_code,
    }
    assert "The exit code is 0 when the run fits, 1 when it does not, 2 when" in _flat(ROOT / "docs" / "plan.md")
    assert "Its exit code is 1 when no run is possible" in _flat(ROOT / "docs" / "install.md")
    assert f"with exit code {UserError.exit_code}" in _flat(ROOT / "docs" / "cluster.md")
    assert "`mindrlhf diff`: the runs differ; `mindrlhf plan`: it does not fit" in _flat(ROOT / "docs" / "faq.md")


def _flat(page: Path) -> str:
    return " ".join(_text(page).split())


def _words_to_read(target: str) -> int:
    """The words of a page, or of the section that a link names; comments aside."""
    path, _, anchor = target.partition("#")
    page = (ROOT / "docs" / path).resolve()
    if not anchor:
        return len(_text(page).split())
    words, level, is_code = 0, 0, False
    for line in _text(page).splitlines():
        is_code ^= line.lstrip().startswith("```")
        if not is_code and (heading := re.match(r"(#+) (.*)", line)):
            if level and len(heading[1]) <= level:
                break
            level = level or len(heading[1]) * (_anchor(heading[2]) == anchor)
        words += len(line.split()) if level else 0
    assert level, f"{target}: no such heading"
    return words


@pytest.mark.parametrize(("path", "most"), [("on one machine", 2500), ("on a cluster", 6000)])
def test_what_has_to_be_read_is_short(path, most):
    """docs/README.md names the pages to read for GRPO on one's own data, in their order."""
    index = _text(ROOT / "docs" / "README.md")
    (line,) = re.findall(rf"^\*\*GRPO on your own data, {path}\*\*:(.*?)\n\n", index, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)]+)\)", line)
    words = {target: _words_to_read(target) for target in targets}
    if path == "on a cluster":
        (first,) = re.findall(r"on one machine\*\*:(.*?)\n\n", index, flags=re.DOTALL)
        words |= {target: _words_to_read(target) for target in re.findall(r"\]\(([^)]+)\)", first)}
    assert len(targets) > 2 and sum(words.values()) <= most, words


# In words, of which one reads 230 a minute; evidence, and pages that are generated, are not for reading through.
FIVE_MINUTES = 1300
READ_THROUGH = ("install", "tutorial", "concepts", "data", "rewards", "weights", "cluster")


def test_the_pages_to_begin_with_take_five_minutes_each():
    words = {name: _words_to_read(f"{name}.md") for name in READ_THROUGH}
    assert max(words.values()) <= FIVE_MINUTES, words


def test_every_page_is_in_the_index():
    index = _text(ROOT / "docs" / "README.md")
    listed = set(re.findall(r"\]\(([\w/]+\.md)[)#]", index))
    assert {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"} <= listed
    groups = re.findall(r"^## (\w+)$", index, flags=re.MULTILINE)
    assert groups == ["Start", "Use", "Reference"]


def test_exit_codes_in_the_faq():
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", _text(ROOT / "docs" / "faq.md"), flags=re.MULTILINE))
    assert "you can fix it" in rows[str(UserError.exit_code)]
    assert "failed while the run was under way" in rows[str(RunFailure.exit_code)]


def test_numbers_and_names_in_the_faq():
    page = _text(ROOT / "docs" / "faq.md")
    assert f"The first {MAX_SAVED_BATCHES} batches are saved" in page
    assert f"MS_NODE_TIMEOUT={_CLUSTER_DEFAULTS['MS_NODE_TIMEOUT']}" in page
    for name in (*CONTEXT_KEYWORDS, "HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC", PYTHON_VARIABLE):
        assert name in page, name
    assert "are planned" not in page and "not yet" not in page  # what will be is not for this page


@pytest.fixture(scope="module")
def wrap_docs():
    specification = importlib.util.spec_from_file_location("wrap_docs", ROOT / "scripts" / "wrap_docs.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_prose_is_wrapped_at_110_characters(wrap_docs):
    """`python scripts/wrap_docs.py` makes it so; docs/config.md is generated so."""
    pages = [*wrap_docs.pages(), ROOT / "docs" / "config.md"]
    assert len(pages) > 25 and wrap_docs.WIDTH == 110
    assert [_name(page) for page in pages if wrap_docs.wrap(text := page.read_text(encoding="utf-8")) != text] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a " * 60 + "\n", " ".join(["a"] * 55) + "\n" + "a a a a a\n"),
        ("- " + "b " * 60 + "\n  c\n", "- " + " ".join(["b"] * 54) + "\n  b b b b b b c\n"),
        ("```\n" + "x " * 80 + "\n```\n", "```\n" + "x " * 80 + "\n```\n"),
        ("| " + "cell " * 40 + "|\n", "| " + "cell " * 40 + "|\n"),
        ("short\nlines stay\n", "short\nlines stay\n"),
        ("w" * 108 + " - not a list\n", "w" * 108 + " -\nnot a list\n"),
    ],
)
def test_wrapping_keeps_what_markdown_means(wrap_docs, text, expected):
    assert wrap_docs.wrap(text) == expected
