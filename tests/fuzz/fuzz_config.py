"""The config file and its overrides, as a user gives them."""

import random
from pathlib import Path

import corruption
from fuzz_files import REPOSITORY
from fuzz_target import Case


def config_file(directory: Path) -> Case:
    import yaml

    from mindrlhf.config.load import load_grpo_config

    text = (REPOSITORY / "examples" / "quickstart" / "config.yaml").read_bytes()
    path, tree = directory / "config.yaml", yaml.safe_load(text)
    tricks = (
        b"&a [*a]",
        b"!!int ''",
        b"!!timestamp x",
        b"!!bool x",
        b"? [a, b]\n: c\n",
        b"<<: *a",
        b"0x" + b"f" * 5000,
    )

    def case(rng: random.Random) -> None:
        kind = rng.randrange(4)
        if kind == 0:
            path.write_bytes(corruption.corrupt_bytes(rng, text))
        elif kind == 1:
            lines = text.splitlines()
            index = rng.randrange(len(lines))
            lines[index] = lines[index].partition(b":")[0] + b": " + rng.choice(tricks)
            path.write_bytes(b"\n".join(lines))
        else:
            path.write_bytes(corruption.corrupt_json(rng, tree))
        load_grpo_config(path)

    return case


def config_override(directory: Path) -> Case:
    from mindrlhf.config.load import load_grpo_config
    from mindrlhf.config.parse import dotted_keys
    from mindrlhf.config.schema import GrpoConfig

    path = REPOSITORY / "examples" / "quickstart" / "config.yaml"
    keys = [dotted for dotted, _, _ in dotted_keys(GrpoConfig)]
    values = (
        "3",
        "-1",
        "1e999",
        "[1, 2]",
        "null",
        "a,b",
        "{a: 1}",
        "!!int ''",
        "[" * 400,
        "0x" + "f" * 5000,
        "1_0:2",
        "=",
    )

    def case(rng: random.Random) -> None:
        override = f"{rng.choice(keys)}={rng.choice(values)}"
        if rng.randrange(2):
            damaged = corruption.corrupt_bytes(rng, override.encode(), max_edits=2)
            override = damaged.decode("utf-8", errors="surrogateescape")
        load_grpo_config(path, [override])

    return case
