// Formats numbers for people.

const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

// Three digits and a prefix, such as 12.3 k.
export function short(value, unit = "") {
  if (value === undefined || value === null || Number.isNaN(value)) {
    return "–";
  }
  let place = 0;
  let left = value;
  while (Math.abs(left) >= 1000 && place < PREFIXES.length - 1) {
    left /= 1000;
    place += 1;
  }
  const digits = Math.abs(left) >= 100 || (place === 0 && Number.isInteger(left)) ? 0 : 1;
  const suffix = `${PREFIXES[place]}${unit}`;
  return `${left.toFixed(digits)}${suffix ? " " : ""}${suffix}`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  let left = value;
  while (left >= 1024 && place < units.length - 1) {
    left /= 1024;
    place += 1;
  }
  return `${left.toFixed(left < 10 && place ? 1 : 0)} ${units[place]}`;
}

export function percent(part) {
  if (part === undefined || part === null || Number.isNaN(part)) {
    return "–";
  }
  const of = 100 * part;
  if (of > 0 && of < 0.1) {
    return "< 0.1 %";
  }
  return `${of.toFixed(of > 0 && of < 10 ? 1 : 0)} %`;
}

export function seconds(value) {
  if (value < 60) {
    return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  }
  return value < 3600 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
}

// A duration such as "1 h 20 min": two units at most.
export function duration(value) {
  const whole = Math.max(Math.round(value), 0);
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex(([amount]) => amount > 0);
  if (first < 0) {
    return value > 0 ? "< 1 s" : "0 s";
  }
  return parts.slice(first, first + 2).filter(([amount]) => amount > 0).map(([amount, unit]) => `${amount} ${unit}`).join(" ");
}

// A point in time, by the reader's clock and with its zone.
export function moment(text) {
  return new Date(text).toLocaleString([], { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", timeZoneName: "short" });
}

export function ago(value) {
  if (value < 5) {
    return "now";
  }
  if (value < 60) {
    return `${Math.round(value)} s ago`;
  }
  if (value < 3600) {
    return `${Math.round(value / 60)} min ago`;
  }
  return value < 86400 ? `${Math.round(value / 3600)} h ago` : `${Math.round(value / 86400)} d ago`;
}

export function loss(value) {
  if (value === null || value === undefined) {
    return "–";
  }
  return Math.abs(value) >= 100 ? value.toPrecision(4) : value.toFixed(4);
}

export function small(value) {
  return value === null || value === undefined ? "–" : value.toExponential(1).replace("e+0", "");
}
