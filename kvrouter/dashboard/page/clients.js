// The clients view: who asks this replica for how much, the last minute next to the ten before it.

import { fill, find, number, share } from "./table.js";

let spans = { now_s: 0, before_s: 0 };

const decimal = (value) => (value === null ? "–" : value.toFixed(value < 10 ? 1 : 0));
const ratio = (part, whole) => (whole > 0 ? part / whole : null);
const twice = (now, before, write) => `${write(now)} (${write(before)})`;
const both = (of) => (row) => [of(row.now, spans.now_s), of(row.before, spans.before_s)];
const write = (one) => ([now, before]) => twice(now, before, one);

// Each with the figure of the ten minutes before in brackets.
const COLUMNS = [
  ["Client", (row) => row.client, String],
  ["In flight", (row) => row.in_flight, number],
  ["Requests a second", both((part, seconds) => ratio(part.requests, seconds)), write(decimal)],
  ["Prompt tokens each", both((part) => ratio(part.prompt_tokens, part.requests)), write(decimal)],
  ["Prompt cached", both((part) => ratio(part.overlap_tokens, part.prompt_tokens)), write(share)],
  ["Output tokens each", both((part) => ratio(part.output_tokens, part.requests)), write(decimal)],
  ["Seconds each", both((part) => ratio(part.seconds, part.requests)), write(decimal)],
  ["Failed", both((part) => part.failed), write(number)],
  ["Refused", both((part) => part.refused), write(number)],
];

export async function draw(ask) {
  const answer = await ask("clients");
  spans = answer;
  find("asking").textContent =
    `The requests that this replica has ended in the last ${Math.round(spans.now_s)} seconds; in brackets the ` +
    `${Math.round(spans.before_s / 60)} minutes before. At most 100 clients are shown, those with most requests in ` +
    "flight first. Behind a load balancer, --trusted-proxies makes their own addresses known.";
  fill(find("asked-by"), COLUMNS, answer.clients);
}
