"""A new column of the data reaches rewards, tools, environments and files, from the raw row on, by its name alone."""

import json

import numpy as np
import pytest
import tokenizers as hf
from test_conversations import END, TOKENIZER, Script, call

from mindrlhf.cli import main
from mindrlhf.data.mindrecord import PromptFile, read_identity
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.observe.samples import SampleWriter
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rollout.conversations import ConversationLimits, Conversations, Episodes
from mindrlhf.rollout.samples import Sampler, sample_record
from mindrlhf.rollout.types import Completion, GenerationRequest, SamplingParams
from mindrlhf.tools.environments import check_columns
from mindrlhf.tools.episodes import EpisodePool
from mindrlhf.tools.pool import ToolPool
from mindrlhf.tools.registry import describe, resolve

ROWS = [
    {"question": "one", "answer": "#### 1", "meta": {"shade": 3, "tags": ["x", None]}, "hint": "h"},
    {"question": "two", "answer": "#### 2", "meta": {"shade": 4, "tags": []}},
    {"question": "two one", "answer": "#### 3", "meta": {"shade": None}, "hint": None},
]
KEPT = [{"shade": 3, "all_tags": ["x", None], "hint": "h"}, {"shade": 4, "all_tags": [], "hint": None}]
KEPT += [dict.fromkeys(("shade", "all_tags", "hint"))]
REWARD = """
def by_shade(completion, answer, *, shade, all_tags):
    return (shade or 0) * 10 + len(all_tags or ())
"""


class Replies:
    """Every sample of every prompt is one token."""

    def generate(self, requests, sampling):
        for request in requests:
            for index in range(request.num_samples):
                ids, logprobs = np.array([2], np.int32), np.zeros(1, np.float32)
                yield Completion(request.request_id, index, ids, logprobs, "stop", 1)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    backend = hf.Tokenizer(hf.models.WordLevel({"<eos>": 0, "one": 1, "two": 2}))
    backend.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return directory


def build(directory, tokenizer_dir, *flags, rows=ROWS):
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = directory / "prompts.mindrecord"
    paths = ["--input", directory / "rows.jsonl", "--output", output, "--tokenizer", tokenizer_dir]
    options = ["--template", "plain", "--max-prompt-length", 9, "--processes", 1]
    code = main(["data", "build", *map(str, [*paths, *options, *flags])])
    return output if code == 0 else code


@pytest.fixture
def prompt_file(tokenizer_dir, tmp_path):
    return build(tmp_path, tokenizer_dir, "--keep", "meta.shade,all_tags=meta.tags,hint")


@pytest.fixture
def reward(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    return Selection((f"{tmp_path / 'mine.py'}:by_shade",), (1.0,))


def test_a_file_keeps_columns_and_one_without_them_has_none(prompt_file, tokenizer_dir, tmp_path, capsys):
    opened = PromptFile.open(prompt_file)
    assert [record.extra for record in opened.read(range(3))] == KEPT
    assert opened.header.columns == ("shade", "all_tags", "hint")
    assert main(["data", "show", str(prompt_file)]) == 0
    shown = capsys.readouterr().out
    assert "\nshade     3\nall_tags  [\"x\", null]\nhint      \"h\"\n" in shown
    assert main(["data", "show", "--json", str(prompt_file)]) == 0
    assert [record["extra"] for record in json.loads(capsys.readouterr().out)["records"]] == KEPT
    (tmp_path / "plain").mkdir()
    plain = build(tmp_path / "plain", tokenizer_dir)
    assert read_identity(plain)[0].columns == ()
    assert [record.extra for record in PromptFile.open(plain).read([0])] == [{}]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("meta.shape", "no record has a value in 'meta.shape', which is kept: mend the key"),
        ("prompt", "reward functions know 'prompt' as something else; give it another name, as in own_prompt=prompt"),
        ("answer=hint", "reward functions know 'answer' as something else"),
        ("hint,hint=meta.shade", "two columns are named 'hint'"),
        ("a-b", "column 'a-b' cannot be a parameter's name: give it one, as in level=a-b"),
        ("class=hint", "column 'class=hint' cannot be a parameter's name"),
        ("hint,", "column '' cannot be a parameter's name"),
    ],
)
def test_columns_that_cannot_be_kept_are_one_line(tokenizer_dir, tmp_path, capsys, keep, message):
    assert build(tmp_path, tokenizer_dir, "--keep", keep) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_a_value_that_json_has_no_word_for_is_a_bad_record(tokenizer_dir, tmp_path, capsys):
    rows = [ROWS[0] | {"hint": float("nan")}, ROWS[0]]
    assert build(tmp_path, tokenizer_dir, "--keep", "hint", rows=rows) == 2
    assert "rows.jsonl:1: field 'hint' cannot be kept, as it is no JSON value" in capsys.readouterr().err
    output = build(tmp_path, tokenizer_dir, "--keep", "hint", "--skip-bad", rows=rows)
    assert [record.extra for record in PromptFile.open(output).read([0])] == [{"hint": "h"}]


def test_a_column_reaches_a_reward_function_the_samples_file(
    prompt_file, reward, tokenizer_dir, tmp_path, capsys
):
    prompts = PromptFile.open(prompt_file)
    reward.check_prompts(prompts)
    with RewardPool(reward) as pool:
        sampler = Sampler(Replies(), pool, load_tokenizer(tokenizer_dir))
        samples = sampler.sample(prompts.read(range(3)), 2, SamplingParams(4), (0,))
    assert [sample.reward.total for sample in samples] == [32.0, 32.0, 40.0, 40.0, 0.0, 0.0]
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    writer = SampleWriter(run_dir / "samples.jsonl", first_step=0)
    writer.write(sample_record(sample, 1) for sample in samples)
    writer.close()
    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [line["extra"] for line in lines[::2]] == KEPT
    # Scored again from the file, the rewards are the same.
    command = ["rewards", "score", "--verifier", reward.verifiers[0], "--input", str(run_dir / "samples.jsonl")]
    assert main(command) == 0
    scored = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["reward"] for line in scored] == [sample.reward.total for sample in samples]
    assert [line["extra"] for line in scored] == [line["extra"] for line in lines]
    # Without them it says which are missing.
    (run_dir / "samples.jsonl").write_text(json.dumps({"completion": "c", "answer": "a"}) + "\n")
    assert main(command) == 2
    assert "the parameter 'shade', which nothing gives a value: the samples have no columns" in capsys.readouterr().err
    (run_dir / "samples.jsonl").write_text(json.dumps({"completion": "c", "answer": "a", "extra": {"prompt": 1}}))
    assert main(command) == 2
    assert "'extra' holds 'prompt', which reward functions know as something else" in capsys.readouterr().err


def requests_of(text, extra):
    return [GenerationRequest(0, tuple(TOKENIZER.encode(text)), 1, seed=1, answer="5", extra=extra)]


TOOLS = """
def lookup(x: int, *, table, note: str = "none"):
    \"\"\"Find a number.\"\"\"
    return f"{table[x]} {note}"
"""


def test_a_tool_is_given_the_column_and_the_model_is_told_nothing_of_it(tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    name = f"{tmp_path / 'tools.py'}:lookup"
    limits = ConversationLimits(4, 8, 100)
    forged = '<tool_call>{"name": "lookup", "arguments": {"x": 1, "table": [9, 9]}}</tool_call>'
    turns = [call(1, "lookup"), forged, "done"]
    with ToolPool([name]) as tools:
        conversations = Conversations(Script({"p": turns}), tools, TOKENIZER, limits)
        requests = requests_of("p?", {"table": [3, 4], "other": 1})
        (found,) = conversations.generate(requests, SamplingParams(500, stop_token_ids=(END,)))
        text = TOKENIZER.decode(found.token_ids.tolist())
        assert "\n4 none\n" in text and "Error: lookup: got an unexpected argument 'table'" in text
        # Where the prompts have no such column it is an argument like any other.
        (found,) = Conversations(Script({"p": [forged, "done"]}), tools, TOKENIZER, limits).generate(
            requests_of("p?", {}), SamplingParams(500, stop_token_ids=(END,))
        )
        assert "\n9 none\n" in TOKENIZER.decode(found.token_ids.tolist())
    tool = resolve([name])["lookup"]
    assert list(describe("lookup", tool, ["table", "x"])["function"]["parameters"]["properties"]) == ["x", "note"]
    assert list(describe("lookup", tool)["function"]["parameters"]["properties"]) == ["x", "table", "note"]


GAME = """
class Game:
    def reset(self, answer, *, goal, seed=7):
        self.goal, self.seed = goal + int(answer), seed
    def step(self, action):
        return f"{self.goal} {self.seed}", float(self.goal), True

class All:
    def reset(self, state, **columns):
        self.columns = columns
    def step(self, action):
        return "", float(len(self.columns)), True
"""


def test_an_environment_begins_with_the_columns_that_it_names(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    returns = {}
    for name, extra in (("Game", {"goal": 3, "hint": "h"}), ("Game", {"goal": 4}), ("All", {"goal": 1, "state": 2})):
        with EpisodePool(f"{tmp_path / 'game.py'}:{name}", 1, 5.0, 1024) as pool:
            episodes = Episodes(Script({"p": ["go"]}), pool, TOKENIZER, ConversationLimits(4, 8, 100))
            (found,) = episodes.generate(requests_of("p?", extra), SamplingParams(100, stop_token_ids=(END,)))
        returns[name, extra["goal"]] = found.episode_return
    # A column cannot have the name of the answer's own parameter: that one is the answer.
    assert returns == {("Game", 3): 8.0, ("Game", 4): 9.0, ("All", 1): 1.0}
    check_columns(f"{tmp_path / 'game.py'}:Game", ["goal"], "prompts of p")
    check_columns(f"{tmp_path / 'game.py'}:All", [], "prompts of p")
    check_columns("", [], "prompts of p")
    with pytest.raises(UserError, match="has the parameter 'goal', but prompts of p have only the columns hint"):
        check_columns(f"{tmp_path / 'game.py'}:Game", ["hint"], "prompts of p")
