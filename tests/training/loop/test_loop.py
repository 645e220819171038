"""The loop over scripted samples: what it asks of the ranks, in what order, and the numbers it reports."""

import contextlib
import threading
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from configs import grpo_config
from fakes import LocalTeam

from mindrlhf.checkpoint.algorithm_state import GuardsState
from mindrlhf.data.mindrecord import Prompt
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import RunFailure
from mindrlhf.evaluation.heldout import HeldOut
from mindrlhf.observe.timing import StageTimer
from mindrlhf.rewards.types import RewardResult
from mindrlhf.rollout.samples import Sampler
from mindrlhf.rollout.types import Completion, SamplingParams
from mindrlhf.training.batch import RowOptions
from mindrlhf.training.checkpoints.requests import StopRequested
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.guards import Observers
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.loop.sampling.in_step import PromptSampling, Rollout
from mindrlhf.training.loop.trainer import Parts, Trainer
from mindrlhf.training.results import ProcessStatistics, UpdateResult
from mindrlhf.training.train import run_steps
from mindrlhf.weights.publish.publisher import Published

END = 0
NUM_GENERATIONS = 3


class Prompts:
    """Prompt i is the single token i + 1; reads are counted."""

    header = SimpleNamespace(images=None)

    def __init__(self, num_prompts: int):
        self.records = [
            Prompt(np.array([i + 1], np.int32), np.zeros(0, np.int32), str(i), f"s:{i}") for i in range(num_prompts)
        ]
        self.num_reads = 0

    def __len__(self):
        return len(self.records)

    def read(self, indices):
        self.num_reads += 1
        return [self.records[index] for index in indices]


class Script:
    """Sample j of a prompt has j + 1 tokens, the last one END but for the longest, which is cut."""

    def __init__(self, journal):
        self.journal = journal
        self.requests = []

    def generate(self, requests, sampling):
        self.journal.append(f"generate {len(requests)}")
        self.requests.append((list(requests), sampling))
        for request in requests:
            for index in range(request.num_samples):
                is_cut = index == NUM_GENERATIONS - 1
                ids = np.full(index + 1, 50 + index, np.int32)
                ids[-1] = 50 + index if is_cut else END
                logprobs = np.full(index + 1, -1.0, np.float32)
                yield Completion(request.request_id, index, ids, logprobs, "length" if is_cut else "stop", 1)

    def wait_ready(self):
        """It is there at once."""

    def update_weights(self, version):
        self.journal.append(f"update_weights {version}")

    def sleep(self):
        self.journal.append("sleep")

    def wake(self):
        self.journal.append("wake")


class Rewards:
    """Reward: length of the response, but a constant for prompt 0, whose group has no signal."""

    compares = False
    reads_steps = False

    def __init__(self):
        self.waiting = deque()

    def take_counts(self):
        return {"requests": 3}

    def submit(self, sample):
        length = 1.0 if sample.answer == "0" else float(sample.num_tokens)
        failures = {"length": "timeout"} if sample.answer == "1" and sample.num_tokens == 1 else {}
        self.waiting.append(RewardResult(sample.index, {"length": length, "half": 0.5}, 2 * length + 0.5, failures))

    def results(self):
        while self.waiting:
            yield self.waiting.popleft()


class Tokens:
    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


class Rank:
    """Stands for an actor: statistics that can be worked out by hand, and a journal of what it was asked."""

    def __init__(self, journal):
        self.journal = journal
        self.batches = []
        self.updates = []
        self.kl_coefficients = []

    def warm_up(self, shapes, graphs):
        lengths, sizes = [rows.mask.shape[1] for rows in shapes], {len(rows.mask) for rows in shapes}
        self.journal.append(f"warm_up {lengths} {', '.join(map(str, sizes))} {graphs}")

    def receive(self, batches):
        self.batches = batches

    def receive_tokens(self, name, arrays):
        for batch, own in zip(self.batches, arrays, strict=True):
            for rows, array in zip(batch.micro_batches, own, strict=True):
                rows.tokens[name] = array

    def compute_logprobs(self, name, batch):
        self.journal.append(f"{name} {batch}")
        value = {"old_logprobs": -1.25, "reference_logprobs": -1.75}[name]
        return [value * rows.mask for rows in self.batches[batch].micro_batches]

    def update(self, batch, lr, kl_coefficient):
        self.kl_coefficients.append(kl_coefficient)
        self.journal.append(f"update {batch}")
        micro_batches, num_tokens = self.batches[batch].micro_batches, self.batches[batch].num_tokens
        self.updates.append((lr, num_tokens, micro_batches))
        count = sum(float(rows.mask.sum()) for rows in micro_batches)
        advantages = sum(float((rows.tokens["advantages"] ** 2).sum()) for rows in micro_batches)
        return UpdateResult(
            # loss: its part of a mean; then sums over tokens
            statistics=np.array([advantages / num_tokens, 0.0, 2 * count, 0.1 * count, 3 * count, count, 0.0]),
            grad_norm=1.0 + len(self.updates),
            process=ProcessStatistics(recompiles=4, peak_rss_gb=0.5),
            logprobs=tuple(-1.5 * rows.mask for rows in micro_batches),
        )

    def publish(self, version, bucket, purpose):
        assert bucket == 0
        self.journal.append(f"publish {version}")
        return Published({"0": [["weight", [], version]]})

    def sync_reference(self):
        self.journal.append("sync_reference")


class Buffer:
    num_buckets = 1

    def __init__(self, journal):
        self.journal = journal

    def begin(self, version, bucket):
        self.version = version

    def commit(self, written):
        assert all(one == ["weight", [], self.version] for one in written)
        self.journal.append(f"commit {len(written)}")


class Memory:
    """Sinks, sample writer and checkpoints in one."""

    def __init__(self, every_steps):
        self.metrics, self.samples, self.saved = [], [], []
        self.every_steps = every_steps
        self.must_stop = False
        self.stops_at = None  # the step whose rollout a request to end breaks off
        self.begun = 0
        self.reviewed, self.rewards_reviewed, self.course = [], [], []
        self.evaluations_reviewed = []

    def check_scored(self, step, samples):
        assert all(sample.is_scored for sample in samples.generated)

    def review_rewards(self, step, samples):
        self.rewards_reviewed.append((step, len(samples)))

    def review(self, record, rollout_diff):
        self.reviewed.append((record, rollout_diff))
        return {"guard/skipped_updates": 0}

    def review_evaluations(self, evaluations):
        self.evaluations_reviewed.append([one.step for one in evaluations])

    def state(self):
        return GuardsState(num_skipped=len(self.reviewed))

    def check(self):
        self.checked_after = len(self.metrics)

    def write_details(self, step, details):
        assert len(details.rewards) == len(details.lengths) > 0 and np.isfinite(details.rewards).all()

    def write(self, step, metrics=None):
        if metrics is None:
            self.samples.append(list(step))
        else:
            self.metrics.append((step, metrics))

    def save(self, progress):
        self.saved.append(progress.step)

    def begin_step(self, progress):
        self.begun = progress.step + 1

    @contextlib.contextmanager
    def interruptible(self):
        yield
        if self.begun == self.stops_at:
            raise StopRequested

    def save_broken_off(self, progress):
        self.saved.append(f"broken off after {progress.step}")

    def is_due(self, progress):
        return self.must_stop or (self.every_steps and progress.step % self.every_steps == 0)


class Course:
    """Fingerprint whose hash is the number of lines."""

    def __init__(self, memory):
        self.lines = memory.course

    def write(self, step, previous, parts):
        self.lines.append((step, previous, parts))
        return str(len(self.lines))


class Run:
    """A trainer with all its parts."""

    def __init__(self, num_prompts=5, world_size=1, held_out=False, more_held_out=(), steps=0, **options):
        self.config = make_config(**options)
        self.journal, self.memory = [], Memory(self.config.checkpoint.every_steps)
        self.ranks = [Rank(self.journal if rank == 0 else []) for rank in range(world_size)]
        self.generator = Script(self.journal)
        self.prompts = Prompts(num_prompts)
        training = self.config.training
        per_step = training.chunk_size * training.num_rollouts
        self.num_steps = steps or -(-num_prompts * training.epochs // per_step)
        self.progress = Progress()
        self.stream = PromptStream(num_prompts, 0, False, training.epochs)
        timer, sampler = StageTimer(), Sampler(self.generator, Rewards(), Tokens())
        prompts = PromptSampling(
            self.config, self.prompts, self.stream, sampler, (END,), timer, self.memory.interruptible
        )
        questions = HeldOut(self.prompts.records[:2], 2, "half", SamplingParams(7), 0) if held_out else None
        more = {
            name: HeldOut(self.prompts.records[first : first + 1], 2, verifier, SamplingParams(7), 0)
            for name, first, verifier in more_held_out
        }
        team = LocalTeam(self.ranks)
        parts = Parts(
            team=team,
            policy=Policy(team, Buffer(self.journal)),
            rows=RowOptions((8, 16), training.micro_batch_size, world_size, True, training.packing),
            rollout=Rollout(self.generator, prompts, sampler, questions, more),
            observers=Observers(self.memory, self.memory, Course(self.memory)),
            timer=timer,
        )
        self.trainer = Trainer(self.config, parts, self.progress, self.num_steps)

    def train(self):
        """Return whether the last step was reached."""
        return run_steps(self.trainer, self.memory, self.memory)

    def __call__(self):
        self.train()
        return dict(self.memory.metrics)


def finish(run):
    """Train to the end, and return the metrics but for what the clock decides, and the fingerprint."""
    try:
        run.train()
    finally:
        run.trainer.close()
    changing = ("timing/", "async/", "e2e_tps", "update_tps", "vllm_tps", "segments/unfinished")
    kept = {
        step: {name: value for name, value in values.items() if not name.startswith(changing)}
        for step, values in run.memory.metrics
    }
    return kept, [(step, parts) for step, _, parts in run.memory.course]


def make_config(**options):
    chosen = {
        "algorithm": {"num_generations": NUM_GENERATIONS},
        # Whatever a sample earns, a rank gets it; test_step_rows.py has what is left out by default.
        "training": {"chunk_size": 2, "micro_batch_size": 4, "skip_zero_advantages": False},
        "optimizer": {"start_lr": 1.0},
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": 0},
    }
    for section, values in options.items():
        chosen[section] = {**chosen.get(section, {}), **values}
    return grpo_config(reward={"verifier_function": ("length", "half")}, **chosen)


def test_one_step_in_order():
    run = Run(num_prompts=2)
    run.trainer.warm_up()
    run()
    assert run.journal == [
        "warm_up [8, 16] 4 []",
        *("publish 1", "commit 1", "wake", "update_weights 1"),
        *("generate 2", "sleep", "update 0"),
        *("publish 2", "commit 1", "wake", "update_weights 2"),
    ]
    assert run.progress.step == 1 and run.progress.weights_version == 2


def test_graphs_compile_while_the_held_out_prompts_are_sampled_for_the_first_time():
    run = Run(num_prompts=4, held_out=True, evaluation={"every_steps": 1})
    rank, generator = run.ranks[0], run.generator
    begun, sampled = threading.Event(), threading.Event()
    warm_up, generate = rank.warm_up, generator.generate

    def warm_up_until_sampled(*arguments, **options):
        begun.set()
        assert sampled.wait(60), "nothing is sampled while graphs compile"
        warm_up(*arguments, **options)

    def start_while_compiling():
        assert begun.wait(60), "nothing is compiled while the generator starts"

    def generate_while_compiling(requests, sampling):
        yield from generate(requests, sampling)
        sampled.set()

    rank.warm_up, generator.generate = warm_up_until_sampled, generate_while_compiling
    generator.wait_ready = start_while_compiling
    assert run.trainer.compiles_beside
    run()
    start = ["publish 1", "commit 1", "wake", "update_weights 1", "generate 2", "warm_up [8, 16] 4 []", "generate 2"]
    assert run.journal[:7] == start
    assert sum(entry.startswith("warm_up") for entry in run.journal) == 1
    assert [step for step, _ in run.memory.metrics] == [0, 1, 2]


def test_a_compilation_that_fails_beside_the_evaluation_ends_the_run():
    run = Run(num_prompts=2, held_out=True)

    def fail(shapes, graphs):
        raise RunFailure("no room for the graph")

    run.ranks[0].warm_up = fail
    with pytest.raises(RunFailure, match="no room for the graph"):
        run()
    assert "update 0" not in run.journal


@pytest.mark.parametrize(
    "options", [{"held_out": False}, {"evaluation": {"before_training": False}}, {"device": "ascend"}]
)
def test_graphs_compile_before_where_nothing_is_evaluated_first_or_devices_are_shared(options):
    options = {"held_out": True} | options
    if device := options.pop("device", None):
        options["run"] = {"device": device}
    assert not Run(num_prompts=2, **options).trainer.compiles_beside


@pytest.mark.parametrize("world_size", [1, 2])
def test_metrics_of_a_step_by_hand(world_size):
    metrics = Run(num_prompts=2, world_size=world_size)()[1]
    lengths, rewards = [1, 2, 3] * 2, [2.5] * 3 + [2.5, 4.5, 6.5]
    assert metrics["reward/mean"] == pytest.approx(np.mean(rewards))
    assert metrics["reward/std"] == pytest.approx(np.std(rewards))
    assert metrics["reward/length/mean"] == pytest.approx((3 + 6) / 6)
    assert metrics["reward/half/mean"] == 0.5
    assert metrics["reward/groups_without_signal"] == 0.5
    assert metrics["reward/failures"] == 1
    assert metrics["response_length/mean"] == 2 and metrics["response_length/max"] == 3
    assert metrics["response_length/cut_fraction"] == pytest.approx(1 / 3)
    assert metrics["prompt_length/mean"] == 1
    # The generator says -1.0, the trainer -1.5.
    assert metrics["rollout_diff/mean_abs"] == metrics["rollout_diff/max_abs"] == 0.5
    assert metrics["rollout_diff/k3"] == pytest.approx(np.expm1(-0.5) + 0.5)
    # The second group's rewards are 2.5, 4.5, 6.5: advantages -1, 0, 1 over its standard deviation of 2 (+ 1e-6),
    # on 1, 2 and 3 tokens.
    assert metrics["loss"] == pytest.approx((1 * 1 + 3 * 1) / sum(lengths), rel=1e-5)
    assert metrics["clip_fraction/low"] == 0 and metrics["clip_fraction/high"] == pytest.approx(2)
    assert "kl" not in metrics, "there is no reference model to measure it against"
    assert metrics["entropy"] == pytest.approx(3)
    assert metrics["grad_norm"] == 2 and metrics["lr"] == 1.0
    assert metrics["recompiles"] == 4 and metrics["memory/peak_rss_gb"] == 0.5
    # Rows that only fill up a micro-batch count as rows without tokens.
    tokens = sum(length + 1 for length in lengths)
    assert metrics["packing/efficiency"] == pytest.approx(tokens / (8 * metrics["packing/num_rows"]))
    assert metrics["packing/num_rows"] == 4 * world_size
    speed = (2 + 1) * 2 * NUM_GENERATIONS / world_size
    assert metrics["vllm_tps"] == pytest.approx(speed / metrics["timing/rollout"])
    assert metrics["e2e_tps"] == pytest.approx(speed / metrics["timing/all"])
    assert {"timing/data", "timing/pack", "timing/update", "timing/reshard_to_infer"} <= metrics.keys()
    assert "timing/old_log_p" not in metrics and "timing/reference_model" not in metrics


def test_performance_is_left_out_when_not_wanted():
    metrics = Run(num_prompts=2, observe={"performance_stats": False})()[1]
    assert not [name for name in metrics if name.startswith("timing/") or name.endswith("_tps")]


def test_epochs_and_the_shorter_last_round_are_all_used():
    run = Run(num_prompts=5, training={"epochs": 2, "chunk_size": 3, "num_rollouts": 1})
    metrics = run()
    assert list(metrics) == [1, 2, 3, 4]
    sampled = [request.prompt_ids[0] for requests, _ in run.generator.requests for request in requests]
    assert sampled == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
    assert [len(requests) for requests, _ in run.generator.requests] == [3, 3, 3, 1]
    # The last step has one prompt: 1 + 2 + 3 tokens.
    assert run.ranks[0].updates[-1][1] == 6


def test_chunks_of_a_step_make_one_update():
    run = Run(num_prompts=4, training={"chunk_size": 2, "num_rollouts": 2})
    run()
    assert run.journal.count("generate 2") == 2 and run.journal.count("update 0") == 1
    assert run.ranks[0].updates[0][1] == 4 * 6


def test_prompts_are_read_once_when_they_are_few():
    run = Run(num_prompts=5)
    run.trainer.warm_up()
    run()
    assert run.prompts.num_reads == 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_minibatches_and_iterations(world_size):
    run = Run(num_prompts=4, world_size=world_size, training={"num_minibatches": 3, "num_iterations": 2})
    metrics = run()
    one_step = ["old_logprobs 0", "old_logprobs 1", "old_logprobs 2", *["update 0", "update 1", "update 2"] * 2]
    work = [entry for entry in run.journal if entry.startswith(("update ", "old"))]
    assert work == one_step * 2
    # Six samples of 1, 2, 3, 1, 2, 3 tokens, two to a mini-batch.
    assert [update[1] for update in run.ranks[0].updates[:6]] == [3, 4, 5] * 2
    # The first pass starts from the weights that generated the samples: -1.25 is of compute_logprobs.
    assert metrics[1]["rollout_diff/max_abs"] == 0.25
    assert metrics[1]["timing/old_log_p"] > 0
    assert metrics[1]["grad_norm"] == np.mean([2, 3, 4, 5, 6, 7])
    assert metrics[1]["clip_fraction/high"] == pytest.approx(2)


def test_a_last_step_smaller_than_its_minibatches_is_done_with_fewer():
    run = Run(num_prompts=3, training={"num_minibatches": 6})
    metrics = run()
    assert list(metrics) == [1, 2]
    assert [update[1] for update in run.ranks[0].updates] == [1, 2, 3] * 3


def test_the_learning_rate_follows_the_updates():
    optimizer = {"start_lr": 1.0, "end_lr": 0.0, "lr_schedule": "linear"}
    run = Run(num_prompts=4, training={"num_minibatches": 2, "num_iterations": 2}, optimizer=optimizer)
    metrics = run()
    assert [update[0] for update in run.ranks[0].updates] == pytest.approx([1 - k / 7 for k in range(8)])
    assert metrics[2]["lr"] == pytest.approx(0.0)
    assert metrics[1]["lr"] == pytest.approx(1 - 3 / 7)


def test_the_reference_is_asked_only_with_beta_and_follows_when_told():
    plain = Run(num_prompts=4)
    plain()
    assert not [entry for entry in plain.journal if "reference" in entry]
    algorithm = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}
    run = Run(num_prompts=10, algorithm=algorithm)
    assert run()[1]["kl"] == pytest.approx(0.1)
    work = [entry for entry in run.journal if entry.startswith(("reference", "sync", "update 0"))]
    assert work == [*["reference_logprobs 0", "update 0"] * 2, "sync_reference"] * 2 + [
        "reference_logprobs 0",
        "update 0",
    ]


def test_evaluations_are_written_where_they_belong():
    run = Run(num_prompts=10, held_out=True, evaluation={"every_steps": 2})
    metrics = run()
    assert [evaluation.step for evaluation in run.progress.evaluations] == [0, 2, 4, 5]
    assert list(metrics) == [0, 1, 2, 3, 4, 5]
    for step, values in metrics.items():
        assert ("eval/accuracy" in values) == (step != 1 and step != 3)
    assert metrics[0]["eval/accuracy"] == 0.5 and "loss" not in metrics[0]
    assert metrics[2]["loss"] > 0 and metrics[2]["timing/evaluation"] > 0
    assert run.memory.evaluations_reviewed == [[0], [0, 2], [0, 2, 4], [0, 2, 4, 5]]


def test_evaluations_repeat_their_seeds_and_training_steps_do_not():
    run = Run(num_prompts=6, held_out=True, evaluation={"every_steps": 1})
    run()
    by_kind = {7: [], 512: []}
    for requests, sampling in run.generator.requests:
        by_kind[sampling.max_tokens].append([request.seed for request in requests])
    evaluations, training = by_kind[7], by_kind[512]
    assert len(evaluations) == 4 and all(seeds == evaluations[0] for seeds in evaluations)
    flat = [seed for seeds in training for seed in seeds]
    assert len(flat) == 6 and len({*flat, *evaluations[0]}) == 8


@pytest.mark.parametrize(
    ("evaluation", "steps"), [({"every_steps": 0}, [0, 5]), ({"every_steps": 0, "before_training": False}, [5])]
)
def test_the_last_step_is_always_evaluated(evaluation, steps):
    run = Run(num_prompts=10, held_out=True, evaluation=evaluation)
    run()
    assert [entry.step for entry in run.progress.evaluations] == steps


def test_further_sets_are_reported_beside_with_verifiers_of_their_own():
    # The length of prompt 0 is scored 1 however long it is.
    sets = [("first", 0, "length"), ("second", 1, "half")]
    run = Run(num_prompts=4, held_out=True, more_held_out=sets, evaluation={"every_steps": 1})
    metrics = run()
    assert len(run.progress.evaluations) == len(metrics) == 3
    for values in metrics.values():
        assert (values["eval/accuracy"], values["eval/first/accuracy"], values["eval/second/accuracy"]) == (0.5, 1, 0.5)
        assert values["eval/first/pass@k"] == 1 and values["eval/second/pass@k"] == 0  # a half is not right


def test_the_sampling_is_the_configs():
    rollout = {"max_response_length": 9, "temperature": 0.6, "top_p": 0.9, "top_k": 5}
    run = Run(num_prompts=2, rollout=rollout)
    run()
    ((requests, sampling),) = run.generator.requests
    assert sampling == SamplingParams(9, 0.6, 0.9, 5, (END,))
    assert [request.num_samples for request in requests] == [NUM_GENERATIONS] * 2


def test_samples_and_checkpoints_are_written_as_often_as_asked():
    run = Run(num_prompts=10, observe={"groups_per_step": 1}, checkpoint={"every_steps": 2})
    run()
    assert [[record.step for record in records] for records in run.memory.samples] == [
        [step] * NUM_GENERATIONS for step in range(1, 6)
    ]
    assert run.memory.saved == [2, 4]


def test_a_request_to_end_is_granted_after_the_step_or_breaks_off_its_rollout():
    run = Run(num_prompts=10)
    run.memory.must_stop = True
    run.train()
    assert run.memory.saved == [1] and run.progress.step == 1
    run = Run(num_prompts=10)
    run.memory.stops_at = 3
    assert run.train() is False
    assert run.memory.saved == ["broken off after 2"]
    assert [step for step, _ in run.memory.metrics] == [1, 2]
    assert run.journal.count("update 0") == 2 and run.journal[-1] == "generate 2"


def test_the_time_a_checkpoint_takes_is_reported_with_the_next_step():
    metrics = Run(num_prompts=6, checkpoint={"every_steps": 1})()
    assert ["timing/checkpoint" in metrics[step] for step in (1, 2, 3)] == [False, True, True]


def test_guards_and_fingerprint_see_every_step():
    run = Run(num_prompts=3)
    run()
    (record, difference), (last, _) = run.memory.reviewed
    assert (record.number, last.number, difference) == (1, 2, 0.5)
    assert len(record.trained) == 6 and len(last.trained) == 3
    assert run.memory.rewards_reviewed == [(1, 6), (2, 3)]
    assert record.weights != last.weights, "the weights that a step began with are those of the update before"
    assert run.memory.checked_after == 2, "the last check comes after the last step's metrics"
    start, first, second = run.memory.course
    assert start == (0, "", {"weights": record.weights})
    assert first[:2] == (1, "1") and second[:2] == (2, "2")
    assert set(first[2]) == {"prompts", "samples", "rollout_logprobs", "rewards", "loss", "grad_norm", "weights"}
    assert first[2]["weights"] == last.weights and first[2]["grad_norm"] == 2
    assert run.progress.algorithm.trajectory == "3"
    assert run.progress.algorithm.guards == GuardsState(num_skipped=2)


def test_a_kl_that_is_not_finite_does_not_spoil_its_controller(monkeypatch):
    algorithm = {"num_generations": NUM_GENERATIONS, "beta": 0.1, "kl_target": 0.01}
    run = Run(num_prompts=2, algorithm=algorithm)
    update = Rank.update

    def update_without_number(self, **arguments):
        results = update(self, **arguments)
        results.statistics[3] = np.nan
        return results

    monkeypatch.setattr(Rank, "update", update_without_number)
    run()
    assert run.trainer.objective.kl.coefficient == 0.1


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_packing_changes_nothing_that_the_loop_sees(world_size):
    """Losses, log-probabilities and rewards are those of plain rows, whoever computes which rows."""

    def course(packing: str) -> list[dict]:
        run = Run(world_size=world_size, training={"packing": packing, "num_minibatches": 2}, algorithm={"beta": 0.1})
        run.train()
        unlike = ("packing/", "timing/", "memory/", "recompiles", "vllm_tps", "e2e_tps", "update_tps")
        return [{k: v for k, v in step.items() if not k.startswith(unlike)} for _, step in run.memory.metrics]

    plain = course("first_fit")
    assert plain
    for packing in ("best_fit", "shared_prompts"):
        for ours, theirs in zip(course(packing), plain, strict=True):
            assert ours == pytest.approx(theirs)
