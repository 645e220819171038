"""What does not go together: each line of the table is refused, and the page has the table."""

import itertools
import re
from pathlib import Path

import pytest

from mindrlhf.config.load import load_grpo_config
from mindrlhf.config.refusals import (
    DEEP_IMAGES,
    ELASTIC,
    IMAGES,
    REFUSALS,
    REPLAY,
    SHARDED,
    SPANNING,
    refusal_rules,
)
from mindrlhf.errors import UserError
from mindrlhf.rollout.agents import protocols

PAGE = Path(__file__).parents[2] / "docs" / "async.md"
SETTINGS = {IMAGES, DEEP_IMAGES, ELASTIC, SHARDED, SPANNING, REPLAY}
# A value that each key has where it is used.
USED = {
    "rollout.weight_buffer_gib": "1",
    "rollout.off_policy_steps": "1",
    "algorithm.dynamic_sampling": "true",
    "reward.model_path": "scorer",
    "memory.offload_optimizer": "true",
    "parallel_config.pipeline_stage": "2",
    "lora.rank": "4",
    "rollout.segment_tokens": "8",
    "tools.names": "python",
    "tools.environment": "lake.py:Lake",
    "rollout.tensor_parallel": "2",
    "tools.agent": "sh a.sh",
    "rollout.stop": "[end]",
}
# What a key needs beside it.
NEEDED = {
    "memory.offload_optimizer": ["run.device=ascend"],
    "parallel_config.pipeline_stage": ["run.device=ascend", "parallel_config.micro_batch_num=2"],
    "profiler.tools": ["profiler.steps=[1]"],
}
DEVICES = "rollout.env={ASCEND_RT_VISIBLE_DEVICES: 8}"


@pytest.fixture
def load(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    needed = ["model.path=m", "data.train_file=f", "data.tokenizer_dir=t", "reward.verifier_function=accuracy_reward"]
    return lambda *changes: load_grpo_config(tmp_path / "config.yaml", [*needed, *changes], world_size=None)


def changes_of(features):
    found = [DEVICES]
    for key, _, value in (one.partition("=") for one in features if one not in SETTINGS):
        found += [f"{key}={value or USED[key]}", *NEEDED.get(key, ())]
    return found


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: ", ".join(one.features))
def test_each_line_is_refused_and_none_of_its_parts(refusal, load):
    settings = {one for one in refusal.features if one in SETTINGS}
    if not settings:
        with pytest.raises(UserError) as error:
            load(*changes_of(refusal.features))
        message = next(line for line in str(error.value).splitlines() if refusal.reason in line)
    else:
        config = load(*changes_of(refusal.features))
        (message,) = [said for is_broken, said in refusal_rules(config, settings) if is_broken]
    assert message.endswith(f": {refusal.reason}; {refusal.fix}") and "\n" not in message
    for one in refusal.features:
        key, _, value = one.partition("=")
        assert one in message if one in SETTINGS else f"'{key}' = " in message
    for missing in refusal.features:
        rest = [one for one in refusal.features if one != missing]
        config = load(*changes_of(rest))
        said = [text for is_broken, text in refusal_rules(config, settings - {missing}) if is_broken]
        assert not [text for text in said if refusal.reason in text]


SCHEDULES = (
    (),
    ("rollout.off_policy_steps=1",),
    ("rollout.segment_tokens=64",),
    ("rollout.segment_tokens=64", "rollout.off_policy_steps=2"),
    ("rollout.segment_tokens=64", "rollout.off_policy_steps=2", "rollout.asynchronous=true"),
)
FEATURES = (
    ("tools.names=python",),
    ("tools.environment=lake.py:Lake",),
    ("lora.rank=4",),
    ("algorithm.dynamic_sampling=true",),
    ("reward.model_path=scorer",),
    ("algorithm.name=ppo", "critic.path=c"),
    ("algorithm.advantage=remax",),
    ("training.replay_routing=true",),
    ("tools.agent=sh a.sh",),
)


@pytest.mark.parametrize(("schedule", "feature"), list(itertools.product(SCHEDULES, FEATURES)))
def test_every_schedule_goes_with_every_feature(schedule, feature, load):
    config = load(*schedule, *feature)
    assert not [text for is_broken, text in refusal_rules(config, {ELASTIC}) if is_broken], "also on rollout nodes"


def test_what_is_refused_with_agents_is_on_their_page_in_five_lines_at_most():
    page = (PAGE.parent / "agents.md").read_text()
    found = re.findall(r"^\| (.+) \| (.+) \|$", page.partition("\n## Limits\n")[2], re.M)[1:]
    rows = [(set(re.findall(r"`(\w[\w.]*)", names)), names, reason) for names, reason in found]
    assert 0 < len(rows) <= 5
    for refusal in REFUSALS:
        if "tools.agent" in refusal.features:
            shown = ", ".join(one if one in SETTINGS - {REPLAY} else f"`{one}`" for one in refusal.features)
            assert (shown, refusal.reason) in found
    told = set().union(*(keys for keys, *_ in rows)) - {"tools.agent", REPLAY}
    forms = {"rollout.segment_tokens", "rollout.top_p", "rollout.top_k", "hermes", "qwen3_coder", "llama3"}
    assert told == {*protocols._REFUSED} | forms
    for name, (_, reason) in protocols._REFUSED.items():
        (row,) = [row for row in rows if name in row[0]]
        assert (row[2] == reason) == (reason == protocols.CONSTRAINED)
