"""docs/environment.md names every environment variable that the sources name, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "environment.md"
# What looks like one: names of file formats, architectures, system limits, words of help texts.
OTHERS = {
    *("ADAPTER_DIR", "CONFIG_JSON", "HF_DIR", "MF_DIR", "RUN_DIR", "BYTE_ARRAY", "CAUSAL_LM", "SEQ_CLS", "F8_E4M3"),
    *("CPU_MLA", "DEEPSEEK_V3", "GLM4_MOE", "QWEN2_5_VL", "QWEN2_VL", "QWEN3_MOE", "QWEN3_VL", "FIRST_EXCEPTION"),
    *("LOAD_DEREF", "LOAD_FAST", "NEEDS_ADVANTAGE", "SC_CLK_TCK", "SC_OPEN_MAX", "SC_PAGE_SIZE", "STRICT_SPREAD"),
}


def named_in_sources() -> set[str]:
    found = set()
    for path in (ROOT / "mindrlhf").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"\A[A-Z][A-Z0-9]*_[A-Z0-9_]{2,}\Z", node.value))
    return found - OTHERS


def test_the_page_has_every_variable_and_no_other():
    named = set(re.findall(r"`([A-Z][A-Z0-9]*_[A-Z0-9_]+)`", PAGE.read_text(encoding="utf-8")))
    found = named_in_sources()
    assert len(found) > 60
    # HCCL's own, which nothing reads: the operator's.
    assert found - named == set() and named - found <= {"HCCL_IF_IP"}
