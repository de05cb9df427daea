// The agreement view: who hears whom, how far the copies are behind, and the digests that differed.

import { fill, find, number, say } from "./table.js";

const NOT_REPORTED = "not reported";
const PEERS = [
  ["Replica", (row) => row.router_id + (row.is_me ? " (this one)" : ""), String],
  ["Admin URL", (row) => row.url, String],
  ["Silent rounds", (row) => row.silent_rounds, number],
  ["Requests in flight", (row) => row.bookings, number],
  ["Requests ended", (row) => row.requests, number],
  ["Failed", (row) => row.failed, number],
  ["Caches it follows", (row) => feeds(row.caches), String, { kind: ({ caches }) => (caches && !isWell(caches) ? "bad" : "") }],
  ["Routing revision", (row) => row.revision, number],
];

const isWell = (one) => one.live === one.feeds && !one.digest_mismatches;

function feeds(one) {
  if (!one) return NOT_REPORTED;
  const said = [`${one.live} of ${one.feeds} in step`];
  if (one.lag_frames) said.push(`${number(one.lag_frames)} frames behind`);
  if (one.digest_mismatches) said.push(`${number(one.digest_mismatches)} digests differed`);
  return said.join(", ");
}

// What `listener` says of `speaker`.
function heard(listener, speaker) {
  if (listener === speaker) return "";
  if (!listener.hears) return NOT_REPORTED;
  const one = listener.hears[speaker.router_id];
  if (!one) return "not heard";
  return one.feeds ? feeds(one) : "heard, no bookings";
}

function isBad(listener, speaker) {
  if (listener === speaker || !listener.hears) return false;
  const one = listener.hears[speaker.router_id];
  return !one || !isWell(one);
}

export function draw({ replicas, replicas_lost: lost, workers_lost: workers }) {
  const pairs = replicas.flatMap((listener) => replicas.map((speaker) => isBad(listener, speaker)));
  const bad = pairs.filter(Boolean).length;
  const caches = replicas.filter((row) => row.caches && !isWell(row.caches)).length;
  say(
    find("agreed"),
    bad || caches
      ? `${bad} pairs of replicas, and the copies of caches in ${caches} replicas, are not in step or were not once.`
      : `${number(replicas.length)} replicas: all hear each other, and no digest has differed.`,
  );
  find("agreed").className = bad || caches ? "bad" : "";
  say(
    find("lost"),
    lost || workers
      ? `Lost since the start of this replica: replicas ${number(lost)}, workers ${number(workers)}. Their heartbeats ended ` +
        "without a last one, as after a crash or behind a network that is cut; the tables do not have them."
      : "",
  );
  const columns = [
    ["Hears", (row) => row.router_id, String],
    ...replicas.map((speaker) => [
      speaker.router_id,
      (listener) => heard(listener, speaker),
      String,
      { kind: (listener) => (isBad(listener, speaker) ? "bad" : "") },
    ]),
  ];
  fill(find("matrix"), columns, replicas);
  fill(find("peers"), PEERS, replicas);
}
