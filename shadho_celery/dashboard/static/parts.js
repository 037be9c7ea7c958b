// Parts of several pages: links, headline numbers, charts that are updated, and tables that become cards.

import { studyActions } from "/static/actions.js";
import { ask, get, ofStudy } from "/static/api.js";
import { listen, sayLost } from "/static/events.js";
import { showChart } from "/pages/figure.js";
import { element, printable } from "/pages/marks.js";
import { digits, moment, took } from "/pages/numbers.js";

// Milliseconds between two updates of a running study, and after an update that failed.
const PAUSE = 500;
const LONG_PAUSE = 3000;
// Milliseconds after which a page shows what it waits for; and after the last typed character, after which it searches.
const SLOW = 500;
const TYPED = 300;
// A timeline with more rows than this takes the whole width.
const TALL = 14;
// As does a chart with more parallel axes.
const MANY = 6;

export function link(text, ...parts) {
  return element("a", text, { href: `#/${parts.map(encodeURIComponent).join("/")}` });
}

export function headline(label, value) {
  const made = element("div", "", { class: "fact" });
  made.append(element("strong", value), element("span", label));
  return made;
}

// The line at the top of a study's pages: its name, its state, links to its pages, and buttons.
function placeOf(name, facts, at) {
  document.title = printable(`${name} – shadho_celery`);
  const made = element("nav", "", { "aria-label": `Study ${name}`, class: "study" });
  made.append(element("span", name, { class: "name" }), element("span", facts.state, { class: `state ${facts.state}` }));
  // On one class, there is nothing to place.
  const pages = [["study"], ["trials", "trials"], ...(facts.ran_on.length > 1 ? [["placement", "placement"]] : [])];
  for (const [text, ...rest] of pages) {
    const each = link(text, "study", name, ...rest);
    if (text === at) {
      each.setAttribute("aria-current", "page");
    }
    made.append(each);
  }
  if (facts.owner) {
    made.append(element("span", `owner ${facts.owner}`, { class: "soft" }));
  }
  if (facts.running_on) {
    made.append(...studyActions(name, facts.actions, facts));
  }
  if (at === "study") {
    made.append(...studyActions(name, facts.note));
  }
  return made;
}

// The library that draws charts runs after the modules, so that they can request data before it is loaded.
export const library = new Promise((done) => addEventListener("DOMContentLoaded", done));

const chartPath = (name, chart) => ofStudy(name, `/chart/${chart}`);

// Request a chart now, whose place is created later.
export const askForChart = (name, chart) => ask(chartPath(name, chart));

// Create a place for a chart. Return a function that requests and draws the chart. The function never throws:
// if the chart cannot be shown, its place says so. It returns the chart that is shown.
export function chartPlace(parent, name, chart, { query = {}, classes = [], controls = [], onTrial, onRanges, signal } = {}) {
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
  box.addEventListener("ranges", (event) => onRanges?.(event.detail));
  signal?.addEventListener("abort", () => drawn?.dispose());
  const show = async () => {
    asked += 1;
    const own = asked;
    const slow = setTimeout(() => shown || (waits.textContent = `The chart ${named} is being made ...`), SLOW);
    const found = await get(chartPath(name, chart), query).finally(() => clearTimeout(slow));
    await library;
    waits.textContent = "";
    const text = JSON.stringify(found);
    // Draw only the answer to the latest request, because the reader may have chosen another param meanwhile.
    if (text !== shown && own === asked && !signal?.aborted) {
      drawn?.dispose();
      drawn = null;
      drawn = showChart(box, found, classes, controls);
      frame.hidden = !found.is_shown;
      frame.classList.toggle("line", Boolean(found.empty));
      // A timeline with many rows, and many parallel axes, need the whole width of the page.
      const isTall = chart === "timeline" && found.axes[1].categories.length > TALL;
      frame.classList.toggle("wide", isTall || (chart === "parallel" && found.axes.length > MANY));
      shown = text;
      last = found;
    }
  };
  let last = null;
  return async (changed = {}) => {
    Object.assign(query, changed);
    try {
      await show();
      trouble.textContent = "";
    } catch (error) {
      waits.textContent = "";
      trouble.textContent = printable(`The chart ${named} cannot be ${shown ? "renewed" : "shown"}: ${error.message}`);
    }
    return last;
  };
}

// Draw the line at the top of the page `at` of a study, and call `first` and then `others` with the facts of the
// study. Repeat this whenever the study has changed, until the reader leaves the page. A slow part does not delay
// the parts before it. `ready` is called when there is something to read. `facts` are the study's facts when the
// page was opened; they contain the change number from which on changes are noticed.
export async function follow(name, at, { place, signal, ready }, facts, first, ...others) {
  let now = facts;
  let isNew = true;
  let shown = "";
  const top = async () => {
    now = isNew ? facts : await get(ofStudy(name));
    isNew = false;
    const text = JSON.stringify([now.state, now.running_on, now.changeable]);
    // Do not replace an unchanged line, so that it keeps the keyboard focus.
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
  // Open the stream first, whose first event has the current change number.
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

// A function that draws charts one after the other.
export const inTurn = (drawn) => async () => {
  for (const renew of drawn) {
    await renew();
  }
};

// Call `renew` repeatedly, with a pause in milliseconds, until the reader leaves the page.
export async function repeat(renew, pause, signal) {
  await renew();
  const again = async () => {
    const began = performance.now();
    if (!document.hidden) {
      await renew().then(() => sayLost(""), (error) => signal.aborted || sayLost(error.message));
    }
    // So a slow `renew` runs for at most a tenth of the time.
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

  // Update once. Return the milliseconds until the next update.
  async once() {
    const began = performance.now();
    try {
      await this.renew();
      sayLost("");
      // So drawing a large study takes at most half of the time.
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

// The table of the notes on a study or a trial, if there are any.
export function notesOf(name, { notes, trial }) {
  const columns = [["time", (each) => time(each.at)], ["user", (each) => each.by], ["note", (each) => each.text]];
  if (!trial) {
    columns.splice(2, 0, ["trial", (each) => (each.trial === null ? "–" : link(each.trial, "study", name, "trial", each.trial))]);
  }
  return notes.length ? [table("Notes", columns, notes)] : [];
}

// What the address of a page asks for after "?", and functions that return and open the address with changes.
export function askedOf(page, query) {
  const asked = Object.fromEntries(new URLSearchParams(query));
  const address = (changed) => {
    const next = Object.entries({ ...asked, page: 0, ...changed }).filter(([key, value]) => value !== "" && (key !== "page" || value));
    return `#/${page}${next.length ? `?${new URLSearchParams(next)}` : ""}`;
  };
  return { asked, address, go: (changed) => (location.hash = address(changed)) };
}

// The filters of a table: `fields`, and a field that searches while one types, and calls `show`.
export function filtersOf({ asked, address }, fields, hint, show, signal) {
  const form = element("form", "", { class: "filters", role: "search" });
  const label = element("label", "Search");
  const field = element("input", "", { type: "search", placeholder: hint, maxlength: "200" });
  let waiting;
  field.value = asked.search ?? "";
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      if (!signal.aborted) {
        // Do not open the page anew, so that the field keeps the focus during typing.
        history.replaceState(null, "", address({ search: field.value }));
        show(Object.assign(asked, { search: field.value, page: 0 }));
      }
    }, TYPED);
  });
  label.append(field);
  form.append(...fields, label);
  // By default, Enter would submit the form and load another page.
  form.addEventListener("submit", (event) => event.preventDefault());
  return form;
}

// Buttons that lead to the other pages of a table, if there are any.
export function pagesOf({ count, page, size }, go) {
  const made = element("nav", "", { class: "pages", "aria-label": "Pages of the table" });
  const last = Math.max(0, Math.ceil(count / size) - 1);
  const button = (text, to) => {
    const made = element("button", text, { type: "button", ...(to < 0 || to > last ? { disabled: "" } : {}) });
    made.addEventListener("click", () => go({ page: to }));
    return made;
  };
  made.append(button("Previous", page - 1), element("span", `${page + 1} of ${last + 1}`), button("Next", page + 1));
  made.hidden = !last;
  return made;
}

export const number = (value) => (value === null || value === undefined ? "–" : digits(value));
export const seconds = (value) => (value === null || value === undefined ? "–" : took(value));
export const time = (value) => (value === null || value === undefined ? "–" : moment(value));
export const money = (amount) => (amount >= 0.995 || !amount ? amount.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) : String(Number(amount.toPrecision(2))));
export const gib = (bytes) => (bytes ? `${digits(bytes / 2 ** 30)} GiB` : "unknown");
