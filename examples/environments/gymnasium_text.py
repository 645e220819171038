"""Gymnasium's environments in words: discrete actions by number, observations as the environment draws itself."""

import json
import re
from typing import Any

import gymnasium

_NUMBER = re.compile(r"-?\d+")


class GymnasiumText:
    """One episode of the environment that a record's answer names: ``{"id": "FrozenLake-v1", "seed": 3}``.

    Further keys of the answer go to ``gymnasium.make``. An action is the last whole number of the model's turn; one
    that the environment does not have changes nothing and earns nothing. The model sees the drawing of the render mode
    "ansi" where there is one, else the observation as text.
    """

    def reset(self, answer: str) -> str:
        """Begin, and return the first observation, which belongs into the prompt.

        Raises:
            ValueError: the answer names no environment, or one whose actions are not discrete.
        """
        options = json.loads(answer)
        if not isinstance(options, dict) or not isinstance(options.get("id"), str):
            raise ValueError(f"the answer {answer[:80]!r} is not like {{'id': 'FrozenLake-v1', 'seed': 3}}")
        name, seed = options.pop("id"), options.pop("seed", None)
        modes = gymnasium.spec(name).entry_point
        modes = gymnasium.envs.registration.load_env_creator(modes) if isinstance(modes, str) else modes
        draws = "ansi" in getattr(modes, "metadata", {}).get("render_modes", ())
        self._environment = gymnasium.make(name, **({"render_mode": "ansi"} if draws else {}), **options)
        if not isinstance(self._environment.action_space, gymnasium.spaces.Discrete):
            raise ValueError(f"the actions of {name} are {self._environment.action_space}, not discrete")
        self._draws = draws
        observation, _ = self._environment.reset(seed=seed)
        return self._shown(observation)

    def step(self, action: str) -> tuple[str, float, bool]:
        """Take the action that the model's turn ends with."""
        space = self._environment.action_space
        numbers = _NUMBER.findall(action)
        number = int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else None
        if number is None or not space.start <= number < space.start + space.n:
            first, last = int(space.start), int(space.start + space.n) - 1
            return f"There is no such action: write a number from {first} to {last}.", 0.0, False
        observation, reward, terminated, truncated, _ = self._environment.step(number)
        return self._shown(observation), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        """Give back what the environment holds."""
        self._environment.close()

    def _shown(self, observation: Any) -> str:
        return str(self._environment.render()) if self._draws else str(observation)
