"use strict";
// Draws the charts of a report from the JSON embedded in the page, and reloads the page while the run is in progress.
// The reader's choices (axis, smoothing, runs, scale, open boxes, scroll position) are kept across reloads.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colors = ["blue", "red", "green", "pink", "orange", "sky", "olive", "black"];
  const key = `meshtrainer ${location.pathname}`;
  const choices = { axis: "step", smoothing: 0, log: null, hidden: [], open: [], live: true, scroll: 0 };
  try { Object.assign(choices, JSON.parse(sessionStorage.getItem(key) || "{}")); } catch { /* storage is disabled */ }
  const saveChoices = () => {
    choices.scroll = scrollY;
    choices.open = [...document.querySelectorAll("details")].map((box) => box.open);
    try { sessionStorage.setItem(key, JSON.stringify(choices)); } catch { /* storage is disabled */ }
  };

  const SVG = "http://www.w3.org/2000/svg";
  const W = 520, H = 270, LEFT = 54, RIGHT = 12, TOP = 10, BOTTOM = 30;
  function make(name, attributes, parent, text) {
    const element = document.createElementNS(SVG, name);
    for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
    if (text !== undefined) element.textContent = text;
    parent?.append(element);
    return element;
  }

  const isNumber = (value) => value !== null && value !== undefined && Number.isFinite(value);
  function formatNumber(value) {
    const size = Math.abs(value);
    if (size >= 1e12) return +(value / 1e12).toPrecision(4) + " T";
    if (size >= 1e9) return +(value / 1e9).toPrecision(4) + " G";
    if (size >= 1e6) return +(value / 1e6).toPrecision(4) + " M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(4) + " k";
    return size && size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(5));
  }
  const axes = {
    step: ["step", formatNumber],
    tokens: ["tokens", formatNumber],
    hours: ["wall time", (hours) => (hours < 0.1 ? `${+(hours * 60).toPrecision(3)} min` : `${+hours.toPrecision(3)} h`)],
  };

  function ticks(low, high, isLog, count) {
    if (isLog) {
      const ratio = high / low, values = [];
      const parts = ratio > 200 ? [1] : ratio > 20 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
        for (const part of parts) {
          const tick = part * 10 ** power;
          if (tick >= low && tick <= high) values.push(tick);
        }
      if (values.length > 1) return values.filter((_, index) => index % Math.ceil(values.length / 8) === 0);
    }
    const minStep = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(minStep));
    const step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((part) => part >= minStep);
    const values = [];
    for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step) values.push(+tick.toPrecision(10));
    return values;
  }

  // Exponential moving average with bias correction; missing values stay missing.
  function smoothed(values, weight) {
    if (!weight) return values;
    let sum = 0, share = 0;
    return values.map((value) => {
      if (!isNumber(value)) return null;
      sum = weight * sum + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return sum / share;
    });
  }

  // x of a step on the chosen axis, interpolated linearly between recorded points.
  function xOf(run, step) {
    const steps = run.train.step, xs = run.train[choices.axis] || [];
    let at = steps.findIndex((each) => each >= step);
    if (at < 0) at = steps.length - 1;
    if (at <= 0 || steps[at] === step) return xs[at];
    const share = (step - steps[at - 1]) / (steps[at] - steps[at - 1]);
    return xs[at - 1] + share * (xs[at] - xs[at - 1]);
  }

  function linesOf(panel) {
    const lines = [];
    data.runs.forEach((run, number) => {
      if (choices.hidden.includes(run.name)) return;
      panel.lines.forEach((line) => {
        const table = run[line.table], ys = table[line.column], xs = table[choices.axis];
        if (!ys || !xs) return;
        const points = line.table === "evals";
        const labels = [...new Set(panel.lines.map((each) => each.label))];
        const one = data.runs.length === 1;
        const hue = one ? colors[labels.indexOf(line.label) % colors.length] : colors[number % colors.length];
        if (!one && line.column === "data_s") return;
        const label = [one ? "" : run.name, points && line.label !== "evaluation" ? `${line.label}, evaluation` : line.label];
        lines.push({
          xs, raw: ys, points, color: `var(--${hue})`, label: label.filter(Boolean).join(", "),
          ys: points || !panel.is_noisy ? ys : smoothed(ys, choices.smoothing),
          low: choices.smoothing ? null : table[line.column + "_low"], high: table[line.column + "_high"],
        });
      });
    });
    return lines;
  }

  function extent(lines, panel) {
    const ys = [], xs = [];
    for (const line of lines)
      line.ys.forEach((y, at) => { if (isNumber(y) && isNumber(line.xs[at])) { ys.push(y); xs.push(line.xs[at]); } });
    if (!ys.length) return null;
    const sorted = [...ys].sort((one, other) => one - other);
    let low = sorted[0], high = sorted[sorted.length - 1];
    const usualMax = sorted[Math.floor(0.98 * (sorted.length - 1))];
    const isClipped = panel.starts_at_zero && ys.length >= 8 && high > 2.5 * usualMax && usualMax > 0;
    if (isClipped) high = 1.5 * usualMax;
    const spansFactor3 = low > 0 && high / low > 3 && !panel.starts_at_zero;
    const isLog = low > 0 && (choices.log === null ? spansFactor3 : choices.log && !panel.starts_at_zero);
    if (panel.starts_at_zero) { low = Math.min(0, low); high = high > 0 ? high * (isClipped ? 1 : 1.1) : 1; }
    else if (isLog) { const pad = (high / low) ** 0.05; low /= pad; high *= Math.max(pad, 1.01); }
    else { const pad = (high - low || Math.abs(high) || 1) * 0.05; low -= pad; high += pad; }
    let first = xs[0], last = xs[0];
    for (const x of xs) { first = Math.min(first, x); last = Math.max(last, x); }
    if (first === last) last = first + 1;
    const peak = isClipped ? sorted[sorted.length - 1] : null;
    return { low, high, first, last, isLog, peak, numClipped: isClipped ? ys.filter((y) => y > high).length : 0 };
  }

  function marks(svg, toX, range) {
    if (data.runs.length !== 1) return;
    const run = data.runs[0], inside = (x) => isNumber(x) && x >= range.first && x <= range.last;
    for (const [from, to] of run.lost) {
      const [left, right] = [xOf(run, from), xOf(run, to)].map((x) => Math.min(Math.max(x, range.first), range.last));
      make("rect", { x: toX(left), y: TOP, width: Math.max(1, toX(right) - toX(left)), height: H - TOP - BOTTOM,
        style: "fill: var(--red); opacity: .13" }, svg);
    }
    for (const step of run.restarts) if (inside(xOf(run, step))) {
      const x = toX(xOf(run, step));
      make("path", { d: `M${x} ${TOP}V${H - BOTTOM}`, style: "stroke: var(--muted); stroke-dasharray: 4 3" }, svg);
    }
    const saved = run.checkpoint_steps.map((step) => xOf(run, step)).filter(inside);
    const d = saved.map((x) => `M${toX(x).toFixed(1)} ${H - BOTTOM - 7}v7`).join("");
    if (d) make("path", { d, style: "stroke: var(--green); stroke-width: 1.5" }, svg);
  }

  function draw(figure, panel) {
    const svg = figure.querySelector("svg"), lines = linesOf(panel), range = extent(lines, panel);
    svg.replaceChildren();
    figure.querySelector(".legend").replaceChildren(...legend(lines));
    figure.chart = null;
    if (!range) {
      make("text", { x: W / 2, y: H / 2, "text-anchor": "middle", class: "tick" }, svg, "no data yet");
      return;
    }
    const scale = range.isLog ? Math.log : (y) => y;
    const toX = (x) => LEFT + ((x - range.first) / (range.last - range.first)) * (W - LEFT - RIGHT);
    const toY = (y) => H - BOTTOM - ((scale(y) - scale(range.low)) / (scale(range.high) - scale(range.low))) * (H - TOP - BOTTOM);
    for (const tick of ticks(range.low, range.high, range.isLog, 5)) {
      make("path", { d: `M${LEFT} ${toY(tick).toFixed(1)}H${W - RIGHT}`, style: "stroke: var(--grid)" }, svg);
      make("text", { x: LEFT - 7, y: toY(tick) + 4, "text-anchor": "end", class: "tick" }, svg, formatNumber(tick));
    }
    const [axis, form] = axes[choices.axis];
    for (const tick of ticks(range.first, range.last, false, 5))
      make("text", { x: toX(tick), y: H - 11, "text-anchor": "middle", class: "tick" }, svg, form(tick));
    make("path", { d: `M${LEFT} ${H - BOTTOM}H${W - RIGHT}`, style: "stroke: var(--muted)" }, svg);
    marks(svg, toX, range);
    const clipped = (y) => Math.min(Math.max(y, TOP - 3), H - BOTTOM);
    for (const line of lines) drawLine(svg, line, toX, (y) => clipped(toY(y)));
    if (range.numClipped) {
      const text = `${range.numClipped} above, up to ${formatNumber(range.peak)}`;
      make("text", { x: W - RIGHT, y: TOP + 9, "text-anchor": "end", class: "tick" }, svg, text);
    }
    figure.querySelector(".scale").textContent = range.isLog ? "log scale" : "";
    svg.setAttribute("aria-label", `${panel.title} by ${axis}`);
    figure.chart = { lines, range, toX, toY, unit: panel.unit, cursor: make("g", {}, svg) };
  }

  function drawLine(svg, line, toX, toY) {
    const points = [];
    line.ys.forEach((y, at) => points.push(isNumber(y) && isNumber(line.xs[at]) ? [toX(line.xs[at]), toY(y)] : null));
    if (line.low && line.high && !line.points) {
      const at = points.map((point, number) => (point && isNumber(line.low[number]) ? number : -1)).filter((n) => n >= 0);
      const top = at.map((n) => `${points[n][0].toFixed(1)} ${toY(line.high[n]).toFixed(1)}`);
      const under = at.map((n) => `${points[n][0].toFixed(1)} ${toY(line.low[n]).toFixed(1)}`).reverse();
      if (at.length > 1) make("path", { d: `M${[...top, ...under].join("L")}Z`, style: `fill: ${line.color}; opacity: .2` }, svg);
    }
    let d = "", command = "M";
    for (const point of points) {
      if (point) d += `${command}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
      command = point ? "L" : "M";
    }
    const dash = line.points ? "; stroke-dasharray: 4 3" : "";
    make("path", { d, style: `fill: none; stroke: ${line.color}; stroke-width: 1.6; stroke-linejoin: round${dash}` }, svg);
    const present = points.filter(Boolean);
    if (line.points || present.length < 3)
      for (const [x, y] of present) make("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: present.length > 40 ? 1.8 : 3, style: `fill: ${line.color}` }, svg);
  }

  function legend(lines) {
    if (lines.length < 2 || data.runs.length > 1) return [];
    const seen = new Map(lines.map((line) => [line.label, line.color]));
    return [...seen].map(([label, color]) => {
      const item = document.createElement("span"), swatch = document.createElement("i");
      swatch.style.background = color;
      item.append(swatch, label);
      return item;
    });
  }

  // Shows a tooltip with the value of each line at its point nearest to the pointer.
  function point(figure, event) {
    const chart = figure.chart, tooltip = figure.querySelector(".tip");
    if (!chart) return;
    const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * W;
    const { first, last } = chart.range;
    const pointerX = first + ((at - LEFT) / (W - LEFT - RIGHT)) * (last - first);
    chart.cursor.replaceChildren();
    const rows = [];
    let nearest = null;
    for (const line of chart.lines) {
      let best = -1;
      line.xs.forEach((x, number) => {
        if (isNumber(x) && isNumber(line.ys[number]) && (best < 0 || Math.abs(x - pointerX) < Math.abs(line.xs[best] - pointerX))) best = number;
      });
      if (best < 0) continue;
      const x = line.xs[best];
      if (nearest === null || Math.abs(x - pointerX) < Math.abs(nearest - pointerX)) nearest = x;
      const y = Math.min(Math.max(chart.toY(line.ys[best]), TOP), H - BOTTOM);
      make("circle", { cx: chart.toX(x), cy: y, r: 3.5, style: `fill: ${line.color}; stroke: var(--card)` }, chart.cursor);
      rows.push([line.color, line.label, formatNumber(line.raw[best]) + (chart.unit ? ` ${chart.unit}` : "")]);
    }
    if (nearest === null) return;
    const x = chart.toX(nearest);
    chart.cursor.prepend(make("path", { d: `M${x} ${TOP}V${H - BOTTOM}`, style: "stroke: var(--muted)" }));
    const [name, form] = axes[choices.axis];
    const title = document.createElement("b");
    title.textContent = choices.axis === "step" ? `step ${Math.round(nearest).toLocaleString("en")}` : `${form(nearest)} ${choices.axis === "tokens" ? name : ""}`;
    tooltip.replaceChildren(title, ...rows.map(([color, label, value]) => {
      const row = document.createElement("div"), swatch = document.createElement("i"), number = document.createElement("em");
      swatch.style.background = color;
      number.textContent = value;
      row.append(swatch, label, number);
      return row;
    }));
    tooltip.hidden = false;
    const share = (x / W) * box.width;
    tooltip.style.left = share < box.width / 2 ? `${share + 16}px` : `${Math.max(0, share - tooltip.offsetWidth - 4)}px`;
  }

  const figures = data.panels.map((panel) => {
    const figure = document.createElement("figure");
    figure.className = "card";
    figure.innerHTML = '<figcaption><b></b> <small class="scale"></small><span class="legend"></span></figcaption><div class="tip" hidden></div>';
    figure.querySelector("b").textContent = panel.title;
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
    figure.append(svg);
    svg.addEventListener("pointermove", (event) => point(figure, event));
    svg.addEventListener("pointerdown", (event) => point(figure, event));
    svg.addEventListener("pointerleave", () => {
      figure.querySelector(".tip").hidden = true;
      figure.chart?.cursor.replaceChildren();
    });
    return figure;
  });
  document.querySelector(".charts").replaceChildren(...figures);
  const drawAll = () => figures.forEach((figure, number) => draw(figure, data.panels[number]));

  function controls() {
    const bar = document.querySelector(".controls");
    const axis = bar.querySelector("[name=axis]"), smoothing = bar.querySelector("[name=smoothing]");
    const log = bar.querySelector("[name=log]"), live = bar.querySelector("[name=live]");
    if (!data.runs.some((run) => (run.train.hours || []).some(isNumber))) axis.querySelector("[value=hours]").remove();
    axis.value = choices.axis;
    if (axis.value !== choices.axis) axis.value = choices.axis = "step";
    smoothing.value = choices.smoothing;
    log.value = choices.log === null ? "auto" : choices.log ? "log" : "linear";
    axis.onchange = () => { choices.axis = axis.value; saveChoices(); drawAll(); };
    smoothing.oninput = () => { choices.smoothing = +smoothing.value; saveChoices(); drawAll(); };
    log.onchange = () => { choices.log = log.value === "auto" ? null : log.value === "log"; saveChoices(); drawAll(); };
    live.checked = choices.live;
    live.onchange = () => { choices.live = live.checked; saveChoices(); };
    live.parentElement.hidden = !data.refresh_s;
    for (const box of document.querySelectorAll("[data-run]")) {
      box.checked = !choices.hidden.includes(box.dataset.run);
      box.onchange = () => {
        choices.hidden = choices.hidden.filter((name) => name !== box.dataset.run);
        if (!box.checked) choices.hidden.push(box.dataset.run);
        saveChoices();
        drawAll();
      };
    }
    bar.hidden = false;
  }

  controls();
  drawAll();
  [...document.querySelectorAll("details")].forEach((box, number) => { box.open = choices.open[number] ?? box.open; });
  history.scrollRestoration = "manual";
  scrollTo(0, choices.scroll);
  addEventListener("pagehide", saveChoices);
  if (data.refresh_s) {
    const reloadIfIdle = () => {
      const isInUse = document.hidden || !choices.live || document.querySelector(".tip:not([hidden])") || String(getSelection());
      if (isInUse) setTimeout(reloadIfIdle, 1000);
      else { saveChoices(); location.reload(); }
    };
    setTimeout(reloadIfIdle, 1000 * data.refresh_s);
  }
})();
