// Parts that several pages have: links, headline numbers, charts that follow the study, and tables that become cards.

import { studyActions } from "/static/actions.js";
import { ask, get, ofStudy } from "/static/api.js";
import { listen, sayLost } from "/static/events.js";
import { showChart } from "/pages/figure.js";
import { element, printable } from "/pages/marks.js";
import { digits, moment, took } from "/pages/numbers.js";

// Milliseconds between two drawings of a running study, and after one that failed.
const PAUSE = 500;
const LONG_PAUSE = 3000;
// Milliseconds after which a page says what it waits for.
const SLOW = 500;
// Number of rows from which on a timeline takes the whole width.
const TALL = 14;

export function link(text, ...parts) {
  return element("a", text, { href: `#/${parts.map(encodeURIComponent).join("/")}` });
}

export function headline(label, value) {
  const made = element("div", "", { class: "fact" });
  made.append(element("strong", value), element("span", label));
  return made;
}

// The line at the top for a study: its name, what it does, and its pages.
function placeOf(name, facts, at) {
  document.title = printable(`${name} – shadho_celery`);
  const made = element("nav", "", { "aria-label": `Study ${name}`, class: "study" });
  made.append(element("span", name, { class: "name" }), element("span", facts.state, { class: `state ${facts.state}` }));
  for (const [text, ...rest] of [["study"], ["trials", "trials"], ["placement", "placement"]]) {
    const each = link(text, "study", name, ...rest);
    if (text === at) {
      each.setAttribute("aria-current", "page");
    }
    made.append(each);
  }
  if (facts.running_on) {
    made.append(...studyActions(name, facts.actions, facts));
  }
  return made;
}

// The library that draws charts is run after the modules, which ask for their data before.
export const library = new Promise((done) => addEventListener("DOMContentLoaded", done));

const chartPath = (name, chart) => ofStudy(name, `/chart/${chart}`);

// Ask for a chart of which the place is made later.
export const askForChart = (name, chart) => ask(chartPath(name, chart));

// A place for a chart, which is asked for by name and drawn again by the function that is returned. That never fails:
// a chart that cannot be shown says so in its place.
export function chartPlace(parent, name, chart, { query = {}, classes = [], controls = [], onTrial, signal } = {}) {
  const box = element("section");
  const named = chart.replaceAll("_", " ");
  const trouble = element("p", "", { class: "trouble", role: "status" });
  const waits = element("p", "", { class: "soft" });
  const frame = element("div");
  frame.append(trouble, waits, box);
  parent.append(frame);
  let shown = null;
  let drawn = null;
  let asked = 0;
  box.addEventListener("trial", (event) => onTrial?.(event.detail.number));
  signal?.addEventListener("abort", () => drawn?.dispose());
  const show = async () => {
    asked += 1;
    const own = asked;
    const slow = setTimeout(() => shown || (waits.textContent = `The chart ${named} is being made ...`), SLOW);
    const found = await get(chartPath(name, chart), query).finally(() => clearTimeout(slow));
    await library;
    waits.textContent = "";
    const text = JSON.stringify(found);
    // Another param may have been asked for meanwhile.
    if (text !== shown && own === asked && !signal?.aborted) {
      drawn?.dispose();
      drawn = null;
      drawn = showChart(box, found, classes, controls);
      // Without failures, the chart of their kinds says so already.
      frame.hidden = chart === "failures_by_label" && Boolean(found.empty);
      // A timeline of many rows is not drawn in half of the page.
      frame.classList.toggle("wide", chart === "timeline" && found.axes[1].categories.length > TALL);
      shown = text;
    }
  };
  return async (changed = {}) => {
    Object.assign(query, changed);
    try {
      await show();
      trouble.textContent = "";
    } catch (error) {
      waits.textContent = "";
      trouble.textContent = printable(`The chart ${named} cannot be ${shown ? "renewed" : "shown"}: ${error.message}`);
    }
  };
}

// Draws the line at the top for the page `at` of a study, and calls the functions `parts` one after the other with the
// facts of the study; all of this again when the study has changed, until the reader goes on. A part that takes long
// does not delay those before it. `ready` is called when there is something to read. `facts` are those with which the
// page began: a later change is not missed.
export async function follow(name, at, { place, signal, ready }, facts, first, ...others) {
  let now = facts;
  let isNew = true;
  let shown = "";
  const top = async () => {
    now = isNew ? facts : await get(ofStudy(name));
    isNew = false;
    const text = JSON.stringify([now.state, now.running_on, now.changeable]);
    // A line that stays as it is keeps the focus of the keyboard.
    if (!signal.aborted && text !== shown) {
      place.replaceChildren(placeOf(name, now, at));
      shown = text;
    }
    await first(now);
  };
  const drawn = [top, ...others.map((renew) => () => renew(now))].map((renew) => new Part(renew, signal));
  const ending = new AbortController();
  signal.addEventListener("abort", () => ending.abort());
  let last = facts.change;
  // Opened first: its first event has the change until now.
  listen(name, ending.signal, (change) => {
    if (change !== last) {
      drawn.forEach((part) => part.change());
    }
    last = change ?? last;
  });
  document.addEventListener("visibilitychange", () => drawn.forEach((part) => part.look()), { signal });
  try {
    for (const part of drawn) {
      await part.begin();
      ready();
    }
  } catch (error) {
    ending.abort();
    throw error;
  }
}

// Calls `renew` now and again, with a pause of so many milliseconds, until the reader goes on.
export async function repeat(renew, pause, signal) {
  await renew();
  const again = async () => {
    const began = performance.now();
    if (!document.hidden) {
      await renew().then(() => sayLost(""), (error) => signal.aborted || sayLost(error.message));
    }
    // What takes long is done for at most a tenth of the time.
    wait(9 * (performance.now() - began));
  };
  let timer = null;
  const wait = (least = 0) => {
    timer = signal.aborted ? null : setTimeout(again, Math.max(pause, least));
  };
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    sayLost("");
  });
  wait();
}

class Part {
  constructor(renew, signal) {
    Object.assign(this, { renew, signal, isDrawing: true, isOld: false });
  }

  async begin() {
    await this.renew();
    this.isDrawing = false;
    this.look();
  }

  change() {
    this.isOld = true;
    this.look();
  }

  look() {
    if (!this.isDrawing) {
      this.again();
    }
  }

  async again() {
    this.isDrawing = true;
    while (this.isOld && !this.signal.aborted && !document.hidden) {
      this.isOld = false;
      const pause = await this.once();
      await new Promise((done) => setTimeout(done, pause));
    }
    this.isDrawing = false;
  }

  // Returns the milliseconds until the next drawing.
  async once() {
    const began = performance.now();
    try {
      await this.renew();
      sayLost("");
      // A large study is drawn for at most half of the time.
      return Math.max(PAUSE, performance.now() - began);
    } catch (error) {
      sayLost(this.signal.aborted ? "" : error.message);
      this.isOld = true;
      return LONG_PAUSE;
    }
  }
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
      cell.append(found instanceof Node ? found : document.createTextNode(printable(found ?? "–")));
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
export const money = (amount) => (amount >= 0.995 || !amount ? amount.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) : String(Number(amount.toPrecision(2))));
export const gib = (bytes) => (bytes ? `${digits(bytes / 2 ** 30)} GiB` : "unknown");
