// Tables, and how values are written. Everything from the server becomes a text node: it is not trusted.

export const find = (id) => document.getElementById(id);

const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);
export const number = (value) => (isKnown(value) ? value.toLocaleString("en") : "–");
export const share = (value) => (isKnown(value) ? `${Math.round(value * 100)} %` : "–");
export const seconds = (value) => (isKnown(value) ? `${Math.round(value * 1000)} ms` : "–");
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

export function button(text, press) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", press);
  return made;
}

// Whether somebody is selecting text in an element: then it is not drawn again, or the selection would be lost.
export function isSelected(element) {
  const selection = getSelection();
  return !selection.isCollapsed && element.contains(selection.anchorNode);
}

// Draw a table. A column: its title, its value, how to write it, and a class for the cell if it needs one.
// `heading` makes the cell of a title, `press` is called with the row whose first cell is pressed, `mark` gives a
// row its class.
export function fill(table, columns, rows, { heading, press, mark } = {}) {
  if (isSelected(table)) return;
  const head = document.createElement("tr");
  columns.forEach(([title]) => head.append(heading ? heading(title) : cell(title, "th")));
  const lines = rows.map((row) => {
    const line = document.createElement("tr");
    columns.forEach(([, value, write, kind], at) => {
      const text = write(value(row));
      const made = cell(at === 0 && press ? button(text, () => press(row)) : text);
      if (text.length > 40) made.title = text; // long ones are cut off
      if (kind) made.className = kind(row);
      line.append(made);
    });
    if (mark) line.className = mark(row);
    return line;
  });
  const focused = [...table.querySelectorAll("button")].indexOf(document.activeElement);
  table.replaceChildren(head, ...lines);
  if (focused >= 0) table.querySelectorAll("button")[focused]?.focus();
}
