"""The sections of supervised fine-tuning and preference learning."""

from dataclasses import dataclass

from mindrlhf.config.keys import RunConfig, key
from mindrlhf.config.training import BY_LENGTH, FIRST_FIT, resolve_data_parallel
from mindrlhf.errors import Rules


@dataclass(frozen=True)
class _FixedBatches:
    epochs: int = key(1, "passes over the training records", minimum=1)
    micro_batch_size: int = key(4, "packed sequences per micro-batch and rank", minimum=1)
    sequence_lengths: tuple[int, ...] = key(
        (),
        "lengths that packed sequences may have, in tokens; empty means one that fits the longest response with its "
        "prompt",
        minimum=8,
    )
    packing: str = key(
        FIRST_FIT,
        "first_fit packs several responses into one sequence; none gives each one of its own",
        choices=BY_LENGTH,
    )


@dataclass(frozen=True)
class SupervisedSection(_FixedBatches):
    """Batches of prompts with a response each, and optimiser updates."""

    rows_per_step: int = key(64, "packed sequences per optimiser update, over all ranks", minimum=1)


@dataclass(frozen=True)
class PreferenceSection(_FixedBatches):
    """Batches of pairs, two responses to one prompt of which one is preferred, and optimiser updates."""

    pairs_per_step: int = key(32, "pairs per optimiser update, over all ranks", minimum=1)


@dataclass(frozen=True)
class PairEvaluationSection:
    """Accuracy on held-out pairs during training."""

    every_steps: int = key(
        0, "steps between evaluations on `data.eval_file`; 0 means only before and after", minimum=0
    )


@dataclass(frozen=True)
class DpoSection:
    """Direct preference optimisation."""

    loss: str = key("sigmoid", "loss of a pair's margin", choices=("sigmoid", "hinge", "ipo"))
    beta: float = key(0.1, "strength of the pull to the reference model", minimum=0, exclusive_minimum=True)
    label_smoothing: float = key(
        0.0, "share of pairs assumed to be the wrong way round", minimum=0, maximum=0.499, read_with="dpo.loss=sigmoid"
    )
    sft_weight: float = key(0.0, "weight of the likelihood of preferred responses beside the loss", minimum=0)


@dataclass(frozen=True)
class RewardModelSection:
    """Bradley-Terry reward model."""

    centering: float = key(0.01, "weight of the squared sum of a pair's scores, which keeps them near 0", minimum=0)


SAMPLE_KEYS = ("observe.groups_per_step",)


def supervised_rules(given: frozenset[str]) -> Rules:
    """Rules of `mindrlhf sft`; ``given`` are the keys that the user changed."""
    unused = dict.fromkeys(SAMPLE_KEYS, "samples") | {"model.reference_path": "reference model"}
    for name, what in unused.items():
        yield name in given, f"'{name}' is set, but supervised fine-tuning has no {what}: remove it"


def supervised_batch_rules(config: RunConfig, world_size: int) -> Rules:
    """Rules of a batch of `mindrlhf sft` on ``world_size`` ranks.

    Raises:
        UserError: the layout does not use exactly these ranks.
    """
    training = config.training
    unit = training.micro_batch_size * resolve_data_parallel(config.parallel_config, world_size)
    yield training.rows_per_step % unit, (
        f"'training.rows_per_step' is {training.rows_per_step}, not a multiple of micro_batch_size * ranks = "
        f"{unit}: set it to {-(-training.rows_per_step // unit) * unit}"
    )


def preference_rules(given: frozenset[str]) -> Rules:
    """Rules of learning from pairs; ``given`` are the keys that the user changed."""
    for name in SAMPLE_KEYS:
        yield name in given, f"'{name}' is set, but preference learning samples nothing: remove it"
