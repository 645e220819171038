"""`mindrlhf eval`: accuracy of a model on held-out prompts, or which of two models is better."""

import argparse
from pathlib import Path
from typing import Any

from mindrlhf.commands.vocabulary import add_overrides, allow_json, model_directory, print_json


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("eval", help="accuracy of a model, or of two compared")
    parser.add_argument("config", help="YAML file of a `mindrlhf train` run: verifiers, tokenizer and generator")
    add_overrides(parser)
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--model", type=model_directory, help="Hugging Face directory")
    models.add_argument("--checkpoints", metavar="DIR", help="all checkpoints of a run: a table, and curve.svg")
    parser.add_argument(
        "--baseline",
        type=model_directory,
        help="another Hugging Face directory: is --model better on the same prompts?",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--data", metavar="FILE", help="MindRecord file of prompts (default: data.eval_file)")
    prompts.add_argument("--set", metavar="NAME", default="", help="a set of evaluation.sets, with its own verifier")
    parser.add_argument("--num-samples", type=int, metavar="N", help="per prompt (default: evaluation.num_samples)")
    parser.add_argument("--temperature", type=float, metavar="T", help="(default: evaluation.temperature)")
    parser.add_argument("--max-prompts", type=int, metavar="N", help="use only the first prompts (default: all)")
    parser.add_argument(
        "--output", metavar="DIR", help="directory for samples and logs (default: eval in run.output_dir)"
    )
    allow_json(parser)
    parser.set_defaults(run=_evaluate, says="evaluating")


def _evaluate(arguments: argparse.Namespace) -> int:
    import json
    import sys

    from mindrlhf.config.load import load_grpo_config
    from mindrlhf.errors import UserError
    from mindrlhf.evaluation.comparison import compare, difference_text
    from mindrlhf.evaluation.models import EvaluationJob, describe, evaluate_models
    from mindrlhf.system.terminal import verdict_coloured

    # What only training needs is filled in from the arguments: a config with nothing but tokenizer, verifiers and
    # generator will do, and its layout of trainer ranks does not matter.
    needed = [f"model.path={arguments.model or arguments.checkpoints}", f"data.train_file={arguments.data or 'none'}"]
    config = load_grpo_config(arguments.config, [*needed, *arguments.overrides], world_size=None)
    data_file = arguments.data or config.data.eval_file
    if arguments.set:
        if arguments.set not in config.evaluation.sets:
            names = ", ".join(config.evaluation.sets) or "empty"
            raise UserError(f"'{arguments.set}' is not in evaluation.sets ({names}): name one of them, or give --data")
        data_file = config.evaluation.sets[arguments.set]
    if not data_file:
        raise UserError("no prompts to evaluate on: give --data FILE, or set data.eval_file")
    section = config.evaluation
    job = EvaluationJob(
        config,
        data_file,
        num_samples=section.num_samples if arguments.num_samples is None else arguments.num_samples,
        temperature=section.temperature if arguments.temperature is None else arguments.temperature,
        max_prompts=section.max_prompts if arguments.max_prompts is None else arguments.max_prompts,
        set_name=arguments.set,
    )
    if arguments.checkpoints:
        return _evaluate_checkpoints(job, arguments)
    models = [arguments.model] + ([arguments.baseline] if arguments.baseline else [])
    out_dir = _out_dir(job, arguments)
    evaluations = evaluate_models(job, models, out_dir)
    if arguments.json:
        print(json.dumps(_plain(models, evaluations), indent=1))
        return 0
    for number, (model, evaluation) in enumerate(zip(models, evaluations), start=1):
        print(f"{model}: {evaluation.num_prompts} prompts, {job.num_samples} samples each (95% intervals)")
        print("\n".join(f"  {line}" for line in describe(evaluation)))
        print(f"  samples  {out_dir / f'samples_{number}.jsonl'}")
    if arguments.baseline:
        difference = difference_text(compare(evaluations[1], evaluations[0])["difference"])
        print(f"difference {verdict_coloured(difference, sys.stdout)}")
    return 0


def _plain(models: list[str], evaluations: list) -> dict[str, Any]:
    """Return what the text says as JSON values: intervals of the models, and of their difference."""
    from mindrlhf.evaluation.comparison import compare
    from mindrlhf.evaluation.models import intervals

    found: dict[str, Any] = {
        "models": [
            {"model": model, "num_prompts": evaluation.num_prompts, "num_samples": evaluation.num_samples}
            | {"scores": intervals(evaluation)}
            for model, evaluation in zip(models, evaluations)
        ]
    }
    if len(evaluations) > 1:
        found["difference"] = compare(evaluations[1], evaluations[0])["difference"]
    return found


def _evaluate_checkpoints(job, arguments: argparse.Namespace) -> int:
    from mindrlhf.errors import UserError
    from mindrlhf.evaluation.checkpoints import CURVE_NAME, METRICS_NAME, evaluate_checkpoints, table_lines

    if arguments.baseline:
        raise UserError("--baseline goes with --model: checkpoints are compared with the first of them")
    out_dir = _out_dir(job, arguments)
    evaluations = evaluate_checkpoints(job, Path(arguments.checkpoints), out_dir)
    if arguments.json:
        rows = [{"step": one.step, "num_prompts": one.num_prompts, **one.metrics()} for one in evaluations]
        files = {"curve": str(out_dir / CURVE_NAME), "metrics": str(out_dir / METRICS_NAME)}
        return print_json({"checkpoints": rows, **files})
    print(f"{arguments.checkpoints}: {evaluations[0].num_prompts} prompts, {job.num_samples} samples each")
    print("\n".join(table_lines(evaluations)))
    print(f"curve    {out_dir / CURVE_NAME}\nmetrics  {out_dir / METRICS_NAME}")
    return 0


def _out_dir(job, arguments: argparse.Namespace) -> Path:
    return Path(arguments.output or Path(job.config.run.output_dir) / "eval")
