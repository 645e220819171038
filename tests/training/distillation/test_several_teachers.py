"""Several teachers: each sample is judged by that of its source, in rows of its own, and by no other."""


import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import make_sample

from mindrlhf.config.algorithm import AlgorithmSection, DistillationSection
from mindrlhf.config.model import ModelSection
from mindrlhf.config.run import DataSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.training import BEST_FIT, FIRST_FIT, SHARED_PROMPTS
from mindrlhf.data.packing import TokenSequence, padding_rows
from mindrlhf.training.batch import RowOptions, make_batch
from mindrlhf.training.distillation.assignment import TeacherAssignment
from mindrlhf.training.distillation.models import Teachers, as_one


def config(teachers, reference_path="", path="student"):
    return GrpoConfig(
        model=ModelSection(path=path, reference_path=reference_path),
        data=DataSection(train_file="t", tokenizer_dir="t"),
        algorithm=AlgorithmSection(name="distill", advantage="distill", beta=1.0, kl_in="reward"),
        distillation=DistillationSection(teachers),
    )


def test_sources_have_the_teachers_of_the_config():
    two = TeacherAssignment(config({"math": "m", "code": "c", "proofs": "m"}))
    assert [two.number(source) for source in ("math", "code", "proofs")] == [1, 2, 1]
    with pytest.raises(AssertionError, match="no teacher for the source 'essays'"):
        two.number("essays")
    with_default = TeacherAssignment(config({"math": "m"}, reference_path="d"))
    assert [with_default.number(source) for source in ("math", "essays", "")] == [2, 1, 1]
    # One model for all: rows need not say whose they are.
    assert TeacherAssignment(config({}, reference_path="d")).number("math") == 0
    assert TeacherAssignment(config({"math": "m", "code": "m"})).number("code") == 0


def test_the_divergence_is_reported_for_each_source():
    samples = [make_sample([1], [2], source=source) for source in ("math", "code", "math", "essays")]
    kl = [np.array([1.0, 2.0]), np.array([5.0]), np.array([6.0]), np.array([-1.0, 0.0])]
    metrics = TeacherAssignment(config({"math": "m", "code": "c", "none": "n"}, "d")).metrics(samples, kl)
    assert metrics == {
        "teacher/math/kl": 3.0,
        "teacher/math/samples": 2.0,
        "teacher/code/kl": 5.0,
        "teacher/code/samples": 1.0,
        "teacher/others/kl": -0.5,
        "teacher/others/samples": 1.0,
    }
    assert TeacherAssignment(config({}, "d")).metrics(samples, kl) == {}


def sequences_of(shapes) -> list[TokenSequence]:
    """Sequence i of (prompt, response, teacher): tokens that count up from 1000 (i + 1)."""
    sequences = []
    for index, (prompt, response, teacher) in enumerate(shapes):
        ids = 1000 * (index + 1) + np.arange(prompt + response, dtype=np.int32)
        sequences.append(TokenSequence(ids[:prompt], ids[prompt:], {}, teacher=teacher))
    return sequences


def options(packing=FIRST_FIT, num_ranks=1, rows=2, in_step=False):
    return RowOptions(
        (16, 32), rows, num_ranks, pack=True, packing=packing, in_step=in_step if packing != FIRST_FIT else False
    )


shape_lists = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 10), st.integers(1, 3)), min_size=1, max_size=24)
layouts = st.builds(
    options,
    st.sampled_from([FIRST_FIT, BEST_FIT, SHARED_PROMPTS]),
    num_ranks=st.integers(1, 4),
    rows=st.integers(1, 4),
    in_step=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(shapes=shape_lists, layout=layouts)
def test_every_row_has_samples_of_one_teacher_who_is_asked(shapes, layout):
    batch = make_batch(sequences_of(shapes), layout)
    assert len(batch.placed) == len(shapes)
    for (number, row, _, _), (_, _, teacher) in zip(batch.placed, shapes, strict=True):
        assert batch.micro_batches[number].teachers[row] == teacher
        assert teacher in batch.micro_batches[number].asked
    numbers = [batch.numbers(rank, layout.num_ranks) for rank in range(layout.num_ranks)]
    ranks = [[batch.micro_batches[number] for number in own] for own in numbers]
    for rows in (rows for own in ranks for rows in own):
        assert len(rows.teachers) == rows.num_rows
        assert [teacher > 0 for teacher in rows.teachers] == (rows.segment_ids.max(axis=1) > 0).tolist()
    if layout.in_step:  # the n-th graph of all ranks is one: it runs on all of them, or on none
        for turn in zip(*ranks, strict=True):
            assert {rows.asked for rows in turn} == {tuple(sorted({t for rows in turn for t in rows.teachers} - {0}))}
    else:
        assert all(set(rows.asked) == set(rows.teachers) - {0} for own in ranks for rows in own)


def test_one_teacher_changes_no_row():
    shapes = [(3, 5, 0), (3, 9, 0), (2, 2, 0), (6, 10, 0), (1, 1, 0)]
    plain = make_batch(sequences_of(shapes), options())
    same = make_batch(sequences_of([(*sizes, 2) for *sizes, _ in shapes]), options())
    assert plain.placed == same.placed
    for one, other in zip(plain.micro_batches, same.micro_batches, strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
        assert (one.teachers, one.asked) == ((), ())


class Model:
    """Says ``value`` plus the label of every token; counts what it is shown."""

    def __init__(self, value):
        self.value, self.shown, self.network = value, [], f"network {value}"
        self.images = []

    def logprobs(self, rows):
        self.shown.append(rows.labels)
        return (self.value + rows.labels).astype(np.float32)

    def see(self, images):
        self.images.append(images)


def test_each_row_has_what_its_own_teacher_says():
    models = [Model(0.25), Model(0.5), Model(0.75)]
    teachers = as_one(models)
    shapes = [(2, 3, 1), (2, 4, 3), (9, 8, 3), (2, 5, 1), (10, 20, 3)]
    batch = make_batch(sequences_of(shapes), options(rows=3))
    said = batch.responses([teachers.logprobs(rows) for rows in batch.micro_batches])
    for (prompt, response, teacher), index, values in zip(shapes, range(1, 6), said, strict=True):
        expected = 1000 * index + prompt + np.arange(response) + teacher / 4
        np.testing.assert_array_equal(values, expected.astype(np.float32))
    assert not models[1].shown  # nobody's
    assert sum(map(len, models[0].shown)) + sum(map(len, models[2].shown)) < 2 * sum(
        rows.num_rows for rows in batch.micro_batches
    )
    teachers.see(("image",))
    assert [model.images for model in models] == [[("image",)]] * 3
    assert teachers.network == "network 0.25"


def test_rows_to_compile_with_are_shown_to_all_and_padding_to_none():
    models = [Model(0.25), Model(0.5)]
    teachers = Teachers(models)
    teachers.logprobs(padding_rows((2, 8)))
    assert [len(model.shown) for model in models] == [1, 1]
    batch = make_batch(sequences_of([(2, 3, 2)]), options(num_ranks=2, rows=1))
    assert [rows.asked for rows in batch.micro_batches] == [(2,), ()]
    assert not teachers.logprobs(batch.micro_batches[1]).any()
    assert [len(model.shown) for model in models] == [1, 1]


def test_one_model_is_itself():
    model = Model(0.0)
    assert as_one([model]) is model and as_one([]) is None
