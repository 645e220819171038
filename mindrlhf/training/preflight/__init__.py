"""Everything about a run that can be checked, and counted, before a device is touched."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindrlhf.config.run import DataSection, RunSection
from mindrlhf.config.schema import AnyConfig, GrpoConfig, OfflineConfig, SftConfig
from mindrlhf.config.training import BY_LENGTH, SHARED_PROMPTS, cpu_rules
from mindrlhf.data.mindrecord import PromptFile, PromptFileHeader
from mindrlhf.data.packing import choose_row_length
from mindrlhf.data.tokenizer_config import end_ids
from mindrlhf.data.tokenizers import Tokenizer, load_tokenizer
from mindrlhf.debugging.kernel_dump import check_dump
from mindrlhf.errors import Mistakes, UserError
from mindrlhf.evaluation.heldout import accuracy_verifier
from mindrlhf.rewards.selection import Selection
from mindrlhf.rollout.conversations import conversation_template
from mindrlhf.rollout.vllm_options import check_head_size, check_linear_attention, check_positions
from mindrlhf.sandbox.server import check_for
from mindrlhf.sandbox.user_files import find_engine
from mindrlhf.tools.agents import check_agent
from mindrlhf.tools.environments import check_columns, check_environment
from mindrlhf.tools.registry import check as check_tools
from mindrlhf.training.loop.sampling.order import read_order
from mindrlhf.training.preflight.features import (
    check_images,
    check_offline_vision,
    check_replay,
    check_rows_in_window,
    check_vision,
    image_tokens,
)
from mindrlhf.training.preflight.layout import check_layout, check_servers
from mindrlhf.training.preflight.models import check_layers, check_role, check_training_of_actor, roles_of
from mindrlhf.training.vision.image_rows import ImageTokens

# Tokens of a prompt with its responses up to which a row is chosen that holds them, where it needs no more than a pair.
LONGEST_GROUP = 1024


@dataclass(frozen=True)
class RunInputs:
    """Inputs of a run, opened and checked."""

    tokenizer: Tokenizer
    prompts: PromptFile
    held_out: PromptFile | None
    row_lengths: tuple[int, ...]  # ascending
    num_steps: int
    image_tokens: ImageTokens | None = None  # of a model with vision
    more_held_out: dict[str, PromptFile] = dataclasses.field(default_factory=dict)  # further sets by name
    longest_sample: int = 0  # most tokens of a prompt and its response; 0 where rows alone say it

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that a server makes: rows may hold several."""
        longest = -(-self.longest_sample // 16) * 16 or self.row_lengths[-1]
        return min(longest, self.row_lengths[-1])


def check_sandbox(config: GrpoConfig) -> str:
    """Return a line for the log on what keeps programs of the model in; empty when the run has none.

    Raises:
        UserError: the system allows too little, and `sandbox.allow_weak` is not set.
    """
    names = (*config.reward.verifier_function, *config.tools.names)
    layers = check_for(names, config.sandbox.allow_weak)
    return layers and f"sandbox of programs that the model writes: {layers}"


def check_grpo_inputs(
    config: GrpoConfig, world_size: int = 1, mistakes: Mistakes | None = None, num_nodes: int = 1
) -> RunInputs:
    """Open the inputs of a `mindrlhf train` run on ``world_size`` ranks, which are on ``num_nodes`` machines.

    Args:
        mistakes: found before; None for none.

    Raises:
        UserError: everything that would stop the run later: files, tokenizer, verifiers, weights, lengths, layout;
            after what is in ``mistakes``.
    """
    mistakes = Mistakes() if mistakes is None else mistakes
    check = mistakes.check
    check(check_vision, config, needs=["model.path"])
    check(check_replay, config, needs=["model.path"])
    mistakes.judge(cpu_rules(config))
    selection = Selection.from_config(config.reward) if config.reward.verifier_function else None
    if selection is not None:
        check(selection.check, needs=["reward.verifier_weight"])
    check(check_tools, config.tools.names)
    check(check_agent, config.tools.agent, config.tools.agent_python)
    needs_environment = () if config.tools.agent else config.reward.verifier_function
    check(check_environment, config.tools.environment, needs_environment)
    files = _Files.open(config.data, "prompts", mistakes, config.evaluation.sets)
    if selection is not None:
        held_out = {"": files.held_out, **files.more}
        accuracies = [(file, accuracy_verifier(config, name)) for name, file in held_out.items()]
        for file, accuracy in ((files.training, ""), *accuracies):
            if file is not None:
                check(selection.check_prompts, file, accuracy)
                check(selection.check_answers, file)
    check(conversation_template, config.tools, files.present, files.tokenizer)
    if config.msprobe.config_path:
        check(check_dump, config.msprobe.config_path, config.run.device)
    check(read_order, config.rollout.replay_order)
    num_steps = 0
    if files.training is not None:
        per_step = config.training.chunk_size * config.training.num_rollouts
        num_steps = _num_steps(len(files.training) * config.training.epochs, per_step, config.run.max_steps)
    needed = ["training.sequence_lengths"]
    row_lengths = check(_grpo_row_lengths, config, files.present, needs=needed) if files.present else None
    check(check_servers, config, world_size, num_nodes, needs=["model.path"])
    check(find_engine, config.rollout.engine)
    check(check_head_size, config.model.path, config.run.device, config.rollout.engine, needs=["model.path"])
    check(check_linear_attention, config.model.path, config.run.device, config.rollout, needs=["model.path"])
    if row_lengths is not None:
        is_whole = config.run.device != "cpu" or config.training.packing in BY_LENGTH
        longest = row_lengths[-1] if is_whole else _longest_sample(config, files.present)
        check(check_positions, config.model.path, longest, needs=["model.path"])
    _check_models(config, files, row_lengths, world_size, mistakes)
    check(check_training_of_actor, config, num_steps, needs=["model.path", "model.reference_path"])
    for file in files.present:
        check(check_columns, config.tools.environment, file.header.columns, f"prompts of {file.path}")
    mistakes.raise_if_any()
    files.tokenizer.end_at(end_ids(config.model.path))
    seen = image_tokens(config.model.path)
    longest = _longest_sample(config, files.present)
    return RunInputs(files.tokenizer, files.training, files.held_out, row_lengths, num_steps, seen, files.more, longest)


def check_offline_inputs(config: OfflineConfig, world_size: int = 1, mistakes: Mistakes | None = None) -> RunInputs:
    """Open the inputs of a run on fixed data on ``world_size`` ranks; see :func:`check_grpo_inputs`.

    Its number of steps depends on the packing and is 0 here.
    """
    mistakes = Mistakes() if mistakes is None else mistakes
    check, model = mistakes.check, config.model
    task, what = ("sft", "record") if isinstance(config, SftConfig) else ("preference", "pair")
    check(check_offline_vision, config, needs=["model.path"])
    mistakes.judge(cpu_rules(config))
    files = _Files.open(config.data, task, mistakes)
    lengths = check(_record_row_lengths, config.training.sequence_lengths, files.present, what, config.run)
    _check_models(config, files, lengths, world_size, mistakes)
    mistakes.raise_if_any()
    seen = image_tokens(model.path)
    return RunInputs(files.tokenizer, files.training, files.held_out, lengths, 0, seen)


@dataclass(frozen=True)
class _Files:
    """The tokenizer and the data files of a run, each None where it cannot be opened."""

    tokenizer: Tokenizer | None
    training: PromptFile | None
    held_out: PromptFile | None
    more: dict[str, PromptFile]  # further held-out sets by name

    @classmethod
    def open(cls, data: DataSection, task: str, mistakes: Mistakes, sets: Mapping[str, str] | None = None) -> "_Files":
        tokenizer = mistakes.check(load_tokenizer, data.tokenizer_dir, needs=["data.tokenizer_dir"])
        training = mistakes.check(_open_file, data.train_file, tokenizer, task, needs=["data.train_file"])
        held_out = None
        if data.eval_file:
            held_out = mistakes.check(_open_file, data.eval_file, tokenizer, task, needs=["data.eval_file"])
        opened = {
            name: mistakes.check(_open_file, path, tokenizer, task, needs=["evaluation.sets"])
            for name, path in (sets or {}).items()
        }
        return cls(tokenizer, training, held_out, {name: file for name, file in opened.items() if file is not None})

    @property
    def present(self) -> list[PromptFile]:
        return [file for file in (self.training, self.held_out, *self.more.values()) if file is not None]


def _grpo_row_lengths(config: GrpoConfig, files: Sequence[PromptFile]) -> tuple[int, ...]:
    longer = max(files, key=lambda file: file.header.longest_prompt)
    longest = longer.header.longest_prompt + config.rollout.max_response_length
    what = (
        f"the longest prompt of {longer.path} ({longer.header.longest_prompt} tokens) with "
        f"rollout.max_response_length = {config.rollout.max_response_length}"
    )
    is_fitted = config.training.packing not in BY_LENGTH
    given = config.training.sequence_lengths or group_row(config, longest)
    return choose_row_length(given, longest, what, config.run.device, is_fitted=is_fitted)


def group_row(config: GrpoConfig, longest: int) -> tuple[int, ...]:
    """Return the one row length that fits a prompt with all its responses, where rows hold it once: one graph.

    It is () where rows do not, or where attention, which is quadratic, would cost more than sharing saves.

    Args:
        longest: tokens of the longest sample.
    """
    num_samples = config.algorithm.num_generations
    group = longest + (num_samples - 1) * config.rollout.max_response_length
    is_short = num_samples > 1 and group <= max(LONGEST_GROUP, 2 * longest)
    return (-(-group // 16) * 16,) if config.training.packing == SHARED_PROMPTS and is_short else ()


def _longest_sample(config: GrpoConfig, files: Sequence[PromptFile]) -> int:
    return max(file.header.longest_prompt for file in files) + config.rollout.max_response_length


def _record_row_lengths(
    given: Sequence[int], files: Sequence[PromptFile], what: str, run: RunSection
) -> tuple[int, ...]:
    if not files:
        return ()
    longer = max(files, key=lambda file: _longest_record(file.header))
    longest = _longest_record(longer.header)
    what = f"the longest {what} of {longer.path} ({longest} tokens)"
    return choose_row_length(given, longest, what, run.device)


def _longest_record(header: PromptFileHeader) -> int:
    limit = header.longest_prompt + header.longest_response
    return min(limit, header.max_length) if header.max_length else limit


def _check_models(
    config: AnyConfig, files: _Files, row_lengths: Sequence[int] | None, world_size: int, mistakes: Mistakes
) -> None:
    """Check each model that a run reads: by itself, with the rows and images that it gets, and over the ranks."""
    check, roles = mistakes.check, list(roles_of(config))
    for role in roles:
        check(check_role, config, role, files.tokenizer, needs=[role.key])
        if row_lengths:
            check(check_rows_in_window, role.path, row_lengths[-1], needs=[role.key])
        if role.is_of_actor:
            for file in files.present:
                check(check_images, role.path, file, needs=[role.key])
    check(check_layers, config.memory, config.model.path, needs=["model.path", "memory.recompute_layers"])
    if row_lengths:
        check(check_layout, config, row_lengths, world_size, needs=[role.key for role in roles])


def _open_file(path: str, tokenizer: Tokenizer | None, task: str) -> PromptFile:
    file = PromptFile.open(path, tokenizer.fingerprint if tokenizer is not None else None)
    if file.header.task != task:
        raise UserError(f"{path} was built for task '{file.header.task}': build it again with --task {task}")
    if not len(file):
        raise UserError(f"{path} holds no prompts: raise --max-prompt-length or check the raw file, and build it again")
    return file


def _num_steps(num_prompts: int, per_step: int, max_steps: int) -> int:
    available = -(-num_prompts // per_step)
    return min(available, max_steps) if max_steps else available
