// Draws the figures of a page from the data that the page itself contains.

import { showChart, showOneOf } from "./figure.js";
import { element } from "./marks.js";

const { classes, figures } = JSON.parse(document.querySelector("[type='application/json']").textContent);
const WIDE = ["timeline", "parallel"];
const place = document.getElementById("figures");
let section = null;
let named = null;

for (const { section: name, choice, charts } of figures) {
  if (name !== named) {
    section = element("section", "", { class: "figures" });
    named = name;
    if (name) {
      section.append(element("h2", name));
    }
    place.append(section);
  }
  const isMany = charts[0][1].name === "slice";
  const host = element(isMany ? "div" : "figure", "", { class: isMany ? "multiples wide" : WIDE.includes(charts[0][1].name) ? "wide" : "" });
  section.append(host);
  if (isMany) {
    for (const [, chart] of charts.filter(([, each]) => !each.empty)) {
      host.append(element("figure"));
      showChart(host.lastChild, chart, classes);
    }
  } else if (charts.length > 1) {
    showOneOf(host, choice, charts, classes);
  } else {
    showChart(host, charts[0][1], classes);
  }
}
