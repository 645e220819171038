"""Graphs of launches on a fake NPU: noted while they run, and run again over the same memory."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fake_npu_kernels import on_host

Launch = tuple[Callable, tuple, dict[str, Any], Any]  # a function, its arguments, and its first results
_recorded: list[Launch] | None = None  # of the graph that is being captured


def launched(function: Callable) -> Callable:
    """Have what a function of tensors on NPUs does be one launch of a graph, where one is being captured."""

    @functools.wraps(function)
    def launch(*arguments: Any, **options: Any) -> Any:
        global _recorded
        noted, _recorded = _recorded, None  # what it calls is a part of it
        try:
            results = function(*arguments, **options)
        finally:
            _recorded = noted
        if noted is not None:
            noted.append((function, arguments, options, results))
        return results

    return launch


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


class Event:
    """What a graph waits for while it is replayed, until somebody records it: its launches may be updated before."""

    _is_recorded = False

    def wait(self, stream: Any) -> None:
        if _recorded is not None:
            _recorded.append((None, (self,), {}, None))

    def reset(self, stream: Any) -> None:
        """A replay resets what it has waited for."""

    def record(self, stream: Any) -> None:
        self._is_recorded = True
        _go_on()


_replayed: Iterator[Event] | None = None  # that of which it waits for events


def _replay(graph: Any) -> None:
    global _replayed
    assert _replayed is None, "the replay before has not ended"
    if not graph.is_replayed:
        print(f"fake NPU: a graph of {len(graph.launches)} launches is replayed", flush=True)
    graph.is_replayed = True
    _replayed = _play(graph.launches)
    _go_on()


def _go_on() -> None:
    global _replayed
    if _replayed is not None and next(_replayed, None) is None:
        _replayed = None


def _play(launches: list[Launch]) -> Iterator[Event]:
    """Run launches; yield events that are waited for, until they are recorded."""
    for place in range(len(launches)):
        function, arguments, options, results = launches[place]
        if function is None:
            (event,) = arguments
            while not event._is_recorded:
                yield event
            event._is_recorded = False
            continue
        again = function(*arguments, **options)
        for first, now in zip(_tensors(results), _tensors(again), strict=True):
            if first.data_ptr() != now.data_ptr():
                on_host(first).copy_(on_host(now))


def _begin(graph: Any, *_: Any, **__: Any) -> None:
    global _recorded
    graph.launches, graph.is_replayed = [], False
    _recorded = graph.launches


def _end(graph: Any) -> None:
    global _recorded
    print(f"fake NPU: a graph of {len(_recorded)} launches", flush=True)
    _recorded = None


_group_start = 0
_updated: tuple[list[Launch], int, int] | None = None


def _begin_group(stream: Any) -> None:
    global _group_start
    _group_start = len(_recorded)


def _end_group(stream: Any) -> tuple[list[Launch], int, int]:
    return _recorded, _group_start, len(_recorded)


def _begin_update(stream: Any, handle: tuple[list[Launch], int, int]) -> None:
    """What follows takes the place of a group of launches: with other arguments that are no tensors."""
    global _recorded, _updated
    _updated, _recorded = handle, []


def _end_update(stream: Any) -> None:
    global _recorded, _updated
    launches, start, stop = _updated
    assert len(_recorded) == stop - start, "an update has as many launches as it replaces"
    launches[start:stop] = _recorded
    _recorded = _updated = None


def install(npu: Any) -> None:
    """Put them in the place of ``torch.npu``'s."""
    npu.NPUGraph.capture_begin, npu.NPUGraph.capture_end = _begin, _end
    npu.NPUGraph.replay = _replay
    npu.ExternalEvent = Event
    npu.NPUGraph.reset = lambda graph: graph.launches.clear()
    npu.graph_task_group_begin, npu.graph_task_group_end = _begin_group, _end_group
    npu.graph_task_update_begin, npu.graph_task_update_end = _begin_update, _end_update
