"""Checks of a layout before a device is touched: ranks, nodes, servers and the directories of shards."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from mindrlhf.config.schema import AnyConfig, GrpoConfig
from mindrlhf.errors import UserError
from mindrlhf.layout.batch import check_rows
from mindrlhf.layout.feasibility import check_feasible, check_model, check_num_ranks, check_rollout
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.servers import place_servers, spans_nodes
from mindrlhf.rollout.vllm_options import VLLM
from mindrlhf.shards.strategy_files import check_strategy_directory
from mindrlhf.specs import find_spec
from mindrlhf.training.preflight.features import model_dims
from mindrlhf.training.preflight.models import roles_of
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.infos import buffer_infos
from mindrlhf.weights.open import is_sharded
from mindrlhf.weights.sharded import STRATEGY_NAME
from mindrlhf.weights.tensors import align


def check_layout(config: AnyConfig, row_lengths: Sequence[int], world_size: int) -> None:
    """Check that the models of a run can be sharded over the ranks, and that what it needs beside them can."""
    if config.run.device == "cpu":  # which trains whole models
        return
    layout = Layout.from_config(config.parallel_config, world_size)
    check_num_ranks(world_size)
    if not isinstance(config, GrpoConfig):
        check_rows(config.parallel_config, row_lengths, config.training.micro_batch_size)
    for role in roles_of(config):
        dims = model_dims(role.path)
        check_model(model_dims(role.path, as_scorer=role.as_scorer), layout)
        if role.is_of_actor:
            for length in row_lengths if isinstance(config, GrpoConfig) else ():
                # That the plan would have, and that may have come from the data.
                training = dataclasses.replace(config.training, sequence_lengths=(length,))
                check_feasible(dataclasses.replace(config, training=training), dims, layout)
            if is_sharded(role.path):
                check_strategy_directory(Path(role.path) / STRATEGY_NAME, dims, layout)


def check_servers(config: GrpoConfig, world_size: int, num_nodes: int) -> None:
    """Check that each rollout server has a place, and that the model can be sharded over its devices."""
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
