"""The page of samples: what it holds, and what a browser makes of it."""

import base64
import gzip
import json
import re
import shutil
import subprocess

import pytest

from mindrlhf.cli import main
from mindrlhf.observe.viewer import page as page_module
from mindrlhf.observe.viewer.page import render_page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"


def record(step, prompt, completion, reward, **more):
    return {
        "step": step,
        "prompt": prompt,
        "completion": completion,
        "answer": "4",
        "reward": reward,
        "rewards": {"accuracy_reward": reward, "format_reward": 1.0},
        "finish_reason": "stop",
        **more,
    }


@pytest.fixture
def make_run(tmp_path):
    def make(name, records):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
        return directory

    return make


def write_page(runs, path):
    path.write_text(render_page(runs), encoding="utf-8")
    return path


def data_of(path):
    packed = re.search(r'<script type="text/plain" id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def dom(path, fragment=""):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    finished = subprocess.run([*command, f"file://{path}{fragment}"], capture_output=True, text=True, timeout=120)
    return finished.stdout


def items(text):
    """The completions that the list shows, from the top."""
    return re.findall(r'class="step">(\d+)</span><span>(.*?)</span>', text)


def test_the_page_holds_every_sample_and_each_prompt_once(make_run, tmp_path):
    run = make_run("run", [record(step, f"p{step % 3}", f"c{step}", step / 10) for step in range(1, 11)])
    (data,) = data_of(write_page([run], tmp_path / "page.html"))["runs"]
    assert data["prompts"] == ["p1", "p2", "p0"]
    assert [(row[0], data["prompts"][row[1]], row[2], row[4]) for row in data["rows"]] == [
        (step, f"p{step % 3}", f"c{step}", step / 10) for step in range(1, 11)
    ]
    assert data["verifiers"] == ["accuracy_reward", "format_reward"]
    assert data["rows"][0][5] == [0.1, 1.0]


def test_the_list_shows_a_prompt_from_its_question_on(make_run, tmp_path):
    chat = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n"
    run = make_run("run", [record(1, chat, "c", 1.0), record(1, "plain", "c", 1.0)])
    (data,) = data_of(write_page([run], tmp_path / "page.html"))["runs"]
    shown = [text[begin:] for text, begin in zip(data["prompts"], data["begins"])]
    assert shown == ["Q?<|im_end|>\n<|im_start|>assistant\n", "plain"]


def test_steps_choose_the_samples(make_run, tmp_path, capsys, monkeypatch):
    run = make_run("run", [record(step, f"p{step}", "c" * 10, 0.0) for step in range(1, 11)])
    assert main(["view", str(run), "--steps", "3:5"]) == 0
    assert [row[0] for row in data_of(run / "samples.html")["runs"][0]["rows"]] == [3, 4, 5]
    monkeypatch.setattr(page_module, "MAX_PAGE_CHARS", 45)
    assert main(["view", str(run), "--steps", "7:"]) == 0
    for words, message in (([], "--steps 0:4"), (["--steps", "20:"], "no samples of steps that are finished")):
        assert main(["view", str(run), *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["view", str(run), "--steps", "7"])
    assert "write FIRST:LAST, as in 90:100" in capsys.readouterr().err


def test_mistakes_are_one_line(make_run, tmp_path, capsys):
    empty = make_run("empty", [])
    broken = make_run("broken", [{"step": 1}])
    for runs, words in (
        ([tmp_path / "none"], "no samples in"),
        ([empty], "no samples of steps"),
        ([broken], "a line that is no sample"),
        ([empty] * 3, "3 runs were given"),
    ):
        assert main(["view", *map(str, runs)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


@needs_browser
def test_a_browser_shows_sorts_and_filters(make_run, tmp_path):
    records = [record(step, f"<|im_start|>user\nprompt {step}", f"text {step}", (step * 7) % 10) for step in range(30)]
    page = write_page([make_run("run", records)], tmp_path / "page.html")
    text = dom(page)
    assert "30 of 30 samples" in text and '<span class="role">user</span>' in text
    assert items(text)[:3] == [("0", "text 0"), ("1", "text 1"), ("2", "text 2")]
    text = dom(page, "#order=-score&low=8&to=19")
    # (step * 7) % 10 is 9 at steps 7 and 17, 8 at 4 and 14.
    assert "4 of 30 samples" in text
    assert [step for step, _ in items(text)] == ["7", "17", "4", "14"]
    assert "1 of 30 samples" in dom(page, "#text=prompt%2029")


@needs_browser
def test_text_of_samples_is_never_markup(make_run, tmp_path):
    text = dom(write_page([make_run("run", [record(1, HOSTILE, HOSTILE, 1.0)])], tmp_path / "page.html"))
    assert "<title>run · MindRLHF samples</title>" in text and "1 of 1 samples" in text
    assert "<img" not in text and "&lt;/script&gt;&lt;script&gt;" in text


@needs_browser
def test_tokens_are_shaded_by_their_values(make_run, tmp_path):
    tokens = {"tokens": ["a", "b", "c"], "advantages": [1.0, -0.5, 0.0], "rollout_logprobs": [-1.0, -2.0, -0.1]}
    text = dom(write_page([make_run("run", [record(1, "p", "abc", 1.0, **tokens)])], tmp_path / "page.html"))
    shades = re.findall(r'style="background: rgb\(var\(--(good|bad)\) / ([\d.]+)\);?"[^>]*>(.)</span>', text)
    assert shades == [("good", "0.550", "a"), ("bad", "0.275", "b"), ("good", "0.000", "c")]
    assert "the deepest is 1" in text


@needs_browser
def test_two_runs_stand_side_by_side(make_run, tmp_path):
    one = make_run("one", [record(1, "p", "first", 0.0), record(5, "p", "later", 1.0)])
    two = make_run("two", [record(4, "p", "the other", 0.5)])
    text = dom(write_page([one, two], tmp_path / "page.html"), "#from=5")
    assert "one, completion at step 5" in text and "two, completion at step 4" in text and "the other" in text


@needs_browser
def test_a_hundred_thousand_samples(make_run, tmp_path):
    run = make_run("run", (record(step // 100, f"p{step % 500}", f"c{step}", step % 2) for step in range(100_000)))
    text = dom(write_page([run], tmp_path / "page.html"), "#order=-change")
    assert "100,000 of 100,000 samples" in text
    assert 5 < len(items(text)) < 60  # only what can be seen is drawn
