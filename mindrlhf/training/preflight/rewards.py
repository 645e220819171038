"""The user's reward functions, tried before a run."""

from mindrlhf.config.reward import RewardSection
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.registry import part_name
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput
from mindrlhf.training.preflight import RunInputs

# A function that takes longer for its first call is told of, and the run begins all the same.
_CALL_LIMIT_S = 10.0
_CAUSED_BY_NO_RESPONSE = ("ImportError", "ModuleNotFoundError", "NameError")


def try_rewards(reward: RewardSection, inputs: RunInputs) -> str:
    """Load the user's reward functions as the run does, and call each once, an answer of the data as response.

    Returns:
        A line where one raised or took too long, as such a response may cause, and what the run makes of it, or "".

    Raises:
        UserError: one does not load, cannot be called, returns no number, or raises what no response causes.
    """
    names = tuple(name for name in reward.verifier_function if ":" in name)
    if not names:
        return ""
    parts = {part_name(name) for name in names}
    options = {name: text for name, text in reward.options.items() if part_name(name.rpartition(".")[0]) in parts}
    (record,) = inputs.prompts.read([0])
    prompt = inputs.tokenizer.decode(record.prompt_ids.tolist(), skip_special_tokens=False)
    texts = dict.fromkeys(("completions", "turn_texts", "token_texts"), (record.answer,))
    sample = RewardInput(0, record.answer, record.answer, prompt, extra=record.extra, **texts)
    try:
        selection = Selection(names, (1.0,) * len(names), options=options, python=reward.python)
        limit_s = min(reward.timeout_s, _CALL_LIMIT_S)
        with RewardPool(selection, 1, limit_s, memory_limit_mib=reward.memory_limit_mib) as pool:
            (result,) = pool.score([sample])
    except RunFailure as failure:
        raise UserError(str(failure)) from None
    for name, reason in result.failures.items():
        if reason.startswith("returned "):
            raise UserError(f"verifier '{name}' {reason}: a reward function returns a float")
        if reason.partition(":")[0] in _CAUSED_BY_NO_RESPONSE:
            raise UserError(f"verifier '{name}' raises {reason}: so it would for each response; fix the function")
    failed = [f"{name}: {reason}" for name, reason in result.failures.items()]
    outcome = f"such a response is worth reward.failure_value, {reward.failure_value:g}"
    if result.unscored:
        failed, outcome = [result.unscored], "such samples are left out, and the run ends above guard.max_unscored"
    return f"called with the answer of the first prompt as response, {'; '.join(failed)} ({outcome})" if failed else ""
