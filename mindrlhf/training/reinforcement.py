"""A reinforcement learning run put together from its config: what each rank builds, and what rank 0 adds."""

import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.algorithm_state import LearningState
from mindrlhf.checkpoint.state import CRITIC_NAME, MODEL_NAME
from mindrlhf.config.derived import needs_critic
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.training import UNPACKED, trains_sharded
from mindrlhf.data.metadata import add_generation
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.stream import PromptStream
from mindrlhf.evaluation.comparison import summary_text, write_summary
from mindrlhf.evaluation.heldout import HeldOut, accuracy_verifier
from mindrlhf.layout.packing import row_cost
from mindrlhf.layout.servers import Places, place_servers
from mindrlhf.observe.fingerprint import FINGERPRINT_NAME, FingerprintWriter
from mindrlhf.observe.samples import SampleWriter
from mindrlhf.observe.timing import StageTimer
from mindrlhf.observe.viewer.page import write_pages
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.registry import part_name
from mindrlhf.rollout.conversations import with_tools
from mindrlhf.rollout.newcomers import Newcomers, take_address
from mindrlhf.rollout.pool import ServerPool, own_servers
from mindrlhf.rollout.processes.node import NodeServers
from mindrlhf.rollout.samples import Sampler
from mindrlhf.rollout.types import SamplingParams
from mindrlhf.specs import find_spec
from mindrlhf.system import heartbeat
from mindrlhf.system.terminal import visible
from mindrlhf.training import nodes as machines
from mindrlhf.training.batch import RowOptions
from mindrlhf.training.checkpoints.requests import SaveRequests
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints
from mindrlhf.training.checkpoints.shards import export_adapters
from mindrlhf.training.loop.guards import Guards, Observers
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.loop.reward_model import RewardModel
from mindrlhf.training.loop.sampling import segments  # noqa: F401 (its records are in checkpoints)
from mindrlhf.training.loop.sampling.in_step import PromptSampling, Rollout
from mindrlhf.training.preflight import RunInputs, check_grpo_inputs, check_sandbox
from mindrlhf.training.preflight.features import replayed_experts
from mindrlhf.training.preflight.output import FINAL_NAME
from mindrlhf.training.preflight.rewards import try_rewards
from mindrlhf.training.profiling.ranks import profile_dir
from mindrlhf.training.replica_team import with_replicas
from mindrlhf.training.runtime import Rank, num_nodes_from_environment, num_ranks_from_environment
from mindrlhf.training.team import Team
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.publish.export import sharded_tensors
from mindrlhf.weights.publish.publisher import open_weight_buffers


class ReinforcementTask:
    """Reinforcement learning as :func:`mindrlhf.training.train.train` runs it."""

    accuracy = "held-out accuracy"

    def __init__(self, config: GrpoConfig):
        num_ranks, num_nodes = num_ranks_from_environment(), num_nodes_from_environment()
        inputs = check_grpo_inputs(config, num_ranks, num_nodes=num_nodes)
        self.shown_steps = inputs.num_steps
        self._config = config
        self._inputs = inputs
        self._output_dir = Path(config.run.output_dir)
        self._listen_at = take_address()
        self._places = place_servers(config.rollout, num_nodes, num_ranks // num_nodes)
        self._servers: NodeServers | None = None  # of this node
        self._helpers = None, None  # verifiers and agents of this node, where it is not rank 0's
        self._generator: ServerPool | None = None  # on rank 0: the servers of all nodes, once connected

    def start_early(self, stack: contextlib.ExitStack) -> None:
        """Start the generator: it takes as long as the training graphs to compile, so let them overlap."""
        if sandbox := check_sandbox(self._config):
            print(f"mindrlhf: {sandbox}", flush=True)
        log_dir = self._output_dir / "logs"
        print(f"mindrlhf: starting vLLM, while the trainer starts; log: {log_dir / 'rollout_0.log'}", flush=True)
        self._generator = ServerPool([], self._config.rollout.restarts)
        self._start_servers(stack, log_dir)

    def start_early_elsewhere(self, stack: contextlib.ExitStack) -> None:
        self._helpers = machines.start_helpers(self._config, stack)
        self._start_servers(stack, self._output_dir / "logs" / f"rollout_{socket.gethostname()}")

    def _start_servers(self, stack: contextlib.ExitStack, log_dir: Path) -> None:
        self._servers = servers_of_node(self._config, self._inputs, self._places, stack, log_dir)

    def servers(self) -> ServerPool | None:
        return self._generator

    def build_worker(self, rank: Rank):
        from mindrlhf.training.engine.build import build_actor

        actor = build_actor(self._config, self._inputs.row_lengths, rank)
        actor.servers = None if rank.is_rank_0 else self._servers
        actor.verifiers, actor.agents = self._helpers
        return actor

    def connect(self, worker, connections: list, requests: SaveRequests, stack: contextlib.ExitStack) -> None:
        config, inputs = self._config, self._inputs
        rewards = None
        heartbeat.enter("starting the verifiers")
        if config.reward.verifier_function:
            failures = self._output_dir / "reward_failures.jsonl"
            rewards = stack.enter_context(RewardPool.from_config(config.reward, failures))
            if remark := try_rewards(config.reward, inputs):
                print(f"mindrlhf: {visible(remark)}", flush=True)
        self._ranks = ranks = Team(worker, connections)
        self.team = with_replicas(config, ranks)
        stack.callback(self.team.close)
        form = {"dtype": config.rollout.dtype, "bucket_bytes": int(config.rollout.weight_buffer_gib * 2**30)}
        nodes = machines.find_nodes(ranks)
        on_devices = config.run.device == "ascend"
        buffer = stack.enter_context(open_weight_buffers(ranks, nodes, between_devices=on_devices, **form))
        machines.connect_verifiers(ranks, nodes, rewards, config.reward)
        self._generator.servers = machines.connect_servers(ranks, nodes, self._servers, self._places, buffer.path)
        stack.callback(self._generator.close)  # before the team, whose ranks end the servers of their nodes
        if self._listen_at is not None:
            self._generator.admit(Newcomers(self._listen_at, buffer))
        self._policy = Policy(self.team, buffer)
        self.order = _prompt_order(config, inputs)
        training = config.training
        is_packed = training.packing != UNPACKED
        plain = RowOptions(inputs.row_lengths, training.micro_batch_size, self.team.world_size, is_packed)
        hf_config = read_hf_config(config.model.path)
        self._rows = dataclasses.replace(
            plain,
            packing=training.packing,
            cost=row_cost(find_spec(hf_config).dims(hf_config)),
            in_step=trains_sharded(config),
            image_tokens=inputs.image_tokens,
            experts=replayed_experts(config),
        )
        self._reward_model = None
        if config.reward.model_path:
            scored = dataclasses.replace(plain, in_step=trains_sharded(config))
            self._reward_model = RewardModel(self.team, scored, config.reward, requests.uninterruptible)
        files = [inputs.prompts, *filter(None, (inputs.held_out, *inputs.more_held_out.values()))]
        source = with_tools(config.tools, self._generator, inputs.tokenizer, stack, files)
        machines.connect_agents(ranks, nodes, source, config.tools)
        self._sampler = Sampler(source, rewards, inputs.tokenizer, self._reward_model)

    def open(self, progress: Progress, checkpoints: RunCheckpoints, first_step: int, stack: contextlib.ExitStack):
        from mindrlhf.training.loop.trainer import Parts, Trainer

        timer = StageTimer(lambda stage: heartbeat.enter(f"step {progress.step + 1}: {stage}"))
        parts = Parts(
            team=self.team,
            policy=self._policy,
            rows=self._rows,
            rollout=self._build_rollout(checkpoints, timer),
            observers=self._open_observers(progress, first_step, stack),
            timer=timer,
        )
        trainer = Trainer(self._config, parts, progress, self._inputs.num_steps)
        stack.callback(trainer.close)
        if self._config.run.device == "ascend" and trainer.sampling.sleeps:
            # They take their share of the NPUs when they start, which the ranks need when they run their graphs.
            heartbeat.enter("waiting for vLLM")
            self._generator.wait_ready()
            self._generator.sleep()
        if trainer.compiles_beside:
            return trainer
        heartbeat.enter("compiling the training graphs")
        trainer.warm_up()
        if self._reward_model is not None:
            self._reward_model.warm_up()
        heartbeat.enter("waiting for vLLM")
        self._generator.wait_ready()
        return trainer

    def finish(self, worker, progress: Progress) -> None:
        summary = write_summary(self._output_dir, progress.evaluations)
        report = write_pages(self._output_dir)
        if self._config.lora.rank is not None:
            models = {MODEL_NAME: self._output_dir / FINAL_NAME}
            if needs_critic(self._config):
                models[CRITIC_NAME] = self._output_dir / CRITIC_NAME
            export_adapters(self.team, models)
        tokenizer_dir = self._config.data.tokenizer_dir
        if needs_critic(self._config):
            worker.export(self._output_dir / CRITIC_NAME, tokenizer_dir, self._tensors("critic"), "critic")
        # Last, because it marks the run as complete: one that was killed before can be resumed.
        worker.export(self._output_dir / FINAL_NAME, tokenizer_dir, self._tensors())
        add_generation(self._output_dir / FINAL_NAME, self._config.model.path)
        if summary:
            print(f"\n{summary_text(summary)}")
        print(f"\nmodel:  {self._output_dir / FINAL_NAME}\nreport: {report or 'none, see the warning'}", flush=True)

    def _tensors(self, of: str = "") -> Iterator[tuple[str, np.ndarray]]:
        return sharded_tensors(self.team, self._ranks, machines.find_nodes(self._ranks), of)

    def _build_rollout(self, checkpoints: RunCheckpoints, timer: StageTimer) -> Rollout:
        config, inputs = self._config, self._inputs
        prompts = PromptSampling(
            config,
            inputs.prompts,
            self.order,
            self._sampler,
            inputs.tokenizer.eos_token_ids,
            timer,
            checkpoints.interruptible,
        )
        more = {name: _held_out(config, inputs, file, name) for name, file in inputs.more_held_out.items()}
        held_out = _held_out(config, inputs, inputs.held_out) if inputs.held_out is not None else None
        return Rollout(self._generator, prompts, self._sampler, held_out, more)

    def _open_observers(self, progress: Progress, first_step: int, stack: contextlib.ExitStack) -> Observers:
        config = self._config
        samples = SampleWriter(self._output_dir / "samples.jsonl", first_step=first_step)
        stack.callback(samples.close)
        state = progress.algorithm
        state.learning = state.learning or LearningState()
        guards = Guards(
            config,
            self._policy,
            first_step=first_step,
            state=state.guards,
            learning=state.learning,
            num_steps=self._inputs.num_steps,
        )
        stack.callback(guards.close)
        fingerprint = FingerprintWriter(self._output_dir / FINGERPRINT_NAME, first_step=first_step)
        stack.callback(fingerprint.close)
        return Observers(guards, samples, fingerprint)


def _server_settings(config: GrpoConfig, inputs: RunInputs, log_dir: Path) -> dict[str, Any]:
    """Return the arguments of :func:`mindrlhf.rollout.pool.server_options`."""
    return {
        "model_dir": config.model.path,
        "max_model_len": inputs.max_model_len,
        "seed": config.run.seed,
        "device": config.run.device,
        "log_dir": log_dir,
        "load_weights": False,
        "record_routing": config.training.replay_routing,
        "tokenizer_dir": config.data.tokenizer_dir if config.rollout.stop or config.tools.agent else "",
        "profile_dir": profile_dir(config.run.output_dir) / "vllm" if "vllm" in config.profiler.tools else None,
    }


def servers_of_node(
    config: GrpoConfig, inputs: RunInputs, places: Places, stack: contextlib.ExitStack, log_dir: Path
) -> NodeServers:
    """Start the servers of a node, as many as the first has; ``stack`` ends them.

    One over several nodes has to wait until their ranks know each other.
    """
    rollout, width = dataclasses.replace(config.rollout, num_replicas=places.count((0,)) or 1), len(places[0])
    servers = own_servers(rollout, num_nodes=width, starts=width == 1, **_server_settings(config, inputs, log_dir))
    stack.callback(servers.close)
    return servers


def start_servers(
    config: GrpoConfig, num_ranks: int, num_nodes: int, stack: contextlib.ExitStack, log_dir: Path
) -> NodeServers:
    """Start the rollout servers of a node that runs none of the ranks; ``stack`` ends them.

    Returns:
        The servers, as many as each of those nodes has.
    """
    inputs = check_grpo_inputs(config, num_ranks, num_nodes=num_nodes)
    places = place_servers(config.rollout, num_nodes, num_ranks // num_nodes)
    return servers_of_node(config, inputs, places, stack, log_dir)


def _prompt_order(config: GrpoConfig, inputs: RunInputs) -> PromptStream:
    # How many prompts such a step takes is not known before: the number of steps is what ends the run.
    is_open = config.algorithm.dynamic_sampling or config.rollout.segment_tokens > 0
    num_epochs = None if is_open else config.training.epochs
    return PromptStream(len(inputs.prompts), config.run.seed, config.data.shuffle, num_epochs)


def _held_out(config: GrpoConfig, inputs: RunInputs, file: PromptFile, set_name: str = "") -> HeldOut:
    evaluation = config.evaluation
    count = min(len(file), evaluation.max_prompts or len(file))
    return HeldOut(
        records=file.read(range(count)),
        num_samples=evaluation.num_samples,
        verifier=part_name(accuracy_verifier(config, set_name)),
        sampling=SamplingParams(
            max_tokens=config.rollout.max_response_length,
            temperature=evaluation.temperature,
            stop_token_ids=inputs.tokenizer.eos_token_ids,
            stop=config.rollout.stop,
        ),
        seed=config.run.seed,
    )
