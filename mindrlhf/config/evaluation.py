"""The section `evaluation`: held-out sets, and which of them says what the best model of a run is."""

from dataclasses import dataclass

from mindrlhf.config.keys import key

ACCURACY, PASS_AT_K = BEST_METRICS = ("accuracy", "pass@k")


@dataclass(frozen=True)
class EvaluationSection:
    """Accuracy on held-out prompts during training."""

    every_steps: int = key(50, "steps between evaluations; 0 means only before the first and after the last", minimum=0)
    before_training: bool = key(True, "evaluate the starting model too")
    patience: int = key(
        0, "end the run after this many evaluations in a row that are no better than the best; 0 means never", minimum=0
    )
    num_samples: int = key(1, "samples per prompt", minimum=1)
    temperature: float = key(1.0, "sampling temperature; 0 takes the likeliest token", minimum=0)
    max_prompts: int = key(0, "use only the first prompts of `data.eval_file`; 0 means all", minimum=0)
    verifier: str = key(
        "", "the verifier whose mean is called accuracy; empty means the first of `reward.verifier_function`"
    )
    sets: dict[str, str] = key({}, "further sets, reported beside `data.eval_file`, as `name: MindRecord file`")
    verifiers: dict[str, str] = key({}, "accuracy in a further set, as `name: verifier`; `verifier` unless given")
    best_by: str = key(
        ACCURACY,
        "what `checkpoint.keep_best` and `patience` go by: accuracy or pass@k, or those of a further set, as "
        "`name/accuracy`",
    )

    @property
    def best_set(self) -> str:
        """The further set of ``best_by``; empty for `data.eval_file`."""
        return self.best_by.rpartition("/")[0]

    @property
    def best_metric(self) -> str:
        """The metric of ``best_by``."""
        return self.best_by.rpartition("/")[2]
