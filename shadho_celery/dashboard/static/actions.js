// Actions on running studies, trials and workers. Each asks for confirmation, and then shows the result.

import { ofStudy, post } from "/static/api.js";
import { element, printable } from "/pages/marks.js";

// Maximum length of the text of known points, in bytes; a request may have slightly more.
const MOST_POINTS = 900_000;

const said = document.getElementById("said");

// Show a line at the top of the page.
export const say = (line) => (said.textContent = printable(line));
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
    say((await result(() => act(asked))).line);
    made.disabled = false;
  });
  return made;
}

// Carry out an action. Return whether it was done, and its result or the reason as a line.
async function result(act) {
  try {
    const { is_done: isDone, text } = await act();
    return { isDone, line: isDone ? text : `refused: ${text}` };
  } catch (error) {
    return { isDone: false, line: error.message };
  }
}

// A button that opens a dialog with fields. `fields` returns the elements, and a function that returns the values
// entered. If the action is refused, the dialog stays open and shows the reason.
function asking(text, title, fields, act) {
  const opener = element("button", text, { type: "button", "aria-haspopup": "dialog" });
  opener.addEventListener("click", () => {
    const dialog = element("dialog", "", { "aria-labelledby": "asked" });
    const form = element("form", "", { novalidate: "" });
    const line = element("p", "", { class: "trouble", role: "status" });
    const go = element("button", text, { type: "submit" });
    const leave = element("button", "cancel", { type: "button" });
    const ends = element("p", "", { class: "ends" });
    const { parts, asked } = fields((reason) => (line.textContent = printable(reason)));
    ends.append(go, leave);
    form.append(element("h2", title, { id: "asked" }), ...parts, line, ends);
    dialog.append(form);
    document.body.append(dialog);
    const gone = new AbortController();
    addEventListener("hashchange", () => dialog.close(), { signal: gone.signal });
    leave.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      gone.abort();
      dialog.remove();
    });
    let isBusy = false;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (isBusy) {
        return;
      }
      isBusy = true;
      line.textContent = `${text} ...`;
      const found = await result(() => act(asked()));
      isBusy = false;
      line.textContent = printable(found.line);
      if (found.isDone) {
        say(found.line);
        dialog.close();
      }
    });
    dialog.showModal();
  });
  return opener;
}

// A labelled field with a line of help below it.
function field(label, help, input) {
  const made = element("div", "", { class: "field" });
  const id = `field-${label.replaceAll(" ", "-")}`;
  input.id = id;
  input.setAttribute("aria-describedby", `${id}-help`);
  made.append(element("label", label, { for: id }), input, element("p", help, { id: `${id}-help`, class: "soft" }));
  return made;
}

// Return the number in a text; if it is no number, return the text, which the server refuses with a message.
const numbered = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

function settingFields(changeable) {
  const inputs = changeable.map(({ name, value }) => {
    const input = element("input", "", { type: "text", inputmode: "decimal", autocomplete: "off" });
    input.value = value ?? "";
    return [name, input, input.value];
  });
  const parts = inputs.map(([name, input], index) => field(name.replaceAll("_", " "), changeable[index].help, input));
  const changed = () => inputs.filter(([, input, before]) => input.value.trim() !== "" && input.value !== before);
  const asked = () => Object.fromEntries(changed().map(([name, input]) => [name, numbered(input.value.trim())]));
  return { parts, asked };
}

function pointFields(tell) {
  const text = element("textarea", "", { rows: "6", spellcheck: "false" });
  const file = element("input", "", { type: "file" });
  file.addEventListener("change", async () => {
    const chosen = file.files[0];
    if (chosen && chosen.size > MOST_POINTS) {
      tell(`${chosen.name} has ${chosen.size} bytes; at most ${MOST_POINTS} can be sent`);
    } else if (chosen) {
      text.value = await chosen.text();
      tell("");
    }
  });
  const help = 'One JSON object a line, such as {"rate": 0.1}, or one list of them. Labels that are left out are proposed.';
  return { parts: [field("points", help, text), field("or a file", "It is read into the field above.", file)], asked: () => text.value };
}

function noteFields() {
  const text = element("textarea", "", { rows: "4" });
  return { parts: [field("note", "It is shown with your name, and cannot be changed.", text)], asked: () => text.value };
}

// Name of an argument -> function that makes the fields for it.
const FIELDS = { points: pointFields, text: noteFields, settings: (tell, { changeable }) => settingFields(changeable) };

// The button for an action that the server describes. Its request is sent to `path`; `facts` describe the study.
function actionButton(path, { text, question, request, field: argument }, facts) {
  if (argument === null) {
    return button(text, () => agreed(question), () => post(path, request));
  }
  const send = (found) => post(path, { ...request, [argument]: found });
  return asking(text, question, (tell) => FIELDS[argument](tell, facts), send);
}

export const studyActions = (name, actions, facts) =>
  actions.map((each) => actionButton(ofStudy(name, "/action"), each, facts));

export const workerActions = (actions) => actions.map((each) => actionButton("/api/worker/action", each));
