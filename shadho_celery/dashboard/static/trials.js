// The table of trials. The server filters, sorts and searches them, and returns one page.

import { get, ofStudy } from "/static/api.js";
import { askedOf, filtersOf, follow, link, number, pagesOf, seconds, table, time } from "/static/parts.js";
import { chooser, cut, element } from "/pages/marks.js";
import { counted } from "/pages/numbers.js";

const STATES = ["", "COMPLETE", "PRUNED", "FAILED", "RUNNING", "QUEUED", "WAITING", "CANCELLED"];
// Width of the window in pixels below which rows are shown as cards, and a page has fewer rows.
const NARROW = 640;
// Number of params that have a column by default, and maximum number of characters of a param's name.
const PARAMS = 8;
const NAME = 60;
const FILTERS = ["state", "class", "search", "numbers", "within"];
// By name of a study: numbers of the trials that the reader has marked.
const marks = new Map();
const SORTS = { "-number": "newest first", number: "oldest first", loss: "best first", "-seconds": "longest first", seconds: "shortest first" };

export async function showTrials(page, name, query) {
  const { main, signal } = page;
  const facts = await get(ofStudy(name));
  const asking = askedOf(`study/${encodeURIComponent(name)}/trials`, query);
  const { asked, go } = asking;
  const { labels } = facts;
  const shown = asked.columns ? labels.map(({ key }) => key).filter((key) => asked.columns.includes(key)) : labels.slice(0, PARAMS).map(({ key }) => key);
  const loss = Object.keys(facts.objectives)[0] ?? "loss";
  const named = new Map([["loss", loss], ...labels.map(({ key, text }) => [key, text])]);
  const sorts = shown.flatMap((key) => [[key, `${cut(named.get(key), NAME)}, least first`], [`-${key}`, `${cut(named.get(key), NAME)}, greatest first`]]);
  const filter = (label, key, options, value = "") => chooser(label, options, asked[key] ?? value, (chosen) => go({ [key]: chosen }));
  const fields = [
    filter("State", "state", STATES.map((state) => [state, state ? state.toLowerCase() : "all"])),
    filter("Class", "class", ["", ...facts.ran_on].map((each) => [each, each || "all"])),
    filter("Order", "sort", [...Object.entries(SORTS), ...sorts], "-number"),
  ];
  const form = filtersOf(asking, fields, "number, host, subspace, failure", () => show(), signal);
  const body = element("div");
  marks.set(name, marks.get(name) ?? new Set());
  const view = { ...asking, loss, named, shown, marked: marks.get(name) };
  main.append(element("h1", `Trials of ${name}`), form, ranges(named, asked, go), ...(labels.length ? [columnsOf(labels, shown, asked, go)] : []), body);
  const show = async () => {
    const text = asked.search;
    const found = await get(ofStudy(name, "/trials"), { size: innerWidth < NARROW ? 15 : 50, ...asked, columns: shown.join(",") });
    // Ignore a late answer to an earlier search text.
    if (!signal.aborted && text === asked.search) {
      body.replaceChildren(...rows(name, found, view));
    }
  };
  await follow(name, "trials", page, facts, show);
}

function rows(name, found, { go, address, asked, loss, named, shown, marked }) {
  if (!found.count) {
    return [element("p", FILTERS.some((key) => asked[key]) ? "No trial fits." : "Trials will be here as soon as they are chosen.")];
  }
  const [after, renew] = afterwards(name, asked, marked, address);
  const mark = (trial) => {
    const box = element("input", "", { type: "checkbox", "aria-label": `Mark trial ${trial.number}` });
    box.checked = marked.has(trial.number);
    box.addEventListener("change", () => renew(marked[box.checked ? "add" : "delete"](trial.number)));
    return box;
  };
  const params = shown.map((key, place) => [cut(named.get(key), NAME), ({ cells }) => (typeof cells[place] === "number" ? number(cells[place]) : cells[place]), "number"]);
  const columns = [
    ["mark", mark],
    ["trial", (trial) => link(String(trial.number), "study", name, "trial", trial.number), "number"],
    ["state", (trial) => element("span", trial.state.toLowerCase(), { class: `state ${trial.state}` })],
    [loss, (trial) => number(trial.loss), "number"],
    ["time", (trial) => seconds(trial.seconds), "number"],
    ["class", (trial) => trial.compute_class],
    ["host", (trial) => trial.host],
    ...params,
    ...(shown.length ? [] : [["values", (trial) => trial.text, "text"]]),
    ["ended", (trial) => time(trial.finished_at)],
  ];
  const frame = element("div", "", { class: "across", tabindex: "0", role: "region", "aria-label": "Table of trials" });
  frame.append(table(counted(found.count, "trial"), columns, found.trials));
  return [frame, pagesOf(found, go), after];
}

// Buttons that remove a range, and fields that add one for the loss or a param.
function ranges(named, asked, go) {
  const parts = (asked.within ?? "").split(",").filter(Boolean);
  const made = parts.map((part) => {
    const [key, least, most] = part.split(":");
    const remove = element("button", `${named.get(key) ?? key} ${least} to ${most} ×`, { type: "button", title: "Remove this range" });
    remove.addEventListener("click", () => go({ within: parts.filter((each) => each !== part).join(",") }));
    return remove;
  });
  let chosen = "loss";
  const choose = chooser("Range of", [...named].map(([key, text]) => [key, cut(text, NAME)]), chosen, (key) => (chosen = key));
  const [least, most] = ["from", "to"].map((name) => element("input", "", { size: "8", inputmode: "decimal", "aria-label": name, placeholder: name }));
  const add = element("button", "Filter", { type: "submit" });
  const form = element("form", "", { class: "filters" });
  form.append(choose, least, most, add, ...made);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    go({ within: [...parts, [chosen, least.value.trim() || "-inf", most.value.trim() || "inf"].join(":")].join(",") });
  });
  return form;
}

// The params whose columns are shown.
function columnsOf(labels, shown, asked, go) {
  const made = element("details", "", asked.columns ? { open: "" } : {});
  made.append(element("summary", `Columns: ${shown.length} of ${counted(labels.length, "param")}`));
  for (const { key, text } of labels) {
    const box = element("input", "", { type: "checkbox" });
    box.checked = shown.includes(key);
    const all = labels.map((each) => each.key);
    box.addEventListener("change", () => go({ columns: all.filter((each) => (each === key ? box.checked : shown.includes(each))).join(",") || "none" }));
    const label = element("label", "", { class: "choice" });
    label.append(box, ` ${cut(text, NAME)} `);
    made.append(label);
  }
  return made;
}

// Links to the marked trials, and to a CSV file of them or of all that fit.
function afterwards(name, asked, marked, address) {
  const made = element("p", "", { class: "pages" });
  const renew = () => {
    const { page, size, columns, ...fits } = asked;
    const numbers = [...marked].join(",");
    const query = new URLSearchParams(numbers ? { sort: fits.sort ?? "-number", numbers } : fits);
    const csv = element("a", marked.size ? `CSV of ${counted(marked.size, "marked trial")}` : "CSV of these trials", { href: `${ofStudy(name, "/trials.csv")}?${query}`, download: `${name}.csv` });
    const only = asked.numbers ? element("a", "Show all trials", { href: address({ numbers: "" }) }) : element("a", "Compare marked trials", { href: address({ numbers }) });
    made.replaceChildren(csv, ...(asked.numbers || marked.size > 1 ? [only] : []));
  };
  renew();
  return [made, renew];
}
