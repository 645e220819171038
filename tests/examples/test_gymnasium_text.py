"""Gymnasium's own environments in words, step by step beside gymnasium itself; skipped where it is not installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: the extra 'environments'")

from example_tools import GYMNASIUM  # noqa: E402
from gymnasium_text import GymnasiumText  # noqa: E402

from mindrlhf.tools.calls import ToolCall  # noqa: E402
from mindrlhf.tools.episodes import EpisodePool, read_step  # noqa: E402
from mindrlhf.tools.pool import ToolPool  # noqa: E402

pytestmark = pytest.mark.timeout(120)
LAKE = {"id": "FrozenLake-v1", "seed": 7, "is_slippery": False}


def test_a_lake_is_crossed_as_gymnasium_has_it():
    ours, theirs = GymnasiumText(), gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")
    theirs.reset(seed=7)
    assert ours.reset(json.dumps(LAKE)) == theirs.render()
    total = 0.0
    for action in (1, 1, 2, 2, 1, 2):  # down, down, right, right, down, right: the way to the goal
        text, reward, is_over = ours.step(f"I think that 4 is wrong, so: {action}")
        _, expected, terminated, truncated, _ = theirs.step(action)
        assert (text, reward, is_over) == (theirs.render(), expected, terminated or truncated)
        total += reward
    assert is_over and total == 1.0
    ours.close()


def test_chance_is_that_of_the_seed():
    def play():
        environment = GymnasiumText()
        first = environment.reset(json.dumps(LAKE | {"is_slippery": True}))
        return [first] + [environment.step("2")[0] for _ in range(4)]

    assert play() == play()


@pytest.mark.parametrize("action", ["", "left", "4", "-1", "9" * 400])
def test_actions_that_there_are_not_change_nothing(action):
    environment = GymnasiumText()
    environment.reset(json.dumps(LAKE))
    assert environment.step(action) == ("There is no such action: write a number from 0 to 3.", 0.0, False)


@pytest.mark.parametrize(
    ("answer", "message"),
    [("[]", "is not like"), ('{"seed": 1}', "is not like"), ('{"id": "Pendulum-v1"}', "not discrete")],
)
def test_records_that_name_no_environment_are_refused(answer, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumText().reset(answer)


def test_observations_without_a_drawing_are_text():
    environment = GymnasiumText()
    first = environment.reset('{"id": "CartPole-v1", "seed": 1}')
    assert first.startswith("[") and environment.step("1")[1] == 1.0


def test_episodes_of_gymnasium_run_in_their_processes():
    with EpisodePool(GYMNASIUM, 1, 30.0, 2048) as pool:
        pool.begin(0, json.dumps(LAKE))
        pool.begin(1, json.dumps(LAKE))
        steps = [read_step(pool.step(episode, str(action)).result()) for episode, action in ((0, 1), (1, 2), (0, 1))]
        assert not any(step.is_over or step.failure for step in steps)
        assert len({step.observation for step in steps}) == 3
    with ToolPool([f"environment:{GYMNASIUM}"], timeout_s=30.0) as pool:
        assert pool.submit(ToolCall("end", {"episode": 5})).result().is_failure is False


def test_the_example_makes_prompts_that_show_the_first_observation(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "environments" / "lake_prompts.py"
    arguments = ["--out", str(tmp_path), "--num-train", "3", "--num-test", "2"]
    subprocess.run([sys.executable, str(script), *arguments], check=True, timeout=60)
    records = [json.loads(line) for name in ("train", "test") for line in (tmp_path / f"{name}.jsonl").open()]
    assert len({record["answer"] for record in records}) == len(records) == 5
    for record in records:
        assert record["question"].endswith(GymnasiumText().reset(record["answer"]))
