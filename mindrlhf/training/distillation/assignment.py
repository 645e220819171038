"""Which of several teachers judges a sample: that of the source of its prompt."""

from collections.abc import Sequence

import numpy as np

from mindrlhf.config.algorithm import OTHERS
from mindrlhf.config.derived import reference_paths
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.rollout.samples import Sample


class TeacherAssignment:
    """The teachers of a run by the source of a prompt."""

    def __init__(self, config: GrpoConfig):
        self._paths = dict(config.distillation.teachers)
        self._default = config.model.reference_path
        self._numbers = {path: number for number, path in enumerate(reference_paths(config), start=1)}

    def number(self, source: str) -> int:
        """Return the number of the teacher of a source, from 1; 0 where one model judges all samples."""
        if len(self._numbers) < 2:
            return 0
        path = self._paths.get(source, self._default)
        assert path, f"there is no teacher for the source {source!r}: it should have been refused before the start"
        return self._numbers[path]

    def metrics(self, samples: Sequence[Sample], kl: Sequence[np.ndarray]) -> dict[str, float]:
        """Return the mean KL per token, in nats, and the number of samples of each teacher's source.

        Args:
            kl: float64 [generated tokens] for each sample, against its own teacher.
        """
        by_source: dict[str, list[np.ndarray]] = {}
        for sample, estimate in zip(samples, kl, strict=True):
            source = sample.prompt.source if sample.prompt.source in self._paths else OTHERS
            by_source.setdefault(source, []).append(estimate)
        metrics = {}
        for source in (name for name in (*self._paths, OTHERS) if self._paths and name in by_source):
            metrics[f"teacher/{source}/kl"] = float(np.concatenate(by_source[source]).mean())
            metrics[f"teacher/{source}/samples"] = float(len(by_source[source]))
        return metrics
