// Numbers as the page shows them. Missing ones are a dash.

export const NONE = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const three = new Intl.NumberFormat("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const fullClock = new Intl.DateTimeFormat("en", {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});

const missing = (value) => value === null || value === undefined || !Number.isFinite(value);
// A typographic minus stands as wide as a digit.
const signed = (text) => text.replace("-", "−");

export const count = (value) => (missing(value) ? NONE : signed(whole.format(value)));

/** A number with three digits that count, larger ones in thousands or millions. */
export function number(value) {
  if (missing(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return signed(`${short.format(value / 1e9)} G`);
  if (size >= 1e6) return signed(`${short.format(value / 1e6)} M`);
  if (size >= 1e4) return signed(`${short.format(value / 1e3)} k`);
  return signed(short.format(value));
}

/** A mean of small counts. */
export const ratio = (value) => (missing(value) ? NONE : value.toFixed(2));

/** A share of one, in percent. */
export function percent(value, digits = 1) {
  if (missing(value)) return NONE;
  return signed(`${(100 * value).toFixed(digits)} %`);
}

/** Bytes, in powers of a thousand; three digits, or for an axis as few as do. */
export function bytes(value, digits = three) {
  if (missing(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let step = 0;
  let left = value;
  while (Math.abs(left) >= 999.5 && step < units.length - 1) {
    left /= 1000;
    step += 1;
  }
  return signed(`${(step === 0 ? whole : digits).format(left)} ${units[step]}`);
}

export const bytesPerSecond = (value) => (missing(value) ? NONE : `${bytes(value)}/s`);
export const bytesPerSecondOnAxis = (value) => `${bytes(value, short)}/s`;

/** Milliseconds, as a person says it. */
export function duration(milliseconds) {
  const seconds = Math.round(milliseconds / 1000);
  if (seconds < 120) return `${seconds} s`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min` : "hour";
}

export const timeOfDay = (time) => clock.format(time);
export const timeWithSeconds = (time) => fullClock.format(time);
