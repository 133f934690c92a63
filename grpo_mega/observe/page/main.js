// The page: its head, the figures that matter at a glance, and the tabs.
const RELOAD_SECONDS = 30;

function themeButton() {
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  const button = el("button", { type: "button", class: "button", id: "theme" });
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = theme === "dark" ? "☀ light" : "☾ dark";
  };
  const current = () => memory.get("theme", wanted.matches ? "dark" : "light");
  button.addEventListener("click", () => {
    const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    memory.set("theme", other);
    apply(other);
  });
  wanted.addEventListener("change", () => apply(current()));
  apply(current());
  return button;
}

function reloadButton() {
  let timer = null;
  const button = el("button", { type: "button", class: "button", id: "follow", title: `reads the file again every ${RELOAD_SECONDS} s` });
  const apply = (isOn) => {
    memory.set("follow", isOn ? "yes" : "no");
    button.textContent = isOn ? "⏸ stop following" : "⟳ follow";
    clearInterval(timer);
    if (isOn) timer = setInterval(() => location.reload(), RELOAD_SECONDS * 1000);
  };
  button.addEventListener("click", () => apply(memory.get("follow", "no") === "no"));
  apply(memory.get("follow", "no") === "yes");
  return button;
}

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

function build() {
  const page = document.getElementById("page");
  const warnings = data.findings.length + data.messages.filter((m) => m.level === "warning").length;
  page.append(el("header", {},
    el("div", { class: "row" }, el("h1", {}, data.title), badge(data.status.text, data.status.kind), el("span", { class: "right" }), data.status.kind === "live" && reloadButton(), themeButton()),
    el("div", { class: "sub" }, `${data.subtitle} · written ${data.written}`)), tiles());
  const tabs = [
    ["curves", "Curves", drawCurves, null], ["samples", "Samples", drawSamples, null], ["heldout", "Held-out", drawHeldout, null],
    ["config", "Config", drawConfig, null], ["environment", "Environment", drawEnvironment, null], ["messages", "Warnings", drawMessages, warnings],
  ];
  const bar = el("nav", { role: "tablist" });
  page.append(bar);
  document.body.append(tip);
  const open = (key) => {
    for (const [name] of tabs) {
      document.getElementById(`tab-${name}`).setAttribute("aria-selected", String(name === key));
      document.getElementById(name).hidden = name !== key;
    }
    memory.set("tab", key);
    redrawAll();
  };
  for (const [key, title, draw, count] of tabs) {
    bar.append(el("button", { type: "button", role: "tab", id: `tab-${key}`, onclick: () => open(key) }, title, count !== null && el("span", { class: `count ${count ? "warn" : ""}` }, count)));
    const section = el("section", { id: key, role: "tabpanel", hidden: true });
    page.append(section);
    try {
      draw(section);
    } catch (error) { // if one part cannot be drawn, the others still are
      noteFailure(`${key}: ${error.stack || error}`);
      section.append(empty(`This part cannot be drawn: ${error.message}`));
    }
  }
  const wanted = location.hash.slice(1) || memory.get("tab", "curves");
  open(tabs.some(([key]) => key === wanted) ? wanted : "curves");
}
build();
document.documentElement.dataset.ready = "yes";
