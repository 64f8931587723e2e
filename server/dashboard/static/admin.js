// The mode switch. The key lives in a private field of one object and goes nowhere but into the request's header.

/** Longer than the server waits for its ranks. */
const PATIENCE = 75_000;

const MEANING = {
  off: "Every window is written to the cache directly, as stock vLLM does.",
  stage: "Windows stay outside the cache; only accepted tokens are written.",
  cow: "Windows are written directly; slots of rejected tokens are put back. Costs more writes than off.",
};

/** An answer that is no success, or none at all; the message is for people. */
class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Admin {
  #key = null;
  #report = null;
  #mode = null;
  #reachable = true;
  #busy = false;

  /** @param {() => void} onSwitched called after each switch */
  constructor(onSwitched) {
    this.onSwitched = onSwitched;
    this.buttons = [...document.querySelectorAll("#modes button")];
    this.form = document.getElementById("key-form");
    this.input = document.getElementById("key");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#unlock();
    });
    this.lengths = document.getElementById("lengths-form");
    this.lengths.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#setLengths();
    });
    for (const button of this.buttons)
      button.addEventListener("click", () => this.#switch(button.dataset.mode));
    document.getElementById("forget").addEventListener("click", () => {
      this.#lock();
      this.#say("The key is forgotten.");
      this.input.focus();
    });
    this.#render();
  }

  /**
   * Show the mode in force.
   *
   * @param {string | null} mode null where the server shows none; "mixed" where engines differ
   * @param {boolean} reachable whether the server answers
   */
  show(mode, reachable) {
    this.#reachable = reachable;
    if (!this.#busy) this.#mode = mode;
    this.#render();
  }

  /** What the report says of trees; null without the key, and where windows are chains. */
  get tree() {
    return this.#report?.tree ?? null;
  }

  async #unlock() {
    const key = this.input.value;
    if (this.#busy || key === "") return;
    await this.#work("Checking the key…", async () => {
      this.#report = await ask("GET", key);
      this.#key = key;
      this.input.value = "";
      this.#say(this.#report.enabled ? "Unlocked." : "");
      if (!this.#report.enabled) this.#fail(this.#report.detail);
    });
    const next =
      this.#key === null ? this.input : (this.buttons.find((button) => !button.disabled) ?? this.input);
    next.focus();
  }

  async #switch(mode) {
    if (this.#busy || this.#key === null) return;
    await this.#work(`Switching to ${mode}…`, async () => {
      const { old, new: now, step, ranks } = await ask("PUT", this.#key, { mode });
      this.#mode = now;
      const where = `on ${ranks} rank${ranks === 1 ? "" : "s"}`;
      this.#report = await ask("GET", this.#key);
      // Last, so that the page never says what it does not show yet.
      this.#say(
        old === now
          ? `${now} was in force already, ${where}.`
          : `${old} → ${now} at verify step ${step}, ${where}.`,
      );
      this.onSwitched();
    });
    this.buttons.find((button) => button.dataset.mode === mode)?.focus();
  }

  async #setLengths() {
    const input = document.getElementById("lengths");
    const wanted = input.value.trim();
    if (this.#busy || this.#key === null || wanted === "") return;
    await this.#work(`Setting draft tokens to ${wanted}…`, async () => {
      const path = "admin/nwor/draft-tokens";
      const { old, new: now, step, ranks } = await ask("PUT", this.#key, { draft_tokens: wanted }, path);
      this.#report = await ask("GET", this.#key);
      const where = `on ${ranks} rank${ranks === 1 ? "" : "s"}`;
      this.#say(`Draft tokens ${old} → ${now} at verify step ${step}, ${where}.`);
      input.value = "";
      this.onSwitched();
    });
    input.focus();
  }

  /** Do one thing at a time; say what is going on, and what went wrong. */
  async #work(words, work) {
    this.#busy = true;
    this.#fail("");
    this.#say(words);
    this.#render();
    try {
      await work();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.#say("");
      this.#fail(error.message);
      if (error.status === 401) this.#lock();
    } finally {
      this.#busy = false;
      this.#render();
    }
  }

  #lock() {
    this.#key = null;
    this.#report = null;
    this.input.value = "";
    this.#render();
  }

  #say(text) {
    document.getElementById("admin-answer").textContent = text;
  }

  #fail(text) {
    document.getElementById("admin-error").textContent = text;
  }

  #render() {
    const unlocked = this.#key !== null;
    for (const button of this.buttons) {
      const { mode } = button.dataset;
      const enabled = this.#report?.modes?.includes(mode) ?? false;
      button.setAttribute("aria-pressed", String(mode === this.#mode));
      button.disabled = !unlocked || !enabled || this.#busy || !this.#reachable;
      button.title = unlocked && !enabled ? "Not enabled when the server started (--nwor-modes)" : "";
    }
    const mixed = "The engines are in different modes; switching puts one in force on all.";
    document.getElementById("mode-text").textContent =
      this.#mode === "mixed" ? mixed : (MEANING[this.#mode] ?? "The server shows no mode.");
    this.form.hidden = unlocked;
    this.form.querySelector("button").disabled = this.#busy;
    document.getElementById("ranks").hidden = !unlocked;
    if (unlocked) this.#renderReport(this.#report);
    this.#renderLengths(this.#report?.draft_tokens);
  }

  #renderLengths(lengths) {
    this.lengths.hidden = !lengths?.can_change;
    if (!lengths) return;
    this.lengths.querySelector("button").disabled = this.#busy || !this.#reachable;
    const why = lengths.engines.map(({ why: words }) => words)[0];
    document.getElementById("lengths-why").textContent =
      `In force: ${lengths.setting}, started with ${lengths.started_with}.${why ? ` When it was unlocked or changed last: ${why}.` : ""}`;
  }

  #renderReport({ enabled, ranks = [], ranks_agree: agree = true, changes = [] }) {
    const parts = [];
    if (enabled)
      parts.push(
        ranks.length === 1
          ? "One rank."
          : `${ranks.length} ranks, ${agree ? "in agreement" : "which do not agree"}.`,
      );
    for (const rank of ranks) {
      if (rank.unsupported) parts.push(`Rank ${rank.rank} can stage nothing: ${rank.unsupported.detail}.`);
      if (rank.fault)
        parts.push(`Rank ${rank.rank} was turned off by a fault: ${rank.fault}. Switching clears it.`);
    }
    document.getElementById("ranks-text").textContent = parts.join(" ");
    const items = changes
      .slice(-4)
      .reverse()
      .map(({ when, key, what }) => {
        const item = document.createElement("li");
        const time = document.createElement("time");
        time.dateTime = when;
        time.textContent = new Date(when).toLocaleTimeString("en", { hourCycle: "h23" });
        item.append(time, ` ${what} (key ${key})`);
        return item;
      });
    if (!items.length) {
      const item = document.createElement("li");
      item.textContent = "None since the start.";
      items.push(item);
    }
    document.getElementById("changes").replaceChildren(...items);
  }
}

/** Call the admin API; throw {@link Refused} with the server's own words where it refuses. */
async function ask(method, key, body, path = "admin/nwor") {
  let headers;
  try {
    headers = new Headers({ Authorization: `Bearer ${key}`, "Content-Type": "application/json" });
  } catch {
    throw new Refused(401, "The admin key has characters that no request can carry: check what was typed.");
  }
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers,
      body: body && JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(PATIENCE),
    });
  } catch {
    throw new Refused(0, "The server did not answer. Whether the call was carried out is not known.");
  }
  let content = null;
  try {
    content = await answer.json();
  } catch {
    // A proxy's page: the status has to do.
  }
  if (answer.ok && content !== null) return content;
  const words = content?.error?.message;
  throw new Refused(answer.status, words ?? `The server answered ${answer.status} to ${method} /${path}.`);
}
