// The page of a study: its progress, which params matter, and what failed; and the page of its placement: which class
// ran what, throughput and its bound, predictions, gain of one more worker.

import { get, ofStudy } from "/static/api.js";
import { askForChart, chartPlace, follow, headline, inTurn, link, money, notesOf, number } from "/static/parts.js";
import { chooser, element } from "/pages/marks.js";
import { counted, whole } from "/pages/numbers.js";

// Maximum number of params with a chart of their own.
const SLICES = 12;
// What one can do with parallel coordinates.
const HINT = "Drag on an axis to choose trials; click a name to move its axis.";

export async function showStudy(page, name) {
  const { main, signal } = page;
  const top = element("div", "", { class: "facts", role: "region", "aria-label": "State of the study" });
  const charts = element("div", "", { class: "charts" });
  // The name is already visible in the line at the top.
  const notes = element("div");
  main.append(element("h1", name, { class: "unseen" }), top, notes, charts);
  askForChart(name, "history");
  const facts = await get(ofStudy(name));
  const options = optionsOf(name, facts, signal);
  const over = chooser("over", [["trials", "trials"], ["seconds", "seconds"]], "trials", async (along, choose) => {
    await history({ along });
    choose.focus();
  });
  const history = chartPlace(charts, name, "history", { ...options, controls: [over] });
  const places = (...names) => names.map((chart) => chartPlace(charts, name, chart, options));
  const drawn = places("timeline");
  const importance = chartPlace(charts, name, "importance", options);
  const [contour, ...others] = places("contour", "front", "hypervolume", "failures", "failures_by_label", "curves", "rungs");
  let rated = null;
  drawn.push(async () => (rated = await importance()), ...others, ...paramPlaces(charts, name, facts.labels, () => rated, options));
  // Its model takes the longest.
  drawn.push(contour);
  const head = async (now) => {
    if (!signal.aborted) {
      top.replaceChildren(...headlines(name, now));
      notes.replaceChildren(...notesOf(name, now));
      await history();
    }
  };
  await follow(name, "study", page, facts, head, inTurn(drawn));
}

export async function showPlacement(page, name) {
  const facts = await get(ofStudy(name));
  const charts = element("div", "", { class: "charts" });
  page.main.append(element("h1", `Placement of ${name}`), charts);
  const options = optionsOf(name, facts, page.signal);
  await follow(name, "placement", page, facts, inTurn(facts.of_machines.map((chart) => chartPlace(charts, name, chart, options))));
}

// The options of charts whose marks open their trials.
function optionsOf(name, { classes }, signal) {
  const onTrial = (trial) => (location.hash = `#/study/${encodeURIComponent(name)}/trial/${trial}`);
  return { classes, onTrial, signal };
}

function headlines(name, facts) {
  const best = facts.best;
  const loss = Object.keys(facts.objectives)[0] ?? "loss";
  const found = [];
  if (best) {
    const first = headline(`best ${loss}`, number(best.loss));
    const params = element("p", best.text, { class: "params" });
    params.append(" ", link(`trial ${best.number}`, "study", name, "trial", best.number));
    first.append(params);
    found.push(first);
  } else {
    found.push(headline("no trial has completed yet", "–"));
  }
  const asked = facts.asked ? `of ${counted(facts.asked, "trial")}` : facts.ended === 1 ? "trial" : "trials";
  found.push(headline(asked, whole(facts.ended)));
  const running = facts.running_on ? "running" : "did not end";
  for (const [state, words] of [["RUNNING", running], ["PRUNED", "pruned"], ["FAILED", "failed"]]) {
    if (facts.counts[state]) {
      found.push(headline(words, whole(facts.counts[state])));
    }
  }
  if (facts.running_on && facts.a_minute) {
    found.push(headline("trials ended a minute", number(facts.a_minute)));
  }
  if (facts.money) {
    found.push(headline("of money", money(facts.money)));
  }
  return found;
}

// Parallel coordinates, and the loss over each of the params that matter most. A range that is chosen on an
// axis filters the table of trials.
function paramPlaces(parent, name, labels, rated, options) {
  const keys = new Map(labels.map(({ key, text }) => [text, key]));
  const within = element("span", HINT);
  const onRanges = (ranges) => {
    const chosen = Object.entries(ranges).filter(([, ends]) => ends);
    const asked = chosen.map(([text, ends]) => [keys.get(text) ?? "loss", ...ends.map((end) => Number(end.toPrecision(6)))]);
    const query = new URLSearchParams({ within: asked.map((each) => each.join(":")).join(",") });
    const href = `#/study/${encodeURIComponent(name)}/trials?${query}`;
    within.replaceChildren(chosen.length ? element("a", "Show the chosen trials in the table", { href }) : HINT);
  };
  const parallel = chartPlace(parent, name, "parallel", { ...options, controls: [within], onRanges });
  const frame = element("div", "", { class: "wide" });
  const grid = element("div", "", { class: "multiples" });
  frame.append(grid);
  parent.append(frame);
  let drawn = null;
  const slices = async () => {
    // The categories of this chart are the labels, the most important first.
    const order = [...(rated()?.axes[1].categories ?? []), ...keys.keys()].filter((text) => keys.has(text));
    drawn ??= [...new Set(order)].slice(0, SLICES).map((text) => chartPlace(grid, name, "slice", { ...options, query: { label: keys.get(text) } }));
    await inTurn(drawn)();
    frame.hidden = [...grid.children].every((each) => each.hidden);
  };
  return [parallel, slices];
}
