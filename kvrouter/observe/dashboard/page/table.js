// Tables, and how values are written. Everything from the server becomes a text node: it is not trusted.
//
//     columns, rows ──fill──> the cells whose text differs
//
// A row that stays keeps its cells, so focus stays where it is, and a large fleet is drawn in time.

export const find = (id) => document.getElementById(id);

const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const NUMBERS = new Intl.NumberFormat("en"); // toLocaleString makes one for each number
export const number = (value) => (isKnown(value) ? NUMBERS.format(value) : "–");
export const share = (value) => (isKnown(value) ? `${Math.round(value * 100)} %` : "–");
export function seconds(value) {
  if (!isKnown(value)) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}
// Seconds as people say them: 90 s, 12 min, 5 h, 3 d.
export function age(value) {
  if (!isKnown(value)) return "–";
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([one]) => value >= 2 * one) ?? [1, "s"];
  return `${Math.max(0, Math.floor(value / size))} ${unit}`;
}

export const sum = (rows, value) => rows.reduce((total, row) => total + (value(row) ?? 0), 0);

export function cell(content, tag = "td") {
  const made = document.createElement(tag);
  made.append(content);
  return made;
}

function button(text, press) {
  const made = cell(text, "button");
  made.type = "button";
  made.addEventListener("click", press);
  return made;
}

// Text that is the same is left alone: a screen reader would read it again, and a selection would be lost.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const SPARK = { width: 80, height: 18 };

// A line without axes; the number next to it says what it is.
export function newSpark() {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  made.setAttribute("viewBox", `0 0 ${SPARK.width} ${SPARK.height}`);
  made.setAttribute("aria-hidden", "true");
  made.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
  return made;
}

// The values from left to right, unknown ones left out; the highest, or 1, is at the top.
export function drawSpark(spark, values) {
  const most = values.reduce((high, value) => Math.max(high, value ?? 0), 1);
  const x = SPARK.width / Math.max(1, values.length - 1);
  const y = (SPARK.height - 2) / most;
  const point = (value, at) => `${(at * x).toFixed(1)},${(SPARK.height - 1 - value * y).toFixed(1)} `;
  const points = values.map((value, at) => (isKnown(value) ? point(value, at) : "")).join("");
  if (spark.points !== points) spark.firstChild.setAttribute("points", (spark.points = points));
}

function newBar() {
  const made = cell(document.createElement("span"), "span");
  made.className = "bar";
  return made;
}

export const { compare: compareTexts } = new Intl.Collator("en", { numeric: true });

function compare(a, b) {
  if (Array.isArray(a)) return compare(a[0], b[0]);
  if (typeof a === "string") return compareTexts(a, b);
  return (a ?? -1) - (b ?? -1);
}

// What is known of each table: its titles, its lines by the key of their row, and by what it is sorted.
const tables = new WeakMap();

function knownOf(table) {
  if (!tables.has(table)) tables.set(table, { titles: "", lines: new Map(), heads: [], by: "", descending: false });
  return tables.get(table);
}

// The rows as the user has sorted the table, else as they are. A list counts by its first value.
export function sorted(table, columns, rows) {
  const { by, descending } = knownOf(table);
  const column = columns.find(([title]) => title === by);
  if (!column) return rows;
  const pairs = rows.map((row) => [column[1](row), row]);
  pairs.sort(([a], [b]) => compare(a, b) * (descending ? -1 : 1));
  return pairs.map(([, row]) => row);
}

// Whether somebody is selecting text in an element: then it is not drawn again, or the selection would be lost.
function isSelected(element) {
  const selection = getSelection();
  return selection.type === "Range" && element.contains(selection.anchorNode);
}

// Draw a table. A column: its title, its value, how to write it, and its look:
//     kind   a class for the cell          bar    a share that is drawn below the number
//     spark  values that are drawn instead of a text
// What is not written by String is a number, and aligned right.
// `key` names a row; `control` returns { press, isOpen } if its first cell is a button, `isOpen` if it shows or
// hides rows; `mark` returns its class; `again` draws the rows of another order.
export function fill(table, columns, rows, { key, control, mark, again } = {}) {
  if (isSelected(table)) return;
  const known = knownOf(table);
  known.again = again ?? (() => fill(table, columns, rows, { key, control, mark }));
  const titles = columns.map(([title]) => title).join("\n");
  if (known.titles !== titles) begin(table, known, columns, titles);
  for (const [title, head] of known.heads) {
    const way = title !== known.by ? "none" : known.descending ? "descending" : "ascending";
    if (head.ariaSort !== way) head.ariaSort = way;
  }
  const lines = new Map();
  for (const row of again ? rows : sorted(table, columns, rows)) {
    let name = key ? key(row) : columns[0][1](row);
    while (lines.has(name)) name += "+"; // two attempts of one request
    const asked = control?.(row);
    let line = known.lines.get(name);
    if (!line || !line.control !== !asked) line = newLine(columns, asked);
    line.control = asked;
    update(line, columns, row, mark?.(row) ?? "");
    lines.set(name, line);
  }
  place(table.tBodies[0], known, lines);
}

function begin(table, known, columns, titles) {
  const head = document.createElement("tr");
  known.heads = columns.map(([title, , write]) => [title, cell(button(title, () => sortBy(known, title)), "th")]);
  known.heads.forEach(([, one], at) => {
    one.scope = "col";
    one.className = columns[at][2] === String ? "" : "number";
    head.append(one);
  });
  Object.assign(known, { titles, lines: new Map() });
  table.replaceChildren(cell(head, "thead"), document.createElement("tbody"));
}

function sortBy(known, title) {
  Object.assign(known, { by: title, descending: title === known.by && !known.descending });
  known.again();
}

function newLine(columns, asked) {
  const line = { row: document.createElement("tr"), kind: "", control: asked };
  line.parts = columns.map(([, , write, look], at) => {
    const [text, made] = [new Text(), document.createElement(at ? "td" : "th")];
    const base = write === String ? "" : "number";
    const part = { cell: made, text, written: "", base, kind: base, share: -1, spark: look?.spark ? newSpark() : null };
    made.append(part.spark ?? (at || !asked ? text : (line.button = button(text, () => line.control.press()))));
    made.className = base;
    if (look?.bar) made.append((part.bar = newBar()));
    if (!at) made.scope = "row";
    line.row.append(made);
    return part;
  });
  return line;
}

function update(line, columns, row, kind) {
  if (line.kind !== kind) line.row.className = line.kind = kind;
  if (line.control?.isOpen !== undefined && line.isOpen !== line.control.isOpen)
    line.button.ariaExpanded = line.isOpen = line.control.isOpen;
  columns.forEach(([, value, write, look], at) => {
    const part = line.parts[at];
    if (part.spark) return drawSpark(part.spark, look.spark(row));
    const written = write(value(row));
    if (part.written !== written) part.text.data = part.written = written;
    const kinds = look?.kind ? `${part.base} ${look.kind(row)}` : part.base;
    if (part.kind !== kinds) part.cell.className = part.kind = kinds;
    const share = look?.bar ? Math.min(1, look.bar(row) ?? 0) : -1;
    if (part.share !== share) part.bar.firstChild.style.transform = `scaleX(${(part.share = share)})`;
  });
}

// The lines in their order. What has the focus keeps it, though it is moved.
function place(body, known, lines) {
  const [before, after] = [[...known.lines.values()], [...lines.values()]];
  known.lines = lines;
  if (before.length === after.length && before.every((line, at) => line === after[at])) return;
  const focused = document.activeElement;
  const isInside = body.contains(focused);
  body.replaceChildren(...after.map((line) => line.row));
  if (isInside) focused.focus();
}
