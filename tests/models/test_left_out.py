"""Packages that are left out of MindFormers' import, in fresh interpreters, and placeholders themselves."""

import subprocess
import sys

import pytest

from mindrlhf.models.left_out import left_out


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
from mindrlhf.models.left_out import _Placeholder
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
