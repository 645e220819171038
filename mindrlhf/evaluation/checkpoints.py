"""Evaluation of all checkpoints of a run on the same prompts: a table and a curve."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindrlhf.checkpoint.state import MODEL_NAME
from mindrlhf.errors import UserError
from mindrlhf.evaluation.comparison import compare, difference_text
from mindrlhf.evaluation.heldout import Evaluation
from mindrlhf.evaluation.models import EvaluationJob, evaluate_models
from mindrlhf.evaluation.statistics import pass_at_k
from mindrlhf.observe.learning_curve import write_learning_curve
from mindrlhf.observe.records import replace_file
from mindrlhf.shards.merge import merge_directory
from mindrlhf.system.files import scratch_directory
from mindrlhf.system.sizes import read_json_object
from mindrlhf.weights.adapters.config import CONFIG_NAME
from mindrlhf.weights.adapters.merge import merge_adapter
from mindrlhf.weights.open import is_sharded

METRICS_NAME, CURVE_NAME = "metrics.jsonl", "curve.svg"
_STEP_NAME = re.compile(r"step_(\d{8})")


def find_checkpoints(save_dir: Path) -> dict[int, Path]:
    """Return the model directories of a run's checkpoints by step, ascending.

    Raises:
        UserError: there are none.
    """
    found = {int(match[1]): path for path in save_dir.glob("step_*") if (match := _STEP_NAME.fullmatch(path.name))}
    models = {step: found[step] / MODEL_NAME for step in sorted(found) if (found[step] / MODEL_NAME).is_dir()}
    if not models:
        raise UserError(f"{save_dir} has no checkpoints: give the directory with the step_... of a run")
    return models


def evaluate_checkpoints(job: EvaluationJob, save_dir: Path, out_dir: Path) -> list[Evaluation]:
    """Sample every checkpoint on the same prompts with the same random streams, in the order of their steps.

    Writes samples into a directory for each, ``metrics.jsonl`` with the accuracies, and ``curve.svg``, into
    ``out_dir``.

    Raises:
        UserError: there are no checkpoints, or one cannot be evaluated.
    """
    evaluations = []
    for step, model_dir in find_checkpoints(save_dir).items():
        with whole_model(model_dir, out_dir) as directory:
            (evaluation,) = evaluate_models(job, [str(directory)], out_dir / f"step_{step:08d}")
        evaluations.append(dataclasses.replace(evaluation, step=step))
        lines = (json.dumps({"step": one.step, **one.metrics()}) for one in evaluations)
        replace_file(out_dir / METRICS_NAME, "".join(f"{line}\n" for line in lines))
    write_learning_curve(out_dir, out_dir / CURVE_NAME)
    return evaluations


@contextlib.contextmanager
def whole_model(model_dir: Path, scratch_parent: Path) -> Iterator[Path]:
    """Give a Hugging Face directory of a checkpoint's model: itself, or for the time of the block one that is made of
    shards, or of an adapter and the model that it was trained on.

    Raises:
        UserError: the files are damaged, or the adapter's model is not where it was.
    """
    is_adapter = (model_dir / CONFIG_NAME).is_file()
    if not (is_adapter or is_sharded(model_dir)):
        yield model_dir
        return
    scratch_parent.mkdir(parents=True, exist_ok=True)
    with scratch_directory(scratch_parent, ".whole-model-") as scratch:
        if is_adapter:
            base = str(read_json_object(model_dir / CONFIG_NAME).get("base_model_name_or_path"))
            merge_adapter(base, model_dir, scratch / MODEL_NAME)
        else:
            merge_directory(model_dir, scratch / MODEL_NAME)
        yield scratch / MODEL_NAME


def table_lines(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return a line for each evaluation: accuracy, with several samples pass@k, and the difference to the first."""
    first = evaluations[0]
    k = first.num_samples
    pass_title = f"  {f'pass@{k}':>8s}" if k > 1 else ""
    lines = [f"{'step':>8s}  {'accuracy':>8s}  {'95 % interval':18s}{pass_title}  against step {first.step}"]
    for one in evaluations:
        metrics = one.metrics()
        low, high = metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]
        against = "" if one is first else difference_text(compare(first, one)["difference"])
        passed = f"  {pass_at_k(one.scores > 0.5, k).mean():8.1%}" if k > 1 else ""
        accuracy = f"{metrics['eval/accuracy']:8.1%}  {f'{low:.1%} to {high:.1%}':18s}"
        lines.append(f"{one.step:8d}  {accuracy}{passed}  {against}".rstrip())
    return lines
