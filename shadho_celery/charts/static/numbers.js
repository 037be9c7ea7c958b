// Texts of numbers, durations and moments, as core/units.py writes them.

export function digits(value) {
  const size = Math.abs(value);
  if (value && !(size >= 1e-3 && size < 1e6)) {
    return value.toExponential(2).replace(/\.?0+e/, "e");
  }
  return size >= 999.5 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(3)));
}

export function took(seconds) {
  if (seconds < 0.9995) {
    return seconds ? `${digits(1000 * seconds)} ms` : "0 s";
  }
  if (seconds < 99.95) {
    return `${digits(seconds)} s`;
  }
  const parts = [];
  let rest = Math.round(seconds);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count || parts.length) {
      parts.push([count, unit]);
    }
  }
  return parts.slice(0, 2).filter(([count]) => count).map((part) => part.join(" ")).join(" ");
}

export const whole = (number) => number.toLocaleString("en-US");

// A number with its noun, such as "1 trial" or "1,200 trials". By default the plural is the singular with an s.
export function counted(number, one, several = `${one}s`) {
  return `${whole(number)} ${number === 1 ? one : several}`;
}

// Text of a time in seconds since the epoch, in the reader's time zone.
export function moment(seconds) {
  return new Date(1000 * seconds).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

// Text of a value on an axis.
export function shown(value, axis) {
  if (value === null || value === undefined) {
    return "–";
  }
  if (typeof value === "string") {
    return value;
  }
  if (axis?.scale === "category") {
    return axis.categories[value] ?? String(value);
  }
  if (axis?.scale === "time") {
    return moment(value);
  }
  if (axis?.unit === "s") {
    return took(value);
  }
  return Number.isInteger(value) && Math.abs(value) < 1e6 ? String(value) : digits(value);
}
