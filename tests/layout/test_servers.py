"""Where rollout servers lie: on whole nodes, each at most once, or on all alike; or a refusal that says what to do."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.config.load import read_content
from mindrlhf.config.rollout import RolloutSection
from mindrlhf.config.training import ParallelSection, resolve_data_parallel
from mindrlhf.errors import UserError
from mindrlhf.layout.feasibility import check_rollout
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.servers import place_servers
from mindrlhf.specs import find_spec

SIZES = st.integers(1, 24)


def section(count: int, width: int) -> RolloutSection:
    return RolloutSection(num_replicas=count, tensor_parallel=width)


@given(count=SIZES, width=SIZES, num_nodes=st.integers(2, 9), node_size=st.integers(1, 9))
def test_servers_share_no_node_or_fill_all_alike(count, width, num_nodes, node_size):
    try:
        places = place_servers(section(count, width), num_nodes, node_size)
    except UserError:
        # Nobody else could place them either: no whole nodes, more than there are, or more on one node than on another.
        if width > node_size:
            assert width % node_size or count * width > num_nodes * node_size
        else:
            assert count > num_nodes and count % num_nodes
        return
    assert places[0][0] == 0, "rank 0 owns the first server"
    if width > node_size:
        assert len(places) == count
        assert all(len(place) * node_size == width for place in places)
        used = [node for place in places for node in place]
        assert used == list(range(len(used))), "each node once, in order"
        assert len(used) <= num_nodes
    else:
        assert all(len(place) == 1 for place in places)
        per_node = [places.count((node,)) for node in range(num_nodes)]
        assert set(per_node) == {max(1, count // num_nodes)} and sum(per_node) == len(places)
        assert len(places) == max(count, num_nodes)


@given(count=SIZES, width=SIZES, node_size=st.integers(1, 9))
def test_on_one_machine_every_server_is_there(count, width, node_size):
    assert place_servers(section(count, width), 1, node_size) == [(0,)] * count


def test_deepseek_v3_on_64_nodes_of_8():
    places = place_servers(section(4, 128), 64, 8)
    assert places == [tuple(range(first, first + 16)) for first in (0, 16, 32, 48)]


@pytest.mark.parametrize(
    ("count", "width", "num_nodes", "node_size", "message"),
    [
        (1, 12, 2, 8, "'rollout.tensor_parallel' is 12, more than the 8 devices of a node but no number of whole "
         "nodes: set it to 8"),
        (3, 16, 4, 8, "'rollout.num_replicas' 3 x 'rollout.tensor_parallel' 16 takes 6 nodes of 8 devices, and the run "
         "has 4: set num_replicas to 2"),
        (1, 32, 2, 8, "takes 4 nodes of 8 devices, and the run has 2: set tensor_parallel to 8"),
        (3, 4, 2, 8, "'rollout.num_replicas' is 3, which does not divide over 2 nodes: set it to 2"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_value_and_the_fix_which_holds(count, width, num_nodes, node_size, message):
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        place_servers(section(count, width), num_nodes, node_size)
    key, value = re.search(r"set (it|num_replicas|tensor_parallel) to (\d+)$", str(refused.value)).groups()
    changes_count = key == "num_replicas" or (key == "it" and "num_replicas' is" in str(refused.value))
    mended = section(int(value), width) if changes_count else section(count, int(value))
    place_servers(mended, num_nodes, node_size)


POWERS = st.integers(3, 13).map(lambda exponent: 2**exponent)  # 8 to 8,192 ranks
HEADS = find_spec({"architectures": ["Qwen2ForCausalLM"]}).dims(
    {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
)


@given(world=POWERS, width=st.sampled_from([1, 2, 4, 5, 8, 16, 3]), count=st.integers(1, 8192))
def test_one_setting_that_the_message_names_fits_any_number_of_devices(world, width, count):
    """Of 8 to 8,192 devices: a refusal names one thing to set, and what it names is taken."""
    rollout = RolloutSection(num_replicas=count, tensor_parallel=width)
    for _ in range(3):
        try:
            check_rollout(rollout, HEADS, world)
            break
        except UserError as error:
            message = str(error)
            if match := re.search(r"set num_replicas to (\d+)", message):
                rollout = RolloutSection(num_replicas=int(match[1]), tensor_parallel=rollout.tensor_parallel)
            elif match := re.search(r"set it to one of ([\d, ]+)", message):
                width = int(match[1].split(", ")[-1])
                rollout = RolloutSection(num_replicas=world // width, tensor_parallel=width)
            else:
                assert f"set tensor_parallel to a divisor of {world}" in message
                rollout = RolloutSection(num_replicas=rollout.num_replicas, tensor_parallel=1)
    check_rollout(rollout, HEADS, world)
    assert rollout.num_replicas * rollout.tensor_parallel == world
    # A config says so, whatever the number: no key has a limit that this arithmetic has not.
    content = {"rollout": {"num_replicas": rollout.num_replicas, "tensor_parallel": rollout.tensor_parallel}}
    messages = read_content("train", content, world_size=None).mistakes.messages
    assert not [message for message in messages if "rollout." in message]


@given(
    world=POWERS,
    model=st.sampled_from([1, 2, 4, 8]),
    stages=st.sampled_from([1, 2, 4, 16]),
    context=st.sampled_from([1, 2, 3]),
    rank=st.integers(0, 8191),
)
def test_the_layout_of_any_number_of_ranks_is_whole(world, model, stages, context, rank):
    parallel = ParallelSection(model_parallel=model, pipeline_stage=stages, context_parallel=context)
    fixed = model * stages * context
    if world % fixed:
        with pytest.raises(UserError, match=f"start {-(-world // fixed) * fixed} workers"):
            resolve_data_parallel(parallel, world)
        return
    layout = Layout.from_config(parallel, world)
    assert layout.world_size == world and layout.data_parallel * fixed == world
    place = layout.coordinates(rank % world)
    # Ranks count stage by stage; in a stage data, context, model, the last innermost.
    number = ((place.stage * layout.data_parallel + place.data) * context + place.context) * model + place.model
    assert number == rank % world
    with pytest.raises(UserError, match=f"set data_parallel to {layout.data_parallel}, or start"):
        resolve_data_parallel(dataclasses.replace(parallel, data_parallel=layout.data_parallel + 1), world)
