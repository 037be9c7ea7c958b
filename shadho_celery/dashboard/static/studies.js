// The list of studies, and the comparison of several.

import { get } from "/static/api.js";
import { library, link, number, repeat, table, time } from "/static/parts.js";
import { showChart } from "/pages/figure.js";
import { element } from "/pages/marks.js";
import { counted, whole } from "/pages/numbers.js";

// Milliseconds between two checks for changes.
const PAUSE = 1000;

export async function showStudies({ main, signal }) {
  const body = element("div");
  const columns = columnsOf();
  const whose = element("select", "", { "aria-label": "Owner of the studies" });
  let found, shown = "";
  const draw = () => {
    const focused = document.activeElement;
    body.replaceChildren(...partsOf(found, columns, whose));
    if (!body.isConnected) {
      main.append(element("h1", "Studies"), body);
    }
    if (body.contains(focused)) {
      focused.focus();
    }
  };
  whose.addEventListener("change", draw);
  await repeat(async () => {
    found = await get("/api/studies");
    const text = JSON.stringify(found);
    if (!signal.aborted && text !== shown) {
      shown = text;
      draw();
    }
  }, PAUSE, signal);
}

// The choice of an owner, if there are several.
function ownersOf(studies, whose) {
  const owners = [...new Set(studies.map((study) => study.owner ?? ""))].sort();
  const chosen = whose.length && owners.includes(whose.value) ? whose.value : "*";
  const option = (value, text) => element("option", text, { value });
  whose.replaceChildren(option("*", "all owners"), ...owners.map((owner) => option(owner, owner || "unknown")));
  whose.value = chosen;
  return owners.length > 1 ? [whose] : [];
}

function partsOf(found, { columns, compare }, whose) {
  const made = [element("p", found.store, { class: "soft" })];
  if (!found.studies.length) {
    const start = element("p", "The studies of this store will be here. There is none yet; this command starts one: ");
    start.append(element("code", found.first));
    return [...made, start];
  }
  made.push(...ownersOf(found.studies, whose));
  const studies = found.studies.filter((study) => ["*", study.owner ?? ""].includes(whose.value));
  made.push(table("Studies of this store, the latest first", columns, studies), compare);
  if (found.left_out) {
    made.push(element("p", `${counted(found.left_out, "earlier study is", "earlier studies are")} left out.`, { class: "soft" }));
  }
  return made;
}

// The columns of the list, and the button that compares the chosen studies.
function columnsOf() {
  const chosen = new Set();
  const compare = element("button", "Compare", { type: "button", disabled: "" });
  compare.addEventListener("click", () => {
    location.hash = `#/compare/${[...chosen].map(encodeURIComponent).join("/")}`;
  });
  const box = (study) => {
    const made = element("input", "", { type: "checkbox", "aria-label": `Compare ${study.name}` });
    made.addEventListener("change", () => {
      chosen[made.checked ? "add" : "delete"](study.name);
      compare.disabled = chosen.size < 2;
    });
    return made;
  };
  // Reuse check boxes and links when the list is drawn again, so that they keep their state and the focus.
  const kept = new Map();
  const keep = (name, make) => (study) => {
    const key = `${name} ${study.name}`;
    if (!kept.has(key)) {
      kept.set(key, make(study));
    }
    return kept.get(key);
  };
  const count = (study, ...states) => states.reduce((sum, state) => sum + (study.counts[state] ?? 0), 0);
  const columns = [
    ["compare", keep("compare", box)],
    ["study", keep("study", (study) => link(study.name, "study", study.name))],
    ["owner", (study) => study.owner ?? "–"],
    ["state", (study) => (study.running_on ? `${study.state} on ${study.running_on}` : study.state)],
    ["trials", (study) => trialsText(study, count(study, "COMPLETE", "PRUNED", "FAILED")), "number"],
    ["failed", (study) => whole(count(study, "FAILED")), "number"],
    ["best", (study) => (study.best === null ? "–" : `${study.loss} ${number(study.best)}`), "number"],
    ["begun", (study) => time(study.created_at)],
  ];
  return { columns, compare };
}

function trialsText(study, ended) {
  return study.asked ? `${whole(ended)} of ${whole(study.asked)}` : whole(ended);
}

export async function showCompare({ main, signal }, names) {
  const charts = await get("/api/compare", { names });
  if (signal.aborted) {
    return;
  }
  const links = element("p");
  for (const name of names.split("/")) {
    links.append(link(name, "study", name), " ");
  }
  // There is one chart for studies that minimise and one for studies that maximise.
  const boxes = charts.map(() => element("section"));
  main.append(element("h1", "Comparison of studies"), links, ...boxes);
  await library;
  const drawn = charts.map((chart, place) => showChart(boxes[place], chart, []));
  signal.addEventListener("abort", () => drawn.forEach((each) => each.dispose()));
}
