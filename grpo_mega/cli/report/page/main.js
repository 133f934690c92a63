// The page: its head, the figures that matter at a glance, and the tabs.
const dark = matchMedia("(prefers-color-scheme: dark)");
function setTheme() { document.documentElement.dataset.theme = dark.matches ? "dark" : "light"; }
dark.addEventListener("change", setTheme);
setTheme();

function tile(name, value, note) {
  return el("div", { class: "tile" }, el("div", { class: "name" }, name), el("div", { class: "value" }, value), el("div", { class: "note", title: note || "" }, note || ""));
}
function tiles() {
  const found = [];
  const short = (value) => show(Number(value.toPrecision(3)));
  const fromTo = (name, label) => {
    const first = firstOf(name), last = lastOf(name);
    if (last) found.push(tile(label, first.step === last.step ? short(last.value) : `${short(first.value)} → ${short(last.value)}`, first.step === last.step ? `step ${last.step}` : `step ${first.step} to ${last.step}`));
  };
  const atEnd = (name, label) => {
    const last = lastOf(name);
    if (last) found.push(tile(label, short(last.value), `step ${last.step}`));
  };
  found.push(tile("Steps", data.num_steps ? `${data.steps_done} / ${data.num_steps}` : data.steps_done, data.time_left ? `about ${duration(data.time_left)} left` : ""));
  fromTo("eval/score", "Held-out score");
  fromTo("reward/mean", "Reward");
  atEnd("kl/mean", "KL to the reference");
  fromTo("response_length/mean", "Response length");
  const seconds = points("seconds/step").map((p) => p.value).filter(isNumber).sort((a, b) => a - b);
  if (seconds.length) found.push(tile("Seconds per step", short(seconds[seconds.length >> 1]), "median"));
  const speed = combine(["num_tokens", "seconds/step"], (n, s) => n / s).map((p) => p.value).sort((a, b) => a - b);
  if (speed.length) found.push(tile("Tokens per second", short(speed[speed.length >> 1]), "response tokens, median"));
  return el("div", { class: "tiles" }, found);
}

// The rules that fire at the last step, on every tab.
function alerts() {
  const current = data.findings.filter(([, , isCurrent]) => isCurrent);
  return el("div", { class: "alerts", role: "status" }, current.map(([when, text]) => el("div", { class: "alert" }, when && el("b", {}, `${when}: `), text)));
}

// Each tab: its key, its title, what draws it, and the data that it shows. A live page draws a tab again when this data changes.
const TABS = [
  ["curves", "Curves", drawCurves, (d) => [d.metrics, d.experts]],
  ["samples", "Samples", drawSamples, (d) => d.samples],
  ["heldout", "Held-out", drawHeldout, (d) => d.heldout],
  ["config", "Config", drawConfig, (d) => d.config],
  ["environment", "Environment", drawEnvironment, (d) => d.environment],
  ["messages", "Warnings", drawMessages, (d) => [d.findings, d.messages]],
];
const head = el("div", { id: "head" });
const connection = el("span", { class: "faint", id: "live" });

function drawHead() {
  document.title = `${data.title} · GRPO run`;
  head.replaceChildren(el("header", {},
    el("div", { class: "row" }, el("h1", {}, data.title), badge(data.status.text, data.status.kind), el("span", { class: "right" }), data.is_live_page && connection),
    el("div", { class: "sub" }, `${data.subtitle} · ${data.is_live_page ? "read" : "written"} ${data.written}`)), tiles(), alerts());
  const warnings = data.findings.length + data.messages.filter((m) => m.level === "warning").length;
  const count = document.getElementById("num-warnings");
  count.textContent = warnings;
  count.classList.toggle("warn", warnings > 0);
}
function drawTab(key, draw) {
  const section = document.getElementById(key), field = section.contains(document.activeElement) ? document.activeElement : null;
  section.replaceChildren();
  if (key === "curves") shared.charts = [];
  try {
    draw(section);
  } catch (error) { // if one part cannot be drawn, the others still are
    noteFailure(`${key}: ${error.stack || error}`);
    section.append(empty(`This part cannot be drawn: ${error.message}`));
  }
  const again = field?.id && document.getElementById(field.id); // who types continues in the new field
  again?.focus({ preventScroll: true });
  if (again?.type === "search") again.setSelectionRange(field.selectionStart, field.selectionEnd);
}
function openTab(key) {
  for (const [name] of TABS) {
    document.getElementById(`tab-${name}`).setAttribute("aria-selected", String(name === key));
    document.getElementById(name).hidden = name !== key;
  }
  memory.set("tab", key);
  redrawAll();
}

function build() {
  const page = document.getElementById("page");
  const bar = el("nav", { role: "tablist" });
  page.append(head, bar);
  document.body.append(tip);
  for (const [key, title, draw] of TABS) {
    bar.append(el("button", { type: "button", role: "tab", id: `tab-${key}`, onclick: () => openTab(key) }, title, key === "messages" && el("span", { class: "count", id: "num-warnings" })));
    page.append(el("section", { id: key, role: "tabpanel", hidden: true }));
    drawTab(key, draw);
  }
  drawHead();
  const wanted = location.hash.slice(1) || memory.get("tab", "curves");
  openTab(TABS.some(([key]) => key === wanted) ? wanted : "curves");
}

// A live page asks its server for a new version of the data. It draws only what changed, and keeps what the user chose.
const POLL_MS = 1000;
function update(fresh) {
  const before = data;
  data = fresh;
  drawHead();
  for (const [key, , draw, shown] of TABS) if (JSON.stringify(shown(before)) !== JSON.stringify(shown(fresh))) drawTab(key, draw);
  redrawAll();
}
async function poll() {
  const say = (text, kind) => { connection.textContent = text; connection.className = kind; };
  try {
    const answer = await fetch(`data?version=${data.version}`);
    if (answer.status === 200) update(await answer.json());
    if (answer.ok) say("● live", "live-on");
    else say(`not updated: ${await answer.text()}`, "live-off");
  } catch {
    say("not updated: grpo-mega report --watch has ended", "live-off");
  }
  setTimeout(poll, POLL_MS);
}
build();
if (data.is_live_page) poll();
document.documentElement.dataset.ready = "yes";
