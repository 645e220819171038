"""Run compiled parallel graphs on CPU ranks: one rank's side, the program that ``msrun`` starts.

    python -m graph_on_cpu DIRECTORY

The directory is one that :func:`graph_on_cpu.run.execute` has prepared. Rank 0 drives the step as in a run:
through the product's team and policy it has the workers compute log-probabilities, update, publish, save and restore.
"""

import hashlib
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
from mindspore.communication import get_group_size, get_rank, init, release
from safetensors.numpy import load_file, save_file

from graph_on_cpu.model import LoweredRank
from graph_on_cpu.run import (
    BATCHES_NAME,
    ENDED_PREFIX,
    EXPORT_NAME,
    OUTPUTS_NAME,
    PUBLISHED_NAME,
    RESULT_NAME,
    SAVED_NAME,
    SPEC_NAME,
    UPDATES_NAME,
)
from mindrlhf.checkpoint.state import MODEL_NAME
from mindrlhf.config.training import FIRST_FIT, SHARED_PROMPTS
from mindrlhf.data.packing import POSITIONS, PREFIX_IDS, PackedRows
from mindrlhf.images.pixels import image_digest
from mindrlhf.images.positions import NUM_IDS
from mindrlhf.training.batch import Batch, RowOptions
from mindrlhf.training.checkpoints.shards import export_adapters
from mindrlhf.training.engine.factory import layout_of
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.nodes import find_nodes
from mindrlhf.training.replica_team import ReplicaTeam
from mindrlhf.training.routing.rows import EXPERTS, ReplayedExperts
from mindrlhf.training.runtime import Rank
from mindrlhf.training.team import Team, connect, serve
from mindrlhf.training.vision.image_rows import ImageTokens
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.export import sharded_tensors
from mindrlhf.weights.publish.publisher import PUBLISH, open_weight_buffers

OLD, REFERENCE = "old_logprobs", "reference_logprobs"


def main(directory: Path) -> None:
    spec = json.loads((directory / SPEC_NAME).read_text())
    # Nobody else would end a rank that waits for a message that never comes.
    signal.setitimer(signal.ITIMER_REAL, spec["timeout_s"])
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()
    ms.set_context(runtime_num_threads=1)
    rank = Rank(get_rank(), get_group_size())
    groups: dict[str, tuple[int, ...]] = {}
    for job in spec["jobs"]:
        print(f"executing {job['name']}", flush=True)
        own_directory = directory / job["name"]
        lowered = LoweredRank(job, spec["hf_config"], rank.index, own_directory, groups)
        connections = connect(rank)
        if rank.is_rank_0:
            ranks = Team(lowered.actor, connections)
            _Rank0(spec, job, lowered, ranks, own_directory, load_file(directory / BATCHES_NAME)).run()
            ranks.close()
        else:
            serve(lowered.actor, connections[0])
        report = {
            "losses": lowered.update.losses,
            "written_bytes": _written_bytes(lowered.actor),
            "lowered": lowered.replaced,
            "machine": lowered.actor.machine().name,
            "buffer": _buffer_digest(lowered.actor.weight_buffer()),
        }
        (own_directory / RESULT_NAME.format(rank=rank.index)).write_text(json.dumps(report))
        lowered.actor.close_weights(PUBLISH)


def _written_bytes(actor) -> int:
    """Return the bytes of the last version that this rank wrote to the buffer."""
    slices = (one for _, one, _ in actor.weight_buffer().written())
    return sum(4 * math.prod(stop - start for start, stop in one) for one in slices)


def _buffer_digest(buffer: WeightBuffer) -> str:
    """Return a digest of all that the buffer of this rank's node holds, which was checked against its checksums."""
    buffer.verify(buffer.version)
    state = hashlib.sha256()
    for name, _, array in buffer.tensors(buffer.version):
        state.update(name.encode() + array.tobytes())
    return state.hexdigest()


class _Rank0:
    """Rank 0: one step of training, and all that a run does around it."""

    def __init__(
        self, spec: dict, job: dict, lowered: LoweredRank, ranks: Team, directory: Path, arrays: dict[str, np.ndarray]
    ):
        self._job = job
        self._actor = lowered.actor
        self._ranks = ranks
        self._team = team = ReplicaTeam(ranks, layout_of(lowered.parallel))
        self._directory = directory
        self._learning_rate, self._kl_coefficient = spec["learning_rate"], spec["kl_coefficient"]
        self._is_critic = job["computed_input"] == "values"
        self._computed: list[list[np.ndarray]] = []  # of each batch, by micro-batch
        tokens = ImageTokens.of(self._actor.model.network.dims)
        self._experts = None
        if job["replays_routing"]:
            self._experts = ReplayedExperts.of(self._actor.model.network.dims)
        self._batches = _batches(spec["is_last"], arrays, job["token_inputs"], team.world_size, tokens, self._experts)

    def run(self) -> None:
        self._nodes = find_nodes(self._ranks)
        buffer = open_weight_buffers(self._ranks, self._nodes, between_devices=self._job["between_devices"])
        policy = Policy(self._team, buffer)
        micro_batch = self._batches[0].micro_batches[0]
        num_rows, length = micro_batch.mask.shape
        packing = SHARED_PROMPTS if PREFIX_IDS in micro_batch.context else FIRST_FIT
        seen = ImageTokens.of(self._actor.model.network.dims)
        kinds = {"packing": packing, "image_tokens": seen, "experts": self._experts}
        options = RowOptions((length,), num_rows, self._team.world_size, True, in_step=True, **kinds)
        policy.warm_up(options, [OLD, REFERENCE])
        self._publish(policy, buffer, "before")
        policy.receive(self._batches)
        self._compute_outputs()
        updates = [self._update(policy, 0)]
        self._save("middle")
        updates += [self._update(policy, position) for position in range(1, len(self._batches))]
        self._publish(policy, buffer, "after")
        self._save(SAVED_NAME)
        if self._job["lora"]:
            export_adapters(self._team, {MODEL_NAME: self._directory / EXPORT_NAME})
        of = "critic" if self._is_critic else ""
        tensors = sharded_tensors(self._team, self._ranks, self._nodes, of)
        self._actor.export(self._directory / EXPORT_NAME, None, tensors, of)
        # Again from the checkpoint, with the batches that the ranks still have.
        self._team.call("restore", directory=str(self._directory / "middle"))
        for position in range(1, len(self._batches)):
            self._update(policy, position)
        self._publish(policy, buffer, "resumed")
        own = [array for update in updates for array in update.logprobs]
        first = [array for arrays in self._computed for array in arrays]
        outputs = {"first": first or own, "updates": own}
        outputs["reference"] = self._reference(policy)
        if not self._job["lora"]:  # whose reference is the policy itself, without its adapters
            policy.sync_reference()
            outputs["synchronised"] = self._reference(policy)
        self._write(outputs, updates)

    def _compute_outputs(self) -> None:
        """Compute the token array that the job does not take from the batches, if there is one."""
        asked = {OLD: ("compute_logprobs", {"name": OLD}), "values": ("compute_values", {})}
        if self._job["computed_input"]:
            method, options = asked[self._job["computed_input"]]
            for position, batch in enumerate(self._batches):
                self._computed.append(batch.in_order(self._team.call(method, batch=position, **options)))

    def _update(self, policy: Policy, position: int):
        if not self._is_critic:
            return policy.update(position, self._learning_rate, self._kl_coefficient)
        results = self._team.call("update_critic", batch=position, lr=self._learning_rate)
        statistics = np.sum([one.statistics for one in results], axis=0)
        return SimpleNamespace(statistics=statistics, grad_norm=results[0].grad_norm, logprobs=self._computed[position])

    def _reference(self, policy: Policy) -> list[np.ndarray]:
        policy.logprobs(REFERENCE)
        rows = [rows for position, batch in enumerate(self._batches) for rows in policy.held_rows(position, batch)]
        return [one.tokens[REFERENCE].copy() for one in rows]

    def _publish(self, policy: Policy, buffer: WeightBuffer, moment: str) -> None:
        version = (buffer.version or 0) + 1
        policy.publish(version)
        buffer.verify(version)
        tensors = {name: array.copy() for name, _, array in buffer.tensors(version)}
        save_file(tensors, self._directory / PUBLISHED_NAME.format(moment=moment))

    def _save(self, name: str) -> None:
        self._team.call("begin_saving", directory=str(self._directory / name), copies=True)
        self._team.call("end_saving")

    def _write(self, outputs: dict[str, list[np.ndarray]], updates: list) -> None:
        size = self._team.world_size
        whole = {
            f"{kind}.{call}": np.ascontiguousarray(np.concatenate(arrays[call * size : (call + 1) * size]))
            for kind, arrays in outputs.items()
            for call in range(len(arrays) // size)
        }
        save_file(whole, self._directory / OUTPUTS_NAME)
        described = [{"statistics": one.statistics.tolist(), "grad_norm": one.grad_norm} for one in updates]
        (self._directory / UPDATES_NAME).write_text(json.dumps(described))


def _batches(
    is_last: list[bool],
    arrays: dict[str, np.ndarray],
    token_inputs: list[str],
    num_replicas: int,
    tokens: ImageTokens | None,
    experts: ReplayedExperts | None,
) -> list[Batch]:
    """Return a batch for each update, its calls' rows divided among the replicas; every row counts as a sample."""
    batches, micro_batches, images = [], [], {}
    for call, ends in enumerate(is_last):
        num_inputs = 4 + len(token_inputs)
        shares = zip(*(np.split(arrays[f"{call}.{index}"], num_replicas) for index in range(num_inputs)))
        given = [_rows(share[:4], dict(zip(token_inputs, share[4:])), experts) for share in shares]
        if tokens is not None:
            pixels = [arrays[name] for name in sorted(arrays) if name.startswith(f"{call}.image.")]
            images |= {image_digest(one): one for one in pixels}
            given = [_with_own_images(rows, pixels, tokens) for rows in given]
        micro_batches += given
        if ends:
            num_tokens = int(arrays[f"{call}.{num_inputs}"][0, 1])
            placed = tuple(
                (index, row, 0, rows.mask.shape[1])
                for index, rows in enumerate(micro_batches)
                for row in range(len(rows.mask))
            )
            batches.append(Batch(tuple(micro_batches), num_tokens, placed, images=images))
            micro_batches, images = [], {}
    return batches


def _with_own_images(rows: PackedRows, pixels: Sequence[np.ndarray], tokens: ImageTokens) -> PackedRows:
    """Return a replica's rows with the images that they show alone, counted from 0."""
    ids, sizes = rows.input_ids.copy(), [int(np.prod(tokens.geometry.token_grid(*one.shape[:2]))) for one in pixels]
    shown, start, own_start = [], tokens.vocab_size, tokens.vocab_size
    for one, size in zip(pixels, sizes):
        places = (rows.input_ids[:, :, 0] >= start) & (rows.input_ids[:, :, 0] < start + size)
        if places.any():
            ids[:, :, 0][places] += own_start - start
            own_start += size
            shown.append(image_digest(one))
        start += size
    return replace(rows, input_ids=ids, images=tuple(shown))


def _rows(
    inputs: Sequence[np.ndarray], tokens: dict[str, np.ndarray], experts: ReplayedExperts | None = None
) -> PackedRows:
    """Return rows whose ``model_inputs`` come first, or their tokens and experts."""
    first, *others = inputs
    if experts is not None:
        chosen = first[..., 1:].reshape(*first.shape[:2], experts.num_layers, experts.num_active)
        return PackedRows(first[..., 0].copy(), *others, tokens=tokens, context={EXPERTS: chosen})
    if first.ndim == 2 or first.shape[-1] == NUM_IDS:
        return PackedRows(first, *others, tokens=tokens)
    input_ids, *context = first.transpose(1, 0, 2)
    return PackedRows(input_ids, *others, tokens=tokens, context=dict(zip((PREFIX_IDS, POSITIONS), context)))


def run(directory: Path) -> None:
    """Execute all jobs and end the process."""
    main(directory)
    rank = get_rank()
    release()
    (directory / f"{ENDED_PREFIX}{rank}").touch()
    # All is written. MindSpore's way out of a process has ended in a segmentation fault here, once in many runs.
    sys.stdout.flush()
    os._exit(0)
