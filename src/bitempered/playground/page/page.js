// The page: settings, the link that holds them, the connection, and what the user does. The server computes.

import { EDGE, bytes, chart, colours, picture, toPixel, toPlace } from "./draw.js";

const $ = (id) => document.getElementById(id);
// What settings.py has too: the page needs these before the server answers. A test compares them.
const DEFAULTS = { data: "ring", noise: "random", level: 0.3, t1: 0.2, t2: 4, schedule: false, seed: 0, points: [] };
const MOST_POINTS = 1000;
const LEVELS = { none: 0.3, random: 0.3, "small-margin": 0.2, "large-margin": 0.15 };
const OWN_AT_FIRST = 60; // points of the data set shown that "your points" begins with
const canvases = [$("picture-0"), $("picture-1")];

let settings = { ...DEFAULTS };
let problem = null, frame = null, curves = null, history = [], surfaces = [], truth = null;
let running = true, probe = null, said = null, socket = null, palette = colours();

// The link: every setting in the fragment, points in four letters each.

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

function encodePoints(points) {
  const part = (v) => Math.round(((v / EDGE + 1) / 2) * 2047);
  return points
    .map(([x, y, label]) => (part(x) * 2048 + part(y)) * 4 + label)
    .map((n) => [18, 12, 6, 0].map((shift) => LETTERS[(n >> shift) & 63]).join(""))
    .join("");
}

function decodePoints(text) {
  const points = [];
  for (let i = 0; i + 4 <= text.length; i += 4) {
    const n = [...text.slice(i, i + 4)].reduce((sum, letter) => sum * 64 + LETTERS.indexOf(letter), 0);
    const part = (k) => +((2 * k) / 2047 * EDGE - EDGE).toFixed(4);
    points.push([part(n >> 13), part((n >> 2) & 2047), n & 3]);
  }
  return points;
}

function toLink() {
  const { points, ...rest } = settings;
  const query = new URLSearchParams({ ...rest, schedule: +rest.schedule, marks: +$("marks").checked });
  if (settings.data === "own") query.set("points", encodePoints(points));
  return `#${query}`;
}

function fromLink(fragment) {
  const query = new URLSearchParams(fragment.replace(/^#/, ""));
  const found = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) {
    if (!query.has(name)) continue;
    const text = query.get(name);
    if (name === "points") found.points = decodePoints(text);
    else if (name === "schedule") found.schedule = text === "1";
    else found[name] = typeof DEFAULTS[name] === "number" && text.trim() !== "" && isFinite(text) ? +text : text;
  }
  $("marks").checked = query.get("marks") !== "0";
  return found;
}

// The connection.

function connect() {
  $("reconnect").hidden = true;
  tell("");
  const mine = (socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/train`));
  mine.onopen = () => {
    ask({ settings: wanted() });
    ask({ run: running });
  };
  mine.onmessage = (event) => receive(JSON.parse(event.data));
  mine.onclose = (event) => {
    if (mine !== socket) return;
    tell(event.reason ? `Disconnected: ${event.reason}.` : "Disconnected: is “bitempered playground” still running?");
    $("reconnect").hidden = false;
    tellState();
  };
}

function ask(message) {
  if (socket && socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

// Own points as the link has them, rounded: who opens it sees the same nets.
const wanted = () => ({ ...settings, points: settings.data === "own" ? decodePoints(encodePoints(settings.points)) : [] });

let timer = null;
function restart({ soon = false } = {}) {
  if (!location.hash || location.hash !== toLink()) window.history.replaceState(null, "", toLink());
  if (timer) return;
  const send = () => {
    timer = null;
    if (socket && socket.readyState === WebSocket.CLOSED) connect();
    else ask({ settings: wanted() });
  };
  // While a slider or a point moves, the server gets a part of what it passes, and always where it ends.
  timer = setTimeout(send, soon ? 0 : 80);
}

function receive(message) {
  if (message.error !== undefined) {
    tell(`${message.error[0].toUpperCase()}${message.error.slice(1)}.`);
    if (!problem && !refused) {
      refused = true; // a link with impossible settings
      settings = { ...DEFAULTS };
      show();
      ask({ settings: wanted() });
    }
  } else if (message.start) {
    if (!refused) tell("");
    refused = false;
    problem = message.start;
    truth = problem.truth && bytes(problem.truth);
    history = [];
    surfaces = [];
    frame = null;
  } else if (message.frame && problem) {
    frame = message.frame;
    frame.sides.forEach((side, i) => (surfaces[i] = bytes(side.surface)));
    if (frame.curves) curves = frame.curves;
    if (frame.probe) said = frame.probe;
    const last = history.at(-1);
    if (!last || last.step < frame.step) history.push({ step: frame.step, sides: frame.sides });
    redraw();
  }
}
let refused = false;

function tell(text) {
  $("message").firstElementChild.textContent = text;
  $("message").hidden = !text;
}

function tellState() {
  $("state").textContent = socket.readyState > WebSocket.OPEN ? "Disconnected"
    : socket.readyState < WebSocket.OPEN || !frame ? "Connecting…"
    : frame.done ? `Finished: ${problem.steps} steps`
    : `${running ? "Training" : "Paused"}: step ${frame.step} of ${problem.steps}`;
}

// Drawing, at most once for each frame of the screen.

let drawing = false;
function redraw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    draw();
  });
}

const percent = (part, digits = 1) => `${(100 * part).toFixed(digits)}\u00a0%`;

function draw() {
  if (!problem) return;
  const own = settings.data === "own";
  const points = dragged === null ? problem.points : settings.points.map(([x, y, label]) => [x, y, label, label]);
  canvases.forEach((canvas, side) =>
    picture(canvas, { surface: surfaces[side], grid: problem.grid, classes: problem.classes, truth, points,
      marks: $("marks").checked, probe, palette }));
  $("third").hidden = problem.classes < 3;
  $("truth-legend").hidden = !truth;
  $("wrong-legend").hidden = !problem.wrong || !$("marks").checked;
  if (!frame) return;
  document.querySelectorAll(".of").forEach((of) => (of.textContent = own ? "of your labels right" : "of clean labels right"));
  frame.sides.forEach((side, i) => {
    $(`clean-${i}`).textContent = percent(side.clean);
    $(`fits-${i}`).textContent = problem.wrong
      ? `Agrees with ${percent(side.given, 0)} of the labels it sees; ${percent(1 - problem.wrong / problem.points.length, 0)} are right.`
      : `Agrees with ${percent(side.given, 0)} of the labels it sees; all are right.`;
    $(`probe-${i}`).innerHTML = inWords(i);
  });
  const t = (value) => +value.toFixed(2);
  $("pair-now").textContent = `t1 = ${t(frame.t1)}, t2 = ${t(frame.t2)}`;
  $("steps").value = frame.step / problem.steps;
  $("run").textContent = frame.done ? "Run again" : running ? "Pause" : "Run";
  tellState();
  drawCharts();
  if (curves) {
    $("t1-says").textContent = curves.bound === null
      ? "At 1, as in the logistic loss, a wrong label can cost any amount."
      : `Bounded: a wrong label costs at most ${curves.bound.toFixed(2)}. The logistic loss has no limit.`;
    const [usual, now] = curves.transfer.map((line) => percent(line.at(-1), 1));
    $("t2-says").textContent = curves.transfer[1].at(-1) === curves.transfer[0].at(-1)
      ? "At 1, as in the logistic loss, the net is soon sure: an activation of 6 means 99.8 %."
      : `${frame.t2 > 1 ? "Heavy" : "Light"} tail: an activation of 6 means ${now}, with the logistic loss ${usual}.`;
  }
}

function inWords(side) {
  if (!probe || !said) return side ? "" : "Point at a picture to see what the nets say there.";
  const { activations, probabilities } = said.sides[side];
  const cell = (value, label, text) => `<span class="k${label}">${value === null ? "?" : text}</span>`;
  const place = probe.map((value) => value.toFixed(2).replace("-", "−")).join(", ");
  return `At (${place}): activations ${activations.map((a, k) => cell(a, k, (a ?? 0).toFixed(2).replace("-", "−"))).join(", ")}<br>` +
    `probabilities <b>${probabilities.map((p, k) => cell(p, k, percent(p ?? 0))).join(", ")}</b>`;
}

function drawCharts() {
  const steps = [0, problem.steps];
  const xTicks = [0, problem.steps / 2, problem.steps];
  const line = (name) => [0, 1].map((side) => history.map(({ step, sides }) => [step, sides[side][name]]));
  const all = history.flatMap(({ sides }) => sides.map((side) => side.clean));
  const low = Math.min(...all) < 0.5 ? 0 : 0.5;
  chart($("accuracy"), { x: steps, y: [low, 1], xTicks, yTicks: low ? [0.5, 0.75, 1] : [0, 0.5, 1],
    xLabel: "step", format: (v) => `${100 * v} %`, series: line("clean"),
    labels: [["logistic", steps[1], low + 0.12 * (1 - low), "end"], ["bi-tempered", steps[1], low + 0.02 * (1 - low), "end"]] });
  const losses = history.flatMap(({ sides }) => sides.map((side) => side.loss ?? 0));
  const top = Math.max(0.2, Math.ceil(10 * Math.max(...losses)) / 10 + 0.1);
  chart($("training"), { x: steps, y: [0, top], xTicks, yTicks: [0, top / 2, top], xLabel: "step",
    format: (v) => v.toFixed(2), series: line("loss"),
    labels: [["logistic", steps[1], 0.97 * top, "end"], ["bi-tempered", steps[1], 0.86 * top, "end"]] });
  if (!curves) return;
  const curve = (name) => curves[name].map((values) => values.map((value, i) => [curves.activation[i], value]));
  const reach = curves.activation.at(-1);
  // With two classes, where the cross is: on the transfer function of each net.
  const at = probe && said && problem.classes === 2 ? said.sides.map(({ activations: [a, b], probabilities }, side) =>
    [side, a === null || b === null ? null : b - a, probabilities[1]]) : [];
  const axis = { x: [-reach, reach], xTicks: [-reach, -reach / 2, 0, reach / 2, reach] };
  const bound = curves.bound;
  chart($("loss"), { ...axis, y: [0, 6], yTicks: [0, 2, 4, 6], xLabel: "wrong ←  activation  → right", series: curve("loss"), bound,
    labels: [["logistic", reach, 5.6, "end"], ["bi-tempered", reach, 4.9, "end"],
      bound !== null && bound <= 4 ? [`at most ${bound.toFixed(2)}`, reach, bound + 0.25, "end"] : [""]] });
  chart($("transfer"), { ...axis, y: [0, 1], yTicks: [0, 0.5, 1], xLabel: "activation", format: (v) => `${100 * v} %`,
    series: curve("transfer"), dots: at, labels: [["logistic", reach, 0.14, "end"], ["bi-tempered", reach, 0.03, "end"]] });
}

// The settings on the page.

function show() {
  for (const name of ["data", "noise"]) {
    const choice = document.querySelector(`input[name=${name}][value="${CSS.escape(settings[name])}"]`);
    if (choice) choice.checked = true;
  }
  $("level").value = 100 * settings.level;
  $("level-out").textContent = settings.noise === "none" ? "none" : percent(settings.level, 0);
  $("level").disabled = settings.noise === "none";
  for (const name of ["t1", "t2"]) {
    $(name).value = settings[name];
    $(`${name}-out`).textContent = (+settings[name]).toFixed(name === "t1" ? 2 : 1);
  }
  $("schedule").checked = settings.schedule;
  $("seed").value = settings.seed;
  $("own").hidden = settings.data !== "own";
  canvases.forEach((canvas) => canvas.classList.toggle("editing", settings.data === "own"));
  document.querySelectorAll("#pairs button").forEach((button) =>
    button.setAttribute("aria-pressed", +button.dataset.t1 === settings.t1 && +button.dataset.t2 === settings.t2));
}

function change(patch, options) {
  settings = { ...settings, ...patch };
  running = true;
  show();
  ask({ run: true });
  restart(options);
}

function temperatures(t1, t2, moved) {
  // t1 must not exceed t2: the one that moves takes the other along.
  if (t1 > t2) [t1, t2] = moved === "t1" ? [t1, t1] : [t2, t2];
  change({ t1, t2 });
}

$("controls").addEventListener("submit", (event) => event.preventDefault());
document.querySelectorAll("input[name=data]").forEach((input) => input.addEventListener("change", () => {
  const begin = input.value === "own" && !settings.points.length && problem;
  const points = begin ? problem.points.slice(0, OWN_AT_FIRST).map(([x, y, clean]) => [x, y, clean]) : settings.points;
  change({ data: input.value, points });
}));
document.querySelectorAll("input[name=noise]").forEach((input) => input.addEventListener("change", () =>
  change({ noise: input.value, level: LEVELS[input.value] })));
$("level").addEventListener("input", () => change({ level: $("level").valueAsNumber / 100 }));
$("t1").addEventListener("input", () => temperatures($("t1").valueAsNumber, settings.t2, "t1"));
$("t2").addEventListener("input", () => temperatures(settings.t1, $("t2").valueAsNumber, "t2"));
document.querySelectorAll("#pairs button").forEach((button) => button.addEventListener("click", () =>
  change({ t1: +button.dataset.t1, t2: +button.dataset.t2 })));
$("schedule").addEventListener("change", () => change({ schedule: $("schedule").checked }));
$("seed").addEventListener("change", () => change({ seed: Math.min(999999, Math.max(0, Math.round(+$("seed").value) || 0)) }));
const nextSeed = () => change({ seed: (settings.seed + 1) % 1000000 });
$("next-seed").addEventListener("click", nextSeed);
$("marks").addEventListener("change", () => {
  window.history.replaceState(null, "", toLink());
  redraw();
});
$("clear").addEventListener("click", () => edit([]));

function run() {
  if (socket.readyState > WebSocket.OPEN) return connect();
  if (frame && frame.done) return change({}, { soon: true });
  running = !running;
  ask({ run: running });
  redraw();
}
$("run").addEventListener("click", run);
$("restart").addEventListener("click", () => change({}, { soon: true }));
$("reconnect").addEventListener("click", connect);

$("share").addEventListener("click", async () => {
  window.history.replaceState(null, "", toLink());
  let done = "Link copied";
  try {
    await navigator.clipboard.writeText(location.href);
  } catch {
    done = "Link is in the address bar"; // the clipboard needs HTTPS or localhost
  }
  $("share").textContent = done;
  setTimeout(() => ($("share").textContent = "Copy link"), 2000);
});
window.addEventListener("hashchange", () => {
  settings = fromLink(location.hash);
  show();
  restart({ soon: true });
});

// Your own points: click, drag, remove. And the cross, by pointer or arrow keys.

let dragged = null; // the index of the point that moves

function edit(points, options) {
  settings = { ...settings, points };
  if (problem) {
    problem.points = points.map(([x, y, label]) => [x, y, label, label]);
    problem.wrong = 0;
    problem.classes = Math.max(problem.classes, 2);
  }
  redraw();
  if (new Set(points.map((point) => point[2])).size > 1) change({}, options);
  else {
    window.history.replaceState(null, "", toLink());
    running = false;
    ask({ run: false });
    tell("Place points of at least two classes, and the nets will learn to tell them apart.");
  }
}

function place(event, canvas) {
  const box = canvas.getBoundingClientRect();
  const keep = (v) => +Math.min(EDGE, Math.max(-EDGE, v)).toFixed(3);
  return toPlace([event.clientX - box.left, event.clientY - box.top], box.width).map(keep);
}

function near(at, canvas, reach) {
  const size = canvas.getBoundingClientRect().width;
  const [u, v] = toPixel(at, size);
  let best = null, least = reach;
  settings.points.forEach((point, i) => {
    const [p, q] = toPixel(point, size);
    const distance = Math.hypot(p - u, q - v);
    if (distance < least) [best, least] = [i, distance];
  });
  return best;
}

const paint = () => +document.querySelector("input[name=paint]:checked").value; // NaN: a click removes
const without = (index) => settings.points.filter((_, i) => i !== index);
const add = (at) => {
  if (settings.points.length >= MOST_POINTS) return tell(`${MOST_POINTS.toLocaleString("en")} points are the most.`);
  edit([...settings.points, [...at, paint()]]);
};

let lastProbe = 0;
function point(at) {
  probe = at;
  redraw();
  const now = performance.now();
  clearTimeout(point.later);
  if (now - lastProbe > 60) {
    lastProbe = now;
    ask({ probe: at });
  } else point.later = setTimeout(() => point(probe), 60);
}
function unpoint() {
  clearTimeout(point.later);
  probe = said = null;
  ask({ probe: null });
  redraw();
}

canvases.forEach((canvas) => {
  canvas.addEventListener("pointermove", (event) => {
    const at = place(event, canvas);
    if (dragged !== null) {
      settings.points = settings.points.map((old, i) => (i === dragged ? [...at, old[2]] : old));
      redraw();
      if (new Set(settings.points.map((old) => old[2])).size > 1) restart();
    }
    point(at);
  });
  canvas.addEventListener("pointerdown", (event) => {
    const at = place(event, canvas);
    point(at);
    if (settings.data !== "own" || event.button !== 0) return;
    const hit = near(at, canvas, event.pointerType === "touch" ? 24 : 12);
    if (event.altKey || event.shiftKey || isNaN(paint())) return hit !== null && edit(without(hit));
    if (hit === null) return add(at);
    dragged = hit;
    canvas.setPointerCapture(event.pointerId);
  });
  const drop = () => {
    if (dragged === null) return;
    dragged = null;
    edit(settings.points);
  };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", drop);
  // A finger that is lifted leaves the cross, to be read.
  canvas.addEventListener("pointerleave", (event) => dragged === null && event.pointerType !== "touch" && unpoint());
  canvas.addEventListener("contextmenu", (event) => {
    if (settings.data !== "own") return;
    event.preventDefault();
    const hit = near(place(event, canvas), canvas, 16);
    if (hit !== null) edit(without(hit));
  });
  canvas.addEventListener("blur", unpoint);
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    const keep = (v) => +Math.min(EDGE, Math.max(-EDGE, v)).toFixed(3);
    const at = probe || [0, 0];
    if (move) point([keep(at[0] + 0.05 * move[0]), keep(at[1] + 0.05 * move[1])]);
    else if (event.key === "Enter" && settings.data === "own" && !isNaN(paint())) add(at);
    else if (["Enter", "Delete", "Backspace"].includes(event.key) && settings.data === "own") {
      const hit = near(at, canvas, 40);
      if (hit !== null) edit(without(hit));
    } else if (event.key === "Escape") unpoint();
    else return;
    event.preventDefault();
  });
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, button, summary") && !(event.target.type === "range" && event.key !== " ")) {
    if (event.target.type !== "radio" || event.key === " ") return;
  }
  const key = event.key.toLowerCase();
  if (key === " ") run();
  else if (key === "r") change({}, { soon: true });
  else if (key === "n") nextSeed();
  else if ("123".includes(key) && settings.data === "own") document.querySelectorAll("input[name=paint]")[key - 1].checked = true;
  else return;
  event.preventDefault();
});

// Light and dark: as the system has it, or as chosen here.

const THEMES = ["auto", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";
try {
  theme = THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto";
} catch { /* storage may be forbidden */ }

function wear() {
  document.documentElement.dataset.theme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
  $("theme").textContent = `Theme: ${theme}`;
  $("theme").removeAttribute("aria-label");
  palette = colours();
  redraw();
}
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.setItem("theme", theme); } catch { /* as above */ }
  wear();
});
dark.addEventListener("change", wear);
new ResizeObserver(redraw).observe(canvases[0]);

wear();
settings = fromLink(location.hash);
show();
connect();
