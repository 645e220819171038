"""The page of samples, served on this machine: of a run whose samples would not fit in a page.

The page asks for the rows that it shows and for the sample that is looked at. Of each sample a few numbers are in
memory; texts are read from the file when they are asked for. The first rows are there while the file is still read.
"""

import array
import hashlib
import json
import secrets
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.observe.records import RecordFile
from mindrlhf.observe.report import shortened
from mindrlhf.observe.viewer.page import MAX_TEXT, page_of, sample_row, samples_path

ENDINGS = ("stop", "length")
MAX_ROWS = 200  # of an answer
_LIST_TEXT = 300  # characters of a prompt or completion in the list
_MAX_VERIFIERS = 64


class SampleIndex:
    """The samples of a run by number, filled by :meth:`read`, which may run in a thread of its own.

    Raises:
        UserError: the run has no samples.
    """

    def __init__(self, run_dir: Path):
        self.name = Path(run_dir).resolve().name
        self._path = samples_path(run_dir)
        self._size_bytes = max(1, self._path.stat().st_size)
        self._records = RecordFile(self._path)
        self._columns = {name: array.array("d") for name in ("step", "reward", "ending", "length", "prompt")}
        self._rewards: dict[str, array.array] = {}
        self._prompts: dict[bytes, int] = {}  # digest of its text -> its number
        self.num_samples = 0
        self.is_read = False
        self.error = ""

    @property
    def verifiers(self) -> list[str]:
        """Names of those seen so far."""
        return list(self._rewards)

    def read(self) -> None:
        """Read all samples; what is wrong with the file becomes ``error``."""
        try:
            for record in self._records:
                self._add(record)
            if not self.num_samples:
                raise UserError(f"{self._path} is empty: the run has not finished a step")
        except (UserError, OSError) as error:
            self.error = str(error)
        self.is_read = True

    def _add(self, record: dict[str, Any]) -> None:
        try:
            tokens, completion = record.get("tokens"), record["completion"]
            prompt = hashlib.blake2b(record["prompt"].encode(errors="surrogatepass"), digest_size=16).digest()
            ending = ENDINGS.index(record["finish_reason"]) if record["finish_reason"] in ENDINGS else -1
            values = {
                "step": record["step"],
                "reward": np.nan if record["reward"] is None else record["reward"],
                "ending": ending,
                "length": len(tokens) if tokens else len(completion),
                "prompt": self._prompts.setdefault(prompt, len(self._prompts)),
            }
            for name, reward in record["rewards"].items():
                if name not in self._rewards and len(self._rewards) < _MAX_VERIFIERS:
                    self._rewards[name] = array.array("d", [np.nan]) * self.num_samples
                self._rewards[name].append(np.nan if reward is None else reward)
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{self._path} has a line that is no sample: {json.dumps(record)[:80]}") from None
        for name, value in values.items():
            self._columns[name].append(value)
        for rewards in self._rewards.values():
            if len(rewards) == self.num_samples:
                rewards.append(np.nan)
        self.num_samples += 1  # last, as others ask for so many meanwhile

    def _column(self, name: str, count: int) -> np.ndarray:
        """Return a copy: an array that is looked at could not grow."""
        return np.array(self._columns[name][:count])

    def scores(self, verifier: str, count: int) -> np.ndarray:
        """Return the rewards of a verifier, or the totals for "", float64 [count]; NaN where there is none."""
        return np.array(self._rewards[verifier][:count]) if verifier in self._rewards else self._column("reward", count)

    def find(self, wished: dict[str, str]) -> np.ndarray:
        """Return the numbers of the samples that fit what the page asks for, in its order, int64."""
        count = self.num_samples
        step, score = self._column("step", count), self.scores(wished.get("verifier", ""), count)
        fits = np.ones(count, bool)
        for name, values, is_least in (
            ("from", step, True), ("to", step, False), ("low", score, True), ("high", score, False),
        ):  # fmt: skip
            if wished.get(name):
                limit = float(wished[name])
                fits &= values >= limit if is_least else values <= limit
        if wished.get("ending") in ENDINGS:
            fits &= self._column("ending", count) == ENDINGS.index(wished["ending"])
        if wished.get("text"):
            fits &= self._having(wished["text"].lower(), count)
        found = np.flatnonzero(fits)
        order = wished.get("order", "step")
        keys = {
            "step": lambda: step,
            "score": lambda: score,
            "length": lambda: self._column("length", count),
            "change": lambda: self._changes(step, score, count),
        }
        values = np.nan_to_num(keys.get(order.removeprefix("-"), keys["step"])()[found])
        return found[np.argsort(-values if order.startswith("-") else values, kind="stable")]

    def _changes(self, step: np.ndarray, score: np.ndarray, count: int) -> np.ndarray:
        """Return each score less the mean of its prompt's earliest ones."""
        prompt = self._column("prompt", count).astype(np.int64)
        first = np.full(prompt.max(initial=0) + 1, np.inf)
        np.minimum.at(first, prompt, step)
        is_first, score = step == first[prompt], np.nan_to_num(score)
        sums, nums = (np.bincount(prompt, weights) for weights in (np.where(is_first, score, 0.0), is_first))
        return np.where(is_first, 0.0, score - (sums / np.maximum(nums, 1))[prompt])

    def _having(self, text: str, count: int) -> np.ndarray:
        """Whether prompt or completion has a text in lower case, bool [count]."""
        fits = np.zeros(count, bool)
        for number, record in zip(range(count), RecordFile(self._path)):
            fits[number] = text in record["prompt"].lower() or text in record["completion"].lower()
        return fits

    def record(self, number: int) -> dict[str, Any]:
        """Return a sample as it stands in the file."""
        return self._records[number]

    def list_row(self, number: int, verifier: str) -> list[Any]:
        """Return what the list shows of a sample: number, step, score, beginnings of completion and prompt."""
        record = self._records[number]
        score = record["rewards"].get(verifier) if verifier else record["reward"]
        texts = (record[name].strip()[:_LIST_TEXT] for name in ("completion", "prompt"))
        return [number, record["step"], score, *texts]

    def alike(self, text: str) -> np.ndarray:
        """Return the numbers of the samples of a prompt, int64."""
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        return np.flatnonzero(self._column("prompt", self.num_samples) == self._prompts.get(digest, -1))

    def row(self, number: int) -> list[Any]:
        """Return a sample as rows of the page are; the number of its prompt is 0."""
        rewards = {name: index for index, name in enumerate(self._rewards)}
        return sample_row(self._records[number], {}, rewards)

    def progress(self) -> float:
        """Return how much of the file is read, from 0 to 1."""
        return 1.0 if self.is_read else self._records.end_bytes / self._size_bytes


class SampleServer:
    """Serves the page of one run, or of two, to this machine; ``url`` has a secret that others do not know.

    Args:
        port: 0 takes a free one.

    Raises:
        UserError: a directory has no samples, or the port is taken.
    """

    def __init__(self, run_dirs: list[Path], port: int = 0):
        self._runs = [SampleIndex(path) for path in run_dirs]
        self._secret = secrets.token_urlsafe(16)
        self._found: dict[tuple, np.ndarray] = {}  # the last answers, by what was asked
        self._lock = threading.Lock()
        try:
            self._http = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, self))
        except OSError as error:
            raise UserError(f"port {port} cannot be used ({error.strerror}): give another with --port") from error
        self._http.daemon_threads = True
        self.host = f"127.0.0.1:{self._http.server_address[1]}"
        self.url = f"http://{self.host}/{self._secret}/"

    def run(self) -> None:
        """Serve until the process is interrupted, or ``close`` is called."""
        for index in self._runs:
            threading.Thread(target=index.read, name="read-samples", daemon=True).start()
        self._http.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, wished: dict[str, str]) -> tuple[str, str] | None:
        """Return the type and the text of an answer; None where there is nothing.

        Raises:
            ValueError, IndexError: what was asked for is no number, or not there.
        """
        if not path.startswith(f"/{self._secret}/"):
            return None
        answers: dict[str, Callable[[dict[str, str]], Any]] = {"rows": self._rows, "sample": self._sample}
        name = path.removeprefix(f"/{self._secret}/")
        if not name:
            names = [run.name for run in self._runs]
            return "text/html", page_of(" and ".join(names), {"served": names})
        return ("application/json", json.dumps(answers[name](wished))) if name in answers else None

    def _numbers(self, wished: dict[str, str]) -> tuple[SampleIndex, np.ndarray]:
        index = self._runs[int(wished.get("run") or 0)]
        names = ("run", "verifier", "from", "to", "low", "high", "ending", "text", "order")
        key = (*(wished.get(name, "") for name in names), index.num_samples)
        with self._lock:
            if key not in self._found:
                while len(self._found) >= 4:
                    del self._found[next(iter(self._found))]
                self._found[key] = index.find(wished)
            return index, self._found[key]

    def _rows(self, wished: dict[str, str]) -> dict[str, Any]:
        index, numbers = self._numbers(wished)
        first = max(0, int(wished.get("first") or 0))
        shown = numbers[first : first + MAX_ROWS].tolist()
        return {
            "count": len(numbers),
            "total": index.num_samples,
            "read": index.progress(),
            "error": index.error,
            "verifiers": index.verifiers,
            "first": first,
            "rows": [index.list_row(number, wished.get("verifier", "")) for number in shown],
        }

    def _sample(self, wished: dict[str, str]) -> dict[str, Any]:
        index, numbers = self._numbers(wished)
        number, verifier = int(wished["number"]), wished.get("verifier", "")
        if not 0 <= number < index.num_samples:
            raise IndexError(number)
        record = index.record(number)
        same = index.alike(record["prompt"])
        places = {one: place for place, one in enumerate(numbers.tolist())}
        steps, scores = index._column("step", index.num_samples), index.scores(verifier, index.num_samples)
        others = [run for run in self._runs if run is not index]
        own = [one for one in same.tolist() if steps[one] == record["step"]].index(number)
        return {
            "row": index.row(number),
            "verifiers": [run.verifiers for run in (index, *others)],
            "prompt": shortened(record["prompt"], MAX_TEXT),
            "other": _nearest(others[0], record, own) if others else None,
            "history": [
                [places.get(one, -1), int(steps[one]), None if np.isnan(scores[one]) else scores[one], one == number]
                for one in same.tolist()
            ],
        }


def _nearest(run: SampleIndex, record: dict[str, Any], own: int) -> list[Any] | None:
    """Return the row of another run's sample of the same prompt at the nearest step, the same among that step's."""
    same = run.alike(record["prompt"])
    if not len(same):
        return None
    distances = np.abs(run._column("step", run.num_samples)[same] - record["step"])
    nearest = same[distances == distances.min()]
    return run.row(int(nearest[min(own, len(nearest) - 1)]))


class _Handler(BaseHTTPRequestHandler):
    """One request; a page of another origin can neither guess the secret nor pass the check of the host."""

    def __init__(self, server: SampleServer, *arguments: Any):
        self._samples = server
        super().__init__(*arguments)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        wished = {name: values[-1] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        found = None
        if self.headers.get("Host") == self._samples.host:
            try:
                found = self._samples.answer(url.path, wished)
            except (ValueError, IndexError, KeyError):
                found = None
        kind, text = found or ("text/plain", "not found\n")
        body = text.encode(errors="replace")
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
