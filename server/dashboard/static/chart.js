// Lines over time, in SVG. The legend is the read-out: it shows the values under the pointer, else the latest.

import { timeOfDay, timeWithSeconds } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 10, right: 10, bottom: 22, left: 64 };
const STEPS = [1, 2, 5, 10];
/** Seconds between labels of the time axis. */
const TIME_STEPS = [15, 30, 60, 120, 300, 600, 900];

/** Make an SVG element with attributes. */
export function svg(name, attributes = {}, parent = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

/** Round steps from 0 (or below) to above `high`; at least one. */
export function ticks(low, high, wanted) {
  const span = high - low || 1;
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = STEPS.map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const result = [];
  for (let at = Math.floor(low / step) * step; at < high + step * 0.999; at += step) result.push(at);
  return result;
}

export class Chart {
  /**
   * @param {HTMLElement} host gets legend and drawing
   * @param {{title: string, format: (value: number) => string, axis?: (value: number) => string,
   *   top?: number, least?: number, series: {key: string, label: string, style: string}[],
   *   between?: [string, string]}} options
   *   `axis` writes values of the axis, where they differ from those of the read-out; `top` fixes the axis'
   *   end, `least` is the smallest one; the area between two series may be filled
   * @param {(index: number | null, spoken: string | null) => void} onCursor called when the read-out moves;
   *   with words when it was moved by keyboard
   */
  constructor(host, options, onCursor) {
    this.host = host;
    this.options = options;
    this.onCursor = onCursor;
    this.points = [];
    this.cursor = null;
    this.values = new Map();
    this.#legend();
    this.frame = document.createElement("div");
    this.frame.className = "plot";
    this.frame.tabIndex = 0;
    this.frame.setAttribute("role", "group");
    this.frame.setAttribute("aria-roledescription", "chart");
    this.root = svg("svg", { "aria-hidden": "true" });
    this.frame.append(this.root);
    host.append(this.frame);
    this.frame.addEventListener("pointermove", (event) => this.#point(event));
    this.frame.addEventListener("pointerdown", (event) => this.#point(event));
    this.frame.addEventListener("pointerleave", () => this.onCursor(null, null));
    this.frame.addEventListener("blur", () => this.onCursor(null, null));
    this.frame.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.frame);
  }

  /**
   * Show other points.
   *
   * @param {{time: number, afterGap: boolean, values: Record<string, number | null>}[]} points
   * @param {[number, number]} range milliseconds
   */
  show(points, range) {
    this.points = points;
    this.range = range;
    this.#draw();
  }

  /** Show the values of one point, or the latest ones with null. */
  setCursor(index) {
    this.cursor = index;
    this.#readOut();
  }

  #legend() {
    this.legend = document.createElement("dl");
    this.legend.className = "legend";
    for (const { key, label, style } of this.options.series) {
      const item = document.createElement("div");
      const term = document.createElement("dt");
      const swatch = svg("svg", { class: "swatch", viewBox: "0 0 18 6", "aria-hidden": "true" });
      svg("path", { d: "M0 3H18", class: `line ${style}` }, swatch);
      term.append(swatch, label);
      const value = document.createElement("dd");
      item.append(term, value);
      this.legend.append(item);
      this.values.set(key, value);
    }
    this.clock = document.createElement("p");
    this.clock.className = "clock";
    const head = document.createElement("div");
    head.className = "readout";
    head.append(this.legend);
    this.host.append(this.clock, head);
  }

  #draw() {
    const width = this.frame.clientWidth;
    const height = this.frame.clientHeight;
    if (!width || !height || !this.range) return;
    const { series, top, least = 1, format, axis = format } = this.options;
    const all = this.points.flatMap(({ values }) => series.map(({ key }) => values[key] ?? 0));
    const marks = top ? [0, top / 4, top / 2, (3 * top) / 4, top] : ticks(0, Math.max(least, ...all), 4);
    const high = marks.at(-1);
    const [from, to] = this.range;
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    this.x = (time) => MARGIN.left + ((time - from) / (to - from)) * (right - MARGIN.left);
    this.y = (value) => bottom - (value / high) * (bottom - MARGIN.top);
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.root.replaceChildren();
    for (const mark of marks) {
      const y = Math.round(this.y(mark)) + 0.5;
      svg("path", { d: `M${MARGIN.left} ${y}H${right}`, class: mark === 0 ? "axis" : "grid" }, this.root);
      svg("text", { x: MARGIN.left - 8, y: y + 4, class: "tick end" }, this.root).textContent = axis(mark);
    }
    this.#timeAxis(from, to, right, bottom);
    this.#areas();
    for (const { key, style } of series) this.#line(key, style);
    this.rule = svg("path", { class: "rule" }, this.root);
    this.dots = series.map(({ style }) => svg("circle", { r: 3.5, class: `dot ${style}` }, this.root));
    this.#readOut();
  }

  #timeAxis(from, to, right, bottom) {
    const room = Math.max(2, Math.floor((right - MARGIN.left) / 76));
    const step = (TIME_STEPS.find((seconds) => (to - from) / 1000 / seconds <= room) ?? 1800) * 1000;
    const format = step < 60000 ? timeWithSeconds : timeOfDay;
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      const x = this.x(time);
      const label = { x, y: bottom + 16, class: x > right - 24 ? "tick end" : "tick middle" };
      if (x > right - 24) label.x = right;
      svg("path", { d: `M${x} ${bottom}v4`, class: "axis" }, this.root);
      svg("text", label, this.root).textContent = format(time);
    }
  }

  /** Runs of points without a missing value of any of the keys. */
  #runs(...keys) {
    const runs = [];
    let run = null;
    for (const point of this.points) {
      const complete = keys.every((key) => Number.isFinite(point.values[key]));
      if (!complete || point.afterGap) run = null;
      if (!complete) continue;
      if (run === null) runs.push((run = []));
      run.push(point);
    }
    return runs;
  }

  #line(key, style) {
    const place = ({ time, values }) => `${this.x(time).toFixed(1)} ${this.y(values[key]).toFixed(1)}`;
    for (const run of this.#runs(key)) {
      // A point alone is drawn as a dot: a line of no length with round ends.
      const d = `M${run.map(place).join("L")}${run.length === 1 ? "h0.01" : ""}`;
      svg("path", { d, class: `line ${style}` }, this.root);
    }
  }

  /** Fill between two series: one colour where the first is the higher, another where it is the lower. */
  #areas() {
    if (!this.options.between) return;
    const [upper, lower] = this.options.between;
    for (const run of this.#runs(upper, lower)) {
      for (const [style, sign] of [
        ["saved", 1],
        ["extra", -1],
      ]) {
        const edge = ({ time, values }, value) =>
          `${this.x(time).toFixed(1)} ${this.y(value(values)).toFixed(1)}`;
        const low = (values) => values[lower];
        const high = (values) => (sign * (values[upper] - values[lower]) > 0 ? values[upper] : values[lower]);
        const there = run.map((point) => edge(point, high));
        const back = run.map((point) => edge(point, low)).reverse();
        svg("path", { d: `M${there.join("L")}L${back.join("L")}Z`, class: `area ${style}` }, this.root);
      }
    }
  }

  #readOut() {
    const point = this.cursor === null ? this.points.at(-1) : this.points[this.cursor];
    const { title, series, format } = this.options;
    const words = [];
    for (const { key, label } of series) {
      const text = format(point?.values[key]);
      this.values.get(key).textContent = text;
      words.push(`${label} ${text}`);
    }
    this.clock.textContent = this.cursor === null ? "" : timeWithSeconds(point.time);
    this.frame.setAttribute(
      "aria-label",
      `${title}. Latest: ${words.join(", ")}. Arrow keys read earlier values.`,
    );
    if (!this.rule) return;
    this.rule.setAttribute(
      "d",
      this.cursor === null ? "" : `M${this.x(point.time)} ${this.y(0)}V${MARGIN.top}`,
    );
    this.dots.forEach((dot, index) => {
      const value = point?.values[series[index].key];
      const visible = this.cursor !== null && Number.isFinite(value);
      dot.classList.toggle("hidden", !visible);
      if (!visible) return;
      dot.setAttribute("cx", this.x(point.time));
      dot.setAttribute("cy", this.y(value));
    });
  }

  #point(event) {
    if (!this.points.length) return;
    const at = event.clientX - this.frame.getBoundingClientRect().left;
    const distance = (point) => Math.abs(this.x(point.time) - at);
    let best = 0;
    for (let index = 1; index < this.points.length; index += 1) {
      if (distance(this.points[index]) < distance(this.points[best])) best = index;
    }
    this.onCursor(best, null);
  }

  #key(event) {
    const last = this.points.length - 1;
    if (last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.cursor ?? last;
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last };
    if (event.key === "Escape") {
      this.onCursor(null, null);
    } else if (event.key in moves) {
      event.preventDefault();
      const index = Math.min(last, Math.max(0, moves[event.key]));
      const { time, values } = this.points[index];
      const { series, format } = this.options;
      const words = series.map(({ key, label }) => `${label} ${format(values[key])}`).join(", ");
      this.onCursor(index, `${timeWithSeconds(time)}: ${words}`);
    }
  }
}
