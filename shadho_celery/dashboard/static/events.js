// The events of a study. If the stream is lost, it is opened again, and the page says so until it works.

import { get, ofStudy } from "/static/api.js";
import { printable } from "/pages/marks.js";

// Milliseconds without an event after which a stream counts as lost; the server sends one at least every 15 s.
const SILENT = 40000;
// Milliseconds between two checks of the stream; and until it is opened again: the first pause, and the longest.
const LOOK = 5000;
const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 30000;

const line = document.getElementById("connection");

// Show that the page may be out of date, and why; "" removes the message.
export function sayLost(why) {
  const text = why && printable(`What is shown may be old. ${why} Trying again ...`);
  if (line.textContent !== text) {
    line.textContent = text;
  }
}

// Call `changed` with the number of each change of the study, and with null after the stream was lost.
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

  // The dashboard answers, but cannot read its store.
  hearTrouble(why) {
    this.heard = Date.now();
    this.wasLost = true;
    sayLost(`${why}.`);
  }

  // Open the stream again, which the browser does only after some errors. Request the study to learn the reason.
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

  // The reader has come back to the page, so do not wait for the next check.
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
