// What was scraped, as amounts since the page was opened: counters that restart do not turn rates negative.

/** Milliseconds that are kept. */
const KEPT = 60 * 60 * 1000;

export class History {
  /**
   * @param {number} longestStep milliseconds; scrapes further apart than this leave a gap in lines. Browsers
   *   slow the timers of hidden pages down to one a minute, which is no gap
   */
  constructor(longestStep) {
    this.longestStep = longestStep;
    /** @type {{time: number, now: object, amounts: Map<string, number>, afterGap: boolean}[]} */
    this.points = [];
    /** Amounts since the server's start, as its counters stand. */
    this.total = new Map();
    this.last = null;
  }

  /**
   * Take a scrape.
   *
   * @param {number} time milliseconds on a clock that is never set back
   * @param {object} now as figures.js reads it
   * @param {boolean} missed whether a scrape before this one failed
   */
  add(time, now, missed = false) {
    const before = this.points.at(-1);
    const amounts = new Map(before?.amounts);
    // A counter that falls has restarted; one that has overtaken its old value shows it by the process' start.
    const restarted = this.last !== null && now.started !== null && now.started !== this.last.started;
    const values = new Map();
    this.total = new Map();
    for (const { key, figure, value } of now.series) {
      values.set(key, value);
      this.total.set(figure, (this.total.get(figure) ?? 0) + value);
      let increase = 0;
      if (this.last !== null) {
        const old = restarted ? 0 : (this.last.values.get(key) ?? 0);
        increase = value < old ? value : value - old;
      }
      amounts.set(figure, (amounts.get(figure) ?? 0) + increase);
    }
    this.last = { values, started: now.started };
    const late = before !== undefined && time - before.time > this.longestStep;
    const afterGap = missed || restarted || late;
    this.points.push({ time, now, amounts, afterGap });
    const first = this.points.findIndex((point) => point.time >= time - KEPT);
    this.points.splice(0, first);
  }

  /** The latest point, or undefined. */
  get latest() {
    return this.points.at(-1);
  }

  /** Amounts over the last `span` milliseconds before the latest scrape. */
  over(span) {
    const end = this.latest;
    if (!end) return new Map();
    return difference(
      end,
      this.points.find((point) => point.time >= end.time - span),
    );
  }

  /**
   * Amounts per second before each point of the last `span` milliseconds, averaged over up to `window`
   * milliseconds, never across a gap.
   *
   * @returns {{time: number, now: object, rates: Map<string, number> | null, afterGap: boolean}[]}
   */
  rates(span, window) {
    const end = this.latest;
    if (!end) return [];
    const result = [];
    let from = 0;
    for (let index = 0; index < this.points.length; index += 1) {
      const point = this.points[index];
      if (point.afterGap) from = index;
      while (from < index - 1 && this.points[from].time < point.time - window) from += 1;
      if (point.time < end.time - span) continue;
      const start = this.points[from];
      const seconds = (point.time - start.time) / 1000;
      const rates = seconds > 0 ? difference(point, start) : null;
      rates?.forEach((amount, figure) => rates.set(figure, amount / seconds));
      result.push({ time: point.time, now: point.now, rates, afterGap: point.afterGap });
    }
    return result;
  }
}

function difference(end, start) {
  const result = new Map();
  for (const [figure, amount] of end.amounts) result.set(figure, amount - (start.amounts.get(figure) ?? 0));
  return result;
}
