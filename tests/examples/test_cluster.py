"""The recipes for clusters call the product's own command, with options that it has."""

import os
import subprocess
from pathlib import Path

import yaml

from mindrlhf.cli import build_parser
from mindrlhf.launch.nodes.place import find_place

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"


def test_the_job_of_slurm_starts_the_command_and_resumes_when_it_is_queued_again(tmp_path):
    program = tmp_path / "srun"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    for restarts in ("", "2"):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | (
            {"SLURM_RESTART_COUNT": restarts} if restarts else {}
        )
        command = ["bash", str(CLUSTER / "slurm.sh"), "run.yaml", "run.max_steps=3"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        words = ended.stdout.split()
        assert words[:2] == ["--kill-on-bad-exit=0", ".venv/bin/mindrlhf"]
        arguments = build_parser().parse_known_args(words[2:])[0]
        assert (arguments.config, arguments.workers, arguments.nodes) == ("run.yaml", 8, "auto")
        assert "run.max_steps=3" in words and (arguments.resume is not None) == bool(restarts)


def test_the_job_of_kubernetes_is_a_node_of_the_run(monkeypatch):
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][0] == "mindrlhf"
    arguments = build_parser().parse_args(container["args"][1:])
    place = find_place(arguments.nodes, arguments.node_rank, arguments.master, {"JOB_COMPLETION_INDEX": "1"})
    assert (place.num_nodes, place.node) == (job["spec"]["completions"], 1)
    assert arguments.master == f"{job['metadata']['name']}-0.{service['metadata']['name']}:8118"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted["memory"] == "/dev/shm" and mounted.keys() == {volume["name"] for volume in pod["volumes"]}
