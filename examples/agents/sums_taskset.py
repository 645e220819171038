"""Sums as a taskset of `verifiers` 0.4, in two turns: whoever is wrong at first is told so, and may try once more."""

import random
import re

import verifiers.v1 as vf

__all__ = ["SumsEnv", "SumsTaskset"]


class SumsData(vf.TaskData):
    """What a task is scored by."""

    answer: int


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    """One sum."""

    def is_right(self, reply: str) -> bool:
        """Whether a reply ends with the answer."""
        return re.findall(r"-?\d+", reply)[-1:] == [str(self.data.answer)]


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    """Sums without end, in an order of their own."""

    INFINITE = True

    def load(self):
        draw = random.Random(1)
        while True:
            first, second = draw.randint(1, 9), draw.randint(1, 9)
            prompt = f"What is {first} plus {second}?"
            yield SumsTask(SumsData(prompt=prompt, answer=first + second), self.config.task)


class SumsEnvConfig(vf.EnvConfig):
    """One seat."""

    player: vf.AgentConfig = vf.AgentConfig()


class SumsEnv(vf.Env[SumsEnvConfig]):
    """A right answer is worth 1 at once, and a half at the second try."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            for worth in (1.0, 0.5):
                segment = await interaction.turn(*(() if worth == 1.0 else ("That is wrong.",)))
                if segment.terminated or task.is_right(segment.last_reply):
                    break
            else:
                worth = 0.0
        interaction.trace.record_reward("answer", 0.0 if segment.terminated else worth, 1.0)
