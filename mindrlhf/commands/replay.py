"""``mindrlhf replay``: compute a skipped update again and say what is strange about it."""

import argparse
import dataclasses
import json
from pathlib import Path

from mindrlhf.commands.vocabulary import allow_json

_NUM_SHOWN = 8
_MAX_TEXT = 60


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``replay`` command."""
    parser = subparsers.add_parser("replay", help="compute a skipped update again: losses, gradients, samples")
    parser.add_argument("batch_dir", type=Path, metavar="DIR", help="RUN_DIR/skipped/step_N/update_K")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="weights (default: the checkpoint nearest to the update)"
    )
    allow_json(parser)
    parser.set_defaults(run=run, says="computing")


def run(arguments: argparse.Namespace) -> int:
    from mindrlhf.training.loop.replay import replay

    found = replay(arguments.batch_dir, arguments.model)
    batch = found.batch
    if arguments.json:
        print(json.dumps(_plain(found), indent=1))
        return 0
    same = {True: "those of the update", False: "not those of the update", None: "perhaps not those of the update"}
    print(f"step {batch.step}, update {batch.update}: {len(batch.samples)} samples, {batch.num_tokens} response tokens")
    print(f"weights: {found.model_dir} ({same[found.has_same_weights]})")
    print(f"loss: {found.loss:g} (was {batch.loss}); of the micro-batches: {_numbers(found.losses)}")
    print(f"gradient norm: {found.grad_norm:g} (was {batch.grad_norm})")
    print(f"first gradient that is not finite: {found.first_not_finite or 'none'}")
    print("norm of each gradient:")
    for name, norm in found.norms.items():
        print(f"  {norm:<12.6g} {name}")
    print("samples, the strangest first:")
    for sample in found.samples[:_NUM_SHOWN]:
        print(
            f"  {sample.index}: lowest log-probability {sample.min_logprob:g}, largest advantage "
            f"{sample.max_abs_advantage:g}, reward {sample.reward:g}, log-probabilities changed by up to "
            f"{sample.max_abs_change:g}: {_short(sample.prompt)} -> {_short(sample.completion)}"
        )
    return 0


def _plain(found) -> dict:
    """Return what the text says as JSON values."""
    batch = found.batch
    return {
        "step": batch.step,
        "update": batch.update,
        "num_samples": len(batch.samples),
        "num_tokens": batch.num_tokens,
        "weights": str(found.model_dir),
        "has_same_weights": found.has_same_weights,
        "losses": found.losses,
        "grad_norm": found.grad_norm,
        "norms": found.norms,
        "samples": [dataclasses.asdict(sample) for sample in found.samples],
    }


def _numbers(values: list[float]) -> str:
    more = f" and {len(values) - _NUM_SHOWN} more" if len(values) > _NUM_SHOWN else ""
    return ", ".join(f"{value:g}" for value in values[:_NUM_SHOWN]) + more


def _short(text: str) -> str:
    return repr(text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}...")
