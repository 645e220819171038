"""An engine for the real rollout server, without a model: what it samples, and how it fails, is in the prompts.

Sample i of a request is its prompt, i + 1 times, with log-probabilities that tell the weights. Prompts that begin with
666 kill the server, with 13 fail, with 5050 sleep, with 4711 work for seconds, with 1000 + n take n hundredths of a
second a sample.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from mindrlhf.rollout.types import Completion
from mindrlhf.weights.publish.buffer import WeightBuffer


class StubEngine:
    def __init__(self, config):
        print("stub up", flush=True)
        if notes := os.environ.get("NOTES"):
            told = {"pid": os.getpid(), "path": sys.path, "environment": dict(os.environ), "span": config["span"]}
            partial = Path(notes, f"partial_{os.getpid()}")
            partial.write_text(json.dumps(told), encoding="utf-8")
            partial.rename(partial.with_name(f"{time.monotonic_ns()}.json"))
        if config["seed"] == 99:
            sys.exit("no such device")
        if config["seed"] == 98:
            time.sleep(600)
        self.version, self.weights = 4, 0.0
        self.waiting = []

    @property
    def num_pending(self):
        return len(self.waiting)

    def submit(self, prompts, nums_samples, seeds, max_tokens, sampling, images, nums_begun):
        if notes := os.environ.get("NOTES"):
            with open(Path(notes, f"batches_{os.getpid()}"), "a", encoding="utf-8") as file:
                file.write(json.dumps([prompt[0] for prompt in prompts]) + "\n")
        self.waiting = [(i, j, prompt) for i, prompt in enumerate(prompts) for j in range(nums_samples[i])]

    def step(self, is_interrupted):
        number, index, prompt = self.waiting[0]
        if prompt[0] == 666:
            print("stub hit by a bus", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt[0] == 5050:
            time.sleep(600)
        if prompt[0] == 4711:
            end = time.monotonic() + 4
            while time.monotonic() < end:
                pass
        if prompt[0] == 13:
            raise ValueError("unlucky")
        if 1000 <= prompt[0] < 2000:
            time.sleep((prompt[0] - 1000) / 100)
        self.waiting.pop(0)
        tokens = np.array(prompt * (index + 1), np.int32)
        logprobs = np.full(len(tokens), self.weights, np.float32)
        return [Completion(number, index, tokens, logprobs, "length", self.version)]

    def abort(self):
        self.waiting = []

    def update_weights(self, version, buffer_path):
        with WeightBuffer.attach(buffer_path) as buffer:
            buffer.verify(version)
            self.weights = -sum(
                float(array.view(f"u{array.itemsize}").astype(np.float64).ravel() @ np.arange(1, array.size + 1))
                for _, _, array in buffer.tensors(version)
            )
        self.version = version

    def sleep(self):
        pass

    wake = close = sleep

    def profile(self, step):
        pass
