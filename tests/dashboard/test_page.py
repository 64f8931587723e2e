"""The live page in real Chromium, against the stand-in server: figures, states, the switch, keyboard."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.responses import PlainTextResponse

from tests.conftest import find_free_port
from tests.dashboard.browser import SOON, WINDOWS, Seen, drawn, text, unlock, wait
from tests.dashboard.stand_in import KEY, Metrics, StandIn, serve
from tests.waiting import wait_until

#: As the page writes them.
NONE, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


def pressed(page: Any) -> list[str]:
    return page.eval_on_selector_all("#modes [aria-pressed=true]", "list => list.map((b) => b.textContent)")


def test_figures_move_with_the_metrics(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics.add_windows([2, 0, 0, 0, 0])
    page = visit(stand_in.url).open()
    assert text(page, "#acceptance") == NONE
    assert text(page, "#acceptance-start") == "0.0 % since the start"
    stand_in.metrics.add_windows(WINDOWS)
    stand_in.metrics.set("vllm:num_requests_running", 3)
    stand_in.metrics.set("vllm:num_requests_waiting", 2)
    wait(page, "#acceptance", "56.3 %")
    assert text(page, "#acceptance-more").startswith("9 of 16 in the last ")
    assert text(page, "#saved") == "35.0 %"
    assert text(page, "#saved-more") == "33.3 kB written for 51.2 kB"
    assert text(page, "#requests") == "3"
    assert text(page, "#requests-more") == "2 waiting"
    assert pressed(page) == ["stage"]
    assert "position 1: 75.0 %, since start 50.0 %" in (
        page.get_attribute("#positions .plot", "aria-label") or ""
    )
    rows = page.inner_text("#paths").split("\n")
    assert "Commit of accepted tokens\t33.3 kB\t38.4 kB" in rows
    assert "Saved\t17.9 kB\t38.4 kB" in rows
    assert text(page, "#accounting") == "Agrees"
    for chart in ("chart-tokens", "chart-acceptance", "chart-bytes", "chart-output", "chart-requests"):
        before = drawn(page, chart)
        wait_until(
            lambda chart=chart, before=before: drawn(page, chart) != before, SOON / 1000, f"{chart} moves"
        )
        assert drawn(page, chart)


def test_more_bytes_than_direct_writes_are_shown_as_a_loss(stand_in: StandIn, visit: Seen) -> None:
    page = visit(stand_in.url).open()
    stand_in.metrics.add_windows(WINDOWS, "cow")
    wait(page, "#saved", f"{MINUS}115.0 %")
    assert "extra" in (page.get_attribute("#saved", "class") or "")
    assert "Log of old bytes" in text(page, "#paths")


def test_direct_windows_are_listed_by_reason(stand_in: StandIn, visit: Seen) -> None:
    page = visit(stand_in.url).open()
    assert "None" in text(page, "#direct-none")
    stand_in.metrics.inc("nwor_direct_windows", 3, "graph")
    stand_in.metrics.inc("nwor_direct_windows", 4, "batch_order")
    wait(page, "#direct", "graph")
    rows = page.locator("#direct tr")
    assert rows.nth(0).inner_text().split("\t")[1:] == ["4", "4"]
    assert "a window does not stand in the leading part of the batch" in rows.nth(0).inner_text()
    assert not page.is_visible("#direct-none")


def test_a_mismatch_is_loud(stand_in: StandIn, visit: Seen) -> None:
    page = visit(stand_in.url).open()
    assert text(page, "#alerts") == ""
    stand_in.metrics.inc("nwor_accounting_mismatches", 2, "accepted_tokens")
    wait(page, "#alerts", "“accepted_tokens” did not agree 2 times")
    assert page.get_attribute("#alerts", "role") == "alert"
    assert text(page, "#accounting") == "2 mismatches"


def test_what_the_server_lacks_is_said_and_its_panels_are_gone(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics = Metrics(nwor=False)
    stand_in.metrics.add_windows(WINDOWS)
    page = visit(stand_in.url).open()
    wait(page, "#notes", "This engine has no NWOR")
    assert page.is_visible("#chart-acceptance")
    assert not page.is_visible("#chart-bytes")
    assert text(page, "#acceptance-start") == "56.3 % since the start"
    stand_in.metrics = Metrics(speculation=False)
    wait(page, "#notes", "does not speculate")
    assert not page.is_visible("#chart-acceptance")
    assert page.is_visible("#chart-output")
    stand_in.metrics = Metrics(statistics=False)
    wait(page, "#notes", "--disable-log-stats")
    stand_in.metrics = Metrics()
    page.wait_for_function("() => document.querySelector('#notes').textContent === ''", timeout=SOON)
    assert page.is_visible("#chart-bytes")


def test_a_choice_of_draft_tokens_is_shown_over_time(stand_in: StandIn, visit: Seen) -> None:
    page = visit(stand_in.url).open()
    assert not page.is_visible("#chart-drafts")
    assert not page.is_visible("#chart-estimates")
    stand_in.metrics = Metrics(choice=True)
    wait(page, "#drafts-text", "4 now, chosen by the engine.")
    assert page.is_visible("#chart-drafts")
    assert page.locator("#chart-estimates .u-series:not(.clock) .u-label").all_inner_texts() == [
        f"up to {position}" for position in (1, 2, 3, 4)
    ]
    wait(page, "#chart-estimates .u-legend", "73.0 %")
    for _ in range(3):
        stand_in.metrics.choose(2, [0.5, 0.25, 0.12, 0.06])
        wait(page, "#drafts-text", "2 now")
    wait(page, "#chart-estimates .u-legend", "25.0 %")

    def averages_two() -> bool:
        stand_in.metrics.choose(2, [0.5, 0.25, 0.12, 0.06])
        return text(page, "#chart-drafts .u-series:not(.clock) .u-value") == "2.0"

    wait_until(averages_two, SOON / 1000, "the average is 2.0")
    assert drawn(page, "chart-drafts")
    stand_in.metrics.choose(0, [0.1, 0.0, 0.0, 0.0], auto=False, without=65.0)
    wait(page, "#drafts-text", "0 now, fixed at present; none for 65 s.")


def test_draft_tokens_are_set_with_the_key(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics = Metrics(choice=True)
    page = visit(stand_in.url).open()
    assert not page.is_visible("#lengths-form")
    unlock(page)
    wait(page, "#lengths-why", "In force: auto:0-6, started with auto:0-6.")
    page.fill("#lengths", "auto:1-3")
    page.click("#lengths-form button")
    wait(page, "#admin-answer", "Draft tokens auto:0-6 → auto:1-3 at verify step 7, on 2 ranks.")
    wait(page, "#lengths-why", "In force: auto:1-3")
    wait(page, "#changes", "set draft tokens from auto:0-6 to auto:1-3")
    assert [state.draft_tokens for state in stand_in.engine.ranks] == ["auto:1-3"] * 2
    page.fill("#lengths", "7")
    page.keyboard.press("Enter")
    wait(page, "#admin-error", "Draft tokens 7 lie outside of auto:0-6")
    page.fill("#lengths", "<many>")
    page.keyboard.press("Enter")
    wait(page, "#admin-error", "use auto, bounds as auto:1-8, or a number")
    assert [state.draft_tokens for state in stand_in.engine.ranks] == ["auto:1-3"] * 2


def test_old_figures_are_marked_and_the_page_recovers_by_itself(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics.add_windows(WINDOWS)
    page = visit(stand_in.url).open()
    assert text(page, "#state") == "Live"
    stand_in.stop()
    wait(page, "#alerts", "The server cannot be reached. Figures below are of ")
    assert "stale" in (page.get_attribute("body", "class") or "")
    assert text(page, "#acceptance-start") == "56.3 % since the start"
    assert page.title().startswith("(!)")
    # A restarted server counts from zero.
    stand_in.metrics = Metrics()
    stand_in.metrics.add_windows([0, 0, 0, 0, 3])
    stand_in.start()
    wait(page, "#state-text", "Live")
    wait(page, "#acceptance-start", "100.0 % since the start")
    assert text(page, "#alerts") == ""
    assert "stale" not in (page.get_attribute("body", "class") or "")
    assert text(page, "#acceptance") == "100.0 %"


def test_a_dead_engine_behind_a_living_server(stand_in: StandIn, visit: Seen) -> None:
    page = visit(stand_in.url).open()
    stand_in.health = 503
    wait(page, "#state-text", "The engine is down")
    assert page.is_disabled("#modes button[data-mode=off]")
    # An alert that changed at each look would be spoken each time.
    said = text(page, "#alerts")
    page.evaluate(
        "() => new MutationObserver(() => document.body.dataset.spoken = 'again')"
        ".observe(document.querySelector('#alerts'), { childList: true, subtree: true, characterData: true })"
    )
    before = text(page, "#updated")
    page.wait_for_function(
        "before => document.querySelector('#updated').textContent !== before", arg=before, timeout=SOON
    )
    assert text(page, "#alerts") == said
    assert page.get_attribute("body", "data-spoken") is None
    stand_in.health = 200
    wait(page, "#state-text", "Live")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (403, "no", "/dashboard/metrics.json answers 403"),
        (200, "<html>login</html>", "/dashboard/metrics.json cannot be read"),
    ],
)
def test_a_proxy_that_answers_something_else(
    stand_in: StandIn, visit: Seen, status: int, body: str, words: str
) -> None:
    stand_in.metrics_answer = PlainTextResponse(body, status_code=status)
    seen = visit(stand_in.url)
    page = seen.page
    page.goto(seen.url)
    wait(page, "#state-text", words)
    stand_in.metrics_answer = None
    wait(page, "#state-text", "Live")


def test_the_switch_switches_and_the_key_stays_in_memory(stand_in: StandIn, visit: Seen) -> None:
    seen = visit(stand_in.url)
    page = seen.open()
    assert page.is_disabled("#modes button[data-mode=off]")
    unlock(page)
    wait(page, "#admin-answer", "Unlocked.")
    assert page.is_disabled("#modes button[data-mode=cow]")
    assert "--nwor-modes" in (page.get_attribute("#modes button[data-mode=cow]", "title") or "")
    page.click("#modes button[data-mode=off]")
    wait(page, "#admin-answer", "stage → off at verify step 7, on 2 ranks.")
    assert [state.mode.value for state in stand_in.engine.ranks] == ["off", "off"]
    wait(page, "#changes", "switched the mode from stage to off")
    # A look at the metrics that began before the switch may show the mode of before once more.
    wait_until(lambda: pressed(page) == ["off"], 10, "the mode that was chosen is not shown")
    assert stand_in.metrics.gauges["nwor_mode"].labels("0", "demo", "off")._value.get() == 1
    # The key is in the calls' header and nowhere else.
    assert all(KEY not in url for _, url, _ in stand_in.requests)
    assert all((key == f"Bearer {KEY}") == ("/admin/" in url) for _, url, key in stand_in.requests)
    assert KEY not in page.content()
    assert page.input_value("#key") == ""
    kept = page.evaluate(
        "async () => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, history.state,"
        " name, location.href, await indexedDB.databases(), await caches.keys()])"
    )
    assert kept == f'[{{}},{{}},"",null,"","{seen.url}",[],[]]'
    assert seen.context.cookies() == []
    page.reload()
    page.wait_for_selector("#main[aria-busy=false]")
    assert page.is_visible("#key-form")
    assert page.is_disabled("#modes button[data-mode=stage]")


def test_an_engine_that_stages_nothing_says_why(stand_in: StandIn, visit: Seen) -> None:
    for state in stand_in.engine.ranks:
        state.unsupported = ("mla", "another kind of cache")
    stand_in.metrics.set_mode("off")
    page = visit(stand_in.url).open()
    unlock(page)
    wait(page, "#admin-answer", "Unlocked.")
    wait(page, "#ranks-text", "Rank 1 can stage nothing: another kind of cache.")
    assert pressed(page) == ["off"]
    page.click("#modes button[data-mode=stage]")
    wait(page, "#admin-error", "Nothing can be staged in this engine, reason mla: another kind of cache.")
    assert pressed(page) == ["off"]


def test_forgetting_the_key_closes_the_switch(stand_in: StandIn, visit: Seen) -> None:
    page = visit(stand_in.url).open()
    unlock(page)
    wait(page, "#admin-answer", "Unlocked.")
    page.click("#forget")
    assert page.is_visible("#key-form")
    assert page.is_disabled("#modes button[data-mode=off]")


@pytest.mark.parametrize(
    ("key", "words"),
    [("nobody", "The admin key is not valid"), ("schlüssel", "is not valid"), ("鍵", "no request can carry")],
)
def test_a_wrong_key_is_refused_in_words(stand_in: StandIn, visit: Seen, key: str, words: str) -> None:
    page = visit(stand_in.url).open()
    unlock(page, key)
    wait(page, "#admin-error", words)
    assert page.is_visible("#key-form")
    assert page.is_disabled("#modes button[data-mode=off]")
    assert page.evaluate("document.activeElement.id") == "key"
    unlock(page)
    wait(page, "#admin-answer", "Unlocked.")
    assert text(page, "#admin-error") == ""


def test_a_server_without_a_key_says_how_to_set_one(visit: Seen) -> None:
    server = StandIn(find_free_port())
    server.key = None
    server.start()
    try:
        page = visit(server.url).open()
        unlock(page)
        wait(page, "#admin-error", "--admin-api-key")
    finally:
        server.stop()


def test_refusals_of_a_switch_are_shown_in_words(stand_in: StandIn, visit: Seen) -> None:
    page = visit(stand_in.url).open()
    unlock(page)
    wait(page, "#admin-answer", "Unlocked.")
    stand_in.engine.errored = True
    page.click("#modes button[data-mode=off]")
    wait(page, "#admin-error", "The engine is dead")
    # A mode that the page has no button for: the server refuses, and the page says why.
    stand_in.engine.errored = False
    page.evaluate("document.querySelector('#modes [data-mode=off]').dataset.mode = 'warp'")
    page.evaluate("document.querySelector('#modes [data-mode=warp]').disabled = false")
    page.evaluate("document.querySelector('#modes [data-mode=warp]').click()")
    wait(page, "#admin-error", "off, stage, cow")
    page.evaluate("document.querySelector('#modes [data-mode=warp]').dataset.mode = 'cow'")
    page.evaluate("document.querySelectorAll('#modes [data-mode=cow]')[0].disabled = false")
    page.evaluate("document.querySelectorAll('#modes [data-mode=cow]')[0].click()")
    wait(page, "#admin-error", "was not enabled at start-up")


def test_engines_in_different_modes(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics = Metrics(("0", "1"))
    stand_in.metrics.set_mode("off", "1")
    page = visit(stand_in.url).open()
    assert pressed(page) == []
    assert "different modes" in text(page, "#mode-text")


def test_by_keyboard_alone(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics.add_windows(WINDOWS)
    page = visit(stand_in.url).open()

    def tab_to(selector: str) -> None:
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("s => document.activeElement.matches(s)", selector):
                style = page.evaluate(
                    "() => { const s = getComputedStyle(document.activeElement);"
                    " return [s.outlineStyle, parseFloat(s.outlineWidth)]; }"
                )
                assert style[0] == "solid"
                assert style[1] >= 2
                return
        raise AssertionError(f"{selector} is not reached")

    tab_to("#period")
    page.keyboard.press("ArrowDown")
    assert page.input_value("#period") == "900"
    tab_to("#key")
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    wait(page, "#admin-answer", "Unlocked.")
    # The focus is on the first mode that can be chosen.
    assert page.evaluate("document.activeElement.dataset.mode") == "off"
    page.keyboard.press("Enter")
    wait(page, "#admin-answer", "stage → off")
    # It comes back there once the page has asked for the state after the switch.
    wait_until(
        lambda: page.evaluate("document.activeElement.dataset.mode") == "off",
        10,
        "the focus does not come back to the mode that was chosen",
    )
    tab_to("#chart-acceptance .plot")
    stand_in.metrics.add_windows(WINDOWS)
    wait(page, "#acceptance", "56.3 %")
    page.keyboard.press("End")
    assert re.match(r"\d\d:\d\d:\d\d: accepted of draft tokens ", text(page, "#spoken"))
    assert re.match(r"\d\d:\d\d:\d\d", text(page, "#chart-acceptance .clock"))
    page.keyboard.press("Home")
    assert f"accepted of draft tokens {NONE}" in text(page, "#spoken")
    page.keyboard.press("Escape")
    assert text(page, "#chart-acceptance .clock") == ""


def test_pointing_reads_all_charts_at_once(stand_in: StandIn, visit: Seen) -> None:
    page = visit(stand_in.url).open()
    stand_in.metrics.set("vllm:num_requests_running", 7)
    wait(page, "#requests", "7")
    page.locator("#chart-requests .plot").scroll_into_view_if_needed()
    box = page.locator("#chart-requests .plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 40)
    clock = text(page, "#chart-requests .clock")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", clock)
    assert text(page, "#chart-bytes .clock") == clock
    page.mouse.move(5, 5)
    assert text(page, "#chart-requests .clock") == ""


def test_no_other_host_is_asked_and_the_policy_forbids_it(stand_in: StandIn, visit: Seen) -> None:
    seen = visit(stand_in.url)
    page = seen.open()
    unlock(page)
    wait(page, "#admin-answer", "Unlocked.")
    hosts = {urlsplit(url).netloc for url in seen.requests}
    assert hosts == {urlsplit(stand_in.url).netloc}
    with serve(find_free_port()) as other:
        refused = page.evaluate(
            "url => fetch(url).then(() => 'let through', () => 'refused')", f"{other.url}/metrics"
        )
        assert refused == "refused"
        assert other.requests == []


def test_behind_a_proxy_that_adds_a_prefix(visit: Seen) -> None:
    with serve(find_free_port(), "/models/one") as server:
        seen = visit(server.url)
        page = seen.page
        page.goto(f"{seen.url}/")
        page.wait_for_selector("#main[aria-busy=false]")
        assert page.url == seen.url
        assert text(page, "#state") == "Live"
        unlock(page)
        wait(page, "#admin-answer", "Unlocked.")
        assert {urlsplit(url).path.startswith("/models/one/") for url in seen.requests} == {True}
