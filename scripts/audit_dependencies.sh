#!/usr/bin/env bash
# Audits what setup.sh has installed, in both environments: known vulnerabilities (pip-audit, which asks osv.dev about
# every installed version) and licences.
#
#   bash scripts/audit_dependencies.sh [--licences-only]
#
# Exit code 0: nothing found. 1: a vulnerability, or a licence that is neither permissive nor explained below. 2: wrong
# use. 3: licences are fine, but vulnerabilities could not be looked up.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
readonly ROOT
readonly ENVIRONMENTS=("$ROOT/.venv" "$ROOT/.venv-rollout")
readonly PIP_AUDIT="pip-audit>=2.7,<3"

say() { printf 'audit: %s\n' "$*"; }

with_vulnerabilities=1
for argument in "$@"; do
    case "$argument" in
        --licences-only) with_vulnerabilities=0 ;;
        *)
            say "unknown option $argument: give --licences-only, or nothing" >&2
            exit 2
            ;;
    esac
done

# Its own environment: an auditor must not be what it audits.
scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT

# print_licences PYTHON: a line for every package; fails when one is neither permissive nor explained.
print_licences() {
    "$1" -I - <<'PYTHON'
import importlib.metadata
import re
import sys

# SPDX names, and what packages write in their place.
PERMISSIVE = re.compile(
    r"apache[- ]?(software )?(license)?,? ?(version )?v?(2\.0)?( license)?( with llvm-exception)?"
    r"|(3-clause )?bsd([- ][23]-clause)?( license)?|bsd-derived .*|0bsd|bsl-1\.0|cc0-1\.0|cnri-python"
    r"|isc( license)?( \(iscl\))?|mit(-0|-cmu)?( license)?|mulanpsl-2\.0|psf-2\.0|python software foundation license"
    r"|(the )?unlicense( \(unlicense\))?",
    re.IGNORECASE,
)
IN_ITS_FILE = "its licence file is the Apache License 2.0, though its metadata do not say so"
UNCHANGED = "used unchanged as a library of its own, never copied into this code"
EXPLAINED = {
    "certifi": f"MPL-2.0: {UNCHANGED}",
    "hypothesis": f"MPL-2.0: for the tests only; {UNCHANGED}",
    "intel-cmplr-lib-ur": "Intel's own: free to use and redistribute; the CPU build of vLLM asks for it",
    "intel-openmp": "Intel's own: free to use and redistribute; the CPU build of vLLM asks for it",
    "mindpet": IN_ITS_FILE,
    "mindrlhf": "this project",
    "oss-harmony": IN_ITS_FILE,
    "pycountry": f"LGPL-2.1-only: vLLM's dependencies ask for it; {UNCHANGED}",
    "rouge-chinese": IN_ITS_FILE,
    "setuptools": "MIT: in its licence file",
    "tqdm": f"MPL-2.0 AND MIT: {UNCHANGED}",
}


def licence(metadata):
    """The SPDX expression, else the classifiers, else the first line of the old field."""
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [entry for entry in metadata.get_all("Classifier") or [] if entry.startswith("License")]
    names = [entry.rpartition(" :: ")[2] for entry in classifiers]
    names = [name for name in names if name not in ("OSI Approved", "DFSG approved")]
    return " OR ".join(names) or ((metadata.get("License") or "").strip().splitlines() or ["not given"])[0]


def is_permissive(text):
    """One of the alternatives is enough, and all parts of it are needed."""
    alternatives = [alternative.split(" AND ") for alternative in text.split(" OR ")]
    return any(all(PERMISSIVE.fullmatch(part.strip()) for part in parts) for parts in alternatives)


found = {}
for distribution in importlib.metadata.distributions():
    name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
    found[name] = (distribution.version, licence(distribution.metadata))
bad = []
for name, (version, text) in sorted(found.items()):
    remark = ""
    if not is_permissive(text):
        remark = f"  <- {EXPLAINED.get(name, 'NOT PERMISSIVE, and not explained in this script')}"
        bad += [name] if name not in EXPLAINED else []
    print(f"  {name} {version}: {text}{remark}")
verdict = f"refused: {', '.join(bad)}" if bad else "all licences are permissive or explained"
print(f"  {len(found)} packages; {verdict}")
sys.exit(1 if bad else 0)
PYTHON
}

# print_pins PYTHON: NAME==VERSION of every installed package. A local build, such as 2.13.0+cpu, has the
# vulnerabilities of its release, under whose version they are listed.
print_pins() {
    "$1" -I - <<'PYTHON'
import importlib.metadata

pins = {d.metadata["Name"].lower(): d.version.partition("+")[0] for d in importlib.metadata.distributions()}
pins.pop("mindrlhf", None)
print("\n".join(f"{name}=={version}" for name, version in sorted(pins.items())))
PYTHON
}

# audit PYTHON: 0 nothing found, 1 vulnerabilities, 3 the database did not answer.
audit() {
    local requirements="$scratch/requirements.txt" report="$scratch/report.txt"
    print_pins "$1" >"$requirements"
    # --strict: a package that was skipped has not been audited.
    if "$scratch/venv/bin/pip-audit" --vulnerability-service osv --strict --disable-pip --no-deps --timeout 30 \
        --progress-spinner off --requirement "$requirements" >"$report" 2>&1; then
        say "no known vulnerabilities in $(wc -l <"$requirements") packages"
        return 0
    fi
    if grep -qE '^Found [0-9]+ known vulnerabilit' "$report"; then
        grep -v '^WARNING' "$report"
        return 1
    fi
    if grep -qE 'ConnectionError|Timeout|timed out|HTTPError|ServiceError' "$report"; then
        say "the database of vulnerabilities (api.osv.dev) cannot be reached from here, so nothing is known about them:"
        say "run this where there is a network"
    else
        say "pip-audit failed: $(tail -n 1 "$report" | cut -c 1-200)"
    fi
    return 3
}

if ((with_vulnerabilities)); then
    if ! { python3 -m venv "$scratch/venv" && "$scratch/venv/bin/python" -m pip install --quiet "$PIP_AUDIT"; } \
        >"$scratch/install.txt" 2>&1; then
        say "pip-audit could not be installed: $(tail -n 1 "$scratch/install.txt" | cut -c 1-200)" >&2
        with_vulnerabilities=0
        unknown=1
    fi
fi

status=0 unknown="${unknown:-0}" num_environments=0
for environment in "${ENVIRONMENTS[@]}"; do
    python="$environment/bin/python"
    if [[ ! -x "$python" ]]; then
        say "no ${environment##*/}: made by bash scripts/setup.sh"
        continue
    fi
    num_environments=$((num_environments + 1))
    say "licences in ${environment##*/}"
    print_licences "$python" || status=1
    if ((with_vulnerabilities)); then
        say "vulnerabilities in ${environment##*/}"
        result=0
        audit "$python" || result=$?
        if ((result == 1)); then status=1; fi
        if ((result == 3)); then unknown=1; fi
    fi
done
if ((num_environments == 0)); then
    say "there is nothing to audit" >&2
    exit 2
fi
if ((status == 0 && unknown)); then status=3; fi
exit "$status"
