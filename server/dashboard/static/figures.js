// Which metrics the page reads, and what they are called here. docs/metrics.md defines NWOR's own.

/** Counters: metric, and the figure that a sample of it adds to. Labels not named here are summed over. */
const COUNTERS = {
  "vllm:spec_decode_num_drafts_total": () => "drafts",
  "vllm:spec_decode_num_draft_tokens_total": () => "draftTokens",
  "vllm:spec_decode_num_accepted_tokens_total": () => "acceptedTokens",
  "vllm:spec_decode_num_accepted_tokens_per_pos_total": (labels) => `position.${labels.position}`,
  "vllm:generation_tokens_total": () => "outputTokens",
  nwor_windows_total: () => "windows",
  nwor_kv_write_bytes_total: (labels) => `bytes.${labels.path}`,
  nwor_kv_write_bytes_baseline_total: () => "baseline",
  nwor_direct_windows_total: (labels) => `direct.${labels.reason}`,
  nwor_draft_steps_total: (labels) => `steps.${labels.draft_tokens}`,
  nwor_chain_requests_total: (labels) => `chains.${labels.reason}`,
  nwor_accounting_mismatches_total: (labels) => `mismatch.${labels.figure}`,
};

/** Ways that bytes are written, with what the page calls them. */
export const PATHS = {
  commit: "Commit of accepted tokens",
  direct: "Direct writes",
  stage: "Staging copies",
  log: "Log of old bytes",
  restore: "Restore of rejected slots",
};

/**
 * Read off what is true now.
 *
 * @param {Map<string, {labels: Record<string, string>, value: number | null}[]>} samples
 *   by name; a value that is not finite is null
 * @returns what the server has, gauges, and each counter's series under its figure
 */
export function read(samples) {
  const of = (name) => samples.get(name) ?? [];
  const sum = (name) => of(name).reduce((total, sample) => total + sample.value, 0);
  const series = [];
  for (const [metric, figure] of Object.entries(COUNTERS)) {
    for (const { labels, value } of of(metric)) {
      const key = metric + JSON.stringify(Object.entries(labels).sort());
      series.push({ key, figure: figure(labels), value: Number.isFinite(value) ? value : 0 });
    }
  }
  const caches = of("vllm:kv_cache_usage_perc");
  const held = of("nwor_staging_held_bytes");
  const mean = (found) => (found.length ? found.reduce((all, s) => all + s.value, 0) / found.length : null);
  const estimates = of("nwor_draft_acceptance_estimate");
  const positions = 1 + Math.max(-1, ...estimates.map((s) => Number(s.labels.position)));
  const most = (name) => Math.max(...of(name).map((s) => s.value));
  const modes = new Set(
    of("nwor_mode")
      .filter((s) => s.value === 1)
      .map((s) => s.labels.mode),
  );
  return {
    hasStatistics: samples.has("vllm:num_requests_running"),
    hasSpeculation: samples.has("vllm:spec_decode_num_drafts_total"),
    hasNwor: samples.has("nwor_mode"),
    hasChoice: samples.has("nwor_draft_steps_total"),
    models: [...new Set(of("vllm:num_requests_running").map((s) => s.labels.model_name))],
    engines: of("vllm:num_requests_running").length,
    started: of("process_start_time_seconds")[0]?.value ?? null,
    modes: [...modes],
    running: sum("vllm:num_requests_running"),
    waiting: sum("vllm:num_requests_waiting"),
    cacheUse: mean(caches),
    // Where the engine chooses its draft tokens: what is chosen, whether by itself, and what it expects.
    chosen: mean(of("nwor_draft_tokens_chosen")),
    auto: of("nwor_draft_tokens_auto").some((s) => s.value === 1),
    without: Math.max(0, ...of("nwor_seconds_without_drafts").map((s) => s.value)),
    estimates: Array.from({ length: positions }, (_, position) =>
      mean(estimates.filter((s) => Number(s.labels.position) === position)),
    ),
    // Where windows are trees: how large.
    tree: samples.has("nwor_tree_nodes")
      ? { nodes: most("nwor_tree_nodes"), depth: most("nwor_tree_depth") }
      : null,
    held: held.length ? sum("nwor_staging_held_bytes") : null,
    series,
  };
}

/** Figures that follow from an amount per counter, be it since the start, over a period, or per second. */
export function derive(amounts) {
  const get = (figure) => amounts.get(figure) ?? 0;
  const under = (prefix) =>
    [...amounts]
      .filter(([name]) => name.startsWith(prefix))
      .map(([name, value]) => [name.slice(prefix.length), value]);
  const paths = new Map(under("bytes."));
  const written = [...paths.values()].reduce((total, value) => total + value, 0);
  const steps = under("steps.");
  const allSteps = steps.reduce((total, [, count]) => total + count, 0);
  const share = (part, whole) => (whole > 0 ? part / whole : null);
  return {
    acceptance: share(get("acceptedTokens"), get("draftTokens")),
    acceptedTokens: get("acceptedTokens"),
    draftTokens: get("draftTokens"),
    // Of a window: tokens that it gives, and rows that are verified for them. One of each is no draft token.
    tokensPerStep: share(get("drafts") + get("acceptedTokens"), get("drafts")),
    rowsPerStep: share(get("drafts") + get("draftTokens"), get("drafts")),
    positions: under("position.")
      .sort(([a], [b]) => Number(a) - Number(b))
      .map(([, accepted]) => share(accepted, get("drafts"))),
    draftsPerStep: share(
      steps.reduce((total, [drafts, count]) => total + Number(drafts) * count, 0),
      allSteps,
    ),
    outputTokens: get("outputTokens"),
    windows: get("windows"),
    baseline: get("baseline"),
    written,
    paths,
    saved: share(get("baseline") - written, get("baseline")),
    direct: under("direct."),
    chains: under("chains."),
    mismatches: under("mismatch.").filter(([, count]) => count > 0),
  };
}
