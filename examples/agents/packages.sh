#!/usr/bin/env bash
# Trains the quickstart's model in an environment of another package, which has a Python environment of its own.
#   bash examples/agents/packages.sh verifiers|openenv [section.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
name=$1
shift
recipe=examples/agents
data=runs/agents/$name
case $name in
    verifiers) package='verifiers>=0.4,<0.5' environment=$recipe/problems_taskset.py ;;
    openenv) package='openenv>=0.10,<0.11' environment=$recipe/problems_openenv.py:app ;;
    *) echo "there are verifiers and openenv, not $name" >&2; exit 2 ;;
esac
python=.venv-$name/bin/python
if [ ! -x "$python" ]; then
    .venv/bin/python -m venv ".venv-$name"
    "$python" -m pip install --quiet "$package"
fi
[ -f runs/quickstart/train.jsonl ] || bash examples/quickstart/make_data.sh
mkdir -p "$data"
for split in train test; do
    count=$(wc -l < "runs/quickstart/$split.jsonl")
    "$python" "$recipe/${name}_agent.py" "$environment" "$count" "file=runs/quickstart/$split.jsonl" > "$data/$split.jsonl"
    .venv/bin/mindrlhf data build --input "$data/$split.jsonl" --output "$data/$split.mindrecord" --handler map_keys \
        --map question=question,answer=answer --template qwen --max-prompt-length 96 \
        --tokenizer examples/quickstart/checkpoint
done
.venv/bin/mindrlhf train "$recipe/packages.yaml" run.output_dir="$data/grpo" data.train_file="$data/train.mindrecord" \
    data.eval_file="$data/test.mindrecord" tools.agent="$recipe/${name}_agent.py:agent" tools.agent_python="$python" "$@"
