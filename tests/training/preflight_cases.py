"""What the tests of checks before a run share."""

import dataclasses

NUM_PROMPTS = 5


def changed(config, section: str, **values):
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})
