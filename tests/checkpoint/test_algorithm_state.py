"""What the algorithm keeps: round trip, a state.json of an earlier release, and every other form refused."""

import json
from pathlib import Path

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

# Written when format version 2 was new: grpo_state.json after one step of dynamic sampling with a KL target.
GRPO_STATE = Path(__file__).with_name("grpo_state.json")
PAIRS = {"pairs": "3e947ad40ba8f352", "step": 0, "accuracy": [0.5, 0.25, 0.75, 0.95]}

counts, floats = st.integers(0, 2**40), st.floats(allow_nan=False)
states = st.builds(
    AlgorithmState,
    st.none() | st.text(),
    st.none() | st.builds(SampleTotals, counts, counts, counts, counts),
    st.none() | st.builds(GuardsState, counts, st.lists(floats, max_size=3), st.dictionaries(st.text(), counts)),
    st.none() | st.builds(KlState, floats),
    *[st.none() | st.builds(PairAccuracy, st.text(), counts, st.lists(floats, max_size=4))] * 2,
    st.none() | st.builds(OffPolicyState, *[st.lists(counts, max_size=3)] * 3),
    learning=st.none()
    | st.builds(
        LearningState, counts, st.dictionaries(st.text(), floats), raised=st.dictionaries(st.text(), st.text())
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
    assert values == {"guards": {"num_skipped": 0, "norms": [1.0], "failed_steps": {}}}


def test_the_states_of_earlier_checkpoints_are_read_and_written_alike():
    values = json.loads(GRPO_STATE.read_text())["algorithm_state"]
    state = load(values)
    assert state == AlgorithmState(
        trajectory="689ae893ff491503",
        samples=SampleTotals(generated=18, used=9, dropped=6, carried=3),
        guards=GuardsState(num_skipped=0, norms=[2.0], failed_steps={}),
        kl=KlState(0.10200000000000001),
    )
    assert state.to_json() == values
    of_pairs = {"first_evaluation": PAIRS, "last_evaluation": {**PAIRS, "step": 7}}
    assert load(of_pairs).last_evaluation == PairAccuracy("3e947ad40ba8f352", 7, [0.5, 0.25, 0.75, 0.95])
    assert load(of_pairs).to_json() == of_pairs
    assert load({}) == AlgorithmState() and AlgorithmState().to_json() == {}


GUARDS = {"num_skipped": 0, "norms": [], "failed_steps": {}}


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
        ({"guards": {"num_skipped": 0, "norms": []}}, "algorithm_state.guards.failed_steps is missing"),
        ({"guards": {**GUARDS, "num_skipped": -1}}, "algorithm_state.guards.num_skipped is -1"),
        ({"guards": {**GUARDS, "norms": [1.0, "2"]}}, r"algorithm_state.guards.norms is \[1.0, '2'\]"),
        ({"guards": {**GUARDS, "failed_steps": {"length": 1.5}}}, "algorithm_state.guards.failed_steps is "),
        ({"samples": {"generated": 1, "used": 1, "dropped": 0}}, "algorithm_state.samples.carried is missing"),
        ({"first_evaluation": {**PAIRS, "step": "0"}}, "algorithm_state.first_evaluation.step is '0'"),
    ],
)
def test_other_contents_are_errors_that_name_their_place(values, message):
    with pytest.raises(DamagedDirectory, match=f"^state.json is damaged: {message}"):
        load(values)
