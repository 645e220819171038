"""The verifiers of a run, and the reward made up of their parts."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindrlhf.errors import UserError
from mindrlhf.rewards import registry

if TYPE_CHECKING:
    from mindrlhf.config.reward import RewardSection
    from mindrlhf.data.mindrecord import PromptFile

# Rewards and weights beyond it would overflow the float32 of training when they are multiplied.
MAX_MAGNITUDE = 1e15


@dataclass(frozen=True)
class Selection:
    """The reward is the sum of weight * part over the verifiers that apply to the prompt.

    ``by_choice`` names the verifiers that apply only to prompts which choose them (``RewardInput.verifiers``); the
    others apply to every prompt.

    ``options`` maps ``verifier.option`` to its value as text, ``python`` is another interpreter that runs them.
    """

    verifiers: tuple[str, ...]  # names, or path/to/file.py:function
    weights: tuple[float, ...]
    by_choice: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    python: str = ""

    @classmethod
    def from_config(cls, reward: "RewardSection") -> "Selection":
        """Return the selection that a config's section describes; weights that are left out are 1."""
        return cls(
            verifiers=reward.verifier_function,
            weights=reward.verifier_weight or (1.0,) * len(reward.verifier_function),
            by_choice=reward.by_choice,
            options=reward.options,
            python=reward.python,
        )

    @property
    def names(self) -> list[str]:
        return [registry.part_name(verifier) for verifier in self.verifiers]

    def check(self) -> None:
        """Check all that can be known without running a user's file.

        Raises:
            UserError: an unknown verifier, choice or option, a weight or value that makes no sense.
        """
        if self.python and shutil.which(self.python) is None:
            raise UserError(f"'reward.python' is {self.python}: there is no such program; give the path of a Python")
        registry.check_selection(self.verifiers, self.weights)
        for name, weight in zip(self.names, self.weights):
            if abs(weight) > MAX_MAGNITUDE:
                raise UserError(f"the weight of verifier '{name}' is {weight:g}: at most {MAX_MAGNITUDE:g} is taken")
        for specification in self.verifiers:
            registry.check(specification)
        for name in self.by_choice:
            self._position(name, "reward.by_choice")
        for dotted in self.options:
            self._position(_owner(dotted), "reward.options")
        for specification in self.verifiers:
            if ":" not in specification:
                function = registry.built_in(specification)
                registry.parse_options(specification, function, self.options_for(specification))

    def check_choices(self, chosen: Sequence[str], where: str) -> None:
        """Check that each of the ``chosen`` verifiers may be chosen; ``where`` names who did.

        Raises:
            UserError: it is not one of ``by_choice``; or nothing is chosen though every verifier is by choice.
        """
        allowed = [registry.part_name(name) for name in self.by_choice]
        for name in chosen:
            if name not in allowed:
                raise UserError(
                    f"{where} choose the verifier '{name}', which is not in reward.by_choice "
                    f"({', '.join(allowed) or 'empty'}): add it there and to reward.verifier_function"
                )
        if not chosen and set(allowed) == set(self.names):
            raise UserError(
                f"{where} choose no verifier, and all verifiers are in reward.by_choice: take one out of it, so that "
                "it applies to every prompt"
            )

    def check_prompts(self, file: "PromptFile", accuracy_verifier: str = "") -> None:
        """Check the choices that the prompts of a file make, and that it keeps the columns that verifiers need.

        A user's verifier is read, not run; what that does not tell is found with the first sample. The mean of
        ``accuracy_verifier`` is called accuracy; it must apply to at least one prompt.

        Raises:
            UserError: see ``check_choices``; accuracy has no prompts; or a verifier needs a column that is not there.
        """
        choices, where = file.header.verifier_choices, f"prompts of {file.path}"
        for choice in choices or ("",):
            self.check_choices(split_choice(choice), where)
        name = registry.part_name(accuracy_verifier)
        chosen = {one for choice in choices for one in split_choice(choice)}
        not_chosen = {registry.part_name(verifier) for verifier in self.by_choice} - chosen
        if name in not_chosen:
            raise UserError(
                f"'evaluation.verifier' is '{name}', which no prompt of {file.path} chooses: name one that "
                "applies to them"
            )
        for specification, own_name in zip(self.verifiers, self.names):
            reads = registry.declared_reads(specification, self.options_for(specification))
            if reads is not None and own_name not in not_chosen:
                registry.check_columns(specification, reads, file.header.columns, where)

    def check_answers(self, file: "PromptFile") -> None:
        """Refuse prompts of which none has an answer where a verifier needs one."""
        chosen = {one for choice in file.header.verifier_choices for one in split_choice(choice)}
        for name in self.names if file.header.look.get("no_answers") else ():
            if (name in chosen or name not in map(registry.part_name, self.by_choice)) and registry.needs_answer(name):
                raise UserError(
                    f"verifier '{name}' compares with the answer, which no prompt of {file.path} has: build it again "
                    "with --map question=QUESTION,answer=ANSWER, or take a verifier that needs none"
                )

    def options_for(self, specification: str) -> dict[str, str]:
        name = registry.part_name(specification)
        return {dotted.rpartition(".")[2]: text for dotted, text in self.options.items() if _owner(dotted) == name}

    def skipped_positions(self, chosen: Sequence[str]) -> list[int]:
        left_out = {registry.part_name(name) for name in self.by_choice} - set(chosen)
        return [position for position, name in enumerate(self.names) if name in left_out]

    def _position(self, name: str, key: str) -> int:
        reported = registry.part_name(name)
        if reported not in self.names:
            raise UserError(
                f"'{key}' names the verifier '{name}', which is not in reward.verifier_function "
                f"({', '.join(self.names)})"
            )
        return self.names.index(reported)


def split_choice(choice: str) -> tuple[str, ...]:
    return tuple(filter(None, choice.split(",")))


def _owner(dotted: str) -> str:
    return registry.part_name(dotted.rpartition(".")[0])
