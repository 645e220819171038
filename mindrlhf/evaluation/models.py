"""Evaluation of models on disk: no trainer, only the generator and the verifiers."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.config.reward import REWARD_MODEL_NAME
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.tokenizer_config import end_ids
from mindrlhf.data.tokenizers import Tokenizer, load_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.evaluation.heldout import Evaluation, HeldOut, accuracy_verifier, known, prompt_means
from mindrlhf.evaluation.statistics import accuracy_interval, pass_at_k
from mindrlhf.observe.samples import SampleWriter
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.registry import part_name
from mindrlhf.rewards.selection import Selection
from mindrlhf.rollout.conversations import with_tools
from mindrlhf.rollout.pool import start_pool
from mindrlhf.rollout.samples import Sample, Sampler, sample_record
from mindrlhf.rollout.types import SamplingParams
from mindrlhf.sandbox.server import check_for
from mindrlhf.tools.environments import check_columns
from mindrlhf.weights.hf import read_hf_config


@dataclass(frozen=True)
class EvaluationJob:
    """An evaluation to make: prompts, samples of each, and the config with verifiers and generator."""

    config: GrpoConfig
    data_file: str
    num_samples: int
    temperature: float
    max_prompts: int  # 0 means all
    set_name: str = ""  # of evaluation.sets, whose verifier then counts as accuracy

    def held_out(self) -> tuple[HeldOut, Tokenizer, PromptFile]:
        """Open the prompts; return them, the tokenizer and the file.

        Raises:
            UserError: the file is missing, empty or built with another tokenizer; or sampling contradicts itself.
        """
        if self.num_samples < 1 or self.temperature < 0 or self.max_prompts < 0:
            raise UserError(
                f"{self.num_samples} samples of {self.max_prompts} prompts at temperature {self.temperature:g}: "
                "at least 1 sample is needed, and no value may be negative"
            )
        if self.temperature == 0 and self.num_samples > 1:
            raise UserError(f"{self.num_samples} samples at temperature 0 are all alike: set one or the other")
        config = self.config
        tokenizer = load_tokenizer(config.data.tokenizer_dir)
        tokenizer.end_at(end_ids(config.model.path))
        file = PromptFile.open(self.data_file, tokenizer.fingerprint)
        if not len(file):
            raise UserError(f"{self.data_file} holds no prompts: build it again")
        count = min(len(file), self.max_prompts or len(file))
        verifier = accuracy_verifier(config, self.set_name)
        if verifier == REWARD_MODEL_NAME:
            raise UserError(
                "accuracy is the score of the reward model here, which is computed during training only: set "
                "'reward.verifier_function' and 'evaluation.verifier' to a verifier"
            )
        sampling = SamplingParams(
            config.rollout.max_response_length,
            self.temperature,
            stop_token_ids=tokenizer.eos_token_ids,
            stop=config.rollout.stop,
        )
        selection = Selection.from_config(config.reward)
        selection.check_prompts(file, verifier)
        check_columns(config.tools.environment, file.header.columns, f"prompts of {file.path}")
        records = file.read(range(count))
        held_out = HeldOut(records, self.num_samples, part_name(verifier), sampling, config.run.seed)
        return held_out, tokenizer, file


def evaluate_models(job: EvaluationJob, model_dirs: Sequence[str], out_dir: Path) -> list[Evaluation]:
    """Sample every model on the same prompts with the same random streams, one model after the other.

    Writes ``samples_<number>.jsonl`` for each model into ``out_dir``.

    Raises:
        UserError: the system gives the sandbox too little for programs of the models.
    """
    held_out, tokenizer, file = job.held_out()
    reward, tools = job.config.reward, job.config.tools
    for model_dir in model_dirs:
        read_hf_config(model_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    evaluations = []
    check_for((*reward.verifier_function, *tools.names), job.config.sandbox.allow_weak)
    with RewardPool.from_config(reward, out_dir / "reward_failures.jsonl") as pool:
        for number, model_dir in enumerate(model_dirs, start=1):
            generator = start_pool(
                job.config.rollout,
                model_dir=model_dir,
                max_model_len=file.header.longest_prompt + job.config.rollout.max_response_length,
                seed=job.config.run.seed,
                device=job.config.run.device,
                log_dir=out_dir,
                load_weights=True,
                tokenizer_dir=job.config.data.tokenizer_dir if job.config.rollout.stop or tools.agent else "",
            )
            try:
                generator.wait_ready()
                with contextlib.ExitStack() as stack:
                    source = with_tools(tools, generator, tokenizer, stack, [file])
                    samples = held_out.sample(Sampler(source, pool, tokenizer))
            finally:
                generator.close()
            evaluations.append(Evaluation.of(0, held_out.verifier, samples, held_out.num_samples))
            _write_samples(out_dir / f"samples_{number}.jsonl", samples)
    return evaluations


def describe(evaluation: Evaluation) -> list[str]:
    """Return lines with avg@k of every verifier, and pass@1, 2, 4, ... k of the one that counts as accuracy."""
    lost = [f"{evaluation.num_unscored} of {evaluation.rewards[evaluation.verifier].size} samples not scored"]
    return (lost if evaluation.num_unscored else []) + [
        f"{score['score']:8s} {score['mean']:7.2%}  ({score['low']:.2%} to {score['high']:.2%})  {score['verifier']}"
        for score in intervals(evaluation)
    ]


def intervals(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return what ``describe`` puts into words: "score" ("avg@8", "pass@2"), "verifier", "mean", "low" and "high"."""
    k = evaluation.num_samples
    found = [
        (f"avg@{k}", name, accuracy_interval(known(prompt_means(rewards))))
        for name, rewards in evaluation.rewards.items()
    ]
    correct = evaluation.scores > 0.5
    for power in range(1, k.bit_length()):
        found.append((f"pass@{2**power}", evaluation.verifier, accuracy_interval(pass_at_k(correct, 2**power))))
    return [
        {"score": score, "verifier": name, "mean": float(one.mean), "low": float(one.low), "high": float(one.high)}
        for score, name, one in found
    ]


def _write_samples(path: Path, samples: Sequence[Sample]) -> None:
    writer = SampleWriter(path, first_step=0)
    try:
        writer.write(sample_record(sample, 0) for sample in samples)
    finally:
        writer.close()
