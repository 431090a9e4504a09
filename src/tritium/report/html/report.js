"use strict";

// Numbers sort by their value and what has none comes last; a second click turns the order around.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  for (const button of table.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const numeric = button.dataset.kind === "number";
      const before = head.getAttribute("aria-sort");
      const order = before ? (before === "descending" ? "ascending" : "descending") : numeric ? "descending" : "ascending";
      const sign = order === "ascending" ? 1 : -1;
      const key = (row) => {
        const cell = row.cells[head.cellIndex];
        return cell.dataset.value ?? cell.textContent.trim();
      };
      const compare = (left, right) => {
        const [a, b] = [key(left), key(right)];
        if (!numeric) return sign * a.localeCompare(b, "en", { numeric: true });
        if (a === "" || b === "") return (a === "") - (b === "");
        return sign * (Number(a) - Number(b));
      };
      body.append(...[...body.rows].sort(compare));
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
    });
  }
}

const filter = document.getElementById("filter");
if (filter) {
  const rows = [...document.getElementById("kernel-table").tBodies[0].rows];
  const shown = document.getElementById("shown");
  const marks = [...document.querySelectorAll(".mark")];
  const apply = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const visible = new Set();
    for (const row of rows) {
      const text = `${row.dataset.kernel} ${row.cells[0].textContent}`.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      if (!row.hidden) visible.add(row.dataset.kernel);
    }
    for (const mark of marks) mark.style.display = visible.has(mark.dataset.kernel) ? "" : "none";
    shown.textContent = `${visible.size} of ${rows.length} kernels`;
  };
  filter.addEventListener("input", apply);

  const light = (kernel, on) => {
    for (const thing of [...marks, ...rows]) {
      if (thing.dataset.kernel === kernel) thing.classList.toggle("lit", on);
    }
  };
  for (const thing of [...marks, ...rows]) {
    thing.addEventListener("pointerenter", () => light(thing.dataset.kernel, true));
    thing.addEventListener("pointerleave", () => light(thing.dataset.kernel, false));
  }
  for (const mark of marks) {
    mark.addEventListener("click", () => {
      filter.value = mark.dataset.kernel;
      apply();
      rows.find((row) => !row.hidden)?.scrollIntoView({ block: "nearest" });
    });
  }
}

// A node shows where it comes from and where it goes.
for (const side of document.querySelectorAll(".side")) {
  const items = [...side.querySelectorAll("li")];
  const arcs = [...side.querySelectorAll(".arcs path")];
  items.forEach((item, place) => {
    const light = (on) => {
      for (const arc of arcs) {
        const ends = [Number(arc.dataset.from), Number(arc.dataset.to)];
        if (!ends.includes(place)) continue;
        arc.classList.toggle("lit", on);
        for (const end of ends) if (end !== place) items[end].classList.toggle("lit", on);
      }
    };
    item.addEventListener("pointerenter", () => light(true));
    item.addEventListener("pointerleave", () => light(false));
  });
}
