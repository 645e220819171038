"""Agents in partial rollout: rounds of segments, and what a checkpoint keeps of an episode under way."""

import threading
import time

import numpy as np
import pytest
import saved_progress
from agent_fakes import END, decoded, prompt, serving, spelled, user

from mindrlhf.errors import RunFailure
from mindrlhf.rollout.partial import NOTHING
from mindrlhf.rollout.types import Completion, GenerationRequest, SamplingParams
from mindrlhf.training.loop.sampling.segments import Group

pytestmark = pytest.mark.timeout(120)
SAMPLING = SamplingParams(400, temperature=0.7, stop_token_ids=(END,))
SEGMENT = 5


class Server:
    """Goes on with replies from where they are; a log-probability depends on what stands before the token alone."""

    def __init__(self):
        self.version, self.given, self.fails_after = 1, [], None

    def generate(self, requests, sampling):
        for request in reversed(requests):
            for index in range(request.num_samples):
                if self.fails_after == 0:
                    raise RunFailure("the server died")
                self.fails_after = self.fails_after and self.fails_after - 1
                yield self._complete(request, index, request.token_limit(sampling))

    def _complete(self, request, index, limit):
        first = len(request.prompt_ids) - request.num_begun
        ids, begun = request.prompt_ids[:first], request.prompt_ids[first:]
        last = decoded(ids).split("<|im_start|>")[-2]
        whole = [*spelled(f"{len(last)}{last[::-1].strip()} {'ok' * (len(ids) % 7)}"), END]
        assert tuple(whole[: len(begun)]) == tuple(begun)
        found = whole[len(begun) : len(begun) + limit]
        places = np.arange(len(request.prompt_ids), len(request.prompt_ids) + len(found), dtype=np.float32)
        self.given.append((self.version, found))
        reason = "stop" if len(begun) + len(found) == len(whole) else "length"
        return Completion(request.request_id, index, np.array(found, np.int32), -places / 1024, reason, self.version)


def agent(record, client):
    """Three turns, in the midst of which another role looks at what was said; its reward is what it read."""
    messages, read = [user(record["question"])], 0
    for turn in range(3):
        messages.append(client.chat(messages, max_tokens=40))
        read += len(messages[-1]["content"])
        messages.append(user(f"and {turn}?"))
        if turn == 1:
            status, answer = client.post({"messages": [user("look: " + record["question"])], "n": 2, "model": "other"})
            assert status == 200
            read += sum(len(one["message"]["content"]) for one in answer["choices"])
    return {"reward": float(read), "text": messages[-2]["content"]}


def questions(count=3):
    return [prompt("apples " * (number + 1), number) for number in range(count)]


def begun(request, response, segment=SEGMENT):
    return GenerationRequest(
        0, request.prompt_ids, 1, request.seed, segment, answer=request.answer, extra=request.extra,
        begun=response, response=request.request_id + 100,
    )  # fmt: skip


def one_round(source, asked, responses, segment=SEGMENT):
    """Give every response that goes on a segment."""
    places = [place for place, one in enumerate(responses) if not one.finish_reason]
    requests = [begun(asked[place], responses[place], segment) for place in places]
    requests = [GenerationRequest(**{**vars(one), "request_id": number}) for number, one in enumerate(requests)]
    found = {one.request_id: one for one in source.generate(requests, SAMPLING)}
    assert sorted(found) == list(range(len(places)))
    return [found[places.index(place)] if place in places else one for place, one in enumerate(responses)]


def in_rounds(source, server, asked, responses, num_rounds=1000, segment=SEGMENT):
    for _ in range(num_rounds):
        if all(one.finish_reason for one in responses):
            break
        responses = one_round(source, asked, responses, segment)
        server.version += 1
    return responses


def shown(completion):
    """All that is trained on, and told."""
    sequences = [
        (one.role, one.prompt_ids.tolist(), one.token_ids.tolist(), one.is_generated.tolist())
        for one in completion.agent.sequences
    ]
    counts = (completion.num_turns, completion.agent.num_other_tokens, completion.agent.num_refused)
    told = (completion.episode_return, completion.agent.text, completion.agent.failure, completion.finish_reason)
    return sequences, completion.logprobs.tolist(), counts, told


def stored(response, directory):
    """A response as a checkpoint brings it back."""
    return saved_progress.stored([Group(0, 0, (response,), 0)], directory)[0].responses[0]


def whole():
    with serving(Server(), agent) as (source, _):
        return sorted(source.generate(questions(), SAMPLING), key=lambda one: one.request_id)


@pytest.mark.parametrize("segment", [1, 5, 37, 400])
def test_episodes_by_segments_are_the_whole_ones_with_the_versions_of_their_tokens(segment):
    server, asked = Server(), questions()
    with serving(server, agent) as (source, _):
        found = in_rounds(source, server, asked, [NOTHING] * 3, segment=segment)
        assert not source._running and not source._under_way and not source._questions.waiting
    assert [shown(one) for one in found] == [shown(one) for one in whole()]
    assert all(len(ids) <= segment for _, ids in server.given)
    expected = {}
    for version, ids in server.given:
        expected[version] = expected.get(version, 0) + len(ids)
    counts = {}
    for one in found:
        assert [version for version, _ in one.spans] == sorted({version for version, _ in one.spans})
        assert sum(count for _, count in one.spans) == len(one.logprobs) and one.weights_version == one.spans[0][0]
        for version, count in one.spans:
            counts[version] = counts.get(version, 0) + count
    assert counts == expected


def test_an_episode_that_goes_on_has_no_tokens_of_its_own_but_what_calls_were_given():
    server, asked = Server(), questions(1)
    with serving(server, agent) as (source, _):
        (first,) = in_rounds(source, server, asked, [NOTHING], 1)
        assert first.finish_reason == "" and len(first.token_ids) == 0 and first.spans == ((1, SEGMENT),)
        (given,) = first.given
        assert (given.token_ids.tolist(), given.finish_reason) == (server.given[0][1], "")


@pytest.mark.parametrize("num_rounds", [1, 2, 5, 9, 14, 20])
def test_a_run_that_is_killed_goes_on_bit_for_bit_and_nothing_is_generated_twice(tmp_path, num_rounds):
    undisturbed, asked = Server(), questions()
    with serving(undisturbed, agent) as (source, _):
        expected = in_rounds(source, undisturbed, asked, [NOTHING] * 3)
    server = Server()
    with serving(server, agent) as (source, _):
        responses = in_rounds(source, server, asked, [NOTHING] * 3, num_rounds)
    responses = [stored(one, tmp_path / str(place)) for place, one in enumerate(responses)]
    with serving(server, agent) as (source, _):
        found = in_rounds(source, server, asked, responses)
    assert [shown(one) for one in found] == [shown(one) for one in expected]
    assert [one.spans for one in found] == [one.spans for one in expected]
    assert sorted(server.given) == sorted(undisturbed.given)


def test_an_agent_that_takes_another_way_when_it_is_run_anew_is_answered_anew(tmp_path):
    runs = []

    def wavering(record, client):
        runs.append(0)
        return client.chat([user(f"run {len(runs)}")])["content"]

    server, asked = Server(), questions(1)
    with serving(server, wavering) as (source, _):
        responses = in_rounds(source, server, asked, [NOTHING], 2)
    assert [len(one.token_ids) for one in responses[0].given] == [10]
    with serving(server, wavering) as (source, _):
        (found,) = in_rounds(source, server, asked, [stored(responses[0], tmp_path / "0")])
    (sequence,) = found.agent.sequences
    assert "run 2" in decoded(sequence.prompt_ids) and found.spans[0][0] == 3
    assert sum(count for _, count in found.spans) == len(sequence.token_ids)


def test_a_resumed_agent_that_is_slow_on_its_way_misses_no_round(tmp_path):
    pauses = [0.0]

    def slow(record, client):
        for turn in range(3):
            client.chat([user(f"{turn} {record['question']}")])
            time.sleep(pauses[0])
        return 1.0

    server, asked = Server(), questions(2)
    with serving(server, slow, agent_gather_s=2.0) as (source, _):
        responses = in_rounds(source, server, asked, [NOTHING] * 2, 9)
    assert all(len(one.given) > 1 for one in responses)
    responses = [stored(one, tmp_path / str(place)) for place, one in enumerate(responses)]
    count, pauses[0] = len(server.given), 2.5
    with serving(server, slow, agent_gather_s=2.0) as (source, _):
        one_round(source, asked, responses)
    assert len(server.given) == count + 2


def test_more_episodes_than_agents_at_once_begin_as_others_end():
    server, asked, at_once = Server(), questions(5), []

    def counted(record, client):
        at_once.append(1)
        client.chat([user(record["question"])])
        at_once.pop()
        return 1.0

    with serving(server, counted, agents_at_once=2) as (source, _):
        responses = one_round(source, asked, [NOTHING] * 5)
        assert [len(one.given) for one in responses[:2]] == [1, 1]
        assert not any(hasattr(one, "given") or one.finish_reason for one in responses[2:])
        assert len(at_once) == 2
        found = in_rounds(source, server, asked, responses)
    assert all(one.finish_reason == "stop" and one.episode_return == 1.0 for one in found)


def test_no_time_of_an_agent_passes_between_rounds_but_in_them():
    def two(record, client):
        client.chat([user(record["question"])])
        client.chat([user("more")])
        if record["answer"] == "1":
            time.sleep(8)
        return 1.0

    server, asked, responses = Server(), questions(2), [NOTHING] * 2
    with serving(server, two, agent_timeout_s=4.0) as (source, _):
        for number in range(100):
            if all(one.finish_reason for one in responses):
                break
            responses = one_round(source, asked, responses)
            if number == 0:
                time.sleep(4.5)
    assert [bool(one.agent.failure) for one in responses] == [False, True]
    assert len(responses[1].logprobs) > 0  # what was generated is trained on all the same


def test_a_server_that_dies_in_a_round_costs_no_agent_its_call():
    server, asked = Server(), questions()
    with serving(server, agent) as (source, _):
        responses = in_rounds(source, server, asked, [NOTHING] * 3, 3)
        server.fails_after = 1
        with pytest.raises(RunFailure, match="the server died"):
            one_round(source, asked, responses)
        server.fails_after = None
        found = in_rounds(source, server, asked, responses)
    assert [shown(one) for one in found] == [shown(one) for one in whole()]


def test_a_call_of_several_samples_begins_again_where_the_server_died_among_their_first_segments():
    def two_at_once(record, client):
        status, answer = client.post({"messages": [user("a")], "n": 3})
        return float(len({one["message"]["content"] for one in answer["choices"]})) if status == 200 else 0.0

    server, asked = Server(), questions(1)
    with serving(server, two_at_once) as (source, _):
        server.fails_after = 2
        with pytest.raises(RunFailure):
            one_round(source, asked, [NOTHING])
        server.fails_after = None
        (found,) = in_rounds(source, server, asked, [NOTHING])
    assert found.episode_return == 1.0 and len(found.agent.sequences) == 3


def test_episodes_of_an_evaluation_between_rounds_are_apart():
    server, asked = Server(), questions()
    with serving(server, agent) as (source, _):
        responses = in_rounds(source, server, asked, [NOTHING] * 3, 4)
        waiting = [*source._questions.waiting]
        numbered = [GenerationRequest(**{**vars(one), "request_id": one.request_id + 100}) for one in asked]
        evaluated = sorted(source.generate(numbered, SAMPLING), key=lambda one: one.request_id)
        assert source._questions.waiting == waiting and waiting
        found = in_rounds(source, server, asked, responses)
    assert [shown(one) for one in evaluated] == [shown(one) for one in found] == [shown(one) for one in whole()]
    assert all(one.spans == () for one in evaluated)


def test_an_agent_that_asks_nothing_has_a_token_of_its_round():
    server, asked = Server(), questions(2)
    server.version = 4
    with serving(server, lambda record, client: 0.5) as (source, _):
        found = one_round(source, asked, [NOTHING] * 2)
    for one in found:
        assert (one.num_turns, one.episode_return, len(one.token_ids)) == (0, 0.5, 1)
        assert one.spans == ((4, 1),) and one.finish_reason


def test_an_agent_that_is_busy_keeps_the_others_waiting_for_the_gathering_alone():
    free = threading.Event()

    def busy(record, client):
        if record["answer"] == "0":
            free.wait(60)
        return float(len(client.chat([user("a")])["content"]))

    server, asked = Server(), questions(2)
    with serving(server, busy, agent_gather_s=2.0) as (source, _):
        responses = one_round(source, asked, [NOTHING] * 2)
        assert [len(one.given) for one in responses] == [0, 1]
        free.set()
        found = in_rounds(source, server, asked, responses)
    assert [one.finish_reason for one in found] == ["stop"] * 2
