"""The image of a CPU, built by buildah: what it weighs, and that its quickstart trains, as an ordinary user."""

import os
import shlex
import shutil
import subprocess

import pytest
from sanity_inputs import REPOSITORY
from slow_tests import SLOW

# Of `buildah bud`, for a machine whose packages come from elsewhere: --volume PIP_CONF:/etc/pip.conf:ro.
OPTIONS = shlex.split(os.environ.get("MINDRLHF_BUILD_OPTIONS", ""))
IMAGE = "localhost/mindrlhf-test:cpu"
ISOLATION = ("--isolation", "chroot")  # needs no rights to namespaces
QUICKSTART = "bash scripts/quickstart.sh run.max_steps=2 evaluation.before_training=false"


def buildah(*words: str) -> str:
    done = subprocess.run(["buildah", *words], capture_output=True, text=True, timeout=2700, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout.strip()


@SLOW
@pytest.mark.timeout(4000)
@pytest.mark.skipif(shutil.which("buildah") is None, reason="no buildah is installed")
def test_the_quickstart_of_the_image_trains():
    buildah("bud", *ISOLATION, *OPTIONS, "-f", "docker/cpu.Dockerfile", "-t", IMAGE, ".")
    container = buildah("from", "--pull-never", IMAGE)
    try:
        size, unit = buildah("images", "--format", "{{.Size}}", IMAGE).split()
        assert unit == "GB" and float(size) <= 5
        shell = ("run", *ISOLATION, container, "--", "bash", "-c")
        assert buildah(*shell, "id -un; ls -d tests 2>/dev/null || echo no tests") == "trainer\nno tests"
        said = buildah(*shell, f"{QUICKSTART}; sha256sum runs/quickstart/grpo/final/model.safetensors")
        print(size, unit, said)
        assert "2/2  held-out accuracy" in said and said.endswith("final/model.safetensors")
        assert said.count("is up to date") == 2, "the quickstart makes environments that are there"
    finally:
        buildah("rm", container)
        buildah("rmi", IMAGE)
