"""How long decoding, training and switching take on some of the devices: the same rates that the search uses."""

from dataclasses import dataclass

from mindrlhf.dryrun.plan.cost import estimate_cost
from mindrlhf.dryrun.plan.devices import Device
from mindrlhf.dryrun.plan.memory import needs_logprobs
from mindrlhf.dryrun.plan.parameters import active_parameters
from mindrlhf.dryrun.plan.plan import Plan, prepare
from mindrlhf.layout.layout import Layout

# Of the longest prompt that fits, what prompts have on average: a guess.
_PROMPT_SHARE = 0.5
# Sleep, wake and new weights, as a share of an ideal rollout.
_SWITCH_SHARE = 0.02


@dataclass(frozen=True)
class Rates:
    """Seconds of the parts of a step.

    Attributes:
        layout: the plan's.
        tensor_parallel: devices of a rollout server.
        slots: sequences that a server decodes at once, by ``max_num_seqs`` and by its KV cache.
        decode_s: of one decoding step, whatever its number of sequences: weights are read once.
        sequence_s: what each sequence adds to it.
        prefill_s: of one token that is computed before decoding goes on.
        train_s: of a step's training on all devices.
        num_prompts, num_generations: of a step.
    """

    layout: Layout
    tensor_parallel: int
    slots: int
    decode_s: float
    sequence_s: float
    prefill_s: float
    train_s: float
    num_prompts: int
    num_generations: int

    def decode_step_s(self, num_running: int) -> float:
        """Return the seconds in which each running sequence gets one token."""
        return self.decode_s + self.sequence_s * num_running

    def ideal_rollout_s(self, mean_length: float) -> float:
        """Return the seconds of a step's responses if all devices always decoded full batches."""
        num_tokens = self.num_prompts * self.num_generations * mean_length
        num_servers = self.layout.world_size / self.tensor_parallel
        return num_tokens * self.decode_step_s(self.slots) / self.slots / num_servers

    def switch_s(self, mean_length: float) -> float:
        """Return the seconds between the phases."""
        return _SWITCH_SHARE * self.ideal_rollout_s(mean_length)


def estimate_rates(plan: Plan, mean_length: float, device: Device | None = None) -> Rates:
    """Return the rates of a plan's run, on its devices or on others.

    A decoding step reads the weights once, and each sequence's keys and values; a token costs 2 operations for each
    parameter that it meets (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
    """
    config, rollout, batch = plan.config, plan.rollout, plan.batch
    inputs, _ = prepare(config, plan.model, plan.machine)
    num_active = active_parameters(plan.model.known, plan.model.dims)
    device = device or plan.machine.device
    update = estimate_cost(inputs, num_active, 1 - plan.peak.total / plan.machine.device_bytes, device)
    num_forwards = (config.algorithm.beta > 0) + needs_logprobs(inputs)
    context = prompt_tokens(plan) + mean_length / 2
    passes_s = update.seconds * batch.num_updates
    passes_s += update.forward * num_forwards * config.training.num_minibatches
    tensor = config.rollout.tensor_parallel
    operations_s = 2 * num_active / tensor / device.product_rate
    return Rates(
        layout=plan.layout,
        tensor_parallel=tensor,
        slots=max(1, min(rollout.max_num_seqs, int(rollout.num_cached_tokens / context))),
        decode_s=rollout.weights / device.memory_rate + device.decode_s,
        sequence_s=rollout.kv_token * context / device.memory_rate + operations_s,
        prefill_s=operations_s,
        train_s=passes_s * filled_share(plan, mean_length),
        num_prompts=batch.num_prompts,
        num_generations=config.algorithm.num_generations,
    )


def prompt_tokens(plan: Plan) -> float:
    """Return the tokens that prompts are assumed to have on average."""
    return _PROMPT_SHARE * plan.batch.max_prompt_length


def filled_share(plan: Plan, mean_length: float) -> float:
    """Return the share of the plan's rows that packed samples fill: it counts a row for each, which is the most."""
    return min(1.0, (prompt_tokens(plan) + mean_length) / plan.batch.row_length)
