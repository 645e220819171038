"""What one has to read to follow a step: that the walk sees what a reader would, and that it does not become more."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import reading  # noqa: E402

# What `python scripts/reading.py` prints: files and lines that count, and lines that are taken at their names. A change
# may lower these, and then lowers them here.
MOST_FILES, MOST_LINES, MOST_LINES_LEFT_OUT = 55, 11645, 12967


@pytest.fixture(scope="module")
def step() -> reading.Reading:
    return reading.read_step()


def test_a_step_is_no_longer_to_read_than_it_was(step):
    numbers = len(step.lines), step.num_lines, sum(step.left_out.values())
    most = MOST_FILES, MOST_LINES, MOST_LINES_LEFT_OUT
    assert all(number <= bound for number, bound in zip(numbers, most)), f"{numbers} files and lines; bounds: {most}"


def test_the_walk_goes_through_all_processes_of_a_step_and_through_no_other_algorithm(step):
    assert next(iter(step.lines)) == "mindrlhf.training.life_cycle"
    called = {f"{module}:{name}" for module, names in step.functions.items() for name in names}
    ways = ("Team.call[update]", "Dispatcher.add", "VllmGenerator.generate", "VllmEngine.submit")
    ways += ("PolicyLogProbs.construct", "WeightBuffer.write")
    assert [way for way in ways if not any(one.endswith(f":{way}") for one in called)] == []
    others = ("sharded_updates", "sharded_cells", "sharded_losses", "critic", "value_function", "pipelined", "segments")
    others += ("lora", "tools", "elastic", "multi_node")
    assert [module for module in step.lines if module.rpartition(".")[2] in others] == []


def test_every_exception_of_the_walk_is_still_there():
    sources = reading.Sources(ROOT / reading.PACKAGE)
    named = {*reading.ASSUMED, *reading.CUT, *reading.LEFT_OUT, *reading.COUNTED}
    known = {*sources.scopes, *sources.paths, *(module.rpartition(".")[0] for module in sources.paths)}
    assert named - known == set()
    sections = {name.rpartition(":")[2] for name in sources.scopes if name.startswith("mindrlhf.config.")}
    assert {section for section, _ in reading.SETTINGS} <= sections


SOURCES = {
    "__init__.py": "",
    "run.py": """
from pack.loop import Loop
from pack.team import Team
from pack.workers import Fast, Worker

def make(is_fast):
    return Fast() if is_fast else Worker()

def main():
    team = Team(make(False))
    Loop({"team": team, "finish": lambda: team.close()}).step()
""",
    "loop.py": """
class Loop:
    def __init__(self, parts):
        self._team = parts["team"]
        self._finish = parts["finish"]
        self._records = []

    def step(self):
        self._records.append(self._team.call("update"))
        for record in self._records:
            record.show()
        self._finish()
""",
    "team.py": """
class Team:
    def __init__(self, worker):
        self.worker = worker

    def call(self, method):
        return getattr(self.worker, method)()

    def close(self):
        from pack import ending
        ending.end()
""",
    "workers.py": """
from pack.records import Record, Unused

class Worker:
    def update(self):
        return Record()

    def other(self):
        return Unused().show()

class Fast(Worker):
    def update(self):
        from pack import fast
        return fast.update()
""",
    "records.py": "class Record:\n    def show(self):\n        pass\n\nclass Unused(Record):\n    pass\n",
    "fast.py": "def update():\n    pass\n",
    "ending.py": "def end():\n    pass\n",
}


def test_calls_are_followed_through_attributes_containers_names_and_constants(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    for name, source in SOURCES.items():
        (package / name).write_text(source)
    walk = reading.Walk(reading.Sources(package))
    walk.solve(["pack.run:main"])
    order = reading.reading_order(walk, ["pack.run:main"])
    assert [name for name in order if "<" not in name] == [
        *("pack.run:main", "pack.run:make", "pack.workers:Worker", "pack.team:Team", "pack.team:Team.__init__"),
        *("pack.loop:Loop", "pack.loop:Loop.__init__", "pack.loop:Loop.step", "pack.team:Team.call[update]"),
        *("pack.workers:Worker.update", "pack.records:Record", "pack.records:Record.show"),
        *("pack.team:Team.close", "pack.ending:end"),
    ]
