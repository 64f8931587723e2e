"""The live page's sizes, colours and movement, in real Chromium."""

from __future__ import annotations

import re

import pytest

from nwor.tree_shape import TreeShape
from tests.dashboard.browser import WINDOWS, Seen, on_canvas, unlock, wait
from tests.dashboard.stand_in import Metrics, StandIn


@pytest.mark.parametrize("width", [360, 768, 1360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("tree", [None, TreeShape.of(63, 8)], ids=["chains", "trees"])
def test_sizes_and_contrast(
    stand_in: StandIn, visit: Seen, width: int, scheme: str, tree: TreeShape | None
) -> None:
    if tree is not None:
        stand_in.metrics = Metrics(tree=tree)
        stand_in.metrics.inc("nwor_chain_requests", 1234567, "structured_outputs")
    stand_in.metrics.add_windows(WINDOWS, "cow")
    stand_in.metrics.inc("nwor_accounting_mismatches", 2, "accepted_tokens")
    stand_in.metrics.inc("nwor_direct_windows", 123456, "attention_backend")
    page = visit(stand_in.url, viewport={"width": width, "height": 740}, color_scheme=scheme).open()
    unlock(page, "nobody")
    wait(page, "#admin-error", "not valid")
    unlock(page)
    wait(page, "#admin-answer", "Unlocked.")
    for stale in (False, True):
        if stale:
            stand_in.health = 503
            wait(page, "#state-text", "The engine is down")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        small = on_canvas(page, CONTRAST)
        assert small == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in re.findall(r"\d+", dark)[:3]) < 3 * 128) == (scheme == "dark")
    unnamed = page.eval_on_selector_all(
        "button, input, select, [tabindex='0'], [role=img], a",
        "list => list.filter((e) => !(e.textContent.trim() || e.getAttribute('aria-label')"
        " || e.labels?.length)).map((e) => e.outerHTML)",
    )
    assert unnamed == []


#: Every visible text whose colour stands out from what is behind it by less than 4.5.
CONTRAST = """
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = channels(color).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if ((channels(color)[3] ?? 1) === 1) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest("noscript, svg, .unseen")) continue;
    const pair = [getComputedStyle(element).color, behind(element)].map(light).sort((a, b) => a - b);
    const ratio = (pair[1] + 0.05) / (pair[0] + 0.05);
    let opacity = 1;
    for (let at = element; at; at = at.parentElement) opacity *= Number(getComputedStyle(at).opacity);
    if (ratio < 4.5 || opacity < 1) found.push([node.textContent.trim(), ratio, opacity]);
  }
  for (const [id, plot] of Object.entries(plots())) {
    const { ctx, root, bbox } = plot;
    if (!root.checkVisibility()) continue;
    const page = channels(behind(root));
    // Where the labels of the axes are; the strongest pixel is the inside of a letter.
    const end = bbox.top + bbox.height + 6;
    const parts = [
      pixels(plot, 0, 0, bbox.left - 1, ctx.canvas.height),
      pixels(plot, bbox.left, end, bbox.width, ctx.canvas.height - end),
    ];
    parts.forEach((part, axis) => {
      const [r, g, b, a] = part.reduce((best, pixel) => (pixel[3] > best[3] ? pixel : best));
      const seen = [r, g, b].map((value, channel) => (value * a + page[channel] * (255 - a)) / 255);
      const pair = [`rgb(${seen})`, `rgb(${page})`].map(light).sort((a, b) => a - b);
      const ratio = (pair[1] + 0.05) / (pair[0] + 0.05);
      if (ratio < 4.5) found.push([id, axis, ratio]);
    });
  }
  return found;
"""


def test_movement_is_reduced_where_asked_for(stand_in: StandIn, visit: Seen) -> None:
    moving = "getComputedStyle(document.querySelector('.plot')).transitionDuration"
    assert visit(stand_in.url).open().evaluate(moving) != "0s"
    assert visit(stand_in.url, reduced_motion="reduce").open().evaluate(moving) == "0s"
