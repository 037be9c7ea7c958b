// The table of trials. The server filters, sorts and searches them, and returns one page.

import { get, ofStudy } from "/static/api.js";
import { follow, link, number, seconds, table, time } from "/static/parts.js";
import { element } from "/pages/marks.js";
import { counted } from "/pages/numbers.js";

const STATES = ["", "COMPLETE", "PRUNED", "FAILED", "RUNNING", "QUEUED", "WAITING", "CANCELLED"];
// Width of the window in pixels below which rows are shown as cards, and a page has fewer rows.
const NARROW = 640;
// Milliseconds after the last key press after which the search begins.
const TYPED = 300;
const SORTS = { "-number": "newest first", number: "oldest first", loss: "best first", "-seconds": "longest first", seconds: "shortest first" };

export async function showTrials(page, name, query) {
  const { main, signal } = page;
  const asked = Object.fromEntries(new URLSearchParams(query));
  const facts = await get(ofStudy(name));
  const address = (changed) => {
    const next = new URLSearchParams({ ...asked, page: 0, ...changed });
    for (const [key, value] of [...next]) {
      if (value === "" || (key === "page" && value === "0")) {
        next.delete(key);
      }
    }
    return `#/study/${encodeURIComponent(name)}/trials${next.size ? `?${next}` : ""}`;
  };
  const go = (changed) => {
    location.hash = address(changed);
  };
  const form = element("form", "", { class: "filters", role: "search" });
  form.append(
    chooser("State", "state", STATES.map((state) => [state, state ? state.toLowerCase() : "all"]), asked, go),
    chooser("Class", "class", ["", ...facts.ran_on].map((each) => [each, each || "all"]), asked, go),
    chooser("Order", "sort", Object.entries(SORTS), { sort: "-number", ...asked }, go),
    search(asked, async (text) => {
      // Do not open the page anew, so that the field keeps the focus during typing.
      history.replaceState(null, "", address({ search: text }));
      Object.assign(asked, { search: text, page: 0 });
      await show();
    }, signal),
  );
  // By default, Enter would submit the form and load another page.
  form.addEventListener("submit", (event) => event.preventDefault());
  const body = element("div");
  main.append(element("h1", `Trials of ${name}`), form, body);
  const show = async () => {
    const text = asked.search;
    const found = await get(ofStudy(name, "/trials"), { size: innerWidth < NARROW ? 15 : 50, ...asked });
    // Ignore a late answer to an earlier search text.
    if (!signal.aborted && text === asked.search) {
      body.replaceChildren(...rows(name, found, go, ["state", "class", "search"].some((key) => asked[key])));
    }
  };
  await follow(name, "trials", page, facts, show);
}

function rows(name, found, go, isFiltered) {
  if (!found.count) {
    return [element("p", isFiltered ? "No trial fits." : "Trials will be here as soon as they are chosen.")];
  }
  const columns = [
    ["trial", (trial) => link(String(trial.number), "study", name, "trial", trial.number), "number"],
    ["state", (trial) => element("span", trial.state.toLowerCase(), { class: `state ${trial.state}` })],
    ["loss", (trial) => number(trial.loss), "number"],
    ["time", (trial) => seconds(trial.seconds), "number"],
    ["class", (trial) => trial.compute_class],
    ["host", (trial) => trial.host],
    ["values", (trial) => trial.text],
    ["ended", (trial) => time(trial.finished_at)],
  ];
  const last = Math.max(0, Math.ceil(found.count / found.size) - 1);
  const pages = element("nav", "", { class: "pages", "aria-label": "Pages of the table" });
  const button = (text, page, isOff) => {
    const made = element("button", text, { type: "button" });
    made.disabled = isOff;
    made.addEventListener("click", () => go({ page }));
    return made;
  };
  pages.append(
    button("Previous", found.page - 1, found.page === 0),
    element("span", `${found.page + 1} of ${last + 1}`),
    button("Next", found.page + 1, found.page >= last),
  );
  return [table(counted(found.count, "trial"), columns, found.trials), pages];
}

function chooser(label, key, options, asked, go) {
  const made = element("label", label);
  const choose = element("select");
  for (const [value, text] of options) {
    choose.append(element("option", text, { value }));
  }
  choose.value = asked[key] ?? "";
  choose.addEventListener("change", () => go({ [key]: choose.value }));
  made.append(choose);
  return made;
}

function search(asked, show, signal) {
  const made = element("label", "Search");
  const field = element("input", "", { type: "search", placeholder: "number, host, subspace, failure", maxlength: "200" });
  let waiting;
  field.value = asked.search ?? "";
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => !signal.aborted && show(field.value), TYPED);
  });
  made.append(field);
  return made;
}
