"""Imported by ranks with this directory on PYTHONPATH: they train on the CPU, and their rollout servers get fake NPUs.

No config says so: `run.device` is one for both. The doctor's rungs, told of NPUs, are changed likewise.
"""

import os

if "MINDRLHF_TEST_SERVERS_ON" in os.environ:
    from mindrlhf.doctor import toy
    from mindrlhf.models import context
    from mindrlhf.rollout import pool

    device, options_of = os.environ["MINDRLHF_TEST_SERVERS_ON"], pool.server_options

    def _on_cpu(make):
        def made(*given):
            config = make(*given)
            config["run"]["device"] = "cpu"
            config["model"] = {"path": config["model"]["path"]}
            config.pop("parallel_config", None)
            if "rollout" in config:
                config["rollout"]["dtype"] = "bfloat16"
            return config

        return made

    pool.server_options = lambda *given, **settings: options_of(*given, **settings | {"device": device})
    toy.run_config, toy.supervised_config = _on_cpu(toy.run_config), _on_cpu(toy.supervised_config)
    context.DEVICE_TARGETS["ascend"] = "CPU"
