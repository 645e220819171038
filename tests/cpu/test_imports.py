"""What is imported for good, what is left out of imports (in fresh interpreters), and packages that hold nothing."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from mindrlhf.cpu.imports import lasting_objects, left_out

ROOT = Path(__file__).resolve().parents[2]


class Knot:
    """Can be reached from itself, so that only the collector removes it."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_rests_in_the_body_and_passes_over_its_objects_afterwards():
    with lasting_objects():
        assert not gc.isenabled()
        lasting = weakref.ref(Knot())
    assert gc.isenabled()
    passing = weakref.ref(Knot())
    gc.collect()
    assert lasting() is not None and passing() is None


def test_a_failed_import_leaves_the_collector_on():
    with pytest.raises(ImportError), lasting_objects():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with lasting_objects():
        pass
    assert not gc.isenabled()


def test_a_placeholder_is_there_for_imports_and_refuses_calls():
    with left_out(["left_out_example"]):
        import left_out_example.part
        from left_out_example.part import Thing, function

        class Derived(Thing):
            """Bases are no calls."""

        assert left_out_example.part.other
    for call in (function, Thing, Derived):
        with pytest.raises(ImportError, match="left_out_example.part.* was left out"):
            call(1, name=2)
    with pytest.raises(ModuleNotFoundError):
        __import__("left_out_example")


def test_a_package_that_is_loaded_stays():
    with left_out(["json", "xml"]):
        import json

        assert json.loads("[1]") == [1]


IMPORT = """
import sys, types
from mindrlhf.models.context import UNUSED_PACKAGES, import_mindspore, prepare_mindformers
from mindrlhf.cpu.imports import _Placeholder
assert "mindspore" not in sys.modules
import_mindspore()
prepare_mindformers("cpu", sys.argv[1])
loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(UNUSED_PACKAGES))
assert not loaded, f"{loaded} are loaded"
holders = {
    name.partition(".")[0] for name, module in sys.modules.items() for value in list(vars(module).values())
    if isinstance(value, _Placeholder)
}
assert holders <= {"mindformers", "mindpet", "mindspore"}, f"{holders} have placeholders, and are used by others"
import pandas
assert pandas.DataFrame({"a": [1, 2]})["a"].sum() == 3, "it can be imported afterwards"
from scipy.stats import rankdata
assert rankdata([3, 1]).tolist() == [2, 1], "this too"
"""


def test_mindformers_is_imported_without_what_a_rank_does_not_need(tmp_path):
    done = subprocess.run([sys.executable, "-c", IMPORT, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_part_of_a_package_is_left_out_and_can_be_had_afterwards():
    sys.modules.pop("xml.dom.minidom", None)
    import xml.dom

    vars(xml.dom).pop("minidom", None)
    with left_out(["xml.dom.minidom"]):
        from xml.dom.minidom import Document

        with pytest.raises(ImportError, match="xml.dom.minidom.Document was left out"):
            Document()
        from xml.dom import NotFoundErr  # noqa: F401 - the rest is there
    from xml.dom import minidom

    assert minidom.Document().createElement("a").tagName == "a"


VLLM = """
import sys
from mindrlhf.rollout.server.__main__ import quick_vllm
with quick_vllm():
    from mindrlhf.rollout.server import cpu_engine
loaded = {"torch._inductor.lowering", "openai"} & sys.modules.keys()
assert not loaded, f"{loaded} are loaded"

import openai, torch, vllm.parser, torch._inductor.lowering
calls = []
@torch.compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward)
def double(x):
    return 2 * x
assert double(torch.ones(2)).tolist() == [2, 2] and len(calls) == 1, "what is made later is compiled"
"""


def test_vllm_is_imported_without_what_a_server_does_not_need(rollout_python):
    done = subprocess.run(
        [rollout_python, "-c", VLLM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
