// Trains with a Session of the WebAssembly module, and draws the results.
const part = (id) => document.getElementById(id);
const set = (id, text) => { part(id).textContent = text; };
// `?seed=` and, for tests, `?stop=`: the step after which the page pauses by itself.
const asked = new URLSearchParams(location.search);
const seed = Number(asked.get("seed") ?? 1337);
const isSeed = /^\d+$/.test(asked.get("seed") ?? 1337) && seed < 2 ** 32;
const stops = asked.get("stop");
let stop = stops === null ? Infinity : Number(stops);
const losses = [], flips = [];
let session, steps, masks, first, running = false, failed = false, step = 0, keptStep = 0;

function problem(text) {
  part("problem").hidden = false;
  set("problem", text);
  set("status", "Stopped");
  running = false;
  set("run", "Start");
  part("run").disabled = true;
}

// Nothing else on the page would work.
function unusable(text) {
  problem(text);
  for (const section of document.querySelectorAll("main > :not(#problem)")) section.hidden = true;
}

// After a failure, such as the loss of the GPU, the run can be resumed from the last kept state.
function interrupt(error) {
  // Advice after a semicolon is for the command.
  const [reason] = String(error).split("; ");
  problem(`${reason}. The state of step ${keptStep} is kept in this tab: press “Resume” to continue from there.`);
  failed = true;
  set("run", "Resume");
  for (const id of ["run", "download"]) part(id).disabled = false;
}

async function reopen() {
  part("run").disabled = true;
  set("status", "Opening the adapter");
  step = await session.reopen();
  for (const points of [losses, flips]) {
    while (points.length > 0 && points.at(-1)[0] > step) points.pop();
  }
  failed = false;
  part("problem").hidden = true;
  part("run").disabled = false;
}

// Draws [step, value] points as a curve, with three labelled grid lines.
function plot(id, points, digits) {
  const values = points.map((point) => point[1]);
  const low = Math.min(...values), high = Math.max(...values), range = high - low || high || 1;
  const last = Math.max(points.at(-1)[0], 2);
  const x = (at) => 54 + (at / last) * 416, y = (value) => 190 - ((value - low) / range) * 175;
  const stride = Math.ceil(points.length / 800);
  const shown = points.filter((_, i) => i % stride === 0 || i === points.length - 1);
  const line = shown.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const ticks = [0, 0.5, 1].map((share) => {
    const value = low + share * range;
    return `<line class="grid" x1="54" x2="470" y1="${y(value)}" y2="${y(value)}"/>` +
      `<text x="48" y="${y(value) + 4}" text-anchor="end">${value.toFixed(digits)}</text>`;
  }).join("");
  part(id).innerHTML = ticks + `<polyline class="curve" points="${line}"/>` +
    `<text x="54" y="210">0</text><text x="470" y="210" text-anchor="end">step ${last}</text>`;
}

// Red, green and blue of a colour of the style sheet.
function colour(name) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim().slice(1);
  const long = value.length === 3 ? [...value].map((digit) => digit + digit).join("") : value;
  return [0, 2, 4].map((at) => parseInt(long.slice(at, at + 2), 16));
}

function drawMask() {
  const place = part("layer").selectedIndex, [rows, columns] = masks.shape(place);
  const kept = masks.kept(place), before = first.kept(place);
  const [on, off, changed] = ["--accent", "--off", "--changed"].map(colour);
  // The longer side is horizontal.
  const flat = columns >= rows, canvas = part("mask");
  [canvas.width, canvas.height] = flat ? [columns, rows] : [rows, columns];
  const picture = canvas.getContext("2d").createImageData(canvas.width, canvas.height);
  let differ = 0;
  kept.forEach((bit, i) => {
    const row = Math.floor(i / columns), column = i % columns;
    const at = 4 * (flat ? i : column * rows + row);
    differ += bit !== before[i];
    picture.data.set(bit !== before[i] ? changed : bit ? on : off, at);
    picture.data[at + 3] = 255;
  });
  canvas.getContext("2d").putImageData(picture, 0, 0);
  set("changed", `${(100 * differ / kept.length).toFixed(1)} % of this mask's bits differ from step 0.`);
}

// Reads the masks and keeps the run's state. A dense phase has no masks, so the old ones stay.
async function look() {
  const found = await session.masks();
  keptStep = step;
  if (found.names().length === 0) {
    found.free();
    return;
  }
  if (masks && masks !== first) masks.free();
  masks = found;
  first ??= found;
  if (part("layer").length === 0) {
    part("layer").replaceChildren(...found.names().map((name) => new Option(name)));
  }
  set("at", step);
  set("first", first.hash());
  set("hash", masks.hash());
  drawMask();
}

async function sample() {
  set("status", "Sampling");
  set("sample", await session.sample(64));
  set("sampled", `After step ${step}.`);
}

async function train() {
  if (failed) await reopen();
  running = true;
  set("run", "Pause");
  part("download").disabled = true;
  let since = performance.now(), counted = 0;
  while (running && step < steps && step < stop) {
    set("status", "Training");
    const outcome = await session.step();
    step = outcome.step;
    counted += 1;
    losses.push([step, outcome.loss]);
    const flip = outcome.flip_rate;
    if (flip !== undefined) {
      flips.push([step, flip]);
      set("flip", flip.toFixed(4));
      plot("flips", flips, 4);
    }
    set("phase", outcome.sparse ? "sparse (2:4)" : "dense");
    outcome.free();
    set("step", `${step} of ${steps}`);
    set("loss", losses.at(-1)[1].toFixed(4));
    part("progress").value = step;
    const seconds = (performance.now() - since) / 1000;
    if (seconds > 1) {
      const rate = counted / seconds;
      set("speed", rate < 10 ? rate.toPrecision(2) : rate.toFixed(0));
      [since, counted] = [performance.now(), 0];
    }
    plot("losses", losses, 2);
    if (step % 40 === 0) await look();
    if (step % 100 === 0) {
      await sample();
      [since, counted] = [performance.now(), 0];
    }
  }
  await look();
  await sample();
  running = false;
  stop = Infinity;
  set("run", "Resume");
  set("status", step < steps ? "Paused" : "Finished");
  part("run").disabled = step >= steps;
  part("download").disabled = false;
}

function download() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([masks.file()]));
  link.download = `masks-seed-${seed}-step-${part("at").textContent}.bin`;
  link.click();
  URL.revokeObjectURL(link.href);
}

// The name of the adapter, and whether it is a GPU, as far as the browser reports them.
function describe({ info }) {
  const name = [info.vendor, info.architecture, info.description].filter(Boolean).join(" ");
  const software = info.isFallbackAdapter || /swiftshader|llvmpipe|software/i.test(name);
  const kind = software ? "the CPU, emulating a GPU" : name ? "a GPU" : "a real or emulated GPU";
  return `${name || "unnamed"}: ${kind}, through WebGPU, in f32`;
}

async function open(wasm) {
  if (!isSeed) {
    unusable(`The address has seed=${asked.get("seed")}, which is not an integer from 0 to ${2 ** 32 - 1}.`);
    return;
  }
  if (stops !== null && !/^[1-9]\d*$/.test(stops)) {
    unusable(`The address has stop=${stops}, which is not a number of steps.`);
    return;
  }
  if (!navigator.gpu) {
    unusable("WebGPU is not available here. Chrome and Edge have it from version 113, Safari from 26 and Firefox from 141, " +
      "though not on every system. The page must be a local file, or be served from localhost or over https.");
    return;
  }
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) {
    unusable("This browser has WebGPU but offers no adapter: it may block this GPU or its driver. Hardware " +
      "acceleration must be on; see chrome://gpu or about:support. Without a GPU, use the " +
      "command: “sparse24 train” trains the same model on a CPU.");
    return;
  }
  await wasm_bindgen({ module_or_path: wasm });
  set("device", describe(adapter));
  set("seed", seed);
  session = await wasm_bindgen.Session.open(seed);
  steps = session.steps();
  await look();
  set("status", "Ready");
  part("layer").onchange = drawMask;
  matchMedia("(prefers-color-scheme: dark)").onchange = drawMask;
  part("download").disabled = false;
  part("download").onclick = download;
  part("run").disabled = false;
  part("run").onclick = () => {
    if (running) {
      running = false;
      part("run").disabled = true;
      set("status", "Pausing");
    } else train().catch(interrupt);
  };
  // A closed tab loses its run.
  addEventListener("beforeunload", (event) => {
    if (step > 0 && step < steps) event.preventDefault();
  });
  if (stop < Infinity) await train().catch(interrupt);
}

const bytes = Uint8Array.from(atob(WASM), (letter) => letter.charCodeAt(0));
open(bytes).catch((error) => problem(String(error)));
