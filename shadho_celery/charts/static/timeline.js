// The timeline of attempts on a canvas. Each slot or machine has a row, below the name of its class, or each class has
// one row. Each attempt is a bar in its row.

import { card, element, inWords } from "./marks.js";
import { lengthOf } from "./table.js";

const AXIS = 28;
const BAR = 0.6;
// Height of the line with a class's name, and width of the column with the shares of idle time, in pixels.
const HEADING = 24;
const IDLE = 48;
// Heights of a row in pixels. In a timeline of up to NAMED rows, each row is high enough for its name.
const [LEAST_ROW, NAMED_ROW, MOST_ROW] = [6, 18, 28];
const NAMED = 60;
const MOST_HEIGHT = 640;
const FONT_SIZE = 14;
const STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const DAY = 86400;

// Draws a timeline in the element `host`, as soon as `paint` is called. `open` is called with the number of a chosen trial.
export class Timeline {
  constructor(host, chart, { say, open }) {
    Object.assign(this, { host, chart, say, open });
    this.rows = chart.axes[1].categories;
    this.layout = layoutOf(chart);
    this.idle = new Map();
    this.bars = [];
    for (const series of chart.series) {
      this.read(series);
    }
    this.bars.sort((a, b) => a.row - b.row || a.start - b.start);
    const starts = this.bars.map((bar) => bar.start);
    const ends = this.bars.map((bar) => bar.end);
    this.whole = [least(starts), Math.max(greatest(ends), least(starts) + 1e-3)];
    this.span = [...this.whole];
    this.canvas = element("canvas", "", { "aria-hidden": "true" });
    this.tip = element("div", "", { class: "tip", hidden: "" });
    host.replaceChildren(this.canvas, this.tip);
    this.ending = new AbortController();
    this.listen();
  }

  read(series) {
    const { y, start, end, number, idle, busy } = series.columns;
    for (let place = 0; place < lengthOf(series); place += 1) {
      if (idle) {
        this.idle.set(y[place], idle[place]);
      } else {
        const bar = { series, place, row: y[place], start: start[place], end: end[place] };
        this.bars.push({ ...bar, number: number?.[place] ?? null, busy: busy?.[place] ?? 1 });
      }
    }
  }

  // Set the size of the canvas, whose width is that of the host.
  resize() {
    this.width = this.host.clientWidth;
    this.height = AXIS + this.layout.bottom;
    this.ratio = globalThis.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * this.ratio);
    this.canvas.height = Math.round(this.height * this.ratio);
    this.canvas.style.width = `${this.width}px`;
    this.host.style.height = this.canvas.style.height = `${this.height}px`;
    this.labels = this.widthOfLabels();
  }

  dispose() {
    this.ending.abort();
  }

  // Width of the column with the names of the rows: the longest name, within limits that depend on the whole width.
  widthOfLabels() {
    const pen = this.canvas.getContext("2d");
    pen.font = `${FONT_SIZE}px ${this.theme.font}`;
    const widths = this.layout.rows.map(({ name, part }) => pen.measureText(`${name}  ${part}`).width + 12);
    return Math.round(Math.min(Math.max(48, greatest(widths)), 320, 0.38 * this.width));
  }

  middle(row) {
    return this.layout.rows[row].top + this.layout.height / 2;
  }

  rowAt(y) {
    return this.layout.rows.findIndex(({ top }) => top <= y && y < top + this.layout.height);
  }

  // Left and right end of the area with the bars, in pixels.
  get left() {
    return this.labels;
  }

  get right() {
    return this.width - IDLE;
  }

  x(time) {
    const [from, to] = this.span;
    return this.left + ((time - from) / (to - from)) * (this.right - this.left);
  }

  time(x) {
    const [from, to] = this.span;
    return from + ((x - this.left) / (this.right - this.left)) * (to - from);
  }

  paint(theme = this.theme) {
    this.theme = theme;
    if (!this.width) {
      this.resize();
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    pen.font = `${FONT_SIZE}px ${this.theme.font}`;
    this.paintAxis(pen);
    this.paintRows(pen);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, this.right - this.left, this.height);
    pen.clip();
    for (const bar of this.bars) {
      if (bar.end >= this.span[0] && bar.start <= this.span[1]) {
        this.paintBar(pen, bar);
      }
    }
    pen.restore();
  }

  paintAxis(pen) {
    const { bottom } = this.layout;
    pen.strokeStyle = this.theme.line;
    pen.fillStyle = this.theme.muted;
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    pen.lineWidth = 1;
    const step = stepOf((this.span[1] - this.span[0]) / Math.max(2, (this.right - this.left) / 110));
    const zone = 60 * new Date(1000 * this.span[0]).getTimezoneOffset();
    for (let at = Math.ceil((this.span[0] - zone) / step) * step + zone; at <= this.span[1]; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      line(pen, x, HEADING, x, bottom + 4);
      const text = clock(at, step);
      const half = pen.measureText(text).width / 2;
      if (x - half >= this.left - 8 && x + half <= this.width) {
        pen.fillText(text, x, bottom + AXIS / 2 + 2);
      }
    }
    line(pen, this.left, bottom + 0.5, this.right, bottom + 0.5);
  }

  paintRows(pen) {
    const { height, headings, rows } = this.layout;
    pen.textAlign = "right";
    pen.fillStyle = this.theme.muted;
    pen.fillText("idle", this.width, HEADING / 2);
    for (const { top, name } of headings) {
      pen.strokeStyle = this.theme.line;
      line(pen, 0, top + 0.5, this.width, top + 0.5);
      pen.fillStyle = this.theme.colourOf(`class ${name}`);
      pen.fillRect(0, top + HEADING / 2 - 5, 10, 10);
      pen.fillStyle = this.theme.ink;
      pen.textAlign = "left";
      pen.font = `600 ${FONT_SIZE}px ${this.theme.font}`;
      pen.fillText(fitting(pen, name, this.width - IDLE - 24), 16, top + HEADING / 2);
      pen.font = `${FONT_SIZE}px ${this.theme.font}`;
    }
    // If rows are lower than a line of text, a name is left out if it would overlap the name above it or the heading of
    // the next class.
    let free = 0;
    rows.forEach(({ top, name, part }, row) => {
      const middle = top + Math.max(height, FONT_SIZE) / 2;
      const end = headings.find((heading) => heading.top > top)?.top ?? Infinity;
      if (middle - FONT_SIZE / 2 < free || middle > end) {
        return;
      }
      free = middle + FONT_SIZE / 2;
      // If a row has a machine's name and a worker or slot, the machine's name keeps a part of the column.
      const most = this.labels - 12;
      const least = name && Math.max(most - pen.measureText(`${name}  `).width, 0.6 * most);
      const beside = fitting(pen, part, least || most);
      pen.fillStyle = this.theme.ink;
      pen.textAlign = "left";
      if (name) {
        pen.fillText(fitting(pen, name, most - (beside && pen.measureText(`  ${beside}`).width)), 0, middle);
      }
      pen.fillStyle = this.theme.muted;
      pen.textAlign = "right";
      pen.fillText(beside, most, middle);
      if (this.idle.has(row)) {
        pen.fillText(`${Math.round(100 * this.idle.get(row))} %`, this.width, middle);
      }
    });
  }

  paintBar(pen, bar) {
    const colour = this.theme.colourOf(bar.series.colour);
    const form = bar.series.form;
    const full = BAR * this.layout.height;
    const left = Math.max(this.x(bar.start), this.left - 2);
    const width = Math.max(1, Math.min(this.x(bar.end), this.right + 2) - left);
    const height = form === "strip" ? Math.max(1, full * bar.busy) : full;
    const top = this.middle(bar.row) - full / 2 + (full - height);
    pen.fillStyle = pen.strokeStyle = colour;
    pen.lineWidth = 1;
    if (form === "outlined") {
      pen.strokeRect(left + 0.5, top + 0.5, Math.max(1, width - 1), height - 1);
    } else if (form === "hatched") {
      hatch(pen, left, top, width, height);
    } else if (form === "pointed") {
      arrow(pen, left, top, width, height);
    } else {
      pen.globalAlpha = { light: 0.4, crossed: 0.4 }[form] ?? 1;
      // A gap of one pixel separates bars that follow one another without a pause.
      pen.fillRect(left, top, form !== "strip" && width > 3 ? width - 1 : width, height);
      pen.globalAlpha = 1;
    }
    if (form === "crossed") {
      pen.strokeStyle = this.theme.failed;
      pen.lineWidth = 2;
      const size = height / 2;
      const [x, y] = [left + width - size / 2 - 2, top + height / 2];
      line(pen, x - size / 2, y - size / 2, x + size / 2, y + size / 2);
      line(pen, x - size / 2, y + size / 2, x + size / 2, y - size / 2);
    }
    if (bar === this.current) {
      pen.strokeStyle = this.theme.ink;
      pen.lineWidth = 2;
      pen.strokeRect(left - 2, top - 2, width + 4, height + 4);
    }
  }

  listen() {
    const on = (name, run, more = {}) =>
      this.host.addEventListener(name, run, { signal: this.ending.signal, ...more });
    on("pointermove", (event) => this.move(event));
    on("pointerleave", () => this.show(null));
    on("pointerdown", (event) => this.grab(event));
    on("pointerup", (event) => this.release(event));
    // The wheel zooms only if the timeline has the focus or Ctrl is pressed. Otherwise it scrolls the page.
    on("wheel", (event) => this.wheel(event), { passive: false });
    on("keydown", (event) => this.key(event));
  }

  at(event) {
    const frame = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    const row = this.rowAt(y);
    const near = this.time(x + 2) - this.time(x);
    const time = this.time(x);
    const found = this.bars.filter((bar) => bar.row === row && bar.start - near <= time && time <= bar.end + near);
    return found.at(-1) ?? null;
  }

  grab(event) {
    this.held = { x: event.clientX, span: [...this.span], moved: false };
    this.host.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.held) {
      this.show(this.at(event), event);
      return;
    }
    const { x, span } = this.held;
    this.held.moved ||= Math.abs(event.clientX - x) > 3;
    if (this.held.moved) {
      const seconds = ((x - event.clientX) / (this.right - this.left)) * (span[1] - span[0]);
      this.see(span[0] + seconds, span[1] + seconds);
    }
  }

  release(event) {
    const wasClick = this.held && !this.held.moved;
    this.held = null;
    const bar = this.at(event);
    if (wasClick && bar) {
      this.choose(bar);
      this.enter();
    }
  }

  wheel(event) {
    if (!event.ctrlKey && document.activeElement !== this.host) {
      return;
    }
    event.preventDefault();
    const frame = this.canvas.getBoundingClientRect();
    this.zoom(Math.exp(0.002 * event.deltaY), this.time(event.clientX - frame.left));
  }

  zoom(factor, about = (this.span[0] + this.span[1]) / 2) {
    const [from, to] = this.span;
    this.see(about - (about - from) * factor, about + (to - about) * factor);
  }

  // Show the time from `from` to `to`, moved and cut so that it is within the time of the whole timeline.
  see(from, to) {
    const [first, last] = this.whole;
    const length = Math.min(last - first, Math.max(1e-3, to - from));
    const start = Math.min(Math.max(from, first), last - length);
    this.span = [start, start + length];
    this.paint();
  }

  key(event) {
    const acts = {
      ArrowRight: () => this.step(1),
      ArrowLeft: () => this.step(-1),
      ArrowDown: () => this.row(1),
      ArrowUp: () => this.row(-1),
      "+": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      Home: () => this.see(...this.whole),
      Enter: () => this.enter(),
      Escape: () => this.show(null),
    };
    if (event.key in acts) {
      event.preventDefault();
      acts[event.key]();
    }
  }

  step(by) {
    const place = this.bars.indexOf(this.current);
    this.choose(this.bars[place < 0 ? 0 : Math.min(this.bars.length - 1, Math.max(0, place + by))]);
  }

  // Choose the attempt in the row above or below whose start is nearest.
  row(by) {
    const { row, start } = this.current ?? this.bars[0];
    const [apart, later] = [(bar) => Math.abs(bar.row - row), (bar) => Math.abs(bar.start - start)];
    const beyond = this.bars.filter((bar) => Math.sign(bar.row - row) === by);
    this.choose(beyond.sort((a, b) => apart(a) - apart(b) || later(a) - later(b))[0]);
  }

  choose(bar) {
    if (!bar) {
      return;
    }
    this.current = bar;
    const length = this.span[1] - this.span[0];
    if (bar.start < this.span[0] || bar.start > this.span[1]) {
      this.see(bar.start - length / 2, bar.start + length / 2);
    }
    this.paint();
    this.say(`${this.rows[bar.row]}: ${inWords(this.chart, bar.series, bar.place)}`);
    this.show(bar);
  }

  enter() {
    if (this.current?.number !== null && this.current) {
      this.open(this.current.number);
    }
  }

  show(bar, event = null) {
    this.tip.hidden = !bar;
    if (!bar) {
      return;
    }
    this.tip.replaceChildren(card(this.chart, bar.series, bar.place));
    const frame = this.canvas.getBoundingClientRect();
    const x = event ? event.clientX - frame.left : this.x(bar.start);
    this.tip.style.left = `${Math.max(0, Math.min(x + 12, this.width - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${this.layout.rows[bar.row].top + this.layout.height + 4}px`;
  }
}

// Places of the rows and headings, and the texts beside the rows. Each class has a heading.
function layoutOf(chart) {
  const count = chart.axes[1].categories.length;
  const names = rowNames(chart);
  const least = count <= NAMED ? NAMED_ROW : LEAST_ROW;
  const height = Math.min(MOST_ROW, Math.max(least, Math.floor((MOST_HEIGHT - AXIS) / Math.max(1, count))));
  const headings = [];
  const rows = [];
  let top = 0;
  let previous = null;
  for (const { class_, ...own } of names) {
    if (class_ !== previous) {
      if (class_) {
        headings.push({ top, name: class_ });
      }
      top += class_ || !rows.length ? HEADING : 0;
      previous = class_;
    }
    rows.push({ ...own, top });
    top += height;
  }
  return { rows, headings, height, bottom: top };
}

// Names for each row: its class, or "" if a row is a whole class; the name of its machine, if this is the machine's
// first row; and its worker and slot, if the machine has several.
function rowNames(chart) {
  const { y, class: classes, machine: machines, worker: workers, slot: slots } =
    chart.series.find((series) => series.colour === "idle").columns;
  if (!machines) {
    return chart.axes[1].categories.map((name) => ({ class_: "", name, part: "" }));
  }
  const short = shortNames([...new Set(machines)]);
  const key = (row) => JSON.stringify([classes[row], machines[row]]);
  const [slotsOf, workersOf] = [new Map(), new Map()];
  for (const row of y) {
    slotsOf.set(key(row), (slotsOf.get(key(row)) ?? 0) + 1);
    workersOf.set(key(row), (workersOf.get(key(row)) ?? new Set()).add(workers?.[row]));
  }
  return y.map((row) => {
    const isFirst = row === 0 || key(row) !== key(row - 1);
    const isWorkersFirst = isFirst || workers?.[row] !== workers?.[row - 1];
    const worker = workersOf.get(key(row)).size > 1 && isWorkersFirst ? `${workers[row]} ` : "";
    const part = slots && slotsOf.get(key(row)) > 1 ? `${worker}${slots[row]}` : "";
    return { class_: classes[row], name: isFirst ? short.get(machines[row]) : "", part };
  });
}

// Map from each machine's whole name to its name without the domain, or to the whole name if short names are equal.
function shortNames(names) {
  const cut = names.map((name) => (/^[\d.:]+$/.test(name) ? name : name.split(".")[0] || name));
  const isClear = new Set(cut).size === names.length;
  return new Map(names.map((name, place) => [name, isClear ? cut[place] : name]));
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const greatest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function line(pen, x, y, toX, toY) {
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(toX, toY);
  pen.stroke();
}

function hatch(pen, left, top, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(left, top, width, height);
  pen.clip();
  for (let x = left - height; x < left + width; x += 5) {
    line(pen, x, top + height, x + height, top);
  }
  pen.restore();
  pen.strokeRect(left + 0.5, top + 0.5, Math.max(1, width - 1), height - 1);
}

// A bar with a pointed end, for an attempt that is still running.
function arrow(pen, left, top, width, height) {
  const right = left + Math.max(width, height / 2);
  const shoulder = right - height / 2;
  pen.beginPath();
  pen.moveTo(left, top);
  pen.lineTo(shoulder, top);
  pen.lineTo(right, top + height / 2);
  pen.lineTo(shoulder, top + height);
  pen.lineTo(left, top + height);
  pen.fill();
}

// Shorten a text by leaving out its middle, until it is at most `most` pixels wide.
function fitting(pen, text, most) {
  if (pen.measureText(text).width <= most) {
    return text;
  }
  let kept = text.length;
  const cut = () => `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
  while (kept > 1 && pen.measureText(cut()).width > most) {
    kept -= 1;
  }
  return cut();
}

function stepOf(seconds) {
  return STEPS.find((step) => step >= seconds) ?? DAY * Math.ceil(seconds / DAY);
}

function clock(seconds, step) {
  const date = new Date(1000 * seconds);
  if (step >= DAY) {
    return date.toLocaleDateString(undefined, { month: "short", day: "numeric" });
  }
  const parts = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (step < 60) {
    parts.second = "2-digit";
  }
  if (step < 1) {
    parts.fractionalSecondDigits = Math.ceil(-Math.log10(step));
  }
  return date.toLocaleTimeString(undefined, parts);
}
