// What a reader can do with the page: hide runs, smooth, zoom, choose a logarithmic scale, and read
// the values under the pointer. The first view of a plot is drawn already; another view moves its
// curves to new axes, and the first one is restored as it was. All numbers are those of data-curves.
"use strict";
const off = new Set(), zooms = new Map();
let smoothing = 0, isLog = false, plots = [];
const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
const one = selector => document.querySelector(selector);

/* Axes: 1, 2 or 5 times a power of ten, about `most` of them in a length. */
const stride = (length, most) => {
  const decade = 10 ** Math.floor(Math.log10(length / most));
  return [1, 2, 5, 10].map(digit => digit * decade).find(step => step >= length / most * 0.9999);
};
const tidy = (value, step) => {
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const text = value === 0 ? "0" : decimals > 4 || Math.abs(value) >= 1e6 ? String(Number(value.toPrecision(3)))
    : step >= 1000 && value >= 1e4 ? Number((value / 1000).toPrecision(9)) + "k" : value.toFixed(decimals);
  return text.replaceAll("-", "−");
};
const axis = (low, high, log, isRound, most) => {
  [low, high] = [low, high].map(end => Math.min(Math.max(end, log ? 1e-300 : -1e300), 1e300));
  if (!(high - low > Math.max(Math.abs(low), Math.abs(high), 1e-290) * 1e-9)) [low, high] = log ? [low / 2, low * 2] : [low - Math.max(1, Math.abs(low)) * 0.05, high + Math.max(1, Math.abs(high)) * 0.05];
  const ticks = [];
  if (log) {
    const decades = Math.log10(high / low), digits = decades * 3 <= most ? [1, 2, 5] : [1], every = Math.max(1, Math.ceil(decades / most));
    if (isRound && decades >= 1) [low, high] = [[low, Math.floor, 1.0001], [high, Math.ceil, 0.9999]].map(([end, round, slack]) => {
      const decade = 10 ** Math.floor(Math.log10(end)), ends = [1, 2, 5, 10].map(digit => digit * decade);
      return round === Math.floor ? ends.findLast(at => at <= end * slack) : ends.find(at => at >= end * slack);
    });
    if (decades >= 1) for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const digit of power % every === 0 ? digits : []) {
        const at = Number(digit + "e" + power);
        if (at >= low * 0.9999 && at <= high * 1.0001) ticks.push([at, tidy(at, 10 ** power)]);
      }
  }
  if (ticks.length < 2) {
    const step = stride(high - low, most);
    if (isRound) [low, high] = [log && low < step ? low : Math.floor(low / step) * step, Math.ceil(high / step) * step];
    for (let at = Math.ceil(low / step - 1e-9); at <= high / step + 1e-9; at++) ticks.push([at * step, tidy(at * step, step)]);
  }
  const share = value => log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  return { low, high, ticks, share };
};

/* Curves: exponential smoothing without a bias at the start, and means of neighbours. */
const smooth = values => {
  let sum = 0, weight = 0;
  return values.map(value => {
    if (value === null) return null;
    [sum, weight] = [smoothing * sum + (1 - smoothing) * value, smoothing * weight + (1 - smoothing)];
    return sum / weight;
  });
};
const thin = (points, most) => {
  const size = Math.ceil(points.length / most), out = [];
  for (let at = 0; size > 1 && at < points.length; at += size) {
    const part = points.slice(at, at + size), there = part.filter(point => point.y !== null);
    const of = pick => there.map(pick);
    out.push({
      x: (part[0].x + part[part.length - 1].x) / 2,
      y: there.length ? of(point => point.y).reduce((sum, y) => sum + y, 0) / there.length : null,
      low: Math.min(...of(point => point.low)), high: Math.max(...of(point => point.high)),
    });
  }
  return size > 1 ? out : points;
};

const view = plot => zooms.get(plot.label) && [Math.max(plot.low, zooms.get(plot.label)[0]), Math.min(plot.high, zooms.get(plot.label)[1])];
const draw = plot => {
  const { svg, frame, curves } = plot, zoom = view(plot);
  const isZoomed = zoom !== undefined && zoom[1] > zoom[0];
  [plot.from, plot.to] = isZoomed ? zoom : [plot.low, plot.high];
  svg.innerHTML = plot.first;
  if (!isZoomed && smoothing === 0 && !isLog && !curves.some(curve => off.has(curve.run))) return;
  const height = Number(svg.getAttribute("height")), log = isLog || svg.dataset.yScale === "log", shown = new Map();
  const all = [], settled = [], { from, to } = plot;
  curves.forEach((curve, number) => {
    if (off.has(curve.run)) return;
    const isSmooth = smoothing > 0 && curve.of !== "validation loss", ys = isSmooth ? smooth(curve.y) : curve.y;
    const is = value => value !== null && (!log || value > 0);
    let points = ys.map((y, at) => {
      const range = isSmooth || !curve.low ? [y, y] : [curve.low[at], curve.high[at]];
      return { x: curve.x[at], y: is(y) ? y : null, low: is(range[0]) ? range[0] : y, high: range[1] };
    });
    const first = points.findIndex(point => point.x >= from), last = points.findLastIndex(point => point.x <= to);
    points = points.slice(Math.max(0, first - 1), last + 2);
    if (first < 0) points = [];
    points = thin(points, 400);
    shown.set(number, points);
    const hasBand = svg.querySelector(`.band[data-curve="${number}"]`) !== null && smoothing === 0;
    for (const { x, y, low, high } of points) if (y !== null) {
      const values = hasBand ? [low, high] : [y];
      all.push(...values);
      if (isZoomed || x >= from + 0.03 * (to - from)) settled.push(...values);
    }
  });
  const ends = values => [Math.min(...values), Math.max(...values)];
  let [low, high] = all.length ? ends(all) : [log ? 1 : 0, log ? 10 : 1];
  if (settled.length) {
    const [least, most] = ends(settled);
    if (high > most + 0.15 * (most - least)) [low, high] = [least, most];
  }
  if (frame.closest(".beside") && !log) low = Math.min(low, 0);
  const x = axis(from, to, false, false, 7), y = axis(low, high, log, true, 5);
  [x.low, x.high] = [from, to];
  const across = value => (1000 * x.share(value)).toFixed(1), up = value => (height * (1 - Math.min(2, Math.max(-1, y.share(value))))).toFixed(1);
  const percent = value => (100 * x.share(value)).toFixed(2) + "%";
  const place = (element, attributes) => { for (const name in attributes) element.setAttribute(name, attributes[name]); };
  const renew = (classes, ticks, put) => {
    const kinds = classes.map(name => [...svg.querySelectorAll(":scope > " + name)]);
    const patterns = kinds.map(([pattern]) => pattern.cloneNode(true)), before = kinds[0][0];
    const fresh = ticks.flatMap((tick, at) => patterns.map((pattern, kind) => put(pattern.cloneNode(true), tick, kind, at)));
    before.before(...fresh);
    kinds.flat().forEach(old => old.remove());
  };
  renew([".grid", ".y"], y.ticks, (element, [value, label], kind) => {
    if (kind === 0) place(element, { y1: up(value), y2: up(value) });
    else { place(element, { y: up(value) }); element.textContent = label; }
    return element;
  });
  renew([".tick", ".x"], x.ticks, (element, [value, label], kind, at) => {
    if (kind === 0) place(element, { x1: percent(value), x2: percent(value) });
    else { place(element, { x: percent(value), class: at % 2 && x.ticks.length > 4 ? "x other" : "x" }); element.textContent = label; }
    return element;
  });
  const markers = new Map();
  for (const element of svg.querySelectorAll("[data-curve]")) {
    const number = Number(element.dataset.curve), points = shown.get(number), kind = element.classList[0];
    if (element.tagName === "use" && !markers.has(number)) markers.set(number, element.cloneNode());
    if (!points || element.tagName === "use" || (kind === "band" && smoothing > 0)) { element.remove(); continue; }
    const pieces = [[]];
    for (const point of points) point.y === null ? pieces.push([]) : pieces[pieces.length - 1].push(point);
    const trace = (points, pick) => points.map(point => across(point.x) + " " + up(pick(point))).join("L");
    element.setAttribute("d", pieces.filter(piece => piece.length).map(piece => kind === "band"
      ? "M" + trace(piece, point => point.high) + "L" + trace([...piece].reverse(), point => point.low) + "Z"
      : "M" + trace(piece, point => point.y)).join(""));
  }
  for (const [number, marker] of markers) {
    const points = (shown.get(number) || []).filter(point => point.y !== null && point.y <= y.high && point.x >= from && point.x <= to);
    const every = Math.max(1, Math.ceil(points.length / 14));
    points.filter((_, at) => at % every === Math.floor(every / 2)).forEach(point => {
      const copy = marker.cloneNode();
      place(copy, { x: percent(point.x), y: up(point.y) });
      svg.append(copy);
    });
  }
  for (const mark of svg.querySelectorAll("[data-x]")) {
    const at = Number(mark.dataset.x);
    if (at < from || at > to || off.has(Number(mark.dataset.run))) mark.remove();
    else place(mark, mark.tagName === "line" ? { x1: percent(at), x2: percent(at) } : { x: percent(at) });
  }
};

const refresh = () => {
  document.querySelectorAll(".cross, .values, .pick").forEach(element => { element.hidden = true; });
  plots.forEach(draw);
  for (const element of document.querySelectorAll("main [data-run]:not(svg *)")) element.hidden = off.has(Number(element.dataset.run));
  one(".tools .reset").hidden = zooms.size === 0;
};

/* The tooltip: each run's own step and value, as logged up to nine digits, and nothing beyond its ends. */
const text = (curve, at) => {
  const value = curve.y[at];
  if (curve.last && curve.last[at] !== curve.step[at])
    return [`steps ${curve.step[at]}–${curve.last[at]}`, value === null ? "not finite" : `${Number(value.toPrecision(5))} on average (${Number(curve.low[at].toPrecision(5))} to ${Number(curve.high[at].toPrecision(5))})`];
  return [`step ${curve.step[at]}`, value === null ? "not finite" : String(Number(value.toPrecision(9)))];
};
const nearest = (xs, x) => {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
};
const attach = plot => {
  const { svg, frame, curves } = plot;
  const [cross, values, pick] = ["cross", "values", "pick"].map(className => make("div", { className, hidden: true }));
  frame.append(cross, values, pick);
  const names = new Map([...document.querySelectorAll(".results tbody th")].map((cell, run) => [run, cell.textContent.trim() + ": "]));
  const where = event => {
    const box = svg.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
  };
  let pressed = null;
  const leave = () => { cross.hidden = values.hidden = pick.hidden = true; pressed = null; };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointercancel", leave);
  svg.addEventListener("pointerdown", event => { if (event.button === 0) pressed = where(event); });
  svg.addEventListener("dblclick", () => { zooms.delete(plot.label); refresh(); });
  svg.addEventListener("pointerup", event => {
    const at = [pressed, where(event)].sort((a, b) => a - b);
    if (pressed !== null && (at[1] - at[0]) * svg.getBoundingClientRect().width > 8) {
      zooms.set(plot.label, at.map(share => plot.from + share * (plot.to - plot.from)));
      refresh();
    }
    pressed = null;
    pick.hidden = true;
  });
  for (const kind of ["pointerdown", "pointermove"]) svg.addEventListener(kind, event => {
    const box = svg.getBoundingClientRect(), outer = frame.getBoundingClientRect(), share = where(event);
    const [left, top] = [box.left - outer.left, box.top - outer.top];
    if (pressed !== null) {
      const [a, b] = [pressed, share].sort((a, b) => a - b);
      pick.hidden = false;
      pick.style.cssText = `left:${left + a * box.width}px;width:${(b - a) * box.width}px;top:${top}px;height:${box.height}px`;
    }
    const x = plot.from + share * (plot.to - plot.from), slack = 6 / box.width * (plot.to - plot.from);
    const near = curves.filter(curve => !off.has(curve.run) && curve.x.length > 0
      && x >= curve.x[0] - slack && x <= curve.x[curve.x.length - 1] + slack)
      .map(curve => ({ curve, at: nearest(curve.x, x) })).filter(({ curve, at }) => curve.x[at] >= plot.from && curve.x[at] <= plot.to);
    cross.hidden = values.hidden = near.length === 0;
    if (near.length === 0) return;
    const closest = near.reduce((best, one) => Math.abs(one.curve.x[one.at] - x) < Math.abs(best.curve.x[best.at] - x) ? one : best);
    const [head] = text(closest.curve, closest.at), at = closest.curve.x[closest.at];
    const lines = new Map();
    for (const { curve, at } of near) {
      const [step, value] = text(curve, at), name = names.get(curve.run) || "";
      lines.set(name, [...(lines.get(name) || []), `${curve.of} ${value}${step === head ? "" : " at " + step}`]);
    }
    const time = plot.label.startsWith("time") ? ` · ${Number(at.toPrecision(4))} ${plot.label.split(", ")[1]}` : "";
    values.textContent = [head + time, ...[...lines].map(([name, texts]) => name + texts.join(", "))].join("\n");
    const snapped = left + (at - plot.from) / (plot.to - plot.from) * box.width;
    cross.style.cssText = `left:${snapped}px;top:${top}px;height:${box.height}px`;
    values.style.left = values.style.right = "";
    const width = values.offsetWidth;
    values.style.left = Math.max(0, snapped + 14 + width > outer.width ? snapped - 14 - width : snapped + 14) + "px";
    values.style.top = top + 8 + "px";
  });
};

/* The controls, for what is on the page now. */
const start = () => {
  plots = [...document.querySelectorAll("figure .plot[data-curves]")].map(svg => ({
    svg, frame: svg.parentElement, first: svg.innerHTML, low: Number(svg.dataset.low), high: Number(svg.dataset.high),
    label: svg.querySelector(".label.end").textContent,
    curves: JSON.parse(svg.dataset.curves).map(curve => ({ ...curve, x: curve.at || curve.step.map((step, at) => (step + (curve.last ? curve.last[at] : step)) / 2) })),
  }));
  const tools = one(".tools");
  tools.hidden = plots.length === 0;
  const runs = [...document.querySelectorAll(".results tbody th")];
  tools.querySelector(".runs").replaceChildren(...runs.map((cell, run) => {
    const button = make("button", { type: "button", ariaPressed: String(!off.has(run)), onclick: () => {
      if (!off.delete(run)) off.add(run);
      button.ariaPressed = String(!off.has(run));
      refresh();
    } });
    button.append(...[...cell.childNodes].map(node => node.cloneNode(true)));
    return button;
  }));
  plots.forEach(attach);
  refresh();
};
const tools = make("div", { className: "tools" }), runs = make("span", { className: "runs" });
const labelled = (label, input) => { const element = make("label"); element.append(label + " ", input); return element; };
const slider = make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, oninput: () => { smoothing = Number(slider.value); refresh(); } });
const check = make("input", { type: "checkbox", onchange: () => { isLog = check.checked; refresh(); } });
const reset = make("button", { type: "button", className: "reset", textContent: "Reset zoom", onclick: () => { zooms.clear(); refresh(); } });
tools.append(runs, labelled("smoothing", slider), labelled("logarithmic", check), reset, make("span", { className: "hint", textContent: "Drag across a plot to zoom." }));
one("header").after(tools);
start();

/* What `sparse24 watch` sends: the contents of the page after a change. */
const live = one(".live");
if (live) {
  const events = new EventSource("events");
  const say = (state, text) => { live.dataset.state = state; live.textContent = text; };
  events.onopen = () => say("on", "live");
  events.onerror = () => say("off", "not connected: this is the last state that arrived");
  events.onmessage = event => {
    const open = [...document.querySelectorAll("details")].map(details => details.open);
    const scrolled = [...document.querySelectorAll(".scroll")].map(box => [box.scrollLeft, box.scrollTop]);
    one("#contents").innerHTML = JSON.parse(event.data);
    document.querySelectorAll("details").forEach((details, at) => { details.open = open[at] ?? details.open; });
    document.querySelectorAll(".scroll").forEach((box, at) => { [box.scrollLeft, box.scrollTop] = scrolled[at] || [0, 0]; });
    start();
    say("on", "live · changed at " + new Date().toLocaleTimeString());
  };
}
