#!/usr/bin/env bash
# Trains the quickstart's model in an environment of another package, which has a Python environment of its own.
#   bash examples/agents/packages.sh verifiers|openenv|textarena [section.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
name=$1
shift
recipe=examples/agents
data=runs/agents/$name
case $name in
    verifiers) package='verifiers>=0.4,<0.5' environment=$recipe/problems_taskset.py ;;
    openenv) package='openenv>=0.10,<0.11' environment=$recipe/problems_openenv.py:app ;;
    textarena) package='textarena>=0.7.4,<0.8 httpx' environment=Blackjack-v0 ;;
    *) echo "there are verifiers, openenv and textarena, not $name" >&2; exit 2 ;;
esac
python=.venv-$name/bin/python
if [ ! -x "$python" ]; then
    .venv/bin/python -m venv ".venv-$name"
    # shellcheck disable=SC2086  # words
    "$python" -m pip install --quiet $package
fi
build=(.venv/bin/mindrlhf data build --handler map_keys --map question=question,answer=answer --template chat
    --tokenizer examples/quickstart/checkpoint)
source scripts/keep_run.sh
keep_run "$data"
mkdir -p "$data"
if [ "$name" = textarena ]; then
    play=("$python" "$recipe/self_play.py" "$environment" 1)
    "${play[@]}" 200 > "$data/test.jsonl"
    "${play[@]}" 1000 1000 > "$data/train.jsonl"
    "${play[@]}" 250 10000 Hit,Stand > "$data/warm_up.jsonl"
    for split in train test; do
        "${build[@]}" --input "$data/$split.jsonl" --output "$data/$split.mindrecord" --max-prompt-length 256
    done
    .venv/bin/mindrlhf data build --handler trl --template chat --tokenizer examples/quickstart/checkpoint --task sft \
        --input "$data/warm_up.jsonl" --output "$data/warm_up.mindrecord" --max-prompt-length 1100 --max-length 1120
    # The quickstart's model takes 512 tokens, and a game needs more; after the warm-up it plays blindly.
    cp -r examples/quickstart/checkpoint "$data/model"
    sed -i 's/"max_position_embeddings": 512/"max_position_embeddings": 2048/' "$data/model/config.json"
    .venv/bin/mindrlhf sft examples/tools/sft.yaml run.output_dir="$data/warm_up" model.path="$data/model" \
        data.train_file="$data/warm_up.mindrecord" run.max_steps=70 training.rows_per_step=8 \
        training.micro_batch_size=4 training.sequence_lengths='[1120]'
    set -- model.path="$data/warm_up/final" data.eval_file="$data/test.mindrecord" run.max_steps=30 \
        tools.agent="$recipe/self_play.py:agent" tools.max_turns=20 tools.agent_tokens=120 \
        rollout.max_response_length=900 training.sequence_lengths='[1152]' training.micro_batch_size=4 \
        evaluation.max_prompts=200 "$@"
else
    [ -f runs/quickstart/train.jsonl ] || bash examples/quickstart/make_data.sh
    for split in train test; do
        file=runs/quickstart/$split.jsonl
        "$python" "$recipe/${name}_agent.py" "$environment" "$(wc -l < "$file")" "file=$file" > "$data/$split.jsonl"
        "${build[@]}" --input "$data/$split.jsonl" --output "$data/$split.mindrecord" --max-prompt-length 96
    done
    set -- tools.agent="$recipe/${name}_agent.py:agent" data.eval_file="$data/test.mindrecord" "$@"
fi
.venv/bin/mindrlhf train "$recipe/packages.yaml" run.output_dir="$data/grpo" data.train_file="$data/train.mindrecord" \
    tools.agent_python="$python" "$@"
