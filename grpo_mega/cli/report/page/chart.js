// One chart: lines over steps, or phases stacked over steps. All charts share the visible steps, the step under the pointer and
// the smoothing. Dragging over a chart zooms all charts; a double click shows everything again.
const HEIGHT = 186, WIDE_HEIGHT = 236, LEFT = 50, RIGHT = 12, TOP = 8, BOTTOM = 24, FEW_POINTS = 60;
const shared = { domain: null, hover: null, smoothing: 0, charts: [] };
const lastStep = () => Math.max(1, ...data.metrics.steps.map((steps) => steps.at(-1) ?? 0));
const firstStep = () => Math.min(lastStep(), ...data.metrics.steps.map((steps) => steps[0] ?? lastStep()));
const domain = () => shared.domain || [firstStep(), lastStep() + 0.5]; // the last column of a timeline is shown whole
const redrawAll = () => shared.charts.forEach((chart) => chart.draw());
function zoom(range) {
  shared.domain = range;
  document.querySelectorAll(".unzoom").forEach((button) => { button.disabled = range === null; });
  redrawAll();
}
function hoverAt(step) {
  shared.hover = step;
  shared.charts.forEach((chart) => chart.point());
}

// The exponential moving average: weight w for the past, without a bias toward the first value.
function smooth(list, weight) {
  let sum = 0, norm = 0;
  return list.map((p) => {
    if (p.value === null) return p;
    sum = weight * sum + p.value;
    norm = weight * norm + 1;
    return { step: p.step, value: sum / norm };
  });
}
function niceTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}
function logTicks(low, high) {
  const ticks = [];
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), every = Math.max(1, Math.ceil((to - from) / 5));
  for (let power = from; power <= to; power += every) ticks.push(10 ** power);
  return ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
}
// The point at a step, or the last one before it.
function pointAt(list, step) {
  let low = 0, high = list.length - 1, found = null;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (list[middle].step <= step) { found = list[middle]; low = middle + 1; } else high = middle - 1;
  }
  return found;
}

// A chart shows something if a value changes, or is not finite.
function isInformative(line) {
  const first = line.points[0]?.value;
  return line.points.some((p) => p.value === null || p.value !== first);
}

// lines: [{label, points, color, isDots}]; options: {note, isLog, isStacked, isWide, format, unit}
function makeChart(title, lines, options = {}) {
  const state = chosen(`chart ${title}`, { isLog: Boolean(options.isLog), off: new Set() }); // off: labels of hidden lines
  const format = options.format || show;
  const height = options.isWide ? WIDE_HEIGHT : HEIGHT;
  const picture = svg("svg", { height, role: "img", "aria-label": title });
  const at = el("span", { class: "at" });
  const legend = el("div", { class: "legend" });
  const canLog = !options.isStacked && lines.every((line) => line.points.every((p) => p.value === null || p.value > 0));
  const logButton = canLog && el("button", { type: "button", class: "tiny", title: "logarithmic scale", onclick: () => {
    state.isLog = !state.isLog;
    chart.draw();
  } }, "log");
  const isLog = () => state.isLog && canLog;
  const node = el("div", { class: `card chart ${options.isWide ? "wide" : ""}`, "data-title": title },
    el("div", { class: "head" }, el("h2", {}, title), options.note && el("span", { class: "faint" }, options.note), at, logButton),
    legend, options.extra, picture);
  const values = lines.map((line) => {
    const value = el("b", {});
    legend.append(el("button", { type: "button", class: state.off.has(line.label) ? "key off" : "key", title: `${line.label}: show or hide`, onclick: (event) => {
      state.off.has(line.label) ? state.off.delete(line.label) : state.off.add(line.label);
      event.currentTarget.classList.toggle("off", state.off.has(line.label));
      chart.draw();
    } }, el("span", { class: "swatch", style: `background: ${line.color}` }), line.label, " ", value));
    return value;
  });

  let scale = null;
  const chart = { node, draw, point };
  function draw() {
    const width = picture.clientWidth;
    if (!width) return; // the chart is hidden
    logButton && logButton.setAttribute("aria-pressed", String(isLog()));
    const [from, to] = domain();
    const shown = lines.filter((line) => !state.off.has(line.label));
    const prepared = shown.map((line) => ({ line, raw: line.points, soft: shared.smoothing && !line.isDots && !options.isStacked && line.points.length > 4 ? smooth(line.points, shared.smoothing) : null }));
    const stacks = options.isStacked ? stack(shown) : null;
    const seen = (stacks ? stacks.at(-1)?.tops || [] : prepared.flatMap(({ raw }) => raw)).filter((p) => p.step >= from && p.step <= to && p.value !== null).map((p) => p.value);
    let [low, high] = range(seen, isLog(), options.isStacked);
    const x = (step) => LEFT + ((step - from) / (to - from)) * (width - LEFT - RIGHT);
    const place = isLog() ? (v) => (Math.log10(v) - Math.log10(low)) / (Math.log10(high) - Math.log10(low)) : (v) => (v - low) / (high - low);
    const y = (value) => height - BOTTOM - place(value) * (height - TOP - BOTTOM);
    scale = { x, y, width, from, to };
    const parts = [];
    for (const tick of isLog() ? logTicks(low, high) : niceTicks(low, high, 4)) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
      parts.push(svg("text", { x: LEFT - 7, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
    }
    for (const tick of niceTicks(from, to, Math.max(2, Math.min(10, width / 90))).filter(Number.isInteger)) {
      parts.push(svg("text", { x: x(tick), y: height - 7, "text-anchor": "middle" }, tick));
    }
    parts.push(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM }));
    const clip = `clip${shared.charts.indexOf(chart)}`;
    parts.push(svg("clipPath", { id: clip }, svg("rect", { x: LEFT - 4, y: 0, width: width - LEFT - RIGHT + 8, height: height - BOTTOM + 1 })));
    const plot = svg("g", { "clip-path": `url(#${clip})` });
    if (stacks) for (const one of stacks) plot.append(svg("path", { d: area(one, x, y), fill: one.line.color, class: "area" }));
    else for (const { line, raw, soft } of prepared) drawLine(plot, line, raw, soft, x, y, from, to);
    parts.push(plot, svg("g", { class: "pointer" }), svg("rect", { class: "brush", y: TOP, height: height - TOP - BOTTOM, width: 0 }));
    picture.replaceChildren(...parts);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    options.onDraw && options.onDraw(from, to);
    point();
  }
  function drawLine(plot, line, raw, soft, x, y, from, to) {
    const isFew = raw.filter((p) => p.step >= from && p.step <= to).length <= FEW_POINTS;
    plot.append(svg("path", { d: path(raw, x, y), fill: "none", stroke: line.color, "stroke-width": soft ? 1 : 1.8, opacity: soft ? 0.28 : 1, "stroke-dasharray": line.isDots ? "4 3" : null, "stroke-linejoin": "round", class: "line" }));
    if (soft) plot.append(svg("path", { d: path(soft, x, y), fill: "none", stroke: line.color, "stroke-width": 2.2, "stroke-linejoin": "round" }));
    else if (isFew) for (const p of raw) if (p.value !== null) plot.append(svg("circle", { cx: x(p.step), cy: y(p.value), r: line.isDots ? 4 : 2.2, fill: line.color }));
    for (const p of raw) if (p.value === null) plot.append(svg("path", { class: "notfinite", d: `M${x(p.step) - 4} ${height - BOTTOM}l4 -7l4 7z` }, svg("title", {}, `${line.label} is not finite at step ${p.step}`)));
  }
  function point() {
    if (!scale) return;
    const { x, y, from, to } = scale;
    const step = shared.hover ?? lines.reduce((last, line) => Math.max(last, line.points.at(-1)?.step ?? 0), 0);
    at.textContent = `step ${step}`;
    const group = picture.querySelector(".pointer");
    group.replaceChildren();
    const isInside = shared.hover !== null && step >= from && step <= to;
    if (isInside) group.append(svg("line", { class: "hair", x1: x(step), x2: x(step), y1: TOP, y2: height - BOTTOM }));
    lines.forEach((line, i) => {
      const p = pointAt(line.points, step);
      values[i].textContent = p ? (p.value === null ? "not finite" : format(p.value)) : "–";
      if (isInside && p && p.value !== null && !options.isStacked && !state.off.has(line.label)) {
        group.append(svg("circle", { cx: x(p.step), cy: y(p.value), r: 3.6, fill: line.color }));
      }
    });
  }

  const stepOf = (event) => {
    const box = picture.getBoundingClientRect();
    const where = ((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * (scale.to - scale.from) + scale.from;
    return Math.round(Math.max(scale.from, Math.min(scale.to, where)));
  };
  let dragFrom = null;
  picture.addEventListener("pointerdown", (event) => { if (scale && event.button === 0) { dragFrom = stepOf(event); picture.setPointerCapture(event.pointerId); } });
  picture.addEventListener("pointermove", (event) => {
    if (!scale) return;
    const step = stepOf(event);
    hoverAt(step);
    if (dragFrom === null) return;
    const brush = picture.querySelector(".brush");
    brush.setAttribute("x", scale.x(Math.min(dragFrom, step)));
    brush.setAttribute("width", Math.abs(scale.x(step) - scale.x(dragFrom)));
  });
  picture.addEventListener("pointerup", (event) => {
    if (dragFrom === null) return;
    const [a, b] = [dragFrom, stepOf(event)].sort((p, q) => p - q);
    dragFrom = null;
    if (b > a) zoom([a, b]); else chart.draw();
  });
  picture.addEventListener("pointerleave", () => hoverAt(null));
  picture.addEventListener("dblclick", () => zoom(null));
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(picture);
  shared.charts.push(chart);
  return node;
}

function range(seen, isLog, isStacked) {
  let low = Infinity, high = -Infinity;
  for (const v of seen) { low = Math.min(low, v); high = Math.max(high, v); }
  if (low > high) return isLog ? [0.1, 1] : [0, 1];
  if (isLog) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
  if (isStacked || (low >= 0 && low < 0.4 * high)) return [0, high * 1.05 || 1];
  const room = high - low || Math.abs(high) * 0.1 || 0.5;
  return [low - 0.08 * room, high + 0.08 * room];
}
function path(list, x, y) {
  let d = "", isPen = false;
  for (const p of list) {
    if (p.value === null) { isPen = false; continue; }
    d += `${isPen ? "L" : "M"}${x(p.step).toFixed(1)} ${y(p.value).toFixed(1)}`;
    isPen = true;
  }
  return d;
}
// Stacked lines: each with its lower and upper end at every step of the first line.
function stack(lines) {
  const base = new Map();
  const steps = [...new Set(lines.flatMap((line) => line.points.map((p) => p.step)))].sort((a, b) => a - b);
  return lines.map((line) => {
    const found = new Map(line.points.map((p) => [p.step, p.value ?? 0]));
    const bottoms = steps.map((step) => ({ step, value: base.get(step) ?? 0 }));
    for (const step of steps) base.set(step, (base.get(step) ?? 0) + (found.get(step) ?? 0));
    return { line, bottoms, tops: steps.map((step) => ({ step, value: base.get(step) })) };
  });
}
// A staircase: the column of a step reaches half way to its neighbours.
function area({ bottoms, tops }, x, y) {
  const edge = (i, side) => {
    const here = tops[i].step, other = tops[i + side]?.step;
    return x(other === undefined ? here + side * 0.5 : (here + other) / 2);
  };
  let up = "", down = "";
  for (let i = 0; i < tops.length; i++) {
    up += `${i ? "L" : "M"}${edge(i, -1).toFixed(1)} ${y(tops[i].value).toFixed(1)}H${edge(i, 1).toFixed(1)}`;
    down = `L${edge(i, 1).toFixed(1)} ${y(bottoms[i].value).toFixed(1)}H${edge(i, -1).toFixed(1)}${down}`;
  }
  return tops.length ? `${up}${down}Z` : "";
}
