// Reads Prometheus' text format, as /metrics answers with it (versions 0.0.4 and 1.0.0).

/** A line that is not in the format; the message names it. */
export class FormatError extends Error {}

const NAME = /[a-zA-Z_:][a-zA-Z0-9_:]*/y;
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;
const ESCAPES = { n: "\n", '"': '"', "\\": "\\" };

/**
 * Read a whole answer.
 *
 * @param {string} text
 * @returns {Map<string, {labels: Record<string, string>, value: number}[]>} samples by name, in their order
 * @throws {FormatError}
 */
export function parse(text) {
  const samples = new Map();
  text.split("\n").forEach((raw, index) => {
    const line = raw.trim();
    if (line === "" || line.startsWith("#")) return;
    const { name, labels, value } = readLine(line, index + 1);
    const known = samples.get(name);
    if (known) known.push({ labels, value });
    else samples.set(name, [{ labels, value }]);
  });
  return samples;
}

function readLine(line, number) {
  const fail = (what) => {
    throw new FormatError(`line ${number} of the metrics: ${what}: ${line.slice(0, 80)}`);
  };
  let at = 0;
  const skip = () => {
    while (line[at] === " " || line[at] === "\t") at += 1;
  };
  const word = () => {
    NAME.lastIndex = at;
    const found = NAME.exec(line);
    if (!found) fail("no name");
    at += found[0].length;
    return found[0];
  };
  const quoted = () => {
    let text = "";
    for (at += 1; line[at] !== '"'; at += 1) {
      if (at >= line.length) fail("a quote is not closed");
      if (line[at] !== "\\") {
        text += line[at];
        continue;
      }
      at += 1;
      // An escape that is none stands for itself.
      text += ESCAPES[line[at]] ?? `\\${line[at]}`;
    }
    at += 1;
    return text;
  };

  let name = line[0] === "{" ? "" : word();
  const labels = Object.create(null);
  skip();
  if (line[at] === "{") {
    at += 1;
    for (skip(); line[at] !== "}"; skip()) {
      const key = line[at] === '"' ? quoted() : word();
      skip();
      if (line[at] === "=") {
        at += 1;
        skip();
        if (line[at] !== '"') fail("a label without a quoted value");
        labels[key] = quoted();
      } else if (name === "") {
        name = key;
      } else {
        fail("a label without a value");
      }
      skip();
      if (line[at] === ",") at += 1;
      else if (line[at] !== "}") fail("labels are not closed");
    }
    at += 1;
  }
  if (name === "") fail("no name");
  const rest = line.slice(at).trim().split(/\s+/);
  if (rest.length > 2 || rest[0] === "") fail("not one value");
  return { name, labels, value: readNumber(rest[0]) ?? fail("no number") };
}

function readNumber(text) {
  if (NUMBER.test(text)) return Number(text);
  const special = { nan: NaN, inf: Infinity, "+inf": Infinity, "-inf": -Infinity };
  return special[text.toLowerCase()];
}
