"""Everything about a run that can be checked, and counted, before a device is touched."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.config.derived import needs_critic
from mindrlhf.config.msprobe_section import CELL_LEVEL
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.config.sections import DataSection, ModelSection, ParallelSection
from mindrlhf.data.mindrecord import PromptFile, PromptFileHeader
from mindrlhf.data.packing import choose_row_length
from mindrlhf.data.tokenizers import Tokenizer, load_tokenizer
from mindrlhf.debugging.dump_files import check_dump, dump_dir
from mindrlhf.errors import UserError
from mindrlhf.evaluation.heldout import accuracy_verifier
from mindrlhf.layout.feasibility import check_feasible, is_split
from mindrlhf.layout.layout import Layout
from mindrlhf.rewards.selection import Selection
from mindrlhf.sandbox.server import check_strong
from mindrlhf.shards.strategy_files import check_strategy_directory
from mindrlhf.specs import find_spec
from mindrlhf.tools.registry import check as check_tools
from mindrlhf.weights.convert import hf_shapes, ignored_names
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.open import is_sharded, open_tensors
from mindrlhf.weights.sharded import STRATEGY_NAME

FINAL_NAME = "final"  # the exported model, in the run's output directory


@dataclass(frozen=True)
class RunInputs:
    """What a run reads, opened and checked."""

    tokenizer: Tokenizer
    prompts: PromptFile
    held_out: PromptFile | None
    row_lengths: tuple[int, ...]  # ascending
    num_steps: int


def check_sandbox(config: GrpoConfig) -> str:
    """Return a line for the log on what keeps programs of the model in; empty when the run has none.

    Raises:
        UserError: the system allows too little, and `sandbox.allow_weak` is not set.
    """
    if "code_execution" not in config.reward.verifier_function and "python" not in config.tools.names:
        return ""
    return f"sandbox of programs that the model writes: {check_strong(config.sandbox.allow_weak)}"


def check_grpo_inputs(config: GrpoConfig, world_size: int = 1) -> RunInputs:
    """Open the inputs of a `mindrlhf train` run on ``world_size`` ranks.

    Raises:
        UserError: anything that would stop the run later: files, tokenizer, verifiers, weights, lengths, layout.
    """
    if config.run.device == "cpu":
        _check_data_parallel(config.parallel_config, "run.device=cpu")
    selection = Selection.from_config(config.reward) if config.reward.verifier_function else None
    if selection is not None:
        selection.check()
    check_tools(config.tools.names)
    tokenizer, prompts = _open_data(config.data, config.data.train_file, "prompts")
    held_out = _open_data(config.data, config.data.eval_file, "prompts")[1] if config.data.eval_file else None
    if selection is not None:
        selection.check_prompts(prompts.header.verifier_choices, prompts.path)
    if selection is not None and held_out is not None:
        selection.check_prompts(held_out.header.verifier_choices, held_out.path, accuracy_verifier(config))
    longer = max((prompts, *([held_out] if held_out else [])), key=lambda file: file.header.longest_prompt)
    longest = longer.header.longest_prompt + config.rollout.max_response_length
    what = (
        f"the longest prompt of {longer.path} ({longer.header.longest_prompt} tokens) with "
        f"rollout.max_response_length = {config.rollout.max_response_length}"
    )
    row_lengths = choose_row_length(config.training.row_lengths, longest, what)
    _check_layout(config, row_lengths, world_size)
    _check_msprobe(config)
    _check_model(config.model, config.model.path, tokenizer)
    if config.algorithm.beta > 0 and config.model.reference_path:
        _check_model(config.model, config.model.reference_path, tokenizer)
        _check_reference(config)
    per_step = config.training.chunk_size * config.training.num_rollouts
    num_steps = _num_steps(len(prompts) * config.training.epochs, per_step, config.run.max_steps)
    if needs_critic(config):
        _check_critic(config, tokenizer, num_steps)
    if config.reward.model_path:
        _check_reward_model(config, tokenizer)
    return RunInputs(tokenizer, prompts, held_out, row_lengths, num_steps)


def check_sft_inputs(config: SftConfig) -> RunInputs:
    """Open the inputs of a `mindrlhf sft` run; its number of steps depends on the packing and is 0 here."""
    _check_data_parallel(config.parallel_config, "mindrlhf sft")
    tokenizer, records = _open_data(config.data, config.data.train_file, "sft")
    held_out = _open_data(config.data, config.data.eval_file, "sft")[1] if config.data.eval_file else None
    longer = max((records, *([held_out] if held_out else [])), key=lambda file: _longest_record(file.header))
    longest = _longest_record(longer.header)
    what = f"the longest record of {longer.path} ({longest} tokens)"
    row_lengths = choose_row_length(config.supervised.row_lengths, longest, what)
    _check_model(config.model, config.model.path, tokenizer)
    return RunInputs(tokenizer, records, held_out, row_lengths, 0)


def check_preference_inputs(config: DpoConfig | RewardModelConfig) -> RunInputs:
    """Open the inputs of a `mindrlhf dpo` or `mindrlhf reward-model` run; the number of steps is 0 here."""
    _check_data_parallel(config.parallel_config, "preference learning")
    tokenizer, records = _open_data(config.data, config.data.train_file, "preference")
    held_out = _open_data(config.data, config.data.eval_file, "preference")[1] if config.data.eval_file else None
    longer = max((records, *([held_out] if held_out else [])), key=lambda file: _longest_record(file.header))
    longest = _longest_record(longer.header)
    what = f"the longest pair of {longer.path} ({longest} tokens)"
    row_lengths = choose_row_length(config.preference.row_lengths, longest, what)
    for path in filter(None, (config.model.path, config.model.reference_path)):
        _check_model(config.model, path, tokenizer)
        if isinstance(config, DpoConfig) and find_spec(read_hf_config(path)).is_scorer:
            raise UserError(f"the model in {path} gives scores, not tokens: use a language model")
    return RunInputs(tokenizer, records, held_out, row_lengths, 0)


def check_nodes(config: GrpoConfig, num_ranks: int, num_nodes: int) -> None:
    """Refuse a `mindrlhf train` run on several machines of which none would hold the whole model."""
    parallel = config.parallel_config
    if num_nodes == 1 or not is_split(parallel):
        return
    for name, value, wanted in (
        ("pipeline_stage", parallel.pipeline_stage, 1),
        ("expert_parallel", parallel.expert_parallel, 1),
        ("enable_parallel_optimizer", parallel.enable_parallel_optimizer, False),
    ):
        if value != wanted:
            raise UserError(
                f"'parallel_config.{name}' is {str(value).lower()}, which spreads the model over {num_nodes} nodes, "
                f"but each node must hold the whole model: set it to {str(wanted).lower()}, or use one node"
            )
    ranks_per_node, ranks_per_replica = num_ranks // num_nodes, parallel.model_parallel * parallel.context_parallel
    if ranks_per_node % ranks_per_replica:
        raise UserError(
            f"'parallel_config' cuts the model into {ranks_per_replica} parts (model_parallel * context_parallel), but "
            f"each of {num_nodes} nodes, which must hold the whole model, has {ranks_per_node} ranks: start a multiple "
            f"of {ranks_per_replica} ranks on each node"
        )


def check_free(directory: Path) -> None:
    """Refuse to train towards an export directory that is taken, before the time is spent."""
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} holds the model of an earlier run: move it away, or set another run.output_dir")


def _check_msprobe(config: GrpoConfig) -> None:
    section = config.msprobe
    if not section.enabled:
        return
    if section.level == CELL_LEVEL and is_split(config.parallel_config):
        raise UserError(
            f"'msprobe.level' is {CELL_LEVEL}, but cells of a model that 'parallel_config' shards cannot be run one "
            "by one: set it to debug, or debug a smaller model in data parallel"
        )
    check_dump(dump_dir(section, config.run))


def _check_data_parallel(parallel: ParallelSection, command: str) -> None:
    for name in ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel"):
        if getattr(parallel, name) > 1:
            raise UserError(
                f"'parallel_config.{name}' is {getattr(parallel, name)}, but {command} trains in data parallel only: "
                "set it to 1"
            )
    if parallel.enable_parallel_optimizer:
        raise UserError(
            f"'parallel_config.enable_parallel_optimizer' is true, but {command} trains in data parallel only: set it "
            "to false"
        )


def _check_layout(config: GrpoConfig, row_lengths: tuple[int, ...], world_size: int) -> None:
    """Check that the models can be sharded over the ranks, and that what the run needs beside the actor can."""
    parallel = config.parallel_config
    if not is_split(parallel):
        return
    layout = Layout.from_config(parallel, world_size)
    for key, is_used in (("critic.path", needs_critic(config)), ("reward.model_path", bool(config.reward.model_path))):
        if is_used:
            raise UserError(
                f"'{key}' is set, but with parallel_config {layout} only the actor and its reference model are sharded "
                "over the ranks: use an algorithm and rewards without that model, or data parallelism alone"
            )
    # The checks want the row lengths that the plan would, which may have come from the data.
    training = dataclasses.replace(config.training, row_lengths=row_lengths)
    config = dataclasses.replace(config, training=training)
    paths = [config.model.path]
    if config.algorithm.beta > 0:
        paths.append(config.model.reference_path or config.model.path)
    for path in dict.fromkeys(paths):
        hf_config = read_hf_config(path)
        dims = find_spec(hf_config).dims(hf_config)
        for length in row_lengths:
            one_length = dataclasses.replace(training, row_lengths=(length,))
            check_feasible(dataclasses.replace(config, training=one_length), dims, layout)
        if is_sharded(path):
            check_strategy_directory(Path(path) / STRATEGY_NAME, dims, layout)


def _longest_record(header: PromptFileHeader) -> int:
    limit = header.longest_prompt + header.longest_response
    return min(limit, header.max_length) if header.max_length else limit


def _open_data(data: DataSection, path: str, task: str) -> tuple[Tokenizer, PromptFile]:
    tokenizer = load_tokenizer(data.tokenizer_dir)
    file = PromptFile.open(path, tokenizer.fingerprint)
    if file.header.task != task:
        raise UserError(f"{path} was built for task '{file.header.task}': build it again with --task {task}")
    if not len(file):
        raise UserError(f"{path} holds no prompts: raise --max-prompt-length or check the raw file, and build it again")
    return tokenizer, file


def _check_model(model: ModelSection, path: str, tokenizer: Tokenizer) -> None:
    hf_config = read_hf_config(path)
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    if tokenizer.vocab_size > dims.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model in {path} has room for {dims.vocab_size}: "
            "use the model's own tokenizer"
        )
    if not (model.random_init and path == model.path):
        open_tensors(path).check_coverage(hf_shapes(spec, dims), ignored_names(dims))


def _check_reward_model(config: GrpoConfig, tokenizer: Tokenizer) -> None:
    path = config.reward.model_path
    spec = find_spec(read_hf_config(path))
    if not spec.is_scorer:
        raise UserError(
            f"'reward.model_path' is {path}, a {spec.hf_architecture}, which gives tokens, not scores: train one with "
            "mindrlhf reward-model"
        )
    if _brings_other_tokenizer(path, tokenizer):
        raise UserError(
            f"'reward.model_path' is {path}, a model of another vocabulary than data.tokenizer_dir = "
            f"{config.data.tokenizer_dir}: it would read other texts than the actor wrote, so train a reward model "
            "with that tokenizer"
        )
    _check_model(config.model, path, tokenizer)


def _check_reference(config: GrpoConfig) -> None:
    paths = (config.model.path, config.model.reference_path)
    actor, reference = (find_spec(read_hf_config(path)).dims(read_hf_config(path)) for path in paths)
    if config.algorithm.sync_ref_model and actor != reference:
        raise UserError(
            f"'algorithm.sync_ref_model' copies the actor into the reference model, but {paths[1]} has another shape "
            f"than {paths[0]}: set it to false, or use a reference of the same shape"
        )


def _check_critic(config: GrpoConfig, tokenizer: Tokenizer, num_steps: int) -> None:
    critic = config.critic
    if _brings_other_tokenizer(critic.path, tokenizer):
        raise UserError(
            f"'critic.path' is {critic.path}, a model of another vocabulary than data.tokenizer_dir = "
            f"{config.data.tokenizer_dir}: the critic reads the actor's tokens, so use a model with that tokenizer"
        )
    _check_model(config.model, critic.path, tokenizer)
    if critic.warmup_steps >= num_steps:
        raise UserError(
            f"'critic.warmup_steps' is {critic.warmup_steps}, but the run has {num_steps} steps, so that the actor is "
            "never trained: lower it"
        )


def _brings_other_tokenizer(path: str, tokenizer: Tokenizer) -> bool:
    # Only a directory that brings its tokenizer can tell: models pad their vocabularies to sizes of their own.
    has_tokenizer = (Path(path) / "tokenizer.json").exists()
    return has_tokenizer and load_tokenizer(path).fingerprint != tokenizer.fingerprint


def _num_steps(num_prompts: int, per_step: int, max_steps: int) -> int:
    available = -(-num_prompts // per_step)
    return min(available, max_steps) if max_steps else available
