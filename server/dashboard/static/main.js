// Asks the server every two seconds, and puts the figures where they belong.

import { Admin } from "./admin.js";
import { Bars, DEPTHS, POSITIONS } from "./bars.js";
import { Chart } from "./chart.js";
import { PATHS, derive, read } from "./figures.js";
import * as format from "./format.js";
import { History } from "./history.js";
import { byId, fill, rows, rowsOrNone, setText } from "./page.js";
import { showTree } from "./trees.js";

const INTERVAL = 2_000;
/** An answer that takes longer is none. */
const PATIENCE = 8_000;
/** Rates are averages over this long. */
const WINDOW = 10_000;
/** Scrapes further apart leave a gap; browsers let a hidden page ask once a minute. */
const LONGEST_STEP = 150_000;
/** A line that has just begun is not stretched further than this. */
const SHORTEST_RANGE = 60_000;

/** charts.css has a colour for each. */
const MOST_LINES = 8;

const DOWN = "The engine is down";

/** The figures of /metrics, as JSON. */
const FIGURES = "/dashboard/metrics.json";

/** What elements with `data-needs` need. */
const NEEDS = { nwor: "hasNwor", speculation: "hasSpeculation", choice: "hasChoice", tree: "tree" };

/** Whole milliseconds: uPlot's time axis takes no others. */
const clock = () => Math.round(performance.timeOrigin + performance.now());

const history = new History(LONGEST_STEP);
const period = byId("period");
/** By their elements. */
export const charts = new Map();
let missed = false;
let polling = false;
let timer = null;
let reasons = {};

function addChart(id, options, values) {
  charts.set(id, { chart: new Chart(byId(id), options), values });
}

addChart(
  "chart-tokens",
  {
    title: "Accepted tokens a step over time",
    format: format.ratio,
    axis: format.number,
    least: 2,
    series: [{ key: "tokens", label: "tokens that a step gives a request", style: "first" }],
  },
  ({ rates }) => ({ tokens: rates && derive(rates).tokensPerStep }),
);
addChart(
  "chart-acceptance",
  {
    title: "Acceptance rate over time",
    format: format.percent,
    axis: (value) => format.percent(value, 0),
    top: 1,
    series: [{ key: "acceptance", label: "accepted of draft tokens", style: "first" }],
  },
  ({ rates }) => ({ acceptance: rates && derive(rates).acceptance }),
);
addChart(
  "chart-bytes",
  {
    title: "KV cache bytes written for windows, against direct writes",
    format: format.bytesPerSecond,
    axis: format.bytesPerSecondOnAxis,
    least: 1000,
    series: [
      { key: "written", label: "written", style: "first" },
      { key: "baseline", label: "baseline (all direct)", style: "base" },
    ],
    between: ["baseline", "written"],
  },
  ({ rates }) => {
    const { written, baseline } = derive(rates ?? new Map());
    return rates ? { written, baseline } : {};
  },
);
addChart(
  "chart-output",
  {
    title: "Output tokens per second",
    format: (value) => (Number.isFinite(value) ? `${format.number(value)}/s` : format.NONE),
    least: 10,
    series: [{ key: "tokens", label: "tokens per second", style: "first" }],
  },
  ({ rates }) => ({ tokens: rates && derive(rates).outputTokens }),
);
addChart(
  "chart-requests",
  {
    title: "Requests",
    format: format.count,
    least: 4,
    series: [
      { key: "running", label: "running", style: "first" },
      { key: "waiting", label: "waiting", style: "second" },
    ],
  },
  ({ now }) => ({ running: now.running, waiting: now.waiting }),
);
export const bars = new Bars(byId("positions"));
const admin = new Admin(() => poll());
period.addEventListener("change", render);

/** Where the engine chooses: the line of what it chose. */
function addDrafts() {
  addChart(
    "chart-drafts",
    {
      title: "Draft tokens of a step, as the engine chose them",
      format: (value) => (Number.isFinite(value) ? value.toFixed(1) : format.NONE),
      axis: format.count,
      least: 4,
      series: [{ key: "drafts", label: "draft tokens for each request", style: "first" }],
    },
    ({ rates }) => ({ drafts: rates && derive(rates).draftsPerStep }),
  );
}

/** Lines of the estimate, once it is known of how many positions; no more than can be told apart. */
function addEstimates(positions) {
  const lines = Math.min(positions, MOST_LINES);
  const shown = Array.from({ length: lines }, (_, line) => Math.round(((line + 1) * positions) / lines));
  addChart(
    "chart-estimates",
    {
      title: "Estimated acceptance by position over time",
      format: format.percent,
      axis: (value) => format.percent(value, 0),
      top: 1,
      series: shown.map((position, line) => ({
        key: String(position),
        label: `up to ${position}`,
        style: `step${line}`,
      })),
    },
    ({ now }) => Object.fromEntries(shown.map((position) => [position, now.estimates[position - 1] ?? null])),
  );
}

function renderChoice(now) {
  if (!now.hasChoice) return;
  if (!charts.has("chart-drafts")) addDrafts();
  if (now.estimates.length && !charts.has("chart-estimates")) addEstimates(now.estimates.length);
  if (now.chosen === null) return setText("drafts-text", "No step yet.");
  const drafts = `${now.chosen.toFixed(Number.isInteger(now.chosen) ? 0 : 1)} now`;
  const who = now.auto ? "chosen by the engine" : "fixed at present";
  const long = now.without < 3600 ? format.duration(now.without * 1000) : "more than an hour";
  const without = now.without >= 1 ? `; none for ${long}` : "";
  setText("drafts-text", `${drafts}, ${who}${without}.`);
}

/** Fetch; null with words in `problem` where nothing usable came. */
async function get(path) {
  const options = { cache: "no-store", credentials: "same-origin", signal: AbortSignal.timeout(PATIENCE) };
  try {
    return { answer: await fetch(path, options), problem: null };
  } catch (error) {
    const late = error.name === "TimeoutError";
    return { answer: null, problem: late ? "The server is slow to answer" : "The server cannot be reached" };
  }
}

async function poll() {
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  const time = clock();
  const [metrics, health] = await Promise.all([get(FIGURES.slice(1)), get("health")]);
  let problem = metrics.problem ?? health.problem;
  try {
    if (!problem && !metrics.answer.ok) problem = `${FIGURES} answers ${metrics.answer.status}`;
    if (!problem) {
      const samples = new Map(Object.entries(await metrics.answer.json()));
      history.add(time, read(samples), missed);
      if (health.answer.status === 503) problem = DOWN;
      else if (!health.answer.ok) problem = `/health answers ${health.answer.status}`;
    }
  } catch (error) {
    problem = error instanceof SyntaxError ? `${FIGURES} cannot be read` : "The server’s answer was cut off";
    console.warn(error);
  }
  missed = history.latest?.time !== time;
  showState(problem);
  render();
  polling = false;
  timer = setTimeout(poll, INTERVAL);
}

function showState(problem) {
  const { latest } = history;
  const state = problem ? "bad" : "good";
  byId("state").dataset.state = state;
  setText("state-text", problem ?? "Live");
  document.body.classList.toggle("stale", problem !== null);
  byId("main").setAttribute("aria-busy", String(latest === undefined));
  admin.show(currentMode(), problem === null);
  const model = latest?.now.models.join(", ") ?? "";
  setText("model", model);
  document.title = `${problem ? "(!) " : ""}NWOR${model ? ` · ${model}` : ""}`;
  const alerts = [];
  if (problem) {
    // No time that goes on: each change of an alert is spoken.
    const old = latest ? ` Figures below are of ${format.timeWithSeconds(latest.time)}.` : "";
    const what = missed ? old : " The server still answers, but serves no requests.";
    alerts.push(`${problem}.${what} Asking again every ${INTERVAL / 1000} seconds.`);
  }
  for (const [figure, times] of derive(history.total).mismatches) {
    alerts.push(
      `Accounting mismatch: “${figure}” did not agree ${format.count(times)} times. This is a fault; please report it.`,
    );
  }
  fill("alerts", alerts, "banner bad");
  fill("notes", latest ? missingParts(latest.now) : [], "banner");
  for (const element of document.querySelectorAll("[data-needs]")) {
    const has = latest?.now[NEEDS[element.dataset.needs]];
    if (latest) element.hidden = !has;
  }
}

function currentMode() {
  const modes = history.latest?.now.modes ?? [];
  if (modes.length === 0) return null;
  return modes.length === 1 ? modes[0] : "mixed";
}

function missingParts(now) {
  if (!now.hasStatistics)
    return ["This server keeps no statistics: it was started with --disable-log-stats."];
  if (!now.hasSpeculation)
    return [
      "This server does not speculate, so there is nothing to accept or reject: start it with --draft.",
    ];
  if (!now.hasNwor)
    return [
      "This engine has no NWOR: it was started with --no-nwor, or could not have it. All windows are written directly.",
    ];
  return [];
}

function render() {
  const { latest } = history;
  if (!latest) return;
  const span = Number(period.value) * 1000;
  const covered = Math.min(span, latest.time - history.points[0].time);
  const words = `last ${format.duration(covered)}`;
  const recent = derive(history.over(span));
  const total = derive(history.total);
  const rates = history.rates(span, WINDOW);
  const { now } = latest;

  setText("tokens", format.ratio(recent.tokensPerStep));
  const verified = recent.rowsPerStep?.toFixed(1);
  setText("tokens-more", `${verified ? `of ${verified} verified` : "no windows"} in the ${words}`);
  setText("tokens-start", `${format.ratio(total.tokensPerStep)} since the start`);
  setText("acceptance", format.percent(recent.acceptance));
  const drafts = `${format.number(recent.acceptedTokens)} of ${format.number(recent.draftTokens)}`;
  setText("acceptance-more", `${recent.draftTokens > 0 ? drafts : "no draft tokens"} in the ${words}`);
  setText("acceptance-start", `${format.percent(total.acceptance)} since the start`);
  setText("saved", format.percent(recent.saved));
  byId("saved").classList.toggle("extra", recent.saved < 0);
  setText("saved-more", `${format.bytes(recent.written)} written for ${format.bytes(recent.baseline)}`);
  setText("saved-start", `${format.percent(total.saved)} since the start`);
  const output = rates.map((point) => point.rates?.get("outputTokens") ?? 0);
  setText(
    "output",
    `${format.number(latest.afterGap ? null : (rates.at(-1).rates?.get("outputTokens") ?? null))}`,
  );
  setText("output-more", `at most ${format.number(Math.max(...output))} in the ${words}`);
  setText("output-start", `${format.number(total.outputTokens)} tokens since the start`);
  setText("requests", format.count(now.running));
  setText("requests-more", `${format.count(now.waiting)} waiting`);
  setText("requests-start", `KV cache ${format.percent(now.cacheUse)} full`);

  renderChoice(now);
  const first = history.points[0].time;
  const range = [Math.max(latest.time - span, Math.min(first, latest.time - SHORTEST_RANGE)), latest.time];
  for (const { chart, values } of charts.values()) {
    chart.show(
      rates.map((point) => ({ time: point.time, afterGap: point.afterGap, values: values(point) })),
      range,
    );
  }
  renderPositions(recent, total, words, now);
  if (now.tree) showTree(now.tree, admin.tree, currentMode(), recent, total);
  for (const head of document.querySelectorAll("[data-period]")) {
    if (head.textContent !== words) head.textContent = words[0].toUpperCase() + words.slice(1);
  }
  renderPaths(recent, total);
  renderDirect(recent, total);
  renderAccounting(total, now);
  setText("updated", `Last figures: ${format.timeWithSeconds(latest.time)}`);
}

/** Acceptance by position in the window; where windows are trees, that is by depth. */
function renderPositions(recent, total, words, { tree }) {
  const names = tree ? DEPTHS : POSITIONS;
  const end = tree ? tree.depth : undefined;
  setText("positions-title", names.title);
  setText("positions-period", words);
  bars.show(recent.positions.slice(0, end), total.positions.slice(0, end), words, names);
}

function renderPaths(recent, total) {
  const lines = Object.entries(PATHS)
    .filter(([path]) => path === "commit" || path === "direct" || total.paths.get(path) > 0)
    .map(([path, head]) => ({
      head,
      cells: [recent, total].map(({ paths }) => format.bytes(paths.get(path) ?? 0)),
    }));
  const sums = [recent, total];
  lines.push({ head: "Written in all", className: "sum", cells: sums.map((of) => format.bytes(of.written)) });
  lines.push({ head: "Direct writes would be", cells: sums.map((of) => format.bytes(of.baseline)) });
  lines.push({
    head: "Saved",
    className: "sum",
    cells: sums.map((of) => format.bytes(of.baseline - of.written)),
  });
  rows("paths", lines);
}

function renderDirect(recent, total) {
  const lately = new Map(recent.direct);
  const lines = total.direct
    .filter(([, windows]) => windows > 0)
    .sort(([, a], [, b]) => b - a)
    .map(([reason, windows]) => ({
      head: reason,
      more: reasons[reason],
      cells: [format.count(lately.get(reason) ?? 0), format.count(windows)],
    }));
  rowsOrNone("direct", lines);
}

function renderAccounting(total, now) {
  const wrong = total.mismatches.reduce((sum, [, times]) => sum + times, 0);
  byId("accounting").classList.toggle("bad", wrong > 0);
  setText("accounting", wrong > 0 ? `${format.count(wrong)} mismatches` : "Agrees");
  const windows = `${format.count(total.windows)} windows counted since the start`;
  const held =
    now.held === null ? "" : `; ${format.bytes(now.held)} kept outside the cache by the latest step`;
  setText(
    "accounting-more",
    `${windows}${held}. The workers’ counts are compared with vLLM’s own at each step.`,
  );
}

get("dashboard/reasons.json").then(async ({ answer }) => {
  if (answer?.ok) reasons = await answer.json();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
poll();
