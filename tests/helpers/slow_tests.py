"""What is too slow for every day: the tier `nightly`, which ``MINDRLHF_SLOW_TESTS=1`` or ``-m nightly`` runs."""

import argparse
import os
import platform
import re
import sys
from collections.abc import Sequence

import pytest

VARIABLE = "MINDRLHF_SLOW_TESTS"


def asks_for_nightly(arguments: Sequence[str]) -> bool:
    """Whether pytest's ``-m`` selects it; read here, since conftest files import helpers before options are parsed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", default="")
    expression = parser.parse_known_args(arguments)[0].m
    return re.search(r"(?<!not )\bnightly\b", expression) is not None


if asks_for_nightly(sys.argv[1:]):
    os.environ[VARIABLE] = "1"  # for the processes that xdist starts
RUNS_SLOW_TESTS = bool(os.environ.get(VARIABLE))
SLOW = pytest.mark.nightly
SIMULATES_CANN = pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only")

# Of tests whose cases take long and say much the same, daily only each n-th case, from the first; of 0 none.
THINNED = {
    "algorithms/test_logprobs.py::test_both_forms_equal_float64_in_value_and_gradient": 2,
    "algorithms/test_policy_losses.py::test_the_cutting_of_a_batch_changes_nothing": 4,
    "config/test_hostile_values.py::test_every_key_takes_or_refuses_numbers_and_everything_else_in_words": 4,
    "cpu/test_grammars.py::test_samples_keep_to_a_grammar_and_its_tokens_are_not_the_policys": 0,
    "cpu/test_multi_step.py::test_experts_are_recorded_for_every_token": 0,
    "cpu/test_stop_engines.py::test_samples_end_with_the_token_that_completes_a_text": 0,
    "data/test_readers.py::test_a_small_parquet_file_that_unpacks_to_gigabytes_takes_bounded_memory": 5,
    "data/test_readers.py::test_a_file_that_lies_about_its_sizes_meets_the_limit_of_memory": 3,
    "examples/test_tools_data.py::test_the_script_builds_all_that_it_makes": 0,
    "images/test_positions.py::test_positions_are_those_of_transformers": 0,
    "models/test_causal_lm.py::test_padded_rows_match_transformers": 3,
    "models/test_lora.py::test_gradients_of_both_factors_are_those_of_transformers_in_float64": 2,
    "models/test_lora.py::test_logits_are_those_of_the_merged_matrices_in_float64": 3,
    "models/test_lora.py::test_without_its_adapters_it_is_the_base_to_the_last_bit": 3,
    "models/vision/test_ascend_tower.py::test_rows_are_those_of_the_cpu": 2,
    "models/vision/test_qwen_vl.py::test_logits_logprobs_and_all_gradients_match_transformers": 3,
    "observe/test_pictures.py::test_nothing_is_cut_off_and_text_stands_out": 3,
    "observe/viewer/test_page.py::test_a_hundred_thousand_samples": 0,
    "rewards/test_lint.py::test_paying_for_the_prompt_is_found": 0,
    "rewards/test_reward_nodes.py::test_a_bad_sample_on_another_node_costs_itself_only": 3,
    "rewards/test_verifier_rules.py::test_ten_megabytes_of_anything_pass": 23,
    "rollout/agents/test_agent_attacks.py::test_five_hundred_episodes_at_once_lose_nothing_and_leave_nothing": 0,
    "rollout/agents/test_agent_nodes.py::test_a_bad_agent_on_another_node_costs_its_own_sample": 2,
    "rollout/test_ascend_worker.py::test_rows_are_sampled_at_once_each_by_its_own_seed": 0,
    "sandbox/test_user_code.py::test_a_tool_that_breaks_its_pipes_costs_its_own_call_and_is_named": 3,
    "test_locales.py::test_commands_run_on_paths_that_are_not_ascii": 6,
    "training/loop/test_loop_features.py::test_a_resumed_run_is_the_run_that_was_not_broken_off": 3,
    "training/loop/test_loop_features.py::test_nodes_that_come_and_are_lost_change_nothing": 3,
    "training/loop/test_loop_features.py::test_what_is_trained_on_is_what_was_told": 3,
    "training/routing/test_routing_replay.py::test_log_probs_do_not_depend_on_how_samples_share_rows": 2,
    "training/routing/test_routing_replay.py::test_tokens_without_experts_go_where_the_router_says": 2,
    "training/routing/test_routing_replay.py::test_updates_move_the_routers_of_the_experts_that_are_replayed": 2,
}
