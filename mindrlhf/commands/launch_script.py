"""The commands of a launch script, which bash itself runs in the sandbox: without network, programs or files."""

import re

from mindrlhf.errors import UserError
from mindrlhf.sandbox.run import SandboxLimits, run_files
from mindrlhf.sandbox.server import active_layers, is_strong

_LIMITS = SandboxLimits(time_s=10.0)
_MAIN = "import os\nos.execve('/bin/bash', ['bash', '--norc', '--noprofile', 'prelude.sh'], {'PATH': '/none'})\n"
# The log that a command writes, whose directory is not there.
_TARGET = r"""(?:"[^"\n]*"|\$\([^()\n]*\)|[^\s;|&()<>"'])+"""
_LOG = re.compile(rf"\s(?:[12&]?>>?)[ \t]*(?!&){_TARGET}(?=(?:[ \t]+2>&1)?[ \t]*[&\\]?[ \t]*$)", re.MULTILINE)
# No program is found, so bash hands each to a function, which writes down its words (count first, each ended by NUL)
# and takes it to succeed; in place of its output `$(...)` has its name. Nothing ends the script early.
_PRELUDE = r"""
exec 9>&1 >/dev/null 2>&1
set -f
command_not_found_handle() {
    [[ $1 != tee && " $*" =~ \ --|\..*= ]] && printf '%s\0' "$#" "$@" >&9
    local word before= option=
    for word in "$@"; do
        [[ $before =~ (^|/)(ba)?sh$ && $option == -*c ]] && eval "$word"
        before=$option option=$word
    done
    [[ $2 == -c && $3 != *print* ]] || printf '$(%s)' "$1"
}
basename() { local path=${1%/}; printf %s "${path##*/}"; }
dirname() { [[ $1 == */* ]] && printf %s "${1%/*}" || printf .; }
exec() { [[ $# == 0 ]] || "$@"; }
exit() { [[ ${1:-0} != 0 ]] || { wait; builtin exit 0; }; }
cd() { :; }
pwd() { printf '$PWD'; }
source() { :; }
.() { :; }
set -T
trap 'set +eux' DEBUG
"""


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each program that a script starts, in order.

    The script starts without arguments. Variables that it neither sets nor asks for stand for themselves (``$HOME``),
    programs within words by name (``$(date)``).

    Raises:
        UserError: the sandbox cannot hold a stranger's script on this machine, or the script does not end.
    """
    if not is_strong(active_layers()):
        raise UserError(
            "a launch script is run in the sandbox, which has too few isolation layers here: give the "
            "resolved YAML that the other stack prints or saves"
        )
    variables = "".join(f"{name}='${name}'\n" for name in sorted(_unset_names(text)))
    prelude = f"{_PRELUDE}{variables}builtin . ./script.sh\nwait\n"
    files = {"main.py": _MAIN, "prelude.sh": prelude, "script.sh": _LOG.sub("", text)}
    try:
        run = run_files(files, "main.py", limits=_LIMITS)
    except OSError as error:
        raise UserError(f"the launch script cannot be run ({error}): give the resolved YAML") from None
    if run.stderr:  # what the script says goes elsewhere
        raise UserError(f"bash cannot be run ({run.stderr.splitlines()[-1]}): give the resolved YAML")
    if "limit" in run.ending:
        raise UserError(f"the launch script does not end here ({run.ending}): give the resolved YAML")
    words = iter(run.stdout.split("\0")[:-1])
    try:
        return [[next(words) for _ in range(int(count))] for count in words]
    except (ValueError, StopIteration):
        raise UserError("the launch script writes to descriptor 9 itself: give the resolved YAML") from None


def _unset_names(text: str) -> set[str]:
    """Return variables that a script requires, or uses without a test, a default or setting them."""
    used = set(re.findall(r"\$\{?([A-Za-z_]\w*)\}?", text))
    set_here = re.findall(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\+?=|\bfor\s+(\w+)", text)
    read_here = re.findall(r"\b(?:read|mapfile|local|declare|export)\s+(?:-\w+\s+)*(\w+)", text)
    asked = re.findall(r"\$\{([A-Za-z_]\w*)(?::?[-=+]|\[)|-[znv]\s+\"?\$?\{?(\w+)", text)
    required = re.findall(r"\$\{([A-Za-z_]\w*):?\?", text)
    known = {name for pair in (*set_here, *asked) for name in pair} | set(read_here)
    return {"HOME", "PWD", "USER", *required} | {name for name in used - known if not name.startswith("BASH")}
