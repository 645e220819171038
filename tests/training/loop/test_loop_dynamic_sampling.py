"""Dynamic sampling in the loop over scripted samples: rounds, stale samples, what a restart takes up."""


import numpy as np
import pytest
from test_loop import NUM_GENERATIONS, Rank, Run

ALGORITHM = {"num_generations": NUM_GENERATIONS, "dynamic_sampling": True}
# Prompt 0 of each pass has no signal; see test_loop.Rewards. Steps are of 2 prompts, chunks too.
OPTIONS = {"num_prompts": 3, "algorithm": ALGORITHM, "training": {"chunk_size": 2, "micro_batch_size": 4, "epochs": 50}}


def used_prompts(run):
    """First token of each row's first prompt is the prompt's; return those of all segments, by step."""
    steps = []
    for _, _, micro_batches in run.ranks[0].updates:
        prompts = []
        for rows in micro_batches:
            for ids, segments in zip(rows.input_ids, rows.segment_ids):
                starts = [np.flatnonzero(segments == segment)[0] for segment in range(1, segments.max() + 1)]
                prompts += [int(ids[start]) - 1 for start in starts]
        steps.append(sorted(prompts))
    return steps


def test_rounds_go_on_until_all_groups_teach_and_the_rest_is_left_over():
    run = Run(steps=3, **OPTIONS)
    metrics = run()
    # The order of prompts is 0 1 | 2 0 and 1 2; step 1 misses one group after 0 1, which 2 0 has.
    # Step 2 samples 1 2. Step 3 samples 0 1, then 2 0.
    sampled = [[request.prompt_ids[0] - 1 for request in requests] for requests, _ in run.generator.requests]
    assert sampled == [[0, 1], [2, 0], [1, 2], [0, 1], [2, 0]]
    assert used_prompts(run) == [[1] * 3 + [2] * 3] * 3
    assert [metrics[step]["samples/generated"] for step in (1, 2, 3)] == [12, 6, 12]
    assert [metrics[step]["samples/dropped_without_signal"] for step in (1, 2, 3)] == [6, 0, 6]
    assert metrics[3]["samples/total_generated"] == 30 and metrics[3]["samples/total_used"] == 18
    # All generated samples count as the step's rewards.
    assert metrics[1]["reward/groups_without_signal"] == 0.5
    assert metrics[1]["reward/mean"] == pytest.approx((6 * 2.5 + 2 * (2.5 + 4.5 + 6.5)) / 12)
    assert metrics[1]["vllm_tps"] * metrics[1]["timing/rollout"] == pytest.approx(4 * 3 * (1 + 2))
    assert metrics[1]["update_tps"] * metrics[1]["timing/update"] == pytest.approx(2 * 3 * (1 + 2))
    seeds = [request.seed for requests, _ in run.generator.requests for request in requests]
    assert len(set(seeds)) == len(seeds), "no two requests of a run share a random stream"


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_stale_samples_keep_the_logprobs_they_were_sampled_with(world_size, skips, monkeypatch):
    compute = Rank.compute_logprobs

    def compute_and_keep(self, name, batch):
        results = compute(self, name, batch)
        for rows, array in zip(self.batches[batch].micro_batches, results, strict=True):
            rows.tokens[name] = array
        return results

    monkeypatch.setattr(Rank, "compute_logprobs", compute_and_keep)
    options = {**OPTIONS, "num_prompts": 4, "training": {"chunk_size": 3, "micro_batch_size": 4, "epochs": 50}}
    options["training"]["skip_zero_advantages"] = skips
    run = Run(steps=2, world_size=world_size, **options)
    run.trainer.warm_up()
    metrics = run()
    assert "warm_up [8, 16] 4 ['old_logprobs']" in run.journal
    # 0 1 2 | 3 0 1: prompts 1, 2, 3 are used and 1 is left over. Step 2 samples 2 3 0, has 1 2 3 and nothing left.
    assert metrics[1]["samples/carried"] == metrics[2]["samples/used_stale"] == 3
    for rank in run.ranks:
        assert len(rank.updates) == 2
        for rows in rank.updates[0][2]:
            np.testing.assert_array_equal(rows.tokens["old_logprobs"], -1.25 * rows.mask)
    seen = {}
    for rank in run.ranks:
        for rows in rank.updates[1][2]:
            for row, segments in enumerate(rows.segment_ids):
                for segment in range(1, segments.max() + 1):
                    places = segments == segment
                    prompt = int(rows.input_ids[row][places][0]) - 1
                    values = rows.tokens["old_logprobs"][row][places & (rows.mask[row] > 0)]
                    seen.setdefault(prompt, set()).update(values.tolist())
    # The generator says -1.0, the trainer's forward pass -1.25.
    assert seen == {1: {-1.0}, 2: {-1.25}, 3: {-1.25}}
    assert metrics[2]["packing/computed"] == (pytest.approx(2 / 3) if skips else 1.0), "the middle one of each group"
    assert metrics[2]["rollout_diff/max_abs"] == 0.25, "only samples of the step's own weights are compared"


def test_a_step_broken_off_between_rounds_leaves_the_state_as_it_was():
    run = Run(steps=3, **OPTIONS)
    run.memory.stops_at = 3
    assert run.train() is False
    assert run.progress.step == 2 and run.progress.algorithm.samples.generated == 18
