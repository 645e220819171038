"""When a run's state is saved, and how a run picks it up again; the lead rank's part."""

import dataclasses
import json
from pathlib import Path

from mindrlhf.checkpoint.resume import check_resumable
from mindrlhf.checkpoint.state import RunState, read_state, write_state
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import UserError
from mindrlhf.evaluation.heldout import Evaluation
from mindrlhf.training.preflight import FINAL_NAME, check_free
from mindrlhf.training.team import Team


@dataclasses.dataclass
class Progress:
    """Where a run is: all that a checkpoint needs beside weights and optimiser."""

    step: int = 0  # steps done
    weights_version: int = 0  # versions published to the generator
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)


def save_dir(config: GrpoConfig) -> Path:
    """Return the directory of a run's checkpoints."""
    return Path(config.checkpoint.save_dir or Path(config.run.output_dir) / "checkpoints")


def check_output(config: GrpoConfig, *, resume: bool) -> None:
    """Refuse to write over an earlier run, before the time is spent.

    Raises:
        UserError: the run's directories hold a trained model, or checkpoints that ``resume`` does not continue.
    """
    check_free(Path(config.run.output_dir) / FINAL_NAME)
    store = CheckpointStore(save_dir(config), config.checkpoint.keep_last)
    if store.steps() and not resume:
        raise UserError(
            f"{store.path(store.steps()[-1])} is a checkpoint of an earlier run: continue it with --resume, or set "
            "another run.output_dir or checkpoint.save_dir"
        )


class RunCheckpoints:
    """The checkpoints of one run."""

    def __init__(self, config: GrpoConfig, team: Team, stream: PromptStream):
        self._config = json.loads(json.dumps(dataclasses.asdict(config)))
        self._seed = config.run.seed
        self._team = team
        self._stream = stream
        self._store = CheckpointStore(save_dir(config), config.checkpoint.keep_last)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of the whole run; it appears whole or not at all."""
        state = RunState(
            step=progress.step,
            weights_version=progress.weights_version,
            seed=self._seed,
            prompt_stream=self._stream.state(),
            config=self._config,
            evaluations=[evaluation.to_json() for evaluation in progress.evaluations],
        )
        size_bytes = self._team.lead.state_size_bytes()
        with self._store.writing(progress.step, size_bytes) as directory:
            self._team.lead.save(directory)
            write_state(directory, state)

    def resume(self) -> Progress:
        """Load the newest whole checkpoint into every rank.

        Raises:
            UserError: there is none, or its config differs in what matters.
        """
        directory = self._store.latest()
        if directory is None:
            raise UserError(
                f"there is no whole checkpoint to resume from in {self._store.path(0).parent}: leave out --resume"
            )
        state = read_state(directory)
        check_resumable(state.config, self._config)
        self._team.call("restore", directory=str(directory))
        self._stream.restore(state.prompt_stream)
        evaluations = [Evaluation.from_json(values) for values in state.evaluations]
        return Progress(state.step, state.weights_version, evaluations)
