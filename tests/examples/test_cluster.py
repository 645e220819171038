"""The recipes for clusters call the product's own command, with options that it has."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from mindrlhf.cli import build_parser
from mindrlhf.errors import STOPPED, UserError
from mindrlhf.launch.nodes.place import find_place

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"


@pytest.mark.parametrize("code", [0, 1, 2, STOPPED, 143])
def test_the_job_of_slurm_goes_on_where_it_was_and_is_queued_again_where_it_was_stopped(tmp_path, code):
    for name, ending in (("srun", code), ("scontrol", 0)):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\nexit {ending}\n')
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    command = ["bash", str(CLUSTER / "slurm.sh"), "run.yaml", "run.max_steps=3"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    first, *later = ended.stdout.splitlines()
    assert later == (["scontrol requeue 17"] if code in (STOPPED, 143) else [])
    words = first.split()
    assert words[:3] == ["srun", "--kill-on-bad-exit=0", ".venv/bin/mindrlhf"]
    arguments = build_parser().parse_known_args(words[3:])[0]
    assert (arguments.config, arguments.workers, arguments.nodes) == ("run.yaml", 8, "auto")
    assert "run.max_steps=3" in words and arguments.resume == "auto"


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
    assert arguments.resume == "auto" and pod["terminationGracePeriodSeconds"] >= 600
    # The only policy that pods which are replaced may have; a mistake is not tried again.
    assert pod["restartPolicy"] == "Never"
    evicted, stopped, final = job["spec"]["podFailurePolicy"]["rules"]
    assert (evicted["action"], evicted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    for rule, action, values in ((stopped, "Ignore", [STOPPED, 143]), (final, "FailJob", [UserError.exit_code])):
        codes = {"containerName": container["name"], "operator": "In", "values": values}
        assert (rule["action"], rule["onExitCodes"]) == (action, codes)
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted["memory"] == "/dev/shm" and mounted.keys() == {volume["name"] for volume in pod["volumes"]}


def test_the_cluster_of_kuberay_answers_its_probes_and_takes_jobs():
    cluster = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())["spec"]
    head = cluster["headGroupSpec"]
    # Without a version KubeRay asks by wget; the dashboard answers its probes, and `ray job submit`.
    assert cluster["rayVersion"] and "include-dashboard" not in head["rayStartParams"]
    (container,) = head["template"]["spec"]["containers"]
    assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]
