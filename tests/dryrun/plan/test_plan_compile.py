"""`--compile`: which ranks are compiled, and how their planned memory is shown. The compiler itself is replaced."""

import dataclasses

import pytest
from plan_cases import plan_of

from mindrlhf.dryrun.compile.request import GRADIENTS, UPDATE, CompileReport
from mindrlhf.dryrun.plan import compiled as plan_compile
from mindrlhf.dryrun.plan.text import planned_lines


@pytest.fixture
def compiled(monkeypatch):
    """The requests that were made; the answers are reports of 10 GB, 11 GB, ..."""
    requests = []

    def compile_ranks(batch):
        requests.extend(batch)
        return [
            CompileReport(
                rank=one.rank,
                stage=one.rank // (512 // 16),
                num_layers=one.hf_config["num_hidden_layers"],
                parameters=(),
                planned_memory_bytes=(10 + index) * 10**9,
                seconds=12.4,
                peak_rss_bytes=2 * 10**9,
            )
            for index, one in enumerate(batch)
        ]

    monkeypatch.setattr(plan_compile, "compile_ranks", compile_ranks)
    return requests


def test_first_second_and_last_stage_stand_for_all(compiled):
    planned = plan_compile.compile_plan(plan_of("deepseek_v3_512npu"))
    calls = [(rank, cell) for rank in (0, 32, 480) for cell in (GRADIENTS, UPDATE)]
    assert [(one.rank, one.cell) for one in compiled] == calls
    assert [one.stage for one in planned] == [0, 1, 15]
    assert [one.accumulating_bytes for one in planned] == [10 * 10**9, 12 * 10**9, 14 * 10**9]
    assert [one.last_bytes for one in planned] == [11 * 10**9, 13 * 10**9, 15 * 10**9]


def test_an_update_of_one_call_has_one_graph(compiled):
    plan = plan_of("qwen2_5_7b_8npu")
    batch = dataclasses.replace(plan.batch, num_micro_batches_per_rank=1)
    (planned,) = plan_compile.compile_plan(dataclasses.replace(plan, batch=batch))
    assert [one.cell for one in compiled] == [UPDATE]
    assert (planned.accumulating_bytes, planned.last_bytes) == (0, 10 * 10**9)
    assert planned_lines([planned])[1].split()[:4] == ["0", "-", "10.00", "GB"]


def test_moments_that_are_swapped_leave_short_rows_to_the_last_call(compiled):
    plan_compile.compile_plan(plan_of("qwen2_5_7b_8npu", "memory.swap_moments=true"))
    assert [(one.cell, one.seq_length) for one in compiled] == [(GRADIENTS, 4096), (UPDATE, 512)]


def test_the_request_is_the_run(compiled):
    plan = plan_of("qwen2_5_7b_8npu")
    plan_compile.compile_plan(plan)
    accumulating, request = compiled
    assert accumulating == dataclasses.replace(request, cell=GRADIENTS)
    assert (request.seq_length, request.micro_batch_size, request.recompute) == (4096, 2, True)
    assert (request.param_dtype, request.compute_dtype, request.plan_memory) == ("float32", "bfloat16", True)
    assert request.parallel["data_parallel"] == 2 and request.parallel["model_parallel"] == 4
    assert request.hf_config["num_hidden_layers"] == 28


def test_the_estimate_beside_it_leaves_out_what_is_not_compiled(compiled):
    plan = plan_of("qwen2_5_7b_8npu")
    (planned,) = plan_compile.compile_plan(plan)
    update, step = (next(one for one in plan.memory if one.phase == name) for name in ("update", "optimizer step"))
    others = ("runtime and HCCL", "sleeping server")
    runtime = sum(item.size_bytes for item in update.items if item.name in others)
    assert planned.estimated_bytes == update.total - runtime > step.total - runtime
    # Of 8 ranks: a shard of the embedding, and an eighth of the others.
    largest = 152_064 * 3584 // 8
    work = 5 * 4 * (largest + (952_146_944 - largest) // 8)
    assert step.total - runtime == 952_146_944 * 4 * 4 + work
    lines = planned_lines([planned])
    assert lines[1].split() == ["0", "10.00", "GB", "11.00", "GB", "26.81", "GB", "28", "25", "s", "2.00", "GB"]
    assert "lower bound" in " ".join(lines)
