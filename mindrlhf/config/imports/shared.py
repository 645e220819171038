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
    return {"training.chunk_size": int(count), "training.num_rollouts": 1}


def schedule(value: Any) -> str:
    """Names of a learning rate's course."""
    known = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    if value not in known:
        raise NoCounterpartError(f"{value} has no counterpart: use constant, linear or cosine")
    return known[value]


def pipeline(value: Any, source: Source) -> Values:
    """Stages, and as many micro-batches, which is the least that keeps them busy."""
    return {"parallel_config.pipeline_stage": int(value), "parallel_config.micro_batch_num": int(value)}


def kl_estimator(name: Any) -> str:
    """Names of the estimates of KL."""
    if name not in KL_ESTIMATORS:
        raise NoCounterpartError(f"no estimate {name!r} of the KL divergence: use k1, k2, k3 or abs")
    return KL_ESTIMATORS[name]


def warmup_share(value: Any, source: Source) -> Values:
    """A warm-up that is a share of all steps, whose number is not known here."""
    if float(value):
        raise NoCounterpartError("a share of all steps: set optimizer.warmup_steps to the number of updates")
    return {}


def only_of_gae(estimator: str, key: str) -> Rule:
    """The key is our ``key`` where their key ``estimator`` is gae, and says nothing elsewhere."""
    return into(lambda value, source: {key: value} if source.get(estimator) == "gae" else {})


def only(*allowed: Any, otherwise: str) -> Rule:
    """The key needs no counterpart as long as it has one of these values."""

    def check(value: Any, source: Source) -> Values:
        if value not in allowed:
            raise NoCounterpartError(f"{value!r} has no counterpart: {otherwise}")
        return {}

    return into(check)
