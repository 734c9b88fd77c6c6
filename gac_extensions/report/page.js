"use strict";

// --- the heat map: one cell is in the tab order, arrow keys move between cells, the panel tells of the last one

const cells = JSON.parse(document.getElementById("cells").textContent);
const heat = document.getElementById("heat");
const told = document.getElementById("told");
const buttons = [...heat.querySelectorAll("button")];
let current = null;

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function tell(button) {
  if (button === current) return;
  if (current) current.setAttribute("aria-pressed", "false");
  current = button;
  button.setAttribute("aria-pressed", "true");
  const cell = cells[button.dataset.cell];
  const facts = document.createElement("dl");
  for (const [name, value] of cell.facts) {
    const row = document.createElement("div");
    row.append(element("dt", name), element("dd", value));
    facts.append(row);
  }
  told.replaceChildren(element("h3", cell.label), facts, ...cell.reasons.map((reason) => element("p", reason)));
  told.scrollTop = 0;
}

function stop(button) {
  for (const other of buttons) other.tabIndex = -1;
  button.tabIndex = 0;
}

function neighbour(button, key) {
  const cell = button.closest("td");
  const row = cell.parentElement;
  const at = cell.cellIndex;
  const inRow = [...row.querySelectorAll("button")];
  const place = inRow.indexOf(button);
  const below = (next) => next && next.cells[at] && next.cells[at].querySelector("button");
  return {
    ArrowLeft: () => inRow[place - 1],
    ArrowRight: () => inRow[place + 1],
    ArrowUp: () => below(row.previousElementSibling),
    ArrowDown: () => below(row.nextElementSibling),
    Home: () => inRow[0],
    End: () => inRow[inRow.length - 1],
  }[key];
}

stop(buttons[0]);
heat.addEventListener("mouseover", (event) => event.target.dataset.cell && tell(event.target));
heat.addEventListener("click", (event) => event.target.dataset.cell && tell(event.target));
heat.addEventListener("focusin", (event) => {
  if (!event.target.dataset.cell) return;
  stop(event.target);
  tell(event.target);
});
heat.addEventListener("keydown", (event) => {
  const go = event.target.dataset.cell && neighbour(event.target, event.key);
  if (!go) return;
  event.preventDefault();
  const next = go();
  if (next) next.focus();
});

// --- the table of sites: a heading sorts, once more turns the order round; words and a form filter

const table = document.getElementById("all");
const body = table.tBodies[0];
const find = document.getElementById("find");
const form = document.getElementById("form");
const shown = document.getElementById("shown");
const byText = new Intl.Collator("en", { numeric: true });

function compare(one, other) {
  const [a, b] = [one.dataset.v, other.dataset.v];
  return a === undefined ? byText.compare(one.textContent, other.textContent) : Number(a) - Number(b);
}

function sort(heading) {
  const down = heading.getAttribute("aria-sort") === "ascending";
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const at = heading.cellIndex;
  const rows = [...body.rows].sort((one, other) => (down ? -1 : 1) * compare(one.cells[at], other.cells[at]));
  body.append(...rows);
}

function filter() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const row of body.rows) {
    const text = row.textContent.toLowerCase();
    const forms = row.dataset.forms.split(" ");
    row.hidden = !(words.every((word) => text.includes(word)) && (!form.value || forms.includes(form.value)));
    count += row.hidden ? 0 : 1;
  }
  shown.textContent = count === body.rows.length ? `${count} sites` : `${count} of ${body.rows.length} sites`;
}

table.tHead.addEventListener("click", (event) => {
  const heading = event.target.closest("th");
  if (heading) sort(heading);
});
find.addEventListener("input", filter);
form.addEventListener("change", filter);
find.form.addEventListener("submit", (event) => event.preventDefault());
