"""The images are made of what the set-up script and the package's extras name; nobody builds them here."""

import re
from pathlib import Path

import pytest

from mindrlhf.doctor.ascend import CANN_PIN
from mindrlhf.doctor.diagnosis import ROLLOUT_PINS, TRAINING_PINS

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
SETUP, SCRIPT = (ROOT / "setup.py").read_text(), (ROOT / "scripts" / "setup.sh").read_text()
ASCEND = (ROOT / "docker" / "ascend.Dockerfile").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_pin_is_one_of_the_packages(path):
    pins = re.findall(r"[a-z][\w.-]*==[\w.]+", path.read_text())
    known = {f"{name}=={version}" for packages in ROLLOUT_PINS.values() for name, version in packages.items()}
    assert [pin for pin in pins if f'"{pin}"' not in SETUP + SCRIPT and pin not in known] == []


def test_the_cpu_image_is_made_by_the_set_up_script_on_its_python():
    text = (ROOT / "docker" / "cpu.Dockerfile").read_text()
    assert "RUN bash scripts/setup.sh" in text
    assert re.findall(r"^FROM python:(\d+\.\d+)", text, re.MULTILINE) == ["3.11"]
    assert "for candidate in python3.11" in SCRIPT


def test_the_ascend_image_has_the_pins_of_both_environments():
    pins = dict(re.findall(r"'([a-z-]+)==([\w.]+)'", ASCEND))
    assert pins == ROLLOUT_PINS["ascend"] | {"mindformers": TRAINING_PINS["mindformers"]}
    (extras,) = re.findall(r"-e '\.\[(.*?)\]'", ASCEND)
    assert set(extras.split(",")) <= set(re.findall(r'^    "([\w-]+)": ', SETUP, re.MULTILINE))
    assert "ascend-train" in extras.split(",")


def test_the_ascend_image_has_the_cann_that_both_environments_ask_for():
    assert re.findall(r"^ARG CANN=\S+:(\d+\.\d+)\.", ASCEND, re.MULTILINE) == [CANN_PIN]
    page = (ROOT / "docs" / "install.md").read_text()
    for name in ("training", "rollout"):
        assert re.search(rf"^\| {name} \|.*\| {CANN_PIN}\.0[ ,]", page, re.MULTILINE)


def test_what_the_images_copy_and_ignore_is_there():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", ".venv-rollout"} <= set(ignored)
    for path in FILES:
        text = path.read_text()
        for script in re.findall(r"scripts/\w+\.sh", text):
            assert (ROOT / script).is_file()
        assert f"docker build -f docker/{path.name} " in text
