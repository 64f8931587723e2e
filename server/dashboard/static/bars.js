// Acceptance by position in the window, or by depth in a tree: a bar for the shown period, a mark for the time
// since the start.

import { colour, plotIn } from "./chart.js";
import { percent } from "./format.js";

/** What the bars are called where windows are chains, and where they are trees. */
export const POSITIONS = {
  title: "Acceptance by position",
  one: "position",
  axis: "draft token of the window",
};
export const DEPTHS = { title: "Acceptance by depth", one: "depth", axis: "depth in the tree" };

/** The part of its place that a bar takes, and the most pixels. */
const WIDTH = [0.56, 44];

export class Bars {
  /** @param {HTMLElement} host gets the drawing */
  constructor(host) {
    this.frame = document.createElement("div");
    this.frame.className = "plot bars";
    this.frame.setAttribute("role", "img");
    this.axis = document.createElement("p");
    this.axis.className = "bars-axis small";
    host.append(this.frame, this.axis);
    const options = {
      padding: [20, 4, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: false, range: (u) => [-0.5, Math.max(1, u.data[0].length) - 0.5] },
        y: { range: [0, 1] },
      },
      axes: [
        { size: 20, space: 16, incrs: [1, 4], values: (u, places) => places.map((place) => place + 1) },
        { size: 48, incrs: [0.5], values: (u, marks) => marks.map((mark) => percent(mark, 0)) },
      ],
      series: [
        {},
        {
          paths: window.uPlot.paths.bars({ size: WIDTH }),
          fill: colour("first"),
          alpha: 0.78,
          width: 0,
          points: { show: false },
        },
        { show: false },
      ],
      hooks: { draw: [drawMarks] },
    };
    this.plot = plotIn(this.frame, options, [[], [], []]);
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
    const text = start.map(
      (share, index) => `${names.one} ${index + 1}: ${percent(period[index])}, since start ${percent(share)}`,
    );
    this.frame.setAttribute(
      "aria-label",
      `${names.title}, ${words}. ${text.join("; ") || "No draft tokens yet"}.`,
    );
    this.axis.textContent = names.axis;
    this.plot.setData([[...start.keys()], start.map((_, index) => period[index] ?? null), start]);
  }
}

/** Draw marks, and values above them. Those that would touch are left out; the description has all of them. */
function drawMarks({ ctx, data: [places, period, start], axes, bbox, valToPos }) {
  const slot = bbox.width / places.length;
  const half = Math.min(WIDTH[0] * slot, WIDTH[1] * devicePixelRatio) / 2 + 5 * devicePixelRatio;
  ctx.save();
  ctx.font = `600 ${axes[0].font[0]}`;
  ctx.fillStyle = colour("ink")();
  ctx.textAlign = "center";
  ctx.textBaseline = "bottom";
  for (const place of places) {
    const x = valToPos(place, "x", true);
    const y = (share) => Math.round(valToPos(share ?? 0, "y", true));
    if (start[place] !== null) {
      ctx.fillRect(x - half, y(start[place]) - devicePixelRatio, 2 * half, 2 * devicePixelRatio);
    }
    const above = Math.min(y(period[place]), y(start[place])) - 4 * devicePixelRatio;
    if (slot >= 38 * devicePixelRatio) ctx.fillText(percent(period[place], 0), x, above);
  }
  ctx.restore();
}
