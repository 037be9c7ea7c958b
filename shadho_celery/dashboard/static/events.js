// The events of a study. A stream that is lost is opened again, and the page says so until it is there.

import { get, ofStudy } from "/static/api.js";
import { printable } from "/pages/marks.js";

// Milliseconds after which a silent stream counts as lost: the server says every 15 s that it lives.
const SILENT = 40000;
// Milliseconds between two looks at the stream, and until it is opened again, which grow.
const LOOK = 5000;
const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 30000;

const line = document.getElementById("connection");

// Say that what is shown may be old, and why; or with "" that it is not.
export function sayLost(why) {
  const text = why && printable(`What is shown may be old. ${why} Trying again ...`);
  if (line.textContent !== text) {
    line.textContent = text;
  }
}

// Calls `changed` with the number of each change of the study. It is called with null when the stream was lost meanwhile.
export function listen(name, signal, changed) {
  const stream = new Stream(name, changed);
  const ending = { signal };
  addEventListener("online", () => stream.wake(), ending);
  addEventListener("pageshow", () => stream.wake(), ending);
  document.addEventListener("visibilitychange", () => document.hidden || stream.wake(), ending);
  const timer = setInterval(() => stream.look(), LOOK);
  signal.addEventListener("abort", () => {
    clearInterval(timer);
    stream.end();
  });
  stream.open();
}

class Stream {
  constructor(name, changed) {
    Object.assign(this, { name, changed, events: null, timer: null, heard: 0, pause: FIRST_PAUSE });
    this.wasLost = false;
    this.isOver = false;
  }

  open() {
    this.close();
    this.heard = Date.now();
    this.events = new EventSource(ofStudy(this.name, "/events"));
    this.events.addEventListener("message", (event) => this.hear(event.data));
    this.events.addEventListener("trouble", (event) => this.hearTrouble(event.data));
    this.events.addEventListener("error", () => this.lose());
  }

  hear(change) {
    this.heard = Date.now();
    this.pause = FIRST_PAUSE;
    if (this.wasLost) {
      this.wasLost = false;
      sayLost("");
      this.changed(null);
    }
    this.changed(change);
  }

  // The dashboard is there, but its store cannot be read.
  hearTrouble(why) {
    this.heard = Date.now();
    this.wasLost = true;
    sayLost(`${why}.`);
  }

  // The browser opens a stream again only after some errors, and does not say which one it was.
  async lose(why) {
    this.close();
    if (why) {
      sayLost(why);
    }
    this.wasLost = true;
    this.timer = setTimeout(() => this.open(), this.pause);
    this.pause = Math.min(2 * this.pause, LONGEST_PAUSE);
    try {
      await get(ofStudy(this.name));
    } catch (error) {
      if (this.wasLost && !this.isOver) {
        sayLost(error.message);
      }
    }
  }

  look() {
    if (this.events && Date.now() - this.heard > SILENT) {
      this.lose("The dashboard is silent.");
    }
  }

  // The reader has come back: do not wait for the next look.
  wake() {
    if (!this.events) {
      this.open();
    } else {
      this.look();
    }
  }

  end() {
    this.isOver = true;
    this.close();
    sayLost("");
  }

  close() {
    clearTimeout(this.timer);
    this.events?.close();
    this.events = null;
  }
}
