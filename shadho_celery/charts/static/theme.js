// Colours and symbols by meaning. The colours themselves are in style.css.

const COLOURS = 6;
const SYMBOLS = ["circle", "rect", "triangle", "diamond"];
const MEANINGS = new Map([
  ["best", "ink"],
  ["loss", "ink"],
  ["predicted seconds", "ink"],
  ["seconds", "soft"],
  ["backlog", "soft"],
  ["bound", "muted"],
  ["other", "muted"],
  ["state FAILED", "failed"],
]);

// `classes` are the names of compute classes in order, the strongest first. One list is used for all charts of a page:
// a class that is not on it is added. Where several studies are compared, a study has a colour of the same palette.
export function themeOf(element, classes) {
  const style = getComputedStyle(element);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  const lists = { class: classes, study: [] };
  // Place of a class or a study in its list; null for other meanings.
  const placeOf = (meaning) => {
    const [, kind, name] = /^(class|study) (.*)$/s.exec(meaning) ?? [];
    if (kind === undefined) {
      return null;
    }
    if (!lists[kind].includes(name)) {
      lists[kind].push(name);
    }
    return lists[kind].indexOf(name);
  };
  return {
    ground: named("ground"),
    ink: named("ink"),
    muted: named("muted"),
    line: named("line"),
    failed: named("failed"),
    font: style.fontFamily,
    colourOf: (meaning) => {
      const place = placeOf(meaning);
      return named(place === null ? (MEANINGS.get(meaning) ?? "soft") : `class-${place % COLOURS}`);
    },
    // From the seventh class on, colours repeat with another symbol.
    symbolOf: (meaning) => SYMBOLS[Math.floor((placeOf(meaning) ?? 0) / COLOURS) % SYMBOLS.length],
  };
}
