"""`mindrlhf rewards`: the verifiers there are, what a reward function does, and scores of completions."""

import argparse
from collections.abc import Mapping
from inspect import Parameter, signature

from mindrlhf.commands.vocabulary import add_template_options, allow_json, print_json
from mindrlhf.system.terminal import visible


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("rewards", help="list, explain, check and run reward functions")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the built-in verifiers")
    listing.set_defaults(run=_list)

    show = actions.add_parser("show", help="what a verifier does, its context and its options")
    show.add_argument("verifier", help="name of a built-in verifier")
    show.set_defaults(run=_show)

    check = actions.add_parser("check", help="run a function and report what is wrong with it")
    check.add_argument("verifier", metavar="FILE.py:function", help="your function, or a built-in verifier")
    check.add_argument("--samples", help="JSON lines with completion and answer (default: built-in examples)")
    check.set_defaults(run=_check, says="checking")

    score = actions.add_parser("score", help="score completions of a file")
    score.add_argument("--verifier", required=True, help="one or more, with commas between")
    score.add_argument("--weight", help="one weight for each, with commas between (default: 1 for each)")
    score.add_argument("--input", required=True, help="JSON lines with completion and answer")
    score.add_argument(
        "--output", default="-", metavar="FILE", help="where to write them with reward and rewards (default: -)"
    )
    score.add_argument("--processes", type=int, default=1, help="verifier processes (default: 1)")
    score.add_argument("--failure-value", type=float, default=0.0, help="reward where a verifier fails (default: 0)")
    score.add_argument("--skip-bad", action="store_true", help="report malformed lines and leave them out")
    score.set_defaults(run=_score, says="scoring")
    _add_serve(actions)
    for action in (listing, show, check):
        allow_json(action)
    for action in (check, score):
        action.add_argument(
            "--option", action="append", default=[], metavar="VERIFIER.OPTION=VALUE", help="may be given several times"
        )
        action.add_argument(
            "--allow-weak", action="store_true", help="run programs also where the sandbox is weak (see doctor)"
        )
        action.add_argument("--timeout-s", type=float, default=10.0, help="limit per sample and verifier (default: 10)")


def _add_serve(actions: argparse._SubParsersAction) -> None:
    serve = actions.add_parser("serve", help="serve a model as judge, to the verifiers of this machine")
    serve.add_argument("model", help="Hugging Face directory, with a chat template")
    serve.add_argument("--port", type=int, default=8000, help="on 127.0.0.1; 0 takes any free one (default: 8000)")
    serve.add_argument("--max-length", type=int, default=8192, help="of prompt and reply, in tokens (default: 8192)")
    serve.add_argument("--device", choices=("cpu", "ascend"), default="cpu", help="(default: cpu)")
    serve.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="(default: bfloat16)")
    serve.add_argument("--tensor-parallel", type=int, default=1, help="devices that share the weights (default: 1)")
    serve.add_argument("--memory", type=float, default=0.9, help="share of device memory to take (default: 0.9)")
    serve.add_argument("--kv-cache-gib", type=float, default=1.0, help="key-value cache on a CPU (default: 1)")
    serve.add_argument("--threads", type=int, default=1, help="on a CPU (default: 1)")
    serve.add_argument("--python", default="", help="of the rollout environment (default: as for rollout.python)")
    serve.add_argument("--log-dir", default=".", help="directory of rollout_0.log (default: the current one)")
    serve.add_argument(
        "--api-key-variable", default="OPENAI_API_KEY", help="variable whose value, if any, requests must bear"
    )
    add_template_options(serve)
    serve.set_defaults(run=_serve)


def _list(arguments: argparse.Namespace) -> int:
    from mindrlhf.rewards.registry import built_in, built_in_names

    texts = {name: built_in(name).__doc__ or name for name in built_in_names()}
    what = {name: text.strip().splitlines()[0].replace("`" * 2, "") for name, text in texts.items()}
    if arguments.json:
        return print_json(what)
    width = max(map(len, what))
    for name, text in what.items():
        print(f"{name:{width}s}  {text}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    import inspect

    from mindrlhf.rewards.registry import built_in, context_of, options_of

    function = built_in(arguments.verifier)
    if arguments.json:
        options = {
            name: {"required": one.default is one.empty, "default": None if one.default is one.empty else one.default}
            for name, one in options_of(function).items()
        }
        found = {"verifier": function.__name__, "text": inspect.getdoc(function)}
        return print_json(found | {"reads": list(context_of(function)), "options": options})
    print(f"{function.__name__}\n\n{inspect.getdoc(function)}\n")
    print(f"beside completion and answer it reads: {', '.join(context_of(function)) or 'nothing'}")
    options = options_of(function)
    print("options (keys of reward.options, or --option):" if options else "options: none")
    for name, parameter in options.items():
        default = "required" if parameter.default is parameter.empty else f"default {parameter.default!r}"
        print(f"  {function.__name__}.{name}  ({default})")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from mindrlhf.errors import UserError
    from mindrlhf.rewards.lint import example_samples, lint
    from mindrlhf.rewards.sample_files import SkippedLines, read_samples
    from mindrlhf.sandbox.server import check_for

    check_for([arguments.verifier], arguments.allow_weak, "--allow-weak")
    samples = example_samples()
    if arguments.samples:
        lines = SkippedLines(read_samples(Path(arguments.samples)), is_allowed=False)
        samples = [line.sample for line in lines]
        if not samples:
            raise UserError(f"{arguments.samples} holds no samples: give lines with completion and answer")
    findings = lint(arguments.verifier, samples, _options(arguments.option), arguments.timeout_s)
    if arguments.json:
        found = [{"level": level, "text": text} for level, text in findings]
        print_json({"verifier": arguments.verifier, "findings": found})
    else:
        print("\n".join(f"{level:8s} {visible(text)}" for level, text in findings))
    return int(any(level == "error" for level, _ in findings))


def _is_required(parameters: Mapping[str, Parameter], name: str) -> bool:
    return name in parameters and parameters[name].default is Parameter.empty


def _parameters(verifier: str) -> Mapping[str, Parameter]:
    """Return what a verifier takes; of a user's function what its file declares."""
    from pathlib import Path

    from mindrlhf.rewards.registry import built_in
    from mindrlhf.sandbox.user_files import declared_signature

    path, colon, name = verifier.rpartition(":")
    found = declared_signature(Path(path), name) if colon else signature(built_in(name))
    return found.parameters if found else {}


def _score(arguments: argparse.Namespace) -> int:
    import sys
    from pathlib import Path

    from mindrlhf.rewards.pool import RewardPool
    from mindrlhf.rewards.registry import CONTEXT_KEYWORDS, parse_verifiers
    from mindrlhf.rewards.sample_files import ScoreWriter, SkippedLines, read_samples, score_lines
    from mindrlhf.rewards.selection import Selection
    from mindrlhf.sandbox.server import check_for

    weights = arguments.weight or ",".join("1" for _ in arguments.verifier.split(","))
    verifiers, weights = parse_verifiers(arguments.verifier, weights)
    selection = Selection(tuple(verifiers), tuple(weights), options=_options(arguments.option))
    selection.check()
    check_for(verifiers, arguments.allow_weak, "--allow-weak")
    parameters = [_parameters(name) for name in verifiers]
    # What has a default may be missing: a prompt, where no template has opened a thought in it.
    needed = {name for named in parameters for name in CONTEXT_KEYWORDS if _is_required(named, name)}
    needed.discard("finish_reason")  # "stop" is what it is nearly always
    lines = SkippedLines(read_samples(Path(arguments.input), needed), is_allowed=arguments.skip_bad)
    output = None if arguments.output == "-" else Path(arguments.output)
    with (
        RewardPool(selection, arguments.processes, arguments.timeout_s, arguments.failure_value) as pool,
        ScoreWriter(output) as writer,
    ):
        for line, result in score_lines(pool, lines):
            writer.write(line, result)
        judges = [f"  judge {name}: {count:.6g}" for name, count in pool.take_counts().items()]
    print(visible("\n".join([*writer.summary(), *judges, *lines.summary()])), file=sys.stderr)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    import os
    from pathlib import Path

    from mindrlhf.config.rollout import RolloutSection
    from mindrlhf.data.tokenizers import load_tokenizer
    from mindrlhf.rollout.chat_server import ChatServer
    from mindrlhf.rollout.pool import start_pool

    cache = {"kv_cache_memory_bytes": int(arguments.kv_cache_gib * 2**30)} if arguments.device == "cpu" else {}
    rollout = RolloutSection(
        python=arguments.python,
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        tensor_parallel=arguments.tensor_parallel,
        gpu_memory_utilization=arguments.memory,
        engine_args=cache,
    )
    tokenizer = load_tokenizer(arguments.model)
    generator = start_pool(
        rollout,
        model_dir=arguments.model,
        max_model_len=arguments.max_length,
        seed=0,
        device=arguments.device,
        log_dir=Path(arguments.log_dir),
        load_weights=True,
        tokenizer_dir=arguments.model,
    )
    try:
        server = ChatServer(
            generator,
            tokenizer,
            arguments.model,
            arguments.max_length,
            port=arguments.port,
            api_key=os.environ.get(arguments.api_key_variable, ""),
            template_options=dict(arguments.template_option),
        )
        generator.wait_ready()
        print(f"serving {arguments.model} at {server.url}; end with Ctrl-C", flush=True)
        server.run()
    finally:
        generator.close()
    return 0


def _options(texts: list[str]) -> dict[str, str]:
    from mindrlhf.errors import UserError

    options = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or "." not in name:
            raise UserError(f"option '{text}' is not of the form verifier.option=value")
        options[name] = value
    return options
