// The page of placement: which class ran what, throughput and its bound, predictions, gain of one more worker.

import { get, ofStudy } from "/static/api.js";
import { chartPlace, follow } from "/static/parts.js";
import { element } from "/pages/marks.js";

export async function showPlacement(page, name) {
  const { main, signal } = page;
  const facts = await get(ofStudy(name));
  const charts = element("div", "", { class: "charts wide" });
  main.append(element("h1", `Placement of ${name}`), charts);
  const onTrial = (trial) => {
    location.hash = `#/study/${encodeURIComponent(name)}/trial/${trial}`;
  };
  const options = { classes: facts.classes, onTrial, signal };
  const drawn = facts.of_machines.map((chart) => chartPlace(charts, name, chart, options));
  await follow(name, "placement", page, facts, async () => {
    for (const renew of drawn) {
      await renew();
    }
  });
}
