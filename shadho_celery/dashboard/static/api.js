// Requests to the dashboard's server. Every answer is JSON, and every failure is one line.

export class Refused extends Error {
  constructor(status, line) {
    super(line);
    this.status = status;
  }
}

export async function get(path, query = {}) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));
  const text = asked.toString();
  return answered(await reached(fetch(text ? `${path}?${text}` : path)));
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
    throw new Refused(0, "the dashboard does not answer; is it still running?");
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
