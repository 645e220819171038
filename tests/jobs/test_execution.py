"""Parallel graphs, compiled for Ascend and executed by msrun on CPU ranks, train like one plain process.

The ranks run the product's worker of a sharded model, and rank 0 its team and policy. Which kinds of training in which
layouts, and the plain process, are in execution_families.py. What the ranks publish to the weight buffer is compared
with the tensors themselves. A critic's values and updates are asked for beside an actor, which here is the same model.
"""

import dataclasses
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from execution_cases import IS_LAST, MODEL, NOT_FINITE, batches, hf_weights, mf_weights
from execution_families import FAMILIES, LORA, OF_EVERY_DAY, executed_layouts, train_plainly
from execution_jobs import compile_and_execute, execute_over_machines
from graph_on_cpu.run import ExecutionResult
from safetensors.numpy import load_file
from slow_tests import SIMULATES_CANN, SLOW

from mindrlhf.layout.rows import updates_return_outputs
from mindrlhf.specs import find_spec
from mindrlhf.specs.fuse import split

pytestmark = [pytest.mark.timeout(2400), SIMULATES_CANN]

TOLERANCE = 1e-5
FIRST_UPDATE = IS_LAST.index(True) + 1  # its number of calls


def each(check: str = ""):
    """Run a test for every layout of the families that have ``check``."""
    cases = [
        pytest.param(name, layout, id=f"{name}-{layout}", marks=[] if name in OF_EVERY_DAY else SLOW)
        for name, family in FAMILIES.items()
        if not check or check in family.checks
        for layouts in executed_layouts(name).values()
        for layout in layouts
    ]
    return pytest.mark.parametrize("name, layout", cases)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Returns the result of a family's layout; all of a family are compiled and executed when first asked for."""

    @cache
    def of_family(name: str) -> dict[str, ExecutionResult]:
        family, layouts = FAMILIES[name], executed_layouts(name)
        given = family.given(family)
        return compile_and_execute(
            tmp_path_factory.mktemp(name),
            family.model,
            layouts,
            given.inputs,
            family.cells,
            family.token_inputs,
            dict.fromkeys(family.names, family.computed),
            images=given.images,
            **family.options,
        )

    return lambda name, layout: of_family(name)[layout]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Returns what one process computes of a family."""
    return cache(lambda name: train_plainly(FAMILIES[name], tmp_path_factory.mktemp("mindformers-log")))


@each()
def test_losses_are_those_of_one_process(executed, plain, name, layout):
    losses, spoils = plain(name).losses, FAMILIES[name].spoils
    assert [np.isnan(loss) for loss in losses] == [spoils and call == NOT_FINITE for call in range(len(IS_LAST))]
    np.testing.assert_allclose(executed(name, layout).losses, losses, rtol=0, atol=FAMILIES[name].tolerance)


@each("norms")
def test_norms_of_updates_are_those_of_one_process(executed, plain, name, layout):
    np.testing.assert_allclose(executed(name, layout).grad_norms, plain(name).norms, rtol=1e-4)


@each("statistics")
def test_statistics_of_updates_are_those_of_one_process(executed, plain, name, layout):
    """The ranks' statistics add up to those of all rows: no replica counts twice, no stage is left out."""
    result, expected = executed(name, layout), plain(name)
    assert len(result.statistics) == len(expected.statistics) == sum(IS_LAST)
    for found, summed in zip(result.statistics, expected.statistics):
        assert found.shape == summed.shape == (7,)
        np.testing.assert_allclose(found, summed, rtol=1e-4, atol=TOLERANCE)


@each()
def test_outputs_are_those_of_one_process(executed, plain, name, layout):
    """Of the policy as its updates began; of the reference; and of the reference as a copy of the trained policy.

    Or the values that a step began with, or scores. Where rows are packed in two ways the samples are compared.
    """
    family, result = FAMILIES[name], executed(name, layout)
    given = family.given(family)
    for kind, of_plain in family.outputs.items():
        if kind == "updates" and not updates_return_outputs(result.job.parallel):
            of_plain = family.outputs["first"]  # theirs are those of the pass before
        outputs = plain(name).outputs[of_plain]
        assert len(result.outputs[kind]) == len(outputs) == len(IS_LAST)
        for call, (found, expected) in enumerate(zip(result.outputs[kind], outputs)):
            mine = [found]
            if given.batches and family.computed != "values":
                mine, expected = given.batches[call].responses(mine), given.plain_batches[call].responses(expected)
            assert max(np.abs(one).max() for one in expected) > family.least_output
            for one, other in zip(mine, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=family.tolerance, err_msg=kind)


@each("moved")
def test_training_moves_logprobs_further_than_the_tolerance(executed, name, layout):
    outputs = executed(name, layout).outputs
    for old, new in zip(outputs["reference"], outputs["synchronised"]):
        assert np.abs(old - new).max() > 100 * TOLERANCE


@each()
def test_weights_are_those_of_one_process(executed, plain, name, layout):
    """Two updates, and where a loss is not finite one between them that is withheld; a tower and routers' biases are
    as they were."""
    result, begun, tolerance = executed(name, layout), plain(name).begun, FAMILIES[name].tolerance
    assert result.weights.keys() == plain(name).weights.keys() == begun.keys()
    if "adapters" not in FAMILIES[name].checks and not FAMILIES[name].options.get("lora"):
        assert begun.keys() == mf_weights(FAMILIES[name].model).keys()
    for parameter, expected in plain(name).weights.items():
        actual = result.weights[parameter]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance, err_msg=parameter)
        if parameter.startswith("visual.") or parameter.endswith("router.expert_bias"):  # no gradient reaches them
            np.testing.assert_array_equal(actual, begun[parameter])
        else:  # the training has moved them much further than the tolerance
            assert np.abs(expected - begun[parameter]).max() > 100 * TOLERANCE, parameter


@each("resumed")
def test_replicas_stay_equal_and_updates_after_a_restored_checkpoint_are_the_same_to_the_last_bit(
    executed, name, layout
):
    """The ranks save after the first update, go on, restore, and make the other updates once more."""
    result = executed(name, layout)
    assert result.replica_difference == 0.0
    np.testing.assert_array_equal(result.resumed_losses, result.losses[FIRST_UPDATE:])
    assert result.published["resumed"].keys() == result.published["after"].keys()
    for hf_name, tensor in result.published["after"].items():
        np.testing.assert_array_equal(result.published["resumed"][hf_name], tensor, err_msg=hf_name)


@each("exported")
def test_the_exported_model_is_what_was_published_last(executed, name, layout):
    published, directory = executed(name, layout).published["after"], executed(name, layout).exported
    (file,) = directory.glob("*.safetensors")
    exported = load_file(file)
    assert exported.keys() == published.keys()
    for hf_name, tensor in published.items():
        np.testing.assert_array_equal(exported[hf_name], tensor, err_msg=hf_name)
    described = json.loads((directory / "config.json").read_text())
    assert described["model_type"] == FAMILIES[name].model["model_type"]


@each("names")
def test_all_tensors_are_published_each_time(executed, name, layout):
    for moment in ("before", "after", "resumed"):
        assert executed(name, layout).published[moment].keys() == hf_weights(FAMILIES[name].model).keys()


@each("published")
def test_buffer_holds_the_logical_tensors(executed, name, layout):
    """Written by all ranks from their own shards, each byte once, before the first step and after the last."""
    result, model = executed(name, layout), FAMILIES[name].model
    spec, begun = find_spec(model), hf_weights(model)
    dims = spec.dims(model)
    trained = {
        hf_name: tensor
        for rule in spec.rules(dims)
        for hf_name, tensor in zip(rule.hf_names, split(rule, dims, result.weights[rule.mf_name]))
    }
    for moment, tensors in (("before", begun), ("after", trained)):
        assert result.published[moment].keys() == tensors.keys()
        for hf_name, tensor in tensors.items():
            np.testing.assert_array_equal(result.published[moment][hf_name], tensor, err_msg=hf_name)
    assert sum(result.written_bytes) == sum(tensor.nbytes for tensor in begun.values())


@each("shared work")
def test_publishing_shares_the_work(executed, name, layout):
    written_bytes = executed(name, layout).written_bytes
    # The largest parameter is a tenth of this model: no rank writes much more than its share.
    assert max(written_bytes) <= 1.25 * sum(written_bytes) / len(written_bytes)


@each("adapters")
def test_the_reference_is_the_policy_without_its_adapters(executed, name, layout):
    outputs = executed(name, layout).outputs
    for first, reference in zip(outputs["first"], outputs["reference"], strict=True):
        np.testing.assert_array_equal(first, reference)


@each("adapters")
def test_merged_weights_are_published(executed, plain, name, layout):
    from networks import iter_merged_tensors

    published, base = executed(name, layout).published, hf_weights(FAMILIES[name].model)
    merged = dict(iter_merged_tensors(plain(name).network))
    for hf_name, tensor in base.items():
        np.testing.assert_array_equal(published["before"][hf_name], tensor, err_msg=hf_name)
    assert published["after"].keys() == merged.keys()
    for hf_name, expected in merged.items():
        np.testing.assert_allclose(published["after"][hf_name], expected, rtol=0, atol=TOLERANCE, err_msg=hf_name)
        is_adapted = hf_name.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight"))  # biases are not
        assert (np.abs(expected - base[hf_name]).max() > 10 * TOLERANCE) == is_adapted, hf_name


@each("adapters")
def test_the_adapter_is_exported_in_peft_s_format(executed, tmp_path, name, layout):
    """And base and adapter into the model that was published."""
    from mindrlhf.weights.adapters.merge import merge_adapter

    result = executed(name, layout)
    exported, saved = result.exported.with_name("exported_adapter"), result.exported.parent / "saved" / "model"
    tensors = load_file(exported / "adapter_model.safetensors")
    # Of softmax attention four matrices, of linear attention three; of an MLP three.
    kinds = FAMILIES[name].model.get("layer_types", ["full_attention"] * FAMILIES[name].model["num_hidden_layers"])
    assert len(tensors) == 2 * sum(6 if kind == "linear_attention" else 7 for kind in kinds) and LORA["rank"] > 0
    assert all(one.startswith("base_model.model.model.layers.") for one in tensors)
    base = result.exported.parents[1] / "model"
    for adapter in (saved, exported):
        merge_adapter(base, adapter, tmp_path / "merged" / adapter.name)
        (file,) = (tmp_path / "merged" / adapter.name).glob("*.safetensors")
        for hf_name, tensor in load_file(file).items():
            np.testing.assert_allclose(tensor, result.published["after"][hf_name], rtol=0, atol=1e-7, err_msg=hf_name)


@SLOW
@pytest.mark.parametrize(
    "name, layout, between_devices",
    [
        ("policy_computing", "pp2", False),
        ("policy_computing", "pp2", True),
        ("policy_computing", "dp2_optimizer_parallel", False),
        ("policy_computing", "dp2_optimizer_parallel", True),
        ("policy", "tp2_sequence_parallel", False),
        # Not by collectives: with two ranks on each machine they are among some of the ranks.
        ("policy", "tp2_pp2", False),
    ],
)
def test_two_machines_compute_and_publish_what_one_does_to_the_last_bit(
    executed, tmp_path, name, layout, between_devices
):
    """Each machine has a rank (or two) and holds a part of the model; the buffers of both have all of it in the end."""
    one = executed(name, layout)
    graphs = Path(one.job.graphs[0]).parent
    job = dataclasses.replace(one.job, between_devices=between_devices)
    two = execute_over_machines(job, MODEL, batches(), tmp_path, keep=graphs)
    assert len(set(one.machines)) == 1 and len(set(two.machines)) == 2
    np.testing.assert_array_equal(two.losses, one.losses)
    np.testing.assert_array_equal(two.grad_norms, one.grad_norms)
    for moment, tensors in one.published.items():
        assert two.published[moment].keys() == tensors.keys()
        for hf_name, tensor in tensors.items():
            np.testing.assert_array_equal(two.published[moment][hf_name], tensor, err_msg=f"{moment} {hf_name}")
    for parameter, array in one.weights.items():
        np.testing.assert_array_equal(two.weights[parameter], array, err_msg=parameter)
    assert len({*one.buffers, *two.buffers}) == 1, "the buffers of both machines hold the same"


@each("moved")
def test_fused_kernels_and_collectives_were_lowered(executed, name, layout):
    """The executed graphs are those of the cluster: with Ascend's attention, and collectives that the CPU lacks."""
    lowered = executed(name, layout).lowered
    assert lowered["FlashAttentionScore"] >= 1
    if layout == "pp2":
        assert {"Send", "Receive"} <= lowered.keys()
    if layout == "cp2_tp2_sequence_and_optimizer_parallel":
        assert lowered["ReduceScatter"] >= 1


@each("scatters")
def test_gradients_are_summed_where_their_optimizer_state_is(executed, name, layout):
    assert executed(name, layout).lowered["ReduceScatter"] >= 1


@each("experts")
def test_rows_and_their_experts_go_there_rows_come_back_and_two_slopes(executed, name, layout):
    assert executed(name, layout).lowered["AlltoAllV"] == 5
