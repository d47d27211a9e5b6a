// A click on a heading sorts by it, a second one the other way round; on a phone, where there are no headings,
// a list of choices does it.
"use strict";
const table = document.getElementById("sortable");
const heads = [...table.tHead.rows[0].cells];
function key(row, column) {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
}
function sortBy(column, descending) {
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => {
    const x = key(a, column), y = key(b, column);
    const order = typeof x === "number" ? x - y : x.localeCompare(y);
    return descending ? -order : order;
  });
  table.tBodies[0].append(...rows);
  heads.forEach((head, i) => head.setAttribute("aria-sort",
    i !== column ? "none" : descending ? "descending" : "ascending"));
}
heads.forEach((head, column) => head.querySelector("button").addEventListener("click",
  () => sortBy(column, head.getAttribute("aria-sort") === "ascending")));
document.getElementById("sorter").addEventListener("change", event => {
  const [column, way] = event.target.value.split(" ");
  sortBy(Number(column), way === "down");
});
