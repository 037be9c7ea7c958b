// Parts that several pages have: links, headline numbers, charts that follow the study, and tables that become cards.

import { studyActions } from "/static/actions.js";
import { get, ofStudy } from "/static/api.js";
import { showChart } from "/pages/figure.js";
import { element } from "/pages/marks.js";
import { digits, moment, took } from "/pages/numbers.js";

// Milliseconds between two drawings of a running study.
const PAUSE = 500;

export function link(text, ...parts) {
  return element("a", text, { href: `#/${parts.map(encodeURIComponent).join("/")}` });
}

export function headline(label, value) {
  const made = element("div", "", { class: "fact" });
  made.append(element("strong", value), element("span", label));
  return made;
}

// The line at the top for a study: its name, whether it runs, and its pages.
export function placeOf(name, runningOn, at) {
  document.title = `${name} – shadho_celery`;
  const made = element("nav", "", { "aria-label": `Study ${name}`, class: "study" });
  made.append(element("span", name, { class: "name" }), element("span", runningOn ? "running" : "ended", { class: "state" }));
  for (const [text, ...rest] of [["study"], ["trials", "trials"], ["placement", "placement"]]) {
    const each = link(text, "study", name, ...rest);
    if (text === at) {
      each.setAttribute("aria-current", "page");
    }
    made.append(each);
  }
  if (runningOn) {
    made.append(...studyActions(name));
  }
  return made;
}

// A place for a chart, which is asked for by name and drawn again by the function that is returned.
export function chartPlace(parent, name, chart, { query = {}, classes = [], onTrial, signal } = {}) {
  const box = element("section");
  parent.append(box);
  let shown = null;
  let drawn = null;
  box.addEventListener("trial", (event) => onTrial?.(event.detail.number));
  signal?.addEventListener("abort", () => drawn?.dispose());
  const renew = async (changed = {}) => {
    Object.assign(query, changed);
    const found = await get(ofStudy(name, `/chart/${chart}`), query);
    if (signal?.aborted) {
      return;
    }
    const text = JSON.stringify(found);
    if (text !== shown) {
      shown = text;
      drawn?.dispose();
      drawn = showChart(box, found, classes);
    }
  };
  return renew;
}

// Calls `renew` once, and again each time that the study has changed, until the reader goes on.
export async function follow(name, signal, renew) {
  // Opened first, so that no change is missed while the page is drawn: the first event has the change until now.
  const events = new EventSource(ofStudy(name, "/events"));
  signal.addEventListener("abort", () => events.close());
  let isDrawing = true;
  let isOld = false;
  let last = null;
  const again = async () => {
    while (isOld && !signal.aborted && !document.hidden) {
      isOld = false;
      isDrawing = true;
      await renew().catch(() => {});
      await new Promise((done) => setTimeout(done, PAUSE));
    }
    isDrawing = false;
  };
  const look = () => isOld && !isDrawing && again();
  events.addEventListener("message", (event) => {
    isOld ||= last !== null && event.data !== last;
    last = event.data;
    look();
  });
  document.addEventListener("visibilitychange", look, { signal });
  try {
    await renew();
  } catch (error) {
    events.close();
    throw error;
  }
  await again();
}

// A table whose rows become cards of label and value on a narrow screen.
export function table(caption, columns, rows) {
  const made = element("table", "", { class: "rows" });
  const head = element("tr");
  head.append(...columns.map(([name, , kind]) => element("th", name, { scope: "col", ...(kind ? { class: kind } : {}) })));
  const top = element("thead");
  top.append(head);
  const body = element("tbody");
  for (const row of rows) {
    const line = element("tr");
    for (const [name, value, kind] of columns) {
      const found = value(row);
      const cell = element("td", "", { "data-label": name, ...(kind ? { class: kind } : {}) });
      cell.append(found instanceof Node ? found : document.createTextNode(found ?? "–"));
      line.append(cell);
    }
    body.append(line);
  }
  made.append(element("caption", caption), top, body);
  return made;
}

export const number = (value) => (value === null || value === undefined ? "–" : digits(value));
export const seconds = (value) => (value === null || value === undefined ? "–" : took(value));
export const time = (value) => (value === null || value === undefined ? "–" : moment(value));
export const gib = (bytes) => (bytes ? `${digits(bytes / 2 ** 30)} GiB` : "unknown");

export function valueText(value) {
  return typeof value === "number" ? digits(value) : typeof value === "string" ? value : JSON.stringify(value);
}

export function paramsText(params) {
  return Object.entries(params ?? {})
    .map(([label, value]) => `${label}=${valueText(value)}`)
    .join("  ");
}
