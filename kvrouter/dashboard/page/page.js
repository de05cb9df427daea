// The page of one replica. It asks for /fleet once a second while it is visible, and shows what it gets.
// Everything from the server becomes a text node: names of workers and models are not trusted.

import * as traffic from "./traffic.js";

const INTERVAL_MS = 1000;
// A table of more rows than this is slow to draw; the filter finds the others.
const MOST_ROWS = 200;
const find = (id) => document.getElementById(id);

const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));
const share = (value) => (value === null || Number.isNaN(value) ? "–" : `${Math.round(value * 100)} %`);
const seconds = (value) => (value === null || Number.isNaN(value) ? "–" : `${Math.round(value * 1000)} ms`);

// Each column: its title, its value to sort by, and how to show it.
const TARGETS = [
  ["Target", (row) => `${row.worker}/${row.rank}`, String],
  ["Pool", (row) => row.pool, String],
  ["State", (row) => (row.eligible ? row.state : `${row.state}, not eligible`), String],
  ["In flight", (row) => row.requests, number],
  ["Running", (row) => row.running, number],
  ["Waiting", (row) => row.waiting, number],
  ["KV usage", (row) => row.kv_usage, share],
  ["Active blocks", (row) => row.active_blocks, number],
  ["Prefill tokens", (row) => row.charged_prefill_tokens, number],
  ["Cached blocks", (row) => row.blocks, number],
  ["Mean TTFT", (row) => (row.ttft_count ? row.ttft_sum_s / row.ttft_count : null), seconds],
  ["Answers", (row) => row.answers, number],
  ["Errors", (row) => row.errors, number],
  ["Lag", (row) => row.lag_frames, number],
  ["Problems", (row) => row.problems.join("; "), String],
];
const PEERS = [
  ["Replica", (row) => row.router_id + (row.is_me ? " (this one)" : ""), String],
  ["Admin URL", (row) => row.url, String],
  ["Silent rounds", (row) => row.silent_rounds, number],
  ["Requests in flight", (row) => row.bookings, number],
  ["Lag in frames", (row) => row.lag_frames, number],
  ["In step", (row) => (row.live === null ? null : row.live ? "yes" : "no"), (value) => value ?? "–"],
  ["Digests that differed", (row) => row.digest_mismatches, number],
  ["Routing revision", (row) => row.revision, number],
];
const PREFIXES = [
  ["Last shared block", (row) => row.hash, String],
  ["Model", (row) => row.model, String],
  ["Blocks", (row) => row.blocks, number],
  ["Requests", (row) => row.requests, number],
  ["Held by", (row) => row.holders.join(", "), String],
];
const DECISIONS = [
  ["Request", (row) => row.request_id, String],
  ["Time", (row) => row.time, (value) => new Date(value * 1000).toLocaleTimeString()],
  ["Model", (row) => row.model, String],
  ["Mode", (row) => row.mode, String],
  ["Prompt tokens", (row) => row.isl, number],
  ["Target", (row) => row.winner, String],
  ["Overlap blocks", (row) => row.overlap_blocks, number],
  ["Candidates", (row) => row.candidates, number],
];

// Figures of the last minute are differences to the oldest of these snapshots' totals.
const MINUTE_S = 60;
let past = [];

let fleet = null;
let sorted = { column: 0, descending: false };

function cell(content, tag = "td") {
  const made = document.createElement(tag);
  made.append(content);
  return made;
}

function fill(table, columns, rows, options = {}) {
  const head = document.createElement("tr");
  columns.forEach(([title], at) => head.append(options.heading ? options.heading(title, at) : cell(title, "th")));
  const lines = rows.map((row) => {
    const line = document.createElement("tr");
    columns.forEach(([, value, show], at) => {
      const text = show(value(row));
      const made = cell(at === 0 && options.press ? button(text, () => options.press(row)) : text);
      if (text.length > 40) made.title = text; // long ones are cut off
      line.append(made);
    });
    line.className = options.mark?.(row) ?? "";
    return line;
  });
  table.replaceChildren(head, ...lines);
}

function button(text, press) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", press);
  return made;
}

function heading(title, at) {
  const made = cell(button(title, () => sortBy(at)), "th");
  if (at === sorted.column) made.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
  return made;
}

function sortBy(column) {
  sorted = { column, descending: column === sorted.column && !sorted.descending };
  drawTargets();
  find("targets").querySelectorAll("th button")[column].focus();
}

function drawTargets() {
  const value = TARGETS[sorted.column][1];
  const wanted = find("filter").value.toLowerCase();
  const rows = fleet.targets.filter((row) =>
    [row.worker, row.pool, row.state, ...row.problems].some((text) => text.toLowerCase().includes(wanted)));
  const order = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : (a ?? -1) - (b ?? -1));
  rows.sort((a, b) => order(value(a), value(b)) * (sorted.descending ? -1 : 1));
  find("shown").textContent = `${Math.min(rows.length, MOST_ROWS)} of ${fleet.targets.length} targets`;
  const focused = [...find("targets").querySelectorAll("th button")].indexOf(document.activeElement);
  fill(find("targets"), TARGETS, rows.slice(0, MOST_ROWS), {
    heading,
    mark: (row) => (row.eligible ? "" : "ill"),
  });
  if (focused >= 0) find("targets").querySelectorAll("th button")[focused].focus();
}

function sum(rows, value) {
  return rows.reduce((total, row) => total + (value(row) ?? 0), 0);
}

function remember() {
  const { time, started_s: started, traffic } = fleet;
  if (past.length && past[0].started !== started) past = []; // it has restarted: its totals begin at 0
  past.push({ time, started, requests: traffic.requests, counts: traffic.ttft.counts });
  while (time - past[0].time > MINUTE_S) past.shift();
}

// Requests a second, and times to first token that a share of them did not exceed: bounds of a histogram.
function lastMinute() {
  const { bounds_s: bounds, counts } = fleet.traffic.ttft;
  const [first] = past;
  const between = fleet.time - first.time;
  const own = counts.map((count, at) => count - first.counts[at]);
  const total = own.reduce((a, b) => a + b, 0);
  const within = (wanted) => {
    if (!total) return "–";
    let below = 0;
    const at = own.findIndex((count) => (below += count) >= wanted * total);
    return at < bounds.length ? `≤ ${seconds(bounds[at])}` : `> ${seconds(bounds.at(-1))}`;
  };
  const rate = between ? ((fleet.traffic.requests - first.requests) / between).toFixed(1) : "–";
  return { "Requests a second": rate, "TTFT, median": within(0.5), "TTFT, 95 %": within(0.95) };
}

function drawFigures() {
  const tokens = sum(fleet.pools, (pool) => pool.reusable_tokens);
  const cached = (name) => (tokens ? 1 - sum(fleet.pools, (pool) => pool.uncached_tokens[name]) / tokens : null);
  const figures = {
    "Eligible targets": `${sum(fleet.pools, (pool) => pool.eligible)} of ${fleet.targets.length}`,
    "Requests in flight": number(sum(fleet.targets, (row) => row.requests)),
    Queued: number(sum(fleet.pools, (pool) => pool.queue)),
    ...lastMinute(),
    "Requests since the start": number(fleet.traffic.requests),
    Failed: number(fleet.traffic.failed),
    "Prompt tokens cached": share(cached("chosen")),
    "In one shared cache": share(cached("pooled")),
  };
  find("figures").replaceChildren(...Object.entries(figures).map(([title, text]) => {
    const one = document.createElement("div");
    one.append(cell(title, "dt"), cell(text, "dd"));
    return one;
  }));
}

function draw() {
  report(fleet.status, fleet.status === "ready" ? "good" : "bad");
  const routing = fleet.mode ? `mode ${fleet.mode}${fleet.weight ? `, weight ${fleet.weight}` : ""}` : "no pool yet";
  find("replica").textContent = `replica ${fleet.router_id}, version ${fleet.version}, ${routing}`;
  find("reasons").replaceChildren(...fleet.reasons.map((reason) => cell(reason, "li")));
  drawFigures();
  if (!find("fleet").hidden) drawTargets();
  if (!find("traffic").hidden) traffic.draw(find("plots"));
  if (!find("replicas").hidden) fill(find("peers"), PEERS, fleet.replicas);
}

function report(text, kind) {
  find("status").textContent = text;
  find("status").className = kind;
}

async function ask(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(5000) });
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

async function drawDecisions() {
  const { decisions } = await ask("decisions?limit=50");
  fill(find("list"), DECISIONS, decisions, { press: (row) => explain(row.request_id).catch(lost) });
}

async function drawPrefixes() {
  const { read, cached, prefixes } = await ask("prefixes");
  find("sample").textContent =
    `A sample: of the last ${number(read)} decisions of this replica, ${number(cached)} found a prefix in the chosen ` +
    "target's cache. Counted by the last block found; at most 50 are shown.";
  fill(find("shared"), PREFIXES, prefixes);
}

async function explain(requestId) {
  const { decisions } = await ask(`decisions/${encodeURIComponent(requestId)}`);
  const decision = decisions.at(-1);
  const name = (one) => `${one.worker_id}/${one.dp_rank}`;
  const terms = [...new Set(decision.candidates.flatMap((one) => Object.keys(one.terms)))];
  const columns = [
    ["Candidate", name, String],
    ["Overlap blocks", (one) => one.overlap_blocks, number],
    ["In flight", (one) => one.requests, number],
    ...terms.map((term) => [term, (one) => one.terms[term], number]),
  ];
  find("asked").textContent = requestId;
  find("why").textContent = why(decision);
  fill(find("candidates"), columns, decision.candidates, {
    mark: (one) => (name(one) === decision.winner ? "chosen" : ""),
  });
}

function why(decision) {
  const removed = decision.removed.map((one) => `${one.worker_id}/${one.dp_rank} was no candidate: ${one.by}.`);
  const when = decision.terms_of === "now" ? " Its terms are computed from the tables as they are now." : "";
  const ties = decision.ties.length > 1 ? ` Equal: ${decision.ties.join(", ")}.` : "";
  return `${decision.winner} was chosen by mode ${decision.mode}.${ties}${when} ${removed.join(" ")}`;
}

function lost(error) {
  report(`no answer from the replica: ${error.message}`, "bad");
}

async function refresh() {
  try {
    if (!document.hidden) {
      fleet = await ask("fleet");
      remember();
      traffic.remember(fleet);
      draw();
    }
  } catch (error) {
    lost(error);
  }
  setTimeout(refresh, INTERVAL_MS);
}

const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const one of tabs) {
    const isShown = one === tab;
    one.setAttribute("aria-selected", isShown);
    one.tabIndex = isShown ? 0 : -1;
    find(one.getAttribute("aria-controls")).hidden = !isShown;
  }
  if (fleet) draw();
  if (tab.id === "tab-decisions") drawDecisions().catch(lost);
  if (tab.id === "tab-prefixes") drawPrefixes().catch(lost);
}

tabs.forEach((tab, at) => {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(at + step + tabs.length) % tabs.length];
    show(next);
    next.focus();
  });
});
const drawAgain = () => !find("traffic").hidden && traffic.draw(find("plots"), true);
window.addEventListener("resize", drawAgain);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
find("filter").addEventListener("input", () => fleet && drawTargets());
show(tabs[0]);
refresh();
