"""`mindrlhf completion`: what a shell needs to complete commands, options, keys of the config and their values."""

import argparse
import functools
import sys
from collections.abc import Iterable

from mindrlhf.commands.vocabulary import OVERRIDES_HELP

# A word is read from the line: bash parts its words at '=' too, and replaces what comes after the last.
_SCRIPT = """\
_mindrlhf() {{
    local current="${{COMP_LINE:0:COMP_POINT}}" path="" word words
    current="${{current##* }}"
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $word" in
            {paths}) path="$path $word" ;;
        esac
    done
    for word in "$path" "$path ${{COMP_WORDS[COMP_CWORD-1]}}"; do
        case "$word" in
{cases}
        esac
    done
    # Values once their key is there.
    if [[ $current == *=* ]]; then word="*="; else word="*=?*"; fi
    COMPREPLY=($(compgen -W "$words" -X "$word" -- "$current"))
    [[ ${{#COMPREPLY[@]}} == 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace 2>/dev/null
    [[ $current == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${{COMPREPLY[@]#"${{current%=*}}="}}")
    return 0
}}
complete -o default -F _mindrlhf mindrlhf
"""
_ZSH_HEAD = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "completion", help="print a script that completes commands in a shell: source <(mindrlhf completion bash)"
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(run=lambda arguments: _print(arguments.shell, subparsers))


def _print(shell: str, subparsers: argparse._SubParsersAction) -> int:
    words = {"": sorted(subparsers.choices)} | _words(subparsers, "")
    cases = "\n".join(f'            "{path}") words="{" ".join(one)}" ;;' for path, one in words.items())
    paths = "|".join(f'"{path}"' for path in words if path and " -" not in path)
    sys.stdout.write((_ZSH_HEAD if shell == "zsh" else "") + _SCRIPT.format(cases=cases, paths=paths))
    return 0


def _words(subparsers: argparse._SubParsersAction, path: str) -> dict[str, list[str]]:
    """Return what may follow each command: actions, options and keys, by the command's words; and each option."""
    found = {}
    for name, parser in subparsers.choices.items():
        here, words = f"{path} {name}", []
        for action in parser._actions:
            values = list(map(str, action.choices or _names().get(action.dest, ())))
            words += action.option_strings or values
            if isinstance(action, argparse._SubParsersAction):
                found |= _words(action, here)
            elif values:
                found |= {f"{here} {option}": values for option in action.option_strings}
        if parser.epilog == OVERRIDES_HELP:
            words += _keys(name)
        found[here] = words
    return found


def _keys(command: str) -> list[str]:
    from mindrlhf.config.load import CONFIGS
    from mindrlhf.config.parse import dotted_keys

    words = []
    for dotted, field, hint in dotted_keys(CONFIGS.get(command, CONFIGS["train"])):
        values = ("true", "false") if hint is bool else field.metadata["choices"] or _names().get(dotted, ())
        words += [f"{dotted}=", *(f"{dotted}={value}" for value in values)]
    return words


@functools.cache
def _names() -> dict[str, Iterable[str]]:
    """Return what options and keys name that take a user's own too, by the option's destination or the dotted key."""
    from mindrlhf.data.handlers import HANDLERS
    from mindrlhf.data.templates import BUILT_IN
    from mindrlhf.rewards.registry import built_in_names
    from mindrlhf.tools import registry

    verifiers, tools = built_in_names(), registry.BUILT_IN
    found = {"handler": [*HANDLERS, "map_keys"], "template": BUILT_IN, "verifier": verifiers, "names": tools}
    return found | {"reward.verifier_function": verifiers, "evaluation.verifier": verifiers, "tools.names": tools}
