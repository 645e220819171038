"""A reinforcement learning run put together from its config: what each rank builds, and what the lead adds."""

import contextlib
from pathlib import Path

from mindrlhf.config.critic_checks import needs_critic
from mindrlhf.config.loader import write_config
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.debugging.dump_files import dump_dir
from mindrlhf.debugging.dump_paths import CELL_LEVEL
from mindrlhf.evaluation.heldout import HeldOut, accuracy_verifier
from mindrlhf.layout.feasibility import is_split
from mindrlhf.layout.layout import Layout
from mindrlhf.rewards.registry import part_name
from mindrlhf.rollout.replicas import Replicas, start_replicas
from mindrlhf.rollout.types import SamplingParams
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints, check_output
from mindrlhf.training.loop.key_data import KeyData
from mindrlhf.training.preflight import FINAL_NAME, RunInputs, check_grpo_inputs, check_sandbox
from mindrlhf.training.runtime import Rank, is_lead_process, num_ranks_from_environment, start_runtime


def run_rank(config: GrpoConfig, *, resume: bool = False) -> None:
    """Do this rank's part of a run: the lead drives the loop, the others serve it.

    Raises:
        UserError, RunFailure: as the rooms raise them.
    """
    inputs = check_grpo_inputs(config, num_ranks_from_environment())
    output_dir = Path(config.run.output_dir)
    if is_lead_process():
        check_output(config, resume=resume)
        if sandbox := check_sandbox(config):
            print(f"mindrlhf: {sandbox}", flush=True)
    output_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # The generator takes as long to start as the training graphs to compile: let them overlap.
        generator = _start_generator(config, inputs, stack) if is_lead_process() else None
        rank = start_runtime(config.run, output_dir / "logs")
        from mindrlhf.training.team import connect, serve

        connections = connect(rank)
        actor = _build_actor(config, inputs, rank)
        if rank.is_lead:
            _lead(config, inputs, actor, connections, generator, stack, resume)
        else:
            serve(actor, connections[0])


def _start_generator(config: GrpoConfig, inputs: RunInputs, stack: contextlib.ExitStack) -> Replicas:
    generator = start_replicas(
        config.rollout,
        model_dir=config.model.path,
        max_model_len=inputs.row_lengths[-1],
        seed=config.run.seed,
        device=config.run.device,
        log_dir=Path(config.run.output_dir) / "logs",
        load_weights=False,
    )
    stack.callback(generator.close)
    return generator


def _build_actor(config: GrpoConfig, inputs: RunInputs, rank: Rank):
    if is_split(config.parallel_config):
        from mindrlhf.training.sharded.build import build_parallel_actor

        return build_parallel_actor(config, inputs.row_lengths, rank)
    return _build_whole_actor(config, inputs, rank)


def _build_whole_actor(config: GrpoConfig, inputs: RunInputs, rank: Rank):
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.scores import TokenScores
    from mindrlhf.training.worker.actor import Actor
    from mindrlhf.training.worker.cell_dump import CellDump
    from mindrlhf.training.worker.critic import ActorCritic, build_critic
    from mindrlhf.training.worker.learner import load_model
    from mindrlhf.training.worker.policy_loss import build_policy_loss
    from mindrlhf.training.worker.scorer import load_scorer

    model, algorithm, device = config.model, config.algorithm, config.run.device
    length = inputs.row_lengths[-1]
    network = load_model(model, model.path, config.run, length)
    reference = None
    if algorithm.beta > 0:
        reference_network = load_model(model, model.reference_path or model.path, config.run, length)
        reference = PolicyLogProbs(reference_network, config.rollout.temperature, device)
    loss = build_policy_loss(config, PolicyLogProbs(network, config.rollout.temperature, device))
    options = {
        "network": network,
        "loss": loss,
        "optimizer": config.optimizer,
        "rank": rank,
        "device": device,
        "reference": reference,
        "saves_reference": algorithm.sync_ref_model,
    }
    actor = ActorCritic(build_critic(config, length, rank), **options) if needs_critic(config) else Actor(**options)
    if config.reward.model_path:
        scorer = load_scorer(model, config.reward.model_path, config.run, length)
        actor.use_reward_model(TokenScores(scorer, after_token=True))
    if config.msprobe.enabled and config.msprobe.level == CELL_LEVEL:
        actor.use_cell_dump(CellDump(config.msprobe, dump_dir(config.msprobe, config.run), rank.index))
    return actor


def _lead(config: GrpoConfig, inputs: RunInputs, actor, connections, generator, stack, resume: bool) -> None:
    from mindrlhf.data.stream import PromptStream
    from mindrlhf.observe.samples import SampleWriter
    from mindrlhf.observe.sinks import open_sinks
    from mindrlhf.observe.trajectory import TRAJECTORY_NAME, TrajectoryWriter
    from mindrlhf.rewards.pool import RewardPool
    from mindrlhf.rollout.conversations import with_tools
    from mindrlhf.rollout.samples import Sampler
    from mindrlhf.training.batch import RowOptions
    from mindrlhf.training.checkpoints.requests import SaveRequests
    from mindrlhf.training.loop.guards import Guards
    from mindrlhf.training.loop.reward_model import RewardModel
    from mindrlhf.training.loop.trainer import Parts, Trainer
    from mindrlhf.training.replica_team import ReplicaTeam
    from mindrlhf.training.team import Team

    output_dir = Path(config.run.output_dir)
    reward, training = config.reward, config.training
    rewards = None
    if reward.verifier_function:
        rewards = stack.enter_context(RewardPool.from_config(reward, output_dir / "reward_failures.jsonl"))
    team = Team(actor, connections)
    if is_split(config.parallel_config):
        team = ReplicaTeam(team, Layout.from_config(config.parallel_config, team.world_size))
    stack.callback(team.close)
    board = stack.enter_context(actor.create_board())
    team.call("attach_board", path=board.path)
    generator.use_board(board.path)
    # How many prompts a step of dynamic sampling takes is not known before: the number of steps is what ends the run.
    num_epochs = None if config.algorithm.dynamic_sampling else training.epochs
    stream = PromptStream(len(inputs.prompts), config.run.seed, config.data.shuffle, num_epochs)
    requests = SaveRequests()
    checkpoints = RunCheckpoints(config, team, stream, requests)
    stack.callback(checkpoints.close)
    rows = RowOptions(inputs.row_lengths, training.batch_size, team.world_size, training.pack)
    reward_model = RewardModel(team, rows, reward, requests.uninterruptible) if reward.model_path else None
    source = with_tools(config.tools, generator, inputs.tokenizer, stack)
    progress = Progress()
    if resume:
        progress = checkpoints.resume()
        print(f"mindrlhf: resumed after step {progress.step}", flush=True)
    first_step = progress.step + 1 if resume else 0
    parts = Parts(
        team=team,
        board=board,
        generator=generator,
        sampler=Sampler(source, rewards, inputs.tokenizer, reward_model),
        prompts=inputs.prompts,
        stream=stream,
        held_out=_held_out(config, inputs),
        sinks=open_sinks(
            output_dir,
            first_step=first_step,
            num_steps=inputs.num_steps,
            tensorboard=config.observe.tensorboard,
        ),
        sample_writer=SampleWriter(output_dir / "samples.jsonl", first_step=first_step),
        rows=rows,
        stop_token_ids=inputs.tokenizer.eos_token_ids,
        checkpoints=checkpoints,
        guards=Guards(config, team, first_step=first_step, state=progress.algorithm_state.get("guards")),
        trajectory=TrajectoryWriter(output_dir / TRAJECTORY_NAME, first_step=first_step),
        key_data=_key_data(config, team),
    )
    stack.callback(parts.sinks.close)
    stack.callback(parts.sample_writer.close)
    stack.callback(parts.guards.close)
    stack.callback(parts.trajectory.close)
    write_config(config, output_dir)
    trainer = Trainer(config, parts, progress, inputs.num_steps)
    trainer.warm_up()
    if reward_model is not None:
        reward_model.warm_up()
    generator.wait_ready()
    requests.listen()
    is_complete = trainer.run()
    checkpoints.wait()
    if is_complete:
        _finish(config, actor, progress, parts)


def _finish(config: GrpoConfig, actor, progress, parts) -> None:
    """Compare the model with the starting one, write the report, and export it."""
    from mindrlhf.evaluation.comparison import summary_text, write_summary
    from mindrlhf.observe.report import write_report

    output_dir = Path(config.run.output_dir)
    parts.sinks.close()
    parts.sample_writer.close()
    summary = write_summary(output_dir, progress.evaluations)
    report = write_report(output_dir)
    # Last, because it marks the run as complete: one that was killed before can be resumed.
    actor.export(output_dir / FINAL_NAME, config.data.tokenizer_dir)
    if summary:
        print(f"\n{summary_text(summary)}")
    print(f"\nmodel:  {output_dir / FINAL_NAME}\nreport: {report}", flush=True)


def _key_data(config: GrpoConfig, team) -> KeyData | None:
    if not config.msprobe.enabled:
        return None
    return KeyData(config.msprobe, dump_dir(config.msprobe, config.run), team)


def _held_out(config: GrpoConfig, inputs: RunInputs) -> HeldOut | None:
    if inputs.held_out is None:
        return None
    evaluation = config.evaluation
    count = min(len(inputs.held_out), evaluation.max_prompts or len(inputs.held_out))
    return HeldOut(
        records=inputs.held_out.read(range(count)),
        num_samples=evaluation.num_samples,
        verifier=part_name(accuracy_verifier(config)),
        sampling=SamplingParams(
            max_tokens=config.rollout.max_response_length,
            temperature=evaluation.temperature,
            stop_token_ids=inputs.tokenizer.eos_token_ids,
        ),
        seed=config.run.seed,
    )
