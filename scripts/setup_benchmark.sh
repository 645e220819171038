#!/usr/bin/env bash
# Makes .venv-bench, the environment in which `python scripts/benchmarks trl` measures Hugging Face TRL.
# Nothing of MindRLHF is installed in it. Run again at any time: what is already right is left as it is.
#   PYTHON=python3.11 bash scripts/setup_benchmark.sh
set -euo pipefail

TORCH="torch==2.13.0+cpu"
PACKAGES=("trl==1.16.0" "transformers==5.19.0")
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# An environment that is active in the caller's shell must not leak into the new one.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
PYTHON="${PYTHON:-python3.11}"
VENV=".venv-bench"

fail() {
    echo "setup_benchmark: $1" >&2
    exit 1
}

command -v "$PYTHON" >/dev/null || fail "no interpreter '$PYTHON'; name one with PYTHON=/path/to/python3.11"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV" || fail "cannot make $VENV with '$PYTHON'"
pip() { "$VENV/bin/python" -m pip "$@"; }

# The build without CUDA lives among locally configured wheels or on PyTorch's own index, never on PyPI.
install_torch() {
    pip install --quiet "$TORCH" 2>/dev/null || pip install --quiet "$TORCH" --index-url "$TORCH_CPU_INDEX"
}
install_torch || fail "could not install $TORCH, neither from the configured sources nor from $TORCH_CPU_INDEX"

# The constraint keeps pip from replacing the CPU build by the CUDA build of the same release.
constraints="$(mktemp)"
trap 'rm -f "$constraints"' EXIT
echo "$TORCH" >"$constraints"
pip install --quiet --constraint "$constraints" "${PACKAGES[@]}" || fail "could not install ${PACKAGES[*]}"

# From PyPI these are CUDA builds that break the import of transformers; text models do not need them.
pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true

if pip list --format=freeze | grep -iqE '^(nvidia-|cuda-|triton)'; then
    fail "CUDA packages got into $VENV; remove the folder and run again"
fi
"$VENV/bin/python" - <<'PYTHON_CHECK' || fail "$VENV does not import TRL's GRPOTrainer; remove the folder and run again"
import torch
from trl import GRPOTrainer  # noqa: F401

assert not torch.version.cuda, f"torch {torch.__version__} is a CUDA build"
PYTHON_CHECK
echo "setup_benchmark: $VENV is ready: $(pip list --format=freeze | grep -E '^(torch|trl|transformers)==' | tr '\n' ' ')"
