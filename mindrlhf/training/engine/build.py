"""The worker of a rank, put together from the config of its run: models, losses and engines, whole or sharded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindrlhf.algorithms import policy_losses
from mindrlhf.algorithms.corrections import RolloutCorrection
from mindrlhf.algorithms.kl_control import UNBIASED_ESTIMATORS
from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.losses import CoefficientLoss, Loss, PolicyLoss, SupervisedLoss
from mindrlhf.algorithms.options import chosen
from mindrlhf.algorithms.scores import TokenScores
from mindrlhf.algorithms.value_loss import ValueLoss
from mindrlhf.checkpoint.state import CRITIC_NAME, MODEL_NAME
from mindrlhf.config.derived import (
    correction_weight,
    critic_optimizer,
    is_base,
    is_corrected,
    is_on_policy,
    needs_critic,
    reference_path,
)
from mindrlhf.config.memory import WHOLE, MemorySection
from mindrlhf.config.model import LoraSection
from mindrlhf.config.schema import AnyConfig, DpoConfig, GrpoConfig, OfflineConfig, RewardModelConfig, SftConfig
from mindrlhf.config.training import (
    SHARED_PROMPTS,
    OptimizerSection,
    ParallelSection,
    is_split,
    resolve_data_parallel,
    trains_sharded,
)
from mindrlhf.data.packing import PackedRows, padding_rows
from mindrlhf.debugging.kernel_dump import KernelDump
from mindrlhf.models.causal_lm import CausalLM, build_model, no_random_weights
from mindrlhf.models.lora.model import Lora
from mindrlhf.shards.sources import RandomSource, open_scorer_source, open_source
from mindrlhf.specs import scorer_config
from mindrlhf.training.checkpoints.models import begin_adapters, load
from mindrlhf.training.engine.actor import Actor
from mindrlhf.training.engine.critic import NO_TURNS, ActorCritic, Turns
from mindrlhf.training.engine.engine import Engine, WholeEngine
from mindrlhf.training.engine.model import Model, Whole
from mindrlhf.training.engine.offline import OfflineWorker
from mindrlhf.training.placement import Placement
from mindrlhf.training.runtime import Rank, start_parallel
from mindrlhf.training.vision.image_rows import ImageTokens, with_images
from mindrlhf.weights.hf import read_hf_config


def build_actor(config: GrpoConfig, row_lengths: tuple[int, ...], rank: Rank) -> Actor:
    """Build what a rank does in reinforcement learning: its part of every model of the run, and their graphs.

    Where the model is sharded, MindSpore shards every graph that this process compiles from here on.

    Raises:
        UserError: a model cannot be placed this way, or its weights do not fit.
    """
    kernel_dump = None
    if config.msprobe.config_path:
        kernel_dump = KernelDump(config.msprobe.config_path, Path(config.run.output_dir) / "dump")
    models = Models(config, row_lengths, config.training.micro_batch_size, rank)
    scorer = critic = None
    if config.reward.model_path:
        scorer = models.scores(config.reward.model_path, after_token=True)[1]
    if needs_critic(config):
        critic = _build_critic(models, config)
    head, model = models.policy(config.model.path, config.lora)
    engine = models.engine(model, build_policy_loss(config, head), config.optimizer)
    reference = _build_reference(models, config, model)
    models.make_ready()
    parts: dict = {"reference": reference, "saves_reference": config.algorithm.sync_ref_model}
    parts |= {"reward_model": scorer, "kernel_dump": kernel_dump}
    if critic is None:
        return Actor(engine, **parts)
    return ActorCritic(critic, _turns(models, engine, critic, reference), engine, **parts)


def build_policy_loss(config: GrpoConfig, policy: PolicyLogProbs) -> PolicyLoss:
    """Return the loss of a run over ``policy``, its log-probabilities."""
    algorithm = config.algorithm
    traits, estimator = policy_losses.traits(algorithm.loss), algorithm.kl_estimator
    options = {name: getattr(algorithm, name) for name in traits.keys} | chosen(traits.options, algorithm.options)
    correction, section = None, config.correction
    if is_corrected(config):
        correction = RolloutCorrection(
            weight=correction_weight(config),
            max_weight=section.max_weight,
            mask=section.mask,
            mask_low=section.mask_bounds[0],
            mask_high=section.mask_bounds[1],
            veto=section.veto,
            drift=section.off_policy_mask,
        )
    return PolicyLoss(
        policy,
        policy_losses.surrogate(algorithm.loss, **options),
        on_policy=is_on_policy(config) and not config.correction.bypass,
        kl_estimator=estimator.removesuffix("+") if algorithm.beta > 0 and algorithm.kl_in == "loss" else "",
        kl_unbiased=estimator in UNBIASED_ESTIMATORS,
        entropy_coefficient=algorithm.entropy_coefficient,
        correction=correction,
    )


def _build_reference(models: "Models", config: GrpoConfig, policy: Model) -> Model | None:
    path = reference_path(config)
    if not path:
        return None
    if is_base(config, path):
        return Model(policy.placement, policy.graph, is_base=True)
    reference = models.policy(path)[1]
    if policy.network.images is not None and path == config.model.path:
        reference.network.images.borrow(policy.network.images)
    return reference


def _build_critic(models: "Models", config: GrpoConfig) -> Engine:
    lora = replace(config.lora, path="")  # that adapter is the actor's
    head, model = models.scores(config.critic.path, lora, after_token=False, memory=config.memory)
    return models.engine(model, ValueLoss(head, config.critic.clip_range), critic_optimizer(config), CRITIC_NAME)


def _turns(models: "Models", engine: Engine, critic: Engine, reference: Model | None) -> Turns:
    """Have actor and critic take turns on the device where each is whole there, and nothing else moves state."""
    memory = models.config.memory
    if is_split(models.config.parallel_config) or memory.offload_optimizer or memory.swap_moments:
        return NO_TURNS
    frozen = [] if reference is None else reference.network.get_parameters()
    of_actor = [*engine.state_parameters(), *frozen]
    return Turns(models.config.run.device, {"actor": of_actor, "critic": critic.state_parameters()})


def build_offline(config: OfflineConfig, row_lengths: tuple[int, ...], rank: Rank) -> OfflineWorker:
    """Build what a rank does in training on fixed data; for arguments and errors see :func:`build_actor`."""
    models = Models(config, row_lengths, config.training.micro_batch_size, rank)
    path, reference = config.model.path, None
    if isinstance(config, RewardModelConfig):
        head, model = models.scores(path, config.lora, after_token=True, memory=config.memory)
    else:
        head, model = models.policy(path, config.lora)
    if isinstance(config, DpoConfig):
        if is_base(config, config.model.reference_path):
            reference = Model(model.placement, model.graph, is_base=True)
        elif config.model.reference_path:
            reference = models.policy(config.model.reference_path)[1]
    loss = (SupervisedLoss if isinstance(config, SftConfig) else CoefficientLoss)(head)
    engine = models.engine(model, loss, config.optimizer)
    models.make_ready()
    return OfflineWorker(engine, reference)


class Models:
    """Makes the models of a run on a rank, where its config places them: whole, or sharded."""

    def __init__(self, config: AnyConfig, row_lengths: tuple[int, ...], micro_batch_size: int, rank: Rank):
        self.config = config
        self._row_lengths, self._micro_batch_size, self._rank = row_lengths, micro_batch_size, rank
        is_rl = isinstance(config, GrpoConfig)
        self._temperature = config.rollout.temperature if is_rl else 1.0
        self._shares_prompts = is_rl and config.training.packing == SHARED_PROMPTS
        self._replays_routing = is_rl and config.training.replay_routing
        self._num_image_rows = micro_batch_size * row_lengths[-1]
        self._parallel = start_sharding(config, rank) if trains_sharded(config) else None
        # Of shards: what compiles for a length of rows, and what loads, once all is compiled.
        self._compiling: list[Callable[[int], None]] = []
        self._updates: list[Callable[[int], None]] = []
        self._loading: list[Callable[[], None]] = []

    def policy(self, path: str, lora: LoraSection | None = None) -> tuple[PolicyLogProbs, Model]:
        """Return the log-probabilities of the language model in a directory, at the temperature of sampling, and the
        model, with the adapters that ``lora`` asks for.
        """
        config, hf_config = self.config, read_hf_config(path)
        if self._parallel is not None:
            from mindrlhf.training.engine.factory import build_policy

            options = self._of_network(lora, config.memory, shares_prompts=self._shares_prompts)
            options |= {"temperature": self._temperature, "replays_routing": self._replays_routing}
            head = build_policy(hf_config, config.model, self._parallel, **options)
            return head, self._shard(head, path, lora)
        network = self._whole_network(hf_config, path, lora, config.memory)
        head = PolicyLogProbs(network, self._temperature, config.run.device, config.memory.logit_tile)
        return head, self._whole(head, path, lora)

    def scores(
        self, path: str, lora: LoraSection | None = None, *, after_token: bool, memory: MemorySection = WHOLE
    ) -> tuple[TokenScores, Model]:
        """Return the scores of the model in a directory in its scoring form, and the model; see :meth:`policy`.

        From a language model it takes all but the output projection, and the score's weight is 0: every text scores 0
        at first.

        Args:
            after_token: see :class:`mindrlhf.algorithms.scores.TokenScores`.
            memory: of its activations.
        """
        hf_config = scorer_config(read_hf_config(path))
        if self._parallel is not None:
            from mindrlhf.training.engine.factory import build_scores

            options = self._of_network(lora, memory, shares_prompts=self._shares_prompts and not after_token)
            head = build_scores(hf_config, self.config.model, self._parallel, **options)
            return head, self._shard(head, path, lora, after_token=after_token)
        head = TokenScores(self._whole_network(hf_config, path, lora, memory), after_token=after_token)
        return head, self._whole(head, path, lora)

    def _of_network(self, lora: LoraSection | None, memory: MemorySection, *, shares_prompts: bool) -> dict[str, Any]:
        """Return what the factory of sharded models takes of a network."""
        sizes = {"row_length": self._row_lengths[-1], "num_image_rows": self._num_image_rows}
        return {"lora": lora and lora.options, "memory": memory, "shared_prompts": shares_prompts, **sizes}

    def _whole_network(self, hf_config: dict, path: str, lora: LoraSection | None, memory: MemorySection) -> CausalLM:
        model, run = self.config.model, self.config.run
        with no_random_weights():
            network = build_model(
                hf_config,
                seq_length=self._row_lengths[-1],
                compute_dtype=model.compute_dtype,
                param_dtype=model.param_dtype,
                device=run.device,
                recompute=model.recompute,
                memory=memory,
                num_image_rows=self._num_image_rows,
            )
        if lora is not None and lora.options is not None:
            network.lora = Lora(network, lora.options, path)
        return network

    def _whole(self, head: PolicyLogProbs | TokenScores, path: str, lora: LoraSection | None) -> Model:
        placement = Whole(head.model, self._rank)
        self._load(placement, path, lora, isinstance(head, TokenScores))
        return Model(placement, head)

    def _shard(
        self, head: PolicyLogProbs | TokenScores, path: str, lora: LoraSection | None, *, after_token: bool = False
    ) -> Model:
        from mindrlhf.training.engine.factory import build_logprobs
        from mindrlhf.training.engine.shards import Shards

        shards = Shards(head.model, self._parallel, self._rank.index, after_token=after_token)
        graph = build_logprobs(head, self._parallel)
        shares_prompts, seen = self._shares_prompts and not after_token, ImageTokens.of(head.model.dims)
        self._compiling.append(lambda length: shards.compile(graph, self._rows(length, shares_prompts, seen)))
        self._loading.append(lambda: self._load(shards, path, lora, isinstance(head, TokenScores)))
        return Model(shards, graph)

    def _load(self, placement: Placement, path: str, lora: LoraSection | None, is_scorer: bool) -> None:
        """Give a model the weights of a directory, or those of ``run.seed``, and its adapters what they begin with."""
        config = self.config
        if config.model.random_init and path == config.model.path:
            load(placement, RandomSource(path, config.run.seed, as_scorer=is_scorer))
        else:
            load(placement, (open_scorer_source if is_scorer else open_source)(path))
        if placement.network.lora is not None:
            begin_adapters(placement, config.run.seed, lora.path)

    def engine(self, model: Model, loss: Loss, optimizer: OptimizerSection, name: str = MODEL_NAME) -> Engine:
        """Return what trains one of the models; ``name`` as :class:`Engine` takes it."""
        if self._parallel is None:
            return WholeEngine(model, loss, optimizer, self._rank, name)
        from mindrlhf.training.engine.factory import build_update
        from mindrlhf.training.engine.offload import OptimizerPlaces
        from mindrlhf.training.engine.sharded_updates import ShardedEngine, UpdateGraph

        update = build_update(loss, optimizer, self._parallel)
        graph = UpdateGraph.of(update, self.config.memory, loss.inputs)
        places = OptimizerPlaces(update, model.placement.held, self.config.memory)
        engine = ShardedEngine(model, graph, places, name)
        seen = ImageTokens.of(model.network.dims)
        self._updates.append(lambda length: engine.compile(self._rows(length, self._shares_prompts, seen)))
        return engine

    def make_ready(self) -> None:
        """Compile the graphs of all models made so far, and only then, when they have memory, load the weights.

        The update of the model that came last is compiled last, so that MindSpore's strategy file is that of it, which
        has the optimiser's state. Models that are whole were ready before.
        """
        for length in self._row_lengths:
            for compile_for in (*self._compiling, *self._updates):
                compile_for(length)
        for load_model in self._loading:
            load_model()

    def _rows(self, length: int, shares_prompts: bool, seen: ImageTokens | None) -> PackedRows:
        rows = padding_rows((self._micro_batch_size, length), share_prompts=shares_prompts)
        return with_images(rows, (), (), seen)


def start_sharding(config: AnyConfig, rank: Rank) -> ParallelSection:
    """Have MindSpore shard the graphs of a run from now on; return its layout with `data_parallel` filled in."""
    parallel = config.parallel_config
    parallel = replace(parallel, data_parallel=resolve_data_parallel(parallel, rank.world_size))
    strategy_dir = Path(config.run.output_dir) / "logs" / "strategy"
    strategy_dir.mkdir(parents=True, exist_ok=True)
    start_parallel(parallel, rank, strategy_dir / f"strategy_rank_{rank.index}.ckpt")
    return parallel
