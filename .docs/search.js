// What Sphinx's search does otherwise here; it is added to language_data.js, which the page of the search loads.

const stems = (text) => {
  const stemmer = new Stemmer();
  const words = splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word));
  return words.map((word) => stemmer.stemWord(word));
};

// Words in the title of a page count most, then words in headings, then others. Recipes come before other pages with the
// same words, the reference after them, and pages of the project last.
Scorer.title = 10;
Scorer.score = ([name, title, , , score]) => {
  const asked = new Set(stems(new URLSearchParams(location.search).get("q")));
  const inTitle = stems(title).filter((word) => asked.has(word)).length;
  const place = { recipes: 3, reference: -3, changes: -100, contributing: -100, tests: -100, data: -100 };
  return score + 8 * inTitle + (name === "recipes/index" ? 0 : (place[name.split("/")[0]] ?? 0));
};

// A page needs half of the words that the best page has, not all, because a question has words that its answer lacks.
const findAll = Search.performTermsSearch;
Search.performTermsSearch = (words, excluded) => {
  const found = {};
  for (const word of words)
    for (const result of findAll(new Set([word]), excluded)) (found[result[0]] ??= []).push(result);
  const most = Math.max(...Object.values(found).map((results) => results.length));
  return Object.values(found)
    .filter((results) => 2 * results.length >= most)
    .map((results) => results[0].with(4, results.reduce((sum, result) => sum + result[4], 0)));
};

// Excerpts are made from pages.js (see conf.py), because a page that was opened from a file cannot fetch other files.
const pages = new Promise((loaded) => {
  const script = document.createElement("script");
  script.onload = () => loaded(PAGES);
  script.src = "pages.js";
  document.head.append(script);
});
window.fetch = async (url) => new Response((await pages)[url.replace("./", "")]);
