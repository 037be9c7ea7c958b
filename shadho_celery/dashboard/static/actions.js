// Actions on a running study and on workers. Each asks first, and says what has become of it.

import { ofStudy, post } from "/static/api.js";
import { element, printable } from "/pages/marks.js";

const said = document.getElementById("said");

const say = (line) => (said.textContent = printable(line));
const agreed = (words) => confirm(printable(words));

function button(text, question, act) {
  const made = element("button", text, { type: "button" });
  made.addEventListener("click", async () => {
    const asked = question();
    if (!asked) {
      return;
    }
    made.disabled = true;
    say(`${text} ...`);
    try {
      const { is_done: isDone, text: what } = await act(asked);
      say(isDone ? what : `refused: ${what}`);
    } catch (error) {
      say(error.message);
    } finally {
      made.disabled = false;
    }
  });
  return made;
}

const onStudy = (name, asked) => post(ofStudy(name, "/action"), asked);

// A whole number that the reader gives, or null; what is none is said.
function askNumber(words, known) {
  const text = prompt(printable(words), String(known ?? ""));
  const isOne = text === null || /^\s*[1-9]\d{0,8}\s*$/.test(text);
  if (!isOne) {
    say(`${text} is not a whole number from 1`);
  }
  return text === null || !isOne ? null : Number(text);
}

export function studyActions(name, { state, asked }) {
  const simple = (action, words) => button(action, () => agreed(words), () => onStudy(name, { action }));
  if (state === "stopping") {
    return [];
  }
  return [
    state === "paused"
      ? simple("unpause", `Start trials of ${name} again?`)
      : simple("pause", `Start no more trials of ${name} until it is unpaused? Its running trials finish.`),
    simple("stop", `End ${name} once its running trials have finished?`),
    button(
      "set trials",
      () => askNumber(`Run ${name} until it has how many trials?`, asked),
      (trials) => onStudy(name, { action: "set", trials }),
    ),
  ];
}

export const cancelAction = (name, number) =>
  button("cancel", () => agreed(`Stop trial ${number} of ${name}?`), () => onStudy(name, { action: "cancel", number }));

export function workerAction(worker, isDrained) {
  const action = isDrained ? "undrain" : "drain";
  const words = isDrained ? `Let ${worker} take trials again?` : `Let ${worker} finish its trials and take no more?`;
  return button(action, () => agreed(words), () => post("/api/worker/action", { action, worker }));
}
