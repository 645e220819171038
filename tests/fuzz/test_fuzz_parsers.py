"""Random damage to the input of every parser: it is accepted or refused with an error of its own, and nothing else.

``MINDRLHF_FUZZ_CASES`` says how many cases of each; ``MINDRLHF_FUZZ_ONLY`` runs one again.
"""

import os
import random

import pytest
from slow_tests import RUNS_SLOW_TESTS
from targets import TARGETS

NUM_CASES = int(os.environ.get("MINDRLHF_FUZZ_CASES", "100" if RUNS_SLOW_TESTS else "40"))
CASES = [int(os.environ["MINDRLHF_FUZZ_ONLY"])] if "MINDRLHF_FUZZ_ONLY" in os.environ else range(NUM_CASES)


@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_refused_or_harmless(name, tmp_path):
    target = TARGETS[name]
    damages, use = target.prepare(tmp_path)
    use()  # which accepts what is whole
    texts = {path: path.read_bytes() for path in damages}
    unexpected = []
    for case in CASES:
        rng = random.Random(f"{name}/{case}")
        path = rng.choice(list(damages))
        path.write_bytes(damages[path](rng))
        try:
            use()
        except target.refusals:
            pass
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of a library in Rust is none of Exception's
            unexpected.append((case, path.name, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
        path.write_bytes(texts[path])
    assert not unexpected
