"""Conversions that several stacks need: functions of a value and a `Source`, see `tables`."""

import math
from collections.abc import Callable
from typing import Any

from mindrlhf.config.imports.tables import LeftToUserError, Source, Values

# Names of the estimates of Schulman's note on approximating KL (http://joschu.net/blog/kl-approx.html).
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
SCHEDULES |= {"cosine_with_min_lr": "cosine"}
# Names of a layer's matrices, as Hugging Face and Megatron call them, by our role.
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "linear_qkv", "linear_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "linear_fc1", "linear_fc2"}
_WHOLE_ROLES = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"}, {"linear_qkv", "linear_proj"})
_WHOLE_ROLES += ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}, {"linear_fc1", "linear_fc2"})

RUN_NAME = "trackers show the last folder of run.output_dir: set that"
TOOLS = "name the tools in tools.names; docs/tools.md"
EVAL_FILE = "path/to/eval.mindrecord"
Convert = Callable[[Any, Source], Any]
# Their values to ours; None asks for nothing.
SWITCH = {True: True, False: None}
PACKING = {True: "first_fit", False: "none"}
FULL = {"full": True, "selective": None}
BFLOAT16 = {True: "bfloat16", "bfloat16": "bfloat16", "bf16": "bfloat16", False: None, "float32": None, "fp32": None}
DEVICE = {"cpu": "cpu", "npu": "ascend", "cuda": "ascend"}


def is_on(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")


def positive(value: Any, source: Source) -> int | None:
    return int(value) if int(value) > 0 else None


def not_negative(value: Any, source: Source) -> int:
    """A number of which their -1 is our 0: all tokens, never."""
    return max(int(value), 0)


def only_of_gae(estimator: str) -> Convert:
    """A key that counts where their key ``estimator`` is gae."""
    return lambda value, source: value if source.get(estimator) == "gae" else None


def whole(value: Any, divisor: Any, meaning: str) -> int:
    """Return a quotient that must be a whole number."""
    quotient, rest = divmod(int(value), int(divisor))
    if rest or quotient < 1:
        raise LeftToUserError(f"{meaning}: {value} is no multiple of {divisor}")
    return quotient


def prompts(value: Any, source: Source) -> Values:
    """A step of so many prompts, sent to the generator together."""
    if int(value) < 1:
        raise LeftToUserError(f"{value} prompts: set training.chunk_size to those of a step")
    return {"training.chunk_size": int(value), "training.num_rollouts": 1}


def pipeline(value: Any, source: Source) -> Values:
    """Stages, and as many micro-batches, the least that keeps them busy."""
    return {"parallel_config.pipeline_stage": int(value), "parallel_config.micro_batch_num": int(value)}


def warmup_share(value: Any, source: Source) -> None:
    if float(value):
        raise LeftToUserError("a share of all steps: set optimizer.warmup_steps to the number of updates")


def prompt_length(response: str, packed: str = "") -> Convert:
    """The longest prompt: a matter of the data, and with the longest response a sequence where none are packed.

    Args:
        response: their key of the longest response.
        packed: their key that says that sequences are packed to a length of its own.
    """

    def convert(value: Any, source: Source) -> None:
        values: Values = {}
        if not is_on(source.given.get(packed)) and str(source.get(response)).isdecimal():
            values["training.sequence_lengths"] = [int(value) + int(source.get(response))]
        raise LeftToUserError(f"give it to mindrlhf data build: --max-prompt-length {value}", values)

    return convert


def servers(tensor_parallel: Any, *counts: Any) -> Values:
    """Servers of ``tensor_parallel`` devices each, as many as there are devices for: the product of ``counts``."""
    values = {"rollout.tensor_parallel": int(tensor_parallel)}
    if all(str(count).isdecimal() for count in counts):
        values["rollout.num_replicas"] = max(math.prod(map(int, counts)) // int(tensor_parallel), 1)
    return values


def template_option(prefix: str) -> Convert:
    """Variables of a chat template, whose names follow ``prefix``."""

    def advise(value: Any, source: Source) -> None:
        options = {name: given for name, given in source.given.items() if name.startswith(prefix)}
        words = (
            f" --template-option {name.removeprefix(prefix)}={str(given).lower() if isinstance(given, bool) else given}"
            for name, given in options.items()
        )
        raise LeftToUserError("give it to mindrlhf data build:" + "".join(words))

    return advise


def overlong_buffer(tokens: Any, longest: Any, penalty: Any) -> float:
    """DAPO's soft penalty (Yu et al. 2025, arXiv:2503.14476, equation 13), whose length is a share of the response."""
    share = float(f"{int(tokens) / int(longest):.6g}")
    if float(penalty) != 1:
        text = f"the penalty is 1 here, not {penalty}: weigh rewards by reward.verifier_weight"
        raise LeftToUserError(text, {"algorithm.overlong_buffer": share})
    return share


def trackers(value: Any, source: Source) -> list[str] | None:
    names = [value] if isinstance(value, str) else list(value or ())
    known = [name for name in ("wandb", "swanlab", "mlflow") if name in names]
    return ["tensorboard", *known] if known else None


def clip(low: Any, high: Any) -> Values:
    """Bounds of the probability ratio: below 1 - 1 = 0 it never is."""
    return {"algorithm.clip_low": min(float(low), 1.0), "algorithm.clip_high": float(high)}


def packed_tokens(tokens: int, longest: Any) -> Values:
    """Micro-batches of one packed sequence.

    Args:
        tokens: of all ranks that share a sequence.
        longest: the longest response, which must fit in with its prompt; None where it is not known.
    """
    values: Values = {"training.sequence_lengths": [tokens], "training.micro_batch_size": 1}
    values |= {"training.packing": "first_fit"}
    if longest is not None and tokens <= int(longest):
        del values["training.sequence_lengths"]
        text = f"{tokens} tokens hold no longest response with its prompt: set training.sequence_lengths"
        raise LeftToUserError(text, values)
    return values


def lora(rank: Any, alpha: Any, modules: Any) -> Values:
    """Low-rank adapters; none for rank 0.

    Raises:
        LeftToUserError: some of the named matrices have adapters here only with others.
    """
    if not rank or int(rank) == 0:
        return {}
    values: Values = {"lora.rank": int(rank), "lora.alpha": float(alpha)}
    listed = modules if isinstance(modules, list) else str(modules or "").strip("[]()").split(",")
    names = {str(name).strip() for name in listed} - {""}
    if not names or names & {"all-linear", "all", "all_linear"}:
        return values
    roles = [role for role, known in (("attention", _ATTENTION), ("mlp", _MLP)) if names & known]
    if len(roles) == 1:  # with both roles all that the model has
        values["lora.targets"] = roles
    if names != set().union(*(whole_role for whole_role in _WHOLE_ROLES if whole_role <= names)):
        shown = ", ".join(sorted(names))
        text = f"adapters on {shown}: here a whole role has them (attention, mlp); check lora.targets"
        raise LeftToUserError(text, values)
    return values


def beta(value: Any, source: Source) -> Values:
    return {"algorithm.beta": float(value), "algorithm.kl_in": "loss", "algorithm.kl_estimator": "k3"}
