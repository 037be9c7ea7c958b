// A figure: a chart with its title, legend, note and table, drawn again when its width or the colours change.

import { optionOf } from "./draw.js";
import { element, inWords } from "./marks.js";
import { lengthOf, tableOf } from "./table.js";
import { themeOf } from "./theme.js";
import { Timeline } from "./timeline.js";

const NARROW = 480;
const ROW = 26;
const PLOT = 320;
const SVG = "http://www.w3.org/2000/svg";
let figures = 0;

// Fill `host` with a chart. A mark that is clicked, or chosen with arrow keys and Enter, sends the event "trial" with
// the trial's number in `detail.number`. `controls` are elements below the title. Return an object with `dispose`, to be
// called before `host` is used again.
export function showChart(host, chart, classes, controls = []) {
  figures += 1;
  const id = `chart-${figures}`;
  host.classList.add("chart");
  const title = element("h3", chart.title, { id });
  if (chart.empty) {
    host.replaceChildren(title, ...controls, element("p", chart.empty, { class: "empty" }));
    return { dispose: () => {} };
  }
  const plot = element("div", "", { class: "plot", tabindex: "0", role: "application", "aria-labelledby": id });
  const live = element("p", "", { class: "unseen", "aria-live": "polite" });
  const legend = element("ul", "", { class: "legend" });
  const note = chart.note ? [element("p", chart.note, { class: "note" })] : [];
  host.replaceChildren(title, ...controls, legend, plot, live, ...note, tableOf(chart));
  const open = (number) => host.dispatchEvent(new CustomEvent("trial", { bubbles: true, detail: { number } }));
  const say = (text) => (live.textContent = text);
  const drawn = chart.name === "timeline" ? onCanvas(plot, chart, { open, say }) : byECharts(plot, chart, { open, say });
  const ending = new AbortController();
  const paint = () => {
    const theme = themeOf(host, classes);
    legend.replaceChildren(...entries(chart, theme));
    drawn.paint(theme);
  };
  paint();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", paint, { signal: ending.signal });
  let width = plot.clientWidth;
  const resized = new ResizeObserver(() => {
    if (plot.clientWidth !== width) {
      width = plot.clientWidth;
      drawn.resize();
      paint();
    }
  });
  resized.observe(plot);
  return {
    dispose: () => {
      ending.abort();
      resized.disconnect();
      drawn.dispose();
    },
  };
}

function onCanvas(plot, chart, { open, say }) {
  plot.style.height = `${Timeline.heightOf(chart)}px`;
  let made = null;
  return {
    paint: (theme) => (made ? made.use(theme) : (made = new Timeline(plot, chart, theme, { open, say }))),
    resize: () => made.resize(),
    dispose: () => made.dispose(),
  };
}

function byECharts(plot, chart, { open, say }) {
  plot.style.height = `${heightOf(chart, plot.clientWidth)}px`;
  const drawn = globalThis.echarts.init(plot);
  const openMark = (series, place) => {
    const number = chart.series[series].columns.number?.[place];
    if (number !== undefined && number !== null) {
      open(number);
    }
  };
  drawn.on("click", (mark) => openMark(mark.seriesIndex, mark.dataIndex));
  const marks = reached(chart);
  let at = -1;
  const go = (place) => {
    if (at >= 0) {
      drawn.dispatchAction({ type: "downplay", seriesIndex: marks[at][0], dataIndex: marks[at][1] });
    }
    at = Math.min(marks.length - 1, Math.max(0, place));
    const [seriesIndex, dataIndex] = marks[at];
    drawn.dispatchAction({ type: "highlight", seriesIndex, dataIndex });
    drawn.dispatchAction({ type: "showTip", seriesIndex, dataIndex });
    say(inWords(chart, chart.series[seriesIndex], dataIndex));
  };
  const acts = {
    ArrowRight: () => go(at + 1),
    ArrowDown: () => go(at + 1),
    ArrowLeft: () => go(at - 1),
    ArrowUp: () => go(at - 1),
    Home: () => go(0),
    End: () => go(marks.length - 1),
    Enter: () => at >= 0 && openMark(...marks[at]),
    Escape: () => drawn.dispatchAction({ type: "hideTip" }),
  };
  const press = (event) => {
    if (event.key in acts && marks.length) {
      event.preventDefault();
      acts[event.key]();
    }
  };
  plot.addEventListener("keydown", press);
  return {
    paint: (theme) => drawn.setOption(optionOf(chart, theme, plot.clientWidth), true),
    resize: () => {
      plot.style.height = `${heightOf(chart, plot.clientWidth)}px`;
      drawn.resize();
    },
    dispose: () => {
      plot.removeEventListener("keydown", press);
      drawn.dispose();
    },
  };
}

function heightOf(chart, width) {
  const [, y] = chart.axes;
  const isParallel = chart.series.some((series) => series.mark === "polylines");
  if (isParallel && width < NARROW) {
    return Math.max(PLOT, 56 * chart.axes.length);
  }
  const bars = chart.series.filter((series) => series.mark === "bars").length || 1;
  return y?.scale === "category" && !isParallel ? 96 + y.categories.length * (ROW + 10 * (bars - 1)) : PLOT;
}

// Marks in the order in which the arrow keys go through them: by y if that axis has categories, else by x.
function reached(chart) {
  const along = chart.axes[1]?.scale === "category" ? "y" : "x";
  const found = [];
  chart.series.forEach((series, index) => {
    for (let place = 0; place < lengthOf(series); place += 1) {
      found.push([index, place, series.columns[along]?.[place] ?? 0]);
    }
  });
  return found.sort((a, b) => a[2] - b[2]);
}

// Entries of the legend: one for each class, one for each form of marks that the classes share, and one for each other
// series.
function entries(chart, theme) {
  const [classes, forms, others] = [new Map(), new Map(), new Map()];
  for (const series of chart.series.filter((each) => each.colour !== "idle")) {
    const [, name] = /^class (.*)$/s.exec(series.colour) ?? [];
    if (name === undefined) {
      others.set(series.name, series);
      continue;
    }
    classes.set(name, { ...series, form: "filled" });
    const rest = series.name.split(", ").at(-1);
    if (series.name.includes(", ") && !forms.has(rest)) {
      forms.set(rest, { ...series, colour: "best" });
    }
  }
  const areForms = [...forms.values()].some((series) => series.form !== "filled");
  const found = [...classes, ...(areForms ? forms : []), ...others];
  if (found.length < 2 || chart.axes[1]?.name === "sampler") {
    return [];
  }
  return found.map(([name, series]) => {
    const entry = element("li");
    entry.append(swatch(series, theme), element("span", name));
    return entry;
  });
}

// A small picture of a series's marks for the legend.
function swatch(series, theme) {
  const colour = theme.colourOf(series.colour);
  const svg = made("svg", { width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" });
  const isLine = ["line", "steps", "polylines"].includes(series.mark);
  if (isLine) {
    const dashes = series.colour === "bound" || series.form === "dash" ? { "stroke-dasharray": "4 2" } : {};
    const opacity = series.form === "light" ? 0.4 : 1;
    svg.append(made("path", { d: "M0 8H16", stroke: colour, "stroke-width": 2, opacity, ...dashes }));
  } else if (series.form === "cross") {
    svg.append(made("path", { d: "M4 4L12 12M4 12L12 4", stroke: colour, "stroke-width": 2 }));
  } else if (series.form === "dash") {
    svg.append(made("path", { d: "M3 8H13", stroke: colour, "stroke-width": 3, opacity: 0.6 }));
  } else if (series.mark === "points") {
    const fill = series.form === "hollow" ? { fill: "none", stroke: colour, "stroke-width": 2 } : { fill: colour };
    const shapes = {
      circle: ["circle", { cx: 8, cy: 8, r: 4 }],
      rect: ["rect", { x: 4, y: 4, width: 8, height: 8 }],
      triangle: ["path", { d: "M8 3L13 12H3Z" }],
      diamond: ["path", { d: "M8 2L13 8L8 14L3 8Z" }],
    };
    const [name, attributes] = shapes[theme.symbolOf(series.colour)];
    svg.append(made(name, { ...attributes, ...fill }));
  } else {
    svg.append(...bar(series.form, colour, theme));
  }
  return svg;
}

function bar(form, colour, theme) {
  const box = { x: 1, y: 4, width: 14, height: 9 };
  if (form === "outlined") {
    return [made("rect", { ...box, fill: "none", stroke: colour })];
  }
  if (form === "pointed") {
    return [made("path", { d: "M1 4H10L15 8.5L10 13H1Z", fill: colour })];
  }
  if (form === "hatched") {
    const lines = made("path", { d: "M1 9L6 4M1 13L10 4M6 13L15 4M11 13L15 9", stroke: colour });
    return [made("rect", { ...box, fill: "none", stroke: colour }), lines];
  }
  const filled = made("rect", { ...box, fill: colour, "fill-opacity": ["light", "crossed"].includes(form) ? 0.4 : 1 });
  const cross = made("path", { d: "M9 6L14 11M9 11L14 6", stroke: theme.failed, "stroke-width": 1.5 });
  return form === "crossed" ? [filled, cross] : [filled];
}

function made(name, attributes) {
  const found = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) {
    found.setAttribute(attribute, value);
  }
  return found;
}

// Fill `host` with one of several charts. The reader chooses it by name. `charts` are pairs of name and chart.
export function showOneOf(host, label, charts, classes) {
  const choice = element("select");
  choice.append(...charts.map(([name], place) => element("option", name, { value: place })));
  const labelled = element("label", `${label} `, { class: "choice" });
  labelled.append(choice);
  let drawn = showChart(host, charts[0][1], classes, [labelled]);
  choice.addEventListener("change", () => {
    drawn.dispose();
    drawn = showChart(host, charts[choice.value][1], classes, [labelled]);
    choice.focus();
  });
}
