// The page of the fleet: what runs in each worker's slots, and how many messages wait in the queues. The server filters
// the workers, and returns one page of them.

import { workerActions } from "/static/actions.js";
import { ask, get } from "/static/api.js";
import { askedOf, filtersOf, gib, library, link, money, number, pagesOf, repeat, seconds, table } from "/static/parts.js";
import { showChart } from "/pages/figure.js";
import { chooser, element } from "/pages/marks.js";
import { counted, whole } from "/pages/numbers.js";

const PAUSE = 3000;
const LONG_PAUSE = 60000;
// Seconds without an announcement after which a worker is silent; it announces itself every 5 s.
const SILENT = 12;
// Number of workers up to which there are no filters; and number of slots above which idle ones have small cells.
const [FEW, MANY] = [8, 16];
// Maximum number of cells of a worker's trials, and of its idle slots.
const MOST_CELLS = 64;

export async function showFleet({ main, signal }, query) {
  const asking = askedOf("fleet", query);
  const body = element("div");
  const day = element("section", "", { class: "day" });
  const week = element("div");
  const filters = element("div");
  const renew = async () => {
    const found = await get("/api/fleet", asking.asked);
    if (signal.aborted) {
      return;
    }
    const parts = found.trouble ? [element("p", found.trouble)] : found.places.flatMap((place) => placeParts(place, asking.go));
    const start = element("p", "Workers will be here. Start one: shadho-celery worker --import my_study, or a study: shadho-celery run tasks.svm");
    if (!filters.childElementCount) {
      filters.append(...filtersFor(found.places, asking, renew, signal));
    }
    const sought = document.activeElement.tagName;
    const focused = [...body.querySelectorAll(sought)].indexOf(document.activeElement);
    body.replaceChildren(...(parts.length ? parts : [start]));
    // The element at the place of the one that had the focus gets it.
    body.querySelectorAll(sought)[focused]?.focus({ preventScroll: true });
  };
  main.append(element("h1", "Fleet"), day, filters, body, week);
  ask("/api/week");
  await repeat(renew, PAUSE, signal);
  let drawn = null;
  signal.addEventListener("abort", () => drawn?.dispose());
  await repeat(async () => {
    const found = await get("/api/week");
    await library;
    drawn?.dispose();
    drawn = signal.aborted ? null : showChart(day, found.day, found.classes);
    week.replaceChildren(...weekParts(found));
  }, LONG_PAUSE, signal);
}

// Filters of the workers, unless there are few.
function filtersFor(places, asking, renew, signal) {
  const classes = places.flatMap((place) => Object.entries(place.classes ?? {}));
  if (classes.reduce((sum, [, each]) => sum + each.workers, 0) <= FEW) {
    return [];
  }
  const names = new Set(classes.map(([name]) => name));
  const options = [["", "all"], ...[...names].map((name) => [name, name])];
  const choose = chooser("Class", options, asking.asked.class ?? "", (name) => asking.go({ class: name }));
  return [filtersOf(asking, [choose], "worker, study, owner", renew, signal)];
}

function weekParts({ uses }) {
  const columns = [...who, ["slot hours", (each) => number(each.slot_seconds / 3600), "number"], ["money", (each) => money(each.money), "number"]];
  return uses.length ? [table("Used in the last week by studies of this store", columns, uses)] : [];
}

const who = [
  ["owner", (each) => each.owner || "–"],
  ["study", (each) => link(each.study, "study", each.study)],
  ["class", (each) => each.compute_class],
];

function placeParts(found, go) {
  if (found.trouble) {
    return [element("p", `${found.folder}: ${found.trouble}`)];
  }
  const title = found.folder ? `Workers of ${found.folder}` : `Fleet on ${found.fleet.broker}`;
  const overview = element("div", "", { class: "beside" });
  if (found.uses.length) {
    overview.append(table("In use now", [
      ...who,
      ["slots", (each) => String(each.slots), "number"],
      ["money an hour", (each) => money(each.money), "number"],
    ], found.uses));
  }
  overview.append(table("Classes", [
    ["class", ([name]) => name],
    ["workers", ([, each]) => String(each.workers), "number"],
    ["slots", ([, each]) => `${each.busy} of ${each.slots} busy`, "number"],
    ["wanted", ([, each]) => String(each.wanted ?? "–"), "number"],
    ["waiting", ([, each]) => (each.queue === null ? "no queue" : String(each.queue)), "number"],
    ["draining", ([, each]) => String(each.draining), "number"],
    ["quarantined", ([, each]) => String(each.quarantined), "number"],
  ], Object.entries(found.classes)));
  const columns = [
    ["worker", nameOf, "named"],
    ["slots", cells, "slots"],
    ["machine", machine, "machine"],
    ["price of a slot", (each) => (each.price === null ? "–" : money(each.price)), "number"],
    ["action", (each) => workerActions(each.actions)[0]],
  ];
  return [element("h2", title), overview, table(counted(found.count, "worker"), columns, found.workers), pagesOf(found, go)];
}

// A worker's name, its state, and whether it is silent.
function nameOf({ name, state, busy, slots, age }) {
  const made = element("div", name);
  const line = element("p", `${busy} of ${slots} busy`, { class: "soft" });
  line.append(", ", element("span", state, { class: `state ${state}` }));
  if (age === null || age > SILENT) {
    line.append(element("span", `, silent${age === null ? "" : ` for ${seconds(age)}`}`, { class: "trouble" }));
  }
  made.append(line);
  return made;
}

// The slots of a worker: a cell for each trial, as wide as its slots, with a bar up to the part of the expected time
// that has passed; and an empty cell for each idle slot.
function cells({ runs, busy, slots }) {
  const made = element("ul", "", { class: slots > MANY ? "slots many" : "slots" });
  for (const { study, trial, replica, owner, slots: width, seconds: passed, expected } of runs.slice(0, MOST_CELLS)) {
    const cell = element("li");
    const what = link(`${replica === null ? "" : `replica ${replica} of `}trial ${trial} of ${study}`, "study", study, "trial", trial);
    const whose = [owner ?? "", width > 1 ? `${width} slots` : ""].filter(Boolean).join(", ");
    const spent = `${seconds(passed)}${expected ? ` of ${seconds(expected)}` : ""}`;
    cell.style.setProperty("--slots", Math.min(width, MOST_CELLS));
    cell.style.setProperty("--part", `${Math.min(100, (100 * passed) / (expected || Infinity))}%`);
    // A long name is cut.
    what.title = what.textContent;
    cell.append(what, element("span", whose), element("span", spent));
    made.append(cell);
  }
  const idle = Math.max(0, slots - busy);
  made.append(...Array.from({ length: Math.min(idle, MOST_CELLS) }, () => element("li", "", { class: "idle", title: "idle" })));
  const left = Math.max(0, runs.length - MOST_CELLS) + Math.max(0, idle - MOST_CELLS);
  made.append(...(left ? [element("li", `and ${whole(left)} more`)] : []));
  return made;
}

// The GPUs of a worker, and the load and the parts of RAM and of GPUs that all processes of its machine use.
function machine({ gpus, usage }) {
  const kinds = new Map();
  for (const gpu of gpus) {
    const kind = `${gpu.name} (${gib(gpu.memory)})`;
    kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
  }
  const used = Object.values(usage.gpus ?? {});
  const percent = (name, parts) => (parts.length ? `${name} ${parts.map((part) => (part === undefined ? "?" : Math.round(100 * part))).join(", ")} %` : "");
  const parts = [
    [...kinds].map(([kind, count]) => `${count} x ${kind}`).join(", "),
    percent("GPUs busy", used.map((gpu) => gpu.busy)),
    percent("GPU memory", used.map((gpu) => gpu.memory)),
    usage.load === undefined ? "" : `load ${usage.load}`,
    percent("RAM", usage.memory === undefined ? [] : [usage.memory]),
  ].filter(Boolean);
  const made = element("div", parts.length ? "" : "–");
  made.append(...parts.map((part) => element("p", part)));
  return made;
}
