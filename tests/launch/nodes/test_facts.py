"""What nodes compare before anything starts: one line for each difference, with its fix."""

import os

import pytest

from mindrlhf.config.algorithm import AlgorithmSection
from mindrlhf.config.model import ModelSection
from mindrlhf.config.run import DataSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError
from mindrlhf.launch.nodes.facts import Fact, as_message, differences
from mindrlhf.launch.nodes.secret import SECRET_NAME, SECRET_VARIABLE, make_secret, remove_secret, wait_for_secret
from mindrlhf.launch.nodes.shared import own_facts, probes, shared_facts
from mindrlhf.training.facts import graph_facts, tree_digest


def facts(**values: object) -> dict:
    return as_message([Fact(name, value, f"mend {name}") for name, value in values.items()])


def test_equal_nodes_have_no_differences():
    assert differences({0: facts(a=1, b="x"), 1: facts(b="x", a=1)}) == []


def test_each_difference_is_a_line_that_names_the_nodes_and_the_fix():
    found = differences({0: facts(a=1, b="x", c=[1]), 1: facts(a=2, b="x", c=[1]), 2: facts(a=1, b="y")})
    assert found == [
        "a is 1 on nodes 0, 2, 2 on node 1: mend a",
        'b is "x" on nodes 0, 1, "y" on node 2: mend b',
        "c is [1] on nodes 0, 1, missing on node 2: mend c",
    ]


def test_many_differences_are_counted():
    found = differences({0: facts(**{f"n{i}": 0 for i in range(30)}), 1: facts(**{f"n{i}": 1 for i in range(30)})})
    assert len(found) == 20 and found[-1] == "and 11 differences more"


def test_a_directory_is_shared_when_the_number_is_there(tmp_path):
    directories = {"run.output_dir": tmp_path / "shared", "checkpoint.save_dir": tmp_path / "shared" / "checkpoints"}
    elsewhere = {"run.output_dir": tmp_path / "shared", "checkpoint.save_dir": tmp_path / "own"}
    with probes(directories) as numbers:
        first = as_message(shared_facts(directories, None))
        assert differences({0: first, 1: as_message(shared_facts(directories, numbers))}) == []
        (line,) = differences({0: first, 1: as_message(shared_facts(elsewhere, numbers))})
    assert line.startswith('checkpoint.save_dir is "the directory of node 0" on node 0, "another directory, ')
    assert line.endswith("put it on a file system that all nodes mount, at the same place")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_the_digest_of_a_tree_sees_names_sizes_beginnings_and_ends(tmp_path):
    (tmp_path / "a").mkdir()
    data = bytearray(os.urandom(300_000))
    path = tmp_path / "a" / "model.safetensors"
    digests = []
    for change in (0, 10, 299_999):
        data[change] ^= 1
        path.write_bytes(data)
        digests.append(tree_digest(tmp_path, "*"))
    path.write_bytes(data + b"x")
    digests.append(tree_digest(tmp_path, "*"))
    path.rename(tmp_path / "a" / "other.safetensors")
    digests.append(tree_digest(tmp_path, "*"))
    assert len(set(digests)) == 5
    assert digests[-1] == tree_digest(tmp_path, "*") != tree_digest(tmp_path, "*.py")


def test_compiled_graphs_depend_on_the_configs_of_models_wherever_they_lie(tmp_path):
    for name in ("student", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    config = GrpoConfig(
        model=ModelSection(path=str(tmp_path / "student"), reference_path=str(tmp_path / "teacher")),
        data=DataSection(train_file="t", tokenizer_dir="t"),
        algorithm=AlgorithmSection(name="distill", advantage="distill", beta=1.0, kl_in="reward"),
    )
    teacher = tmp_path / "teacher" / "config.json"
    facts = graph_facts(config)
    assert not any(str(tmp_path) in fact for fact in facts)
    teacher.write_text('{"rope_theta": 5}')
    assert set(graph_facts(config)) - set(facts) == {'{"rope_theta": 5}'}


def test_the_secret_is_a_file_that_only_its_user_can_read(tmp_path, monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    secret = make_secret(tmp_path / "run")
    path = tmp_path / "run" / SECRET_NAME
    assert len(secret) == 64 and path.stat().st_mode & 0o777 == 0o600
    assert make_secret(tmp_path / "run") == secret == wait_for_secret(tmp_path / "run", 0)
    path.chmod(0o644)
    with pytest.raises(UserError, match="is not yours alone"):
        wait_for_secret(tmp_path / "run", 0)
    remove_secret(tmp_path / "run")
    with pytest.raises(UserError, match="node 0 has not made .* or set MINDRLHF_SECRET"):
        wait_for_secret(tmp_path / "run", 0.1)


def test_the_secret_of_the_environment_wins_and_short_ones_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "0123456789abcdef")
    assert make_secret(tmp_path) == wait_for_secret(tmp_path, 0) == b"0123456789abcdef"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(SECRET_VARIABLE, "0123456789abcde")
    with pytest.raises(UserError, match="has 15 characters"):
        make_secret(tmp_path)


def test_the_ranks_do_not_get_the_secret(monkeypatch):
    from mindrlhf.launch.launch import worker_environment

    monkeypatch.setenv(SECRET_VARIABLE, "0123456789abcdef")
    assert SECRET_VARIABLE not in worker_environment(2, {})


def test_a_disk_that_is_to_be_of_each_nodes_own_but_is_shared_is_named(tmp_path):
    own, other = ({"checkpoint.save_dir": tmp_path / name} for name in ("own", "other"))
    with probes(own) as numbers:
        facts = {0: as_message(own_facts(own, None)), 1: as_message(own_facts(other, numbers))}
        assert differences(facts) == []
        (line,) = differences({**facts, 2: as_message(own_facts(own, numbers))})
    assert 'a disk of each node" on nodes 0, 1' in line and 'the directory of node 0" on node 2: name a dir' in line
