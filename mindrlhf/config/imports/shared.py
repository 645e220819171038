"""Conversions that several stacks need."""

from typing import Any

from mindrlhf.config.imports.rules import NoCounterpartError, Rule, Source, Values, into

MODEL_SAYS = "config.json of the model directory says it"
KERNELS = "MindFormers' cells choose their kernels themselves"
# Names of the estimates of Schulman's note on approximating KL (http://joschu.net/blog/kl-approx.html).
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def top_k(value: Any) -> int:
    """-1 means all tokens elsewhere, 0 here."""
    return max(int(value), 0)


def whole(value: Any, divisor: Any, what: str) -> int:
    """Return a quotient that must be a whole number."""
    quotient, rest = divmod(int(value), int(divisor))
    if rest or quotient < 1:
        raise NoCounterpartError(f"{what}: {value} is no multiple of {divisor}")
    return quotient


def prompts(count: Any) -> Values:
    """A step of this many prompts, sent to the generator together."""
    if int(count) < 1:
        raise NoCounterpartError(f"{count} prompts: set training.chunk_size to those of a step")
    return {"training.chunk_size": int(count), "training.num_rollouts": 1}


PROMPT_KEYS = ("training.chunk_size", "training.num_rollouts")
PIPELINE_KEYS = ("parallel_config.pipeline_stage", "parallel_config.micro_batch_num")


def schedule(value: Any) -> str:
    """Names of a learning rate's course."""
    known = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    known["cosine_with_min_lr"] = "cosine"
    if str(value) not in known:
        raise NoCounterpartError(f"{value} has no counterpart: use constant, linear or cosine")
    return known[value]


def pipeline(value: Any, source: Source) -> Values:
    """Stages, and as many micro-batches, which is the least that keeps them busy."""
    return {"parallel_config.pipeline_stage": int(value), "parallel_config.micro_batch_num": int(value)}


def kl_estimator(name: Any) -> str:
    if str(name) not in KL_ESTIMATORS:
        raise NoCounterpartError(f"no estimate {name!r} of the KL divergence: use k1, k2, k3 or abs")
    return KL_ESTIMATORS[name]


def warmup_share(value: Any, source: Source) -> Values:
    """A warm-up that is a share of all steps, whose number is not known here."""
    if float(value):
        raise NoCounterpartError("a share of all steps: set optimizer.warmup_steps to the number of updates")
    return {}


def only_of_gae(estimator: str, key: str, name: str = "gae") -> Rule:
    """The key is our ``key`` where their key ``estimator`` is ``name``, and says nothing elsewhere."""
    return into(lambda value, source: {key: value} if source.get(estimator) == name else {}, key)


def only(*allowed: Any, otherwise: str) -> Rule:
    """The key needs no counterpart as long as it has one of these values."""

    def check(value: Any, source: Source) -> Values:
        if value not in allowed:
            raise NoCounterpartError(f"{value!r} has no counterpart: {otherwise}")
        return {}

    return into(check)


# Names of a layer's matrices, as Hugging Face and Megatron call them, by our role; each set is whole.
_ADAPTED = {
    "attention": ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"}, {"linear_qkv", "linear_proj"}),
    "mlp": ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}, {"linear_fc1", "linear_fc2"}),
}
LORA_KEYS = ("lora.rank", "lora.alpha", "lora.targets")


def lora(rank: Any, alpha: Any, modules: Any) -> Values:
    """Return low-rank adapters; none for rank 0.

    Raises:
        NoCounterpartError: some of the named matrices have adapters here only with others.
    """
    if not rank or int(rank) == 0:
        return {}
    values: Values = {"lora.rank": int(rank), "lora.alpha": float(alpha)}
    names = [modules] if isinstance(modules, str) else list(modules or ())
    names = [part.strip() for name in names for part in str(name).strip("[]()").split(",") if part.strip()]
    if not names or set(names) & {"all-linear", "all", "all_linear"}:
        return values
    left, roles = set(names), []
    for role, wholes in _ADAPTED.items():
        if left & set().union(*wholes):
            roles.append(role)
    is_whole = left == set().union(*(next((one for one in _ADAPTED[role] if one <= left), set()) for role in roles))
    if set(roles) != set(_ADAPTED):  # with both roles, those of experts as well: all that the model has
        values["lora.targets"] = roles
    if not is_whole:
        raise NoCounterpartError(
            f"adapters on {', '.join(names)}: here a whole role has them (attention, mlp, experts); check lora.targets",
            values,
        )
    return values


def template_options(options: Any) -> str:
    """Return what to do with variables of a chat template: they are given as the data is built."""
    pairs = options.items() if isinstance(options, dict) else []
    words = " ".join(
        f"--template-option {name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in pairs
    )
    return f"give it to mindrlhf data build: {words or '--template-option NAME=VALUE'}"


def template_option(prefix: str) -> Rule:
    """The rule of ``prefix`` followed by the names of a template's variables."""

    def advise(value: Any, source: Source) -> Values:
        names = [name for name in source.given if name.startswith(prefix)]
        options = {name.removeprefix(prefix).lstrip("."): source.given[name] for name in names}
        options = options.pop("") if isinstance(options.get(""), dict) else options
        raise NoCounterpartError(template_options(options))

    return into(advise)


def prompt_length(value: Any, source: Source) -> Values:
    """The longest prompt is a matter of the data."""
    raise NoCounterpartError(f"give it to mindrlhf data build: --max-prompt-length {value}")


def overlong_buffer(tokens: Any, longest: Any, penalty: Any) -> Values:
    """DAPO's soft penalty (Yu et al. 2025, arXiv:2503.14476, equation 13), whose length is a share of the response."""
    return {
        "algorithm.overlong_buffer": float(f"{int(tokens) / int(longest):.6g}"),
        "algorithm.overlong_penalty": float(penalty),
    }


OVERLONG_KEYS = ("algorithm.overlong_buffer", "algorithm.overlong_penalty")


def trackers(value: Any, source: Source) -> Values:
    """Where metrics go beside the files of a run: those that there are here too."""
    names = [value] if isinstance(value, str) else list(value or ())
    known = [name for name in ("wandb", "swanlab", "mlflow") if name in names]
    return {"observe.sinks": ["tensorboard", *known]} if known else {}


def flag(key: str, value: Any = True) -> Rule:
    """The key is our ``key`` with ``value`` where it is true, and asks for nothing where it is not."""
    return into(lambda given, source: {key: value} if is_on(given) else {}, key)


def is_on(value: Any) -> bool:
    """Whether a switch is set, also as text."""
    return value is not None and str(value).lower() in ("true", "1", "yes", "on")


def positive(key: str) -> Rule:
    """The key is our ``key`` where it is above 0, and asks for nothing elsewhere."""
    return into(lambda value, source: {key: int(value)} if int(value) > 0 else {}, key)


def clip(low: Any, high: Any) -> Values:
    """Bounds of the probability ratio: below 1 - 1 = 0 it never is."""
    return {"algorithm.clip_low": min(float(low), 1.0), "algorithm.clip_high": float(high)}


CLIP_KEYS = ("algorithm.clip_low", "algorithm.clip_high")
ROW_KEYS = ("training.sequence_lengths", "training.micro_batch_size", "training.pack")


def rows_of_tokens(tokens: int, longest: Any) -> Values:
    """Micro-batches of so many tokens: a packed sequence each.

    Args:
        tokens: of all ranks that share a sequence.
        longest: the longest response, which must fit in with its prompt; None where it is not known.
    """
    values: Values = {"training.sequence_lengths": [tokens], "training.micro_batch_size": 1, "training.pack": True}
    if longest is not None and tokens <= int(longest):
        del values["training.sequence_lengths"]
        raise NoCounterpartError(
            f"{tokens} tokens hold no longest response with its prompt: set training.sequence_lengths",
            values,
        )
    return values


def sequence_parallel(ranks: str) -> Rule:
    """Sharding along the sequence, which there is where ``ranks`` share a matrix."""
    key = "parallel_config.use_seq_parallel"
    return into(lambda value, source: {key: is_on(value)} if int(source.get(ranks, 1)) > 1 else {}, key)
