// Builds the option (ECharts' description of a chart) for a chart of this package. All texts are drawn on a canvas or
// are text nodes, so that none is parsed as HTML.

import { card, columnOf, cut, withUnit } from "./marks.js";
import { digits } from "./numbers.js";
import { lengthOf } from "./table.js";

const CROSS = "path://M0,1L1,0L4,3L7,0L8,1L5,4L8,7L7,8L4,5L1,8L0,7L3,4Z";
// Symbol of an infeasible trial.
const DASH = "path://M0,3L10,3L10,6L0,6Z";
const FONT_SIZE = 14;
// Pixels of a chart's width for each character of the name of a row.
const BESIDE_ROWS = 24;
const NARROW = 480;
// Maximum number of characters of an axis's name.
const NAME = 40;
// A logarithmic axis whose greatest value is above DECADES times the least has whole decades, in about INTERVALS
// intervals.
const DECADES = 1e4;
const INTERVALS = 5;
// In parallel axes: label of the place where a line crosses an axis for which its trial has no value, and the distance
// of this place from the values, as a share of the axis.
const INACTIVE = "inactive";
const APART = 0.15;
// Pixels left and right of parallel axes, and width of a character in pixels.
const BESIDE = [56, 72];
const CHARACTER = 8;
// Exponent beyond which a power of ten is 0 or infinite as a floating-point number.
const LAST_DECADE = 307;

// Names of the ranges of an axis with a focus, from which a reader chooses.
export const RANGES = ["better half", "all", "logarithm"];

// Return the option for a figure that is `width` pixels wide. `view` is what its reader has chosen: `range`, one of
// RANGES; `zoom`, the ends of the axes by column; and `order`, the indices of parallel axes.
export function optionOf(chart, theme, width, view = {}) {
  const isParallel = chart.series.some((series) => series.mark === "polylines");
  return {
    animation: false,
    textStyle: { fontFamily: theme.font, fontSize: FONT_SIZE },
    tooltip: {
      trigger: "item",
      confine: true,
      backgroundColor: theme.ground,
      borderColor: theme.line,
      extraCssText: "box-shadow: none",
      formatter: (mark) => card(chart, chart.series[mark.seriesIndex], mark.dataIndex),
    },
    ...(isParallel ? parallel(chart, theme, width, view.order) : plane(chart, theme, width, view)),
  };
}

// Ends of the part of an axis that is shown; undefined if it has all values.
function endsOf(axis, view) {
  return axis.focus?.length && (view.range ?? RANGES[0]) === RANGES[0] ? axis.focus : undefined;
}

function plane(chart, theme, width, view) {
  const [x, side_] = chart.axes;
  const ends = endsOf(side_, view);
  const y = side_.focus?.length ? { ...side_, scale: view.range === RANGES[2] ? "log" : "linear" } : side_;
  const hasPlaceless = chart.series.some((series) => series.mark === "points" && series.columns.y.includes(null));
  const isRows = y.scale === "category";
  const isFlat = chart.series.some((series) => series.mark === "bars" && !series.columns.width);
  const bottom = { ...axisOf(x, theme, width, chart, "x"), nameLocation: "middle", nameGap: 30 };
  const side = {
    ...axisOf(y, theme, width, chart, "y"),
    nameLocation: "end",
    nameGap: 12,
    inverse: isRows,
    // The title says what the rows are.
    ...(isRows ? { name: "" } : {}),
  };
  side.nameTextStyle = { ...side.nameTextStyle, align: "left" };
  bottom.scale = !isFlat;
  side.scale = !chart.series.some((series) => series.mark === "bars");
  // The intervals of shares have their place, too.
  const reached = chart.series.flatMap(({ columns: { x: shares, error } }) => error?.map((each, place) => each + shares[place]) ?? []);
  if (reached.length) {
    bottom.max = Math.min(x.most, Math.ceil(10 * Math.max(...reached)) / 10);
  }
  const isGrid = chart.series.some((series) => series.mark === "cells");
  const extremes = (column) => [rangeOf(chart, column).least, rangeOf(chart, column).most];
  fit(bottom, isGrid ? extremes("x") : view.zoom?.x);
  fit(side, isGrid ? extremes("y") : (view.zoom?.y ?? ends));
  const isBeyond = (y) => ends && y !== null && (y < ends[0] || y > ends[1]);
  const beyond = chart.series.flatMap(({ mark, columns }) => (mark === "points" ? columns.y.filter(isBeyond) : [])).length;
  if (beyond && !view.zoom && width > NARROW) {
    side.name = `${side.name}; ${beyond} beyond the axis are at its edge`;
  }
  return {
    grid: { left: 8, right: 24, top: isRows ? 8 : 40, bottom: 36, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: bottom,
    // Marks without a y are drawn at the lower end of a second axis.
    yAxis: hasPlaceless ? [side, { type: "value", min: 0, max: 1, show: false }] : side,
    series: chart.series.map((series) => seriesOf(chart, series, theme, view.zoom ? undefined : ends)),
  };
}

// Limit an axis to these ends. They are not round, so they have no labels, unless a logarithmic axis has hardly others.
function fit(made, ends) {
  if (ends) {
    const isShort = made.type === "log" && ends[1] < 100 * ends[0];
    Object.assign(made, { min: ends[0], max: ends[1] });
    Object.assign(made.axisLabel, { showMinLabel: isShort, showMaxLabel: isShort });
  }
}

function axisOf(axis, theme, width, chart, column) {
  const kinds = { linear: "value", log: "log", time: "time", category: "category" };
  const label = { color: theme.muted, fontSize: FONT_SIZE, hideOverlap: true };
  const made = {
    type: kinds[axis.scale],
    name: cut(withUnit(axis), NAME),
    nameTextStyle: { color: theme.muted, fontSize: FONT_SIZE },
    axisLine: { show: column === "x", lineStyle: { color: theme.line } },
    axisTick: { show: column === "x", lineStyle: { color: theme.line } },
    splitLine: { show: column === "y" && axis.scale !== "category", lineStyle: { color: theme.line } },
    axisLabel: label,
  };
  if (axis.scale === "category") {
    const most = Math.max(6, Math.floor(column === "x" ? width / CHARACTER / axis.categories.length : width / BESIDE_ROWS));
    made.data = axis.categories;
    label.formatter = (text) => inMiddle(text, most);
  } else if (axis.scale !== "time") {
    label.formatter = digits;
    made.splitNumber = width < NARROW ? 3 : 5;
    Object.assign(made, extent(axis, chart, column));
  }
  return made;
}

// Shorten a text by leaving out its middle, because the names of categories may differ only at their ends.
function inMiddle(text, most) {
  const end = Math.floor(most / 2);
  return text.length > most ? `${text.slice(0, most - end - 1)}…${text.slice(-end)}` : text;
}

// Options for the ends and intervals of an axis, where ECharts' own choice is not suitable.
function extent(axis, chart, column) {
  const { least, most, values } = rangeOf(chart, column);
  if (axis.scale === "log") {
    return least > 0 && values.length ? logExtent(least, most) : {};
  }
  return {
    // Between whole numbers, no ticks are drawn.
    ...(values.length && values.every(Number.isInteger) ? { minInterval: 1 } : {}),
    // An axis of shares does not continue above 1.
    ...(axis.most ? { max: ({ max }) => (max > 0.8 * axis.most ? axis.most : null) } : {}),
  };
}

function rangeOf(chart, column) {
  const all = chart.series.flatMap((series) => series.columns[column] ?? []);
  const values = all.filter((value) => value !== null);
  const least = values.reduce((a, b) => Math.min(a, b), Infinity);
  const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return { values, least, most, hasGaps: values.length < all.length };
}

// Ends of a logarithmic axis: powers of ten for many decades, else 1, 2 or 5 times a power of ten.
function logExtent(least, most) {
  if (most > DECADES * least) {
    const [first, last] = [Math.floor(Math.log10(least)), Math.ceil(Math.log10(most))];
    const decades = Math.ceil((last - first) / INTERVALS);
    return {
      logBase: 10 ** decades,
      min: 10 ** Math.max(-LAST_DECADE, decades * Math.floor(first / decades)),
      max: 10 ** Math.min(LAST_DECADE, decades * Math.ceil(last / decades)),
    };
  }
  const steps = [1, 2, 5, 10];
  const scaleOf = (value) => 10 ** Math.floor(Math.log10(value));
  const lower = [...steps].reverse().find((step) => step * scaleOf(least) <= least) ?? 1;
  const upper = steps.find((step) => step * scaleOf(most) >= most) ?? 10;
  return { min: lower * scaleOf(least), max: upper * scaleOf(most) };
}

function seriesOf(chart, series, theme, ends) {
  const colour = theme.colourOf(series.colour);
  const common = { name: series.name, itemStyle: { color: colour }, clip: true };
  switch (series.mark) {
    case "points":
      return { ...common, ...points(chart, series, theme, colour, ends) };
    case "cells":
      return { ...common, ...cells(chart, series, theme) };
    case "line":
      return { ...common, ...line(chart, series, colour) };
    case "steps":
      return { ...common, ...steps(chart, series, colour) };
    case "bars":
      return series.columns.width ? { ...common, ...boxes(chart, series) } : { ...common, ...bars(series, theme) };
  }
}

const scaled = (axis, value) => (value === null ? "-" : axis.scale === "time" ? 1000 * value : value);

function pairs(chart, series) {
  const [x, y] = chart.axes;
  return series.columns.x.map((value, place) => [scaled(x, value), scaled(y, series.columns.y[place])]);
}

// A point beyond `ends` is drawn pale at the nearer one of them.
function points(chart, series, theme, colour, [least, most] = [-Infinity, Infinity]) {
  const found = pairs(chart, series);
  const within = ([at, y]) => {
    const shown = Math.min(most, Math.max(least, y));
    return y === "-" || shown === y ? [at, y] : { value: [at, shown], symbolSize: 5, itemStyle: { opacity: 0.35, borderWidth: 0 } };
  };
  const symbol = theme.symbolOf(series.colour);
  const isPlaceless = series.columns.y.every((value) => value === null);
  const isMany = found.length > 500;
  const looks = {
    filled: { symbol, itemStyle: { color: colour, opacity: isMany ? 0.6 : 0.9, borderColor: theme.ground, borderWidth: isMany ? 0 : 1 } },
    hollow: { symbol, itemStyle: { color: theme.ground, borderColor: colour, borderWidth: 1.5 } },
    cross: { symbol: CROSS, itemStyle: { color: colour } },
    dash: { symbol: DASH, symbolSize: [9, 3], itemStyle: { color: colour, opacity: 0.9 } },
    // The mean of a category.
    mean: { symbol: DASH, symbolSize: [Math.min(32, 400 / chart.axes[0].categories.length), 4], itemStyle: { color: colour } },
  };
  return {
    type: "scatter",
    symbolSize: isMany ? 5 : 8,
    ...(looks[series.form] ?? looks.filled),
    emphasis: { scale: 1.8, itemStyle: { opacity: 1, borderColor: theme.ink, borderWidth: 1 } },
    yAxisIndex: isPlaceless && found.length ? 1 : 0,
    data: isPlaceless ? found.map(([x]) => [x, 0]) : found.map(within),
    z: { cross: 4, mean: 5 }[series.form] ?? 3,
  };
}

const lookOf = (series) =>
  ({ bound: { type: "dashed", width: 2 }, best: { width: 2 } })[series.colour] ?? { width: 1.5 };

function line(chart, series, colour) {
  return {
    type: "line",
    showSymbol: false,
    lineStyle: { color: colour, opacity: series.form === "light" ? 0.4 : 1, ...lookOf(series) },
    data: pairs(chart, series),
    z: 5,
  };
}

// Cells of a grid that fills the plane, from the worst to the best.
function cells(chart, series, theme) {
  const side = Math.sqrt(lengthOf(series));
  return {
    type: "custom",
    renderItem: ({ coordSys, dataIndex }, api) => {
      const [x, y] = api.coord([api.value(0), api.value(1)]);
      // Without the further pixel, lines would remain between cells.
      const [width, height] = [coordSys.width / side + 1, coordSys.height / side + 1];
      const fill = globalThis.echarts.color.lerp(dataIndex / side ** 2, theme.ranks);
      return { type: "rect", shape: { x: x - width / 2, y: y - height / 2, width, height }, style: { fill } };
    },
    data: pairs(chart, series),
    z: 1,
  };
}

// A step line: the value of each mark lasts until the next mark. ECharts' own step lines are not used, because
// they draw a slope in place of steps lower than a pixel.
function steps(chart, series, colour) {
  const found = pairs(chart, series);
  const { type, width } = lookOf(series);
  const style = { stroke: colour, fill: null, lineWidth: width, lineDash: type ?? "solid" };
  return {
    type: "custom",
    encode: { x: [0, 2], y: [1, 3] },
    renderItem: (_, api) => {
      const [from, to] = [0, 2].map((place) => api.coord([api.value(place), api.value(place + 1)]));
      return { type: "polyline", shape: { points: [from, [to[0], from[1]], to] }, style };
    },
    data: found.map((point, place) => [...point, ...(found[place + 1] ?? point)]),
    z: 5,
  };
}

// Bars from 0. With a column `error`, each has a line for its interval, and is pale if this holds 0.
function bars(series, theme) {
  const { x, y, error = [] } = series.columns;
  const border = series.colour === "seconds" ? { borderColor: theme.muted } : {};
  const ends = (place) => [-1, 1].map((side) => ({ coord: [Math.max(0, x[place] + side * error[place]), y[place]] }));
  return {
    type: "bar",
    barMaxWidth: 18,
    barMinHeight: 1,
    itemStyle: { color: theme.colourOf(series.colour), borderWidth: 1, ...border },
    data: x.map((value, place) => {
      const isPale = value !== null && value <= error[place];
      return { value: [value ?? "-", y[place]], itemStyle: isPale ? { opacity: 0.3 } : {} };
    }),
    markLine: {
      silent: true,
      symbol: "none",
      label: { show: false },
      lineStyle: { type: "solid", color: theme.muted, width: 2 },
      data: x.flatMap((_, place) => (error[place] ? [ends(place)] : [])),
    },
  };
}

// Bars with a given width, from the height `base` to the height `y`.
function boxes(chart, series) {
  const [x] = chart.axes;
  const { x: starts, y, base, width } = series.columns;
  return {
    type: "custom",
    encode: { x: [0, 1], y: [2, 3] },
    renderItem: (_, api) => {
      const [left, top] = api.coord([api.value(0), api.value(3)]);
      const [right, bottom] = api.coord([api.value(1), api.value(2)]);
      const shape = { x: left, y: top, width: Math.max(1, right - left), height: bottom - top };
      return { type: "rect", shape, style: { fill: api.visual("color") } };
    },
    data: starts.map((start, place) => [
      scaled(x, start),
      scaled(x, start + width[place]),
      base?.[place] ?? 0,
      y[place],
    ]),
  };
}

function parallel(chart, theme, width, order = chart.axes.map((_, dim) => dim)) {
  const isNarrow = width < NARROW;
  const feet = chart.axes.map((axis, dim) => footOf(axis, rangeOf(chart, columnOf(dim))));
  const lines = chart.series.reduce((sum, series) => sum + lengthOf(series), 0);
  const apart = (width - BESIDE[0] - BESIDE[1]) / Math.max(1, chart.axes.length - 1);
  const most = isNarrow ? 11 : Math.max(4, Math.floor(apart / CHARACTER) - 1);
  return {
    // On a narrow page the axes are horizontal, one below the other.
    parallel: isNarrow
      ? { left: 96, right: 32, top: 24, bottom: 32, layout: "vertical" }
      : { left: BESIDE[0], right: BESIDE[1], top: 48, bottom: 16 },
    parallelAxis: order.map((dim) => {
      const axis = chart.axes[dim];
      const made = axisOf(axis, theme, width, chart, columnOf(dim));
      made.name = cut(made.name, most);
      // Lines cross the labels, so the labels have a border in the colour of the page.
      Object.assign(made.axisLabel, { textBorderColor: theme.ground, textBorderWidth: 3, color: theme.ink });
      made.axisLabel.showMinLabel = made.axisLabel.showMaxLabel = true;
      made.axisLabel.formatter = axis.scale === "category" ? (text) => inMiddle(text, Math.min(most, 11)) : digits;
      return {
        ...made,
        ...withFoot(made, axis, feet[dim], rangeOf(chart, columnOf(dim))),
        dim,
        id: String(dim),
        triggerEvent: true,
        scale: true,
        splitNumber: 3,
        nameLocation: isNarrow ? "start" : "end",
        nameTextStyle: { ...made.nameTextStyle, align: isNarrow ? "right" : "center" },
        axisLine: { show: true, lineStyle: { color: theme.muted } },
        areaSelectStyle: { color: theme.muted, borderColor: theme.muted, opacity: 0.2 },
      };
    }),
    series: chart.series.map((series) => ({
      type: "parallel",
      name: series.name,
      lineStyle: {
        color: theme.colourOf(series.colour),
        type: series.form === "dash" ? "dashed" : "solid",
        width: 1.5,
        opacity: lines > 100 ? 0.35 : 0.6,
      },
      inactiveOpacity: 0.03,
      emphasis: { lineStyle: { opacity: 1, width: 3 } },
      data: Array.from({ length: lengthOf(series) }, (_, place) => {
        const value = chart.axes.map((axis, dim) => {
          const found = series.columns[columnOf(dim)][place] ?? feet[dim] ?? "-";
          // `withFoot` has put the foot in front of the categories.
          return axis.scale === "category" && feet[dim] !== null ? found + 1 : found;
        });
        const share = place / Math.max(1, lengthOf(series) - 1);
        // The marks of a series with ranks are sorted, the best last.
        return series.colour === "rank" ? { value, lineStyle: { color: globalThis.echarts.color.lerp(share, theme.ranks) } } : value;
      }),
    })),
  };
}

// The foot of a parallel axis: the place where lines without a value cross it. null if each line has a value.
function footOf(axis, { least, most, values, hasGaps }) {
  if (!hasGaps) {
    return null;
  }
  if (axis.scale === "category") {
    return -1;
  }
  if (!values.length) {
    return 1;
  }
  return axis.scale === "log"
    ? least / Math.max(most / least, 10) ** APART
    : least - APART * (most - least || Math.abs(least) || 1);
}

// Options of a parallel axis for its foot, which is labelled INACTIVE; none if `foot` is null.
function withFoot(made, axis, foot, { least, most, values }) {
  if (foot === null) {
    return {};
  }
  if (axis.scale === "category") {
    return { data: [INACTIVE, ...axis.categories] };
  }
  if (!values.length) {
    [least, most] = [10, 10];
  }
  const isFoot = (value) => Math.abs(value - foot) <= 1e-6 * (least - foot);
  const along = axis.scale === "log" ? Math.log : Number;
  // The end is labelled, and values so near to it that their labels would cover its label are not.
  const isFree = (value) => value >= most || along(most) - along(value) > 0.08 * (along(most) - along(foot));
  const isSaid = (value) => values.length && value >= least && isFree(value);
  const formatter = (value) => (isFoot(value) ? INACTIVE : isSaid(value) ? digits(value) : "");
  return { min: foot, max: most, axisLabel: { ...made.axisLabel, formatter } };
}
