// Samples by step: the groups of a step side by side, tokens coloured by log-prob, advantage or mismatch.
const MAX_GROUPS_SHOWN = 40;
const GOOD_VERDICTS = /^(correct|well_formed|ok|pass(ed)?)$/;
const BAD_VERDICTS = /^(wrong|malformed|timeout|error|unparsable|crash(ed)?|fail(ed)?|.*_error)$/;
const MISMATCH_FLOOR = 1e-6;

// Each way to colour: the value of a token, how strongly it is coloured (0 to 1) and in which colour, and its legend.
const HEATS = {
  none: { label: "none" },
  logprob: {
    label: "log-prob", value: (s, i) => s.rollout_logprobs?.[i], strength: (v) => Math.min(1, -v / 4), color: () => "--heat-logprob",
    scale: [["--heat-logprob", 0], ["--heat-logprob", 1]], ends: ["certain", "4 nats or more: a surprise"],
  },
  advantage: {
    label: "advantage", value: (s, i) => (Array.isArray(s.advantage) ? s.advantage[i] : s.advantage), strength: (v) => Math.min(1, Math.abs(v) / 2),
    color: (v) => (v < 0 ? "--heat-minus" : "--heat-plus"), scale: [["--heat-minus", 1], ["--heat-minus", 0], ["--heat-plus", 1]], ends: ["−2: less of it", "+2: more of it"],
  },
  mismatch: {
    label: "mismatch", value: (s, i) => s.mismatch?.[i], strength: (v) => Math.max(0, Math.min(1, Math.log10(Math.abs(v) / MISMATCH_FLOOR) / 6)),
    color: () => "--heat-mismatch", scale: [["--heat-mismatch", 0], ["--heat-mismatch", 1]], ends: ["|Δ log-prob| of 1e-6", "1 or more"],
  },
};
const heatOf = (heat, value) => (isNumber(value) ? `background: rgba(var(${heat.color(value)}), ${(0.78 * heat.strength(value)).toFixed(3)})` : null);

function verdictBadge(verdict) {
  const kind = GOOD_VERDICTS.test(verdict) ? "good" : BAD_VERDICTS.test(verdict) ? "bad" : "";
  return el("span", { class: `verdict ${kind}` }, verdict);
}

function drawSamples(parent) {
  const steps = data.samples.steps;
  if (!steps.length) {
    parent.append(empty(data.samples.note || "No samples are logged: none yet, or log.samples_per_step is 0."));
    return;
  }
  const state = chosen("samples", { place: 0, heat: memory.get("heat", "logprob"), text: "" });
  const remembered = steps.findIndex((one) => String(one.step) === memory.get("step", ""));
  state.place = remembered >= 0 ? remembered : steps.length - 1;
  const list = el("div", {}), count = el("span", { class: "soft", id: "samples-count" }), scale = el("span", { class: "scale" });
  const name = el("b", {});
  const slider = el("input", { type: "range", id: "step-slider", min: 0, max: Math.max(0, steps.length - 1), value: state.place, disabled: steps.length < 2, "aria-label": "step", oninput: (event) => go(Number(event.target.value)) });
  const go = (place) => {
    state.place = Math.max(0, Math.min(steps.length - 1, place));
    slider.value = state.place;
    memory.set("step", state.place === steps.length - 1 ? "" : steps[state.place].step); // the last step is followed
    draw();
  };
  const search = el("input", { type: "search", id: "prompt-filter", value: state.text, placeholder: "filter all steps by prompt text", oninput: (event) => { state.text = event.target.value.trim().toLowerCase(); draw(); } });
  const colours = segments("heat", Object.entries(HEATS).map(([key, heat]) => [key, heat.label]), state.heat, (value) => { state.heat = value; memory.set("heat", value); draw(); }, "colour of tokens");

  function draw() {
    name.textContent = `step ${steps[state.place].step}`;
    const wanted = state.text ? steps : [steps[state.place]];
    const found = wanted.flatMap((one) => one.groups.filter((group) => !state.text || group.prompt.toLowerCase().includes(state.text)).map((group) => ({ step: one.step, group })));
    count.textContent = state.text ? `${found.length} group${found.length === 1 ? "" : "s"} in all steps${found.length > MAX_GROUPS_SHOWN ? `, the first ${MAX_GROUPS_SHOWN} shown` : ""}` : `${found.length} group${found.length === 1 ? "" : "s"} of the step`;
    slider.disabled = Boolean(state.text) || steps.length < 2;
    drawScale(scale, HEATS[state.heat]);
    list.replaceChildren(...found.slice(0, MAX_GROUPS_SHOWN).map(({ step, group }) => groupCard(step, group, HEATS[state.heat])));
    if (!found.length) list.append(empty("No prompt has this text."));
  }
  parent.append(
    el("div", { class: "toolbar" },
      el("button", { type: "button", class: "button", "aria-label": "step before", onclick: () => go(state.place - 1) }, "‹"), slider,
      el("button", { type: "button", class: "button", "aria-label": "step after", onclick: () => go(state.place + 1) }, "›"), name, count, el("span", { class: "right" }), search),
    el("div", { class: "toolbar" }, "colour tokens by", colours, scale, data.samples.note && el("span", { class: "faint right" }, data.samples.note)),
    list);
  draw();
}

function drawScale(box, heat) {
  if (!heat.scale) return box.replaceChildren();
  const stops = heat.scale.map(([name, strength]) => `rgba(var(${name}), ${0.78 * strength})`).join(", ");
  return box.replaceChildren(heat.ends[0], el("i", { style: `background: linear-gradient(to right, ${stops})` }), heat.ends[1]);
}

function groupCard(step, group, heat) {
  const rewards = group.samples.map((s) => s.reward).filter(isNumber);
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  const spread = Math.max(...rewards) - Math.min(...rewards);
  return el("div", { class: "card group" },
    el("div", { class: "row" },
      el("h2", {}, `Prompt ${group.prompt_id}`), el("span", { class: "soft" }, `step ${step} · ${group.samples.length} samples`),
      rewards.length > 0 && el("span", { class: "soft" }, `mean reward ${show(mean)}`),
      rewards.length > 1 && spread === 0 && badge("zero variance: nothing to learn", "warn"),
      group.answer && el("span", { class: "right" }, el("span", { class: "soft" }, "expected "), el("span", { class: "mono" }, group.answer))),
    el("div", { class: "prompt mono" }, group.prompt),
    el("div", { class: "members" }, group.samples.map((sample) => member(sample, heat))));
}

function member(sample, heat) {
  const names = Object.keys(sample.rewards);
  const advantage = Array.isArray(sample.advantage) ? null : sample.advantage;
  return el("div", { class: "member" },
    el("div", { class: "top" },
      el("div", { class: "row" }, el("span", { class: "reward" }, show(sample.reward)), isNumber(advantage) && el("span", { class: "soft" }, `advantage ${advantage > 0 ? "+" : ""}${show(advantage)}`),
        el("span", { class: "faint right", title: `generated by policy version ${sample.policy_version}` }, `#${sample.index}`)),
      el("div", { class: "soft" }, [numTokens(sample), ENDS[sample.finish_reason] ?? "ended by itself"].filter(Boolean).join(" · ")),
      el("table", {}, names.map((name) => el("tr", {}, el("td", { class: "soft" }, name), el("td", {}, sample.rewards[name] === null ? "–" : show(sample.rewards[name])), el("td", {}, sample.verdicts[name] ? verdictBadge(sample.verdicts[name]) : ""))))),
    el("div", { class: "response mono" }, sample.parts ? sample.parts.map((part) => conversationPart(sample, part, heat)) : sample.tokens ? sample.tokens.map((text, i) => token(sample, text, i, heat)) : sample.response));
}

const ENDS = { length: "cut off", turns: "out of turns", deadline: "out of time" };

function numTokens(sample) {
  if (!sample.parts) return sample.tokens ? `${sample.tokens.length} tokens` : null;
  const inserted = sample.parts.filter((part) => part.kind === "inserted").reduce((sum, part) => sum + part.end - part.start, 0);
  return `${sample.tokens.length - inserted} sampled and ${inserted} inserted tokens`;
}

// A turn, tokens that the policy did not sample, or a history that replaced everything before it.
function conversationPart(sample, part, heat) {
  if (part.kind === "history") return el("details", { class: "part history" }, el("summary", { class: "label" }, part.label), part.text);
  const isTurn = part.kind === "turn";
  const advantages = Array.isArray(sample.advantage) ? sample.advantage.slice(part.start, part.end) : null;
  const mean = advantages && advantages.reduce((a, b) => a + b, 0) / (advantages.length || 1);
  const facts = [part.label, isTurn && isNumber(mean) && `advantage ${mean > 0 ? "+" : ""}${show(mean)}`, isNumber(part.reward) && `reward ${show(part.reward)}`];
  return el("div", { class: `part ${part.kind}` }, el("div", { class: "label" }, facts.filter(Boolean).join(" · ")),
    sample.tokens.slice(part.start, part.end).map((text, i) => token(sample, text, part.start + i, isTurn ? heat : HEATS.none, isTurn)));
}

function token(sample, text, i, heat, isSampled = true) {
  const isInvisible = text === "";
  const rows = () => !isSampled ? [["not sampled", "not trained"], ["token", `${i + 1} of ${sample.tokens.length}`]] : [
    isNumber(sample.rollout_logprobs?.[i]) && ["probability, engine", share2(Math.exp(sample.rollout_logprobs[i]))],
    isNumber(sample.rollout_logprobs?.[i]) && ["log-prob, engine", show(sample.rollout_logprobs[i])],
    isNumber(sample.mismatch?.[i]) && ["log-prob, trainer", show(sample.rollout_logprobs[i] + sample.mismatch[i])],
    isNumber(sample.mismatch?.[i]) && ["trainer − engine", sample.mismatch[i].toExponential(1)],
    ["advantage", show(Array.isArray(sample.advantage) ? sample.advantage[i] : sample.advantage)],
    ["token", `${i + 1} of ${sample.tokens.length}`],
  ].filter(Boolean);
  return el("span", {
    class: isInvisible ? "token end" : "token", style: heat.value ? heatOf(heat, heat.value(sample, i)) : null,
    onpointermove: (event) => showTip(event, isInvisible ? "(no text: a special token or a part of a character)" : JSON.stringify(text).slice(1, -1), rows()), onpointerleave: hideTip,
  }, isInvisible ? "▪" : text);
}
const share2 = (p) => (p > 0.9999 ? "> 99.99%" : `${(100 * p).toPrecision(3)}%`);
