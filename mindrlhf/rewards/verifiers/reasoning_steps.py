"""Does the completion reason in steps?"""

import re

from mindrlhf.rewards.registry import register

NUM_STEPS = 3
_MARK = re.compile(r"Step [0-9]+:|^[0-9]+\.|^[-*] |\b(?:First|Second|Next|Finally),", re.MULTILINE)


@register
def reasoning_steps(completion: str, answer: str) -> float:
    """``min(1, n / 3)`` for ``n`` marks of steps: ``Step 1:``, list items, ``First,``, ``Next,``, ``Finally,``.

    The rule of Open-R1's reasoning steps reward (github.com/huggingface/open-r1). It is easily earned without
    reasoning: give it a small weight.
    """
    num_marks = 0
    for _ in _MARK.finditer(completion):
        num_marks += 1
        if num_marks == NUM_STEPS:
            return 1.0
    return num_marks / NUM_STEPS
