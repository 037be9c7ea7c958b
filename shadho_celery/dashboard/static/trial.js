// The page of a trial: values, attempts, reasons for its placement, reports, machine, failure.

import { cancelAction } from "/static/actions.js";
import { get, ofStudy } from "/static/api.js";
import { followLog } from "/static/log.js";
import { chartPlace, follow, gib, headline, money, number, placeOf, seconds, table, time } from "/static/parts.js";
import { element } from "/pages/marks.js";
import { counted } from "/pages/numbers.js";

export async function showTrial({ main, place, signal, ready }, name, number_) {
  const facts = await get(ofStudy(name));
  place.replaceChildren(placeOf(name, facts, "trial"));
  const body = element("div", "", { class: "trial" });
  const log = element("section");
  const charts = element("div", "", { class: "charts" });
  main.append(element("h1", `Trial ${number_}`), body, log, charts);
  const first = await get(ofStudy(name, `/trial/${number_}`));
  followLog(log, name, number_, signal);
  const options = { classes: facts.classes, signal };
  const drawn = first.attempts.map((each) =>
    chartPlace(charts, name, "why_here", { ...options, query: { number: number_, attempt: each.attempt } }),
  );
  await follow(name, { signal, ready, since: facts.change }, async () => {
    const found = await get(ofStudy(name, `/trial/${number_}`));
    if (signal.aborted) {
      return;
    }
    body.replaceChildren(...parts(found));
    if (found.is_live && facts.running_on) {
      body.prepend(cancelAction(name, Number(number_)));
    }
    for (const renew of drawn) {
      await renew();
    }
  });
}

// The money that an attempt has cost.
function costOf({ price, started_at: since, ended_at: until }) {
  return price === null || since === null || until === null ? "–" : money((price * Math.max(0, until - since)) / 3600);
}

function parts({ trial, attempts, machine, reports }) {
  const top = element("div", "", { class: "facts" });
  top.append(headline("state", trial.state.toLowerCase()));
  if (trial.loss !== null) {
    top.append(headline(`loss, in full ${trial.loss}`, number(trial.loss)));
  }
  top.append(headline("time", seconds(trial.seconds)));
  const made = [top];
  const values = trial.values instanceof Object ? trial.values : trial.params;
  const pairs = (found) => Object.entries(found ?? {});
  const named = [["name", ([label]) => label], ["value", ([, value]) => (typeof value === "string" ? value : JSON.stringify(value))]];
  made.push(table("Values that the objective got", named, pairs(values)));
  const metrics = pairs(trial.metrics);
  if (metrics.length) {
    made.push(table("Metrics", named, metrics));
  }
  made.push(
    table("Attempts", [
      ["attempt", (each) => String(each.attempt), "number"],
      ["class", (each) => each.compute_class],
      ["host", (each) => each.host],
      ["slot", (each) => (each.slot === null ? "–" : String(each.slot)), "number"],
      ["queued", (each) => time(each.queued_at)],
      ["waited", (each) => seconds(difference(each.queued_at, each.started_at)), "number"],
      ["ran", (each) => seconds(difference(each.started_at, each.ended_at)), "number"],
      ...(attempts.some((each) => each.price !== null) ? [["money", costOf, "number"]] : []),
      ["end", (each) => `${each.end ?? "running"}${each.copy ? ", copy" : ""}`],
    ], attempts),
  );
  // A simulated machine has no cores.
  if (machine?.cores) {
    const gpus = machine.gpus.map((gpu) => `${gpu.name} (${gib(gpu.memory)})`).join(", ") || "no GPU";
    made.push(element("p", `${machine.host}: ${gpus}, ${counted(machine.cores, "core")}, ${gib(machine.memory)} RAM`));
  }
  if (reports.length) {
    const latest = reports[reports.length - 1];
    made.push(element("p", `${counted(reports.length, "report")}; the latest at step ${latest.step}: ${number(latest.loss)}`));
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
