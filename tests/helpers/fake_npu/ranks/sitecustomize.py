"""Imported by ranks with this directory on PYTHONPATH: they train on the CPU, and their rollout servers get fake NPUs.

No config says so: `run.device` is one for both.
"""

import functools
import os

if "MINDRLHF_TEST_SERVERS_ON" in os.environ:
    from mindrlhf.rollout import pool

    def _with_device(make):
        device = os.environ["MINDRLHF_TEST_SERVERS_ON"]
        return functools.wraps(make)(lambda *given, **settings: make(*given, **settings | {"device": device}))

    pool.server_options = _with_device(pool.server_options)
