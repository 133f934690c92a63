// The metrics of each chart, in the order in which a person asks for them. All other metrics are under "further".
const NOT_FUNCTIONS = new Set(["mean", "std", "min", "max"]);
const PHASE_COLORS = { sample: "--c0", update: "--c1", logprobs: "--c2", sync: "--c3", checkpoint: "--c4", offload: "--c5", onload: "--c5", wake: "--c6", sleep: "--c6", reward: "--c7", other: "--c8" };

function below(prefix) {
  return metricNames().filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length)).sort();
}
function drawCurves(parent) {
  if (!metricNames().length) {
    parent.append(empty("No step is logged yet: the curves start with the first one."));
    return;
  }
  const taken = new Set();
  const lines = (pairs, isDots) => pairs.filter(([name]) => name in data.metrics.series).map(([name, label], i) => {
    taken.add(name);
    return { name, label, points: points(name), color: color(i), isDots };
  });
  const charts = el("div", { class: "charts" });
  const constant = []; // lines that are in no chart
  const add = (title, found, options, box = charts) => {
    if (found.some(isInformative) || (options?.isStacked && found.length)) box.append(makeChart(title, found, options));
    else constant.push(...found.filter((line) => line.name && line.points.length).map((line) => ({ name: line.name, value: line.points.at(-1).value })));
  };

  const functions = below("reward/").filter((name) => !NOT_FUNCTIONS.has(name));
  add("Reward", lines([["reward/mean", "total"], ...functions.map((name) => [`reward/${name}`, name])]), { note: "mean of the step's samples" });
  const evals = below("eval/"), isLength = (name) => name.endsWith("response_length"), isSampled = (name) => name.includes("@");
  const heldout = (names) => lines(names.map((name) => [`eval/${name}`, name]), true);
  add("Held-out", heldout(["score", ...evals.filter((name) => name !== "score" && !isLength(name) && !isSampled(name))]), { note: "prompts not trained on" });
  add("Held-out, sampled answers", heldout(evals.filter(isSampled)), { note: "prompts not trained on" });
  const verdictsOf = [...new Set(below("verdict/").map((name) => name.split("/")[0]))];
  for (const name of verdictsOf) {
    const found = lines(below(`verdict/${name}/`).map((verdict) => [`verdict/${name}/${verdict}`, verdict]));
    const others = ["--c4", "--c3", "--c5", "--c6", "--c7", "--c8"];
    for (const line of found) line.color = `var(${GOOD_VERDICTS.test(line.label) ? "--c2" : line.label === "wrong" || line.label === "malformed" ? "--c1" : others.shift() || "--c8"})`;
    add(`Verdicts: ${name}`, found, { note: "share of samples", format: share });
  }
  add("KL to the reference", lines([["kl/mean", "KL (k3), nats per token"]]));
  add("Entropy", lines([["entropy/mean", "nats per token"]]));
  add("Response length", lines([["response_length/mean", "mean"], ["response_length/max", "longest"], ...evals.filter(isLength).map((name) => [`eval/${name}`, `held-out ${name.replace(/_?response_length$/, "").replace("/", " ")}`.trim()])]), { note: "tokens" });
  add("Clipped tokens", lines([["clip/fraction", "all"], ["clip/fraction_low", "low"], ["clip/fraction_high", "high"]]), { format: share });
  add("Mismatch of engine and trainer", lines([["mismatch/abs_mean", "|Δ log-prob|, mean"], ["mismatch/abs_max", "largest"], ["mismatch/k3", "KL (k3)"]]), { isLog: true });
  add("Importance ratio", lines([["ratio/mean", "mean"], ["ratio/max", "largest"]]));
  add("Loss", lines([["loss/total", "total"], ...below("loss/").filter((name) => name !== "total").map((name) => [`loss/${name}`, name])]));
  add("Gradient norm", lines([["grad_norm", "before clipping"]]));
  add("Learning rate", lines([["lr", "learning rate"]]));
  add("Samples of little use", lines([["groups/zero_variance", "zero-variance groups"], ["response_length/cut", "responses cut off"]]), { format: share });
  const idle = { label: "idle slots", color: color(1), points: combine(["seconds/idle", "seconds/sample"], (idle, all) => idle / all) };
  taken.add("seconds/idle");
  add("Use of the engines", [...(idle.points.length ? [idle] : []), ...lines([["engine/retracted", "responses interrupted by a full cache"]])], { note: "during generation", format: share });

  add("Load of the busiest expert", lines([["moe/load_max", "of all layers"], ["moe/load_mean", "mean over layers"]]), { note: "relative to the layer's mean" });
  add("Routing replay", lines([["routing/moved", "the trainer would route otherwise"], ["routing/live", "not recorded"]]), { note: "share of tokens", format: share });
  add("Balancing loss", lines([["moe/aux_loss", "1 is balanced"]]), { note: "mean over layers, without its coefficient" });

  addTimes(add, taken);
  const memory = (isFree, text) => lines(below("memory/").filter((name) => /^(planned_)?free_/.test(name) === isFree).map((name) => [`memory/${name}`, text(name.replace(/_gib$/, ""))]));
  add("Peak memory by phase", memory(false, (name) => name), { note: "GiB, first rank" });
  add("Free device memory by phase", memory(true, (name) => name.replace(/^planned_free_(.*)/, "$1, planned").replace(/^free_/, "")), { note: "GiB, smallest over ranks" });
  if (data.experts?.rows.length) charts.append(expertLoads(data.experts));
  parent.append(curveTools(), charts);

  const grid = el("div", { class: "charts" });
  for (const name of metricNames().filter((one) => !taken.has(one)).sort()) add(name, [{ name, label: "value", points: points(name), color: color(0) }], {}, grid);
  if (grid.children.length) {
    const state = chosen("further", { isOpen: false });
    const fold = el("details", { class: "more", open: state.isOpen }, el("summary", {}, `Further metrics (${grid.children.length})`), grid);
    fold.addEventListener("toggle", () => { state.isOpen = fold.open; redrawAll(); });
    parent.append(fold);
  }
  if (constant.length) parent.append(constants(constant));
}

function constants(found) {
  const hasOneStep = data.metrics.steps.every((steps) => steps.length < 2);
  return el("div", { class: "card pad constants", id: "constants" },
    el("div", { class: "head" }, el("h2", {}, hasOneStep ? "First values" : "Constant so far"),
      el("span", { class: "faint" }, hasOneStep ? "a metric gets a chart when it has a second value" : "these metrics have the same value at every step, so they have no chart")),
    el("div", { class: "values" }, found.sort((a, b) => (a.name < b.name ? -1 : 1)).map(({ name, value }) => el("span", {}, el("span", { class: "soft" }, name), " ", el("b", {}, show(value))))));
}

function addTimes(add, taken) {
  const total = (name) => points(name).reduce((sum, p) => sum + (p.value || 0), 0);
  const order = below("seconds/").filter((name) => !["step", "other", "evaluation", "idle"].includes(name)).sort((a, b) => total(`seconds/${b}`) - total(`seconds/${a}`));
  const names = order.length || "seconds/other" in data.metrics.series ? [...order, "other"] : [];
  const used = new Set();
  const pick = (name, i) => {
    const wanted = PHASE_COLORS[name] && !used.has(PHASE_COLORS[name]) ? PHASE_COLORS[name] : COLORS.find((c) => !used.has(c)) || COLORS[i % COLORS.length];
    used.add(wanted);
    return `var(${wanted})`;
  };
  const found = names.filter((name) => `seconds/${name}` in data.metrics.series).map((name, i) => {
    taken.add(`seconds/${name}`);
    return { name: `seconds/${name}`, label: name, points: points(`seconds/${name}`), color: pick(name, i) };
  });
  taken.add("seconds/step");
  const shares = el("div", { class: "shares", "aria-label": "share of each phase in the time on show" });
  const onDraw = (from, to) => {
    const sums = found.map((line) => line.points.reduce((sum, p) => sum + (p.step >= from && p.step <= to ? p.value || 0 : 0), 0));
    const all = sums.reduce((a, b) => a + b, 0) || 1;
    shares.replaceChildren(...found.map((line, i) => {
      const text = `${line.label} ${share(sums[i] / all)}`;
      return el("div", { style: `background: ${line.color}; flex: ${sums[i] / all} 1 0; padding: ${sums[i] / all > 0.05 ? "2px 6px" : "2px 0"}`, title: text }, sums[i] / all > 0.05 ? text : "");
    }));
  };
  add("Seconds per step, by phase", found, { isStacked: true, isWide: true, format: (v) => `${show(v)} s`, extra: shares, onDraw });

  const perSecond = (label, phase, i) => ({ label, color: color(i), points: combine(["num_tokens", `seconds/${phase}`], (n, s) => n / s) });
  add("Throughput", [perSecond("step", "step", 0), perSecond("sampling", "sample", 1), perSecond("update", "update", 2)].filter((line) => line.points.length), { note: "response tokens per second of each phase" });
  if ("seconds/evaluation" in data.metrics.series) {
    taken.add("seconds/evaluation");
    add("Evaluation", [{ name: "seconds/evaluation", label: "seconds", points: points("seconds/evaluation"), color: color(0), isDots: true }], { format: duration });
  }
}

function curveTools() {
  const levels = { none: 0, light: 0.6, strong: 0.9 };
  const selected = memory.get("smoothing", lastStep() > FEW_POINTS ? "light" : "none");
  shared.smoothing = levels[selected] ?? 0;
  const unzoom = el("button", { type: "button", class: "button unzoom", disabled: shared.domain === null, onclick: () => zoom(null) }, "show all steps");
  const smoothing = segments("smoothing", Object.keys(levels).map((name) => [name, name]), selected, (value) => {
    memory.set("smoothing", value);
    shared.smoothing = levels[value];
    redrawAll();
  }, "smoothing");
  return el("div", { class: "toolbar" }, "smoothing", smoothing, unzoom,
    el("span", { class: "faint" }, "drag over a chart to zoom into steps; values are those under the pointer, else the last"),
    data.metrics.points_averaged > 1 && el("span", { class: "faint" }, `a point is the mean of ${data.metrics.points_averaged} steps (maxima: the largest)`));
}
