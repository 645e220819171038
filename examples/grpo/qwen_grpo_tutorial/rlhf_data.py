"""Turn raw problems into a MindRecord prompt file; a thin entry point over ``mindrlhf.data``.

    python rlhf_data.py --vocab_path vocab.json --merges_file_path merges.txt \\
        --file_path train.jsonl --output_path gsm8k_train.mindrecord --dataset_type gsm8k

A tokenizer_config.json beside the vocabulary gives the special tokens and the chat template.
``mindrlhf data build`` does the same with a tokenizer directory and has more options.
"""

import argparse
import sys

from mindrlhf.commands.data import print_report
from mindrlhf.data.build import build_prompts
from mindrlhf.errors import RunFailure, UserError


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab_path", required=True, help="vocab.json of the tokenizer")
    parser.add_argument("--merges_file_path", required=True, help="merges.txt of the tokenizer")
    parser.add_argument("--file_path", required=True, nargs="+", help="raw data: .jsonl, .json or .parquet")
    parser.add_argument("--output_path", required=True, help="MindRecord file to write")
    parser.add_argument("--dataset_type", default="gsm8k", help="gsm8k (default), deepscaler or dapo_math_17k")
    parser.add_argument("--template", default="chat", help="chat (default), plain, r1, or a Jinja file")
    parser.add_argument("--max_prompt_length", type=int, default=1024, help="longer ones are dropped (default: 1024)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    try:
        report = build_prompts(
            arguments.file_path,
            arguments.output_path,
            arguments.vocab_path,
            merges_path=arguments.merges_file_path,
            handler=arguments.dataset_type,
            template=arguments.template,
            max_prompt_length=arguments.max_prompt_length,
        )
    except (UserError, RunFailure) as failure:
        print(f"rlhf_data.py: error: {failure}", file=sys.stderr)
        return failure.exit_code
    print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
