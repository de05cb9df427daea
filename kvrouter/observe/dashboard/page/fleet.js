// The fleet view: figures, a square for each target, and the table of targets.

import { age, button, cell, fill, find, number, seconds, share, sum } from "./table.js";
import { lastMinute, quantile } from "./traffic.js";

// A table of more rows than this is slow to draw; the filter finds the others, and the squares show all.
const MOST_ROWS = 200;
const FEW_TARGETS = 12;
const MINUTE_S = 60;
// Of the last minute the counters of targets are kept, each 5 s: what happened since is their difference.
const KEPT_EACH_S = 5;
const LEVELS = 5;
// Engines report what was predicted, to the token (docs/results.md): below this share something is wrong.
const FEW_REPORTED = 0.95;

let fleet = null;
let sorted = { by: "Target", descending: false };
let past = [];
let squares = new Map();

const name = (row) => `${row.worker}/${row.rank}`;
const key = (row) => `${row.pool} ${name(row)}`;
const part = (row) => ((row.role ?? "both") === "both" ? "" : `, ${row.role} ${row.kv_connector ?? ""}`);
const state = (row) => row.state + (row.eligible ? "" : ", not eligible") + part(row);
const ratio = (part, whole) => (whole > 0 ? part / whole : null);

// What a counter of a target has grown by in the last minute.
function grown(row, field) {
  const before = past[0].targets.get(key(row));
  return row[field] - (before?.[field] ?? 0);
}

const reported = (row) => ratio(grown(row, "reported_tokens"), grown(row, "predicted_tokens"));

// Each column: its title, its value to sort by, and how to write it.
const TARGETS = [
  ["Target", name, String],
  ["Pool", (row) => row.pool, String],
  ["State", state, String],
  ["Agent up", (row) => (row.started_s ? fleet.time - row.started_s : null), age],
  ["Problems", (row) => row.problems.join("; "), String, () => "problems"],
  ["In flight", (row) => row.requests, number],
  ["Running", (row) => row.running, number],
  ["Waiting", (row) => row.waiting, number],
  ["KV usage", (row) => row.kv_usage, share],
  ["Prompt cached", (row) => ratio(grown(row, "overlap_tokens"), grown(row, "prompt_tokens")), share],
  ["Of these reported", reported, share, (row) => (reported(row) !== null && reported(row) < FEW_REPORTED ? "bad" : "")],
  ["Mean TTFT", (row) => ratio(grown(row, "ttft_sum_s"), grown(row, "ttft_count")), seconds],
  ["Errors", (row) => row.errors, number],
  ["Lag", (row) => row.lag_frames, number],
  ["Active blocks", (row) => row.active_blocks, number],
  ["Prefill tokens", (row) => row.charged_prefill_tokens, number],
  ["Cached blocks", (row) => row.blocks, number],
  ["Room for blocks", (row) => row.total_blocks, number],
  ["Answers", (row) => row.answers, number],
];

const COUNTERS = ["overlap_tokens", "prompt_tokens", "predicted_tokens", "reported_tokens", "ttft_sum_s", "ttft_count"];

export function remember(snapshot) {
  fleet = snapshot;
  const { time, started_s: started, targets } = fleet;
  if (past.length && past[0].started !== started) past = []; // it has restarted: its totals begin at 0
  if (!past.length || time - past.at(-1).time >= KEPT_EACH_S) {
    const counted = (row) => Object.fromEntries(COUNTERS.map((counter) => [counter, row[counter]]));
    const counts = new Map(targets.map((row) => [key(row), counted(row)]));
    past.push({ time, started, targets: counts });
  }
  while (past.length > 1 && time - past[0].time > MINUTE_S) past.shift();
}

export function draw() {
  if (!fleet) return;
  drawFigures();
  drawSquares();
  drawTargets();
}

function drawFigures() {
  const minute = lastMinute();
  const ttft = (wanted) => (minute ? seconds(quantile(wanted, minute.times("ttft"))) : "–");
  // Estimated from a sample, and empty after a replica's start: never less than the chosen targets had.
  const cached = (...caches) => {
    const parts = caches.map((cache) => minute?.cached(cache) ?? null);
    return share(parts.includes(null) ? null : Math.max(0, ...parts));
  };
  const each = minute && ratio(minute.grown("output_tokens"), minute.grown("requests") - minute.grown("refused"));
  const figures = {
    "Eligible targets": `${sum(fleet.pools, (pool) => pool.eligible)} of ${fleet.targets.length}`,
    "Requests in flight": number(sum(fleet.targets, (row) => row.requests)),
    Queued: number(fleet.fleet_traffic.queued),
    "Requests a second": minute ? (minute.grown("requests") / minute.seconds).toFixed(1) : "–",
    "Failed in the last minute": minute ? number(minute.grown("failed")) : "–",
    "TTFT, median": ttft(0.5),
    "TTFT, 90 %": ttft(0.9),
    "Between tokens, 90 %": minute ? seconds(quantile(0.9, minute.times("inter_token"))) : "–",
    "Output tokens each": each === null ? "–" : number(Math.round(each)),
    "Prompt tokens cached": cached("chosen"),
    "In one shared cache": cached("pooled", "chosen"),
  };
  find("figures").replaceChildren(...Object.entries(figures).map(([title, text]) => {
    const one = document.createElement("div");
    one.append(cell(title, "dt"), cell(text, "dd"));
    return one;
  }));
  const counted = fleet.replicas.filter((row) => row.requests !== null).length;
  const all = fleet.replicas.length;
  find("counted").textContent =
    `These figures count the requests of ${counted} of ${all} replicas; rates, times and shares are of the last minute. In ` +
    "the table, load is that of all replicas; cached and reported tokens, TTFT, errors and answers are of this replica's " +
    "requests, the first three of the last minute, and since the page was opened.";
}

// Of a large fleet, one square for each target: the darker, the more requests it has in flight.
function drawSquares() {
  const isLarge = fleet.targets.length > FEW_TARGETS;
  find("map").hidden = !isLarge;
  if (!isLarge) return;
  const most = Math.max(1, ...fleet.targets.map((row) => row.requests));
  const rows = [...fleet.targets].sort((a, b) => compare(key(a), key(b)));
  const now = new Map(rows.map((row) => [key(row), squares.get(key(row)) ?? newSquare()]));
  const isSame = now.size === squares.size && [...now.keys()].every((known) => squares.has(known));
  squares = now;
  if (!isSame) find("squares").replaceChildren(...squares.values());
  for (const row of rows) {
    const square = squares.get(key(row));
    const level = row.eligible ? `level-${Math.ceil((row.requests / most) * LEVELS)}` : "ill";
    const kind = row.problems.length && row.eligible ? `${level} troubled` : level;
    if (square.className !== kind) square.className = kind;
    const said = `${name(row)}: ${row.eligible ? "" : "not eligible, "}${row.state}, ${row.requests} in flight` +
      row.problems.map((problem) => `\n${problem}`).join("");
    if (square.title !== said) square.title = said;
  }
}

function newSquare() {
  const made = document.createElement("span");
  made.addEventListener("click", () => {
    find("filter").value = made.title.split(":")[0];
    drawTargets();
  });
  return made;
}

function heading(title) {
  const made = cell(button(title, () => sortBy(title)), "th");
  if (title === sorted.by) made.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
  return made;
}

function sortBy(title) {
  sorted = { by: title, descending: title === sorted.by && !sorted.descending };
  drawTargets();
}

function compare(a, b) {
  if (typeof a === "string") return a.localeCompare(b, "en", { numeric: true });
  return (a ?? -1) - (b ?? -1);
}

function drawTargets() {
  const columns = TARGETS.filter(([title]) => title !== "Pool" || fleet.pools.length > 1);
  const [, value] = columns.find(([title]) => title === sorted.by) ?? columns[0];
  const wanted = find("filter").value.toLowerCase();
  const texts = (row) => [name(row), row.pool, state(row), ...row.problems];
  const rows = fleet.targets.filter((row) => texts(row).some((text) => text.toLowerCase().includes(wanted)));
  rows.sort((a, b) => compare(value(a), value(b)) * (sorted.descending ? -1 : 1));
  const shown = Math.min(rows.length, MOST_ROWS);
  find("shown").textContent = `${shown} of ${fleet.targets.length} targets`;
  fill(find("targets"), columns, rows.slice(0, shown), { heading, mark: (row) => (row.eligible ? "" : "ill") });
}

find("filter").addEventListener("input", () => fleet && drawTargets());
