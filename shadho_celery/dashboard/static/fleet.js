// The page of the fleet: what each worker does now, and how many messages wait in the queues.

import { workerActions } from "/static/actions.js";
import { get } from "/static/api.js";
import { gib, link, repeat, seconds, table } from "/static/parts.js";
import { element } from "/pages/marks.js";

const PAUSE = 3000;

export async function showFleet({ main, signal }) {
  const body = element("div");
  main.append(element("h1", "Fleet"), body);
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
}

function placeParts(found) {
  if (found.trouble) {
    return [element("p", `${found.folder}: ${found.trouble}`)];
  }
  const title = found.folder ? `Workers of ${found.folder}` : `Fleet on ${found.fleet.broker}`;
  const made = [element("h2", title)];
  made.push(
    table("Workers", [
      ["worker", (each) => each.name],
      ["host", (each) => each.host],
      ["class", (each) => each.class],
      ["state", (each) => element("span", each.state, { class: `state ${each.state}` })],
      ["GPUs", gpus],
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

function runs(worker) {
  if (!worker.runs.length) {
    return "idle";
  }
  const made = element("span");
  for (const run of worker.runs) {
    made.append(link(`${run.study} trial ${run.trial}`, "study", run.study, "trial", run.trial), ` for ${seconds(run.seconds)} `);
  }
  return made;
}
