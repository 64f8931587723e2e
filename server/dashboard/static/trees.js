// Trees of draft tokens: their shape in words, their nodes, and the requests that had chains in their place.

import { count } from "./format.js";
import { rows, rowsOrNone, setText } from "./page.js";

/** How trees are made, by kind. */
const KINDS = {
  grown: "each pass of the drafter expands the likeliest nodes of the last",
  comb: "each pass of the drafter continues the likeliest token, and its runners-up are leaves",
};

/** What a request asks for that needs chains. */
const REASONS = {
  penalties: "Penalties",
  bad_words: "Bad words",
  structured_outputs: "Structured outputs",
  thinking_token_budget: "Thinking budget",
  logits_processors: "Logits processors",
};

/** Modes in which no window is a tree. */
const CHAINS_ONLY = ["off", "cow"];

/**
 * Fill the part of the page that only engines with trees have.
 *
 * @param {{nodes: number, depth: number}} tree as /metrics has it
 * @param {{kind: string, width: number} | null} report as the admin API has it; null without the key
 * @param {string | null} mode the mode in force
 * @param {object} recent figures of the shown period
 * @param {object} total figures since the server's start
 */
export function showTree(tree, report, mode, recent, total) {
  setText("tree-shape", shape(tree, report, mode));
  rows("tree-nodes", [
    { head: "Verified", cells: [recent, total].map((of) => count(of.draftTokens)) },
    { head: "Accepted", cells: [recent, total].map((of) => count(of.acceptedTokens)) },
  ]);
  const lately = new Map(recent.chains);
  const lines = total.chains
    .filter(([, requests]) => requests > 0)
    .sort(([, a], [, b]) => b - a)
    .map(([reason, requests]) => ({
      head: REASONS[reason] ?? reason,
      cells: [count(lately.get(reason) ?? 0), count(requests)],
    }));
  rowsOrNone("tree-chains", lines);
}

function shape({ nodes, depth }, report, mode) {
  const [verified, accepted] = [count(nodes), count(depth)];
  const parts = [
    `${verified} nodes, ${accepted} deep: of a tree’s ${verified} draft tokens a step accepts ${accepted} at most.`,
  ];
  if (report) {
    const kind = report.kind[0].toUpperCase() + report.kind.slice(1);
    parts.push(`${kind}, ${count(report.width)} wide: ${KINDS[report.kind]}.`);
  } else {
    parts.push("The admin key shows kind and width.");
  }
  if (CHAINS_ONLY.includes(mode)) parts.push(`In mode ${mode} all windows are chains.`);
  return parts.join(" ");
}
