// The page of a study: its progress, which params matter, and what failed.

import { get, ofStudy } from "/static/api.js";
import { askForChart, chartPlace, follow, headline, link, money, notesPlace, number } from "/static/parts.js";
import { element } from "/pages/marks.js";
import { counted, whole } from "/pages/numbers.js";

export async function showStudy(page, name) {
  const { main, signal } = page;
  const top = element("div", "", { class: "facts", role: "region", "aria-label": "State of the study" });
  const charts = element("div", "", { class: "charts" });
  // The name is already visible in the line at the top.
  main.append(element("h1", name, { class: "unseen" }), top);
  const showNotes = notesPlace(main, name);
  main.append(charts);
  askForChart(name, "history");
  const facts = await get(ofStudy(name));
  const onTrial = (trial) => {
    location.hash = `#/study/${encodeURIComponent(name)}/trial/${trial}`;
  };
  const options = { classes: facts.classes, onTrial, signal };
  const history = chartPlace(charts, name, "history", options);
  const drawn = [chartPlace(charts, name, "timeline", options)];
  const names = ["parallel", "importance"];
  if (facts.labels.length) {
    names.push("slice");
  }
  names.push("failures", "failures_by_label", ...(facts.has_samplers ? ["samplers"] : []), "curves");
  if (facts.has_budgets) {
    names.push("rungs");
  }
  if (Object.keys(facts.objectives).length > 1) {
    names.push("front", "hypervolume");
  }
  for (const chart of names) {
    if (chart === "slice") {
      drawn.push(slices(charts, name, facts.labels, options));
    } else {
      drawn.push(chartPlace(charts, name, chart, options));
    }
  }
  const head = async (now) => {
    if (!signal.aborted) {
      top.replaceChildren(...headlines(name, now));
      showNotes(now);
      await history();
    }
  };
  const rest = async () => {
    for (const renew of drawn) {
      await renew();
    }
  };
  await follow(name, "study", page, facts, head, rest);
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
  if (facts.owner) {
    found.push(headline("owner", facts.owner));
  }
  return found;
}

function slices(parent, name, labels, options) {
  const labelled = element("label", "param ", { class: "choice" });
  const choose = element("select");
  for (const { key, text } of labels) {
    choose.append(element("option", text, { value: key }));
  }
  labelled.append(choose);
  const renew = chartPlace(parent, name, "slice", { ...options, query: { label: labels[0].key }, controls: [labelled] });
  choose.addEventListener("change", async () => {
    await renew({ label: choose.value });
    choose.focus();
  });
  return renew;
}
