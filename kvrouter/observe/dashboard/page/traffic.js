// The traffic of all replicas: the last minute for the fleet view, the last hour as plots, drawn by uPlot. The
// stream begins with samples of the hour before the page was opened, so an incident that has begun is there.

import { find, sum } from "./table.js";

const HOUR_S = 3600;
const QUARTER_S = 900;
const MINUTE_S = 60;
// Each point is the difference to the sample of so many seconds before; so far apart are points, but for the newest.
const SPAN_S = 10;
const samples = []; // snapshots, or the fields of them that are kept; of the last minute, and one before
const points = [];

const newest = () => samples.at(-1);

// The newest sample that is at least so old, or else the oldest.
function before(seconds) {
  const latest = newest().time - seconds;
  return samples.findLast(({ time }) => time <= latest) ?? samples[0];
}

// What was counted between two samples, and the seconds between.
function between(old, now) {
  const grown = (name) => now.fleet_traffic[name] - old.fleet_traffic[name];
  const times = (name) => {
    const { bounds_s: bounds, counts } = now.fleet_traffic[name];
    return { bounds, counts: counts.map((count, at) => count - old.fleet_traffic[name].counts[at]) };
  };
  const uncached = (cache) => now.fleet_traffic.uncached_tokens[cache] - old.fleet_traffic.uncached_tokens[cache];
  const cached = (cache) => (grown("reusable_tokens") > 0 ? 1 - uncached(cache) / grown("reusable_tokens") : null);
  return { seconds: now.time - old.time, grown, times, cached };
}

// Of the last minute, or since the first sample; null before there are two.
export function lastMinute() {
  const seen = between(before(MINUTE_S), newest());
  return seen.seconds > 0 ? seen : null;
}

// As Prometheus' histogram_quantile: linear within a bucket.
export function quantile(wanted, { bounds, counts }) {
  const rank = wanted * sum(counts, Number);
  if (!rank) return null;
  let below = 0;
  for (let at = 0; at < counts.length; at += 1) {
    const lower = at ? bounds[at - 1] : 0;
    if (counts[at] && below + counts[at] >= rank)
      return at < bounds.length ? lower + ((bounds[at] - lower) * (rank - below)) / counts[at] : lower;
    below += counts[at];
  }
  return null;
}

export function begin(history) {
  samples.length = points.length = 0;
  history.forEach(remember);
}

export function remember(sample) {
  // Totals begin at 0 again, or the clock was set back.
  if (samples.length && (newest().started_s !== sample.started_s || newest().time > sample.time)) samples.length = 0;
  while (points.length && points.at(-1)[0] > sample.time) points.pop();
  samples.push(sample);
  while (samples.length > 1 && sample.time - samples[1].time >= MINUTE_S) samples.shift();
  if (samples.length < 2) return;
  if (points.length > 1 && sample.time - points.at(-2)[0] < SPAN_S) points.pop();
  points.push(point(between(before(SPAN_S), sample), sample.time));
  while (sample.time - points[0][0] > HOUR_S) points.shift();
}

// The values of a point, in this order.
const VALUES = [
  "time", "ttft", "ttft_90", "rate", "failed", "tokens", "chosen", "best", "pooled", "regret", "apart", "apart_90",
];

function point({ seconds, grown, times, cached }, time) {
  const inMs = (value) => (value === null ? null : value * 1000);
  const inPercent = (value) => (value === null ? null : value * 100);
  const [ttft, apart] = [times("ttft"), times("inter_token")];
  return [
    time,
    inMs(quantile(0.5, ttft)),
    inMs(quantile(0.9, ttft)),
    grown("requests") / seconds,
    grown("failed") / seconds,
    grown("output_tokens") / seconds,
    ...["chosen", "best", "pooled"].map((cache) => inPercent(cached(cache))),
    grown("ttft_decisions") > 0 ? (1000 * grown("later_s")) / grown("ttft_decisions") : null,
    inMs(quantile(0.5, apart)),
    inMs(quantile(0.9, apart)),
  ];
}

// Each plot: its title, its unit, the least that its axis shows, and its lines.
const PLOTS = [
  ["ttft", "Time to first token", "ms", 1, { median: "ttft", "90 %": "ttft_90" }],
  ["rate", "Requests", "per second", 1, { ended: "rate", failed: "failed" }],
  ["apart", "Time between tokens", "ms", 1, { median: "apart", "90 %": "apart_90" }],
  ["tokens", "Output tokens", "per second", 1, { tokens: "tokens" }],
  ["cached", "Prompt tokens cached", "%", 100, { chosen: "chosen", "best target": "best", "one pooled cache": "pooled" }],
  ["regret", "Predicted delay against the earliest target", "ms", 1, { mean: "regret" }],
];
const HEIGHT = 190;
// Lines differ in their dashes, too: not all people see the colours.
const LINES = [["--mark", []], ["--good", [6, 3]], ["--bad", [2, 3]]];
const MARKERS = ["solid", "dashed", "dotted"];
const clock = (time) => (time ? new Date(time * 1000).toLocaleTimeString("en-GB") : "–");
const minutes = (time) => clock(time).slice(0, -3);
const TIMES = {
  label: "time of day",
  size: 30,
  space: 80,
  incrs: [60, 120, 300, 600],
  values: (_, times) => times.map(minutes),
};
const written = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 1 : 0));
// What the legend shows while the cursor is elsewhere.
const latest = (plot, series) => plot.data[series]?.at(-1);
let drawn = [];

const span = () => Number(find("span").value);

// The whole time that is chosen, also where there are no points yet.
function range() {
  const end = newest()?.time ?? Date.now() / 1000;
  return [end - span(), end];
}

function make(host, [id, title, unit, least, lines]) {
  const colour = (name) => {
    host.style.color = `var(${name})`; // a canvas needs the colour itself, not what it depends on
    return getComputedStyle(host).color;
  };
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--faint"), grid, ticks: { show: false }, labelSize: 18 };
  const holder = document.createElement("div");
  holder.id = `plot-${id}`;
  host.append(holder);
  const series = Object.keys(lines).map((label, at) => ({
    label,
    stroke: colour(label === "failed" ? "--bad" : LINES[at][0]),
    dash: LINES[at][1],
    width: 1.5,
    points: { show: false },
    value: (plot, value, at) => written(value ?? latest(plot, at)),
  }));
  const options = {
    title,
    width: host.clientWidth > 900 ? host.clientWidth / 2 - 16 : host.clientWidth,
    height: HEIGHT,
    legend: { markers: { dash: (_, at) => MARKERS[at - 1] } },
    series: [{ label: "time", value: (plot, time, at) => clock(time ?? latest(plot, at)) }, ...series],
    axes: [{ ...axis, ...TIMES }, { ...axis, label: unit, size: 50 }],
    scales: { x: { range }, y: { range: (_, low, high) => [0, Math.max(least, (high ?? 0) * 1.1)] } },
  };
  host.style.color = "";
  const plot = new uPlot(options, [[]], holder);
  for (const canvas of holder.querySelectorAll("canvas")) {
    canvas.role = "img";
    canvas.ariaLabel = `${title}, ${unit}: the newest values are below`;
  }
  return { plot, lines: Object.values(lines) };
}

function since(seconds) {
  const first = (newest()?.time ?? 0) - seconds;
  return points.filter(([time]) => time >= first);
}

// The points of the time that is chosen.
export const shown = () => since(span());

// The last quarter of an hour of one value.
export function recent(name) {
  const at = VALUES.indexOf(name);
  return since(QUARTER_S).map((one) => one[at]);
}

// Draw into the view; once more from the start if its width or the colours have changed.
export function draw(host, again = false) {
  if (again || !drawn.length) {
    drawn.forEach(({ plot }) => plot.destroy());
    host.replaceChildren();
    drawn = PLOTS.map((one) => make(host, one));
  }
  const chosen = shown();
  const column = (name) => chosen.map((one) => one[VALUES.indexOf(name)]);
  drawn.forEach(({ plot, lines }) => plot.setData([column("time"), ...lines.map(column)]));
}
