"""`mindrlhf sft`, `dpo` and `reward-model` on two pretended machines are those of one machine with two ranks."""

import json
import shlex
import sys

import pytest
import sanity_inputs
from fault_jobs import metrics
from machine_jobs import TIMEOUT_S
from machines import Machines
from slow_tests import SLOW

pytestmark = [pytest.mark.timeout(1200), SLOW]

PAIRS = {"preference": {"pairs_per_step": 8, "micro_batch_size": 4, "sequence_lengths": [32], "epochs": 1}}
SECTIONS = {
    "sft": {"supervised": {"rows_per_step": 8, "micro_batch_size": 4, "sequence_lengths": [32], "epochs": 2}},
    "dpo": PAIRS,
    "reward-model": PAIRS,
}


@pytest.fixture(scope="module")
def inputs_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inputs")
    sanity_inputs.make(directory)
    sanity_inputs.make_pairs(directory)
    return directory


@pytest.mark.parametrize("command", SECTIONS)
def test_two_machines_train_as_one_with_two_ranks(inputs_dir, tmp_path, command):
    train_file = inputs_dir / f"{'sft' if command == 'sft' else 'preference'}.mindrecord"
    config = {
        "model": {"path": str(inputs_dir / "model")},
        "data": {"train_file": str(train_file), "tokenizer_dir": str(inputs_dir / "model")},
        "run": {"output_dir": str(tmp_path / "unset")},
        "optimizer": {"start_lr": 1e-3},
        "observe": {"sinks": []},
        **SECTIONS[command],
    }
    path = tmp_path / f"{command}.yaml"  # YAML is a superset of JSON
    path.write_text(json.dumps(config))
    one, two = tmp_path / "one", tmp_path / "machines"
    finished = sanity_inputs.run(command, path, f"run.output_dir={one}", "--workers", 2, timeout_s=TIMEOUT_S)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    two.mkdir()
    script = f"""
        cd {shlex.quote(str(sanity_inputs.REPOSITORY))}
        export PYTHONPATH=$PWD
        {sys.executable} -m mindrlhf.cli {command} {path} run.output_dir={two / "run"} \\
            --nodes 2 --node-rank $NODE_RANK --master $MASTER_IP:8118
    """
    machines = Machines(two, script, keep=(tmp_path, inputs_dir, sanity_inputs.REPOSITORY))
    try:
        assert machines.wait(TIMEOUT_S) == [0, 0], machines.all_text()
    finally:
        machines.clean_up()
    assert metrics(two / "run") == metrics(one)
    for name in ("model.safetensors", "config.json"):
        assert (two / "run" / "final" / name).read_bytes() == (one / "final" / name).read_bytes(), name
    assert (two / "run" / "logs" / "node_1").is_dir(), "the second machine had a rank"
