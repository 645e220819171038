"""The report and the learning curve: whole for every kind of run, safe for every kind of sample."""

import argparse
import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from mindrlhf.cli import main
from mindrlhf.commands import report as report_command
from mindrlhf.errors import UserError
from mindrlhf.images.pixels import decode_png, encode_png, image_digest
from mindrlhf.observe.learning_curve import write_learning_curve
from mindrlhf.observe.panels import REWARD, build_panels, lines_of
from mindrlhf.observe.records import JsonlWriter
from mindrlhf.observe.report import write_report
from mindrlhf.observe.run_data import read_run
from mindrlhf.observe.samples import SampleRecord, SampleWriter, turns_of
from mindrlhf.observe.viewer.page import write_pages

VOID_ELEMENTS = {"meta", "br", "hr", "img", "input", "link", "wbr"}
HOSTILE = "</script ><script>alert(1)</script><img src=x onerror=\"alert('2')\"> & <!-- \u2028 ]]> {{ 7*7 }} \ud800"
SUMMARY = {
    "before": {"accuracy": 0.314, "low": 0.262, "high": 0.368},
    "after": {"accuracy": 0.732, "low": 0.68, "high": 0.782},
    "difference": {"mean": 0.418, "low": 0.352, "high": 0.484},
    "num_prompts": 300,
    "samples_before": [{"prompt": "2+3?", "completion": "six", "answer": "5", "reward": 0.0}],
    "samples_after": [{"prompt": "2+3?", "completion": "five", "answer": "5", "reward": 1.0}],
}


class Page(HTMLParser):
    """Checks that elements close in order; keeps text, attributes and the content of scripts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.scripts, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data

    def count(self, css_class):
        return sum(css_class in (attributes.get("class") or "").split() for _, attributes in self.elements)


def make_run(path, records, samples=(), summary=None, config=None):
    for name, rows in (("metrics.jsonl", records), ("samples.jsonl", samples)):
        writer = JsonlWriter(path / name, first_step=0)
        for row in rows:
            writer.write(row)
        writer.close()
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    if config is not None:
        (path / "config.yaml").write_text(config)
    return path


def training_records(num_steps):
    yield {"step": 0, "eval/accuracy": 0.3, "eval/accuracy_low": 0.25, "eval/accuracy_high": 0.35}
    for step in range(1, num_steps + 1):
        yield {
            "step": step,
            "reward/mean": step / num_steps,
            "reward/accuracy_reward/mean": 0.5,
            "response_length/mean": 60.0,
            "response_length/min": 10.0,
            "response_length/max": 128.0,
            "rollout_diff/mean_abs": 1e-6,
            "rollout_diff/max_abs": 2e-5,
            "rollout_diff/k3": 1e-11,
            "entropy": 1.0,
            "kl": 0.01,
            "grad_norm": float("nan") if step == 2 else 0.7,
            "timing/rollout": 0.4,
            "timing/update": 0.5,
            "timing/all": 1.0,
            "e2e_tps": 3000.0,
        }
    yield {"step": num_steps, "eval/accuracy": 0.7, "eval/accuracy_low": 0.65, "eval/accuracy_high": 0.75}


def sample(step, text="text", **extra):
    rewards = {"accuracy_reward": 1.0}
    return {"step": step, "prompt": text, "completion": text, "answer": text, "reward": 1.0, "rewards": rewards} | extra


@pytest.mark.parametrize("num_steps", [1, 2, 5000])
def test_report_of_any_length(tmp_path, num_steps):
    make_run(tmp_path, training_records(num_steps), [sample(1), sample(num_steps)], SUMMARY, "beta: 0.0\n")
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".tmp", ".partial"))]
    text = path.read_text(encoding="utf-8")
    assert len(text) < 400_000
    page = Page(text)
    # Accuracy, reward, by verifier, length; entropy, KL, rollout difference, gradient norm; time, throughput.
    assert page.count("chart") == 10
    assert len(json.loads(page.scripts[0])) == 10
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    assert "31.4%" in page.text and "73.2%" in page.text
    assert "+41.8 points" in page.text and "+35.2 to +48.4" in page.text
    assert "Better" in page.text and "beta: 0.0" in page.text


def test_nothing_comes_from_elsewhere(tmp_path):
    make_run(tmp_path, training_records(3), [sample(1)], SUMMARY, "beta: 0.0\n")
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import", text)
    page = Page(text)
    assert not [attributes for _, attributes in page.elements if {"src", "href", "srcset"} & attributes.keys()]


def test_only_the_own_script_may_run(tmp_path):
    page = Page(write_report(make_run(tmp_path, training_records(2))).read_text(encoding="utf-8"))
    policy = next(attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy


def test_hostile_text_stays_text(tmp_path):
    summary = SUMMARY | {"samples_before": [sample(0, HOSTILE)], "samples_after": [sample(0, HOSTILE)]}
    records = [*training_records(2), {"step": 2, f"reward/{HOSTILE}/mean": 0.5}]
    samples = [sample(1, HOSTILE, rewards={HOSTILE: 1.0}), sample(2, HOSTILE)]
    make_run(tmp_path, records, samples, summary, f"note: {HOSTILE}".replace("\ud800", ""))
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert len(page.scripts) == 2 and not [tag for tag, _ in page.elements if tag == "img"]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    shown = HOSTILE.replace("\ud800", "?")
    # Prompt and two completions of the comparison and its answer; prompt, completion and answer of two samples.
    assert page.text.count(shown) >= 4 + 6
    assert "<" not in page.scripts[0], "browsers end a script at more spellings than Python's parser does"
    data = json.loads(page.scripts[0])
    assert HOSTILE in {series["name"] for chart in data for series in chart["series"]}


def test_pictures_are_shown_and_only_those_of_the_run(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (28, 56, 3), dtype=np.uint8)
    make_run(run_dir, training_records(2))
    writer = SampleWriter(run_dir / "samples.jsonl", first_step=0)
    texts = {"prompt": "<|image_pad|>?", "completion": "2", "answer": "2", "reward": 1.0, "rewards": {}}
    record = SampleRecord(step=1, finish_reason="stop", images=(pixels, pixels[::-1]), **texts)
    writer.write([record, record, SampleRecord(step=1, finish_reason="stop", **texts)])
    writer.close()
    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [line.get("images") for line in lines] == [[image_digest(pixels), image_digest(pixels[::-1])]] * 2 + [None]
    assert len(list((run_dir / "sample_images").iterdir())) == 2
    # Names that lead elsewhere, a picture that is gone, and one that is none.
    (tmp_path / "secret.png").write_bytes(encode_png(pixels))
    (run_dir / "sample_images" / f"{'0' * 64}.png").write_bytes(b"<svg onload=alert(1)>")
    strange = [["../../secret", "a" * 64, "0" * 64, 3, None, {}], "../../secret", 7]
    with (run_dir / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(lines[2] | {"images": value}) + "\n" for value in strange)
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    sources = [attributes["src"] for tag, attributes in page.elements if tag == "img"]
    shown = [decode_png(base64.b64decode(source.removeprefix("data:image/png;base64,"))) for source in sources]
    assert page.text.count("<|image_pad|>") == 1, "only where there is no picture is its place in the text shown"
    assert len(shown) == 2, "a prompt is shown once for all samples of it that follow"
    assert all(np.array_equal(*pair) for pair in zip(shown, [pixels, pixels[::-1]]))


def test_long_samples_are_shortened(tmp_path):
    make_run(tmp_path, training_records(1), [sample(1, "x" * 5000)])
    assert "(1,000 more characters)" in write_report(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "low, high, verdict",
    [(0.1, 0.2, "Better"), (-0.1, 0.1, "No clear"), (-0.2, -0.1, "Worse"), (0.0, 0.2, "No clear")],
)
def test_verdict_follows_the_interval(tmp_path, low, high, verdict):
    summary = SUMMARY | {"difference": {"mean": (low + high) / 2, "low": low, "high": high}}
    assert verdict in Page(write_report(make_run(tmp_path, training_records(1), (), summary)).read_text()).text


def test_a_run_with_little_to_show(tmp_path):
    page = Page(write_report(make_run(tmp_path, [{"step": 4, "loss": 0.25}])).read_text(encoding="utf-8"))
    assert page.count("chart") == 1 and page.count("headline") == 0
    assert "Configuration" not in page.text


def test_steps_written_in_parts_are_joined(tmp_path):
    run = read_run(make_run(tmp_path, training_records(4)))
    assert run.series["eval/accuracy"].steps.tolist() == [0, 4]
    assert run.series["reward/mean"].steps.tolist() == [1, 2, 3, 4]
    assert run.values("grad_norm").size == 3
    assert run.num_steps == 4


def test_small_stages_join_the_rest_of_the_step(tmp_path):
    stages = {f"timing/s{number}": float(number) for number in range(1, 10)}
    run = read_run(make_run(tmp_path, [{"step": 1, **stages, "timing/update": 20.0, "timing/all": 70.0}]))
    (chart,) = build_panels([("", [run])])[0].charts
    values = {series["name"]: series["values"] for series in chart.hover["series"]}
    # 70 - (20 + 9 + 8 + 7 + 6 + 5 + 4) s are left.
    assert list(values) == ["update", "s4", "s5", "s6", "s7", "s8", "s9", "other"]
    assert values["other"] == [11.0] and values["s9"] == [9.0]


def test_the_wait_for_rewards_is_drawn_beside_the_rest_of_the_rollout(tmp_path):
    lines = [{"step": step, "timing/rollout": 4.0, "timing/reward_share": 0.25, "timing/all": 8.0} for step in (1, 2)]
    directory = make_run(tmp_path, lines)
    (chart,) = build_panels([("", [read_run(directory)])])[0].charts
    values = {series["name"]: series["values"] for series in chart.hover["series"]}
    assert values == {"rollout": [2.0, 2.0], "reward_wait": [2.0, 2.0], "other": [4.0, 4.0]}
    assert "Waiting for rewards" in write_report(directory).read_text()


def test_first_and_last_samples(tmp_path):
    samples = [sample(step, f"s{step}-{number}") for step in (1, 5, 9) for number in range(8)]
    run = read_run(make_run(tmp_path, training_records(1), samples))
    assert [record["prompt"] for record in run.first_samples] == [f"s1-{number}" for number in range(6)]
    assert [record["prompt"] for record in run.last_samples] == [f"s9-{number}" for number in range(6)]


TURN = {"role": "a", "prompt": "p", "completion": "c"}


@pytest.mark.parametrize(
    ("name", "text"),
    [("summary.json", text) for text in ("[]", "{", "0.5", '{"before": 0.5}', '{"difference": "x"}')]
    + [("summary.json", f'{{"{key}": {value}}}') for key in SUMMARY if "samples" in key for value in (5, "[5]")]
    + [("samples.jsonl", json.dumps(sample(1, conversations=[one]))) for one in (5, {}, TURN | {"reward": "x"})],
)
def test_a_broken_file_is_named(tmp_path, name, text, capsys):
    (make_run(tmp_path, training_records(1)) / name).write_text(text)
    assert write_pages(tmp_path) is None  # and a run goes on to export its model
    (told,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"warning: no report: .*{name}\b", told)


@pytest.mark.parametrize("low", [None, "x", 10**400])
def test_one_prompt_without_an_interval_has_no_verdict(low, tmp_path):
    alone = SUMMARY | {"before": {"accuracy": 0.0, "low": low, "high": None}}
    page = Page(write_report(make_run(tmp_path, training_records(1), (), alone)).read_text())
    assert page.count("headline") == page.count("verdict") == 0


def run_command(*words):
    parser = argparse.ArgumentParser()
    report_command.register(parser.add_subparsers())
    arguments = parser.parse_args(["report", *map(str, words)])
    return arguments.run(arguments)


def test_command_without_a_run(tmp_path):
    with pytest.raises(UserError, match="no run directory"):
        run_command(tmp_path / "missing")
    with pytest.raises(UserError, match="no metrics in"):
        run_command(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no metrics in"):
        run_command(tmp_path)


def test_learning_curve_of_a_training_run(tmp_path, capsys):
    assert run_command(make_run(tmp_path, training_records(100)), "--svg", tmp_path / "curve.svg") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'curve.svg'}\n"
    assert not (tmp_path / "report.html").exists()
    root = ElementTree.parse(tmp_path / "curve.svg").getroot()
    texts = [node.text for node in root.iter() if node.get("class") == "title"]
    assert texts == ["Held-out accuracy", "Mean reward in training"]
    assert root.get("width") == "880"
    assert "prefers-color-scheme: dark" in (tmp_path / "curve.svg").read_text()


def test_learning_curve_of_a_supervised_run(tmp_path):
    write_learning_curve(make_run(tmp_path, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]), tmp_path / "c.svg")
    assert ">Loss</text>" in (tmp_path / "c.svg").read_text()
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="no curve to draw"):
        write_learning_curve(make_run(tmp_path / "other", [{"step": 1, "lr": 2.0}]), tmp_path / "d.svg")


def test_the_total_time_is_from_the_start_to_the_last_record(tmp_path):
    run_dir = make_run(tmp_path / "run", training_records(3))
    os.utime(run_dir / "metrics.jsonl", (5000.0, 5000.0))
    (run_dir / "starts.jsonl").write_text('{"step": 0, "start_s": 1100.0}\n{"step": 2, "start_s": 4000.0}\n')
    page = Page(write_report(run_dir).read_text())
    assert "1 h 5 min" in page.text and "with 1 restart and" in page.text
    (run_dir / "starts.jsonl").unlink()
    assert "sum of all steps" in Page(write_report(run_dir).read_text()).text


CONFIG = "run: {seed: 7, device: cpu}\nmodel: {path: m/x}\ndata: {train_file: d/t, eval_file: d/e}\n"
CONFIG += "algorithm: {name: gspo}\n"


def begin(path, **started):
    (path / "starts.jsonl").write_text(json.dumps({"step": 0, "start_s": 5.0, **started}) + "\n")


def test_the_top_says_what_the_run_is_of(tmp_path):
    make_run(tmp_path, training_records(3), [sample(1)], SUMMARY, CONFIG)
    begin(tmp_path, command="mindrlhf train c.yaml run.seed=7 --workers 2 <b>", num_ranks=2)
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    top = "".join(page.text[: page.text.index("Held-out accuracy")].split())
    for words in ("Model m/x", "Data d/t", "Held-out data d/e", "Algorithm gspo", "Seed 7", "Ranks 2 on cpu"):
        assert words.replace(" ", "") in top, words
    assert "Commandmindrlhftrainc.yamlrun.seed=7--workers2<b>" in top
    (tmp_path / "config.yaml").write_text(": : [")
    write_report(tmp_path)  # a config that cannot be read is none


def test_the_page_of_a_run_that_goes_on_refreshes_and_the_last_one_does_not(tmp_path):
    make_run(tmp_path, training_records(3))
    for is_running in (True, False):
        page = Page(write_report(tmp_path, is_running=is_running).read_text(encoding="utf-8"))
        refreshes = [one for tag, one in page.elements if tag == "meta" and one.get("http-equiv") == "refresh"]
        assert [int(one["content"]) > 0 for one in refreshes] == [True] * is_running
        assert ("running" in page.text) == is_running


@pytest.mark.parametrize(
    ("max_steps", "is_running", "said", "ended"),
    [(10, False, "3 of 10 steps", True), (10, True, "3 of 10 steps", False), (3, False, "3 steps", False)],
)
def test_a_run_that_ended_early_says_so(max_steps, is_running, said, ended, tmp_path):
    make_run(tmp_path, training_records(3), config=f"run: {{max_steps: {max_steps}}}\n")
    text = Page(write_report(tmp_path, is_running=is_running).read_text(encoding="utf-8")).text
    assert said in " ".join(text.split()) and ("ended before its last step" in text) == ended


def test_the_report_links_to_the_samples_that_were_written_beside_it(tmp_path):
    make_run(tmp_path, training_records(3), [sample(1, finish_reason="stop")])
    links = []
    for write in (write_report, write_pages):
        page = Page(write(tmp_path).read_text(encoding="utf-8"))
        links.append([one["href"] for tag, one in page.elements if tag == "a"])
    assert links == [[], ["samples.html"]] and (tmp_path / "samples.html").is_file()


def test_panels_that_never_change_are_folded_and_still_there(tmp_path):
    records = [
        {"step": n, "reward/mean": n / 9, "clip_fraction/low": 0.0, "lr": 1e-6, "entropy": n / 5} for n in range(1, 9)
    ]
    run = read_run(make_run(tmp_path, records))
    flat = {chart.title: chart.is_flat for panel in build_panels([("", [run])]) for chart in panel.charts}
    assert flat == {"Mean reward": False, "Entropy": False, "Clipped tokens": True, "Learning rate": True}
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "The same in every step: Clipped tokens, Learning rate" in " ".join(page.text.split())
    assert page.count("chart") == 4 == len(json.loads(page.scripts[0]))
    assert all(chart.title in page.text for panel in build_panels([("", [run])]) for chart in panel.charts)


def test_several_runs_lie_over_each_other_and_seeds_are_averaged(tmp_path, capsys):
    other = CONFIG.replace("gspo", "grpo").replace("seed: 7", "seed: 9")
    for name, config, length in (
        ("one", CONFIG, 9),
        ("two", CONFIG.replace("seed: 7", "seed: 8"), 6),
        ("three", other, 3),
    ):
        (tmp_path / name).mkdir()
        make_run(tmp_path / name, training_records(length), config=config)
    paths = [str(tmp_path / name) for name in ("one", "two", "three")]
    assert main(["report", *paths]) == 0
    path = tmp_path / "one" / "comparison.html"
    assert capsys.readouterr().out == f"{path}\n"
    page = Page(path.read_text(encoding="utf-8"))
    text = "".join(page.text.split())
    assert "oneagainsttwoagainstthree" in text and "Steps963" in text and "run.seed789" in text
    assert "model.path" not in text and "bandsthelowestandhighestoftheseeds" in text
    charts = [chart["series"] for chart in json.loads(page.scripts[0])]
    reward = next(lines for lines in charts if lines[0]["steps"][0] == 1 and len(lines) == 2)
    assert [line["name"] for line in reward] == ["one and seeds", "three"]
    # Rewards are step / length: the mean over seeds at the steps that both have.
    expected = [(step / 9 + step / 6) / 2 for step in range(1, 7)]
    assert reward[0]["values"] == pytest.approx(expected, rel=1e-3) and reward[1]["steps"] == [1, 2, 3]
    series = lines_of(REWARD, [("", [read_run(tmp_path / name) for name in ("one", "two")])])[0]
    assert series.low.tolist() == [step / 9 for step in range(1, 7)]
    assert series.high.tolist() == [step / 6 for step in range(1, 7)]
    assert main(["report", *paths, "--svg", "x"]) == 2
    capsys.readouterr()
    # As a picture: only seeds give the reward a band.
    assert main(["report", *paths[:2], "--svg", str(tmp_path / "seeds.svg")]) == 0
    _, reward = ElementTree.parse(tmp_path / "seeds.svg").getroot().findall("{*}g")
    assert sum((part.get("class") or "").startswith("band") for part in reward.iter()) == 1


@pytest.mark.parametrize(
    ("completion", "turns"),
    [
        ("just text\nuser\nnot a turn", [("assistant", "just text\nuser\nnot a turn")]),
        (
            "call\nuser\n<tool_response>\n19\n</tool_response>\nassistant\n#### 19",
            [("assistant", "call"), ("tool", "<tool_response>\n19\n</tool_response>"), ("assistant", "#### 19")],
        ),
        (
            "call<|im_end|>\n<|im_start|>tool\n19<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>",
            [("assistant", "call"), ("tool", "19"), ("assistant", "done")],
        ),
    ],
)
def test_conversations_with_tools_are_turns(completion, turns, tmp_path):
    assert turns_of(completion) == turns
    make_run(tmp_path, training_records(1), [sample(1, completion=completion)])
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    roles = [one["class"].split()[1] for _, one in page.elements if one.get("class", "").startswith("role ")]
    assert roles == [role for role, _ in turns] * (len(turns) > 1)
