"""Word problems as a taskset of `verifiers` 0.4, in two turns: whoever is wrong is told so, and may try once more."""

import json
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["ProblemsEnv", "ProblemsTaskset"]


class ProblemsData(vf.TaskData):
    """What a task is scored by."""

    answer: str


class ProblemsTask(vf.Task[ProblemsData, vf.State, vf.TaskConfig]):
    """One problem."""

    def is_right(self, reply: str) -> bool:
        """Whether a reply has the answer behind the last ####."""
        return reply.rpartition("####")[2].strip() == self.data.answer


class ProblemsConfig(vf.TasksetConfig):
    """Where the problems are."""

    file: str  # lines of JSON in GSM8K's form


class ProblemsTaskset(vf.Taskset[ProblemsTask, ProblemsConfig]):
    """The problems of a file."""

    def load(self):
        for line in Path(self.config.file).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            answer = record["answer"].rpartition("#### ")[2]
            yield ProblemsTask(ProblemsData(prompt=record["question"], answer=answer), self.config.task)


class ProblemsEnvConfig(vf.EnvConfig):
    """One seat."""

    player: vf.AgentConfig = vf.AgentConfig()


class ProblemsEnv(vf.Env[ProblemsEnvConfig]):
    """A right answer is worth 1 at once, and a half at the second try."""

    async def run(self, task, agents):
        reward = 0.0
        async with agents.player.interaction(task) as interaction:
            for worth, told in ((1.0, ()), (0.5, ("Try again.",))):
                segment = await interaction.turn(*told)
                if segment.terminated:
                    break
                if task.is_right(segment.last_reply):
                    reward = worth
                    break
        interaction.trace.record_reward("answer", reward, 1.0)
