// The numbers behind a chart, in a table that is made when it is opened.

import { element, facts } from "./marks.js";
import { counted } from "./numbers.js";

const ROWS = 100;

export function tableOf(chart) {
  const details = element("details", "", { class: "numbers" });
  const count = chart.series.reduce((sum, series) => sum + lengthOf(series), 0);
  details.append(element("summary", `Table of ${counted(count, "mark")}`));
  details.addEventListener("toggle", () => details.open && !details.querySelector("table") && fill(details, chart));
  return details;
}

export const lengthOf = (series) => Object.values(series.columns)[0]?.length ?? 0;

function fill(details, chart) {
  const places = chart.series.flatMap((series) => Array.from({ length: lengthOf(series) }, (_, i) => [series, i]));
  // Several rows of each series are read, because a mark may lack a value in some columns.
  const first = places.filter(([, place]) => place < ROWS);
  const names = [...new Set(first.flatMap(([series, place]) => facts(chart, series, place).map(([name]) => name)))];
  const body = element("tbody");
  const head = element("tr");
  head.append(...["series", ...names].map((name) => element("th", name, { scope: "col" })));
  const table = element("table");
  table.append(element("caption", chart.title), element("thead"), body);
  table.tHead.append(head);
  const frame = element("div", "", { class: "frame", tabindex: "0", role: "region", "aria-label": chart.title });
  frame.append(table);
  const more = element("button", "", { type: "button" });
  const add = () => {
    const from = body.rows.length;
    for (const [series, place] of places.slice(from, from + ROWS)) {
      const texts = new Map(facts(chart, series, place));
      const row = element("tr");
      row.append(element("th", series.name, { scope: "row" }), ...names.map((name) => element("td", texts.get(name))));
      body.append(row);
    }
    const left = places.length - body.rows.length;
    more.textContent = `Show ${Math.min(ROWS, left)} more of ${left.toLocaleString("en-US")}`;
    more.hidden = !left;
  };
  more.addEventListener("click", add);
  add();
  details.append(frame, more);
}
