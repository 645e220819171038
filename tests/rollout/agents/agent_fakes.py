"""A generator that answers by a script, a tokenizer with a chat template, and agents that are functions of tests."""

import asyncio
import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mindrlhf.config.reward import ToolSection
from mindrlhf.data.templates import PromptTemplate
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.rollout.agents.source import AgentEpisodes
from mindrlhf.rollout.types import Completion, GenerationRequest, SamplingParams
from mindrlhf.tools.agents import AgentResult, read_result

CHECKPOINT = Path(__file__).parents[3] / "examples" / "quickstart" / "checkpoint"
# Of Qwen2.5's kind, as far as these tests go: tools are told, calls and answers are written.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "double", "parameters": {"type": "object", "properties": {}}}}
VERSION = 7
TOKENIZER = load_tokenizer(CHECKPOINT)
CHAT = PromptTemplate("chat", TEMPLATE, None, TOKENIZER)
END = TOKENIZER.eos_token_ids[0]


def spelled(text):
    """Return tokens of a text that nobody gets who encodes it: one character at a time."""
    return [token for character in text for token in TOKENIZER.encode(character)]


def decoded(ids):
    return TOKENIZER.decode([int(one) for one in ids], skip_special_tokens=False)


class Engine:
    """Answers a prompt by ``reply(its text)``, spelled; every log-probability is another."""

    def __init__(self, reply):
        self.reply, self.batches, self._count = reply, [], 0

    def generate(self, requests, sampling):
        self.batches.append((list(requests), sampling))
        for request in reversed(requests):
            for index in range(request.num_samples):
                ids, reason = [*spelled(self.reply(decoded(request.prompt_ids))), END], "stop"
                for count in range(1, len(ids)):
                    if any(stop in decoded(ids[:count]) for stop in sampling.stop):
                        ids = ids[:count]
                        break
                if len(ids) > request.token_limit(sampling):
                    ids, reason = ids[: request.token_limit(sampling)], "length"
                logprobs = -(self._count + np.arange(len(ids), dtype=np.float32)) / 1024
                self._count += len(ids)
                yield Completion(request.request_id, index, np.array(ids, np.int32), logprobs, reason, VERSION)


class Client:
    """What agents here ask with."""

    def __init__(self, url, key):
        self.url, self.key = url, key

    def post(self, body, path="/chat/completions", key=None):
        """Return status and answer, that of an error too."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key if key is None else key}"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                text = response.read().decode()
                return response.status, text if body_streams(body) else json.loads(text)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")

    def chat(self, messages, **more):
        """Return the message that a chat is answered with."""
        status, answer = self.post({"messages": messages, **more})
        assert status == 200, answer
        return answer["choices"][0]["message"]


def body_streams(body):
    return isinstance(body, dict) and body.get("stream") is True


class InThreads:
    """Runs agents that are functions of record and client, in threads of this process."""

    def __init__(self, function, num_threads=16):
        self._function, self._threads = function, ThreadPoolExecutor(num_threads)
        self.url, self.keys, self.lock = "", {}, threading.Lock()

    async def start(self):
        pass

    async def run(self, record, key, timeout_s, clock=time.monotonic):
        with self.lock:
            self.keys[record["answer"]] = key
        call = asyncio.get_running_loop().run_in_executor(self._threads, self._call, record, key)
        try:
            end_s = clock() + timeout_s
            while not call.done() and (left_s := end_s - clock()) > 0:
                await asyncio.wait([call], timeout=max(left_s, 0.02))
            if not call.done():
                return AgentResult(failure="it took too long")
            value = call.result()
        except Exception as error:
            return AgentResult(failure=f"{type(error).__name__}: {error}")
        return read_result({"result": value})

    def _call(self, record, key):
        return self._function(record, Client(self.url, key))

    async def close(self):
        self._threads.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def serving(engine, function, longest_prompt=400, num_threads=16, **tools):
    """Yield the source of an agent that is a function."""
    runner = InThreads(function, num_threads)
    keys = {"max_turns": 100, "agent_gather_s": 60.0, "agent_sees": ("answer",), **tools}
    section = ToolSection(agent="unused", **keys)
    with AgentEpisodes(engine, TOKENIZER, CHAT, section, longest_prompt, runner) as source:
        runner.url = source.url
        yield source, runner


def prompt(text="q", number=0, num_samples=1):
    ids = TOKENIZER.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    return GenerationRequest(
        number, tuple(ids), num_samples, seed=3 + number, answer=str(number), extra={"question": text}
    )


def run(engine, function, requests=None, max_tokens=400, **options):
    """Return the completions of all episodes, in the order of prompts and samples."""
    with serving(engine, function, **options) as (source, _):
        sampling = SamplingParams(max_tokens, temperature=0.7, stop_token_ids=(END,))
        found = list(source.generate([prompt()] if requests is None else requests, sampling))
    return sorted(found, key=lambda one: (one.request_id, one.sample_index))


def user(text):
    return {"role": "user", "content": text}
