"""Windows counted by kind give the figures of windows counted one by one, and survive their journey."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from nwor.counts.formulas import WindowCounts, count_window
from nwor.counts.records import Tally, summarize
from nwor.engine.stats import figures
from nwor.engine.stats.metrics import CountedHistogram, NworStatLogger
from nwor.engine.stats.peers import Peers
from nwor.engine.trees.requirements import CHAIN_REASONS
from nwor.modes import Mode
from server.api.nwor_metrics import describe

DRAFTS = 4


@st.composite
def kinds(draw):
    mode = draw(st.sampled_from(list(Mode)))
    reason = "" if mode is Mode.OFF else draw(st.sampled_from(["", "mla", "batch_order"]))
    drafts = draw(st.integers(1, DRAFTS))
    return (mode.value, reason, drafts, draw(st.integers(0, drafts)))


def one_by_one(windows, token_bytes):
    total = WindowCounts()
    for mode, reason, drafts, accepted in windows:
        counts = count_window(
            Mode(mode),
            draft_tokens=drafts,
            accepted_tokens=accepted,
            token_bytes=token_bytes,
            direct_reason=reason or None,
        )
        total.add(counts)
    return total


def tally_of(windows):
    tally = Tally()
    for kind in windows:
        tally.add(kind)
    return tally


@given(st.lists(st.tuples(st.integers(0, DRAFTS + 2), st.integers(1, 9)), max_size=20))
def test_a_histogram_takes_in_a_value_many_times(seen):
    at_once, singly = CollectorRegistry(), CollectorRegistry()
    buckets = [float(count) for count in range(DRAFTS + 1)]
    ours = CountedHistogram("tokens", "Tokens.", ["model"], buckets=buckets, registry=at_once).labels("m")
    stock = Histogram("tokens", "Tokens.", ["model"], buckets=buckets, registry=singly).labels("m")
    for value, times in seen:
        ours.observe_times(value, times)
        for _ in range(times):
            stock.observe(value)
    shown = [
        {
            (sample.name, *sample.labels.items()): sample.value
            for metric in one.collect()
            for sample in metric.samples
        }
        for one in (at_once, singly)
    ]
    created = ("tokens_created", ("model", "m"))
    assert shown[0].keys() == shown[1].keys()
    assert all(shown[0][key] == shown[1][key] for key in shown[0] if key != created)


@given(st.lists(kinds(), max_size=60), st.integers(1, 1 << 20))
def test_a_tally_is_its_windows(windows, token_bytes):
    counts = tally_of(windows).counts(token_bytes)
    assert counts == one_by_one(windows, token_bytes)
    assert counts.windows == len(windows) == sum(counts.outcomes.values()) == sum(counts.modes.values())
    assert sum(counts.accepted_windows) == len(windows)
    assert sum(counts.accepted_by_position) == counts.accepted_tokens == sum(w[3] for w in windows)
    assert counts.first_tokens + counts.draft_tokens == sum(1 + w[2] for w in windows)
    for position, accepted in enumerate(counts.accepted_by_position):
        assert accepted == sum(w[3] > position for w in windows)


@given(st.lists(kinds(), max_size=30), st.lists(kinds(), max_size=30))
def test_the_parts_of_a_whole_add_up(first, second):
    whole = summarize([(tally_of(first), 10), (tally_of(second), 10)])
    assert whole == one_by_one(first + second, 10)


def test_figures_survive_the_way_to_the_front_end():
    figures.apply_decoder_patch()
    request = figures.RequestFigures(**vars(RequestSpecDecodeMetrics.new(DRAFTS)))
    request.observe(4, 2)
    request.nwor[("stage", "", 4, 2)] = 3
    request.nwor_token_bytes = 10
    request.nwor_max_draft_tokens, request.nwor_why_bounded = 0, "asked"
    request.nwor_steps_without_drafts = 7
    engine = figures.EngineFigures(kinds={("cow", "", 4, 0): 2}, mode="cow", mismatches={"request": 1})
    engine.draft_steps, engine.drafting = {4: 10, 0: 1}, DRAFTING
    engine.chain_requests = {"penalties": 2}
    sent = EngineCoreOutputs(
        outputs=[EngineCoreOutput("a", [1], spec_decode_metrics=request)],
        scheduler_stats=figures.EngineStats(num_running_reqs=3, nwor=engine),
    )
    got = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    assert got.outputs[0].spec_decode_metrics == request
    assert got.scheduler_stats.nwor == engine
    assert got.scheduler_stats.num_running_reqs == 3


def test_outputs_of_an_engine_without_nwor_decode_as_before():
    figures.apply_decoder_patch()
    request = RequestSpecDecodeMetrics.new(DRAFTS)
    request.observe(4, 1)
    sent = EngineCoreOutputs(
        outputs=[EngineCoreOutput("a", [1], spec_decode_metrics=request)],
        scheduler_stats=SchedulerStats(num_running_reqs=3),
    )
    got = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    assert got.outputs[0].spec_decode_metrics.to_dict() == request.to_dict()
    assert got.scheduler_stats.nwor is None


def test_a_snapshot_does_not_change_with_later_steps():
    request = figures.RequestFigures(**vars(RequestSpecDecodeMetrics.new(DRAFTS)))
    request.nwor[("stage", "", 4, 2)] = 1
    copy = figures.snapshot(request)
    request.nwor[("stage", "", 4, 2)] += 1
    request.observe(4, 2)
    assert copy.nwor == {("stage", "", 4, 2): 1}
    assert sum(copy.histogram) == 0


def test_an_answer_sums_its_sequences_by_the_formulas():
    b = 100
    parts = []
    for windows in ([("stage", "", 4, 3), ("off", "", 4, 1)], [("cow", "", 2, 1), ("stage", "fault", 4, 0)]):
        part = figures.RequestFigures(**vars(RequestSpecDecodeMetrics.new(DRAFTS)))
        part.nwor, part.nwor_token_bytes = tally_of(windows).kinds, b
        parts.append(part)
    baseline = 5 + 5 + 3 + 5
    written = 4 + 5 + (3 + 2 + 1) + 5
    assert describe([*parts, None]) == {
        "modes": ["cow", "off", "stage"],
        "windows": 4,
        "first_tokens": 4,
        "draft_tokens": 14,
        "accepted_tokens": 5,
        "rejected_tokens": 9,
        "acceptance_rate": 5 / 14,
        "accepted_by_position": [3, 1, 1, 0],
        "kv_bytes_baseline": baseline * b,
        "kv_bytes_written": written * b,
        "kv_bytes_saved": (baseline - written) * b,
        "direct_windows": {"fault": 1},
        "max_draft_tokens": None,
        "why_bounded": None,
        "steps_without_drafts": 0,
    }
    assert describe([RequestSpecDecodeMetrics.new(DRAFTS), None]) is None


def test_an_answer_tells_the_tightest_bound_of_its_sequences():
    parts = [figures.RequestFigures(**vars(RequestSpecDecodeMetrics.new(DRAFTS))) for _ in range(3)]
    assert describe(parts)["why_bounded"] is None
    for part, bound, why, skipped in zip(
        parts, (3, 0, None), ("asked", "rarely accepted", ""), (0, 7, 2), strict=True
    ):
        part.nwor_max_draft_tokens, part.nwor_why_bounded = bound, why
        part.nwor_steps_without_drafts = skipped

    def told(known):
        answer = describe(known)
        return [answer[name] for name in ("max_draft_tokens", "why_bounded", "steps_without_drafts")]

    assert told(parts) == [0, "rarely accepted", 9]
    assert told(parts[:1]) == [3, "asked", 0]
    parts[1].nwor_max_draft_tokens = None  # it has come back
    assert told(parts[1:]) == [None, "rarely accepted", 9]


def make_logger(engines: int = 1, peers: Peers | None = None) -> NworStatLogger:
    from types import SimpleNamespace

    config = SimpleNamespace(
        additional_config={"nwor": {"mode": "stage"}},
        model_config=SimpleNamespace(served_model_name="tiny"),
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
    )
    return NworStatLogger(config, list(range(engines)), peers)


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "tiny", "engine": "0"} | labels)


def test_metrics_are_the_figures():
    logger = make_logger()
    windows = [("stage", "", 4, 2)] * 3 + [("cow", "", 4, 1), ("stage", "mla", 3, 0), ("off", "", 4, 4)]
    engine = figures.EngineFigures(
        kinds=tally_of(windows).kinds,
        token_bytes=10,
        mode="stage",
        finished_windows=5,
        aborted_windows=1,
        late_windows=2,
        mismatches={"windows": 1},
    )
    logger.record(figures.EngineStats(nwor=engine), None)
    logger.record(SchedulerStats(), None)
    expected = one_by_one(windows, 10)
    for path in ("direct", "commit", "stage", "log", "restore"):
        assert sample("nwor_kv_write_bytes_total", path=path) == getattr(expected, f"{path}_bytes")
    assert sample("nwor_kv_write_bytes_baseline_total") == expected.baseline_bytes
    for kind in ("first", "draft", "accepted", "rejected", "committed", "staged"):
        assert sample("nwor_tokens_total", kind=kind) == getattr(expected, f"{kind}_tokens")
    assert sample("nwor_windows_total", outcome="committed") == 3
    assert sample("nwor_windows_total", outcome="restored") == 1
    assert sample("nwor_windows_total", outcome="direct") == 2
    assert sample("nwor_direct_windows_total", reason="mla") == 1
    assert sample("nwor_request_windows_total", end="finished") == 5
    assert sample("nwor_request_windows_total", end="aborted") == 1
    assert sample("nwor_request_windows_total", end="late") == 2
    assert sample("nwor_accounting_mismatches_total", figure="windows") == 1
    assert sample("nwor_accounting_mismatches_total", figure="request") == 0
    assert sample("nwor_window_accepted_tokens_count") == 6
    assert sample("nwor_window_accepted_tokens_sum") == 2 * 3 + 1 + 0 + 4
    assert sample("nwor_window_accepted_tokens_bucket", le="1.0") == 2


DRAFTING = {
    "auto": True,
    "bounds": "auto:0-4",
    "chosen": 2,
    "requests": 16,
    "why": "2 draft tokens give most tokens",
    "acceptance": [0.7, 0.5, 0.3, 0.2],
    "milliseconds": {"0": 9.1, "2": 10.2},
    "tokens_per_second": {"0": 110.0, "2": 210.0},
    "seconds_without_drafts": 0.0,
    "least_gain": 0.12,
}


def test_metrics_show_what_is_drafted():
    from types import SimpleNamespace

    config = SimpleNamespace(
        additional_config={"nwor": {"mode": "stage", "draft_tokens": "auto:0-4"}},
        model_config=SimpleNamespace(served_model_name="tiny"),
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
    )
    logger = NworStatLogger(config, [0])
    assert [sample("nwor_draft_steps_total", draft_tokens=str(k)) for k in range(6)] == [0] * 5 + [None]
    assert logger.drafting() == []
    for steps in ({2: 10, 0: 3}, {2: 5}):
        new = figures.EngineFigures(draft_steps=steps, drafting=DRAFTING)
        logger.record(figures.EngineStats(nwor=new), None)
    assert [sample("nwor_draft_steps_total", draft_tokens=str(k)) for k in (0, 1, 2)] == [3, 0, 15]
    assert sample("nwor_draft_tokens_chosen") == 2
    assert sample("nwor_draft_tokens_auto") == 1
    assert [sample("nwor_draft_acceptance_estimate", position=str(i)) for i in range(4)] == [
        0.7,
        0.5,
        0.3,
        0.2,
    ]
    assert sample("nwor_seconds_without_drafts") == 0
    assert sample("nwor_draft_least_gain") == 0.12
    off = DRAFTING | {"auto": False, "chosen": 0, "seconds_without_drafts": 61.5}
    logger.record(figures.EngineStats(nwor=figures.EngineFigures(drafting=off)), None)
    assert (sample("nwor_draft_tokens_chosen"), sample("nwor_draft_tokens_auto")) == (0, 0)
    assert sample("nwor_seconds_without_drafts") == 61.5
    (told,) = logger.drafting()
    assert told.pop("seconds_ago") >= 0
    assert told == {"engine": 0, **off}


def test_what_is_drafted_is_known_to_processes_that_have_not_heard_of_it(tmp_path):
    from types import SimpleNamespace

    config = SimpleNamespace(
        additional_config={"nwor": {"mode": "stage", "draft_tokens": "auto:0-4"}},
        model_config=SimpleNamespace(served_model_name="tiny"),
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
    )
    # Two objects stand for two processes.
    one, other = (NworStatLogger(config, [0, 1], Peers(tmp_path, 1)) for _ in range(2))
    assert other.drafting() == []

    def heard(logger, engine, chosen):
        new = figures.EngineFigures(drafting=DRAFTING | {"chosen": chosen})
        logger.record(figures.EngineStats(nwor=new), None, engine_idx=engine)

    def told(logger):
        return [(engine["engine"], engine["chosen"]) for engine in logger.drafting()]

    heard(one, 0, 1)
    assert told(one) == told(other) == [(0, 1)]
    heard(other, 1, 2)
    heard(other, 0, 3)
    # The latest counts, whichever of the two has heard it.
    assert told(one) == told(other) == [(0, 3), (1, 2)]
    heard(one, 0, 4)
    assert told(one) == told(other) == [(0, 4), (1, 2)]
    assert other.drafting()[0].items() >= (DRAFTING | {"chosen": 4}).items()


def test_metrics_show_a_tree_and_requests_without():
    from types import SimpleNamespace

    config = SimpleNamespace(
        additional_config={"nwor": {"tree": {"nodes": 16, "depth": 6}}},
        model_config=SimpleNamespace(served_model_name="tiny"),
        speculative_config=SimpleNamespace(num_speculative_tokens=16),
    )
    logger = NworStatLogger(config, [0])
    assert (sample("nwor_tree_nodes"), sample("nwor_tree_depth")) == (16, 6)
    assert [sample("nwor_chain_requests_total", reason=reason) for reason in CHAIN_REASONS] == [0] * 5
    for new in ({"penalties": 2}, {"penalties": 1, "bad_words": 1}):
        figure = figures.EngineFigures(kinds={("stage", "", 16, 3): 2}, chain_requests=new)
        logger.record(figures.EngineStats(nwor=figure), None)
    assert sample("nwor_chain_requests_total", reason="penalties") == 3
    assert sample("nwor_chain_requests_total", reason="bad_words") == 1
    # No window accepts more tokens than the tree is deep.
    assert sample("nwor_window_accepted_tokens_bucket", le="6.0") == 4
    assert sample("nwor_window_accepted_tokens_bucket", le="7.0") is None


def test_an_engine_without_trees_shows_none():
    make_logger()
    assert sample("nwor_tree_nodes") is None
    assert sample("nwor_chain_requests_total", reason="penalties") is None


def test_an_engine_with_a_fixed_number_shows_no_choice():
    make_logger()
    for name in ("draft_steps_total", "draft_tokens_chosen", "draft_tokens_auto", "draft_least_gain"):
        assert sample(f"nwor_{name}") is None
    assert sample("nwor_seconds_without_drafts") is None


def test_a_step_from_before_a_switch_does_not_turn_the_mode_back():
    logger = make_logger()
    logger.switched([{"old": "stage", "new": "off", "switches": 1}])
    assert sample("nwor_mode", mode="off") == 1
    logger.record(figures.EngineStats(nwor=figures.EngineFigures(mode="stage", switches=0)), None)
    assert sample("nwor_mode", mode="off") == 1
    logger.record(figures.EngineStats(nwor=figures.EngineFigures(mode="cow", switches=2)), None)
    assert sample("nwor_mode", mode="cow") == 1
    assert sample("nwor_mode", mode="off") == 0
    assert sample("nwor_mode_switches_total", mode="off") == 1


def test_a_switch_that_another_process_knows_of_is_not_turned_back(tmp_path: Path):
    """This process hears late of a step before it, and one that starts late has heard of none."""
    logger = make_logger(peers=Peers(tmp_path, 1))
    with Peers(tmp_path, 1).in_order(0, 2) as latest:  # another one's: the mode went to off and back
        assert latest
    logger.record(figures.EngineStats(nwor=figures.EngineFigures(mode="off", switches=1)), None)
    assert sample("nwor_mode", mode="stage") == 1
    assert sample("nwor_mode", mode="off") == 0
    logger.record(figures.EngineStats(nwor=figures.EngineFigures(mode="cow", switches=3)), None)
    assert sample("nwor_mode", mode="cow") == 1
    make_logger(peers=Peers(tmp_path, 1))
    assert not sample("nwor_mode", mode="stage")


def test_engines_have_switches_of_their_own():
    def step(mode: str, switches: int, engine: int) -> None:
        stats = figures.EngineStats(nwor=figures.EngineFigures(mode=mode, switches=switches))
        logger.record(stats, None, engine_idx=engine)

    logger = make_logger(2)
    step("stage", 0, 0)
    step("stage", 0, 1)
    step("off", 1, 0)  # a fault of the first engine, which a switch takes back
    logger.switched(
        [{"old": "off", "new": "stage", "switches": 2}, {"old": "stage", "new": "stage", "switches": 0}]
    )
    step("stage", 2, 0)
    step("off", 1, 1)  # now a fault of the second
    assert sample("nwor_mode", mode="stage") == 1
    assert sample("nwor_mode", mode="off", engine="1") == 1
    assert sample("nwor_mode", mode="stage", engine="1") == 0
    assert sample("nwor_mode_switches_total", mode="stage") == 1
    assert sample("nwor_mode_switches_total", mode="stage", engine="1") == 0
