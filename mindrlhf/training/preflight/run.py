"""The one judgement on a config: `mindrlhf config check` gives it, and `mindrlhf train` and its kin begin with it."""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.checkpoint.store import check_space
from mindrlhf.config.load import read_config
from mindrlhf.config.reward import ToolSection
from mindrlhf.config.rollout import RolloutSection
from mindrlhf.config.schema import AnyConfig, GrpoConfig
from mindrlhf.errors import Mistakes, UserError
from mindrlhf.launch.machine import check_launcher, check_ranks, has_npus
from mindrlhf.observe.trackers import check_trackers
from mindrlhf.rollout.pool import find_rollout_python
from mindrlhf.rollout.vllm_options import check_python
from mindrlhf.system.run_lock import refuse_held
from mindrlhf.system.sizes import format_size
from mindrlhf.tools.agents import AgentRunner, is_function
from mindrlhf.training.preflight import RunInputs, check_grpo_inputs, check_offline_inputs, check_sandbox
from mindrlhf.training.preflight.facts import HostMemory, checkpoint_bytes, grpo_outlook, host_memory
from mindrlhf.training.preflight.features import check_elastic
from mindrlhf.training.preflight.output import check_no_file, refuse_taken, resumes, save_dir, too_short
from mindrlhf.training.preflight.rewards import try_rewards


@dataclass(frozen=True)
class CheckedRun:
    """Result of the checks of a run before a device is touched.

    ``mistakes`` are those of the config and the files it names. ``obstacles`` are none of the config: on another
    machine, or with another output directory, it would run.
    """

    config: AnyConfig
    mistakes: Mistakes
    obstacles: Mistakes
    remarks: tuple[str, ...]
    memory: HostMemory | None = None  # of a run on CPUs against verifiers, where nothing is wrong
    outlook: tuple[str, ...] = ()  # what will happen, a line each, where nothing is wrong

    def raise_if_any(self) -> None:
        """Raise everything that keeps the run from starting here.

        Raises:
            UserError: there is something, a line for each.
        """
        everything = Mistakes()
        for message in (*self.mistakes.messages, *self.obstacles.messages):
            everything.add(message)
        everything.raise_if_any()


def check_run(
    task: str,
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    num_ranks: int = 1,
    num_nodes: int = 1,
    node: int = 0,
    resume: str = "",
    oversubscribe: bool = False,
    is_elastic: bool = False,
    tries_rewards: bool = False,
) -> CheckedRun:
    """Apply every check that is possible before a device is touched.

    Args:
        task: "train", "sft", "dpo" or "reward-model".
        path: YAML file.
        overrides: ``section.key=value``.
        num_ranks: trainer ranks, of all nodes.
        num_nodes: machines that they are on, in equal parts.
        node: number of this one; what is in the output directory is for node 0 to judge.
        resume: whether the run is to be continued; see :func:`mindrlhf.training.preflight.output.resumes`.
        oversubscribe: see :func:`mindrlhf.launch.machine.check_ranks`.
        is_elastic: nodes for rollout only may join.
        tries_rewards: call the user's reward functions, which loads MindSpore; a run does it on rank 0.

    Raises:
        UserError: the file cannot be read, or is the config of another task.
    """
    reading = read_config(task, path, overrides, world_size=num_ranks)
    config, mistakes = reading.config, reading.mistakes
    memory, outlook, remarks = None, (), ()
    with contextlib.suppress(UserError):  # it raises what it has noted
        if isinstance(config, GrpoConfig):
            inputs = check_grpo_inputs(config, num_ranks, mistakes, num_nodes=num_nodes)
            tried = _try_functions(config, inputs, node, tries_rewards, mistakes)
            remarks = tuple(filter(None, (too_short(config, inputs.num_steps), tried)))
            outlook = (*grpo_outlook(config, inputs), *remarks)
            if config.run.device == "cpu":
                memory = host_memory(config, inputs.row_lengths[-1], inputs.max_model_len, num_ranks)
        else:
            check_offline_inputs(config, num_ranks, mistakes)
    mistakes.check(check_no_file, "run.output_dir", Path(config.run.output_dir))
    mistakes.check(check_no_file, "checkpoint.save_dir", Path(config.checkpoint.save_dir))
    obstacles = Mistakes()
    if _is_prepared(config):
        mistakes.hand_over(mistakes.not_there, obstacles)
    remarks += (obstacles.check(check_ranks, config.run.device, num_ranks // num_nodes, oversubscribe),)
    obstacles.check(check_launcher, num_ranks)
    if isinstance(config, GrpoConfig):
        obstacles.check(_check_rollout_python, config.rollout)
        obstacles.check(check_sandbox, config)
        if is_elastic:
            obstacles.check(check_elastic, config, num_ranks, num_nodes)
    if node == 0:
        obstacles.check(check_trackers, config.observe.sinks)
        obstacles.check(_refuse_taken, config, resumes(config, resume))
        remarks += (obstacles.check(_check_room, config),) if not mistakes.messages else ()
    return CheckedRun(config, mistakes, obstacles, tuple(filter(None, remarks)), memory, outlook)


def _check_rollout_python(rollout: RolloutSection) -> None:
    check_python(find_rollout_python(rollout.python), rollout.engine, rollout.engine_args)


def _try_functions(config: GrpoConfig, inputs: RunInputs, node: int, tries_rewards: bool, mistakes: Mistakes) -> str:
    """Note what is wrong with the user's functions, unless the run is for another machine; return a remark on them."""
    if _is_prepared(config):
        return ""
    if node == 0:
        mistakes.check(_load_agent, config.tools)
    return (mistakes.check(try_rewards, config.reward, inputs) if tries_rewards else "") or ""


def _load_agent(tools: ToolSection) -> None:
    """Load an agent that is a function in the interpreter that will run it.

    Raises:
        UserError: its file does not load there.
    """

    async def load(directory: str) -> None:
        runner = AgentRunner(tools.agent, 0, directory, None, is_open=True, memory_limit_bytes=0, python=python)
        try:
            await runner.start()
        except UserError as error:
            where = f"by {python or sys.executable}: tools.agent_python names the interpreter that has what it imports"
            raise UserError(f"'tools.agent' is loaded {where}; {error}") from None
        finally:
            await runner.close()

    python = tools.agent_python
    if tools.agent and is_function(tools.agent):
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(load(directory))


def _is_prepared(config: AnyConfig) -> bool:
    """Return whether the run is only prepared here, for another machine with NPUs and its files."""
    return config.run.device == "ascend" and not has_npus()


def _check_room(config: AnyConfig) -> str:
    """Return a line where the disk has room for a checkpoint, but not for as many as are kept; empty otherwise.

    Raises:
        UserError: it has no room for one.
    """
    if config.checkpoint.node_local or _is_prepared(config):  # a node's part is for the node to look at
        return ""
    size_bytes, directory = checkpoint_bytes(config), save_dir(config)
    free_bytes, num_kept = check_space(directory, size_bytes), config.checkpoint.keep_last + 1
    if not config.checkpoint.every_steps or num_kept * size_bytes <= free_bytes:
        return ""
    return (
        f"a checkpoint takes {format_size(size_bytes)}, and {num_kept} stand side by side while the oldest of "
        f"checkpoint.keep_last + 1 is replaced, but {directory} has {format_size(free_bytes)} free: make room, lower "
        "checkpoint.keep_last, or set checkpoint.save_dir to another disk"
    )


def _refuse_taken(config: AnyConfig, resume: bool) -> None:
    """Refuse the directories of a living run, which is named, and those that an earlier run has left."""
    for directory in (Path(config.run.output_dir), save_dir(config)):
        refuse_held(directory)
    refuse_taken(config, resume=resume)
