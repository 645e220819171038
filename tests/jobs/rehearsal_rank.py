"""The actor of every rank of a run, built by the product's own code for a simulated Ascend, one process each.

    python rehearsal_rank.py DIRECTORY

``rehearsal.json`` there says what to do: "config" (sections of a run), "row_lengths", "world_size", "checkpoint" (a
directory to restore from), "save" (where to save then), "buffers", the paths of two buffers: one is written after the
start, the other after the restore, and "critic_buffer", of one that gets the critic, or "". Graphs are compiled, but
nothing is computed: what is rehearsed is all that happens around the graphs. Each rank writes ``rank_R.json`` with what
it wrote to the buffers.
"""

import functools
import json
import sys
from pathlib import Path

from simulated_ranks import run_ranks

from mindrlhf.dryrun.compile import ascend_stubs as simulation


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
    place = Path(sys.argv[1])
    given = json.loads((place / "rehearsal.json").read_text())
    sys.exit(run_ranks(place, given["world_size"], functools.partial(rehearse, given, place)))
