"""Digests that change with any bit, and the place where two runs part."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import make_sample

from mindrlhf.cli import main
from mindrlhf.debugging.run_diff import compare_runs
from mindrlhf.errors import UserError
from mindrlhf.observe.fingerprint import (
    FINGERPRINT_NAME,
    PARTS,
    FingerprintWriter,
    digest_arrays,
    digest_weights,
)
from mindrlhf.rollout.samples import sample_parts


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_any_changed_token_and_any_other_cut_changes_the_digest(tokens, data):
    array = np.array(tokens, np.int32)
    changed = array.copy()
    changed[data.draw(st.integers(0, len(tokens) - 1))] += 1
    cut = data.draw(st.integers(0, len(tokens)))
    digests = {digest_arrays(parts) for parts in ([array], [changed], [array[:cut], array[cut:]], [array.astype("i8")])}
    assert len(digests) == 4
    assert digest_arrays([array]) == digest_arrays([np.repeat(array, 2)[::2]]), "strides do not count"


def test_one_bit_of_a_log_probability_counts():
    value = np.float32(-1.25)
    other = np.nextafter(value, np.float32(0))
    assert digest_arrays([np.array([value])]) != digest_arrays([np.array([other])])


def test_the_weights_do_not_depend_on_who_wrote_them():
    whole = [["a", [], 7], ["b", [], 2**64 - 1]]
    parts = [["b", [], 2**64 - 3], ["a", [], 3], ["a", [], 4], ["b", [], 2]]
    assert digest_weights(whole) == digest_weights(parts)
    assert digest_weights(whole) != digest_weights([["a", [], 8], ["b", [], 2**64 - 1]])
    # What exceeds 2^64 is dropped, as it is by the one writer of the whole.
    assert digest_weights([["a", [], 2**64 - 1], ["a", [], 2]]) == digest_weights([["a", [], 1]])


def sample_with(**changed):
    values = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "logprobs": [-1, -2, -3]}
    values |= {"rewards": {"accuracy": 1.0}, "reward": 1.0, "images": ()} | changed
    images = values.pop("images")
    return dataclasses.replace(make_sample(**values), images=images)


@pytest.mark.parametrize(
    "name, changed",
    [
        ("prompts", {"prompt_ids": np.array([2, 1], np.int32)}),
        ("prompts", {"images": (np.zeros((28, 28, 3), np.uint8),)}),
        ("samples", {"response_ids": np.array([3, 4, 6], np.int32)}),
        ("rollout_logprobs", {"logprobs": np.array([-1, -2, -3.0000005], np.float32)}),
        ("rewards", {"rewards": {"accuracy": np.nextafter(1.0, 0.0)}}),
        ("rewards", {"reward": 0.5}),
    ],
)
def test_each_part_tells_what_changed(name, changed):
    one, other = sample_parts([sample_with()]), sample_parts([sample_with(**changed)])
    assert [part for part in one if one[part] != other[part]] == [name]


def write_run(run_dir: Path, num_steps: int = 4, changes: dict | None = None, seed: int = 0) -> list[str]:
    """Write a run whose parts can be replaced by (step, name); return its hashes."""
    changes = changes or {}
    writer = FingerprintWriter(run_dir / FINGERPRINT_NAME, first_step=0)
    hashes = [writer.write(0, "", {"weights": "w0"})]
    for step in range(1, num_steps + 1):
        parts = {name: f"{name} {step}" for name in PARTS} | {"loss": 0.1 * step, "grad_norm": 1.0 / step}
        parts |= {name: value for (where, name), value in changes.items() if where == step}
        hashes.append(writer.write(step, hashes[-1], parts))
    writer.close()
    (run_dir / "config.yaml").write_text(f"run: {{output_dir: {run_dir.name}, seed: {seed}}}\n")
    samples = [{"step": step, "completion": changes.get((step, "samples"), "text")} for step in range(1, num_steps + 1)]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return hashes


def test_equal_runs_have_equal_hashes_and_differ_in_nothing(tmp_path, capsys):
    one, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", num_steps=6)
    assert one == other[:5] and len(set(other)) == 7
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == f"the same up to step 4\n  {tmp_path / 'b'} goes on to step 6\n"


@pytest.mark.parametrize("part, value", [(part, 0.25) for part in ("loss", "grad_norm")] + [("samples", "other")])
def test_the_first_step_and_part_are_named(tmp_path, capsys, part, value):
    one = write_run(tmp_path / "a")
    # A later step, and a later part of the same step, differ as well.
    other = write_run(tmp_path / "b", changes={(3, part): value, (3, "weights"): "x", (4, "prompts"): "x"}, seed=1)
    assert [left == right for left, right in zip(one, other)] == [True, True, True, False, False]
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"step 3: {part} differ first"
    assert "config run.seed: 0 and 1" in out and "output_dir" not in out
    if part == "samples":
        assert "sample 1 of step 3, completion: 'text' and 'other'" in out
    if part == "loss":
        assert f"loss: {0.1 * 3!r} and 0.25" in out


def test_a_step_without_finite_loss_is_the_same_as_itself_only(tmp_path):
    changes = {(2, "loss"): float("nan")}
    write_run(tmp_path / "a", changes=changes)
    write_run(tmp_path / "b", changes=changes)
    write_run(tmp_path / "c")
    assert compare_runs(tmp_path / "a", tmp_path / "b").is_same
    difference = compare_runs(tmp_path / "a", tmp_path / "c")
    assert (difference.step, difference.part) == (2, "loss")


def write_model(directory: Path, **tensors: float) -> None:
    from safetensors.numpy import save_file

    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    arrays = {name: np.full((2, 3), value, np.float32) for name, value in tensors.items()}
    save_file(arrays, directory / "model.safetensors")


def test_the_first_tensor_is_found_in_the_first_common_checkpoint(tmp_path, capsys):
    for name, values in {"a": (1.0, 2.0, 3.0), "b": (1.0, 2.5, 4.0)}.items():
        write_run(tmp_path / name)
        for step, value in zip((2, 4, 10), values):
            model = tmp_path / name / "checkpoints" / f"step_{step:08d}" / "model"
            write_model(model, first=0.0, second=value, third=value)
    write_model(tmp_path / "a" / "checkpoints" / "step_00000001" / "model", first=9.0)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "but the files of the weights differ" in out
    assert "checkpoints/step_00000004/model, second: differ by up to 0.5" in out


def test_a_directory_without_a_fingerprint_and_runs_without_a_common_step_are_refused(tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match="no .*trajectory.jsonl"):
        compare_runs(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / FINGERPRINT_NAME).write_text('{"step": 9, "hash": ""}\n')
    with pytest.raises(UserError, match="no step in common"):
        compare_runs(tmp_path / "a", tmp_path / "b")
