// The page of the fleet: what each worker does now, and how many messages wait in the queues.

import { workerActions } from "/static/actions.js";
import { get } from "/static/api.js";
import { gib, link, money, number, repeat, seconds, table } from "/static/parts.js";
import { element } from "/pages/marks.js";

const PAUSE = 3000;
const LONG_PAUSE = 60000;

export async function showFleet({ main, signal }) {
  const body = element("div");
  const week = element("div");
  main.append(element("h1", "Fleet"), body, week);
  const renew = async () => {
    const found = await get("/api/fleet");
    if (!signal.aborted) {
      body.replaceChildren(...(found.trouble ? [element("p", found.trouble)] : found.places.flatMap(placeParts)));
      if (!body.childElementCount) {
        body.append(element("p", "Workers will be here. Start one: shadho-celery worker --import my_study, or a study: shadho-celery run tasks.svm"));
      }
    }
  };
  await repeat(renew, PAUSE, signal);
  await repeat(async () => week.replaceChildren(...weekParts(await get("/api/week"))), LONG_PAUSE, signal);
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

function placeParts(found) {
  if (found.trouble) {
    return [element("p", `${found.folder}: ${found.trouble}`)];
  }
  const title = found.folder ? `Workers of ${found.folder}` : `Fleet on ${found.fleet.broker}`;
  const made = [element("h2", title)];
  if (found.uses.length) {
    made.push(table("In use now", [
      ...who,
      ["slots", (each) => String(each.slots), "number"],
      ["money an hour", (each) => money(each.money), "number"],
    ], found.uses));
  }
  made.push(
    table("Workers", [
      ["worker", (each) => each.name],
      ["host", (each) => each.host],
      ["class", (each) => each.class],
      ["state", (each) => element("span", each.state, { class: `state ${each.state}` })],
      ["GPUs", gpus],
      ["machine", usage],
      ["price of a slot", (each) => (each.price === null ? "–" : money(each.price)), "number"],
      ["slots", (each) => `${each.busy} of ${each.slots} busy`, "number"],
      ["does now", runs],
      ["action", (each) => workerActions(each.actions)[0]],
    ], found.workers),
    table("Classes", [
      ["class", ([name]) => name],
      ["workers", ([, each]) => String(each.workers), "number"],
      ["slots", ([, each]) => `${each.busy} of ${each.slots} busy`, "number"],
      ["waiting", ([, each]) => (each.queue === null ? "no queue" : String(each.queue)), "number"],
      ["draining", ([, each]) => String(each.draining), "number"],
      ["quarantined", ([, each]) => String(each.quarantined), "number"],
    ], Object.entries(found.classes)),
  );
  return made;
}

function gpus(worker) {
  const kinds = new Map();
  for (const gpu of worker.gpus) {
    const kind = `${gpu.name} (${gib(gpu.memory)})`;
    kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
  }
  return [...kinds].map(([kind, count]) => `${count} x ${kind}`).join(", ");
}

// The load, and the parts of RAM and of the GPUs' time that all processes of the machine use.
function usage({ usage: { load, memory, gpus } }) {
  const percent = (part) => (part === undefined ? "?" : `${Math.round(100 * part)} %`);
  const busy = Object.values(gpus ?? {}).map((gpu) => `${percent(gpu.busy)} (memory ${percent(gpu.memory)})`);
  const parts = [load === undefined ? "" : `load ${load}`, memory === undefined ? "" : `RAM ${percent(memory)}`];
  return [...parts, busy.length ? `GPUs ${busy.join(", ")}` : ""].filter(Boolean).join(", ") || "–";
}

function runs(worker) {
  if (!worker.runs.length) {
    return "idle";
  }
  const made = element("span");
  for (const run of worker.runs) {
    made.append(made.hasChildNodes() ? ", " : "", link(`${run.study} trial ${run.trial}`, "study", run.study, "trial", run.trial), ` for ${seconds(run.seconds)}`);
  }
  return made;
}
