"""What a layout asks of a run, before a device is touched: ranks, nodes, servers and the directories of shards."""

import dataclasses
import math
from pathlib import Path

from mindrlhf.config.derived import needs_critic
from mindrlhf.config.distillation.references import reference_paths
from mindrlhf.config.memory.section import MemorySection
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.config.sections import ParallelSection
from mindrlhf.errors import UserError
from mindrlhf.layout.feasibility import check_feasible, check_model, check_rollout, check_rows, is_split
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.servers import place_servers, spans_nodes
from mindrlhf.shards.strategy_files import check_strategy_directory
from mindrlhf.specs import find_spec, scorer_config
from mindrlhf.weights.convert import buffer_infos
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.open import is_sharded
from mindrlhf.weights.sharded import STRATEGY_NAME
from mindrlhf.weights.tensors import align


def check_data_parallel(parallel: ParallelSection, command: str) -> None:
    """Refuse a layout that shards the model where only whole ones are trained; ``command`` says where."""
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


def check_layout(config: GrpoConfig, row_lengths: tuple[int, ...], world_size: int) -> None:
    """Check that the models can be sharded over the ranks, and that what the run needs beside the actor can."""
    parallel = config.parallel_config
    if not is_split(parallel):
        check_state_stays(config.memory)
        return
    layout = Layout.from_config(parallel, world_size)
    if needs_critic(config):
        hf_config = read_hf_config(config.critic.path)
        check_model(find_spec(scorer_config(hf_config)).dims(hf_config), layout)
    # The checks want the row lengths that the plan would, which may have come from the data.
    training = dataclasses.replace(config.training, row_lengths=row_lengths)
    config = dataclasses.replace(config, training=training)
    for path in dict.fromkeys((config.model.path, *reference_paths(config))):
        hf_config = read_hf_config(path)
        dims = find_spec(hf_config).dims(hf_config)
        for length in row_lengths:
            one_length = dataclasses.replace(training, row_lengths=(length,))
            check_feasible(dataclasses.replace(config, training=one_length), dims, layout)
        if is_sharded(path):
            check_strategy_directory(Path(path) / STRATEGY_NAME, dims, layout)
    if path := config.reward.model_path:
        hf_config = read_hf_config(path)
        check_model(find_spec(hf_config).dims(hf_config), layout)


def check_state_stays(memory: MemorySection) -> None:
    """Refuse to move the optimiser's state of a model that is whole on every rank."""
    for name in ("offload_optimizer", "swap_moments"):
        if getattr(memory, name):
            raise UserError(
                f"'memory.{name}' is true, but the model is whole on every rank: shard it, or its optimiser "
                "(parallel_config.enable_parallel_optimizer), or remove it"
            )


def check_offline_layout(
    config: SftConfig | DpoConfig | RewardModelConfig,
    paths: tuple[str, ...],
    world_size: int,
    row_lengths: tuple[int, ...],
    batch_size: int,
    section: str,
    *,
    as_scorers: bool = False,
) -> None:
    """Check that the models of a run on fixed data can be sharded over the ranks.

    Args:
        paths: of the models.
        batch_size: rows per micro-batch.
        section: that has ``batch_size`` and `row_lengths`.
        as_scorers: it is their scoring form that is trained.
    """
    parallel = config.parallel_config
    if not is_split(parallel):
        check_state_stays(config.memory)
        return
    layout = Layout.from_config(parallel, world_size)
    check_rows(parallel, layout, row_lengths, batch_size, section)
    for path in dict.fromkeys(paths):
        hf_config = read_hf_config(path)
        dims = find_spec(hf_config).dims(hf_config)
        trained = scorer_config(hf_config) if as_scorers else hf_config
        check_model(find_spec(trained).dims(trained), layout)
        if is_sharded(path):
            check_strategy_directory(Path(path) / STRATEGY_NAME, dims, layout)


def check_servers(config: GrpoConfig, world_size: int, num_nodes: int) -> None:
    """Check that each rollout server has a place, and that the model can be sharded over its devices.

    Args:
        world_size: ranks of the run.
        num_nodes: machines that they are on, in equal parts.
    """
    rollout, node_size = config.rollout, world_size // num_nodes
    place_servers(rollout, num_nodes, node_size)
    if config.profiler.vllm and spans_nodes(rollout, num_nodes, node_size):
        raise UserError(
            f"'profiler.vllm' is true, but servers of rollout.tensor_parallel {rollout.tensor_parallel} lie over "
            f"several nodes of {node_size} devices, which vLLM's profiler was not tried with: set it to false"
        )
    _check_buffer(config)
    if config.run.device == "cpu":
        return
    hf_config = read_hf_config(config.model.path)
    # Servers that leave devices idle run as well; the plan says what that costs.
    num_devices = min(world_size, rollout.num_replicas * rollout.tensor_parallel)
    check_rollout(rollout, find_spec(hf_config).dims(hf_config), num_devices)


def _check_buffer(config: GrpoConfig) -> None:
    hf_config = read_hf_config(config.model.path)
    spec = find_spec(hf_config)
    infos = buffer_infos(spec, spec.dims(hf_config), config.model.param_dtype, config.rollout.dtype)
    largest, limit = max(infos, key=lambda info: info.size_bytes), config.rollout.board_gib
    needed = align(largest.size_bytes) / 2**30
    if limit and needed > limit:
        raise UserError(
            f"'rollout.board_gib' is {limit:g}, but the tensor {largest.name} alone needs {needed:.3g}: set it to "
            f"{math.ceil(needed * 100) / 100:g} or more, or to 0"
        )
