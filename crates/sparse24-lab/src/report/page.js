// Shows the values under the pointer, which it reads from the tables.
"use strict";
for (const plot of document.querySelectorAll("figure .plot:not(.heat):not(.arms)")) {
  const tables = [...plot.closest("figure").querySelectorAll("table[data-series]")];
  if (tables.length === 0) continue;
  const column = Number(plot.dataset.column), low = Number(plot.dataset.low), high = Number(plot.dataset.high);
  const middle = cell => {
    const ends = cell.textContent.split("–").map(Number);
    return (ends[0] + ends[ends.length - 1]) / 2 || 0;
  };
  const curves = tables.filter(table => table.rows[0].cells.length > column && table.tBodies[0].rows.length > 0).map(table => {
    const heads = [...table.rows[0].cells].map(cell => cell.textContent), rows = [...table.tBodies[0].rows];
    return {
      name: table.caption.textContent.split(": ")[0],
      heads,
      shown: heads.map(head => !/^(step|time|least|largest)/.test(head)),
      rows,
      xs: rows.map(row => middle(row.cells[column])),
    };
  });
  if (curves.length === 0) continue;
  const frame = plot.parentElement;
  const cross = document.createElement("div"), values = document.createElement("div");
  cross.className = "cross";
  values.className = "values";
  cross.hidden = values.hidden = true;
  frame.append(cross, values);
  const nearest = (xs, x) => xs.reduce((best, at, index) => Math.abs(at - x) < Math.abs(xs[best] - x) ? index : best, 0);
  plot.addEventListener("pointerleave", () => { cross.hidden = values.hidden = true; });
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect(), outer = frame.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const x = plot.dataset.scale === "log" ? low * Math.pow(high / low, share) : low + share * (high - low);
    const lines = new Map();
    for (const curve of curves) {
      const row = curve.rows[nearest(curve.xs, x)];
      const texts = curve.heads.map((head, index) => head + " " + row.cells[index].textContent).filter((_, index) => curve.shown[index]);
      lines.set(curve.name, [...(lines.get(curve.name) || []), ...texts]);
    }
    const all = [...lines].map(([name, texts]) => name + ": " + texts.join(", "));
    values.textContent = [curves[0].heads[column] + " " + Number(x.toPrecision(4)), ...all].join("\n");
    cross.hidden = values.hidden = false;
    const left = box.left - outer.left + share * box.width;
    cross.style.cssText = `left:${left}px;top:${box.top - outer.top}px;height:${box.height}px`;
    const width = values.offsetWidth;
    values.style.left = Math.max(0, left + 14 + width > outer.width ? left - 14 - width : left + 14) + "px";
    values.style.top = box.top - outer.top + 8 + "px";
  });
}
