// The page of one replica: it shows the snapshots of fleet/stream, one a second, while it is visible.
//
//     fleet/stream ──history──> traffic.js
//     fleet/stream ──snapshot──> traffic.js, fleet.js, agreement.js
//     decisions, prefixes ──> decisions.js      clients ──> clients.js
//
// The part of the URL after # is the view, or decisions/REQUEST_ID: reload, back and links lead there.

import * as decisions from "./decisions.js";
import * as fleet from "./fleet.js";
import * as agreement from "./agreement.js";
import { ask, follow as followEvents, onKey } from "./asking.js";
import * as clients from "./clients.js";
import { cell, find, say } from "./table.js";
import * as traffic from "./traffic.js";

const AGAIN_MS = 2000;
// A stream that is silent for so long is broken: a proxy may keep its end open.
const SILENT_MS = 5000;
// The list of decisions, and that of clients, are asked for at most so often.
const LIST_MS = 2000;

let snapshot = null;
let stream = null;
let silence = 0;
let listed = { at: 0, requests: -1 };
let askedAt = 0; // for clients
let reasonsShown = "";

const isShown = (view) => !find(view).hidden;

function connect() {
  disconnect();
  if (document.hidden) return;
  const opened = (stream = new AbortController());
  followEvents("fleet/stream", receive, opened.signal).catch((error) => {
    // a stream that was replaced may end later
    if (stream === opened) lost(error instanceof TypeError ? "no answer from the replica" : error.message);
  });
  silence = setTimeout(() => lost("the replica is silent"), SILENT_MS);
}

function receive(name, data) {
  const began = performance.now();
  if (name === "history") return traffic.begin(JSON.parse(data));
  take(JSON.parse(data));
  document.dispatchEvent(new CustomEvent("drawn", { detail: performance.now() - began }));
}

function disconnect() {
  stream?.abort();
  stream = null;
  clearTimeout(silence);
}

function lost(text) {
  report(text, "bad");
  disconnect();
  if (find("key").hidden) silence = setTimeout(connect, AGAIN_MS);
}

function take(received) {
  clearTimeout(silence);
  silence = setTimeout(() => lost("the replica is silent"), SILENT_MS);
  const { columns, rows } = received.targets;
  const row = (values) => {
    const made = {}; // a loop: of a thousand rows, Object.fromEntries takes half of the time
    for (let at = 0; at < columns.length; at += 1) made[columns[at]] = values[at];
    return made;
  };
  snapshot = { ...received, targets: rows.map(row) };
  traffic.remember(snapshot);
  fleet.remember(snapshot);
  draw();
}

function draw() {
  report(snapshot.status, snapshot.status === "ready" ? "good" : "bad");
  const weight = snapshot.weight ? `, weight ${snapshot.weight}` : "";
  const routing = snapshot.mode ? `mode ${snapshot.mode}${weight}` : "no pool yet";
  say(find("replica"), `replica ${snapshot.router_id}, version ${snapshot.version}, ${routing}`);
  const reasons = snapshot.reasons.join("\n");
  if (reasonsShown !== reasons) find("reasons").replaceChildren(...snapshot.reasons.map((reason) => cell(reason, "li")));
  reasonsShown = reasons;
  if (isShown("fleet")) fleet.draw();
  if (isShown("traffic")) traffic.draw(find("plots"));
  if (isShown("agreement")) agreement.draw(snapshot);
  if (isShown("decisions")) drawDecisions();
  if (isShown("clients")) drawClients();
}

function report(text, kind) {
  say(find("status"), text);
  find("status").className = kind;
}

function failed(error) {
  say(find("why"), error.message);
  find("why").className = "bad";
  find("explained").hidden = true;
}

function drawDecisions() {
  const { requests } = snapshot.traffic;
  if (listed.requests === requests || performance.now() - listed.at < LIST_MS) return;
  listed = { at: performance.now(), requests };
  decisions.drawList(ask, explain).catch(failed);
}

function drawClients() {
  if (performance.now() - askedAt < LIST_MS) return;
  askedAt = performance.now();
  clients.draw(ask).catch((error) => (find("asking").textContent = error.message));
}

function explain(requestId) {
  history.replaceState(null, "", `#decisions/${encodeURIComponent(requestId)}`);
  find("why").className = "";
  say(find("asked"), requestId);
  decisions.explain(ask, requestId).catch(failed);
}

const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const one of tabs) {
    const isOne = one === tab;
    one.setAttribute("aria-selected", isOne);
    one.tabIndex = isOne ? 0 : -1;
    find(one.getAttribute("aria-controls")).hidden = !isOne;
  }
  listed = { at: 0, requests: -1 };
  askedAt = 0;
  if (snapshot) draw();
  if (isShown("prefixes")) decisions.drawPrefixes(ask).catch((error) => (find("sample").textContent = error.message));
}

function press(tab) {
  history.pushState(null, "", `#${tab.getAttribute("aria-controls")}`);
  show(tab);
}

// Show what the URL names.
function follow() {
  const [view, name] = location.hash.slice(1).split("/");
  show(tabs.find((tab) => tab.getAttribute("aria-controls") === view) ?? tabs[0]);
  if (!isShown("decisions") || !name) return;
  const requestId = decoded(name);
  find("request").value = requestId;
  explain(requestId);
}

// A link that was cut may end within an escape (%E).
function decoded(name) {
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
}

tabs.forEach((tab, at) => {
  tab.addEventListener("click", () => press(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(at + step + tabs.length) % tabs.length];
    press(next);
    next.focus();
  });
});

// Colours: as the browser is set, or as chosen here.
const THEMES = { auto: "light dark", light: "light", dark: "dark" };
const drawAgain = () => isShown("traffic") && traffic.draw(find("plots"), true);

function use(theme) {
  document.documentElement.style.colorScheme = THEMES[theme];
  find("theme").value = theme;
  drawAgain();
}

// Browsers that keep nothing raise an error.
function kept() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

function choose(theme) {
  use(theme);
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // it holds until the page is closed
  }
}

find("theme").addEventListener("change", () => choose(find("theme").value));
find("span").addEventListener("change", () => traffic.draw(find("plots")));
find("request").addEventListener("change", () => find("request").value && explain(find("request").value.trim()));
window.addEventListener("resize", drawAgain);
window.addEventListener("popstate", follow);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
use(kept() in THEMES ? kept() : "auto");
onKey(() => {
  follow();
  connect();
});
follow();
connect();
