// Shared by all files: elements, numbers as text, the page's data and state. Text from a run enters the page only as text nodes
// and attributes, never as HTML.
let data = JSON.parse(document.getElementById("data").textContent); // a live page replaces it when the run has a new step
const SVG = "http://www.w3.org/2000/svg";
const COLORS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const color = (i) => `var(${COLORS[i % COLORS.length]})`;

const failures = [];
const noteFailure = (what) => {
  failures.push(String(what));
  document.documentElement.dataset.failures = failures.join(" | ");
};
window.addEventListener("error", (event) => noteFailure(event.message));
window.addEventListener("unhandledrejection", (event) => noteFailure(event.reason));

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value; // set through the object, because the page's policy forbids style attributes
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const card = (...children) => el("div", { class: "card pad" }, ...children);
const badge = (text, kind) => el("span", { class: `badge ${kind || ""}` }, text);
const empty = (text) => el("div", { class: "card empty" }, text);

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
function show(value) {
  if (typeof value === "string") return value;
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}
const share = (value) => (isNumber(value) ? `${(100 * value).toFixed(value && value < 0.0995 ? 1 : 0)}%` : "–");
function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 100) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

// A metric of the run as points {step, value} by ascending step; value is null if it was not finite.
const metricNames = () => Object.keys(data.metrics.series);
function points(name) {
  const series = data.metrics.series[name];
  if (!series) return [];
  const steps = data.metrics.steps[series.s];
  return series.v.map((value, i) => ({ step: steps[i], value }));
}
const lastOf = (name) => points(name).filter((p) => p.value !== null).at(-1);
const firstOf = (name) => points(name).find((p) => p.value !== null);
// One point for each step at which all metrics have a value.
function combine(names, compute) {
  const maps = names.map((name) => new Map(points(name).map((p) => [p.step, p.value])));
  return points(names[0])
    .filter((p) => maps.every((map) => isNumber(map.get(p.step))))
    .map((p) => ({ step: p.step, value: compute(...maps.map((map) => map.get(p.step))) }))
    .filter((p) => isNumber(p.value));
}

// Remembered across reloads. If a browser stores nothing for files, the page starts fresh.
const memory = {
  get(key, otherwise) {
    try { return sessionStorage.getItem(`grpo:${key}`) ?? otherwise; } catch { return otherwise; }
  },
  set(key, value) {
    try { sessionStorage.setItem(`grpo:${key}`, value); } catch { /* the value is not remembered */ }
  },
};

// What a user chose in a part of the page. It is kept when a live page draws the part again.
const choices = {};
const chosen = (part, initial) => (choices[part] ??= initial);

function segments(key, options, selected, onChange, label) {
  const box = el("div", { class: "segments", role: "group", "aria-label": label, id: key });
  const press = (value) => {
    for (const button of box.children) button.setAttribute("aria-pressed", String(button.dataset.value === value));
  };
  for (const [value, text] of options) {
    box.append(el("button", { type: "button", "data-value": value, onclick: () => { press(value); onChange(value); } }, text));
  }
  press(selected);
  return box;
}

const tip = el("div", { id: "tip" });
function showTip(event, what, rows) {
  tip.replaceChildren(
    el("div", { class: "what" }, what),
    el("table", {}, rows.map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, value))))
  );
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
}
const hideTip = () => { tip.style.display = "none"; };
