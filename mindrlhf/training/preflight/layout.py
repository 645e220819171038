"""Checks of a layout before a device is touched: ranks, nodes, servers and the directories of shards."""

import dataclasses
import math
from pathlib import Path

from mindrlhf.config.derived import needs_critic, reference_path
from mindrlhf.config.schema import GrpoConfig, OfflineConfig
from mindrlhf.errors import UserError
from mindrlhf.layout.batch import check_rows
from mindrlhf.layout.feasibility import check_feasible, check_model, check_num_ranks, check_rollout
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.servers import place_servers, spans_nodes
from mindrlhf.rollout.vllm_options import VLLM
from mindrlhf.shards.strategy_files import check_strategy_directory
from mindrlhf.specs import ModelDims, find_spec
from mindrlhf.training.preflight.features import model_dims
from mindrlhf.weights.convert import buffer_infos
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.open import is_sharded
from mindrlhf.weights.sharded import STRATEGY_NAME
from mindrlhf.weights.tensors import align


def check_layout(config: GrpoConfig, row_lengths: tuple[int, ...], world_size: int) -> None:
    """Check that the models can be sharded over the ranks, and that what the run needs beside the actor can."""
    if config.run.device == "cpu":  # which trains whole models
        return
    layout = Layout.from_config(config.parallel_config, world_size)
    check_num_ranks(world_size)
    if needs_critic(config):
        check_model(model_dims(config.critic.path, as_scorer=True), layout)
    for path in dict.fromkeys(filter(None, (config.model.path, reference_path(config)))):
        dims = model_dims(path)
        for length in row_lengths:  # that the plan would have, and that may have come from the data
            training = dataclasses.replace(config.training, sequence_lengths=(length,))
            check_feasible(dataclasses.replace(config, training=training), dims, layout)
        _check_strategy(path, dims, layout)
    if config.reward.model_path:
        check_model(model_dims(config.reward.model_path), layout)


def check_offline_layout(
    config: OfflineConfig,
    paths: tuple[str, ...],
    world_size: int,
    row_lengths: tuple[int, ...],
    micro_batch_size: int,
    as_scorer: bool = False,
) -> None:
    """Check that the models of a run on fixed data can be sharded over the ranks.

    Args:
        paths: of the models.
        micro_batch_size: packed sequences per micro-batch.
        as_scorer: it is their scoring form that is trained.
    """
    if config.run.device == "cpu":  # which trains whole models
        return
    layout = Layout.from_config(config.parallel_config, world_size)
    check_num_ranks(world_size)
    check_rows(config.parallel_config, row_lengths, micro_batch_size)
    for path in dict.fromkeys(paths):
        dims = model_dims(path)
        check_model(model_dims(path, as_scorer=as_scorer), layout)
        _check_strategy(path, dims, layout)


def _check_strategy(path: str, dims: ModelDims, layout: Layout) -> None:
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
    spans = spans_nodes(rollout, num_nodes, node_size)
    if spans and rollout.engine != VLLM:
        raise UserError(
            f"'rollout.engine' is {rollout.engine}, but servers of rollout.tensor_parallel {rollout.tensor_parallel} "
            f"lie over several nodes of {node_size} devices, which vLLM's alone do: lower it"
        )
    if "vllm" in config.profiler.tools and spans:
        raise UserError(
            f"'profiler.tools' has vllm, but servers of rollout.tensor_parallel {rollout.tensor_parallel} lie over "
            f"several nodes of {node_size} devices, which vLLM's profiler was not tried with: set it to false"
        )
    _check_buffer(config)
    if config.run.device == "cpu":
        return
    # Servers that leave devices idle run as well; the plan says what that costs.
    num_devices = min(world_size, rollout.num_replicas * rollout.tensor_parallel)
    check_rollout(rollout, model_dims(config.model.path), num_devices)


def _check_buffer(config: GrpoConfig) -> None:
    hf_config = read_hf_config(config.model.path)
    spec = find_spec(hf_config)
    infos = buffer_infos(spec, spec.dims(hf_config), config.model.param_dtype, config.rollout.dtype)
    largest, limit = max(infos, key=lambda info: info.size_bytes), config.rollout.weight_buffer_gib
    needed = align(largest.size_bytes) / 2**30
    if limit and needed > limit:
        raise UserError(
            f"'rollout.weight_buffer_gib' is {limit:g}, but the tensor {largest.name} alone needs {needed:.3g}: "
            f"set it to {math.ceil(needed * 100) / 100:g} or more, or to 0"
        )
