// Requests to the dashboard's server. Answers are JSON; a failure throws `Refused` with a message in one line.

export class Refused extends Error {
  constructor(status, line) {
    super(line);
    this.status = status;
  }
}

// Address -> request that `ask` has already made.
const early = new Map();

export async function get(path, query = {}) {
  const address = addressOf(path, query);
  const request = early.get(address) ?? fetch(address);
  early.delete(address);
  return answered(await reached(request));
}

// Make a request now, whose answer the next `get` of the same address will return.
export function ask(path, query = {}) {
  const request = fetch(addressOf(path, query));
  early.set(addressOf(path, query), request);
  request.catch(() => {});
}

function addressOf(path, query) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));
  return asked.size ? `${path}?${asked}` : path;
}

export async function post(path, body) {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  return answered(await reached(fetch(path, options)));
}

export const ofStudy = (name, rest = "") => `/api/study/${encodeURIComponent(name)}${rest}`;

async function reached(request) {
  try {
    return await request;
  } catch {
    throw new Refused(0, "The dashboard does not answer.");
  }
}

async function answered(response) {
  if (response.headers.get("content-type")?.startsWith("application/json")) {
    const found = await response.json();
    if (response.ok) {
      return found;
    }
    throw new Refused(response.status, found.error ?? response.statusText);
  }
  throw new Refused(response.status, (await response.text()).trim() || response.statusText);
}
