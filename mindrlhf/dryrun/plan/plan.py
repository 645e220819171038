"""The plan of a run: what every rank computes, holds and sends, worked out from the config and the model's config.json.

Parameters and optimiser state are sums over the parameter layouts, exact to the byte; activations, logits, the
generator's share and the runtime are estimates, and marked so. Nothing here imports MindSpore.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from mindrlhf.config.derived import is_base, reference_path
from mindrlhf.config.memory import check_num_layers
from mindrlhf.config.rollout import RolloutSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.training import SHARED_PROMPTS, ParallelSection, trains_sharded
from mindrlhf.dryrun.plan.activations import LayerWidths, model_widths
from mindrlhf.dryrun.plan.memory import MemoryInputs, PhaseMemory, plan_memory
from mindrlhf.dryrun.plan.parameters import (
    ADAPTER_BYTES,
    ELEMENT_BYTES,
    KnownRules,
    OptimizerState,
    ParameterRow,
    StageState,
    active_parameters,
    count_parameters,
    parameter_rows,
    stage_states,
    untrained_names,
)
from mindrlhf.dryrun.plan.rollout import RolloutPlan, plan_rollout
from mindrlhf.dryrun.plan.roofline import DEVICES, Device, StepSeconds, of_node, roofline
from mindrlhf.layout.batch import BatchPlan
from mindrlhf.layout.feasibility import check_feasible, check_model, check_num_ranks, check_rollout
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.layout.servers import place_servers
from mindrlhf.specs import ModelDims, ModelSpec, find_spec
from mindrlhf.specs.lora import LoraOptions
from mindrlhf.specs.rules import VISION_PREFIX
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.infos import buffer_infos
from mindrlhf.weights.publish.buffer import buffer_bytes


@dataclass(frozen=True)
class Machine:
    """Cluster of a plan: ``world_size`` devices of ``device_bytes``, ``node_size`` of them per node."""

    world_size: int
    device_bytes: int
    node_size: int
    kind: Device = DEVICES["A2"]

    @property
    def device(self) -> Device:
        """A device with the links of these nodes."""
        return of_node(self.kind, self.node_size)

    @property
    def num_nodes(self) -> int:
        """Nodes that the devices take; the last may have devices to spare."""
        return -(-self.world_size // self.node_size)


@dataclass(frozen=True, eq=False)
class Model:
    """Model of a plan."""

    name: str
    spec: ModelSpec
    dims: ModelDims
    hf_config: dict

    @cached_property
    def widths(self) -> list[LayerWidths]:
        """Widths of every decoder layer."""
        return model_widths(self.spec, self.dims)

    @cached_property
    def widths_with_prompts(self) -> list[LayerWidths]:
        """The same where samples of a row share prompts."""
        return model_widths(self.spec, self.dims, shares_prompts=True)

    @cached_property
    def known(self) -> KnownRules:
        """The spec with its rules spelled out once."""
        return KnownRules(self.spec, self.dims)

    @cached_property
    def untrained(self) -> dict[str, bool]:
        """The parameters that gradients do not change; see ``untrained_names``."""
        return untrained_names(self.known, self.dims)

    @cached_property
    def num_active(self) -> int:
        """Parameters that one token meets."""
        return active_parameters(self.known, self.dims)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 in a dense model."""
        return max(widths.num_experts for widths in self.widths)


@dataclass(frozen=True)
class TowerPlan:
    """Vision tower, whole on every rank of the first pipeline stage.

    Attributes:
        num_parameters: elements.
        run_bytes: memory of the widest operator, for one image that fills a prompt.
    """

    num_parameters: int
    run_bytes: int


@dataclass(frozen=True)
class Plan:
    """Sizes of a run on a cluster.

    Attributes:
        num_parameters: elements of the whole model, without adapters.
        num_adapter_parameters: elements of its adapters; 0 where all of it is trained.
        layer_stages: pipeline stage of every decoder layer.
        states: exact parameter and optimiser state of a rank, by pipeline stage.
        tower: the frozen vision tower; None for a model of text.
        memory: every phase of the loop for every pipeline stage.
        buffer_bytes: host memory of the weight buffer on each node.
        seconds: roofline of a step.
    """

    config: GrpoConfig
    machine: Machine
    model: Model
    layout: Layout
    num_parameters: int
    num_adapter_parameters: int
    layer_stages: tuple[int, ...]
    batch: BatchPlan
    states: tuple[StageState, ...]
    rows: tuple[ParameterRow, ...]
    rollout: RolloutPlan
    memory: tuple[PhaseMemory, ...]
    buffer_bytes: int
    seconds: StepSeconds
    tower: TowerPlan | None

    @property
    def peak(self) -> PhaseMemory:
        """The phase and pipeline stage that need most memory."""
        return max(self.memory, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """True when every phase fits the device, with room for one sequence per generator."""
        return self.peak.total <= self.machine.device_bytes and self.rollout.num_full_sequences >= 1


def read_model(path: str) -> Model:
    """Read the config.json that a plan is made from; weights are not needed.

    Raises:
        UserError: the directory or file is missing, or the model is not supported.
    """
    hf_config = read_hf_config(path)
    spec = find_spec(hf_config)
    return Model(path.rstrip("/").rpartition("/")[2], spec, spec.dims(hf_config), hf_config)


def _check_places(rollout: RolloutSection, machine: Machine) -> None:
    """Check that the servers can be laid over the nodes.

    Raises:
        UserError: they cannot.
    """
    node_size = min(machine.node_size, machine.world_size)
    # Ranks that do not fill nodes of this size have to be on others, all of one size.
    if machine.world_size % node_size == 0 or rollout.tensor_parallel > node_size:
        place_servers(rollout, machine.num_nodes, node_size)


def prepare(config: GrpoConfig, model: Model, machine: Machine) -> tuple[MemoryInputs, list[ParameterLayout]]:
    """Lay a run out: what its memory follows from. Checks the model against the layout on the way.

    Raises:
        UserError: the model cannot be sharded this way, or the numbers do not fit together; names the fix.
    """
    check_num_layers(config.memory, model.dims.num_layers, model.dims.has_dense_mlps)
    layout = Layout.from_config(config.parallel_config, machine.world_size)
    batch = check_feasible(config, model.dims, layout)
    if trains_sharded(config):
        check_num_ranks(machine.world_size)
    if config.run.device != "cpu":  # where servers share cores, and any number of them runs
        check_rollout(config.rollout, model.dims, machine.world_size)
    _check_places(config.rollout, machine)
    layouts, _ = _layouts(model, layout, config.model.param_dtype, config.lora.options)
    adds_up = trains_sharded(config) and accumulates(config.parallel_config)
    options = (config.model.param_dtype, config.lora.options, adds_up, config.optimizer.type)
    states = _states(model, layout, *options)
    inputs = MemoryInputs(
        config=config,
        layout=layout,
        dims=model.dims,
        widths=model.widths_with_prompts if config.training.packing == SHARED_PROMPTS else model.widths,
        layer_stages=layout.layer_stages(model.dims.num_layers),
        states=states,
        batch=batch,
        rollout=plan_rollout(
            config.rollout, model.known, model.dims, device_bytes=machine.device_bytes, row_length=batch.row_length
        ),
        num_communicators=_num_communicators(layout, layouts),
    )
    path = reference_path(config)
    reference = _reference(inputs, path) if path and not is_base(config, path) else None
    return dataclasses.replace(inputs, reference=reference), layouts


def _num_communicators(layout: Layout, layouts: Sequence[ParameterLayout]) -> int:
    """Return the communication groups that a rank is in: the world, one of each axis, one of each optimiser shard."""
    axes = (layout.model_parallel, layout.context_parallel, layout.data_parallel, layout.pipeline_stage)
    shards = {(each.optimizer_shard_size, each.optimizer_shard_step) for each in layouts} - {(1, 1), (1, 0)}
    return 1 + sum(size > 1 for size in (*axes, layout.expert_parallel)) + len(shards)


def _reference(inputs: MemoryInputs, path: str) -> MemoryInputs:
    """Return what the memory of a frozen model follows from; one that is not here is taken to be as the trained."""
    config, layout = inputs.config, inputs.layout
    if path == config.model.path or not (Path(path) / "config.json").is_file():
        return inputs
    model = _frozen(path)
    check_model(model.dims, layout)
    states = _states(model, layout, config.model.param_dtype, None, False, config.optimizer.type)
    stages = layout.layer_stages(model.dims.num_layers)
    return dataclasses.replace(inputs, dims=model.dims, widths=model.widths, layer_stages=stages, states=states)


_frozen = lru_cache(maxsize=8)(read_model)


def accumulates(parallel: ParallelSection) -> bool:
    """True when the compiler adds up gradients of pipeline micro-batches, in memory of their own."""
    return parallel.pipeline_stage > 1 or parallel.micro_batch_num > 1


@lru_cache(maxsize=4)
def _layouts(
    model: Model, layout: Layout, param_dtype: str, lora: LoraOptions | None
) -> tuple[list[ParameterLayout], list[ParameterLayout]]:
    """Layouts of parameters and of LoRA factors. Cached: the search changes only keys they do not depend on."""
    layouts = parameter_layouts(model.known, model.dims, layout, ELEMENT_BYTES[param_dtype])
    if lora is None:
        return layouts, []
    rules = KnownRules(model.spec, model.dims, lora)
    return layouts, parameter_layouts(rules, model.dims, layout, ADAPTER_BYTES)


@lru_cache(maxsize=4)
def _states(
    model: Model, layout: Layout, param_dtype: str, lora: LoraOptions | None, accumulates: bool, optimizer: str
) -> list[StageState]:
    layouts, factors = _layouts(model, layout, param_dtype, lora)
    state = _optimizer_state(model, lora, optimizer)
    return stage_states(layouts, layout.pipeline_stage, param_dtype, model.untrained, accumulates, factors, state)


@lru_cache(maxsize=4)
def _optimizer_state(model: Model, lora: LoraOptions | None, optimizer: str) -> OptimizerState:
    rules = (model.known if lora is None else KnownRules(model.spec, model.dims, lora)).rules(model.dims)
    return OptimizerState(optimizer, {rule.mf_name: rule.matrices(model.dims) for rule in rules})


def _buffer_bytes(config: GrpoConfig, model: Model) -> int:
    """Host memory of the weight buffer on each node."""
    infos = buffer_infos(model.known, model.dims, config.model.param_dtype, config.rollout.dtype)
    return buffer_bytes(infos, int(config.rollout.weight_buffer_gib * 2**30))


def _plan_tower(inputs: MemoryInputs, layouts: Sequence[ParameterLayout]) -> TowerPlan | None:
    vision = inputs.dims.vision
    if vision is None:
        return None
    num_tokens = inputs.batch.row_length - inputs.config.rollout.max_response_length
    widths = vision.hidden_size + 3 * vision.intermediate_size
    return TowerPlan(
        count_parameters([layout for layout in layouts if layout.name.startswith(VISION_PREFIX)]),
        num_tokens * vision.merge_size**2 * widths * inputs.element_bytes,
    )


def make_plan(config: GrpoConfig, model: Model, machine: Machine) -> Plan:
    """Plan a run; raises UserError as :func:`prepare` does."""
    inputs, layouts = prepare(config, model, machine)
    factors = _layouts(model, inputs.layout, config.model.param_dtype, config.lora.options)[1]
    optimizer_state = _optimizer_state(model, config.lora.options, config.optimizer.type)
    return Plan(
        config=config,
        machine=machine,
        model=model,
        layout=inputs.layout,
        num_parameters=count_parameters(layouts),
        layer_stages=tuple(inputs.layer_stages),
        batch=inputs.batch,
        states=tuple(inputs.states),
        num_adapter_parameters=count_parameters(factors),
        rows=tuple(parameter_rows(layouts, config.model.param_dtype, model.untrained, factors, optimizer_state)),
        rollout=inputs.rollout,
        memory=tuple(plan_memory(inputs)),
        buffer_bytes=_buffer_bytes(config, model),
        seconds=roofline(inputs, model.num_active, machine.device),
        tower=_plan_tower(inputs, layouts),
    )
