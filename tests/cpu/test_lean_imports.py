"""What the rollout server imports of vLLM on a CPU, in fresh interpreters of the rollout environment."""

import os
import subprocess
from pathlib import Path

import pytest

import mindrlhf

LEAN = """
import importlib.util, sys
from mindrlhf.cpu.rollout.lean_imports import lean_imports
with lean_imports():
    from mindrlhf.rollout.server import engine
loaded = {"torch._inductor.lowering", "openai", "opentelemetry", "vllm.parser"} & sys.modules.keys()
assert not loaded, f"{loaded} are loaded"

import transformers.models
from transformers.utils import import_utils
kept = import_utils.create_import_structure_from_path(transformers.models.__file__)
assert kept == import_utils.create_import_structure_from_path(transformers.models.__path__[0])
fresh = importlib.util.spec_from_file_location("fresh", import_utils.__file__, submodule_search_locations=[])
fresh_module = importlib.util.module_from_spec(fresh)
fresh_module.__package__ = "transformers.utils"
fresh.loader.exec_module(fresh_module)
assert kept == fresh_module.create_import_structure_from_path(transformers.models.__path__[0])

import openai, opentelemetry.trace, torch, vllm.parser, vllm.renderers.chat_utils
assert vllm.renderers.chat_utils.parse_chat_messages

from torch._inductor import lowering
assert "vllm::anything" in lowering.FALLBACK_ALLOW_LIST, "vLLM's change of the compiler is made when that is loaded"

calls = []
@torch.compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward)
def double(x):
    "Doc."
    return 2 * x
assert double.__doc__ == "Doc." and not calls
assert double(torch.ones(2)).tolist() == [2, 2] and len(calls) == 1
assert double(torch.ones(2)).tolist() == [2, 2] and len(calls) == 1, "compiled once"
"""
UNKNOWN = """
import sys
from mindrlhf.cpu.rollout import lean_imports as module
module._KNOWN = {"torch": "0.0"}
finders = list(sys.meta_path)
with module.lean_imports():
    assert "torch" not in sys.modules and sys.meta_path == finders and "opentelemetry" not in sys.modules
"""


@pytest.mark.parametrize("program", [LEAN, UNKNOWN])
def test_what_is_left_out_can_be_had_afterwards_and_other_versions_are_left_alone(rollout_python, program):
    packages = str(Path(mindrlhf.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": packages, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [rollout_python, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
