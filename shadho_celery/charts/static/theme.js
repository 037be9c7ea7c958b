// Colours and symbols by meaning. The colours themselves are in style.css.

const COLOURS = 6;
const SYMBOLS = ["circle", "rect", "triangle", "diamond"];
// All other meanings are soft.
const MEANINGS = new Map([
  ["best", "ink"],
  ["loss", "ink"],
  ["predicted seconds", "ink"],
  ["bound", "muted"],
  ["other", "muted"],
  ["state FAILED", "failed"],
  ["state complete", "complete"],
  ["state infeasible", "infeasible"],
  ["rank", "complete"],
]);

// `classes` are the names of compute classes, the strongest first. All charts of a page use the same list, and a class
// that is not in it is added. If several studies are compared, each study has a colour of the same palette.
export function themeOf(element, classes) {
  const style = getComputedStyle(element);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  const lists = { class: classes, study: [] };
  // Index of a class or a study in its list; null for other meanings.
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
    // Colours of ranks, from the worst to the best.
    ranks: [named("line"), named("soft"), named("complete")],
    font: style.fontFamily,
    colourOf: (meaning) => {
      const place = placeOf(meaning);
      return named(place === null ? (MEANINGS.get(meaning) ?? "soft") : `class-${place % COLOURS}`);
    },
    // The seventh class has the colour of the first one, but another symbol, and so on.
    symbolOf: (meaning) => SYMBOLS[Math.floor((placeOf(meaning) ?? 0) / COLOURS) % SYMBOLS.length],
  };
}
