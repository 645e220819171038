"""What a browser draws of the report and of the page of samples: on a wide screen, on a phone, in the dark."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from mindrlhf.observe.report import write_report
from mindrlhf.observe.viewer.page import render_page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
LONG = "a_word_without_any_room_to_break_" * 12


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The report and the page of samples of a run with long words and many charts."""
    run_dir = tmp_path_factory.mktemp("run")
    names = ("reward/mean", "reward/a/mean", "reward/b/mean", "entropy", "loss", "grad_norm", "lr", "timing/all")
    records = [{"step": step, **{name: step / (2 + len(name)) for name in names}} for step in range(1, 30)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sample = {"prompt": LONG, "completion": f"{LONG}\n{LONG}", "answer": LONG, "reward": 0.25, "finish_reason": "stop"}
    samples = [{**sample, "step": step, "rewards": {"a": 0.5, "b": 0.0}} for step in range(1, 30)]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    (run_dir / "config.yaml").write_text(f"run: {{output_dir: {LONG}}}\n")
    (run_dir / "samples.html").write_text(render_page([run_dir]))
    return {"report": write_report(run_dir), "samples": run_dir / "samples.html"}


def picture(page, tmp_path, width, height, is_dark):
    """Return what is drawn, uint8 [height, width, 3]."""
    path = tmp_path / "picture.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},{height}", f"--screenshot={path}"]
    options += [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"]
    subprocess.run([BROWSER, *options, f"file://{page}"], capture_output=True, timeout=200, check=True)
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["report", "samples"])
@pytest.mark.parametrize(("width", "is_dark"), [(1400, False), (390, True)], ids=["wide", "phone in the dark"])
def test_nothing_is_cut_off_and_text_stands_out(pages, tmp_path, name, width, is_dark):
    drawn = picture(pages[name], tmp_path, width, 2600, is_dark)
    background = drawn[0, 0].astype(int)
    assert background.mean() < 40 if is_dark else background.mean() > 215
    # Both margins are empty: nothing is wider than the screen.
    for edge in (drawn[:, :8], drawn[:, -8:]):
        assert np.abs(edge.astype(int) - background).max() <= 2
    brightness = drawn.mean(axis=2)
    assert (brightness > 200 if is_dark else brightness < 60).mean() > 0.002, "hardly any text can be read"
