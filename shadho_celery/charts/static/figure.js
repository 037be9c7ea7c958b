// A figure: a chart with its title, legend, note and table, drawn again when its width or the colours change.

import { RANGES, optionOf } from "./draw.js";
import { chooser, columnOf, element, inWords } from "./marks.js";
import { lengthOf, tableOf } from "./table.js";
import { themeOf } from "./theme.js";
import { Timeline } from "./timeline.js";

const NARROW = 480;
const ROW = 26;
const PLOT = 320;
// Height of one of many charts.
const SMALL = 208;
// Pixels by which the mouse must move to zoom.
const DRAGGED = 8;
const SVG = "http://www.w3.org/2000/svg";
// Symbols of points in the legend, by name.
const SHAPES = {
  circle: "M4 8A4 4 0 0 0 12 8A4 4 0 0 0 4 8Z",
  rect: "M4 4H12V12H4Z",
  triangle: "M8 3L13 12H3Z",
  diamond: "M8 2L13 8L8 14L3 8Z",
};
// By form of a mark: the state of its trial.
const STATES = { hollow: "pruned", light: "pruned", cross: "failed", dash: "infeasible" };
let figures = 0;
// By element: what the reader of its chart has chosen (see `optionOf`), kept while the chart is drawn again.
const views = new WeakMap();

// Fill `host` with a chart. A mark that is clicked, or chosen with arrow keys and Enter, sends the event "trial" with
// the trial's number in `detail.number`. Ranges chosen on parallel axes are sent as the event "ranges", by name of the
// axis. `controls` are elements below the title. Return an object with `dispose`, to be called before `host` is used
// again.
export function showChart(host, chart, classes, controls = []) {
  figures += 1;
  const id = `chart-${figures}`;
  host.classList.add("chart");
  const title = element("h3", chart.title, { id });
  if (chart.empty) {
    host.replaceChildren(title, element("p", chart.empty, { class: "empty" }));
    return { dispose: () => {} };
  }
  const plot = element("div", "", { class: "plot", tabindex: "0", role: "application", "aria-labelledby": id });
  const live = element("p", "", { class: "unseen", "aria-live": "polite" });
  const legend = element("ul", "", { class: "legend" });
  const note = chart.note ? [element("p", chart.note, { class: "note" })] : [];
  const behind = element("div", "", { class: "behind" });
  behind.append(tableOf(chart));
  if (chart.how) {
    const how = element("details", "", { class: "how" });
    how.append(element("summary", "How this is computed"), element("p", chart.how));
    behind.append(how);
  }
  const view = views.get(host) ?? {};
  views.set(host, view.x === chart.axes[0].name ? view : Object.assign(view, { x: chart.axes[0].name, zoom: undefined }));
  const send = (name, detail) => host.dispatchEvent(new CustomEvent(name, { bubbles: true, detail }));
  const acts = { open: (number) => send("trial", { number }), say: (text) => (live.textContent = text), send };
  let theme = null;
  const paint = () => {
    const shown = inView(chart, view);
    legend.replaceChildren(...entries(shown, theme));
    whole.hidden = !view.zoom;
    drawn.paint(theme, shown);
  };
  const whole = element("button", "Whole range", { type: "button" });
  whole.addEventListener("click", () => paint(Object.assign(view, { zoom: undefined })));
  const choices = element("div", "", { class: "choices" });
  choices.append(...controls, ...choicesOf(chart, view, paint), whole);
  host.replaceChildren(title, choices, legend, plot, live, ...note, behind);
  const drawn = chart.name === "timeline" ? new Timeline(plot, chart, acts) : byECharts(plot, chart, acts, view, paint);
  const ending = new AbortController();
  const paintAnew = () => {
    theme = themeOf(host, classes);
    paint();
  };
  paintAnew();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", paintAnew, { signal: ending.signal });
  const size = () => `${plot.clientWidth} ${plot.clientHeight}`;
  let last = size();
  const resized = new ResizeObserver(() => {
    if (size() !== last) {
      drawn.resize();
      paint();
      last = size();
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

// The chart with its trials in the colours of their states, unless the reader has chosen those of the classes.
function inView(chart, { colours }) {
  const recoloured = (series) => {
    const state = STATES[series.form] ?? "complete";
    return series.colour.startsWith("class ") ? { ...series, name: state, colour: `state ${state}` } : series;
  };
  return colours === "state" ? { ...chart, series: chart.series.map(recoloured) } : chart;
}

// What the reader may choose: the range of the losses, and the colours of trials of several classes.
function choicesOf(chart, view, paint) {
  const [, y] = chart.axes;
  const losses = chart.series.flatMap(({ mark, columns }) => (mark === "points" ? columns.y : []));
  const classes = new Set(chart.series.map(({ colour }) => colour).filter((colour) => colour.startsWith("class ")));
  const choose = (key, options) => {
    view[key] ??= options[0];
    const act = (value) => paint(Object.assign(view, { [key]: value, zoom: undefined }));
    return options.length > 1 ? [chooser(key, options.map((each) => [each, each]), view[key], act)] : [];
  };
  return [
    ...(y?.focus?.length ? choose("range", RANGES.slice(0, losses.every((loss) => loss === null || loss > 0) ? 3 : 2)) : []),
    ...(chart.has_states ? choose("colours", classes.size > 1 ? ["class", "state"] : ["state"]) : []),
  ];
}

// Zoom into the part of the axes over which the mouse is dragged.
function zoomByDragging(plot, drawn, view, paint) {
  const box = element("div", "", { class: "zoom" });
  let from = null;
  const sides = ({ offsetX, offsetY }) => [[from[0], offsetX], [from[1], offsetY]].map((ends) => ends.sort((a, b) => a - b));
  plot.addEventListener("pointerdown", ({ pointerType, button, offsetX: x, offsetY: y }) => {
    from = pointerType === "mouse" && !button && drawn.containPixel("grid", [x, y]) ? [x, y] : null;
  });
  plot.addEventListener("pointermove", (event) => {
    if (from && Math.abs(event.offsetX - from[0]) > DRAGGED) {
      const [[left, right], [top, bottom]] = sides(event);
      plot.setPointerCapture(event.pointerId);
      box.style.cssText = `left: ${left}px; top: ${top}px; width: ${right - left}px; height: ${bottom - top}px`;
      plot.append(box);
    }
  });
  plot.addEventListener("pointerup", (event) => {
    if (box.isConnected) {
      const [x, y] = sides(event);
      const [low, high] = [0, 1].map((end) => drawn.convertFromPixel({ xAxisIndex: 0, yAxisIndex: 0 }, [x[end], y[1 - end]]));
      box.remove();
      paint(Object.assign(view, { zoom: { x: [low[0], high[0]], y: [low[1], high[1]] } }));
    }
    from = null;
  });
}

// Send the ranges that are chosen on parallel axes, and put an axis whose name is clicked in front.
function onParallelAxes(drawn, chart, view, send, paint) {
  drawn.on("axisareaselected", ({ parallelAxisId: id, intervals }) => {
    const [axis, dim] = [chart.axes[id], Number(id)];
    // In front of the categories may be the place of lines without one.
    const shift = axis.scale === "category" && chart.series.some(({ columns }) => columns[columnOf(dim)].includes(null)) ? 1 : 0;
    view.ranges[axis.name] = intervals[0]?.map((end) => end - shift);
    send("ranges", view.ranges);
  });
  drawn.on("click", ({ targetType, componentIndex }) => {
    if (targetType === "axisName") {
      const order = view.order ?? chart.axes.map((_, dim) => dim);
      view.order = [order[componentIndex], ...order.filter((_, place) => place !== componentIndex)];
      paint();
    }
  });
}

function byECharts(plot, chart, { open, say, send }, view, paint) {
  const fitHeight = () => {
    plot.style.height = `${heightOf(chart, plot.clientWidth, plot.closest(".multiples") ? SMALL : PLOT)}px`;
  };
  fitHeight();
  plot.classList.toggle("grows", chart.axes[1]?.scale !== "category");
  const drawn = globalThis.echarts.init(plot);
  if (chart.series.some((series) => series.mark === "polylines")) {
    onParallelAxes(drawn, chart, view, send, paint);
  } else if (chart.axes[1]?.focus?.length && chart.axes[0].scale !== "category") {
    zoomByDragging(plot, drawn, view, paint);
  }
  const openMark = (series, place) => {
    const number = chart.series[series]?.columns.number?.[place];
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
    Escape: () => {
      drawn.dispatchAction({ type: "hideTip" });
      paint(Object.assign(view, { zoom: undefined }));
    },
  };
  const press = (event) => {
    if (event.key in acts && marks.length) {
      event.preventDefault();
      acts[event.key]();
    }
  };
  plot.addEventListener("keydown", press);
  return {
    paint: (theme, shown) => {
      drawn.setOption(optionOf(shown, theme, plot.clientWidth, view), true);
      send("ranges", (view.ranges = {}));
    },
    resize: () => {
      fitHeight();
      drawn.resize();
    },
    dispose: () => {
      plot.removeEventListener("keydown", press);
      drawn.dispose();
    },
  };
}

function heightOf(chart, width, most = PLOT) {
  const [, y] = chart.axes;
  const isParallel = chart.series.some((series) => series.mark === "polylines");
  if (isParallel && width < NARROW) {
    return Math.max(PLOT, 56 * chart.axes.length);
  }
  const bars = chart.series.filter((series) => series.mark === "bars").length || 1;
  return y?.scale === "category" && !isParallel ? 64 + y.categories.length * (ROW + 10 * (bars - 1)) : most;
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
  // The timeline has the names of the classes beside their rows.
  const found = [...(chart.name === "timeline" ? [] : classes), ...(areForms ? forms : []), ...others];
  if (found.length < 2) {
    return [];
  }
  return found.map(([name, series]) => {
    const entry = element("li");
    entry.append(swatch(series, theme), element("span", name));
    return entry;
  });
}

// A small picture of a series's marks for the legend.
function swatch({ mark, form, colour: meaning }, theme) {
  const colour = theme.colourOf(meaning);
  const isLine = ["line", "steps", "polylines"].includes(mark);
  const outline = { fill: "none", stroke: colour, "stroke-width": 2 };
  const box = "M1 4H15V13H1Z";
  const looks = {
    line: ["M0 8H16", { ...outline, opacity: form === "light" ? 0.4 : 1, ...(meaning === "bound" || form === "dash" ? { "stroke-dasharray": "4 2" } : {}) }],
    cross: ["M4 4L12 12M4 12L12 4", outline],
    dash: ["M3 8H13", { ...outline, "stroke-width": 3, opacity: 0.6 }],
    hollow: [SHAPES[theme.symbolOf(meaning)], outline],
    light: [box, { fill: colour, "fill-opacity": 0.4 }],
    crossed: ["M4 4L12 12M4 12L12 4", { ...outline, stroke: theme.failed }],
    outlined: [box, { ...outline, "stroke-width": 1 }],
    pointed: ["M1 4H10L15 8.5L10 13H1Z", { fill: colour }],
    hatched: [`${box}M1 9L6 4M1 13L10 4M6 13L15 4M11 13L15 9`, { ...outline, "stroke-width": 1 }],
  };
  const [d, look] = looks[isLine ? "line" : form === "mean" ? "dash" : form] ?? [mark === "points" ? SHAPES[theme.symbolOf(meaning)] : box, { fill: colour }];
  const made = (name, attributes) => {
    const found = document.createElementNS(SVG, name);
    Object.entries(attributes).forEach(([attribute, value]) => found.setAttribute(attribute, value));
    return found;
  };
  const svg = made("svg", { width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" });
  svg.append(made("path", { d, ...look }));
  return svg;
}

// Fill `host` with one of several charts. The reader chooses it by name. `charts` are pairs of name and chart.
export function showOneOf(host, label, charts, classes) {
  let drawn = null;
  const act = (place, choose) => {
    drawn?.dispose();
    drawn = showChart(host, charts[place][1], classes, [choice]);
    choose?.focus();
  };
  const choice = chooser(label, charts.map(([name], place) => [place, name]), 0, act);
  act(0);
}
