// The page of placement: who ran what, the share of the bound, predictions, and what one more worker would bring.

import { get, ofStudy } from "/static/api.js";
import { chartPlace, follow, placeOf } from "/static/parts.js";
import { element } from "/pages/marks.js";

const CHARTS = ["timeline", "throughput", "one_more_worker", "predictions", "waiting"];

export async function showPlacement({ main, place, signal, ready }, name) {
  const facts = await get(ofStudy(name));
  place.replaceChildren(placeOf(name, facts, "placement"));
  const charts = element("div", "", { class: "charts wide" });
  main.append(element("h1", `Placement of ${name}`), charts);
  const onTrial = (trial) => {
    location.hash = `#/study/${encodeURIComponent(name)}/trial/${trial}`;
  };
  const drawn = CHARTS.map((chart) => chartPlace(charts, name, chart, { classes: facts.classes, onTrial, signal }));
  await follow(name, { signal, ready, since: facts.change }, async () => {
    for (const renew of drawn) {
      await renew();
    }
  });
}
