from types import SimpleNamespace

import pytest

from mindrlhf.config.reward import RewardSection
from mindrlhf.errors import UserError
from mindrlhf.rewards.selection import Selection

NAMES = ("format_reward", "accuracy_reward", "code_execution")


def section(**keys) -> RewardSection:
    return RewardSection(**{"verifier_function": NAMES, **keys})


def test_weights_default_to_one():
    assert Selection.from_config(section()).weights == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"by_choice": ("length_reward",)}, "'reward.by_choice' names the verifier 'length_reward'"),
        ({"options": {"partial": "true"}}, "'reward.options' names the verifier ''"),
        (
            {"options": {"code_execution.partly": "true"}},
            "has no option 'partly'; it has time_limit_s, memory_limit_mib",
        ),
        ({"options": {"code_execution.partial": "maybe"}}, "is 'maybe': it must be true or false"),
        ({"verifier_function": ("overlong_penalty",)}, "needs the option 'overlong_penalty.max_length'"),
        ({"verifier_weight": (1.0, 1e30, 1.0)}, "the weight of verifier 'accuracy_reward' is 1e\\+30"),
    ],
)
def test_contradictions_are_user_errors(keys, message):
    with pytest.raises(UserError, match=message):
        Selection.from_config(section(**keys)).check()


def test_options_go_to_their_own_verifier():
    selection = Selection.from_config(section(options={"code_execution.partial": "true"}))
    selection.check()
    assert [selection.options_for(name) for name in NAMES] == [{}, {}, {"partial": "true"}]


def prompts_of(choices, columns=()):
    return SimpleNamespace(path="p", header=SimpleNamespace(verifier_choices=choices, columns=columns))


def test_prompts_are_checked_against_what_may_be_chosen():
    selection = Selection.from_config(section(by_choice=("accuracy_reward", "code_execution")))
    selection.check_prompts(prompts_of(("", "code_execution", "accuracy_reward,code_execution")), "code_execution")
    assert selection.skipped_positions(()) == [1, 2]
    assert selection.skipped_positions(("code_execution",)) == [1]
    with pytest.raises(UserError, match="prompts of p choose the verifier 'format_reward', which is not in"):
        selection.check_prompts(prompts_of(("format_reward",)))
    with pytest.raises(UserError, match="'evaluation.verifier' is 'accuracy_reward', which no prompt of p chooses"):
        selection.check_prompts(prompts_of(("code_execution",)), "accuracy_reward")


def test_a_prompt_must_be_left_with_a_verifier():
    selection = Selection.from_config(section(by_choice=NAMES))
    selection.check_prompts(prompts_of(("format_reward",)))
    for choices in ((), ("", "format_reward")):
        with pytest.raises(UserError, match="prompts of p choose no verifier"):
            selection.check_prompts(prompts_of(choices))
