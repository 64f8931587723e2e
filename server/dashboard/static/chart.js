// Lines over time, drawn by uPlot. The legend is the read-out: it shows the values under the pointer, else the latest.

import { timeOfDay, timeWithSeconds } from "./format.js";
import { setText } from "./page.js";

const { uPlot } = window;

/** Steps of the upward axis: 0.01, 0.02, 0.05, 0.1 and so on. */
const STEPS = Array.from({ length: 48 }, (_, n) => [1, 2, 5][n % 3] * 10 ** (Math.floor(n / 3) - 2));
/** Lines that are told apart by more than their colour: on the canvas, and in the legend. */
const DASHES = { second: { pixels: [1, 4], border: "dotted" }, base: { pixels: [6, 4], border: "dashed" } };

/** A colour of base.css, as it is when something is drawn: it follows the theme. */
export const colour = (name) => () =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

/** Make a plot that fills its frame and follows the theme. The frame's label says what it shows. */
export function plotIn(frame, { axes, ...options }, data) {
  const { fontSize, fontFamily } = getComputedStyle(frame);
  // uPlot enlarges whole pixels alone on dense screens.
  const text = { font: `${Math.round(parseFloat(fontSize))}px ${fontFamily}`, stroke: colour("soft") };
  const base = { stroke: colour("base"), width: 1, size: 4 };
  // There is no line of the grid where the axis is.
  const grid = { stroke: colour("grid"), width: 1, filter: (u, marks) => marks.map((mark) => mark || null) };
  const across = { ...text, gap: 3, ticks: base, border: { ...base, show: true }, grid: { show: false } };
  const up = { ...text, gap: 8, ticks: { show: false }, grid };
  const all = {
    width: 0,
    height: 0,
    axes: [
      { ...across, ...axes[0] },
      { ...up, ...axes[1] },
    ],
    ...options,
  };
  const plot = new uPlot(all, data, frame);
  plot.root.setAttribute("aria-hidden", "true");
  const fit = () => plot.setSize({ width: frame.clientWidth, height: frame.clientHeight });
  new ResizeObserver(fit).observe(frame);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw(false));
  return plot;
}

/** Have uPlot listen to these events in place of a mouse's: fingers point, too. */
const listen =
  (...types) =>
  (u, target, handle) => {
    for (const type of types) target.addEventListener(type, handle);
    return null;
  };

export class Chart {
  /**
   * @param {HTMLElement} host gets legend and drawing
   * @param {{title: string, format: (value: number) => string, axis?: (value: number) => string,
   *   top?: number, least?: number, series: {key: string, label: string, style: string}[],
   *   between?: [string, string]}} options
   *   `axis` writes values of the axis, where they differ from those of the read-out; `top` fixes the axis'
   *   end, `least` is the smallest one; the area between two series may be filled
   */
  constructor(host, { title, format, axis = format, top, least = 1, series, between }) {
    Object.assign(this, { title, format, series, range: [null, null] });
    this.frame = document.createElement("div");
    this.frame.className = "plot";
    this.frame.tabIndex = 0;
    this.frame.setAttribute("role", "group");
    this.frame.setAttribute("aria-roledescription", "chart");
    host.append(this.frame);
    const styleOf = (u, line) => series[line - 1].style;
    const inStyle = (u, line) => `var(--${styleOf(u, line)})`;
    const lines = series.map(({ label, style }) => ({
      label,
      stroke: colour(style),
      width: 2,
      cap: "round",
      dash: DASHES[style]?.pixels.map((length) => length * devicePixelRatio),
      value: (u, value, line, index) => format(u.data[line].at(index ?? -1)),
      points: { show: false, filter: alone, size: 4, width: 0 },
    }));
    const area = (fill, keys) => ({
      series: keys.map((key) => 1 + series.findIndex((one) => one.key === key)),
      fill: colour(fill),
    });
    this.plot = plotIn(
      this.frame,
      {
        ms: 1,
        padding: [10, 10, 0, 0],
        scales: {
          x: { range: () => this.range },
          y: { range: (u, low, high) => [0, top ?? Math.max(least, 1.05 * high)] },
        },
        axes: [
          {
            size: 22,
            space: 76,
            // A label that would be cut off at the end is left out until it has moved in.
            values: (u, times, index, space, step) => {
              const end = u.bbox.width / devicePixelRatio - 16;
              const format = step < 60_000 ? timeWithSeconds : timeOfDay;
              return times.map((time) => (u.valToPos(time, "x") > end ? null : format(time)));
            },
          },
          { size: 64, incrs: STEPS, values: (u, marks) => marks.map((mark) => axis(mark)) },
        ],
        series: [
          { class: "clock", value: (u, time) => (time === null ? "" : timeWithSeconds(time)) },
          ...lines,
        ],
        // Each fills below its first series and above its second: one of them where the lines have crossed.
        bands: between ? [area("saved", between), area("extra", between.toReversed())] : [],
        legend: {
          mount: (u, legend) => this.frame.before(legend),
          markers: { stroke: inStyle, dash: (u, line) => DASHES[styleOf(u, line)]?.border ?? "solid" },
        },
        cursor: {
          y: false,
          drag: { x: false },
          sync: { key: "charts", scales: ["x", null] },
          points: { size: 9, width: 2, stroke: inStyle, fill: "var(--page)" },
          move: (u, left, up) => [left < 0 || !u.data[0].length ? left : this.#left(u.posToIdx(left)), up],
          // Clicks on the legend would hide lines, for mice alone.
          bind: {
            mousemove: listen("pointermove", "pointerdown"),
            mouseleave: listen("pointerleave"),
            click: listen(),
          },
        },
      },
      [[], ...series.map(() => [])],
    );
    this.frame.addEventListener("blur", () => this.#read(null));
    this.frame.addEventListener("keydown", (event) => this.#key(event));
  }

  /**
   * Show other points.
   *
   * @param {{time: number, afterGap: boolean, values: Record<string, number | null>}[]} points
   * @param {[number, number]} range milliseconds
   */
  show(points, range) {
    const { plot } = this;
    const read = plot.data[0][plot.cursor.idx];
    this.range = range;
    // A point without values makes the gap.
    const all = points.flatMap((point) =>
      point.afterGap ? [{ time: point.time - 1, values: {} }, point] : [point],
    );
    const values = ({ key }) => all.map((point) => point.values[key] ?? null);
    plot.batch(() => plot.setData([all.map(({ time }) => time), ...this.series.map(values)]));
    // What is read stays the same point while the lines move on.
    if (read !== undefined) plot.setCursor({ left: this.#left(plot.valToIdx(read)), top: 0 });
    const label = `${this.title}. Latest: ${this.#words(-1)}. Arrow keys read earlier values.`;
    this.frame.setAttribute("aria-label", label);
  }

  #left(index) {
    return Math.max(0, this.plot.valToPos(this.plot.data[0][index], "x"));
  }

  #words(index) {
    const value = (line) => this.format(this.plot.data[line + 1].at(index));
    return this.series.map(({ label }, line) => `${label} ${value(line)}`).join(", ");
  }

  /** Read the values of a point in all charts, or with null the latest ones. */
  #read(index) {
    const place = index === null ? { left: -10, top: -10 } : { left: this.#left(index), top: 0 };
    this.plot.setCursor(place, true, true);
  }

  #key(event) {
    const times = this.plot.data[0];
    const last = times.length - 1;
    if (last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.plot.cursor.idx ?? last;
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last };
    if (event.key === "Escape") {
      this.#read(null);
    } else if (event.key in moves) {
      event.preventDefault();
      const index = Math.min(last, Math.max(0, moves[event.key]));
      this.#read(index);
      setText("spoken", `${timeWithSeconds(times[index])}: ${this.#words(index)}`);
    }
  }
}

/** Points with gaps on both sides: no line leads to them, so they are dots. */
function alone(u, line) {
  const values = [null, ...u.data[line], null];
  const is = (index) => values[index] === null && values[index + 1] !== null && values[index + 2] === null;
  return [...u.data[line].keys()].filter(is);
}
