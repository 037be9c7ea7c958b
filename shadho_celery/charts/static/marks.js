// Descriptions of marks in words, for tooltips, screen readers and tables, and HTML elements that show any text safely.

import { shown, took } from "./numbers.js";

// Characters that may reverse the direction of a text or control a terminal: the same as in core/checks.py.
const UNPRINTABLE = /[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\u{1d173}-\u{1d17a}\u{e0000}-\u{e007f}]/gu;

// A text in which the UNPRINTABLE characters are escaped as in Python.
export const printable = (text) => String(text ?? "").replace(UNPRINTABLE, escaped);

// A text that is cut to `most` characters. If it is cut, it ends with an ellipsis.
export const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function escaped(character) {
  const code = character.codePointAt(0);
  if (character === "\r") {
    return "\\r";
  }
  const [kind, length] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
  return `\\${kind}${code.toString(16).padStart(length, "0")}`;
}

// An HTML element with this text and these attributes, made printable. The attribute `value` is unchanged, because code
// reads it.
export function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = printable(text);
  for (const [attribute, value] of Object.entries(attributes)) {
    made.setAttribute(attribute, attribute === "value" ? value : printable(value));
  }
  return made;
}

// A labelled list of `options`, pairs of value and text. `act` is called with the value that is chosen, and the list.
export function chooser(label, options, value, act) {
  const made = element("label", `${label} `, { class: "choice" });
  const choose = element("select");
  choose.append(...options.map(([key, text]) => element("option", text, { value: key })));
  choose.value = value;
  choose.addEventListener("change", () => act(choose.value, choose));
  made.append(choose);
  return made;
}

// Name of the column with a line's values on one of several parallel axes.
export const columnOf = (place) => `axis ${place}`;

// Name of an axis with its unit, such as "trials an hour" or "time (s)".
export function withUnit({ name, unit }) {
  return unit.startsWith("an ") ? `${name} ${unit}` : unit ? `${name} (${unit})` : name;
}

// Facts about one mark, as pairs of name and text.
export function facts(chart, series, place) {
  const [x, y] = chart.axes;
  const axes = { x, y, base: y, start: x, end: x };
  const found = [];
  for (const [name, column] of Object.entries(series.columns)) {
    const value = column[place];
    if (name === "base" || name === "width" || value === null || value === "") {
      continue;
    }
    // The other columns of a row of the timeline are parts of its name, which is shown for `y`.
    if (series.colour === "idle" && !["y", "idle"].includes(name)) {
      continue;
    }
    if (name.startsWith("axis ")) {
      const axis = chart.axes[Number(name.slice("axis ".length))];
      found.push([axis.name, shown(value, axis)]);
    } else if (name === "number") {
      // If the x axis shows the trial's number, it is not repeated.
      const isSaid = x.name === "trial" && series.columns.x?.[place] === value;
      found.push(...(isSaid ? [] : [["trial", String(value)]]));
    } else if (name === "end" && x.scale === "time") {
      found.push(["duration", took(value - series.columns.start[place])]);
    } else if (name === "busy" || name === "idle") {
      found.push([name, `${Math.round(100 * value)} %`]);
    } else {
      const axis = axes[name];
      // Of a bar with a base, only the part above the base is its value.
      const own = name === "y" && series.columns.base ? value - series.columns.base[place] : value;
      const label = axis?.unit === "s" ? axis.name : axis && withUnit(axis);
      found.push([["x", "y"].includes(name) ? label : name, shown(own, axis)]);
    }
  }
  return found;
}

export const inWords = (chart, series, place) =>
  [series.name, ...facts(chart, series, place).map((fact) => fact.join(" "))].join(", ");

// Content of a tooltip.
export function card(chart, series, place) {
  const list = element("dl");
  for (const [name, text] of facts(chart, series, place)) {
    list.append(element("dt", name), element("dd", text));
  }
  const made = element("div", "", { class: "card" });
  made.append(element("strong", series.name), list);
  return made;
}
