// Asks the replica, with the operators' key if it needs one.
//
//     a request ──401──> the page asks for the key ──> kept as long as this tab is open, sent with each request
//
// Events are read from a fetch, as an EventSource sends no header.

import { find } from "./table.js";

const NAME = "kvrouter-admin-key";
const ANSWER_MS = 5000;

// Browsers that keep nothing raise an error; then the key holds until the page is closed.
let key = "";
try {
  key = sessionStorage.getItem(NAME) ?? "";
} catch {
  key = "";
}

function use(given) {
  key = given;
  try {
    sessionStorage.setItem(NAME, given);
  } catch {
    // see above
  }
}

// Calls `again` once the user has given a key.
export function onKey(again) {
  find("key").addEventListener("submit", (event) => {
    event.preventDefault();
    use(find("given-key").value.trim());
    find("given-key").value = "";
    find("key").hidden = true;
    again();
  });
}

async function request(path, signal) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { headers, signal, cache: "no-store" });
  if (response.ok) return response;
  if (response.status === 401) find("key").hidden = false;
  const body = await response.json().catch(() => ({}));
  throw new Error(body.error?.message ?? `status ${response.status}`);
}

// The JSON at this path.
export async function ask(path) {
  return (await request(path, AbortSignal.timeout(ANSWER_MS))).json();
}

// Calls `take(name, data)` for each event until the stream ends or `signal` aborts it; the error says why.
export async function follow(path, take, signal) {
  const { body } = await request(path, signal);
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the replica ended the stream");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) take(...parsed(event));
  }
}

function parsed(event) {
  const fields = Object.fromEntries(event.split("\n").map((line) => line.split(/: (.*)/s)));
  return [fields.event ?? "message", fields.data ?? ""];
}
