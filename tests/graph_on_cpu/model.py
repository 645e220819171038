"""The product's worker of a sharded model, over graphs that were compiled for Ascend and lowered for the CPU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
from mindspore import nn
from mindspore.communication import create_group

from graph_on_cpu.lower import LoweredGraph, lower_graph
from graph_on_cpu.mindir import LOWERED_PREFIX, LoweringError
from graph_on_cpu.run import SEED
from mindrlhf.algorithms.optimizers import GLOBAL_STEP_NAME, GRAPH_NAMES
from mindrlhf.algorithms.value_loss import VALUE_INPUTS
from mindrlhf.checkpoint.state import CRITIC_NAME
from mindrlhf.config.training import ParallelSection
from mindrlhf.layout.rows import updates_return_outputs
from mindrlhf.models.causal_lm import build_model
from mindrlhf.models.context import prepare_mindformers
from mindrlhf.models.lora.model import scale_name
from mindrlhf.models.vision.images import ImageRows
from mindrlhf.shards.sources import open_source
from mindrlhf.specs import find_spec
from mindrlhf.specs.lora import SCALE_NAME, LoraOptions
from mindrlhf.specs.rules import VISION_PREFIX
from mindrlhf.training.checkpoints.models import begin_adapters, load
from mindrlhf.training.engine.actor import Actor
from mindrlhf.training.engine.critic import NO_TURNS, ActorCritic
from mindrlhf.training.engine.model import Model
from mindrlhf.training.engine.sharded_updates import ShardedEngine, UpdateGraph
from mindrlhf.training.engine.shards import Shards

# State that starts at zero: the optimiser's, gradients, their defect, and what the lowering has added.
_STATES = tuple(f"{name}." for name in GRAPH_NAMES.values())
_ZERO_PREFIXES = (*_STATES, "accu_grads", "grad.", GLOBAL_STEP_NAME, "defect", LOWERED_PREFIX)
_ROUTER_STATE = (".fi_accu", ".expert_load")  # what MindFormers' routers would count; nothing reads it
_LEARNING_RATE, _IS_LAST, _IMAGE_ROWS = "learning_rate", "is_last", "image_rows"  # what the host sets


@dataclass(frozen=True)
class _Named:
    name: str
    dtype: ms.Type = ms.float32
    requires_grad: bool = True


class DescribedModel:
    """Names and dtypes of a model, which is what the product reads of one whose graphs are given to it."""

    def __init__(self, hf_config: dict, lora: dict | None = None, replays_routing: bool = False):
        self.tokens_and_experts = replays_routing or None
        self.hf_config = hf_config
        self.spec = find_spec(hf_config)
        self.dims = self.spec.dims(hf_config)
        self.lora = SimpleNamespace(options=LoraOptions(**lora), base_path="base") if lora else None
        self.head_weight = _Named("head")
        self.images: ImageRows | None = None

    def get_parameters(self) -> list[_Named]:
        """Return all of the model, also what other ranks hold."""
        return [_Named(rule.mf_name, requires_grad=rule.trained) for rule in self.spec.rules(self.dims)]


class LoweredCell:
    """A graph of this rank that the CPU runs."""

    def __init__(self, lowered: LoweredGraph):
        self._cell = nn.GraphCell(ms.load(lowered.path))
        self.parameters = {parameter.name: parameter for parameter in self._cell.get_parameters()}
        for parameter in self.parameters.values():
            if parameter.name.startswith(_ZERO_PREFIXES) or parameter.name.endswith(_ROUTER_STATE):
                parameter.set_data(ms.ops.zeros(parameter.shape, parameter.dtype))

    def __call__(self, *inputs: ms.Tensor) -> tuple[ms.Tensor, ...]:
        outputs = self._cell(*inputs)
        return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)

    def check_names(self, weights: Iterable[str]) -> None:
        """Raise LoweringError unless the graph has these weights and nothing else that would need a value."""
        in_graph = {name for name in weights if not name.startswith(VISION_PREFIX)}
        known = {*in_graph, _LEARNING_RATE, _IS_LAST, _IMAGE_ROWS}
        if missing := sorted(in_graph - self.parameters.keys()):
            raise LoweringError(f"the graph lacks {missing[0]}")
        # A tower, which the graph does not run, is among its parameters all the same.
        prefixes = (*_ZERO_PREFIXES, VISION_PREFIX, SCALE_NAME)
        unknown = [name for name in self.parameters if name not in known and not name.startswith(prefixes)]
        if unknown := [name for name in unknown if not name.endswith(_ROUTER_STATE)]:
            raise LoweringError(f"the graph has an unknown parameter {unknown[0]}")


@dataclass
class RecordedUpdate:
    """An update, or its gradients, that notes the loss of every call, in one list for both."""

    cell: "LoweredCell | SharedGraph"
    losses: list[float] = field(default_factory=list)

    def __call__(self, *inputs: ms.Tensor) -> tuple[ms.Tensor, ...]:
        outputs = self.cell(*inputs)
        self.losses.append(float(outputs[0].asnumpy().reshape(-1)[0]))
        return outputs


@dataclass
class SharedGraph:
    """A graph on parameters of another: each was loaded with its own."""

    cell: LoweredCell
    shared: dict[str, ms.Parameter]

    def __call__(self, *inputs: ms.Tensor) -> tuple[ms.Tensor, ...]:
        for name, parameter in self.shared.items():
            if name in self.cell.parameters:
                # One memory for both from here on, until either is given other data.
                self.cell.parameters[name].set_data(parameter)
        return self.cell(*inputs)


class LoweredRank:
    """The graphs of one job on one rank.

    Args:
        job: its entry in the file of jobs.
        hf_config: the model's config.json.
        rank: number of this rank.
        directory: for lowered graphs.
        groups: communication groups made so far; those of this job are added.

    Attributes:
        parallel: the layout.
        actor: the product's.
        update: its update.
        replaced: nodes of the update that were rewritten, by operator.
    """

    def __init__(self, job: dict, hf_config: dict, rank: int, directory: Path, groups: dict[str, tuple[int, ...]]):
        self._job, self._rank, self._directory, self._groups = job, rank, directory, groups
        network = DescribedModel(hf_config, job["lora"], job["replays_routing"])
        self.parallel = ParallelSection(**job["parallel"])
        lowered, cell = self._load("graphs")
        self.replaced = lowered.replaced
        gradients = None
        if job["gradient_graphs"]:
            own = {name: one for name, one in cell.parameters.items() if not name.startswith(LOWERED_PREFIX)}
            gradients = SharedGraph(self._load("gradient_graphs")[1], own)
        self.update = RecordedUpdate(cell)
        parameters = self._with_tower(network, cell)
        outputs = SharedGraph(self._load("output_graphs")[1], {})
        shards = Shards(network, self.parallel, rank, parameters, after_token=job["after_token"])
        model, names = Model(shards, outputs), list(shards.held)
        scale = scale_name(shards.stage)
        shared = (*names, _IMAGE_ROWS, scale)
        outputs.shared = {name: parameters[name] for name in shared if name in cell.parameters}
        for each in (cell, outputs.cell):
            each.check_names(names)
        graph = UpdateGraph(
            cell if job["steps_apart"] else self.update,
            parameters[_LEARNING_RATE],
            parameters[_IS_LAST],
            _optimizer_state(parameters),
            tuple(job["token_inputs"]),
            gradients and RecordedUpdate(gradients, self.update.losses),
            job["steps_apart"],
            updates_return_outputs(self.parallel),
        )
        source = open_source(job["model_dir"])
        load(shards, source)
        if job["lora"]:
            parameters[scale].set_data(ms.Tensor([network.lora.options.scale], ms.float32))
            begin_adapters(shards, SEED, "")
            reference = Model(shards, outputs, is_base=True)
        else:
            reference = self._own_reference(hf_config, names)
            load(reference.placement, source)
        engine = ShardedEngine(model, graph)
        if graph.token_inputs == VALUE_INPUTS:
            # A critic stands for the actor too: what is asked of a model is asked of it by both ways.
            critic = ShardedEngine(model, graph, name=CRITIC_NAME)
            self.actor = ActorCritic(critic, NO_TURNS, engine, reference=reference)
        else:
            self.actor = Actor(engine, reference)

    def _own_reference(self, hf_config: dict, names: Sequence[str]) -> Model:
        network, cell = DescribedModel(hf_config, None, self._job["replays_routing"]), self._load("output_graphs")[1]
        cell.check_names(names)
        parameters = self._with_tower(network, cell)
        shards = Shards(network, self.parallel, self._rank, parameters, after_token=self._job["after_token"])
        return Model(shards, cell)

    def _with_tower(self, network: DescribedModel, cell: LoweredCell) -> dict[str, ms.Parameter]:
        """Return all parameters of a model, with those of a vision tower, which runs on the CPU's own cells."""
        vision = network.dims.vision
        if vision is None or _IMAGE_ROWS not in cell.parameters:
            return cell.parameters
        prepare_mindformers("cpu", self._directory / "mindformers")
        tower = build_model(network.hf_config, seq_length=8).visual
        network.images = ImageRows(tower, cell.parameters[_IMAGE_ROWS], vision.geometry, vision.window_side)
        return {**cell.parameters, **{parameter.name: parameter for parameter in tower.get_parameters()}}

    def _load(self, kind: str) -> tuple[LoweredGraph, LoweredCell]:
        out_path = self._directory / f"lowered_{kind}_{self._rank}.mindir"
        lowered = lower_graph(self._job[kind][self._rank], self._rank, out_path)
        make_groups(lowered, self._groups)
        return lowered, LoweredCell(lowered)


def _optimizer_state(parameters: dict[str, ms.Parameter]) -> dict[str, ms.Parameter]:
    """Return the optimiser's state by its names in a checkpoint."""
    state = {GLOBAL_STEP_NAME: parameters[GLOBAL_STEP_NAME]}
    for name, parameter in parameters.items():
        for kind, prefix in GRAPH_NAMES.items():
            if name.startswith(f"{prefix}."):
                state[kind + name.removeprefix(prefix)] = parameter
    return state


def make_groups(lowered: LoweredGraph, made: dict[str, tuple[int, ...]]) -> None:
    """Create the groups of a graph that have not been made yet, in an order that all ranks share."""
    for name, ranks in sorted(lowered.groups.items()):
        assert made.get(name, ranks) == ranks, f"group {name} is both {made[name]} and {ranks}"
        if name not in made:
            create_group(name, list(ranks))
            made[name] = ranks
