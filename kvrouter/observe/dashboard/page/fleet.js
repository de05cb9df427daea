// The fleet view: figures, a square for each target, and the table of targets.
//
//     targets ──search──> those that match ──> host ▾ ──> worker ▾ ──> rank
//
// A row of the table is a node of this tree: its figures are those of its targets together.

import {
  age, cell, compareTexts, drawSpark, fill, find, newSpark, number, say, seconds, share, sorted, sum,
} from "./table.js";
import { lastMinute, quantile, recent } from "./traffic.js";

// A table of more rows than this is slow to draw; the search finds the others, and the squares show all.
const MOST_ROWS = 200;
const FEW_TARGETS = 12;
const MINUTE_S = 60;
// Of the last minute the counters of targets are kept, each 5 s: what happened since is their difference.
const KEPT_EACH_S = 5;
const LEVELS = 5;
// Engines report what was predicted, to the token (docs/results.md): below this share something is wrong.
const FEW_REPORTED = 0.95;

let fleet = null;
let past = [];
let squares = new Map();
const toggled = new Set(); // keys of nodes that the user has opened or closed
const figures = new Map();

const name = (row) => `${row.worker}/${row.rank}`;
const host = (row) => row.url.split("/")[2]?.replace(/:\d+$/, "") ?? "";
const role = (row) => row.role ?? "both";
const ratio = (part, whole) => (whole > 0 ? part / whole : null);
const different = (rows, value) => [...new Set(rows.map(value))];

// Of all targets of a node; null if none has reported it.
function total({ targets }, field) {
  const known = targets.filter((row) => row[field] !== null && row[field] !== undefined);
  return known.length ? sum(known, (row) => row[field]) : null;
}

// What a counter of a node's targets has grown by in the last minute.
const grown = (node, field) => sum(node.targets, (row) => row[field] - (past[0].targets.get(row.key)?.[field] ?? 0));
const reported = (node) => ratio(grown(node, "reported_tokens"), grown(node, "predicted_tokens"));
const kvUse = (node) => ratio(total(node, "kv_usage"), node.targets.filter((row) => row.kv_usage !== null).length);
const inFlight = (node) => total(node, "requests");
const agentUp = ({ targets: [row] }) => (row.started_s ? fleet.time - row.started_s : null);
const problems = ({ targets }) => different(targets.flatMap((row) => row.problems), String).join("; ");
const text = (value) => (node) => different(node.targets, value).join(", ");

function state({ targets }) {
  const states = different(targets, (row) => row.state);
  const count = (one) => (states.length > 1 ? `${targets.filter((row) => row.state === one).length} ${one}` : one);
  const said = states.map(count);
  const apart = targets.filter((row) => !row.eligible).length;
  if (apart) said.push(targets.length > 1 ? `${apart} not eligible` : "not eligible");
  return said.join(", ");
}

// Each column: its title, its value to sort by, how to write it, its look. Those behind are shown on request.
const TARGETS = [
  ["Target", (node) => node.title, String],
  ["State", state, String],
  ["In flight", inFlight, number, { bar: (node) => inFlight(node) / node.most }],
  ["Last minute", inFlight, number, { spark: wasInFlight }],
  ["Waiting", (node) => total(node, "waiting"), number],
  ["KV use", kvUse, share, { bar: kvUse }],
  ["Prompt cached", (node) => ratio(grown(node, "overlap_tokens"), grown(node, "prompt_tokens")), share],
  ["Mean TTFT", (node) => ratio(grown(node, "ttft_sum_s"), grown(node, "ttft_count")), seconds],
  ["Errors", (node) => total(node, "errors"), number],
];
const MORE = [
  ["Engine", text((row) => row.engine), String],
  ["Agent up", agentUp, age],
  ["Running", (node) => total(node, "running"), number],
  ["Of these reported", reported, share, { kind: (node) => ((reported(node) ?? 1) < FEW_REPORTED ? "bad" : "") }],
  ["Lag", (node) => total(node, "lag_frames"), number],
  ["Active blocks", (node) => total(node, "active_blocks"), number],
  ["Prefill tokens", (node) => total(node, "charged_prefill_tokens"), number],
  ["Cached blocks", (node) => total(node, "blocks"), number],
  ["Room for blocks", (node) => total(node, "total_blocks"), number],
  ["Answers", (node) => total(node, "answers"), number],
];
const POOL = ["Pool", text((row) => row.pool), String];
const ROLE = ["Role", text((row) => [role(row), row.kv_connector].filter(Boolean).join(" ")), String];
const PROBLEMS = ["Problems", problems, String, { kind: () => "problems" }];

const KEPT = [
  "requests", "overlap_tokens", "prompt_tokens", "predicted_tokens", "reported_tokens", "ttft_sum_s", "ttft_count",
];

export function remember(snapshot) {
  fleet = snapshot;
  for (const row of fleet.targets) row.key = `${row.pool} ${name(row)}`;
  fleet.targets.sort((a, b) => compareTexts(a.key, b.key));
  const { time, started_s: started, targets } = fleet;
  if (past.length && past[0].started !== started) past = []; // it has restarted: its totals begin at 0
  if (!past.length || time - past.at(-1).time >= KEPT_EACH_S) {
    const counted = (row) => Object.fromEntries(KEPT.map((field) => [field, row[field]]));
    const counts = new Map(targets.map((row) => [row.key, counted(row)]));
    past.push({ time, started, targets: counts });
  }
  while (past.length > 1 && time - past[0].time > MINUTE_S) past.shift();
}

function wasInFlight(node) {
  const keys = node.targets.map((row) => row.key);
  const then = past.map(({ targets }) => sum(keys, (one) => targets.get(one)?.requests));
  return [...then, inFlight(node)];
}

export function draw() {
  if (!fleet) return;
  const isEmpty = !fleet.targets.length;
  find("empty").hidden = !isEmpty;
  find("found").hidden = isEmpty;
  // first, while the layout is as it was: what is selected is found without a new one
  if (!isEmpty) drawTargets();
  drawFigures();
  drawSquares();
}

// Each with the points of the traffic that its line shows, if it has one.
function drawFigures() {
  const minute = lastMinute();
  const ttft = (wanted) => (minute ? seconds(quantile(wanted, minute.times("ttft"))) : "–");
  // Estimated from a sample, and empty after a replica's start: never less than the chosen targets had.
  const cached = (...caches) => {
    const parts = caches.map((cache) => minute?.cached(cache) ?? null);
    return share(parts.includes(null) ? null : Math.max(0, ...parts));
  };
  const each = minute && ratio(minute.grown("output_tokens"), minute.grown("requests") - minute.grown("refused"));
  figure("Eligible targets", eligible());
  figure("Requests in flight", number(sum(fleet.targets, (row) => row.requests)));
  figure("Queued", number(fleet.fleet_traffic.queued));
  figure("Requests a second", minute ? (minute.grown("requests") / minute.seconds).toFixed(1) : "–", "rate");
  figure("Failed in the last minute", minute ? number(minute.grown("failed")) : "–", "failed");
  figure("TTFT, median", ttft(0.5), "ttft");
  figure("TTFT, 90 %", ttft(0.9), "ttft_90");
  figure("Between tokens, 90 %", minute ? seconds(quantile(0.9, minute.times("inter_token"))) : "–", "apart_90");
  figure("Output tokens each", each === null ? "–" : number(Math.round(each)));
  figure("Prompt tokens cached", cached("chosen"), "chosen");
  figure("In one shared cache", cached("pooled", "chosen"), "pooled");
  const counted = fleet.replicas.filter((row) => row.requests !== null).length;
  say(find("counted"), `${counted} of ${fleet.replicas.length}`);
}

// By role, where there are others than both.
function eligible() {
  const of = (rows) => `${rows.filter((row) => row.eligible).length} of ${rows.length}`;
  const roles = different(fleet.targets, role).sort();
  const parts = roles.map((one) => `${one} ${of(fleet.targets.filter((row) => role(row) === one))}`);
  return roles.some((one) => one !== "both") ? parts.join(", ") : of(fleet.targets);
}

function figure(title, text, points) {
  if (!figures.has(title)) {
    const [made, value, spark] = [document.createElement("div"), cell("", "span"), points ? newSpark() : ""];
    const shown = cell(value, "dd");
    shown.append(spark);
    made.append(cell(title, "dt"), shown);
    find("figures").append(made);
    figures.set(title, { value, spark });
  }
  const { value, spark } = figures.get(title);
  say(value, text);
  if (spark) drawSpark(spark, recent(points));
}

// Of a large fleet, one square for each target, those of a host and a worker together: the darker, the more
// requests it has in flight. Tab leads to one of them, the arrows to the others.
function drawSquares() {
  const isLarge = fleet.targets.length > FEW_TARGETS;
  find("map").hidden = !isLarge;
  if (!isLarge) return;
  const most = fleet.targets.reduce((high, row) => Math.max(high, row.requests), 1);
  const rows = leaves(treeOf(fleet.targets));
  const now = new Map(rows.map((row) => [row.key, squares.get(row.key) ?? newSquare()]));
  const isSame = now.size === squares.size && [...now.keys()].every((known) => squares.has(known));
  squares = now;
  if (!isSame) arrange([...squares.values()]);
  for (const row of rows) {
    const square = squares.get(row.key);
    const level = row.eligible ? `level-${Math.ceil((row.requests / most) * LEVELS)}` : "ill";
    const kind = row.problems.length && row.eligible ? `${level} troubled` : level;
    if (square.kind !== kind) square.made.className = square.kind = kind;
    const said = `${name(row)}: ${state({ targets: [row] })}, ${row.requests} in flight` +
      row.problems.map((problem) => `\n${problem}`).join("");
    if (square.said !== said) square.made.title = square.said = said;
    square.name = name(row);
  }
}

function newSquare() {
  const square = { made: document.createElement("button"), kind: "", said: "", name: "" };
  square.made.type = "button";
  square.made.tabIndex = -1;
  square.made.addEventListener("click", () => {
    find("search").value = square.name;
    drawTargets();
  });
  return square;
}

function arrange(all) {
  const made = all.map((square) => square.made);
  const focused = made.find((one) => one === document.activeElement);
  find("squares").replaceChildren(...made);
  focused?.focus();
  if (!made.some((one) => one.tabIndex === 0)) made[0].tabIndex = 0;
}

find("squares").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const next = step === 1 ? event.target.nextElementSibling : event.target.previousElementSibling;
  if (!step || !next) return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

// The hosts, each with its workers, each with its ranks. A worker of one rank is that rank; where each worker has
// a host of its own, as pods have, or all have the same, the workers are not grouped.
function treeOf(targets) {
  const workers = grouped(targets, (row) => `${row.pool} ${row.worker}`).map(([id, rows]) => {
    const ranks = rows.map((row) => ({ key: row.key, title: name(row), targets: [row] }));
    return rows.length === 1 ? ranks[0] : branch(id, `${rows[0].worker}, ${rows.length} ranks`, ranks, false);
  });
  const hosts = grouped(workers, (node) => host(node.targets[0]));
  if (hosts.length === 1 || hosts.length === workers.length) return workers;
  return hosts.map(([id, nodes]) => branch(`host ${id}`, `${id || "unknown host"}, ${nodes.length} workers`, nodes, true));
}

function grouped(rows, value) {
  const groups = new Map();
  for (const row of rows) {
    const one = value(row);
    if (groups.has(one)) groups.get(one).push(row);
    else groups.set(one, [row]);
  }
  return [...groups];
}

function branch(id, title, nodes, isOpenAtFirst) {
  const isOpen = isOpenAtFirst !== toggled.has(id);
  return { key: id, title, nodes, isOpen, targets: nodes.flatMap((node) => node.targets) };
}

const leaves = (nodes) => nodes.flatMap((node) => node.targets);

// The nodes that are open, from top to bottom, each level sorted. A bar is as long as its share of the most in
// flight at a node of its level.
function opened(nodes, columns, level = 0) {
  return sorted(find("targets"), columns, nodes).flatMap((node) => [
    Object.assign(node, { level }),
    ...(node.isOpen ? opened(node.nodes, columns, level + 1) : []),
  ]);
}

function columnsOf({ pools, targets }) {
  const [first, ...others] = TARGETS;
  const shown = [first, ...(pools.length > 1 ? [POOL] : []), ...others];
  if (targets.some((row) => role(row) !== "both")) shown.push(ROLE);
  if (find("all-columns").checked) shown.push(...MORE);
  return [...shown, PROBLEMS];
}

function matching(targets, wanted) {
  if (!wanted) return targets;
  const texts = (row) => [name(row), row.pool, host(row), role(row), state({ targets: [row] }), row.engine, ...row.problems];
  return targets.filter((row) => texts(row).some((text) => text.toLowerCase().includes(wanted)));
}

function drawTargets() {
  const columns = columnsOf(fleet);
  const found = matching(fleet.targets, find("search").value.trim().toLowerCase());
  const nodes = opened(treeOf(found), columns);
  const most = new Map();
  for (const node of nodes) most.set(node.level, Math.max(most.get(node.level) ?? 1, inFlight(node)));
  nodes.forEach((node) => (node.most = most.get(node.level)));
  const shown = nodes.slice(0, MOST_ROWS);
  const cut = shown.length < nodes.length ? `; the first ${MOST_ROWS} of ${nodes.length} rows` : "";
  say(find("shown"), `${found.length} of ${fleet.targets.length} targets${cut}`);
  fill(find("targets"), columns, shown, {
    key: (node) => node.key,
    control: (node) => node.nodes && { press: () => toggle(node.key), isOpen: node.isOpen },
    mark: ({ level, targets }) => `level-${level}${targets.some((row) => row.eligible) ? "" : " ill"}`,
    again: drawTargets,
  });
}

function toggle(id) {
  if (!toggled.delete(id)) toggled.add(id);
  drawTargets();
}

for (const id of ["search", "all-columns"]) find(id).addEventListener("input", () => fleet && drawTargets());
