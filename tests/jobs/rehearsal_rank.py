"""The actor of every rank of a run, built by the product's own code for a simulated Ascend, one process each.

    python rehearsal_rank.py DIRECTORY

``rehearsal.json`` there says what to do: "config" (sections of a run), "row_lengths", "world_size", "checkpoint" (a
directory to restore from), "save" (where to save then), "buffers", the paths of two buffers: one is written after the
start, the other after the restore, and "critic_buffer", of one that gets the critic, or "". Graphs are compiled, but
nothing is computed: what is rehearsed is all that happens around the graphs. Each rank writes ``rank_R.json`` with what
it wrote to the buffers.
"""

import json
import os
import sys
from pathlib import Path

from mindrlhf.dryrun.compile import ascend_stubs as simulation


def main(directory: Path) -> int:
    work = json.loads((directory / "rehearsal.json").read_text())
    simulation.activate(0, 1, simulation.LEVEL_COMPILE)
    from mindrlhf.models.context import import_mindformers

    import_mindformers()  # seconds, and once for all ranks

    failed = False
    for rank in range(work["world_size"]):
        if not os.fork():
            log = os.open(directory / f"log_{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                rehearse(work, directory, rank)
            except BaseException:  # the process ends here: whatever it was must get into the log
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        failed |= os.wait()[1] != 0
    return int(failed)


def rehearse(work: dict, directory: Path, index: int) -> None:
    import mindspore as ms
    from mindspore.communication import init

    from mindrlhf.config.parse import read
    from mindrlhf.config.schema import GrpoConfig
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.engine.build import build_actor
    from mindrlhf.training.runtime import Rank
    from mindrlhf.weights.publish.publisher import EXPORT, PUBLISH

    simulation.set_rank(index, work["world_size"])
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("Ascend")
    init()
    prepare_mindformers("ascend", directory / "mindformers")
    config = read(GrpoConfig, work["config"]).config
    actor = build_actor(config, tuple(work["row_lengths"]), Rank(index, work["world_size"]))
    written = []
    for buffer in work["buffers"]:
        if written:
            actor.restore(work["checkpoint"])
        actor._buffers.clear()  # a run has one for good
        actor.attach_weights(PUBLISH, buffer)
        written.append(actor.publish(1).written["0"])
    actor.begin_saving(work["save"], copies=True)
    checksums = actor.end_saving().checksums
    of_critic = []
    if work["critic_buffer"]:
        actor.attach_weights(EXPORT, work["critic_buffer"], of="critic")
        of_critic = actor.publish(1, purpose=EXPORT).written["0"]
        actor.close_weights(EXPORT)
        assert {one[0] for one in actor.publish(2).written["0"]} == {one[0] for one in written[0]}
    report = {
        "written": written,
        "of_critic": of_critic,
        "state_size_bytes": actor.state_size_bytes(),
        "checksums": checksums,
    }
    (directory / f"rank_{index}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
