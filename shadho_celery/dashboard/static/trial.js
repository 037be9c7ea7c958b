// The page of a trial: values, attempts, reasons for its placement, reports, machine, failure.

import { studyActions } from "/static/actions.js";
import { get, ofStudy } from "/static/api.js";
import { followLog } from "/static/log.js";
import { chartPlace, follow, gib, headline, inTurn, money, notesOf, number, seconds, table, time } from "/static/parts.js";
import { cut, element } from "/pages/marks.js";
import { counted } from "/pages/numbers.js";

// Milliseconds of a second.
const SECOND = 1000;
// Maximum number of characters of a label, as in charts.
const LABEL = 300;

export async function showTrial(page, name, number_) {
  const { main, signal } = page;
  const facts = await get(ofStudy(name));
  const body = element("div", "", { class: "trial" });
  const log = element("section");
  const charts = element("div", "", { class: "charts" });
  main.append(element("h1", `Trial ${number_}`), body, log, charts);
  const options = { classes: facts.classes, signal };
  const drawn = [chartPlace(charts, name, "learning_curve", { ...options, query: { number: number_ } })];
  let ticking = null;
  let shown = "";
  signal.addEventListener("abort", () => clearInterval(ticking));
  await follow(name, "trial", page, facts, async ({ running_on: runningOn }) => {
    const found = await get(ofStudy(name, `/trial/${number_}`));
    if (signal.aborted) {
      return;
    }
    if (!log.childElementCount) {
      followLog(log, name, number_, signal);
    }
    const text = JSON.stringify([{ ...found, now: 0 }, runningOn]);
    // Do not replace unchanged parts, so that buttons keep the keyboard focus.
    if (text !== shown) {
      shown = text;
      clearInterval(ticking);
      const elapsed = runningOn && elapsedOf(found);
      const spent = headline(elapsed ? "time so far" : "time", seconds(elapsed ? elapsed() : found.trial.seconds));
      if (elapsed) {
        ticking = setInterval(() => (spent.firstChild.textContent = seconds(elapsed())), SECOND);
      }
      body.replaceChildren(...parts(found, spent), ...notesOf(name, found));
      body.firstChild.append(...studyActions(name, [...(found.is_live && runningOn ? found.actions : []), ...found.note]));
    }
    for (const { attempt } of found.attempts.slice(drawn.length - 1)) {
      drawn.push(chartPlace(charts, name, "why_here", { ...options, query: { number: number_, attempt } }));
    }
    await inTurn(drawn)();
  });
}

// Return a function that returns the seconds since the latest attempt of a running trial began, or null.
function elapsedOf({ trial, attempts, now }) {
  const since = attempts.at(-1)?.started_at;
  if (trial.state !== "RUNNING" || since === null || since === undefined) {
    return null;
  }
  const known = performance.now();
  return () => Math.round(Math.max(0, now - since + (performance.now() - known) / SECOND));
}

// The money that an attempt has cost.
function costOf({ price, started_at: since, ended_at: until }) {
  return price === null || since === null || until === null ? "–" : money((price * Math.max(0, until - since)) / 3600);
}

function parts({ trial, attempts, machine, commands }, spent) {
  const top = element("div", "", { class: "facts" });
  top.append(headline("state", trial.state.toLowerCase()));
  if (trial.loss !== null) {
    top.append(headline(`loss, in full ${trial.loss}`, number(trial.loss)));
  }
  top.append(spent);
  const made = [top];
  const values = trial.values instanceof Object ? trial.values : trial.params;
  const pairs = (found) => Object.entries(found ?? {});
  const named = [["name", ([label]) => cut(label, LABEL)], ["value", ([, value]) => (typeof value === "string" ? value : JSON.stringify(value))]];
  made.push(table("Values that the objective got", named, pairs(values)));
  const metrics = pairs(trial.metrics);
  if (metrics.length) {
    made.push(table("Metrics", named, metrics));
  }
  if (attempts.length) {
    made.push(table("Attempts", [
      ["attempt", (each) => String(each.attempt), "number"],
      ["class", (each) => each.compute_class],
      ["host", (each) => each.host],
      ["slot", (each) => (each.slot === null ? "–" : String(each.slot)), "number"],
      ["queued", (each) => time(each.queued_at)],
      ["waited", (each) => seconds(difference(each.queued_at, each.started_at)), "number"],
      ["ran", (each) => seconds(difference(each.started_at, each.ended_at)), "number"],
      ...(attempts.some((each) => each.price !== null) ? [["money", costOf, "number"]] : []),
      ["end", (each) => `${each.end ?? "running"}${each.copy ? ", copy" : ""}`],
    ], attempts));
  }
  // A simulated machine has no cores.
  if (machine?.cores) {
    const gpus = machine.gpus.map((gpu) => `${gpu.name} (${gib(gpu.memory)})`).join(", ") || "no GPU";
    made.push(element("p", `${machine.host}: ${gpus}, ${counted(machine.cores, "core")}, ${gib(machine.memory)} RAM`));
  }
  for (const [purpose, command] of Object.entries(commands)) {
    made.push(element("p", `${purpose}: `));
    made.at(-1).append(element("code", command));
  }
  const isCancelled = trial.state === "CANCELLED";
  const reason = isCancelled && trial.error === "cancelled" ? null : trial.error;
  for (const [title, text] of [[isCancelled ? "Cancelled" : "Failure", reason], ["Warning", trial.warning]]) {
    if (text) {
      made.push(element("h2", title), element("pre", text, { tabindex: "0" }));
    }
  }
  return made;
}

const difference = (from, to) => (from === null || to === null ? null : Math.max(0, to - from));
