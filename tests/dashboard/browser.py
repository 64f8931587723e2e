"""What the tests of the live page do in a browser."""

from __future__ import annotations

import re
from typing import Any

from tests.dashboard.stand_in import KEY

#: The fixture ``visit``.
Seen = Any

#: For Metrics.add_windows: of 16 draft tokens 9 are accepted; 13 of 20 tokens are written.
WINDOWS = [1, 0, 1, 1, 1]
#: Milliseconds that a change may take to be seen.
SOON = 30_000


class Visit:
    """A page in a context of its own, with all that it asked for and complained of."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"timezone_id": "Etc/UTC", **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.url = f"{url}/dashboard"

    def open(self) -> Any:
        """Load the page and wait for its first figures."""
        self.page.goto(self.url)
        self.page.wait_for_selector("#main[aria-busy=false]")
        return self.page


def text(page: Any, selector: str) -> str:
    return re.sub(r"\s+", " ", page.inner_text(selector)).strip()


#: What the canvas shows of a plot. ``plots()``: the page's own, by the ids of their elements.
CANVAS = """
const { charts, bars } = await import(new URL("dashboard/main.js", document.baseURI).href);
const plots = () => ({
  ...Object.fromEntries([...charts].map(([id, { chart }]) => [id, chart.plot])),
  positions: bars.plot,
});
const rgba = (colour) => {
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data];
};
const pixels = (plot, x, y, width, height) => {
  const { data } = plot.ctx.getImageData(Math.floor(x), Math.floor(y), Math.ceil(width), Math.ceil(height));
  return Array.from({ length: data.length / 4 }, (_, pixel) => [...data.slice(4 * pixel, 4 * pixel + 4)]);
};
/** Whether a pixel beside the place has the colour, less what rounding takes of a translucent one. */
const has = (plot, [x, y], colour, alpha = 1) => {
  const [r, g, b, a] = rgba(colour);
  const near = ([R, G, B, A]) =>
    Math.abs(A - a * alpha) <= 4 && [R - r, G - g, B - b].every((off) => Math.abs(off) <= 8);
  return pixels(plot, x - 1.5, y - 1.5, 3, 3).some(near);
};
const place = (plot, at, value) => [plot.valToPos(at, "x", true), plot.valToPos(value, "y", true)];
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
"""


def on_canvas(page: Any, script: str, argument: Any = None) -> Any:
    """Return what a function body with the helpers above returns; it has the argument as ``arg``."""
    return page.evaluate(f"async (arg) => {{ {CANVAS} {script} }}", argument)


def drawn(page: Any, chart: str) -> list[list[float]]:
    """Return time and value of each point of a chart's first line; its canvas has all not covered."""
    points, missing = on_canvas(
        page,
        """const plot = plots()[arg];
        if (!plot) return [[], []];
        const [times, values, ...others] = plot.data;
        const covered = (at) => others.some((other) => other[at] !== null
          && Math.abs(place(plot, 0, other[at])[1] - place(plot, 0, values[at])[1]) < 4 * devicePixelRatio);
        const there = [...values.keys()].filter((at) => values[at] !== null);
        const shown = (at) => covered(at) || has(plot, place(plot, times[at], values[at]), style("first"));
        return [there.map((at) => [times[at], values[at]]), there.filter((at) => !shown(at))];""",
        chart,
    )
    assert missing == []
    return points  # type: ignore[no-any-return]


def drawn_bars(page: Any) -> int:
    """Return the number of bars on the canvas; there are none but those of the data."""
    there, painted = on_canvas(
        page,
        """const plot = plots().positions;
        const [places, shares] = plot.data;
        const middle = (at) => place(plot, at, shares[at] / 2);
        return [shares, places.filter((at) => shares[at] && has(plot, middle(at), style("first"), 0.78))];""",
    )
    assert painted == [at for at, share in enumerate(there) if share]
    return len([share for share in there if share is not None])


def wait(page: Any, selector: str, words: str) -> None:
    """Wait until the element says so."""
    page.wait_for_function(
        "([selector, words]) => document.querySelector(selector).textContent.includes(words)",
        arg=[selector, words],
        timeout=SOON,
    )


def unlock(page: Any, key: str = KEY) -> None:
    page.fill("#key", key)
    page.click("#key-form button")
