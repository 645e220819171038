"""A key may be given by the name that it had in an earlier release: same config, one line, and never by both names."""

import dataclasses
import json

import pytest
import yaml

from mindrlhf.checkpoint.resume import check_resumable, config_differences
from mindrlhf.cli import main
from mindrlhf.config.load import CONFIGS, read_config
from mindrlhf.config.parse import build, dotted_keys
from mindrlhf.config.reference import render
from mindrlhf.config.renamed import RENAMED
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError

OLD, NEW = "training.prompts_at_a_time", "training.chunk_size"
# By their old names, and by those of today: values that are not the default.
EARLIER = {
    "memory": {"logit_words": 7},
    "rollout": {"ahead": 3, "span_tokens": 5, "max_spans": 6, "board_gib": 2.0, "weights_carrier": "collectives"},
    "training": {"batch_size": 2, "row_lengths": [64, 128]},
    "supervised": {"batch_size": 3, "row_lengths": [32]},
    "preference": {"batch_size": 6, "row_lengths": [48]},
}
TODAY = {
    "memory": {"logit_vocabulary": 7},
    "rollout": {
        "off_policy_steps": 3,
        "segment_tokens": 5,
        "max_segments": 6,
        "weight_buffer_gib": 2.0,
        "weights_transport": "collectives",
    },
    "training": {"micro_batch_size": 2, "sequence_lengths": [64, 128]},
    "supervised": {"micro_batch_size": 3, "sequence_lengths": [32]},
    "preference": {"micro_batch_size": 6, "sequence_lengths": [48]},
}
CONTENT = {
    "model": {"path": "model"},
    "data": {"train_file": "prompts.mindrecord", "tokenizer_dir": "tokenizer"},
    "reward": {"verifier_function": ["accuracy_reward"]},
}
BOTH = f"'{OLD}' is the old name of '{NEW}', and both are set: leave out the old one"


@pytest.fixture(autouse=True)
def renamed(monkeypatch):
    monkeypatch.setitem(RENAMED, OLD, NEW)


@pytest.fixture
def read(tmp_path):
    def _read(training: dict, *overrides: str):
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({**CONTENT, "training": training}))
        return read_config("train", path, overrides)

    return _read


@pytest.mark.parametrize(
    ("training", "overrides", "size", "old_names"),
    [
        ({"prompts_at_a_time": 6}, [], 6, (OLD,)),
        ({}, [f"{OLD}=6"], 6, (OLD,)),
        ({"prompts_at_a_time": 6}, [f"{NEW}=5"], 5, (OLD,)),
        ({"chunk_size": 6}, [f"{OLD}=5"], 5, (OLD,)),
        ({"prompts_at_a_time": 6}, [f"{OLD}=5", f"{OLD}=4"], 4, (OLD, OLD)),
        ({"chunk_size": 6}, [], 6, ()),
    ],
)
def test_a_key_is_read_by_its_old_name(read, training, overrides, size, old_names):
    reading = read(training, *overrides)
    assert reading.mistakes.messages == []
    assert reading.config.training.chunk_size == size
    assert reading.old_names == old_names
    assert NEW in reading.given and OLD not in reading.given


@pytest.mark.parametrize(
    ("training", "overrides"),
    [({"prompts_at_a_time": 6, "chunk_size": 6}, []), ({}, [f"{OLD}=6", f"{NEW}=6"]), ({}, [f"{NEW}=6", f"{OLD}=6"])],
)
def test_a_key_given_by_both_names_is_a_mistake(read, training, overrides):
    assert read(training, *overrides).mistakes.messages == [BOTH]


def test_values_are_checked_under_the_new_name(read):
    assert read({"prompts_at_a_time": 0}).mistakes.messages == [f"'{NEW}' is 0, but must be at least 1"]


def test_a_command_tells_the_new_name_once(read, tmp_path, capsys):
    read({"prompts_at_a_time": 6})
    main(["config", "check", str(tmp_path / "run.yaml"), f"{OLD}=8"])
    told = [line for line in capsys.readouterr().err.splitlines() if OLD in line]
    assert told == [
        f"mindrlhf config: '{OLD}' is now '{NEW}': change it in the config; the old name is still read"
    ]


def test_configs_that_are_stored_by_old_names_are_the_same_configs():
    old, new = ({"training": {name: 6, "epochs": 2}} for name in ("prompts_at_a_time", "chunk_size"))
    check_resumable(old, new)
    assert config_differences(old, new) == []
    with pytest.raises(UserError, match=f"{NEW} was 6 and is now 5"):
        check_resumable(old, {"training": {"chunk_size": 5, "epochs": 2}})
    # What replays a batch that a run left out reads the run's whole config so.
    assert build(GrpoConfig, {**CONTENT, **json.loads(json.dumps(old))}).training.chunk_size == 6


@pytest.mark.parametrize(
    ("task", "section"),
    [("train", "rollout"), ("train", "training"), ("sft", "supervised"), ("dpo", "preference")],
)
def test_every_key_that_was_renamed_is_read(task, section):
    """As a file gives it, and as a checkpoint holds it."""
    cls = CONFIGS[task]
    content = {name: values for name, values in CONTENT.items() if task == "train" or name != "reward"}
    old, new = (build(cls, {**content, section: given[section]}) for given in (EARLIER, TODAY))
    assert old == new and getattr(old, section) != getattr(build(cls, content), section)
    stored = json.loads(json.dumps(dataclasses.asdict(new)))
    names = {new: old.partition(".")[2] for old, new in RENAMED.items()}
    earlier = {**stored, section: {names.get(f"{section}.{key}", key): value for key, value in stored[section].items()}}
    assert EARLIER[section].keys() <= earlier[section].keys() and not EARLIER[section].keys() & stored[section].keys()
    check_resumable(earlier, stored)


def test_the_reference_names_the_old_key():
    row = next(line for line in render().splitlines() if line.startswith("| `chunk_size`"))
    assert row.endswith("(at least 1); formerly `prompts_at_a_time` |")


def test_no_renamed_key_is_left_out_here():
    named = {f"{section}.{name}" for section, values in EARLIER.items() for name in values}
    assert named == RENAMED.keys() - {OLD}


def test_a_new_name_is_a_key_of_the_same_section_and_an_old_one_is_free():
    keys = {dotted for config in CONFIGS.values() for dotted, _, _ in dotted_keys(config)}
    for old, new in RENAMED.items():
        assert new in keys and old not in keys
        assert old.partition(".")[0] == new.partition(".")[0]
