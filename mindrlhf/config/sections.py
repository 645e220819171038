"""The sections of a run's configuration. Each key is documented here, once; docs/config.md is generated from it."""

from dataclasses import dataclass

from mindrlhf.algorithms import advantages, policy_losses
from mindrlhf.algorithms.aggregation import MODES as AGGREGATIONS
from mindrlhf.algorithms.kl_control import ESTIMATORS as KL_ESTIMATORS
from mindrlhf.config.keys import REQUIRED, key
from mindrlhf.config.presets import CORRECTIONS, PRESETS

FIRST_FIT, BEST_FIT, SHARED_PROMPTS = PACKINGS = ("first_fit", "best_fit", "shared_prompts")
REWARD_MODEL_NAME = "reward_model"  # the part of the reward that a reward model gives, beside those of verifiers


@dataclass(frozen=True)
class RunSection:
    """What the run is called, where it writes and what it runs on."""

    output_dir: str = key(
        "runs/default",
        "directory for metrics, checkpoints, samples, logs and the report",
        is_path=True,
    )
    seed: int = key(0, "seed of data order, sampling and random initialisation", minimum=0, maximum=2**31 - 1)
    device: str = key("cpu", "what the trainer ranks and the generator run on", choices=("cpu", "ascend"))
    deterministic: bool = key(
        True, "two runs of this config compute the same bits; costs nothing on CPU and some speed on Ascend"
    )
    max_steps: int = key(0, "stop after this many steps; 0 means when `training.epochs` are used up", minimum=0)
    start_timeout_s: float = key(
        600.0, "longest wait, in seconds, until all ranks have found each other; 0 means any time", minimum=0
    )
    hang_timeout_s: float = key(
        1800.0, "a run that makes no progress at all for this long, in seconds, is stopped; 0 means never", minimum=0
    )


@dataclass(frozen=True)
class ModelSection:
    """The model to train."""

    path: str = key(REQUIRED, "Hugging Face directory of the actor (config.json and safetensors)", is_model=True)
    reference_path: str = key(
        "",
        "Hugging Face directory of the reference model; empty means `model.path`",
        is_model=True,
    )
    random_init: bool = key(
        False, "ignore weights in `model.path`, initialise them from `run.seed`; needs only config.json"
    )
    param_dtype: str = key("float32", "type of the trained parameters", choices=("float32", "bfloat16"))
    compute_dtype: str = key(
        "float32", "type of the matrix products; CPU has float32 kernels only", choices=("float32", "bfloat16")
    )
    recompute: bool = key(False, "recompute each layer's activations in the backward pass to save memory")
    train_vision: str = key(
        "none", "what is trained of a vision tower: none of it, its projector to the decoder, or all",
        choices=("none", "projector", "all"),
    )


@dataclass(frozen=True)
class DataSection:
    """The prompts, and the tokenizer they were built with."""

    train_file: str = key(REQUIRED, "MindRecord file made by `mindrlhf data build`", is_path=True)
    tokenizer_dir: str = key(
        REQUIRED, "Hugging Face tokenizer directory, or a SentencePiece .model file", is_model=True
    )
    eval_file: str = key("", "MindRecord file of held-out prompts; empty means no evaluation", is_path=True)
    shuffle: bool = key(True, "shuffle the prompts anew in each epoch")


# How weights come to the boards of other nodes: from host to host, or by the devices' own network.
TCP, COLLECTIVES = "tcp", "collectives"


@dataclass(frozen=True)
class RolloutSection:
    """The generator: one vLLM server process per replica, in an interpreter of its own."""

    python: str = key(
        "",
        "interpreter of the rollout environment; empty means .venv-rollout beside the package, else this one",
        is_path=True,
    )
    env: dict[str, str] = key({}, "environment variables set for the rollout server")
    num_replicas: int = key(
        1, "number of servers that share the prompts; of several nodes each has an equal part of them, at least one",
        minimum=1,
        maximum=64,
    )
    ahead: int = key(
        0, "steps that sampling is ahead of training: a step trains on samples of the weights of so many steps before; "
        "0 samples within the step; see docs/async.md",
        minimum=0,
        maximum=64,
    )
    span_tokens: int = key(
        0, "most tokens that a response is given at a time; one that needs more goes on in the next step, with its "
        "weights; 0 finishes all in their step; see docs/async.md",
        minimum=0,
    )
    asynchronous: bool = key(
        False, "sample without end and train on what is complete, weights at most `ahead` steps old; see docs/async.md"
    )
    replay_order: str = key("", "output directory of an asynchronous run to repeat exactly", is_path=True)
    max_spans: int = key(4, "most versions of the weights that a response is made with; the last ends it", minimum=2)
    in_flight: float = key(
        1.5, "prompts being answered as a step begins, as a multiple of those it trains on; only with `span_tokens`",
        minimum=1,
        exclusive_minimum=True,
    )
    max_response_length: int = key(512, "longest response, in tokens, stop token included", minimum=1)
    temperature: float = key(
        1.0, "sampling temperature; training logits are divided by it too", minimum=0, exclusive_minimum=True
    )
    top_p: float = key(
        1.0,
        "nucleus sampling mass; 1 samples from the whole distribution",
        minimum=0,
        maximum=1,
        exclusive_minimum=True,
    )
    top_k: int = key(0, "sample from the k likeliest tokens; 0 means all", minimum=0)
    dtype: str = key("float32", "type of the generator's weights and arithmetic", choices=("float32", "bfloat16"))
    max_num_seqs: int = key(64, "most sequences decoded at once by a server", minimum=1)
    draft_tokens: int = key(
        0, "most tokens guessed ahead of each response and checked in one step, where slots are free; 0 guesses none",
        minimum=0,
        maximum=32,
    )
    weights_carrier: str = key(
        TCP,
        "how weights that a node lacks come from others: tcp between hosts, or collectives between devices (Ascend, "
        "not run on NPUs yet); see docs/cluster.md",
        choices=(TCP, COLLECTIVES),
    )
    num_threads: int = key(1, "CPU threads of a server", minimum=1)
    tensor_parallel: int = key(
        1, "devices that share one replica's weights; above the ranks of a node, of whole nodes: see docs/cluster.md",
        minimum=1,
    )
    gpu_memory_utilization: float = key(
        0.6, "share of device memory a server may take (Ascend)", minimum=0.05, maximum=0.95
    )
    kv_cache_gib: int = key(1, "key-value cache of a server on CPU at most, in GiB", minimum=1)
    board_gib: float = key(
        0.0,
        "host memory of a node through which new weights pass to the servers, in buckets, in GiB; 0: room for all",
        minimum=0,
    )
    start_timeout_s: float = key(300.0, "longest wait for a server to come up, in seconds", minimum=1)
    restarts: int = key(
        2, "how often dead or stuck servers are started again before the run fails", minimum=0, maximum=1000
    )
    stall_timeout_s: float = key(
        10.0, "a server that uses no processor time for this long while it owes an answer is stuck", minimum=2
    )


@dataclass(frozen=True)
class ToolSection:
    """Tools that the model may call between its turns; see docs/tools.md."""

    names: tuple[str, ...] = key(
        (), "tools the model may call: calculator, python, path/to/file.py:function, mcp:COMMAND; empty means none"
    )
    environment: str = key("", "what it acts in, in the place of tools: gymnasium, or path/to/file.py:Class")
    max_turns: int = key(4, "most turns of the model in one response, the last included", minimum=2)
    max_calls: int = key(8, "most calls in one response; further ones are answered with an error", minimum=1)
    timeout_s: float = key(5.0, "time limit of one call, in seconds", minimum=0, exclusive_minimum=True)
    max_response_tokens: int = key(256, "tokens of one answer of a tool; the rest is cut off", minimum=1)
    num_workers: int = key(1, "tool processes", minimum=1, maximum=256)
    memory_limit_mib: int = key(1024, "memory of a tool process, in MiB", minimum=64)


@dataclass(frozen=True)
class SandboxSection:
    """Where programs that the model writes are run: the verifier `code_execution` and the tool `python`."""

    allow_weak: bool = key(False, "run them even with too few of the sandbox's locks, which `mindrlhf doctor` lists")


@dataclass(frozen=True)
class RewardSection:
    """What scores a response: verifiers, a reward model, or both."""

    verifier_function: tuple[str, ...] = key(
        (),
        "verifier names, or path/to/file.py:function; a list, or text with commas between; may be empty with a "
        "`model_path`",
    )
    verifier_weight: tuple[float, ...] = key((), "weight of each verifier in the sum; empty means 1 for each")
    model_path: str = key(
        "",
        "Hugging Face directory of a reward model, as `mindrlhf reward-model` makes it; empty means none",
        is_model=True,
    )
    model_weight: float = key(1.0, "weight of the reward model's score in the sum")
    num_workers: int = key(1, "verifier processes", minimum=1, maximum=256)
    timeout_s: float = key(
        10.0, "time limit for one sample in one verifier, in seconds", minimum=0, exclusive_minimum=True
    )
    failure_value: float = key(
        0.0, "reward of a sample whose verifier timed out, raised, or returned no finite number; these are counted"
    )
    memory_limit_mib: int = key(4096, "memory of a verifier process, in MiB; 0 means no limit", minimum=0)
    gates: dict[str, str] = key(
        {},
        "verifier: gate; the verifier counts only where its gate, another verifier named before it, earned more than 0",
    )
    closed_gate_value: float = key(0.0, "reward of a verifier whose gate is closed; it is not asked then")
    by_choice: tuple[str, ...] = key(
        (), "verifiers that score only the prompts whose record names them in its `verifier` field"
    )
    options: dict[str, str] = key(
        {}, "settings of verifiers, as `verifier.option: value`; `mindrlhf rewards show NAME` lists them"
    )


@dataclass(frozen=True)
class AlgorithmSection:
    """The objective. `name` sets the keys that are not given as its paper does; see docs/algorithms.md."""

    name: str = key("grpo", "a whole algorithm; the defaults below are those of grpo", choices=tuple(PRESETS))
    num_generations: int = key(8, "samples per prompt: the group that advantages compare", minimum=1)
    advantage: str = key("grpo", "advantage estimator", choices=advantages.names())
    scale_rewards: bool = key(
        True, "divide advantages by the group's standard deviation (GRPO); false leaves the mean-only form (Dr. GRPO)"
    )
    pass_k: int = key(4, "the k of the estimator pass_at_k", minimum=1)
    gamma: float = key(1.0, "discount of the estimator gae, per token", minimum=0, maximum=1)
    gae_lambda: float = key(0.95, "lambda of the estimator gae", minimum=0, maximum=1)
    whiten_advantages: bool = key(True, "give the advantages of the estimator gae mean 0 and standard deviation 1")
    distill_reward_weight: float = key(
        0.0, "weight of rewards beside the teacher's verdict in the estimator distill; 0 leaves them out", minimum=0
    )
    distill_top_k: int = key(
        0,
        "words that a teacher finds likeliest, whose probabilities the student learns at each position; 0 learns "
        "from the sampled word alone; see docs/algorithms.md",
        minimum=0,
    )
    loss: str = key("ppo_clip", "policy loss", choices=policy_losses.names())
    aggregation: str = key("token_mean", "how token losses become one number", choices=AGGREGATIONS)
    clip_low: float = key(0.2, "the probability ratio is clipped below at 1 - clip_low", minimum=0, maximum=1)
    clip_high: float = key(0.28, "the probability ratio is clipped above at 1 + clip_high", minimum=0)
    dual_clip: float = key(3.0, "the loss dual_clip bounds the ratio of bad tokens here", minimum=1)
    sapo_tau_positive: float = key(
        1.0, "temperature of the loss sapo where the advantage is positive", minimum=0, exclusive_minimum=True
    )
    sapo_tau_negative: float = key(1.05, "temperature of the loss sapo elsewhere", minimum=0, exclusive_minimum=True)
    mirror_tau: float = key(0.1, "weight of the square that the loss kimi holds a response with", minimum=0)
    beta: float = key(0.0, "weight of the KL term against the reference model; 0 loads no reference model", minimum=0)
    kl_in: str = key("loss", "where the KL term is added", choices=("loss", "reward"))
    kl_estimator: str = key("k3", "estimate of the KL divergence per token", choices=KL_ESTIMATORS)
    kl_unbiased: bool = key(
        False, "weigh the KL estimate in the loss by the probability ratio, which makes its gradient unbiased"
    )
    kl_target: float | None = key(
        None,
        "steer beta so that the KL per token, in nats, comes here; null keeps it",
        minimum=0,
        exclusive_minimum=True,
    )
    kl_gain: float = key(0.1, "how fast beta follows `kl_target`", minimum=0, maximum=1)
    entropy_coefficient: float = key(0.0, "weight of the entropy bonus", minimum=0)
    dynamic_sampling: bool = key(
        False,
        "sample prompts until each group of a step has rewards that differ; what is left over is used in the next step",
    )
    max_oversampling: int = key(
        10, "a step with `dynamic_sampling` samples at most this many times its number of prompts", minimum=1
    )
    overlong_buffer: float = key(
        0.0,
        "last share of `rollout.max_response_length` in which longer responses lose reward, up to `overlong_penalty`; "
        "0 leaves it out",
        minimum=0,
        maximum=1,
    )
    overlong_penalty: float = key(1.0, "what a response at the limit loses", minimum=0)
    overlong_filter: bool = key(False, "leave responses that the limit cut off out of the loss")
    sync_ref_model: bool = key(False, "copy the actor into the reference model every `ref_model_sync_steps` steps")
    ref_model_sync_steps: int = key(64, "steps between two copies", minimum=1)


@dataclass(frozen=True)
class CorrectionSection:
    """Off-policy correction: the generator's kernels, types and with `rollout.ahead` weights are not the trainer's."""

    preset: str = key(
        "default",
        "sets the keys below that are not given as other stacks do under this name; see docs/async.md",
        choices=tuple(CORRECTIONS),
    )
    weight: str = key(
        "auto",
        "truncated importance weights; auto is none where both compute alike (CPU, and no `rollout.ahead`), else "
        "sequence for a loss with a ratio of whole responses and token for others",
        choices=("auto", "none", "token", "sequence"),
    )
    max_weight: float = key(2.0, "where the weights are truncated", minimum=0, exclusive_minimum=True)
    mask: str = key(
        "none",
        "what is left out of the loss when its ratio is outside the bounds: tokens (IcePop), or responses by the "
        "product or the geometric mean of their ratios",
        choices=("none", "token", "sequence", "geometric"),
    )
    mask_low: float = key(0.5, "smallest ratio that the mask keeps", minimum=0)
    mask_high: float = key(5.0, "largest ratio that the mask keeps", minimum=0)
    veto: float = key(0.0, "leave out responses with a token whose ratio is smaller; 0 leaves none out", minimum=0)
    bypass: bool = key(False, "take the generator's log-probabilities for the old ones, instead of computing those")


@dataclass(frozen=True)
class CriticSection:
    """The critic of `algorithm.advantage: gae`; for batches and further options it has those of the actor."""

    path: str = key(
        "",
        "Hugging Face directory that the critic starts from: a reward model, or a language model such as `model.path`, "
        "whose values begin at 0",
        is_model=True,
    )
    start_lr: float = key(1e-5, "learning rate of the critic, in the place of `optimizer.start_lr`", minimum=0)
    end_lr: float | None = key(
        None,
        "learning rate of the critic at the last step, for a schedule that decays; null keeps its `start_lr`",
        minimum=0,
    )
    clip_range: float = key(
        0.2,
        "values that moved further than this within a step are held, in units of the reward; 0 holds none",
        minimum=0,
    )
    warmup_steps: int = key(0, "steps at the start in which only the critic is trained", minimum=0)


@dataclass(frozen=True)
class TrainingSection:
    """How a batch of samples becomes optimiser updates."""

    chunk_size: int = key(8, "prompts sent to the generator at a time", minimum=1)
    num_rollouts: int = key(1, "chunks per step; a step uses chunk_size * num_rollouts prompts", minimum=1)
    epochs: int = key(1, "passes over the training prompts", minimum=1)
    batch_size: int = key(4, "rows per micro-batch and rank", minimum=1)
    row_lengths: tuple[int, ...] = key(
        (),
        "allowed row lengths, in tokens; empty means one that fits the longest sample, or with another `packing` than "
        "first_fit two: see docs/performance.md",
        minimum=8,
    )
    pack: bool = key(True, "put several samples into one row")
    packing: str = key(
        FIRST_FIT,
        "how samples fill rows: first_fit by length alone; best_fit makes fuller rows and balances the ranks by work; "
        "shared_prompts does so, and samples of one prompt in a row have it once; see docs/performance.md",
        choices=PACKINGS,
    )
    skip_zero_advantages: bool = key(True, "leave samples without a gradient out of updates; see docs/performance.md")
    replay_routing: bool = key(False, "route tokens to experts as the generator did; see docs/algorithms.md")
    num_minibatches: int = key(1, "optimiser updates that one pass over a step's samples is split into", minimum=1)
    num_iterations: int = key(1, "passes over a step's samples", minimum=1)


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW (Loshchilov and Hutter 2019); norms and biases are not decayed."""

    start_lr: float = key(1e-6, "learning rate after the warm-up", minimum=0)
    end_lr: float | None = key(None, "learning rate at the last step; null keeps `start_lr`", minimum=0)
    lr_schedule: str = key("constant", "course from start_lr to end_lr", choices=("constant", "linear", "cosine"))
    warmup_steps: int = key(0, "optimiser updates over which the learning rate rises from 0", minimum=0)
    beta1: float = key(0.9, "decay of the first moment", minimum=0, maximum=0.9999)
    beta2: float = key(0.95, "decay of the second moment", minimum=0, maximum=0.99999)
    epsilon: float = key(1e-8, "added to the root of the second moment", minimum=0, exclusive_minimum=True)
    weight_decay: float = key(0.01, "decoupled weight decay of matrices", minimum=0)
    max_grad_norm: float = key(1.0, "gradients are scaled down to this global norm; 0 means never", minimum=0)


@dataclass(frozen=True)
class ParallelSection:
    """How the model is sharded over the ranks, in MindFormers' terms."""

    data_parallel: int = key(0, "data-parallel replicas; 0 means as many as the world size leaves", minimum=0)
    model_parallel: int = key(1, "ranks that share each weight matrix", minimum=1)
    pipeline_stage: int = key(1, "stages that the layers are split into", minimum=1)
    context_parallel: int = key(1, "ranks that share each sequence", minimum=1)
    expert_parallel: int = key(1, "ranks that share the experts", minimum=1)
    use_seq_parallel: bool = key(False, "split norms and residuals along the sequence over the model_parallel ranks")
    micro_batch_num: int = key(1, "micro-batches in flight in the pipeline", minimum=1)
    micro_batch_interleave_num: int = key(
        1, "halves of a micro-batch whose compute and communication overlap", minimum=1, maximum=2
    )
    vocab_emb_dp: bool = key(True, "keep the embedding whole on each rank instead of sharding its vocabulary")
    enable_parallel_optimizer: bool = key(False, "split the optimiser state over the data-parallel ranks (ZeRO)")
    optimizer_weight_shard_size: int = key(-1, "ranks that share one optimiser state; -1 means all", minimum=-1)
