// The views of kept decisions: the newest ones, one with every candidate, and the prefixes that they shared.

import { fill, find, number, say } from "./table.js";

const MOST_ROWS = 200;
// Of targets that were removed for one reason.
const MOST_NAMES = 10;
const SUMMARY = [
  ["Request", (row) => row.request_id, String],
  ["Time", (row) => row.time, (value) => new Date(value * 1000).toLocaleTimeString("en-GB")],
  ["Model", (row) => row.model, String],
  ["Mode", (row) => row.mode, String],
  ["Prompt tokens", (row) => row.isl, number],
  ["Overlap blocks", (row) => row.overlap_blocks, number],
  ["Target", (row) => row.winner, String],
  ["Candidates", (row) => row.candidates, number],
];
const PREFILL = ["Prefill at", (row) => row.prefill ?? "", String];
const PREFIXES = [
  ["Last shared block", (row) => row.hash, String],
  ["Model", (row) => row.model, String],
  ["Blocks", (row) => row.blocks, number],
  ["Requests", (row) => row.requests, number],
  ["Held by", (row) => row.holders.join(", "), String, { kind: () => "reason" }],
];
// Names of earlier versions: other terms have the same values.
const FORMER = ["wait_s", "own_s"];
const name = (one) => `${one.worker_id}/${one.dp_rank}`;
const written = (value) => (typeof value === "number" ? number(Number(value.toPrecision(4))) : "–");
// Milliseconds or blocks: few digits, as they are compared by eye.
const short = (value) => (typeof value === "number" ? number(Number(value.toFixed(Math.abs(value) < 10 ? 1 : 0))) : "–");
const inMs = (value) => (typeof value === "number" ? 1000 * value : null);

export async function drawList(ask, press) {
  const { decisions } = await ask("decisions?limit=50");
  const columns = decisions.some((row) => row.prefill) ? [...SUMMARY.slice(0, 6), PREFILL, ...SUMMARY.slice(6)] : SUMMARY;
  fill(find("list"), columns, decisions, {
    key: (row) => `${row.request_id} ${row.time}`,
    control: (row) => ({ press: () => press(row.request_id) }),
  });
}

// Of what the candidates were compared by: seconds (weight auto), the cost in blocks, or the terms of another mode.
function comparedBy(terms) {
  if (terms.seconds)
    return { unit: "ms", value: (one) => inMs(one.terms.seconds?.total), columns: inSeconds, said: inTime };
  if ("cost" in terms) return { unit: "blocks", value: (one) => one.terms.cost, columns: inBlocks, said: inCost };
  const [first = ""] = "total" in terms ? ["total"] : Object.keys(terms);
  return { term: first, value: (one) => one.terms[first], columns: ({ terms }) => Object.keys(terms).map(term) };
}

const term = (title) => [title, (one) => one.terms[title], written];

function inSeconds({ terms }) {
  const titles = { waiting: "Waiting, ms", own_prefill: "Own prefill, ms", congestion: "Congestion, ms" };
  const parts = Object.keys(terms.seconds).filter((part) => part !== "total");
  return parts.map((part) => [titles[part] ?? `${part}, ms`, (one) => inMs(one.terms.seconds?.[part]), short]);
}

function inBlocks({ terms }) {
  const titles = { prefill_blocks: "Prefill blocks", decode_blocks: "Decode blocks" };
  const parts = Object.keys(titles).filter((part) => part in terms);
  return parts.map((part) => [titles[part], (one) => one.terms[part], short]);
}

export async function explain(ask, requestId) {
  const { decisions } = await ask(`decisions/${encodeURIComponent(requestId)}`);
  const decision = decisions.at(-1);
  const halves = decision.prefill ? [["Prefill", decision.prefill], ["Decode", decision]] : [["", decision]];
  say(find("asked"), requestId);
  say(find("why"), halves.map(([role, half]) => sentence(role, half, decision)).join(" "));
  say(find("more"), more(decision, decisions.length));
  drawHalf("candidates", decision);
  find("computes").hidden = !decision.prefill;
  if (decision.prefill) drawHalf("prefill-candidates", decision.prefill);
  drawTerms(decision);
  find("explained").hidden = false;
}

// Why it went there, in one sentence: what the chosen target was compared by, and the next best one.
function sentence(role, half, { mode, overlap_weight: weight }) {
  const chosen = half.candidates.find((one) => name(one) === half.winner);
  const { term, value, said } = comparedBy(chosen?.terms ?? {});
  if (term === "") return `${half.winner} was chosen by mode ${mode}.`;
  const compared = said?.(chosen.terms, weight) ?? `${term} ${written(value(chosen))} by mode ${mode}`;
  return `${role && `${role} at `}${half.winner}: ${compared}; ${next(half, chosen, value, said)}.`;
}

function inTime({ seconds: { total, waiting, own_prefill: own, ...others } }) {
  const digits = total < 0.01 ? 1 : 0;
  const ms = (value) => (1000 * value).toFixed(digits);
  if (waiting === undefined) return `${ms(total)} ms`;
  const first = waiting + own;
  // the parts add up as they are written
  const parts = `${ms(waiting)} waiting + ${(Number(ms(first)) - Number(ms(waiting))).toFixed(digits)} own`;
  const added = Object.entries(others).filter(([, value]) => Number(ms(value)));
  const priced = added.map(([part, value]) => `${ms(value)} ${part}`).join(" + ");
  return `first token in ${ms(first)} ms: ${parts}${priced && `; compared ${ms(total)} with ${priced}`}`;
}

function inCost(terms, weight) {
  const { cost, overlap_weight: used, prefill_blocks: prefill, decode_blocks: decode, overlap_blocks: overlap } = terms;
  if (used === undefined) {
    const isDifference = Math.abs(cost - decode + overlap) < 0.05;
    return `cost ${short(cost)} blocks${isDifference ? `: ${short(decode)} decode - ${short(overlap)} cached` : ""}`;
  }
  const rest = cost - used * prefill - (decode ?? 0);
  const parts = [`${written(used)} * ${short(prefill)} prefill`];
  if (decode !== undefined) parts.push(`${short(decode)} decode`);
  if (Math.abs(rest) >= 0.05) parts.push(`${short(rest)} other terms`);
  const instead = weight === "auto" ? ", with a fixed weight, as seconds could not be predicted" : "";
  return `cost ${short(cost)} blocks: ${parts.join(" + ")}${instead}`;
}

// The target that would be tried next, else the nearest one; or the one that was better, as in a draw.
function next({ order = [], candidates }, chosen, value, isLowBest) {
  const others = candidates.filter((one) => one !== chosen && typeof value(one) === "number");
  if (!others.length) return "no other candidate";
  const apart = (one) => Math.abs(value(one) - value(chosen));
  const nearest = others.reduce((near, one) => (apart(one) < apart(near) ? one : near));
  const second = others.find((one) => name(one) === order[1]) ?? nearest;
  const least = others.reduce((low, one) => (value(one) < value(low) ? one : low));
  const isLowest = value(chosen) <= value(least) * (1 + 1e-9);
  if (isLowest || !isLowBest) return `next best ${short(value(second))} (${name(second)})`;
  return `lowest ${short(value(least))} (${name(least)})`;
}

function more(decision, attempts) {
  const said = [];
  if (attempts > 1) said.push(`The last of ${attempts} attempts.`);
  if (decision.temperature > 0) said.push(`Drawn at random, better ones more often: temperature ${decision.temperature}.`);
  if (decision.unseen_bookings > 0.05)
    said.push(`About ${decision.unseen_bookings} requests of other replicas were not known yet: replicas spread over targets.`);
  if (decision.terms_of === "now") said.push("Its terms are computed from the tables as they are now.");
  for (const why of new Set(decision.removed.map((one) => one.by))) {
    const names = decision.removed.filter((one) => one.by === why).map(name);
    const others = names.length > MOST_NAMES ? ` and ${names.length - MOST_NAMES} others` : "";
    said.push(`No candidates: ${names.slice(0, MOST_NAMES).join(", ")}${others}: ${why}.`);
  }
  return said.join(" ");
}

function drawHalf(id, half) {
  const chosen = half.candidates.find((one) => name(one) === half.winner) ?? half.candidates[0];
  const { unit, value, columns } = comparedBy(chosen.terms);
  const most = Math.max(1e-9, ...half.candidates.map((one) => value(one) ?? 0));
  const compared = [`Compared, ${unit}`, value, short, { bar: (one) => Math.max(0, (value(one) ?? 0) / most) }];
  const shown = [
    ["Candidate", name, String],
    ...(unit ? [compared] : []),
    ...columns(chosen),
    ["Overlap blocks", (one) => one.overlap_blocks, number],
    ["In flight", (one) => one.requests, number],
    ["Why not this one", (one) => (one === chosen ? "chosen" : (one.why_not ?? "")), String, { kind: () => "reason" }],
  ];
  // The choice, then the nearest to it, whether low or high is good.
  const isOther = (one) => one !== chosen;
  const apart = (one) => Math.abs((value(one) ?? 0) - (value(chosen) ?? 0));
  const rows = [...half.candidates].sort((a, b) => isOther(a) - isOther(b) || apart(a) - apart(b));
  fill(find(id), shown, rows.slice(0, MOST_ROWS), { mark: (one) => (one === chosen ? "chosen" : "") });
}

// Every term as the replica has it, as in docs/concepts/decide.md.
function drawTerms({ candidates }) {
  const flat = new Map(candidates.map((one) => [one, flatten(one.terms)]));
  const titles = [...new Set([...flat.values()].flatMap(Object.keys))].filter((title) => !FORMER.includes(title));
  const columns = titles.map((title) => [title, (one) => flat.get(one)[title], written]);
  fill(find("terms"), [["Candidate", name, String], ...columns], candidates.slice(0, MOST_ROWS));
}

function flatten({ seconds, ...terms }) {
  const parts = Object.entries(seconds ?? {}).map(([part, value]) => [`seconds.${part}`, value]);
  return { ...Object.fromEntries(parts), ...terms };
}

export async function drawPrefixes(ask) {
  const { read, cached, prefixes } = await ask("prefixes");
  say(
    find("sample"),
    `A sample: of the last ${number(read)} decisions of this replica, ${number(cached)} found a prefix in the chosen ` +
      "target's cache. Counted by the last block found; at most 50 are shown.",
  );
  fill(find("shared"), PREFIXES, prefixes, { key: (row) => `${row.model} ${row.hash}` });
}
