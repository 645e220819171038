"""GRPO on GSM8K: the program that msrun starts on every rank; a thin entry point over ``mindrlhf.training``.

    msrun --worker_num=8 --local_worker_num=8 --master_addr=127.0.0.1 --master_port=8118 --join=True --log_dir=logs \\
        main.py --config grpo_config.yaml --dataset_file gsm8k_train.mindrecord --tokenizer_dir Qwen2.5-7B-Instruct \\
        --actor_checkpoint_path Qwen2.5-7B-Instruct --verifier_function "qwen_accuracy_reward,format_reward"

Every flag is one key of the config and wins over the file; ``section.key=value`` at the end wins over both.
``mindrlhf train`` does the same with such overrides alone, and starts the ranks itself.
"""

import argparse
import json
import sys
from dataclasses import asdict

from mindrlhf.config.load import load_grpo_config
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec
from mindrlhf.training.main import guarded
from mindrlhf.training.runtime import is_rank_0_process, num_ranks_from_environment
from mindrlhf.weights.hf import read_hf_config

PROGRAM = "main.py"
KEY_OF_FLAG = {
    "dataset_file": "data.train_file",
    "tokenizer_dir": "data.tokenizer_dir",
    "actor_checkpoint_path": "model.path",
    "verifier_function": "reward.verifier_function",
    "verifier_weight": "reward.verifier_weight",
    "save_checkpoint_dir": "checkpoint.save_dir",
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="YAML file; docs/config.md lists its keys")
    parser.add_argument("--dataset_file", help="prompts made by rlhf_data.py")
    parser.add_argument("--tokenizer_dir", help="tokenizer that the prompts were made with")
    parser.add_argument("--actor_checkpoint_path", help="Hugging Face directory of the model to train")
    parser.add_argument("--ref_checkpoint_path", help="the same of the reference model; read when algorithm.beta > 0")
    parser.add_argument(
        "--generate_checkpoint_path",
        help="Hugging Face directory of the generator: it gets the actor's weights, so its config.json must agree",
    )
    parser.add_argument("--verifier_function", help='verifiers, such as "qwen_accuracy_reward,format_reward"')
    parser.add_argument("--verifier_weight", help='their weights, such as "1.0,1.0"')
    parser.add_argument("--save_checkpoint_dir", help="where checkpoints go")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


def load_config(arguments: argparse.Namespace, world_size: int) -> GrpoConfig:
    """Return the checked config of the run.

    Raises:
        UserError: as ``load_grpo_config``; or the generator's model is not the actor's.
    """
    overrides = [
        _override(key, getattr(arguments, flag))
        for flag, key in KEY_OF_FLAG.items()
        if getattr(arguments, flag) is not None
    ]
    overrides += arguments.overrides
    config = load_grpo_config(arguments.config, overrides, world_size=world_size)
    if arguments.generate_checkpoint_path is not None:
        check_generator(config.model.path, arguments.generate_checkpoint_path)
    if arguments.ref_checkpoint_path is None:
        return config
    if config.algorithm.beta == 0:
        _say_once(
            f"--ref_checkpoint_path {arguments.ref_checkpoint_path} is not loaded: algorithm.beta is 0, so there is "
            "no KL term; add algorithm.beta=0.001 to use it"
        )
        return config
    reference = _override("model.reference_path", arguments.ref_checkpoint_path)
    return load_grpo_config(arguments.config, [reference, *overrides], world_size=world_size)


def check_generator(actor_dir: str, generator_dir: str) -> None:
    """Raise a UserError unless both directories describe the same network."""
    actor, generator = (_network(directory) for directory in (actor_dir, generator_dir))
    for name, value in actor.items():
        if generator.get(name) != value:
            raise UserError(
                f"--generate_checkpoint_path {generator_dir} has {name}={generator.get(name)!r}, the actor in "
                f"{actor_dir} has {value!r}: the generator gets the actor's weights, so give the actor's directory"
            )


def _network(model_dir: str) -> dict[str, object]:
    hf_config = read_hf_config(model_dir)
    spec = find_spec(hf_config)
    dims = asdict(spec.dims(hf_config))
    del dims["initializer_range"]  # concerns random weights only
    return {"architecture": spec.hf_architecture, **dims}


def _override(key: str, value: str) -> str:
    # A JSON string is a YAML string whatever its characters.
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _say_once(message: str) -> None:
    if is_rank_0_process():
        print(f"{PROGRAM}: {message}", flush=True)


def main() -> int:
    arguments = parse_arguments()

    def run() -> None:
        config = load_config(arguments, num_ranks_from_environment())
        from mindrlhf.training.reinforcement import ReinforcementTask
        from mindrlhf.training.train import train

        train(config, ReinforcementTask(config), resume=False)

    return guarded(PROGRAM, run)


if __name__ == "__main__":
    sys.exit(main())
