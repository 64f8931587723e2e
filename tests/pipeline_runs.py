"""What tests let engines do: requests that come, go and read from the prefix cache.

The engine's scheduler runs in the process of the test; its workers need not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Tokens = tuple[int, ...]


def core_of(llm: Any) -> Any:
    """Return the engine core of an ``LLM``."""
    return llm.llm_engine.engine_core.engine_core


def drain(llm: Any) -> None:
    """Let the steps that are under way come to their end, and the workers know which requests have."""
    core = core_of(llm)
    while core.batch_queue or core.scheduler.has_requests():
        core.step_fn()


def counter(llm: Any, name: str) -> int:
    """Return one of vLLM's counters, of all engines together."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


@contextmanager
def statistics(llm: Any) -> Iterator[list[Any]]:
    """Gather the statistics that the scheduler makes of each step."""
    scheduler, stats = core_of(llm).scheduler, []
    make_stats = scheduler.make_stats
    scheduler.make_stats = lambda *args, **kwargs: stats.append(make_stats(*args, **kwargs)) or stats[-1]
    try:
        yield stats
    finally:
        del scheduler.make_stats


@contextmanager
def outputs(llm: Any) -> Iterator[dict[str, Any]]:
    """Gather the latest output of each request by its name."""
    engine, latest = llm.llm_engine, {}
    step = engine.step

    def watched() -> list[Any]:
        made: list[Any] = step()
        latest.update((output.request_id, output) for output in made)
        return made

    engine.step = watched
    try:
        yield latest
    finally:
        del engine.step


def hear_all(llm: Any, step: Callable[[], None]) -> None:
    """Take in the results of all steps under way, scheduling no further one, as after a pause."""
    core = core_of(llm)
    core.scheduler.has_requests = lambda: False
    try:
        while core.batch_queue:
            step()
    finally:
        del core.scheduler.has_requests


def prefix_hits(
    llm: Any, start: list[int], sampling: Callable[..., Any], *, tokens: int, pause: bool
) -> Tokens:
    """Let requests come with what a running one has got so far, while it goes on and right as it ends.

    Args:
        llm: the engine.
        start: prompt of the running one.
        sampling: makes sampling parameters, given ``max_tokens``.
        tokens: how many the running one makes.
        pause: take in all that is under way before each further request.

    Returns:
        What the running one made.

    """
    engine = llm.llm_engine
    engine.add_request("parent", {"prompt_token_ids": start}, sampling(max_tokens=tokens))
    known: dict[str, Tokens] = {"parent": ()}

    def step() -> None:
        for output in engine.step():
            known[output.request_id] = tuple(output.outputs[0].token_ids)

    last = 0
    while engine.has_unfinished_requests():
        step()
        if len(known["parent"]) - last >= 7:
            if pause:
                hear_all(llm, step)
            last = len(known["parent"])
            # One token more, or a block that ends here could not be hit.
            child = {"prompt_token_ids": [*start, *known["parent"], 100]}
            engine.add_request(f"child{last}", child, sampling(max_tokens=4))
    assert len(known) > 4
    return known["parent"]


def aborts(llm: Any, prompts: Sequence[str], sampling: Callable[..., Any]) -> dict[int, Tokens]:
    """Abort the first three requests one after another, and start each anew at once.

    Returns:
        What each made: those that went on under their index, those that were started anew under 100 more.

    """
    engine = llm.llm_engine
    done: dict[int, Tokens] = {}
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, sampling())
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = tuple(output.outputs[0].token_ids)
        step += 1
        if step in (6, 8, 10):
            gone = step // 2 - 3
            engine.abort_request([str(gone)])
            engine.add_request(str(100 + gone), prompts[gone], sampling())
    assert not {0, 1, 2} & done.keys()
    return done


def switches(
    llm: Any, prompts: Sequence[str], sampling: Callable[..., Any], modes: Iterable[str]
) -> list[Tokens]:
    """Switch the mode every other step while requests run, and return what they made."""
    engine, modes = llm.llm_engine, list(modes)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, sampling())
    done: dict[int, Tokens] = {}
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = tuple(output.outputs[0].token_ids)
        step += 1
        llm.collective_rpc("nwor_set_mode", args=(modes[step // 2 % len(modes)],))
    return [done[index] for index in range(len(prompts))]
