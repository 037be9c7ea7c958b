// Login, routes and the line at the top.

import { say } from "/static/actions.js";
import { Refused, post } from "/static/api.js";
import { element } from "/pages/marks.js";
import { showFleet } from "/static/fleet.js";
import { showCompare, showStudies } from "/static/studies.js";
import { showPlacement, showStudy } from "/static/study.js";
import { showTrial } from "/static/trial.js";
import { showTrials } from "/static/trials.js";

// The function of a page gets its place, the parts of its address, and a signal that aborts when the reader leaves
// the page. The parts are decoded, and are shown only as text.
const ROUTES = [
  [/^\/?$/, showStudies],
  [/^\/fleet(?:\?(.*))?$/, showFleet],
  [/^\/compare\/(.+)$/, showCompare],
  [/^\/study\/([^/]+)$/, showStudy],
  [/^\/study\/([^/]+)\/trials(?:\?(.*))?$/, showTrials],
  [/^\/study\/([^/]+)\/trial\/(\d+)$/, showTrial],
  [/^\/study\/([^/]+)\/placement$/, showPlacement],
];

const main = document.getElementById("main");
const place = document.getElementById("place");
let leaving = new AbortController();

async function open() {
  const hash = location.hash.slice(1);
  let refused = "";
  if (hash && !hash.startsWith("/")) {
    // This is the code in the printed address. Remove it from the address before any other request.
    history.replaceState(null, "", "/#/");
    try {
      await post("/login", { code: hash });
    } catch (error) {
      // This browser may already be logged in.
      refused = error.message;
    }
  }
  leaving.abort();
  leaving = new AbortController();
  main.replaceChildren();
  place.replaceChildren();
  say("");
  document.title = "shadho_celery";
  const path = location.hash.slice(1);
  for (const [pattern, show] of ROUTES) {
    const found = decoded(pattern.exec(path));
    if (found) {
      await shown(show, found, refused);
      return;
    }
  }
  lead("There is no such page", "");
}

// Say that a page does not exist, with links to pages that do.
function lead(title, why) {
  document.title = `${title} – shadho_celery`;
  const links = element("p");
  links.append("See the ", element("a", "studies", { href: "#/" }), " of this store, or the ", element("a", "fleet", { href: "#/fleet" }), ".");
  main.replaceChildren(element("h1", title), ...(why ? [element("p", why)] : []), links);
}

// Return the decoded parts of an address that matches a page, or null.
function decoded(found) {
  try {
    return found && found.slice(1).map((part) => decodeURIComponent(part ?? ""));
  } catch {
    return null;
  }
}

async function shown(show, parts, refused) {
  const { signal } = leaving;
  const slow = setTimeout(() => say("Reading the store ..."), 500);
  const ready = () => {
    clearTimeout(slow);
    say("");
  };
  try {
    await show({ main, place, signal, ready }, ...parts);
    ready();
  } catch (error) {
    if (signal.aborted) {
      return;
    }
    if (!(error instanceof Refused)) {
      throw error;
    }
    if (error.status === 404) {
      say("");
      lead("There is no such study", error.message);
      return;
    }
    say((error.status === 401 && refused) || error.message);
    if (error.status === 401) {
      main.replaceChildren(
        element("h1", "Not logged in"),
        element("p", "Open the address that shadho-celery dashboard printed last, or start it again for a new one."),
      );
    }
  } finally {
    clearTimeout(slow);
  }
}

// The link that skips to the content must not change the hash, which is the address of the page.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", open);
open();
