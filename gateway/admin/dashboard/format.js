// Numbers and times for people. A missing value is a dash, never zero.

const DASH = "–";
const isAbsent = (value) => value === null || value === undefined || Number.isNaN(value);

export function count(value) {
  if (isAbsent(value)) return DASH;
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return Math.round(value).toLocaleString("en");
}

export function share(value) {
  return isAbsent(value) ? DASH : `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function seconds(value) {
  if (isAbsent(value)) return DASH;
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}

export function rate(value) {
  if (isAbsent(value)) return DASH;
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

export function ago(wallS, nowS) {
  if (isAbsent(wallS)) return DASH;
  const passed = Math.max(0, nowS - wallS);
  if (passed < 60) return `${Math.round(passed)} s ago`;
  if (passed < 3600) return `${Math.round(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} d ago`;
}

/** `1 move`, `2 moves`. */
export const many = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
export const clock = (wallS) => new Date(wallS * 1000).toLocaleTimeString("en-GB");
export const words = (name) => name.replaceAll("_", " ");
export const short = (key) => key.slice(0, 12);
