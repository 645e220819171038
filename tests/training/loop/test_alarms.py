"""The alarm of a run that learns nothing: when it begins and ends, what it says, across a resume, and in the report."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from configs import grpo_config
from hypothesis import given
from hypothesis import strategies as st
from made_samples import make_sample
from saved_progress import through_json

from mindrlhf.checkpoint.algorithm_state import LearningState
from mindrlhf.config.run import RunSection
from mindrlhf.evaluation.heldout import Evaluation
from mindrlhf.observe.report import render_report
from mindrlhf.observe.run_data import read_run
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.alarms import MIN_STEPS, Events, LossAlarm, SlowRewards
from mindrlhf.training.loop.guards import Guards
from mindrlhf.training.offline.run import OfflineTrainer

VERIFIERS = ("accuracy_reward", "format_reward")


class Run:
    """Guards of a run whose steps are told as the rewards of each group's samples."""

    def __init__(self, output_dir, *, first_step=0, state=None, num_steps=100, advantage="grpo"):
        config = grpo_config(
            reward={"verifier_function": VERIFIERS},
            run={"output_dir": str(output_dir)},
            algorithm={"advantage": advantage},
        )
        self.directory, self.step = output_dir, max(0, first_step - 1)
        self.state = state or LearningState()
        self.guards = Guards(config, None, first_step=first_step, learning=self.state, num_steps=num_steps)

    def do(self, groups, *, losses=((0.5, 1.0),), answer="7", finish_reason="stop"):
        """Do a step: ``groups`` has a list of (accuracy, format) for each group, ``losses`` (loss, norm) of updates."""
        self.step += 1
        samples = [
            make_sample(
                [1],
                [2, 3],
                sum(rewards),
                dict(zip(VERIFIERS, rewards, strict=True)),
                group=number,
                answer=answer,
                response="so it is 8",
                finish_reason=finish_reason,
            )
            for number, group in enumerate(groups)
            for rewards in group
        ]
        self.guards.review_rewards(self.step, samples)
        updates = [SimpleNamespace(loss=loss, grad_norm=norm) for loss, norm in losses]
        self.guards.review(SimpleNamespace(number=self.step, updates=updates), 0.0)
        self.guards.check()

    def events(self):
        lines = (self.directory / "guards.jsonl").read_text().splitlines()
        return [(one["step"], one["event"], one["alarm"]) for one in map(json.loads, lines) if "alarm" in one]

    def saved(self) -> LearningState:
        return through_json(self.state)


NOTHING = [[(0.0, 0.0)] * 2] * 2
SOME = [[(0.0, 0.0), (1.0, 0.0)], [(0.0, 0.0)] * 2]
ZERO = ((0.0, 0.0),)


def test_a_run_whose_references_match_nothing_is_told_so_once_and_again_at_the_end(tmp_path, capsys):
    run = Run(tmp_path)
    for _ in range(8):
        run.do([[(0.0, 0.0), (0.0, 1.0)]] * 2, answer="seven")
    assert run.events() == [(MIN_STEPS, "alarm", "constant accuracy_reward")]
    said = capsys.readouterr().err
    assert said.count("warning: step 5: verifier accuracy_reward gave 0 to all samples of 5 steps") == 1
    assert "it tells no response from another; one ends with 'so it is 8', and its reference is 'seven'" in said
    run.guards.close()
    said = capsys.readouterr().err
    assert said.count("warning: at the end of the run: verifier accuracy_reward gave 0 to all samples of 8 steps") == 1
    assert "nothing was learned" not in said, "the format was"


def test_a_run_without_signal_says_at_its_end_that_nothing_was_learned(tmp_path, capsys):
    run = Run(tmp_path)
    for _ in range(7):
        run.do(NOTHING, losses=ZERO * 2)
    kinds = {kind for _, _, kind in run.events()}
    assert kinds == {"no_signal", "no_loss", "constant accuracy_reward", "constant format_reward"}
    assert {step for step, _, _ in run.events()} == {MIN_STEPS}
    run.guards.close()
    said = capsys.readouterr().err
    assert said.count("in 5 steps no group had samples with different rewards") == 1
    assert said.count("at the end of the run: in 7 steps no group had samples with different rewards") == 1
    assert said.count("at the end of the run: loss and gradient were 0 in all updates of 7 steps") == 1
    assert said.endswith("warning: nothing was learned in 7 steps: the model is what it was\n")


def test_a_run_that_learns_is_left_alone(tmp_path, capsys):
    run = Run(tmp_path)
    run.do([[(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)]])
    for _ in range(12):
        run.do([[(1.0, 1.0)] * 3], losses=ZERO)  # solved: no signal any more, but there was one
    run.guards.close()
    assert run.events() == [] and capsys.readouterr().err == ""


def test_an_alarm_ends_when_something_is_learned_after_all(tmp_path, capsys):
    run = Run(tmp_path)
    for _ in range(6):
        run.do(NOTHING, losses=ZERO)
    run.do(SOME)
    ended = [kind for step, event, kind in run.events() if event == "alarm_over" and step == 7]
    assert sorted(ended) == ["constant accuracy_reward", "no_loss", "no_signal"]
    capsys.readouterr()
    run.guards.close()
    assert capsys.readouterr().err.count("at the end of the run") == 1, "the format is all the same still"


def test_the_state_survives_a_resume(tmp_path):
    run = Run(tmp_path)
    for _ in range(3):
        run.do(NOTHING, losses=ZERO)
    resumed = Run(tmp_path, first_step=4, state=run.saved())
    for _ in range(2):
        resumed.do(NOTHING, losses=ZERO)
    assert len(resumed.events()) == 4 and {step for step, _, _ in resumed.events()} == {5}
    again = Run(tmp_path, first_step=6, state=resumed.saved())
    again.do(NOTHING, losses=ZERO)
    assert len(again.events()) == 4, "each is said once, also by the process after"


def test_a_run_shorter_than_the_wait_is_judged_when_it_ends(tmp_path):
    run = Run(tmp_path, num_steps=2)
    run.do(NOTHING)
    assert run.events() == []
    run.do(NOTHING)
    assert (2, "alarm", "no_signal") in run.events()


def test_single_samples_are_compared_over_the_batch_and_a_teacher_needs_no_rewards(tmp_path):
    run = Run(tmp_path / "a")
    for _ in range(MIN_STEPS):
        run.do([[(0.0, 0.0)], [(1.0, 0.0)]])
    assert "no_signal" not in {kind for _, _, kind in run.events()}
    run = Run(tmp_path / "b")
    for _ in range(MIN_STEPS):
        run.do([[(1.0, 0.0)], [(1.0, 0.0)]])
    assert "no_signal" in {kind for _, _, kind in run.events()}
    run = Run(tmp_path / "c", advantage="distill")
    for _ in range(MIN_STEPS):
        run.do([[(1.0, 0.0)], [(1.0, 0.0)]])
    assert "no_signal" not in {kind for _, _, kind in run.events()}


def test_prompts_without_references_are_named(tmp_path, capsys):
    run = Run(tmp_path)
    for _ in range(MIN_STEPS):
        run.do([[(0.0, 0.0), (0.0, 1.0)]], answer="")
    assert "its prompt has no reference answer: name their column" in capsys.readouterr().err


def test_a_reward_for_responses_that_were_all_cut_is_told(tmp_path, capsys):
    run = Run(tmp_path)
    group = [[(1.0, 0.0)] * 39 + [(0.0, 0.0)]]
    for _ in range(MIN_STEPS - 1):
        run.do(group, finish_reason="length")
    run.do(group)
    for _ in range(MIN_STEPS):
        run.do(group, finish_reason="length")
    assert [one for one in run.events() if "cut" in one[2]] == [(10, "alarm", "paid_cut accuracy_reward")]
    assert (
        "accuracy_reward gave 0.95 or more on average for 5 steps, while all responses were truncated"
        in capsys.readouterr().err
    )
    run.do(group)
    assert run.events()[-1] == (11, "alarm_over", "paid_cut accuracy_reward")


def evaluation(step, rights, num_prompts=200) -> Evaluation:
    scores = (np.arange(num_prompts) < rights).astype(np.float64)[:, None]
    return Evaluation(step, "qwen_accuracy", {"qwen_accuracy": scores}, 3.0, [], "questions")


def test_a_reward_near_its_highest_while_held_out_accuracy_does_not_rise_is_told(tmp_path, capsys):
    run = Run(tmp_path)
    high = [[(1.0, 1.0)] * 39 + [(0.0, 1.0)]]
    for _ in range(MIN_STEPS):
        run.do(high)
    run.guards.review_evaluations([evaluation(0, 20), evaluation(5, 60)])
    assert run.events()[1:] == [], "it rises"
    run.guards.review_evaluations([evaluation(0, 20), evaluation(5, 22)])
    assert run.events()[-1] == (5, "alarm", "not_risen")
    said = capsys.readouterr().err
    assert "held-out accuracy by qwen_accuracy is 11.0%, which is no rise since step 0 (10.0%)" in said
    run.guards.review_evaluations([evaluation(0, 20), evaluation(5, 22), evaluation(10, 120)])
    assert run.events()[-1] == (10, "alarm_over", "not_risen")


@pytest.mark.parametrize("last, is_told", [(100, True), (112, True), (119, False), (121, False)])
def test_a_fall_of_held_out_accuracy_since_its_best_is_told_where_it_is_no_chance(tmp_path, last, is_told):
    # Falls of 21 and 9 of 200 prompts, none up: an exact sign test gives 1e-6 and 0.004; of 2 it gives 0.5.
    run = Run(tmp_path)
    run.do(SOME)
    past = [evaluation(0, 20), evaluation(5, 121), evaluation(10, 118)]
    run.guards.review_evaluations([*past, evaluation(15, last)])
    assert ((15, "alarm", "fallen") in run.events()) == is_told
    run.guards.review_evaluations([*past, evaluation(15, last), evaluation(20, 120)])
    assert ((20, "alarm_over", "fallen") in run.events()) == is_told


@pytest.mark.parametrize("groups, rights", [(SOME, 22), ([[(1.0, 1.0)] * 2], 195)])
def test_low_rewards_and_high_accuracies_are_no_alarm(tmp_path, groups, rights):
    run = Run(tmp_path)
    for _ in range(MIN_STEPS):
        run.do(groups)
    run.guards.review_evaluations([])
    run.guards.review_evaluations([evaluation(0, rights), evaluation(5, rights)])
    assert "not_risen" not in {kind for _, _, kind in run.events()}


def test_training_on_fixed_data_has_the_alarm_of_its_loss(tmp_path, capsys):
    config = SimpleNamespace(run=RunSection(output_dir=str(tmp_path)))
    events = Events(tmp_path, first_step=0)
    trainer = OfflineTrainer()
    trainer.order, trainer.num_steps, trainer.progress = SimpleNamespace(items=lambda index: []), 9, Progress()
    trainer.update = lambda index, items: {"loss": 0.0, "grad_norm": 0.0}
    trainer.alarm = LossAlarm(config, events, LearningState(), trainer.num_steps)
    for _ in range(MIN_STEPS):
        trainer.step()
        trainer.check()
    assert "warning: step 5: loss and gradient were 0" in capsys.readouterr().err


def test_the_report_shows_the_alarms_and_until_when_they_held(tmp_path):
    run = Run(tmp_path)
    for _ in range(6):
        run.do(NOTHING, losses=ZERO, answer="<b>7</b>")
    run.do(SOME)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.0}\n')
    page = render_report([read_run(tmp_path)])
    assert page.count("<li><strong>step 5 to 7</strong>: ") == 3
    assert page.count("<li><strong>from step 5 on</strong>: verifier format_reward gave 0 to all samples") == 1
    assert "&lt;b&gt;7" in page and "<b>7" not in page


REWARD = st.sampled_from([(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
STEPS = st.lists(st.lists(st.lists(REWARD, min_size=2, max_size=2), min_size=1, max_size=2), min_size=1, max_size=12)


@given(steps=STEPS, resumed_after=st.integers(0, 12))
def test_the_alarms_are_those_of_a_look_at_the_whole_run(tmp_path_factory, steps, resumed_after):
    directory = tmp_path_factory.mktemp("run")
    run = Run(directory)
    for number, groups in enumerate(steps):
        if number == resumed_after:
            run = Run(directory, first_step=number + 1, state=run.saved())
        run.do(groups)
    raised = set(run.state.raised)
    wanted = set()
    for place, name in enumerate(VERIFIERS):
        if len({sample[place] for groups in steps for group in groups for sample in group}) == 1:
            wanted.add(f"constant {name}")
    if not any(sum(group[0]) != sum(group[1]) for groups in steps for group in groups):
        wanted.add("no_signal")
    assert raised == (wanted if len(steps) >= MIN_STEPS else set())


def review_waits(capsys, num_workers, waits, stage="timing/rollout"):
    """Return the shares and the warnings of steps of 10 s, of which the stage takes 5, with so many seconds waited."""
    alarm = SlowRewards(num_workers)
    shares = [alarm.review(number, wait, {stage: 5.0, "timing/all": 10.0}) for number, wait in enumerate(waits, 1)]
    return shares, capsys.readouterr().err.splitlines()


def test_steps_that_wait_for_verifiers_are_told_so_once_with_the_key(capsys, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    shares, warnings = review_waits(capsys, 2, [0.0, 2.0, 3.0, 4.0, 1.5, 4.0, 4.0])
    assert [share["timing/reward_share"] for share in shares] == pytest.approx([0, 0.2, 0.3, 0.4, 0.15, 0.4, 0.4])
    (warning,) = warnings  # 10.5 of 50 s
    assert warning.startswith("warning: step 5: 21% of the last 5 steps")
    assert "'reward.num_workers' is 2: give 8" in warning
    assert review_waits(capsys, 2, [2.0] * 9)[1] == [], "a fifth is no more than a fifth"
    (warning,) = review_waits(capsys, None, [4.0] * 9)[1]
    assert "'reward.num_workers' is 8, with 8 cores: take a faster verifier" in warning
    assert review_waits(capsys, None, [None] * 9) == ([{}] * 9, []), "there are no verifiers"


def test_what_is_scored_beside_the_loop_counts_where_the_ranks_waited(capsys):
    shares, _ = review_waits(capsys, 2, [9.0], stage="timing/rollout_wait")
    assert shares == [{"timing/reward_share": 0.5}]
    assert review_waits(capsys, 2, [9.0] * 9, stage="timing/update") == ([{"timing/reward_share": 0.0}] * 9, [])
