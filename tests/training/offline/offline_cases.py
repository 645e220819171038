"""A small model, pairs, configs, and stand-ins for what a run on fixed data writes to."""

import json

import numpy as np
from tiny_models import tiny_model

from mindrlhf.data.mindrecord import Prompt

VOCABULARY = 64
MODEL = tiny_model(vocab_size=VOCABULARY)


class PairFile:
    """Pairs whose preferred response holds even tokens only."""

    def __init__(self, num_pairs, seed):
        generator = np.random.default_rng(seed)
        self.records = []
        for index in range(num_pairs):
            prompt, response, rejected = (
                2 * generator.integers(0, VOCABULARY // 2, generator.integers(2, 8)).astype(np.int32) for _ in range(3)
            )
            self.records.append(Prompt(prompt, response, "", f"pairs:{index}", rejected + 1))

    def __len__(self):
        return len(self.records)

    def read(self, indices):
        return [self.records[index] for index in indices]


def export_model(tmp_path_factory):
    """Write the model with random weights and return its directory; prepares MindSpore for this process."""
    import mindspore as ms

    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.weights.convert import export_hf, random_hf_weights

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    ms.set_context(runtime_num_threads=1)
    directory = tmp_path_factory.mktemp("offline") / "model"
    export_hf(random_hf_weights(MODEL, 3), MODEL, directory)
    return directory


def write_config(path, model_dir, **sections):
    """YAML is a superset of JSON."""
    config = {
        "model": {"path": str(model_dir)},
        "data": {"train_file": "unread", "eval_file": "unread", "tokenizer_dir": "unread"},
        "training": {"pairs_per_step": 16, "micro_batch_size": 8, "sequence_lengths": [32], "epochs": 3},
        "optimizer": {"start_lr": 3e-3},
        "observe": {"sinks": []},
        **sections,
    }
    path.write_text(json.dumps(config))
    return path


def pair_gradients(trainer, learner, pairs):
    """Return the gradients of an update on pairs, float64 by parameter; it moves no weight."""
    gradients = {}

    def keep(lr, loss):
        gradients.update({name: array.astype(np.float64) for name, array in learner.engine.gradients()})
        return 0.0

    learner.engine.apply = keep
    trainer.train_on(pairs, 0.0)
    return gradients


class NoCheckpoints:
    must_stop = False

    def begin_step(self, progress):
        pass

    def is_due(self, progress):
        return False


class Sinks:
    """Keeps the metrics of each step."""

    def __init__(self):
        self.metrics = {}

    def write(self, step, metrics):
        self.metrics[step] = metrics
