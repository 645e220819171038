"""Conversations with tools: a source of completions that runs the calls of a turn and goes on with the answers.

It stands before a generator as a ``CompletionSource`` itself, so whoever samples need not know. A trajectory is
exact by token: each request after the first begins with the very tokens that were generated and inserted before.
"""

import contextlib
import itertools
import math
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf.config.reward import AUTO_DIALECT
from mindrlhf.data.control_tokens import control_token_pattern, neutralised_value, written_apart
from mindrlhf.data.templates import CHAT, Options, PromptTemplate, load_template, record_options, template_of
from mindrlhf.data.tokenizers import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.rollout.partial import extended_experts, extended_spans, start_of_turn
from mindrlhf.rollout.samples import derived_seed
from mindrlhf.rollout.turn_texts import TurnTexts
from mindrlhf.rollout.types import Completion, CompletionSource, GenerationRequest, SamplingParams
from mindrlhf.tools.calls import ToolAnswer, ToolCall, dialect_of, parse_calls
from mindrlhf.tools.episodes import EpisodePool, read_step
from mindrlhf.tools.pool import ToolPool

if TYPE_CHECKING:
    from mindrlhf.config.reward import ToolSection
    from mindrlhf.data.mindrecord import PromptFile, PromptFileHeader

CUT_MARK = " [cut]"
# The end of what a turn follows, in which the template may have opened a thought.
PREFILL_TOKENS = 200


@dataclass(frozen=True)
class ConversationLimits:
    """Limits of a conversation, beside ``SamplingParams.max_tokens``, which counts answers too."""

    max_turns: int  # of the assistant, the last answer included
    max_calls: int  # of tools, in one conversation; further ones get an error for an answer
    max_response_tokens: int  # of one tool's answer; the rest is cut off


@dataclass
class _Conversation:
    """A conversation under way."""

    request: GenerationRequest
    sample_index: int
    tokens: list[int] = field(default_factory=list)  # after the prompt
    is_generated: list[bool] = field(default_factory=list)  # by token
    logprobs: list[np.ndarray] = field(default_factory=list)  # of generated tokens, by turn
    num_turns: int = 0
    num_calls: int = 0
    num_failures: int = 0
    num_malformed: int = 0
    num_neutralised: int = 0  # answers that held control tokens
    weights_version: int = 0
    spans: tuple[tuple[int, int], ...] = ()  # in partial rollout
    experts: np.ndarray | None = None
    names: list[str] = field(default_factory=list)  # of the tools that the last turn has called
    end: str | None = None  # of the last turn, see ``TurnTexts.end_of``
    episode: int | None = None  # number of it among all episodes
    episode_return: float | None = None
    step_rewards: list[float] = field(default_factory=list)  # of the environment, for each action
    unscored: str = ""

    @classmethod
    def taken_up(cls, request: GenerationRequest) -> "_Conversation":
        """Return the conversation whose beginning a request of partial rollout brings."""
        begun = request.begun
        length = len(begun.token_ids)
        first = len(request.prompt_ids) - length
        return cls(
            replace(request, prompt_ids=request.prompt_ids[:first]),
            sample_index=0,
            tokens=begun.token_ids.tolist(),
            is_generated=[True] * length if begun.is_generated is None else begun.is_generated.tolist(),
            logprobs=[begun.logprobs],
            num_turns=begun.num_turns if begun.is_generated is not None else 0,
            num_calls=begun.num_tool_calls,
            num_failures=begun.num_tool_failures,
            num_malformed=begun.num_malformed_calls,
            num_neutralised=begun.num_neutralised_answers,
            spans=begun.spans,
            experts=begun.experts,
            episode_return=begun.episode_return,
            unscored=begun.unscored,
        )

    @property
    def turn(self) -> list[int]:
        """Tokens of the turn that is under way, or was the last."""
        return self.tokens[start_of_turn(self.is_generated) :]

    def add(self, completion: Completion) -> None:
        """Add a part of a turn."""
        self.tokens += completion.token_ids.tolist()
        self.is_generated += [True] * len(completion.token_ids)
        self.logprobs.append(completion.logprobs)
        self.weights_version = completion.weights_version
        self.unscored = self.unscored or completion.unscored
        self.experts = extended_experts(self.experts, completion.experts)
        if self.request.begun is not None:
            self.spans = extended_spans(self.spans, completion)

    def add_turn(self, completion: Completion) -> None:
        """Add a turn, or the rest of it."""
        self.add(completion)
        self.num_turns += 1

    def add_answers(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids
        self.is_generated += [False] * len(token_ids)

    def next_request(self, request_id: int, max_tokens: int) -> GenerationRequest:
        return GenerationRequest(
            request_id,
            (*self.request.prompt_ids, *self.tokens),
            num_samples=1,
            seed=derived_seed(self.request.seed, self.sample_index, self.num_turns),
            max_tokens=max_tokens,
            images=self.request.images,
        )

    def completion(self, finish_reason: str) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            sample_index=self.sample_index,
            token_ids=np.array(self.tokens, np.int32),
            logprobs=np.concatenate(self.logprobs).astype(np.float32, copy=False),
            finish_reason=finish_reason,
            weights_version=self.weights_version,
            is_generated=np.array(self.is_generated, bool),
            num_turns=self.num_turns,
            num_tool_calls=self.num_calls,
            num_tool_failures=self.num_failures,
            num_malformed_calls=self.num_malformed,
            episode_return=self.episode_return,
            turn_rewards=self._turn_rewards(),
            num_neutralised_answers=self.num_neutralised,
            spans=self.spans,
            experts=self.experts,
            unscored=self.unscored,
        )

    def _turn_rewards(self) -> tuple[tuple[int, float], ...]:
        """Of an episode; a turn that was no action has earned nothing."""
        if self.episode_return is None or math.isnan(self.episode_return):
            return ()
        lengths = map(len, self.logprobs)
        return tuple(itertools.zip_longest(lengths, self.step_rewards, fillvalue=0.0))


class Conversations:
    """Samples conversations: turns come from ``generator``, answers from ``tools``.

    ``template`` made the prompts: see ``TurnTexts``. ``dialect`` is how the model writes calls; ``auto`` takes what the
    template teaches.
    """

    continues = True  # responses that a request of partial rollout has begun

    def __init__(
        self,
        generator: CompletionSource,
        tools: ToolPool | None,
        tokenizer: Tokenizer,
        limits: ConversationLimits,
        template: PromptTemplate | None = None,
        dialect: str = AUTO_DIALECT,
    ):
        self._generator = generator
        self._tools = tools
        self._tokenizer = tokenizer
        self._limits = limits
        self._control_tokens = control_token_pattern(tokenizer.control_tokens)
        self._has_warned = False
        self._turns = TurnTexts(tokenizer, template)
        self._dialect = dialect_of(template.source) if dialect == AUTO_DIALECT and template is not None else dialect

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield every conversation as it ends: ``sum(r.num_samples)`` of them, in any order.

        One without calls is the generator's own completion. Where a limit stops a conversation that wanted to go on,
        the finish reason is "length", and it ends with the turn whose calls were not answered.
        """
        if any(request.begun is not None for request in requests):
            yield from self._go_on(requests, sampling)
            return
        waiting: list[tuple[_Conversation, list[Future | ToolAnswer]]] = []
        originals = {request.request_id: request for request in requests}
        for completion in self._generator.generate(requests, sampling):
            conversation = _Conversation(originals[completion.request_id], completion.sample_index)
            yield from self._take_turn(conversation, completion, waiting)
        while waiting:
            # Completions come in any order; requests go out in one.
            waiting.sort(key=lambda pair: (pair[0].request.request_id, pair[0].sample_index))
            ongoing: list[_Conversation] = []
            following: list[GenerationRequest] = []
            for conversation, answers in waiting:
                limit = conversation.request.token_limit(sampling)
                if (ended := self._answer(conversation, answers, limit)) is not None:
                    yield ended
                    continue
                following.append(conversation.next_request(len(ongoing), limit - len(conversation.tokens)))
                ongoing.append(conversation)
            waiting = []
            for completion in self._generator.generate(following, sampling) if following else ():
                yield from self._take_turn(ongoing[completion.request_id], completion, waiting)

    def _go_on(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield each begun conversation, whole, with a segment more; where it may go on, the finish reason is "".

        A turn that ends with its segment is answered.
        """
        waiting: list[tuple[_Conversation, list[Future | ToolAnswer]]] = []
        found = {request.request_id: _Conversation.taken_up(request) for request in requests}
        for completion in self._generator.generate(requests, sampling):
            conversation = found[completion.request_id]
            length = len(conversation.tokens) + len(completion.token_ids)
            if completion.finish_reason == "length" and length < sampling.max_tokens:
                conversation.add(completion)
                yield conversation.completion("")
            else:
                yield from self._take_turn(conversation, completion, waiting)
        for conversation, answers in sorted(waiting, key=lambda pair: pair[0].request.request_id):
            ended = self._answer(conversation, answers, sampling.max_tokens)
            yield conversation.completion("") if ended is None else ended

    def _answer(self, conversation: _Conversation, answers: list, limit: int) -> Completion | None:
        """Add the answers to a turn; return the conversation where it is over, as when nothing may follow them."""
        token_ids = self._answer_ids(conversation, answers)
        if isinstance(token_ids, str):
            return self._end(conversation, token_ids)
        if limit - len(conversation.tokens) - len(token_ids) < 1:
            return self._end(conversation, "length")
        conversation.add_answers(token_ids)
        return None

    def _take_turn(self, conversation: _Conversation, completion: Completion, waiting: list) -> Iterator[Completion]:
        """Add a turn; its calls are started, and else the conversation has ended."""
        conversation.add_turn(completion)
        turn = conversation.turn
        earlier = conversation.tokens[: len(conversation.tokens) - len(turn)]
        before = (*conversation.request.prompt_ids[-PREFILL_TOKENS:], *earlier)[-PREFILL_TOKENS:]
        conversation.end = self._turns.end_of(turn)
        calls = []
        if completion.finish_reason == "stop":
            text, prompt = (self._tokenizer.decode(list(ids), skip_special_tokens=False) for ids in (turn, before))
            calls = parse_calls(text, self._dialect, prompt)
        conversation.names = [_name_of(call) for call in calls]
        if not calls:
            yield self._end(conversation, completion.finish_reason)
        elif conversation.num_turns >= self._limits.max_turns:
            yield self._end(conversation, "length")
        else:
            waiting.append((conversation, [self._start(conversation, call) for call in calls]))

    def _end(self, conversation: _Conversation, finish_reason: str) -> Completion:
        return conversation.completion(finish_reason)

    def _start(self, conversation: _Conversation, call: ToolCall | ToolAnswer) -> "Future[ToolAnswer] | ToolAnswer":
        conversation.num_calls += 1
        if conversation.num_calls > self._limits.max_calls:
            return ToolAnswer(f"Error: there are {self._limits.max_calls} calls, and all are used", is_failure=True)
        if isinstance(call, ToolAnswer):
            conversation.num_malformed += 1
            return call
        return self._tools.submit(replace(call, extra=conversation.request.extra))

    def _answer_ids(self, conversation: _Conversation, answers: Sequence["Future | ToolAnswer"]) -> list[int] | str:
        """Return what is inserted before the model's next turn, or the finish reason of a conversation that is over."""
        texts = []
        for pending in answers:
            answer = pending if isinstance(pending, ToolAnswer) else pending.result()
            conversation.num_failures += answer.is_failure
            texts.append(self._cut(self._as_data(answer.text.strip("\n"), conversation)))
        options, names = self._options(conversation), conversation.names
        return self._tokenizer.encode(self._turns.answers(texts, options, names, conversation.end))

    def _options(self, conversation: _Conversation) -> Options:
        """Template variables set by the record, if that column was kept."""
        options = record_options(conversation.request.extra)
        return neutralised_value(options, self._control_tokens) if self._control_tokens is not None else options

    def _as_data(self, text: str, conversation: _Conversation) -> str:
        """The answer with control tokens written apart: it is told, and must not end its turn or forge another."""
        if self._control_tokens is None or (found := self._control_tokens.search(text)) is None:
            return text
        conversation.num_neutralised += 1
        if not self._has_warned:
            self._has_warned = True
            print(
                f"mindrlhf: warning: a tool's answer holds the control token {found.group()!r}; such answers are given "
                "to the model with their control tokens written apart (metric tools/neutralised)",
                file=sys.stderr,
                flush=True,
            )
        return written_apart(text, self._control_tokens)

    def _cut(self, text: str) -> str:
        limit = self._limits.max_response_tokens
        token_ids = self._tokenizer.encode(text)
        if len(token_ids) <= limit:
            return text
        return self._tokenizer.decode(token_ids[:limit], skip_special_tokens=False) + CUT_MARK


def _name_of(call: ToolCall | ToolAnswer) -> str:
    """Return the name of the tool for the template: what the model has written, where that is a name."""
    return call.name if isinstance(call, ToolCall) and re.fullmatch(r"[\w.:/-]{1,64}", call.name) else "unknown"


class Episodes(Conversations):
    """Samples episodes: every turn of the model is an action in an environment, whose observation comes next."""

    def __init__(
        self,
        generator: CompletionSource,
        episodes: EpisodePool,
        tokenizer: Tokenizer,
        limits: ConversationLimits,
        template: PromptTemplate | None = None,
    ):
        super().__init__(generator, None, tokenizer, limits, template)
        self._episodes = episodes
        self._numbers = itertools.count()
        self._under_way: dict[int, int] = {}  # episodes of partial rollout, by the number of the response

    def _take_turn(self, conversation: _Conversation, completion: Completion, waiting: list) -> Iterator[Completion]:
        self._enter_episode(conversation)
        conversation.add_turn(completion)
        turn = conversation.turn
        conversation.end = self._turns.end_of(turn)
        if completion.finish_reason != "stop":  # half an action is none
            yield self._end(conversation, completion.finish_reason)
            return
        conversation.num_calls += 1
        action = self._tokenizer.decode(turn)
        waiting.append((conversation, [self._episodes.step(conversation.episode, action)]))

    def _enter_episode(self, conversation: _Conversation) -> None:
        """Find the episode of a conversation, or begin it: where the run was resumed, with the actions of then."""
        request, is_partial = conversation.request, conversation.request.begun is not None
        if is_partial and request.response in self._under_way:
            conversation.episode = self._under_way[request.response]
        if conversation.episode is not None:
            return
        conversation.episode = next(self._numbers)
        if is_partial:
            self._under_way[request.response] = conversation.episode
        self._episodes.begin(conversation.episode, request.answer, request.extra)
        conversation.episode_return = conversation.episode_return or 0.0
        pairs = zip(conversation.is_generated, conversation.tokens)
        turns = [
            [token for _, token in turn]
            for by_model, turn in itertools.groupby(pairs, lambda pair: pair[0])
            if by_model
        ]
        for turn in turns[: conversation.num_turns]:
            self._episodes.step(conversation.episode, self._tokenizer.decode(turn))

    def _end(self, conversation: _Conversation, finish_reason: str) -> Completion:
        if conversation.request.begun is not None:
            del self._under_way[conversation.request.response]
        self._episodes.end(conversation.episode)
        return conversation.completion(finish_reason)

    def _answer_ids(self, conversation: _Conversation, answers: Sequence["Future | ToolAnswer"]) -> list[int] | str:
        step = read_step(answers[0].result())
        if step.failure:
            conversation.num_failures += 1
            conversation.episode_return = math.nan
            if step.is_unscored and not conversation.unscored:
                conversation.unscored = f"environment: {step.failure}"
            print(f"mindrlhf: an episode has ended early: {step.failure[:500]}", file=sys.stderr, flush=True)
            return "stop"
        conversation.episode_return += step.reward
        conversation.step_rewards.append(step.reward)
        if step.is_over:
            return "stop"
        if conversation.num_turns >= self._limits.max_turns:
            return "length"
        shown = self._cut(self._as_data(step.observation, conversation))
        return self._tokenizer.encode(self._turns.observation(shown, self._options(conversation), conversation.end))


def with_tools(
    tools: "ToolSection",
    generator: CompletionSource,
    tokenizer: Tokenizer,
    stack: contextlib.ExitStack,
    files: Sequence["PromptFile"] = (),
) -> CompletionSource:
    """Return the generator, with the tools, the environment or the agent of a config's section before it if there are
    any; ``stack`` ends them.

    Args:
        files: of all prompts that will be sampled.

    Raises:
        UserError: see ``conversation_template``.
    """
    if not (tools.environment or tools.names or tools.agent):
        return generator
    if tools.agent:
        from mindrlhf.rollout.agents.source import AgentEpisodes  # takes half a second: an HTTP server

        template = conversation_template(tools, files, tokenizer)
        longest = max(file.header.longest_prompt for file in files)
        return stack.enter_context(AgentEpisodes(generator, tokenizer, template, tools, longest))
    limits = ConversationLimits(tools.max_turns, 2 * tools.max_turns, tools.max_response_tokens)
    template = conversation_template(tools, files, tokenizer)
    if tools.environment:
        return Episodes(generator, stack.enter_context(EpisodePool.from_config(tools)), tokenizer, limits, template)
    is_told = template is not None and "tools" in template.options  # by the template itself
    if is_told and tools.dialect == dialect_of(template.source) == AUTO_DIALECT:
        print(
            f"mindrlhf: warning: the chat template {template.name!r} teaches the model no form of calls that is known: "
            "only those between <tool_call> and </tool_call> are read; see tools.dialect",
            file=sys.stderr,
            flush=True,
        )
    pool = stack.enter_context(ToolPool.from_config(tools))
    return Conversations(generator, pool, tokenizer, limits, template, tools.dialect)


def conversation_template(
    tools: "ToolSection", files: Sequence["PromptFile"], tokenizer: Tokenizer | None
) -> PromptTemplate | None:
    """Return the chat template that made the prompts of files, None when none did or there are no tools; for an agent
    then the tokenizer's.

    Raises:
        UserError: they were made by different ones, so that a later turn could be of either; an agent has none.
    """
    if not files or tokenizer is None or not (tools.environment or tools.names or tools.agent):
        return None
    templates = [template_of(file.header, tokenizer) for file in files]
    sources = [template and (template.source, template.options) for template in templates]
    for file, source in zip(files, sources):
        if source != sources[0]:
            found = [f"{one.path} with {_shown_template(one.header)}" for one in (files[0], file)]
            raise UserError(
                f"with tools all prompts need one chat template, found {' and '.join(found)}: build them again with "
                "the same --template and --template-option"
            )
    if tools.agent and templates[0] is None:
        if not tokenizer.chat_templates:
            raise UserError(
                f"'tools.agent' is {tools.agent}, whose turns are written with a chat template, but neither were the "
                f"prompts of {files[0].path} made with one nor has the tokenizer any: build them with --template FILE"
            )
        return load_template(CHAT, tokenizer)
    return templates[0]


def _shown_template(header: "PromptFileHeader") -> str:
    return f"{header.template!r} {header.template_options or ''}".strip()
