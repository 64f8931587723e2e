"""The live page's charts in real Chromium: what their canvases show of points that a test gives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dashboard.browser import SOON, WINDOWS, Seen, drawn, on_canvas, text, wait
from tests.dashboard.stand_in import StandIn
from tests.waiting import wait_until

#: Makes a chart of its own at the page's end; ``show(rows)`` has a row for each second: a gap, then values.
MAKE = """
const { Chart } = await import(new URL("dashboard/chart.js", document.baseURI).href);
const host = document.createElement("section");
document.body.append(host);
const series = [
  { key: "a", label: "one", style: "first" },
  { key: "b", label: "two", style: "first" },
];
const start = Date.UTC(2026, 0, 1, 12);
const chart = new Chart(host, { title: "T", format: String, series, ...arg.options });
const show = (rows) => {
  const points = rows.map(([afterGap, a, b], at) => ({
    time: start + 1000 * at, afterGap, values: { a, b },
  }));
  chart.show(points, [start, start + 1000 * (rows.length - 1)]);
};
show(arg.rows);
const { plot } = chart;
await new Promise((done) => new ResizeObserver(() => plot.width && done()).observe(chart.frame));
await new Promise((done) => setTimeout(done, 50));
/** Whether something of the colour is drawn at so many seconds. */
const at = (second, value, colour) => has(plot, place(plot, start + 1000 * second, value), style(colour));
"""


@pytest.fixture
def made(stand_in: StandIn, visit: Seen) -> Any:
    """``made(rows, script, **options of the chart)``: what the script returns."""

    def start(
        rows: list[list[Any]], script: str, visited: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        page = visit(stand_in.url, **(visited or {})).open()
        return on_canvas(page, MAKE + script, {"rows": rows, "options": options})

    return start


def test_lines_have_gaps_and_a_point_alone_is_a_dot(made: Any) -> None:
    rows = [[False, value, None] for value in (3, 3, None, 3, None, 3, 3)] + [
        [True, 3, None],
        [False, 3, None],
    ]
    seconds = [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4.5, 5, 5.5, 6, 6.5, 7, 7.5, 8]
    shown = made(rows, f"return {seconds}.filter((second) => at(second, 3, 'first'));", least=4)
    # A missing value, a point alone, and a gap between two values that are there.
    assert shown == [0, 0.5, 1, 3, 5, 5.5, 6, 7, 7.5, 8]


@pytest.mark.parametrize("scale", [1, 2])
def test_the_area_is_coloured_by_which_line_is_higher(made: Any, scale: int) -> None:
    rows = [[False, 3, 1], [False, 3, 1], [False, 1, 3], [False, 1, 3], [True, 1, 3], [False, 1, 3]]
    script = """const spots = { 0.5: 2, 1.3: 2.1, 1.7: 1.9, 2.5: 2, 3.5: 2, 4.5: 2 };
    return Object.entries(spots).map(([second, value]) =>
      ["saved", "extra"].filter((colour) => at(Number(second), value, colour)));"""
    shown = made(rows, script, {"device_scale_factor": scale}, least=4, between=["a", "b"])
    assert shown == [["saved"], ["saved"], ["extra"], ["extra"], [], ["extra"]]
    outside = (
        "return [0.5, 2.5].map((second) => pixels(plot, ...place(plot, start + 1000 * second, 3.5), 1, 1));"
    )
    assert made(rows, outside, least=4, between=["a", "b"]) == [[[0, 0, 0, 0]]] * 2


@pytest.mark.parametrize(
    ("values", "options", "low", "high"),
    [
        ([None], {"least": 4}, 4, 4),
        ([0.5], {"least": 4}, 4, 4),
        ([9], {"least": 4}, 9, 10),
        ([0.2], {"top": 1}, 1, 1),
        ([3], {"top": 1}, 1, 1),
        ([2.5e9], {"least": 1000}, 2.5e9, 3e9),
    ],
)
def test_axes_begin_at_zero_and_end_where_they_should(
    made: Any, values: list[Any], options: dict[str, Any], low: float, high: float
) -> None:
    rows = [[False, value, None] for value in values * 2]
    (start, end), marks = made(
        rows, "return [[plot.scales.y.min, plot.scales.y.max], plot.axes[1]._splits];", **options
    )
    assert start == 0
    assert low <= end <= high
    assert marks[0] == 0
    assert 3 <= len(marks) <= 7
    assert marks[-1] <= end < 2 * marks[-1]


def test_times_below_are_round_and_local(made: Any) -> None:
    rows = [[False, 1, None]] * 120
    script = "return plot.axes[0]._values;"
    shown = made(rows, script, {"timezone_id": "Asia/Kolkata", "viewport": {"width": 500, "height": 700}})
    # No shorter steps than have room, and none between whole ones.
    assert shown == ["17:30:00", "17:30:30", "17:31:00", "17:31:30"]


def test_keys_read_all_charts_and_the_reading_stays_while_lines_move(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics.add_windows(WINDOWS)
    stand_in.metrics.set("vllm:num_requests_running", 3)
    page = visit(stand_in.url).open()
    wait_until(lambda: len(drawn(page, "chart-requests")) >= 2, SOON / 1000, "two points are there")
    page.focus("#chart-requests .plot")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    clock = text(page, "#chart-requests .clock")
    assert text(page, "#spoken") == f"{clock}: running 3, waiting 0"
    stand_in.metrics.set("vllm:num_requests_running", 5)
    before = len(drawn(page, "chart-requests"))
    wait_until(lambda: len(drawn(page, "chart-requests")) >= before + 2, SOON / 1000, "the line goes on")
    for chart in ("chart-requests", "chart-output", "chart-bytes"):
        assert text(page, f"#{chart} .clock") == clock
    assert text(page, "#chart-requests .u-series:nth-child(2) .u-value") == "3"
    # The dot is on the line, and the rule at its time.
    off = on_canvas(
        page,
        """const plot = plots()["chart-requests"];
        const { left, top } = plot.over.getBoundingClientRect();
        const dot = plot.over.querySelector(".u-cursor-pt").getBoundingClientRect();
        const [time, value] = [0, 1].map((line) => plot.data[line][plot.cursor.idx]);
        const rule = plot.over.querySelector(".u-cursor-x").getBoundingClientRect();
        return [
          dot.left + dot.width / 2 - left - plot.valToPos(time, "x"),
          dot.top + dot.height / 2 - top - plot.valToPos(value, "y"),
          rule.left - left - plot.valToPos(time, "x"),
        ];""",
    )
    assert [abs(distance) <= 1.5 for distance in off] == [True] * 3
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Home")
    assert text(page, "#chart-output .clock") <= clock
    page.keyboard.press("Tab")
    assert text(page, "#chart-output .clock") == ""
    assert text(page, "#chart-requests .u-series:nth-child(2) .u-value") == "5"


def test_a_finger_reads_too_and_a_click_hides_no_line(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics.set("vllm:num_requests_running", 3)
    page = visit(stand_in.url).open()
    wait_until(lambda: len(drawn(page, "chart-requests")) >= 2, SOON / 1000, "two points are there")
    over = page.locator("#chart-requests .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    place = {"clientX": box["x"] + box["width"] - 5, "clientY": box["y"] + 20, "pointerType": "touch"}
    over.dispatch_event("pointerdown", place)
    assert text(page, "#chart-output .clock") == text(page, "#chart-requests .clock") != ""
    over.dispatch_event("pointerleave", place)
    assert text(page, "#chart-output .clock") == ""
    page.click("#chart-requests .u-series:nth-child(2) .u-label")
    page.dblclick("#chart-requests .u-over")
    assert drawn(page, "chart-requests")


def test_charts_follow_the_theme_and_the_windows_size(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics.set("vllm:num_requests_running", 3)
    page = visit(stand_in.url, color_scheme="light").open()
    wait_until(lambda: len(drawn(page, "chart-requests")) >= 2, SOON / 1000, "two points are there")
    for scheme, width in (("dark", 1280), ("light", 600)):
        before = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--first')")
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 700})
        page.wait_for_function(
            "before => getComputedStyle(document.documentElement).getPropertyValue('--first') !== before",
            arg=before,
        )
        page.wait_for_timeout(100)
        # In the new colours, all the way to the new end.
        assert drawn(page, "chart-requests")
        canvas, frame = page.evaluate(
            "['canvas', ''].map((part) => "
            "document.querySelector(`#chart-requests .plot ${part}`).getBoundingClientRect().width)"
        )
        assert canvas == pytest.approx(frame, abs=1)


def test_what_a_chart_shows_is_said(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics.set("vllm:num_requests_running", 3)
    page = visit(stand_in.url).open()
    wait(page, "#requests", "3")
    frame = page.locator("#chart-requests .plot")
    label = "Requests. Latest: running 3, waiting 0. Arrow keys read earlier values."
    assert frame.get_attribute("aria-label") == label
    assert frame.get_attribute("role") == "group"
    # The drawing itself says nothing.
    assert page.locator(".plot > :not([aria-hidden=true])").count() == 0
    assert page.locator(".plot .u-legend").count() == 0
