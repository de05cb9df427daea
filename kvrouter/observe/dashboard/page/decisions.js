// The views of kept decisions: the newest ones, one with every candidate, and the prefixes that they shared.

import { fill, find, number } from "./table.js";

const LIST = [
  ["Request", (row) => row.request_id, String],
  ["Time", (row) => row.time, (value) => new Date(value * 1000).toLocaleTimeString("en-GB")],
  ["Model", (row) => row.model, String],
  ["Mode", (row) => row.mode, String],
  ["Prompt tokens", (row) => row.isl, number],
  ["Target", (row) => row.winner, String],
  ["Overlap blocks", (row) => row.overlap_blocks, number],
  ["Candidates", (row) => row.candidates, number],
];
const PREFIXES = [
  ["Last shared block", (row) => row.hash, String],
  ["Model", (row) => row.model, String],
  ["Blocks", (row) => row.blocks, number],
  ["Requests", (row) => row.requests, number],
  ["Held by", (row) => row.holders.join(", "), String],
];
// Of a decision that compared seconds (weight auto): its seconds, and names of earlier versions.
const SECONDS = { total: "seconds", waiting: "waiting s", own_prefill: "own prefill s", congestion: "congestion s" };
const FORMER = ["overlap_weight", "wait_s", "own_s"];
const name = (one) => `${one.worker_id}/${one.dp_rank}`;
const written = (value) => (typeof value === "number" ? number(Number(value.toPrecision(5))) : "–");

export async function drawList(ask, press) {
  const { decisions } = await ask("decisions?limit=50");
  fill(find("list"), LIST, decisions, { press: (row) => press(row.request_id) });
}

export async function explain(ask, requestId) {
  const { decisions } = await ask(`decisions/${encodeURIComponent(requestId)}`);
  const decision = decisions.at(-1);
  const shown = new Map(decision.candidates.map((one) => [one, columnsOf(one.terms)]));
  const terms = [...new Set([...shown.values()].flatMap(Object.keys))];
  const columns = [
    ["Candidate", name, String],
    ["Why not this one", (one) => one.why_not ?? "", String, () => "reason"],
    ["Overlap blocks", (one) => one.overlap_blocks, number],
    ["In flight", (one) => one.requests, number],
    ...terms.map((term) => [term, (one) => shown.get(one)[term], written]),
  ];
  find("asked").textContent = requestId;
  find("why").textContent = why(decision, decisions.length);
  const order = new Map(decision.order.map((target, at) => [target, at]));
  const place = (one) => order.get(name(one)) ?? order.size;
  const rows = [...decision.candidates].sort((a, b) => place(a) - place(b));
  fill(find("candidates"), columns, rows, { mark: (one) => (name(one) === decision.winner ? "chosen" : "") });
}

// The terms of a candidate by title; with weight auto the seconds that were compared come first.
function columnsOf({ seconds, ...terms }) {
  if (!seconds) return terms;
  const { total, ...parts } = seconds;
  const first = Object.entries({ total, ...parts }).map(([part, value]) => [SECONDS[part] ?? `${part} s`, value]);
  return Object.fromEntries([...first, ...Object.entries(terms).filter(([term]) => !FORMER.includes(term))]);
}

function why(decision, attempts) {
  const said = [`${decision.winner} was chosen by mode ${decision.mode}.`];
  if (attempts > 1) said.push(`The last of ${attempts} attempts.`);
  if (decision.temperature > 0) said.push(`Drawn at random, better ones more often: temperature ${decision.temperature}.`);
  if (decision.unseen_bookings > 0.05)
    said.push(`About ${decision.unseen_bookings} requests of other replicas were not known yet: replicas spread over targets.`);
  if (decision.terms_of === "now") said.push("Its terms are computed from the tables as they are now.");
  said.push(...decision.removed.map((one) => `${name(one)} was no candidate: ${one.by}.`));
  return said.join(" ");
}

export async function drawPrefixes(ask) {
  const { read, cached, prefixes } = await ask("prefixes");
  find("sample").textContent =
    `A sample: of the last ${number(read)} decisions of this replica, ${number(cached)} found a prefix in the chosen ` +
    "target's cache. Counted by the last block found; at most 50 are shown.";
  fill(find("shared"), PREFIXES, prefixes);
}
