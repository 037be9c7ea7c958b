// The log of a trial, which is updated while the trial runs.

import { get, ofStudy } from "/static/api.js";
import { element, printable } from "/pages/marks.js";

// Milliseconds between two requests, and after a request that failed.
const PAUSE = 1000;
const LONG_PAUSE = 5000;
// Maximum number of characters on the page.
const MOST = 300000;
const CUT = "Earlier output is left out here; shadho-celery logs prints all that is kept.";

// Show the log in `parent`, and update it until the trial has ended or the reader leaves the page.
export function followLog(parent, name, number, signal) {
  new Log(parent, name, number, signal).follow();
}

class Log {
  constructor(parent, name, number, signal) {
    this.signal = signal;
    this.isFollowed = false;
    this.path = ofStudy(name, `/trial/${number}/log`);
    this.attempt = 0;
    this.end = 0;
    this.isLatest = true;
    this.line = element("p", "", { class: "soft" });
    this.box = element("pre", "", { class: "log", tabindex: "0", role: "region", "aria-label": `Log of trial ${number}`, hidden: "" });
    this.text = document.createTextNode("");
    this.box.append(this.text);
    this.choice = element("select");
    this.chosen = element("label", "attempt ", { hidden: "" });
    this.chosen.append(this.choice);
    this.choice.addEventListener("change", () => {
      this.choose(Number(this.choice.value));
      this.follow();
    });
    parent.append(element("h2", "Log"), this.chosen, this.line, this.box);
  }

  async follow() {
    if (this.isFollowed) {
      return;
    }
    this.isFollowed = true;
    // After the trial has ended, request the log once more, because it may have been read before its end.
    for (let last = 0; last < 2 && !this.signal.aborted; ) {
      let pause = PAUSE;
      if (!document.hidden) {
        try {
          last = (await this.ask()) ? 0 : last + 1;
        } catch (error) {
          this.line.textContent = printable(error.message);
          pause = LONG_PAUSE;
        }
      }
      await new Promise((done) => setTimeout(done, pause));
    }
    this.isFollowed = false;
  }

  // Request the new part of the log. Return whether the trial runs.
  async ask() {
    const asked = this.attempt;
    const found = await get(this.path, { attempt: asked || "", after: this.end });
    if (asked !== this.attempt) {
      return true;
    }
    this.offer(found.attempts);
    if (this.isLatest && found.attempt < found.attempts) {
      this.choose(found.attempts);
      return true;
    }
    this.attempt = found.attempt;
    this.put(found);
    return found.is_live;
  }

  // Append the new text. If the text before it is missing, show only the new text.
  put({ text: found, start, end, why }) {
    const text = printable(found);
    const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 8;
    const isWhole = start !== this.end || !this.end;
    let all = isWhole ? text : this.text.data + text;
    let isCut = isWhole ? start > 0 : this.isCut;
    if (all.length > MOST) {
      all = all.slice(all.indexOf("\n", all.length - MOST) + 1);
      isCut = true;
    }
    if (all !== this.text.data) {
      this.text.data = all;
    }
    this.end = end;
    this.isCut = isCut;
    this.box.hidden = !all;
    this.line.textContent = printable([why, isCut ? CUT : ""].filter(Boolean).join(" "));
    if (isAtEnd) {
      this.box.scrollTop = this.box.scrollHeight;
    }
  }

  offer(count) {
    this.chosen.hidden = count < 2;
    while (this.choice.options.length < count) {
      this.choice.append(element("option", String(this.choice.options.length + 1)));
    }
    this.choice.value = String(this.attempt || count);
  }

  choose(attempt) {
    this.isLatest = attempt === this.choice.options.length;
    this.choice.value = String(attempt);
    this.attempt = attempt;
    this.end = 0;
    this.text.data = "";
  }
}
