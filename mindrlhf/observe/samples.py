"""Samples of a run, ``samples.jsonl``, and the pictures of their prompts, ``sample_images``."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.images.pixels import encode_png, image_digest
from mindrlhf.observe.records import JsonlWriter
from mindrlhf.system.files import write_file

IMAGES_NAME = "sample_images"
TOKEN_VALUES = ("advantages", "rollout_logprobs", "train_logprobs")


@dataclass(frozen=True)
class SampleRecord:
    """One scored sample: text, and the images of its prompt."""

    step: int
    prompt: str
    completion: str
    answer: str  # the reference answer, "" when the prompt has none
    reward: float  # weighted total; not a number where it is unscored, null in the file
    rewards: Mapping[str, float]  # unweighted, by verifier
    finish_reason: str  # "stop" or "length"
    images: tuple[np.ndarray, ...] = ()  # uint8 [height, width, 3] each
    extra: Mapping[str, Any] = field(default_factory=dict)  # kept columns of the prompt, JSON values by name
    # "tokens": their texts, and by the names of TOKEN_VALUES a number for each, None where the model did not write it
    tokens: Mapping[str, list] | None = None
    # Of an agent's episode: "role", "prompt", "completion" and, where roles have rewards, "reward" of each.
    conversations: Sequence[Mapping[str, Any]] = ()
    unscored: str = ""  # why it has no reward and was left out


# How templates begin and end a user's turn: ChatML (small models' without roles), Llama 3, Gemma, GLM and Phi, Kimi,
# gpt-oss, DeepSeek, Mistral, and the roles of templates in plain text.
_USER_TURNS = re.compile(
    r"<\|im_start\|>(?:user\n|(?!\w+\n))(?P<chatml>.*?)<\|im_end\|>"
    r"|<\|start_header_id\|>user<\|end_header_id\|>\s*(?P<llama>.*?)<\|eot_id\|>"
    r"|<(?:start_of_turn>|\|turn>)user\n(?P<gemma>.*?)<(?:end_of_turn>|turn\|>)"
    r"|<\|user\|>\n?(?P<glm>.*?)(?=<\|(?:assistant|end|endoftext)\|>|<\|assistant)"
    r"|<\|im_user\|>user<\|im_middle\|>(?P<kimi>.*?)<\|im_end\|>"
    r"|<\|start\|>user<\|message\|>(?P<harmony>.*?)<\|end\|>"
    r"|<\uff5cUser\uff5c>(?P<deepseek>.*?)<\uff5cAssistant\uff5c>"
    r"|\[INST\](?P<mistral>.*?)\[/INST\]"
    r"|^User: (?P<plain>.*?)\n+Assistant:",
    re.DOTALL | re.MULTILINE,
)


def question_of(prompt: str) -> str:
    """Return the last user turn of a prompt, without the template around it; a prompt of no known template whole."""
    turns = list(_USER_TURNS.finditer(prompt))
    return turns[-1][turns[-1].lastgroup].strip() if turns else prompt


# Where another speaker begins in a conversation with tools: with the template's marks, or without them.
_TURNS = re.compile(
    r"(?:<\|im_end\|>)?\n?<\|im_start\|>(?P<marked>user|tool|assistant|system|observation)\n"
    r"|(?:\A|\n)(?P<plain>user|tool|observation)\n(?=\s*<tool_response>)"
    r"|(?<=</tool_response>)\s*\n?(?P<after>assistant)\n"
)


def conversation_turns(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (role, text) of each turn of a sample's line; of an agent's episode those of all conversations."""
    found = []
    for one in record.get("conversations") or ():
        reward = f", reward {one['reward']:g}" if "reward" in one else ""
        found.append((f"{one['role'] or 'agent'}{reward}", question_of(one["prompt"])))
        found += turns_of(one["completion"])
    return found or turns_of(record.get("completion", ""))


def turns_of(completion: str) -> list[tuple[str, str]]:
    """Return (role, text) of each turn of a completion, which begins as the assistant's; one where no tool answers."""
    found, role, start = [], "assistant", 0
    for match in _TURNS.finditer(completion):
        found.append((role, completion[start : match.start()]))
        role, start = match[match.lastgroup], match.end()
    found.append((role, completion[start:]))
    turns = [
        ("tool" if "<tool_response>" in text else role, text.replace("<|im_end|>", "").strip())
        for role, text in found
    ]
    return [turn for turn in turns if turn[1]] if len(turns) > 1 else [("assistant", completion)]


class SampleWriter:
    """Append samples to ``samples.jsonl``; see ``JsonlWriter`` for ``first_step`` and the errors.

    Images go to ``sample_images`` beside it, each once, as a PNG file with its digest for a name, which the line has.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        self._writer = JsonlWriter(path, first_step=first_step)
        self._image_dir = Path(path).parent / IMAGES_NAME

    def write(self, samples: Iterable[SampleRecord]) -> None:
        """Append the samples of one step."""
        for sample in samples:
            line = {**vars(sample), "rewards": dict(sample.rewards), "images": self._keep(sample.images)}
            line["extra"] = dict(sample.extra)
            line["reward"] = None if sample.unscored else sample.reward
            for name in ("images", "extra", "conversations", "unscored"):
                if not line[name]:
                    del line[name]
            line |= line.pop("tokens") or {}
            self._writer.write(line)

    def _keep(self, images: Iterable[np.ndarray]) -> list[str]:
        """Write the images that are not there yet; return the digests of all."""
        digests = []
        for pixels in images:
            digests.append(image_digest(pixels))
            path = self._image_dir / f"{digests[-1]}.png"
            try:
                self._image_dir.mkdir(exist_ok=True)
                if not path.exists():
                    write_file(path, encode_png(pixels))
            except OSError as failure:
                raise RunFailure(f"cannot write {path}: {failure.strerror}") from failure
        return digests

    def close(self) -> None:
        self._writer.close()
