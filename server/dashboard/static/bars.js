// Acceptance by position in the window, or by depth in a tree: a bar for the shown period, a mark for the time
// since the start.

import { svg } from "./chart.js";
import { percent } from "./format.js";

/** What the bars are called where windows are chains, and where they are trees. */
export const POSITIONS = {
  title: "Acceptance by position",
  one: "position",
  axis: "draft token of the window",
};
export const DEPTHS = { title: "Acceptance by depth", one: "depth", axis: "depth in the tree" };

const MARGIN = { top: 20, right: 4, bottom: 36, left: 48 };

export class Bars {
  /** @param {HTMLElement} host gets the drawing */
  constructor(host) {
    this.frame = document.createElement("div");
    this.frame.className = "plot bars";
    this.frame.setAttribute("role", "img");
    this.root = svg("svg", { "aria-hidden": "true" });
    this.frame.append(this.root);
    host.append(this.frame);
    this.period = [];
    this.start = [];
    this.names = POSITIONS;
    new ResizeObserver(() => this.#draw()).observe(this.frame);
  }

  /**
   * Show shares from 0 to 1, by position or depth.
   *
   * @param {(number | null)[]} period in the shown period
   * @param {(number | null)[]} start since the server's start
   * @param {string} words what the shown period is called
   * @param {{title: string, one: string, axis: string}} names what the bars are called
   */
  show(period, start, words, names) {
    this.period = period;
    this.start = start;
    this.names = names;
    const text = start.map(
      (share, index) => `${names.one} ${index + 1}: ${percent(period[index])}, since start ${percent(share)}`,
    );
    this.frame.setAttribute(
      "aria-label",
      `${names.title}, ${words}. ${text.join("; ") || "No draft tokens yet"}.`,
    );
    this.#draw();
  }

  #draw() {
    const width = this.frame.clientWidth;
    const height = this.frame.clientHeight;
    if (!width || !height) return;
    const bottom = height - MARGIN.bottom;
    const right = width - MARGIN.right;
    const y = (share) => bottom - share * (bottom - MARGIN.top);
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.root.replaceChildren();
    for (const mark of [0, 0.5, 1]) {
      const at = Math.round(y(mark)) + 0.5;
      svg("path", { d: `M${MARGIN.left} ${at}H${right}`, class: mark === 0 ? "axis" : "grid" }, this.root);
      svg("text", { x: MARGIN.left - 8, y: at + 4, class: "tick end" }, this.root).textContent = percent(
        mark,
        0,
      );
    }
    const slot = (right - MARGIN.left) / Math.max(1, this.start.length);
    const bar = Math.min(44, slot * 0.56);
    // Labels that would touch are left out; the description has all of them.
    const labelled = slot >= 38;
    this.start.forEach((start, index) => {
      const middle = MARGIN.left + slot * (index + 0.5);
      const share = this.period[index];
      if (share !== null && share !== undefined) {
        const top = y(share);
        svg(
          "rect",
          { x: middle - bar / 2, y: top, width: bar, height: Math.max(0, bottom - top), class: "bar" },
          this.root,
        );
      }
      if (start !== null) {
        svg("path", { d: `M${middle - bar / 2 - 5} ${y(start)}h${bar + 10}`, class: "mark" }, this.root);
      }
      if (labelled) {
        const above = Math.min(y(share ?? 0), start === null ? bottom : y(start));
        const label = { x: middle, y: above - 6, class: "tick middle strong" };
        svg("text", label, this.root).textContent = percent(share, 0);
      }
      if (slot >= 16 || index % 4 === 0) {
        svg("text", { x: middle, y: bottom + 16, class: "tick middle" }, this.root).textContent = String(
          index + 1,
        );
      }
    });
    const axis = { x: (MARGIN.left + right) / 2, y: height - 3, class: "tick middle" };
    svg("text", axis, this.root).textContent = this.names.axis;
  }
}
