"""The sections of supervised fine-tuning and preference learning."""

from dataclasses import dataclass

from mindrlhf.config.keys import key


@dataclass(frozen=True)
class SupervisedSection:
    """Supervised fine-tuning on prompt and response pairs."""

    rows_per_step: int = key(64, "rows per optimiser update, over all ranks", minimum=1)
    epochs: int = key(1, "passes over the training records", minimum=1)
    batch_size: int = key(8, "rows per micro-batch and rank", minimum=1)
    row_lengths: tuple[int, ...] = key(
        (), "allowed row lengths, in tokens; empty means one that fits the longest record", minimum=8
    )
    pack: bool = key(True, "put several records into one row")


@dataclass(frozen=True)
class PreferenceSection:
    """Batches of pairs: two responses to one prompt, of which one is preferred."""

    pairs_per_step: int = key(32, "pairs per optimiser update, over all ranks", minimum=1)
    epochs: int = key(1, "passes over the training pairs", minimum=1)
    batch_size: int = key(8, "rows per micro-batch and rank", minimum=1)
    row_lengths: tuple[int, ...] = key(
        (), "allowed row lengths, in tokens; empty means one that fits the longest response with its prompt", minimum=8
    )
    pack: bool = key(True, "put several responses into one row")
    eval_every_steps: int = key(
        0, "steps between evaluations on `data.eval_file`; 0 means only before and after", minimum=0
    )


@dataclass(frozen=True)
class DpoSection:
    """Direct preference optimisation."""

    loss: str = key("sigmoid", "loss of a pair's margin", choices=("sigmoid", "hinge", "ipo"))
    beta: float = key(0.1, "strength of the pull to the reference model", minimum=0, exclusive_minimum=True)
    label_smoothing: float = key(
        0.0, "share of pairs assumed to be the wrong way round (sigmoid only)", minimum=0, maximum=0.499
    )
    sft_weight: float = key(0.0, "weight of the likelihood of preferred responses beside the loss", minimum=0)
    reference: str = key(
        "precomputed",
        "when the reference model is run: once for all pairs, before training, or live with each update",
        choices=("precomputed", "live"),
    )


@dataclass(frozen=True)
class RewardModelSection:
    """Bradley-Terry reward model."""

    label_smoothing: float = key(0.0, "share of pairs assumed to be the wrong way round", minimum=0, maximum=0.499)
    centering: float = key(0.01, "weight of the squared sum of a pair's scores, which keeps them near 0", minimum=0)
