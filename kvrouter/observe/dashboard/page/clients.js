// The clients view: who asks this replica for how much, the last minute next to the ten before it.

import { fill, find, number, say, share } from "./table.js";

let spans = { now_s: 0, before_s: 0 };

const decimal = (value) => (value === null ? "–" : value.toFixed(value < 1 ? 2 : value < 10 ? 1 : 0));
const ratio = (part, whole) => (whole > 0 ? part / whole : null);
const answered = (part) => part.requests - part.refused;
const both = (of) => (row) => [of(row.now, spans.now_s), of(row.before, spans.before_s)];
const write = (one) => ([now, before]) => (spans.before_s ? `${one(now)} (${one(before)})` : one(now));

// Each with the figure of the ten minutes before in brackets. Refused requests have no prompt that was placed.
const COLUMNS = [
  ["Client", (row) => row.client, String],
  ["In flight", (row) => row.in_flight, number],
  ["Requests a second", both((part, seconds) => ratio(part.requests, seconds)), write(decimal)],
  ["Prompt tokens each", both((part) => ratio(part.prompt_tokens, answered(part))), write(decimal)],
  ["Predicted cached", both((part) => ratio(part.overlap_tokens, part.prompt_tokens)), write(share)],
  ["Output tokens each", both((part) => ratio(part.output_tokens, answered(part))), write(decimal)],
  ["Seconds each", both((part) => ratio(part.seconds, part.requests)), write(decimal)],
  ["Failed", both((part) => part.failed), write(number)],
  ["Refused", both((part) => part.refused), write(number)],
  ["Left early", both((part) => part.left), write(number)],
];

export async function draw(ask) {
  const answer = await ask("clients");
  spans = answer;
  const before = spans.before_s ? `; in brackets the ${Math.round(spans.before_s)} seconds before` : "";
  say(
    find("asking"),
    `The requests that this replica has ended in the last ${Math.round(spans.now_s)} seconds${before}. First the clients ` +
      "whose requests took most time, those in flight included; beyond 100, the others are one row. Behind a load " +
      "balancer, --trusted-proxies makes their own addresses known.",
  );
  fill(find("asked-by"), COLUMNS, answer.clients);
}
