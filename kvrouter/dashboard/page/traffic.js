// The traffic view: what the last quarter of an hour was like, since the page was opened. Drawn by uPlot.

import { sum } from "./table.js";

const MOST_POINTS = 900;
// Each point is the difference to the snapshot of so many seconds before.
const SPAN_S = 10;
const snapshots = [];
const points = [];

// As Prometheus' histogram_quantile: linear within a bucket.
function quantile(share, bounds, counts) {
  const wanted = share * counts.reduce((a, b) => a + b, 0);
  if (!wanted) return null;
  let below = 0;
  for (let at = 0; at < counts.length; at += 1) {
    const lower = at ? bounds[at - 1] : 0;
    if (counts[at] && below + counts[at] >= wanted)
      return at < bounds.length ? lower + ((bounds[at] - lower) * (wanted - below)) / counts[at] : lower;
    below += counts[at];
  }
  return null;
}

function totals(fleet) {
  const { traffic, pools } = fleet;
  return {
    time: fleet.time,
    started: fleet.started_s,
    requests: traffic.requests,
    failed: traffic.failed,
    tokens: traffic.output_tokens,
    counts: traffic.ttft.counts,
    prompt: sum(pools, (pool) => pool.reusable_tokens),
    uncached: ["chosen", "best", "pooled"].map((name) => sum(pools, (pool) => pool.uncached_tokens[name] ?? 0)),
    decisions: sum(pools, (pool) => pool.ttft_decisions),
    later: sum(pools, (pool) => pool.later_s),
  };
}

export function remember(fleet) {
  const now = totals(fleet);
  if (snapshots.length && snapshots[0].started !== now.started) snapshots.length = 0; // totals begin at 0 again
  snapshots.push(now);
  while (now.time - snapshots[0].time > SPAN_S) snapshots.shift();
  const [old] = snapshots;
  const seconds = now.time - old.time;
  if (seconds <= 0) return;
  const grown = (name) => now[name] - old[name];
  const times = now.counts.map((count, at) => count - old.counts[at]);
  const inMs = (value) => (value === null ? null : value * 1000);
  const cached = now.uncached.map((value, at) =>
    grown("prompt") > 0 ? 100 * (1 - (value - old.uncached[at]) / grown("prompt")) : null);
  points.push([
    now.time,
    inMs(quantile(0.5, fleet.traffic.ttft.bounds_s, times)),
    inMs(quantile(0.9, fleet.traffic.ttft.bounds_s, times)),
    grown("requests") / seconds,
    grown("failed") / seconds,
    grown("tokens") / seconds,
    ...cached,
    grown("decisions") > 0 ? (1000 * grown("later")) / grown("decisions") : null,
  ]);
  if (points.length > MOST_POINTS) points.shift();
}

const PLOTS = [
  ["ttft", "Time to first token, ms", { median: 1, "90 %": 2 }],
  ["rate", "Requests a second", { ended: 3, failed: 4 }],
  ["tokens", "Output tokens a second", { tokens: 5 }],
  ["cached", "Prompt tokens cached, %", { chosen: 6, "best target": 7, "one pooled cache": 8 }],
  ["regret", "Predicted delay against the earliest target, ms", { mean: 9 }],
];
const HEIGHT = 150;
const COLOURS = ["--mark", "--good", "--bad"];
let drawn = [];

function make(host, [id, title, lines]) {
  const colour = (name) => {
    host.style.color = `var(${name})`; // a canvas needs the colour itself, not what it depends on
    return getComputedStyle(host).color;
  };
  const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const holder = document.createElement("div");
  holder.id = `plot-${id}`;
  host.append(holder);
  const series = Object.keys(lines).map((label, at) => ({
    label,
    stroke: colour(COLOURS[at]),
    width: 1.5,
    value: (_, value) => (value === null ? "–" : value.toFixed(value < 10 ? 1 : 0)),
  }));
  const options = {
    title,
    width: host.clientWidth > 900 ? host.clientWidth / 2 - 16 : host.clientWidth,
    height: HEIGHT,
    series: [{}, ...series],
    axes: [axis, { ...axis, size: 60 }],
    scales: { y: { range: (_, low, high) => [0, Math.max(1, high ?? 1) * 1.1] } },
  };
  host.style.color = "";
  return { plot: new uPlot(options, [[]], holder), lines: Object.values(lines) };
}

// Draw into the view; once more from the start if its width or the colours have changed.
export function draw(host, again = false) {
  if (again || !drawn.length) {
    drawn.forEach(({ plot }) => plot.destroy());
    host.replaceChildren();
    drawn = PLOTS.map((one) => make(host, one));
  }
  const column = (at) => points.map((point) => point[at]);
  drawn.forEach(({ plot, lines }) => plot.setData([column(0), ...lines.map(column)]));
}
