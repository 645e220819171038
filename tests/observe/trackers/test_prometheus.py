"""The endpoint for Prometheus, read back as text, as a file, and by Prometheus itself where it is installed."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")

from mindrlhf.observe.trackers import TrackedRun
from mindrlhf.observe.trackers.prometheus import FILE_NAME, Tracker
from mindrlhf.system.ports import PORTS_VARIABLE, find_free_port


@pytest.fixture
def tracker(tmp_path, monkeypatch):
    port = find_free_port()
    monkeypatch.setenv("MINDRLHF_PROMETHEUS_PORT", str(port))
    tracker = Tracker(TrackedRun("numbers", "the run", "a" * 21, tmp_path, {}))
    tracker.port = port
    yield tracker
    tracker.close(is_complete=True)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def values(text: str) -> dict[str, float]:
    found = re.findall(r"^(\w+)\{([^}]*)\} (\S+)$", text, re.M)
    assert {labels for _, labels, _ in found} == {'project="numbers",run="the run"'}
    return {name: float(value) for name, _, value in found}


def test_the_last_step_is_read_as_text_and_from_the_file(tracker, tmp_path):
    tracker.write(1, {"reward/mean": 0.25, "loss": float("nan")})
    tracker.write(2, {"reward/mean": 0.5, "timing/all": 1.5})
    text = read(f"http://127.0.0.1:{tracker.port}/metrics")
    found = values(text)
    assert found.pop("mindrlhf_loss") != found.get("mindrlhf_loss")
    assert found == {"mindrlhf_step": 2, "mindrlhf_reward_mean": 0.5, "mindrlhf_timing_all": 1.5}
    assert (tmp_path / FILE_NAME).read_text() == text
    assert tracker._server.server_address[0] == "127.0.0.1", "on the loopback alone"


def test_its_port_is_one_of_the_run(tmp_path, monkeypatch, capsys):
    first = find_free_port()
    monkeypatch.setenv(PORTS_VARIABLE, f"{first}-{first + 30}")
    tracker = Tracker(TrackedRun("p", "r", "a" * 21, tmp_path, {}))
    port = int(re.search(r"http://127\.0\.0\.1:(\d+)/metrics", capsys.readouterr().out)[1])
    assert first <= port <= first + 30
    tracker.close(is_complete=False)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
@pytest.mark.timeout(120)
def test_prometheus_scrapes_it(tracker, tmp_path):
    tracker.write(7, {"reward/mean": 0.75})
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: mindrlhf\n  static_configs:\n"
        f"  - targets: ['127.0.0.1:{tracker.port}']\n"
    )
    port = find_free_port()
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    log = (tmp_path / "log").open("w")
    with subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            found, end_s = [], time.monotonic() + 60
            while not found and time.monotonic() < end_s:
                time.sleep(0.5)
                try:
                    answer = json.loads(read(f"http://127.0.0.1:{port}/api/v1/query?query=mindrlhf_reward_mean"))
                    found = answer["data"]["result"]
                except (urllib.error.URLError, ConnectionError):
                    continue
        finally:
            server.terminate()
    assert [(one["metric"]["run"], one["value"][1]) for one in found] == [("the run", "0.75")]
