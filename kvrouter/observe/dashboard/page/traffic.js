// The traffic of all replicas: the last minute for the fleet view, the last hour as plots, drawn by uPlot. The
// stream begins with samples of the hour before the page was opened, so an incident that has begun is there.

import { find, sum } from "./table.js";

const HOUR_S = 3600;
const MINUTE_S = 60;
// Each point is the difference to the sample of so many seconds before; so far apart are points, but for the newest.
const SPAN_S = 10;
const samples = []; // snapshots, or the fields of them that are kept; of the last minute, and one before
const points = [];

export const newest = () => samples.at(-1);

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

const PLOTS = [
  ["ttft", "Time to first token, ms", { median: 1, "90 %": 2 }],
  ["rate", "Requests a second", { ended: 3, failed: 4 }],
  ["apart", "Time between tokens, ms", { median: 10, "90 %": 11 }],
  ["tokens", "Output tokens a second", { tokens: 5 }],
  ["cached", "Prompt tokens cached, %", { chosen: 6, "best target": 7, "one pooled cache": 8 }],
  ["regret", "Predicted delay against the earliest target, ms", { mean: 9 }],
];
const HEIGHT = 150;
const COLOURS = ["--mark", "--good", "--bad"];
const clock = (time) => (time ? new Date(time * 1000).toLocaleTimeString("en-GB") : "–");
const written = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 1 : 0));
// What the legend shows while the cursor is elsewhere.
const latest = (plot, series) => plot.data[series]?.at(-1);
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
    stroke: colour(label === "failed" ? "--bad" : COLOURS[at]),
    width: 1.5,
    value: (plot, value, at) => written(value ?? latest(plot, at)),
  }));
  const options = {
    title,
    width: host.clientWidth > 900 ? host.clientWidth / 2 - 16 : host.clientWidth,
    height: HEIGHT,
    series: [{ label: "time", value: (plot, time, at) => clock(time ?? latest(plot, at)) }, ...series],
    axes: [{ ...axis, space: 80, values: (_, times) => times.map(clock) }, { ...axis, size: 60 }],
    scales: { y: { range: (_, low, high) => [0, Math.max(1, high ?? 1) * 1.1] } },
  };
  host.style.color = "";
  return { plot: new uPlot(options, [[]], holder), lines: Object.values(lines) };
}

// The points of the time that is chosen.
export function shown() {
  const since = (newest()?.time ?? 0) - Number(find("span").value);
  return points.filter(([time]) => time >= since);
}

// Draw into the view; once more from the start if its width or the colours have changed.
export function draw(host, again = false) {
  if (again || !drawn.length) {
    drawn.forEach(({ plot }) => plot.destroy());
    host.replaceChildren();
    drawn = PLOTS.map((one) => make(host, one));
  }
  const chosen = shown();
  const column = (at) => chosen.map((one) => one[at]);
  drawn.forEach(({ plot, lines }) => plot.setData([column(0), ...lines.map(column)]));
}
