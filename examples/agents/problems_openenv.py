"""Word problems as a server of `openenv` 0.10, in two turns: whoever is wrong is told so, and may try once more."""

import json
from pathlib import Path

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Reply(Action):
    """What the model says."""

    text: str


class Told(Observation):
    """What it is told."""

    text: str


class Problems(Environment):
    """A right answer is worth 1 at once, and a half at the second try."""

    def reset(self, seed=0, episode_id=None, *, file, **_):
        """Begin with the line ``seed`` of a file in GSM8K's form."""
        record = json.loads(Path(file).read_text(encoding="utf-8").splitlines()[seed])
        self._answer = record["answer"].rpartition("#### ")[2]
        self._state = State(episode_id=episode_id, step_count=0)
        return Told(text=record["question"])

    def step(self, action, timeout_s=None, **_):
        """Take a reply, which has the answer behind the last ####."""
        self._state.step_count += 1
        is_right = action.text.rpartition("####")[2].strip() == self._answer
        is_over = is_right or self._state.step_count == 2
        reward = 1.0 / self._state.step_count if is_right else 0.0
        return Told(text="" if is_over else "Try again.", reward=reward, done=is_over)

    @property
    def state(self):
        """How far the episode is."""
        return self._state


app = create_fastapi_app(Problems, Reply, Told)
