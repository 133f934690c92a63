// Held-out answers, config, environment and messages: tables.
const ANSWERS_SHOWN = 200;

function drawHeldout(parent) {
  const { steps, rows, note } = data.heldout;
  if (!rows.length) {
    parent.append(empty("No held-out prompts were answered: none yet, or data.heldout is not set."));
    return;
  }
  const first = (row) => row.answers.find(Boolean), last = (row) => row.answers.findLast(Boolean);
  const kinds = {
    all: ["all", () => true],
    learned: ["learned", (row) => last(row).ok > first(row).ok],
    lost: ["lost", (row) => last(row).ok < first(row).ok],
    wrong: ["wrong at the end", (row) => last(row).ok < 1],
  };
  const state = chosen("heldout", { kind: "all", text: "" });
  const count = el("span", { class: "soft" }), body = el("tbody", {});
  const table = el("table", { class: "table pick" }, el("thead", {}, el("tr", {}, el("th", {}, "prompt"), steps.map((step) => el("th", {}, `step ${step}`)))), body);
  function draw() {
    const found = rows.filter((row) => kinds[state.kind][1](row) && row.prompt.toLowerCase().includes(state.text));
    count.textContent = `${found.length} of ${rows.length} prompts${found.length > ANSWERS_SHOWN ? `, the first ${ANSWERS_SHOWN} shown` : ""}; a click shows the answers`;
    body.replaceChildren(...found.slice(0, ANSWERS_SHOWN).map((row) => heldoutLine(row, steps)));
  }
  parent.append(
    el("div", { class: "toolbar" },
      segments("heldout-kind", Object.entries(kinds).map(([key, [label]]) => [key, `${label} (${rows.filter(kinds[key][1]).length})`]), state.kind, (value) => { state.kind = value; draw(); }, "which prompts"),
      count, el("input", { type: "search", class: "right", id: "heldout-filter", value: state.text, placeholder: "filter by prompt text", oninput: (event) => { state.text = event.target.value.trim().toLowerCase(); draw(); } })),
    note && el("div", { class: "toolbar faint" }, note),
    el("div", { class: "card scroll" }, table));
  draw();
}

// The mark of the greedy answer, and the number of correct sampled answers.
function heldoutMark(answer) {
  const dot = answer.response !== null && el("span", { class: `dot ${answer.ok ? "good" : ""}`, title: answer.ok ? "full marks" : "not full marks" });
  return [dot, answer.solved && el("span", { class: "soft" }, ` ${answer.solved}`)];
}

function heldoutLine(row, steps) {
  const line = el("tr", { class: "line", tabindex: 0 }, el("td", { class: "mono" }, row.set && badge(row.set), row.set && " ", row.prompt.length > 160 ? `${row.prompt.slice(0, 160)} …` : row.prompt),
    row.answers.map((answer) => el("td", {}, answer && heldoutMark(answer))));
  let detail = null;
  const toggle = () => {
    if (detail) { detail.remove(); detail = null; return; }
    detail = el("tr", {}, el("td", { colspan: steps.length + 1 }, row.prompt.length > 160 && el("pre", { class: "command" }, row.prompt), el("div", { class: "answers" }, row.answers.map((answer, i) => answer && el("div", {},
      el("div", { class: "row" }, el("b", {}, `step ${steps[i]}`), Object.entries(answer.scores).map(([name, score]) => el("span", { class: "soft" }, `${name} ${score === null ? "–" : show(score)}`))),
      el("pre", {}, answer.response === null ? "(only sampled answers; they are in heldout-*.jsonl)" : answer.response))),
      row.gold && el("div", { class: "soft" }, "expected ", el("span", { class: "mono" }, row.gold)))));
    line.after(detail);
  };
  line.addEventListener("click", toggle);
  line.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
  return line;
}

function drawConfig(parent) {
  if (!data.config.length) {
    parent.append(empty("The folder has no config.yaml."));
    return;
  }
  const state = chosen("config", { text: "", kind: "all" });
  const body = el("tbody", {});
  const hasDefaults = data.config.some(([, , isDefault]) => isDefault === false);
  const draw = () => body.replaceChildren(...data.config
    .filter(([key, value, isDefault]) => (state.kind === "all" || isDefault === false) && `${key} ${value}`.toLowerCase().includes(state.text))
    .map(([key, value, isDefault]) => el("tr", { class: isDefault === false ? "changed" : "" }, el("td", { class: "mono" }, key), el("td", { class: "mono" }, value))));
  parent.append(
    el("div", { class: "toolbar" },
      hasDefaults && segments("config-kind", [["all", "all"], ["set", "other than the default"]], state.kind, (value) => { state.kind = value; draw(); }, "which keys"),
      el("input", { type: "search", id: "config-filter", value: state.text, placeholder: "filter keys and values", oninput: (event) => { state.text = event.target.value.trim().toLowerCase(); draw(); } }),
      hasDefaults && el("span", { class: "faint" }, "coloured: other than the default")),
    el("div", { class: "card scroll" }, el("table", { class: "table" }, el("thead", {}, el("tr", {}, el("th", {}, "key"), el("th", {}, "value"))), body)));
  draw();
}

function pairs(rows) {
  return el("table", { class: "table" }, el("tbody", {}, rows.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => el("tr", {}, el("td", { class: "soft" }, name), el("td", { class: "mono" }, value)))));
}
function drawEnvironment(parent) {
  const { starts, layout } = data.environment;
  const last = starts.at(-1);
  if (!last) {
    parent.append(empty("The folder has no run.json, which records the machine and the versions."));
    return;
  }
  const machine = last.machine || {};
  parent.append(el("div", { class: "charts" },
    el("div", { class: "card scroll" }, pairs([["host", last.host], ["system", machine.system], ["processor", machine.processor], ["cores", machine.cores], ["memory", machine.memory_gib ? `${machine.memory_gib} GiB` : null], ["GPUs", (machine.gpus || []).join(", ") || null], ["Python", last.python], ["code", last.git]])),
    el("div", { class: "card scroll" }, pairs(Object.entries(last.versions || {}))),
    el("div", { class: "card scroll" }, pairs(layout))));
  parent.append(el("div", { class: "stack", style: "margin-top: 14px" }, starts.map((start, i) => card(
    el("div", { class: "row" }, el("h2", {}, i ? `Resumed (${i})` : "Started"), el("span", { class: "soft" }, `${start.time} on ${start.host}`), el("span", { class: "faint mono right" }, start.git || "")),
    el("pre", { class: "command" }, (start.command || []).join(" "))))));
}

function drawMessages(parent) {
  if (!data.findings.length && !data.messages.length) {
    parent.append(empty("No messages, and no findings in the metrics."));
    return;
  }
  const line = (level, step, text, time) => el("tr", {}, el("td", {}, badge(level, level === "warning" ? "warn" : "")), el("td", { class: "soft", style: "white-space: nowrap" }, step), el("td", { style: "white-space: pre-line; width: 100%" }, text), el("td", { class: "faint", style: "white-space: nowrap" }, time));
  if (data.findings.length) {
    parent.append(el("div", { class: "card scroll", id: "findings" }, el("table", { class: "table" }, el("thead", {}, el("tr", {}, el("th", { colspan: 4 }, "Findings in the metrics"))),
      el("tbody", {}, data.findings.map(([when, text]) => line("warning", when, text, ""))))));
  }
  if (data.messages.length) {
    parent.append(el("div", { class: "card scroll", style: "margin-top: 14px" }, el("table", { class: "table" }, el("thead", {}, el("tr", {}, el("th", {}, "Messages of the run"), el("th", {}, "step"), el("th", {}), el("th", {}))),
      el("tbody", {}, data.messages.map((m) => line(m.level, m.step, m.text, m.time))))));
  }
}
