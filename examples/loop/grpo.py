"""GRPO in one file: vLLM samples, a verifier scores, MindSpore updates, the new weights go back to vLLM.

One process trains and one samples, on two CPU cores, with the quickstart's problems and model:

    bash examples/quickstart/make_data.sh
    .venv/bin/python examples/loop/grpo.py --steps 30

`mindrlhf train` does the same on many ranks and nodes, resumes, and watches the numbers; here is what one step is.
GRPO: Shao et al. 2024 (arXiv:2402.03300). Change the loss, the advantages or the reward where they stand.
"""

import argparse
import contextlib
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from mindrlhf.config.rollout import RolloutSection
from mindrlhf.config.run import RunSection
from mindrlhf.config.training import OptimizerSection
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.packing import TokenSequence, fill_rows, plan_rows
from mindrlhf.data.tokenizer_config import end_ids
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.models.causal_lm import build_model
from mindrlhf.rewards.verifiers.accuracy import accuracy_reward
from mindrlhf.rollout.pool import start_pool
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.shards.sources import open_source
from mindrlhf.training.checkpoints.models import load
from mindrlhf.training.engine.model import Whole
from mindrlhf.training.optimizers import make_optimizer, matrices_of
from mindrlhf.training.runtime import start_runtime
from mindrlhf.weights.hf import read_hf_config

MODEL, DATA = "examples/quickstart/checkpoint", Path("runs/quickstart")
PROMPTS, SAMPLES, MINIBATCHES, HELD_OUT = 16, 8, 2, 150
MAX_RESPONSE, ROW_LENGTH, ROWS = 40, 256, 32
CLIP_LOW, CLIP_HIGH, LEARNING_RATE, SEED = 0.2, 0.28, 2e-4, 1


class Loss(nn.Cell):
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), mean over the tokens of the batch."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, input_ids, segment_ids, labels, mask, old_logprobs, advantages):
        """Return the loss, and the mean |log pi - log pi_old|; all arrays are [rows, length]."""
        hidden = self.network(input_ids, segment_ids)
        logits = ops.matmul(hidden, self.network.head_weight.T)
        chosen = ops.gather_elements(logits, 2, ops.expand_dims(labels, 2)).squeeze(2)
        logprobs = chosen - ops.logsumexp(logits, 2)
        ratio = ops.exp((logprobs - old_logprobs) * mask)
        clipped = ops.clip_by_value(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
        surrogate = ops.minimum(ratio * advantages, clipped * advantages)
        difference = ops.stop_gradient(ops.abs(logprobs - old_logprobs) * mask)
        return -(surrogate * mask).sum() / mask.sum(), difference.sum() / mask.sum()


class Update(nn.Cell):
    """One optimiser update from one batch of rows."""

    def __init__(self, loss, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer, self.one = optimizer, ms.Tensor([1.0], ms.float32)
        self.value_and_grad = ops.value_and_grad(loss, None, optimizer.parameters, has_aux=True)

    def construct(self, *rows):
        (loss, difference), gradients = self.value_and_grad(*rows)
        norm = ops.sqrt(ops.addn([(gradient * gradient).sum() for gradient in gradients]))
        scale = ops.minimum(1.0 / (norm + 1e-6), self.one)  # to a norm of 1 at most
        return ops.depend(loss, self.optimizer(gradients, scale, self.one)), difference


def group_advantages(rewards):
    """Return (r - mean) / std of each group, float64 [prompts, samples]; 0 where all of a group earned the same."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return centred / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)


def sample(servers, tokenizer, prompts, num_samples, temperature, seed):
    """Return the completions [prompts][samples], and their rewards, float64 [prompts, samples]."""
    sampling = SamplingParams(max_tokens=MAX_RESPONSE, temperature=temperature, stop_token_ids=tokenizer.eos_token_ids)
    requests = [
        GenerationRequest(number, tuple(prompt.prompt_ids.tolist()), num_samples, seed=seed * 10_000 + number)
        for number, prompt in enumerate(prompts)
    ]
    completions = [[None] * num_samples for _ in prompts]
    rewards = np.zeros((len(prompts), num_samples))
    for done in servers.generate(requests, sampling):
        completions[done.request_id][done.sample_index] = done
        text = tokenizer.decode(done.token_ids.tolist())
        answer = prompts[done.request_id].answer
        rewards[done.request_id, done.sample_index] = accuracy_reward(text, answer, finish_reason=done.finish_reason)
    return completions, rewards


def pack(prompts, completions, advantages):
    """Return the arrays that :class:`Loss` takes, of all samples of some prompts."""
    sequences = []
    for prompt, group, values in zip(prompts, completions, advantages):
        for one, advantage in zip(group, values):
            tokens = {"old_logprobs": one.logprobs, "advantages": np.full(len(one.logprobs), advantage, np.float32)}
            sequences.append(TokenSequence(prompt.prompt_ids, one.token_ids, tokens))
    plan = plan_rows([sequence.num_tokens for sequence in sequences], [ROW_LENGTH])
    rows = fill_rows(sequences, plan, max(ROWS, len(plan)))  # of one size, so that the graph is compiled once
    arrays = (rows.input_ids, rows.segment_ids, rows.labels, rows.mask)
    return [ms.Tensor(array) for array in (*arrays, rows.tokens["old_logprobs"], rows.tokens["advantages"])]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    logs = Path("runs/loop")
    logs.mkdir(parents=True, exist_ok=True)
    rank = start_runtime(RunSection(output_dir=str(logs), seed=SEED), logs)
    tokenizer = load_tokenizer(MODEL)
    tokenizer.end_at(end_ids(MODEL))  # what generation_config.json adds to the tokenizer's own
    training, held_out = PromptFile.open(DATA / "train.mindrecord"), PromptFile.open(DATA / "test.mindrecord")

    network = build_model(read_hf_config(MODEL), seq_length=ROW_LENGTH)
    weights = Whole(network, rank)
    load(weights, open_source(MODEL))
    optimizer = make_optimizer(
        network.trainable_params(), OptimizerSection(start_lr=LEARNING_RATE), matrices_of(network)
    )
    update = Update(Loss(network), optimizer)

    with contextlib.ExitStack() as stack:
        buffer = weights.create_weight_buffer()  # memory that both processes see
        stack.callback(buffer.close)
        options = {"model_dir": MODEL, "max_model_len": ROW_LENGTH, "seed": SEED, "device": "cpu", "log_dir": logs}
        section = RolloutSection(max_response_length=MAX_RESPONSE)
        servers = start_pool(section, buffer.path, load_weights=False, **options)
        stack.callback(servers.close)
        servers.wait_ready()

        def publish(version):
            buffer.begin(version)
            weights.write_to(buffer)
            buffer.commit(buffer.written())
            servers.update_weights(version)

        def accuracy():
            return sample(servers, tokenizer, held_out.read(range(HELD_OUT)), 1, 1.0, 0)[1].mean()

        publish(0)
        print(f"held-out accuracy {accuracy():.1%}")
        order = np.random.default_rng(SEED).permutation(len(training))
        for step in range(1, steps + 1):
            prompts = training.read(order.take(range((step - 1) * PROMPTS, step * PROMPTS), mode="wrap").tolist())
            completions, rewards = sample(servers, tokenizer, prompts, SAMPLES, 1.0, step)
            advantages = group_advantages(rewards)
            differences = []  # of the trainer's log-probabilities from vLLM's: before the first update, rounding alone
            for part in np.array_split(np.arange(PROMPTS), MINIBATCHES):
                rows = pack(*([of[i] for i in part] for of in (prompts, completions, advantages)))
                _, difference = update(*rows)
                differences.append(f"{difference.asnumpy().item():.1e}")
            publish(step)
            print(f"step {step}: mean reward {rewards.mean():.3f}, |log pi - log pi_old| {', '.join(differences)}")
        print(f"held-out accuracy {accuracy():.1%}")


if __name__ == "__main__":
    main()
