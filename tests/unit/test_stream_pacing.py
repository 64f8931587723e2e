"""Claim: paced streams bring the same tokens in fewer pieces, first and last ones at once, others soon.

Coverage: vLLM's own output processor and collectors on an event loop, with a clock of the tests.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from server.api import output_processor, stream_pacing
from server.api.output_processor import MendedOutputProcessor
from server.api.stream_pacing import MOST_HOLD

#: Tokens of a step for each request.
PIECE = 2


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(stream_pacing, "time", clock)
    yield clock
    stream_pacing._metrics()[0].set(0.0)


class Front:
    """An output processor with requests whose pieces a reader each takes."""

    def __init__(self, clock: Clock, requests: int, pacing: bool = True, **params: Any) -> None:
        self.clock = clock
        self.engine = SimpleNamespace(output_processor=OutputProcessor(tokenizer=None, log_stats=False))
        output_processor.install(self.engine, pacing)
        self.processor: Any = self.engine.output_processor
        self.pieces: list[list[Any]] = [[] for _ in range(requests)]
        self.times: list[list[float]] = [[] for _ in range(requests)]
        self.queues = [self._add(index, **params) for index in range(requests)]
        self.readers = [asyncio.create_task(self._read(index)) for index in range(requests)]

    def _add(self, index: int, kind: RequestOutputKind = RequestOutputKind.DELTA, **params: Any) -> Any:
        name = f"r{index}"
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[5, 6],
            mm_features=None,
            sampling_params=SamplingParams(output_kind=kind, detokenize=False, max_tokens=1000, **params),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        queue = RequestOutputCollector(kind, name)
        self.processor.add_request(request, None, queue=queue)
        return queue

    async def _read(self, index: int) -> None:
        while True:
            piece = await self.queues[index].get()
            self.pieces[index].append(piece)
            self.times[index].append(self.clock.now)
            if piece.finished:
                return

    def step(
        self, first: int, late: float, finished: bool = False, requests: list[int] | None = None
    ) -> None:
        """Deal out a step's outputs, made ``late`` seconds ago."""
        chosen = range(len(self.queues)) if requests is None else requests
        outputs = [
            EngineCoreOutput(
                request_id=f"r{index}",
                new_token_ids=list(range(first, first + PIECE)),
                finish_reason=FinishReason.LENGTH if finished else None,
            )
            for index in chosen
        ]
        self.processor.process_outputs(outputs, self.clock.now - late)

    def fall_behind(self, each: float = 0.0) -> None:
        """Deal out 60 steps that are far too late, of which all but the first are held."""
        for number in range(60):
            self.step(PIECE * number, MOST_HOLD)
            self.clock.now += each

    def tokens(self, index: int) -> list[int]:
        return [token for piece in self.pieces[index] for token in piece.outputs[0].token_ids]


async def _settle() -> None:
    """Let timers fire, whose delays are real, and readers read."""
    await asyncio.sleep(2 * stream_pacing.LOOK + 0.001)


async def _stream(front: Front, steps: int, late: float, each: float) -> None:
    for number in range(steps):
        front.step(PIECE * number, late, finished=number == steps - 1)
        await _settle()
        front.clock.now += each
    await asyncio.wait_for(asyncio.gather(*front.readers), 10)


def test_a_front_end_that_keeps_up_sends_each_piece(clock: Clock) -> None:
    async def run() -> None:
        front = Front(clock, 3)
        await _stream(front, 30, late=0.001, each=0.004)
        assert [len(pieces) for pieces in front.pieces] == [30] * 3
        assert front.processor._nwor_pacer.hold == 0.0

    asyncio.run(run())


def test_a_late_one_merges_pieces_and_brings_the_same_tokens(clock: Clock) -> None:
    async def run() -> None:
        merged_before = stream_pacing._metrics()[1]._value.get()
        front = Front(clock, 4)
        await _stream(front, 120, late=0.02, each=0.004)
        for index, pieces in enumerate(front.pieces):
            assert front.tokens(index) == list(range(120 * PIECE))
            assert 120 * 0.004 / MOST_HOLD <= len(pieces) < 50
            assert pieces[-1].finished
            assert pieces[-1].outputs[0].finish_reason == "length"
            assert not any(piece.finished for piece in pieces[:-1])
            gaps = [after - before for before, after in itertools.pairwise(front.times[index])]
            # A piece that is due is delivered before the next step here, and each step takes 4 ms.
            assert max(gaps) <= MOST_HOLD + 0.005
        await _settle()
        merged = stream_pacing._metrics()[1]._value.get() - merged_before
        assert merged + sum(map(len, front.pieces)) == 4 * 120
        assert stream_pacing._metrics()[0]._value.get() == pytest.approx(front.processor._nwor_pacer.hold)

    asyncio.run(run())


def test_first_and_last_pieces_do_not_wait(clock: Clock) -> None:
    async def run() -> None:
        front = Front(clock, 2)
        for number in range(60):
            front.step(number, 0.05, requests=[0])
            await _settle()
            clock.now += 0.001
        assert front.processor._nwor_pacer.hold == MOST_HOLD
        front.step(0, 0.05, requests=[1])
        await asyncio.sleep(0)
        assert len(front.pieces[1]) == 1
        front.step(PIECE, 0.05, requests=[1])
        await asyncio.sleep(0)
        assert len(front.pieces[1]) == 1
        front.step(2 * PIECE, 0.05, finished=True, requests=[1])
        await asyncio.sleep(0)
        assert front.tokens(1) == list(range(3 * PIECE))
        front.step(0, 0.05, finished=True, requests=[0])
        await asyncio.wait_for(asyncio.gather(*front.readers), 10)

    asyncio.run(run())


def test_what_is_held_comes_without_another_step(clock: Clock) -> None:
    async def run() -> None:
        front = Front(clock, 1)
        front.fall_behind(each=0.001)
        await _settle()
        clock.now += MOST_HOLD
        await _settle()
        assert front.tokens(0) == list(range(60 * PIECE))
        assert front.processor._nwor_pacer._timer is None
        for reader in front.readers:
            reader.cancel()

    asyncio.run(run())


def test_an_error_is_told_at_once(clock: Clock) -> None:
    async def run() -> None:
        front = Front(clock, 1)
        front.fall_behind()
        assert front.queues[0]._nwor_held is not None
        front.queues[0].put(ValueError("over"))
        with pytest.raises(ValueError, match="over"):
            await asyncio.wait_for(front.readers[0], 10)
        clock.now += MOST_HOLD
        await _settle()
        assert front.processor._nwor_pacer._timer is None

    asyncio.run(run())


def test_one_that_cannot_be_delivered_stops_no_other(clock: Clock) -> None:
    async def run() -> None:
        front = Front(clock, 2)
        front.fall_behind()
        broken = front.queues[0]
        assert broken._nwor_held is not None
        broken.deliver = lambda now: 1 / 0
        await _settle()
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(front.readers[0], 10)
        clock.now += MOST_HOLD
        await _settle()
        front.step(60 * PIECE, 0.05, requests=[1])
        clock.now += MOST_HOLD
        await _settle()
        assert front.tokens(1) == list(range(61 * PIECE))
        front.readers[1].cancel()

    asyncio.run(run())


def test_one_late_step_after_a_pause_says_little(clock: Clock) -> None:
    async def run() -> None:
        front = Front(clock, 1)
        for number in range(20):
            front.step(PIECE * number, 0.0005)
            clock.now += 0.004
        clock.now += 0.2
        front.step(20 * PIECE, 0.012)
        assert front.processor._nwor_pacer.hold < MOST_HOLD / 2
        for reader in front.readers:
            reader.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("slices", [1, 4])
def test_outputs_in_parts_are_as_late_as_whole_ones(clock: Clock, slices: int) -> None:
    async def run() -> None:
        front = Front(clock, 1)
        pacer = front.processor._nwor_pacer

        def steps(late: float) -> int:
            """Deal out steps of 80 ms until it is known how late they are."""
            count, wanted = 0, MOST_HOLD if late else 0.0
            while pacer.hold != wanted and count < 100:
                made = clock.now - late
                for _ in range(slices):
                    pacer.note(made)
                    clock.now += 0.08 / slices
                count += 1
            return count

        assert steps(0.2) <= 2
        assert steps(0.0) <= 25
        for reader in front.readers:
            reader.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("finished", [True, False])
def test_the_end_of_an_answer_or_of_an_input_does_not_wait(clock: Clock, finished: bool) -> None:
    async def run() -> None:
        front = Front(clock, 1)
        front.fall_behind()
        queue = front.queues[0]
        held = queue._nwor_held
        assert held is not None
        # As where one of several answers has ended, or an input whose request goes on with the next.
        last = copy.deepcopy(held)
        last.finished, last.outputs[0].finish_reason = finished, "length"
        queue.put(last)
        await asyncio.sleep(0)
        assert front.pieces[0][-1].outputs[0].finish_reason == "length"
        for reader in front.readers:
            reader.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("late", [-5.0, 60.0])
def test_clocks_of_two_machines_say_nothing(clock: Clock, late: float) -> None:
    async def run() -> None:
        front = Front(clock, 1)
        await _stream(front, 40, late, each=0.002)
        assert len(front.pieces[0]) == 40

    asyncio.run(run())


def test_it_ends_when_the_front_end_has_caught_up(clock: Clock) -> None:
    async def run() -> None:
        front = Front(clock, 1)
        for number in range(100):
            front.step(PIECE * number, 0.03)
            await _settle()
            clock.now += 0.002
        seen = len(front.pieces[0])
        assert seen < 30
        for number in range(100, 400):
            front.step(PIECE * number, 0.0005, finished=number == 399)
            await _settle()
            clock.now += 0.002
        assert front.processor._nwor_pacer.hold == 0.0
        assert len(front.pieces[0]) - seen > 100
        assert front.tokens(0) == list(range(400 * PIECE))

    asyncio.run(run())


def test_the_gauge_falls_where_nothing_runs_any_more(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_pacing, "REST", 0.02)

    async def run() -> None:
        front = Front(clock, 1)
        for number in range(30):
            front.step(PIECE * number, 0.05, finished=number == 29)
            clock.now += 0.01
        pacer = front.processor._nwor_pacer
        assert stream_pacing._metrics()[0]._value.get() == pacer.hold == MOST_HOLD
        clock.now += 1.0
        await asyncio.sleep(0.1)
        assert stream_pacing._metrics()[0]._value.get() == pacer.hold == 0.0
        assert pacer._resting is None

    asyncio.run(run())


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_other_kinds_of_outputs_are_left_alone(clock: Clock, kind: RequestOutputKind) -> None:
    async def run() -> None:
        front = Front(clock, 1, kind=kind)
        assert type(front.queues[0]) is RequestOutputCollector
        await _stream(front, 40, 0.05, each=0.001)
        assert list(front.pieces[0][-1].outputs[0].token_ids) == list(range(40 * PIECE))

    asyncio.run(run())


def test_it_can_be_turned_off(clock: Clock) -> None:
    async def run() -> None:
        front = Front(clock, 1, pacing=False)
        assert type(front.processor) is MendedOutputProcessor
        assert type(front.queues[0]) is RequestOutputCollector
        await _stream(front, 40, 0.05, each=0.001)
        assert len(front.pieces[0]) == 40

    asyncio.run(run())


def test_metrics_come_back_after_another_engine(clock: Clock) -> None:
    from prometheus_client import REGISTRY

    from nwor.engine.stats.metrics import _unregister

    first = stream_pacing.StreamPacer()
    _unregister()
    assert REGISTRY.get_sample_value("nwor_stream_hold_seconds") is None
    second = stream_pacing.StreamPacer()
    assert REGISTRY.get_sample_value("nwor_stream_hold_seconds") == 0.0
    assert second._counter is not first._counter
    second.merged = 3
    second._look()
    assert REGISTRY.get_sample_value("nwor_stream_pieces_merged_total") == 3.0


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_events_keeps_the_tokens(clock: Clock, seed: int) -> None:
    async def run() -> None:
        source = random.Random(seed)
        front = Front(clock, 5)
        given, ended = [0] * 5, set[int]()
        while len(ended) < 5:
            chosen = [index for index in range(5) if index not in ended and source.random() < 0.7]
            for index in chosen:
                last = given[index] > 40 and source.random() < 0.1
                front.step(given[index], source.choice((0.0, 0.01, 0.08)), last, [index])
                given[index] += PIECE
                if last:
                    ended.add(index)
            if source.random() < 0.5:
                await _settle()
            clock.now += source.choice((0.0, 0.002, 0.03))
        await asyncio.wait_for(asyncio.gather(*front.readers), 10)
        for index in range(5):
            assert front.tokens(index) == list(range(given[index]))

    asyncio.run(run())
