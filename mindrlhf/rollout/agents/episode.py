"""One agent's episode: every call is kept token by token, and calls that go on with an earlier one are one sequence.

What a client sends is compared with what was said to it, message by message, and never with tokens: where the messages
begin with those of an earlier call and its reply, the prompt is that call's own tokens and what the chat template
writes of the messages behind them. So no token that the model has written is decoded and encoded again.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mindrlhf.rollout.agents.protocols import Answer, BadQuestion, Call, Reply, without_thought
from mindrlhf.rollout.agents.records import EpisodeUnderWay, GivenSample
from mindrlhf.rollout.chat_server import PROMPT_END, Prompts, Question, Refused
from mindrlhf.rollout.partial import NOTHING
from mindrlhf.rollout.samples import derived_seed
from mindrlhf.rollout.turn_texts import TurnTexts
from mindrlhf.rollout.types import AgentRecord, Completion, GenerationRequest, OwnSequence, SamplingParams
from mindrlhf.tools.agents import AgentResult

FORMS = "response_format, a required tool_choice, or parallel_tool_calls: false,"


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode."""

    max_calls: int  # of the model
    max_tokens: int  # generated, in all calls together
    max_length: int  # of a prompt with its reply, in tokens


@dataclass
class Turn:
    """One sample that a client has got, and all that stood before it."""

    ids: np.ndarray  # int32: prompt and reply; of a turn that was gone on with, a view into the next
    start: int  # of the reply
    completion: Completion
    reply: Reply
    num_messages: int  # of the call, and the reply
    role: str  # the model that the client named
    parent: "Turn | None" = None
    is_unread: bool = False  # the client has gone without it

    @property
    def path(self) -> "list[Turn]":
        """The turns of its sequence, itself the last."""
        found, turn = [], self
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]


class Episode:
    """Calls of one agent, all handled in the HTTP thread.

    Args:
        request, sample_index: which sample it is of which prompt.
        sampling: of the run; it holds for all calls.
        prompts, texts: of the model.
        limits: what it may use.
        ask: puts a question to the generator.

    In partial rollout the request's ``begun`` holds what calls were given before the run was resumed.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sample_index: int,
        sampling: SamplingParams,
        prompts: Prompts,
        texts: TurnTexts,
        limits: EpisodeLimits,
        ask: Callable[[Question], Awaitable[list[Completion]]],
    ):
        self.request = request
        self.sample_index = sample_index
        self._sampling = sampling
        self._prompts = prompts
        self._texts = texts
        self._limits = limits
        self._ask = ask
        self._turns: list[Turn] = []
        self._by_said: dict[str, Turn] = {}
        self._num_asked: dict[bytes, int] = {}  # by digest of prompt and seed
        self._last_turns: dict[bytes, list[Turn]] = {}
        self._num_calls = self._num_reserved = 0
        self._num_other_tokens = self._num_rewritten = self._num_neutralised = self._num_unread = 0
        self.num_refused = 0
        self._checked: set[int] = set()
        given = request.begun.given if isinstance(request.begun, EpisodeUnderWay) else ()
        self._recorded = _samples_by_call(given)  # not asked for again so far
        self._given: dict[tuple[str, int], dict[int, Completion]] = {}
        self.outcome: AgentResult | None = None

    def end(self, result: AgentResult) -> AgentResult:
        """Take how the agent ended, and return it: a role that has asked and has no reward is a failure."""
        roles = dict.fromkeys(turn.role for turn in self._turns) if result.rewards else ()
        if missing := [role for role in roles if role not in result.rewards]:
            named = ", ".join(result.rewards)
            result = AgentResult(failure=f"it gave no reward to '{missing[0]}', which has asked, but to {named}")
        self.outcome = result
        return result

    @property
    def has_turns(self) -> bool:
        """True once the model has written anything that was read, and was not all a grammar's."""
        return any(len(turn.completion.logprobs) for turn in self._read_turns())

    def _read_turns(self) -> list[Turn]:
        """Return the turns that are trained: what was gone on with was read."""
        continued = {id(turn.parent) for turn in self._turns}
        return [turn for turn in self._turns if not turn.is_unread or id(turn) in continued]

    def _take_back(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            turn.is_unread = True

    async def answer(self, call: Call) -> Answer:
        try:
            return await self._answer(call)
        except asyncio.CancelledError:  # the client has gone
            self._num_unread += call.num_samples
            raise

    async def _answer(self, call: Call) -> Answer:
        self._check_open()
        if self._num_calls + call.num_samples > self._limits.max_calls:
            raise Refused(403, f"the episode has made its {self._limits.max_calls} calls (tools.max_turns)")
        # Counted before anything is awaited: calls that come at once share the budgets.
        self._num_calls += call.num_samples
        reserved = 0
        try:
            said = _said(call)
            parent = self._parent(call, said)
            in_thread = asyncio.get_running_loop().run_in_executor
            if parent is None:
                ids = await in_thread(None, self._prompts.ids, call)
                parent, ids = self._parent_by_tokens(call, ids)
            else:
                added = await in_thread(None, self._following, call, parent)
                ids = np.concatenate([parent.ids, np.array(added, np.int32)])
            limit = self._room(call, len(ids))
            reserved = limit * call.num_samples
            self._num_reserved += reserved
            question = self._question(call, ids, limit)
            asked = question.order[2].hex(), question.order[3]
            question.samples = self._given[asked] = self._recorded.pop(asked, {})
            try:
                completions = await self._ask(question)
            except BaseException:
                del self._given[asked]
                raise
            self._check_open()
            if call.form and completions[0].is_generated is None:
                raise BadQuestion(completions[0].unscored or f"{FORMS} is not supported by this rollout engine")
        except BaseException:
            self._num_calls -= call.num_samples
            self._num_reserved -= reserved
            raise
        self._num_reserved += sum(len(one.token_ids) for one in completions) - reserved
        turns = self._keep(call, said, parent, ids, completions)
        if call.is_retry:
            self._take_back(self._last_turns.get(question.order[2], ()))
        self._last_turns[question.order[2]] = turns
        return Answer(tuple(turn.reply for turn in turns), tuple(ids.tolist()), partial(self._take_back, turns))

    def _check_open(self) -> None:
        if self.outcome is not None:
            raise Refused(410, "the episode has ended")

    def _room(self, call: Call, length: int) -> int:
        room = self._limits.max_length - length
        if room < 1:
            raise BadQuestion(
                f"the prompt has {length} tokens, and {self._limits.max_length} are the longest prompt of the data and "
                "rollout.max_response_length together: shorten it, or raise that"
            )
        left = (self._limits.max_tokens - self._num_reserved) // call.num_samples
        if left < 1:
            raise Refused(403, f"the episode has used its {self._limits.max_tokens} tokens (tools.agent_tokens)")
        return min(room, left, call.max_tokens or room)

    def _question(self, call: Call, ids: np.ndarray, limit: int) -> Question:
        """The question of a call; its seed depends on what is asked, not on when, as calls may come at once."""
        digest = hashlib.sha256(ids.tobytes() + str(call.seed).encode()).digest()
        number = self._num_asked[digest] = self._num_asked.get(digest, -1) + 1
        words = np.frombuffer(digest[:16], np.uint32).tolist()
        seed = derived_seed(self.request.seed, self.sample_index, number, *words)
        stop = tuple(dict.fromkeys((*self._sampling.stop, *call.stop)))
        if call.form and (self.request.begun is not None or (self._sampling.top_p, self._sampling.top_k) != (1, 0)):
            raise BadQuestion(f"{FORMS} is not supported with rollout.segment_tokens, top_p or top_k")
        grammar = self._prompts.grammar(call, ids[-PROMPT_END:].tolist())
        own = replace(self._sampling, max_tokens=0, stop=stop, grammar=grammar)
        order = (self.request.request_id, self.sample_index, digest, number)
        return Question(tuple(ids.tolist()), call.num_samples, limit, own, seed, order, owner=self)

    def _parent(self, call: Call, said: Sequence[str]) -> Turn | None:
        """Return the turn that a chat goes on with: of the longest beginning of its messages that was said here."""
        if call.prompt is not None:
            return None
        if call.is_continued and (cut := self._by_said.get(said[-1])) and cut.completion.finish_reason == "length":
            return cut
        for count in range(len(said) - 2 - call.is_continued, 0, -1):
            if (turn := self._by_said.get(said[count])) is not None:
                return turn
        if any(message["role"] == "assistant" for message in call.messages) and self._turns:
            self._num_rewritten += 1
        return None

    def _parent_by_tokens(self, call: Call, given: Sequence[int]) -> tuple[Turn | None, np.ndarray]:
        """Return the turn whose tokens, or text, a prompt of the same kind goes on with, and the prompt."""
        ids = np.array(given, np.int32)
        if call.prompt is None:
            return None, ids
        own = [turn for turn in self._turns if turn.role == call.model]
        for turn in sorted(own, key=lambda one: -len(one.ids)):
            if not isinstance(call.prompt, str):
                if len(turn.ids) < len(ids) and np.array_equal(turn.ids, ids[: len(turn.ids)]):
                    return turn, ids
                continue
            text = self._prompts.tokenizer.decode(turn.ids.tolist(), skip_special_tokens=False)
            if len(text) < len(call.prompt) and call.prompt.startswith(text):
                added = self._prompts.tokenizer.encode(call.prompt[len(text) :])
                self._note_tokens(turn)
                return turn, np.concatenate([turn.ids, np.array(added, np.int32)])
        return None, ids

    def _following(self, call: Call, parent: Turn) -> list[int]:
        """Return the tokens of the messages behind a turn."""
        if parent.num_messages == len(call.messages):  # it was cut, and goes on
            return []
        behind = [dict(one) for one in call.messages[parent.num_messages : len(call.messages) - call.is_continued]]
        messages = self._prompts.as_data(behind)
        self._num_neutralised += messages != behind
        self._note_tokens(parent)
        names = [one["function"]["name"] for one in parent.reply.calls]
        end = self._texts.end_of(parent.completion.token_ids)
        text = self._texts.following(messages, self._prompts.options(call), names, end)
        return self._prompts.tokenizer.encode(self._prompts.begun(call, text))

    def _note_tokens(self, turn: Turn) -> None:
        """Count a turn that would have become other tokens, had it been encoded again."""
        if id(turn) in self._checked:
            return
        self._checked.add(id(turn))
        ids = turn.completion.token_ids.tolist()
        tokenizer = self._prompts.tokenizer
        self._num_other_tokens += tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False)) != ids

    def _keep(
        self, call: Call, said: tuple[str, ...], parent: Turn | None, ids: np.ndarray, completions: Sequence[Completion]
    ) -> list[Turn]:
        turns = []
        for completion in completions:
            reply = self._prompts.reply(call, completion, ids[-PROMPT_END:].tolist())
            whole = np.concatenate([ids, completion.token_ids]).astype(np.int32, copy=False)
            num_messages = len(call.messages) + (not call.is_continued)
            turn = Turn(whole, len(ids), completion, reply, num_messages, call.model, parent)
            if parent is not None:
                parent.ids = whole[: len(parent.ids)]  # one array for a whole conversation
            if call.prompt is None:
                begun = call.messages[-1]["content"] if call.is_continued else ""
                own = {"role": "assistant", "content": begun + reply.text, "tool_calls": list(reply.calls)}
                self._by_said[_next_said(said[-1 - call.is_continued], own)] = turn
            turns.append(turn)
        self._turns += turns
        return turns

    def sequences(self) -> list[tuple[OwnSequence, np.ndarray]]:
        """Return the sequences of the episode that were read, with the log-probabilities of their generated tokens.

        A turn that several others go on with is generated in the first of them, and is prompt in the rest. The first
        sequence is that of the first call; the order of the rest is that of their tokens, since calls may come at once.
        """
        turns = self._read_turns()
        first, continued = turns[0], {id(turn.parent) for turn in turns}
        leaves = [turn for turn in turns if id(turn) not in continued]
        paths = sorted((leaf.path for leaf in leaves), key=lambda path: (path[0] is not first, path[-1].ids.tobytes()))
        taken: set[int] = set()
        found = []
        for path in paths:
            own = [turn for turn in path if id(turn) not in taken]
            taken |= {id(turn) for turn in own}
            ids = path[-1].ids
            is_generated = np.zeros(len(ids), bool)
            for turn in own:
                own_tokens = True if turn.completion.is_generated is None else turn.completion.is_generated
                is_generated[turn.start : turn.start + len(turn.completion.token_ids)] = own_tokens
            logprobs = np.concatenate([turn.completion.logprobs for turn in own])
            if not len(logprobs):  # all of it is a grammar's
                continue
            start = int(is_generated.argmax())
            found.append((OwnSequence(ids[:start], ids[start:], is_generated[start:], own[0].role), logprobs))
        return found

    @property
    def is_replaying(self) -> bool:
        """True while a re-run agent has not repeated all recorded calls."""
        return bool(self._recorded)

    def end_replay(self) -> None:
        """Forget what the agent has not asked for again: it takes another way."""
        self._recorded.clear()

    def under_way(self) -> EpisodeUnderWay:
        """Return what a checkpoint needs to go on with an episode."""
        calls = [*self._given.items(), *self._recorded.items()]
        samples = [(asked, sample) for asked, given in calls for sample in [*given.values()]]
        given = tuple(
            GivenSample(*asked, one.sample_index, one.token_ids, one.logprobs, one.finish_reason, one.spans)
            for asked, one in samples
        )
        return EpisodeUnderWay(**vars(NOTHING) | {"spans": _versions(one for _, one in samples)}, given=given)

    def completion(self, placeholder: Completion | None = None) -> Completion:
        """Return the sample that the episode is; ``placeholder`` is one token of its prompt for an agent that has asked
        nothing, which nothing trains on."""
        outcome = self.outcome or AgentResult(failure="it did not end")
        reward = float("nan") if outcome.failure else outcome.reward
        if placeholder is not None:
            prompt_ids = np.array(self.request.prompt_ids, np.int32)
            mask = np.ones(len(placeholder.token_ids), bool)
            pairs = [(OwnSequence(prompt_ids, placeholder.token_ids, mask), placeholder.logprobs)]
        else:
            pairs = self.sequences()
        turns = self._read_turns()
        text = outcome.text
        if text is None:
            text = turns[-1].reply.whole if turns and not outcome.failure else ""
        sequences = tuple(sequence for sequence, _ in pairs)
        last = turns[-1].completion if turns else placeholder
        num_unread = self._num_unread + len(self._turns) - len(turns)
        counts = (self._num_other_tokens, self._num_rewritten, self.num_refused, num_unread)
        unscored = next((turn.completion.unscored for turn in turns if turn.completion.unscored), "")
        spans: tuple[tuple[int, int], ...] = ()
        if self.request.begun is not None:
            spans = _versions([turn.completion for turn in turns] or [placeholder])
        return Completion(
            request_id=self.request.request_id,
            sample_index=self.sample_index,
            token_ids=np.concatenate([one.token_ids for one in sequences]),
            logprobs=np.concatenate([logprobs for _, logprobs in pairs]).astype(np.float32, copy=False),
            finish_reason=last.finish_reason,
            weights_version=spans[0][0] if spans else last.weights_version,
            is_generated=np.concatenate([one.is_generated for one in sequences]),
            num_turns=len(turns),
            num_tool_calls=sum(len(turn.reply.calls) for turn in turns),
            episode_return=reward,
            num_neutralised_answers=self._num_neutralised,
            spans=spans,
            agent=AgentRecord(sequences, text, outcome.failure, *counts, rewards=outcome.rewards),
            unscored=unscored or (f"agent: {outcome.failure}" if outcome.is_unscored else ""),
        )


def _samples_by_call(given: Sequence[GivenSample]) -> dict[tuple[str, int], dict[int, Completion]]:
    found: dict[tuple[str, int], dict[int, Completion]] = {}
    for one in given:
        completion = Completion(0, one.sample, one.token_ids, one.logprobs, one.finish_reason, 0, spans=one.spans)
        found.setdefault((one.digest, one.number), {})[one.sample] = completion
    return found


def _versions(completions: Iterable[Completion]) -> tuple[tuple[int, int], ...]:
    """Return how many tokens are of which version of the weights, the oldest first; calls have no order."""
    counts: Counter[int] = Counter()
    for one in completions:
        counts.update(dict(one.spans) if one.spans else {one.weights_version: len(one.logprobs)})
    return tuple(sorted(counts.items()))


def _said(call: Call) -> tuple[str, ...]:
    """Return digests of all beginnings of a chat, the empty one first: what the template is told beside messages."""
    found = [_hash("", [call.options, call.model])]
    for message in call.messages:
        found.append(_next_said(found[-1], message))
    return tuple(found)


def _next_said(before: str, message: Mapping[str, Any]) -> str:
    """Return the digest of a beginning with one message more. Of the model's turns counts what clients keep: the text
    but for thoughts and spaces around it, and names and arguments of calls, not how these were written or numbered."""
    if message["role"] != "assistant":
        return _hash(before, [message["role"], message["content"]])
    calls = [_call_key(one["function"]) for one in message.get("tool_calls") or ()]
    return _hash(before, ["assistant", without_thought(message["content"] or ""), calls])


def _call_key(function: Mapping[str, Any]) -> list[Any]:
    try:
        return [function["name"], json.loads(function["arguments"], parse_float=_number)]
    except (ValueError, RecursionError):
        return [function["name"], function["arguments"]]


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value  # some write 1.0 as 1


def _hash(before: str, value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(f"{before} {text}".encode(errors="surrogatepass")).hexdigest()
