// Tokens per expert in the last mini-batch, as a map: a row per layer, a column per expert, redder above the layer's mean.
const MOST_SHOWN = 4; // the colour saturates at this multiple of the mean

function expertLoads({ step, rows }) {
  const width = Math.max(...rows.map((row) => row.tokens.length));
  const mean = (row) => row.tokens.reduce((a, b) => a + b, 0) / row.tokens.length || 1;
  const canvas = el("canvas", { id: "experts", width, height: rows.length, style: `width: 100%; height: ${Math.max(rows.length * 5, 120)}px; image-rendering: pixelated` });
  const draw = () => {
    const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    context.clearRect(0, 0, width, rows.length);
    rows.forEach((row, y) => row.tokens.forEach((tokens, x) => {
      const relative = tokens / mean(row), isMore = relative >= 1;
      context.fillStyle = `rgba(${style.getPropertyValue(isMore ? "--heat-minus" : "--heat-plus")}, ${isMore ? Math.min(relative - 1, MOST_SHOWN - 1) / (MOST_SHOWN - 1) : 1 - relative})`;
      context.fillRect(x, y, 1, 1);
    }));
  };
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect(), at = (from, size, count) => Math.min(count - 1, Math.max(0, Math.floor((from / size) * count)));
    const row = rows[at(event.clientY - box.top, box.height, rows.length)], expert = at(event.clientX - box.left, box.width, width);
    showTip(event, `layer ${row.layer}, expert ${expert}`, [["tokens", show(row.tokens[expert])], ["times the mean", show(row.tokens[expert] / mean(row))]]);
  });
  canvas.addEventListener("mouseleave", hideTip);
  new MutationObserver(draw).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  draw();
  return el("div", { class: "card chart wide" }, el("div", { class: "head" }, el("h2", {}, "Tokens per expert"),
    el("span", { class: "faint" }, `last mini-batch of step ${step}; down: layers, across: experts; blue below the layer's mean, red above, full at ${MOST_SHOWN} times`)), canvas);
}
