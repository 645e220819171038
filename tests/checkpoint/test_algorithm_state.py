"""State of the algorithm: round trip, and every other form refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.checkpoint.algorithm_state import (
    AlgorithmState,
    GuardsState,
    KlState,
    LearningState,
    OffPolicyState,
    PairAccuracy,
    SampleTotals,
)
from mindrlhf.checkpoint.manifest import DamagedDirectory

PAIRS = {"pairs": "3e947ad40ba8f352", "step": 0, "accuracy": [0.5, 0.25, 0.75, 0.95]}

counts, floats = st.integers(0, 2**40), st.floats(allow_nan=False)
states = st.builds(
    AlgorithmState,
    st.none() | st.text(),
    st.none() | st.builds(SampleTotals, counts, counts, counts, counts),
    st.none() | st.builds(GuardsState, counts, st.lists(floats, max_size=3)),
    st.none() | st.builds(KlState, floats),
    *[st.none() | st.builds(PairAccuracy, st.text(), counts, st.lists(floats, max_size=4))] * 2,
    st.none() | st.builds(OffPolicyState, *[st.lists(counts, max_size=3)] * 3),
    learning=st.none()
    | st.builds(
        LearningState,
        st.dictionaries(st.text(), st.integers(-1, 2**40)),
        st.dictionaries(st.text(), floats),
        st.dictionaries(st.text(), st.text()),
    ),
)


def load(values) -> AlgorithmState:
    return AlgorithmState.from_json(values, "state.json")


@settings(max_examples=60, deadline=None)
@given(state=states)
def test_states_come_back_as_they_were(state):
    assert load(json.loads(json.dumps(state.to_json()))) == state


def test_a_state_is_copied_before_it_is_written():
    state = AlgorithmState(guards=GuardsState(norms=[1.0]))
    values = state.to_json()
    state.guards.norms.append(2.0)
    assert values == {"guards": {"num_skipped": 0, "norms": [1.0]}}


GUARDS = {"num_skipped": 0, "norms": []}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"momentum": 1}, "algorithm_state.momentum is unknown"),
        ({"kl": {}}, "algorithm_state.kl.coefficient is missing"),
        ({"kl": {"coefficient": 1.0, "target": 2.0}}, "algorithm_state.kl.target is unknown"),
        ({"kl": 0.1}, "algorithm_state.kl is 0.1"),
        ({"kl": {"coefficient": True}}, "algorithm_state.kl.coefficient is True"),
        ({"kl": None}, "algorithm_state.kl is None"),
        ({"trajectory": 5}, "algorithm_state.trajectory is 5"),
        ({"guards": {"num_skipped": 0}}, "algorithm_state.guards.norms is missing"),
        ({"guards": {**GUARDS, "norms": [1.0, "2"]}}, r"algorithm_state.guards.norms is \[1.0, '2'\]"),
        ({"samples": {"generated": 1, "used": 1, "dropped": 0}}, "algorithm_state.samples.carried is missing"),
        ({"first_evaluation": {**PAIRS, "step": "0"}}, "algorithm_state.first_evaluation.step is '0'"),
    ],
)
def test_other_contents_are_errors_that_name_their_place(values, message):
    with pytest.raises(DamagedDirectory, match=f"^state.json is damaged: {message}"):
        load(values)
