/* The charts of a page, on top of uPlot. The data is in #report-data; the document is bin/shared/_common/report. */
(function () {
  "use strict";
  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif';
  const RAMP = 6, COLORS = 8, LABEL_GAP = 8, MARK_ROW = 20;
  const specs = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const groups = {};
  const charts = {};
  let palette = {};

  // ---- numbers ---------------------------------------------------------------------------------------------------

  const UNITS = {
    ns: [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]],
    bytes: [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]],
  };

  function plain(value, decimals) {
    return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  }

  function digits(value) {
    const size = Math.abs(value);
    if (size >= 100) return plain(value, 0);
    if (size >= 10) return plain(value, 1);
    if (size >= 0.995) return plain(value, 2);
    return value === 0 ? "0" : String(Number(value.toPrecision(3)));
  }

  function unitOf(value, unit) {
    return UNITS[unit].find(([factor]) => Math.abs(value) >= factor * 0.9995) || UNITS[unit][UNITS[unit].length - 1];
  }

  function text(value, unit) {
    if (value === null || value === undefined) return "-";
    if (unit === "share") return (100 * value).toFixed(1) + " %";
    if (unit === "count") return plain(value, Number.isInteger(value) ? 0 : 1);
    if (!UNITS[unit]) return digits(value);
    const [factor, name] = unitOf(value, unit);
    return digits(value / factor) + " " + name;
  }

  // All ticks of an axis have one unit, and the decimals that tell neighbors apart.
  function tickTexts(values, unit) {
    if (!values.length) return [];
    const highest = Math.max(...values.map(Math.abs));
    const step = values.length > 1 ? Math.abs(values[1] - values[0]) : highest || 1;
    let factor = 1, name = "";
    if (unit === "share") { factor = 0.01; name = " %"; }
    else if (UNITS[unit]) { const found = unitOf(highest || 1, unit); factor = found[0]; name = " " + found[1]; }
    let decimals = 0;
    while (decimals < 6 && Math.abs(step / factor * 10 ** decimals - Math.round(step / factor * 10 ** decimals)) > 1e-6) decimals++;
    if (unit === "bytes") decimals = Math.min(decimals, 2);
    return values.map((value) => plain(value / factor, decimals) + name);
  }

  // Sizes have ticks at round numbers of KiB, MiB, GiB; uPlot's own steps are decimal.
  const BINARY = [];
  for (let power = 0; power < 50; power++) BINARY.push(2 ** power);
  const WHOLE = [];
  for (let power = 0; power < 15; power++) for (const m of [1, 2, 5]) WHOLE.push(m * 10 ** power);

  const ruler = document.createElement("canvas").getContext("2d");
  function widthOf(string, font) {
    ruler.font = font || FONT;
    return ruler.measureText(string).width;
  }

  // ---- colors ----------------------------------------------------------------------------------------------------

  function readPalette() {
    const style = getComputedStyle(root);
    const get = (name) => style.getPropertyValue("--" + name).trim();
    palette = { lines: [], ramp: [] };
    for (const name of ["ink", "soft", "grid", "rule", "card", "halo", "cut", "mark", "event", "empty", "shade"]) palette[name] = get(name);
    for (let i = 0; i < COLORS; i++) palette.lines.push(get("c" + i));
    for (let i = 0; i < RAMP; i++) palette.ramp.push(rgb(get("h" + i)));
  }

  function rgb(hex) {
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  }

  function alpha(hex, value) {
    return `rgba(${rgb(hex).join(",")},${value})`;
  }

  function rampAt(share) {
    const at = Math.min(Math.max(share, 0), 1) * (RAMP - 1);
    const low = Math.min(Math.floor(at), RAMP - 2);
    return palette.ramp[low].map((c, i) => Math.round(c + (palette.ramp[low + 1][i] - c) * (at - low)));
  }

  function inkOn(color) {
    const [r, g, b] = rgb(color).map((c) => (c / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#10161d" : "#ffffff";
  }

  // ---- elements --------------------------------------------------------------------------------------------------

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "style") Object.assign(made.style, value);
      else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  const tip = element("div", { id: "tip", role: "status" });
  document.body.append(tip);

  function showTip(x, y, content) {
    tip.replaceChildren(...content);
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth - 8 ? x - 16 - box.width : x + 16;
    const top = y + 16 + box.height > innerHeight - 8 ? y - 16 - box.height : y + 16;
    tip.style.left = Math.max(8, Math.min(left, innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(8, top) + "px";
  }

  function hideTip() {
    tip.style.display = "none";
  }

  function tipRows(rows) {
    const body = element("tbody");
    for (const [color, name, value] of rows) {
      const first = element("td", {});
      if (color) first.append(element("i", { style: { background: color } }));
      first.append(name);
      body.append(element("tr", {}, first, element("td", {}, value)));
    }
    return element("table", {}, body);
  }

  // ---- zoom ------------------------------------------------------------------------------------------------------

  function setRange(chart, low, high) {
    const [first, last] = chart.range;
    const least = Math.min(chart.least, last - first);
    let width = Math.min(Math.max(high - low, least), last - first);
    let begin = (low + high) / 2 - width / 2;
    begin = Math.min(Math.max(begin, first), last - width);
    for (const other of groups[chart.group]) {
      other.view = [begin, begin + width];
      other.plot.setScale("x", { min: begin, max: begin + width });
      other.onZoom();
    }
  }

  function zoom(chart, factor) {
    const [low, high] = chart.view, middle = (low + high) / 2, half = (high - low) / 2 * factor;
    setRange(chart, middle - half, middle + half);
  }

  function move(chart, share) {
    const [low, high] = chart.view, by = (high - low) * share;
    setRange(chart, low + by, high + by);
  }

  function reset(chart) {
    setRange(chart, ...chart.range);
  }

  function onKey(chart, event) {
    const actions = {
      "+": () => zoom(chart, 0.5), "=": () => zoom(chart, 0.5), "-": () => zoom(chart, 2), "0": () => reset(chart),
      Escape: () => { hideTip(); reset(chart); },
      ArrowLeft: () => event.shiftKey ? move(chart, -0.25) : moveCursor(chart, -1),
      ArrowRight: () => event.shiftKey ? move(chart, 0.25) : moveCursor(chart, 1),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  // The cursor of the keyboard: one step, or one fiftieth of a timeline.
  function moveCursor(chart, by) {
    const u = chart.plot, [low, high] = chart.view;
    const unit = chart.group === "steps" ? Math.max(chart.least / 3, 1) : (high - low) / 50;
    const now = u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : (low + high) / 2;
    const left = u.valToPos(Math.min(Math.max(now + by * unit, low), high), "x");
    const top = u.cursor.top >= 0 ? u.cursor.top : u.over.clientHeight / 2;
    u.setCursor({ left, top });
    const box = u.over.getBoundingClientRect();
    chart.hover(box.left + left, box.top + top);
  }

  // ---- what all charts have --------------------------------------------------------------------------------------

  function frame(name, spec) {
    const host = document.querySelector(`[data-chart="${name}"]`);
    const figure = host.closest("figure");
    const title = figure.querySelector("h3").textContent;
    const chart = { name, spec, group: spec.group, range: spec.range, view: spec.range.slice(), least: spec.group === "steps" ? 3 : (spec.range[1] - spec.range[0]) / 500 };
    chart.legend = element("div", { class: "legend" });
    const less = element("button", { type: "button", "aria-label": `Zoom out of ${title}`, onclick: () => zoom(chart, 2) }, "−");
    const all = element("button", { type: "button", "aria-label": `Whole range of ${title}`, onclick: () => reset(chart) }, "Reset");
    const more = element("button", { type: "button", "aria-label": `Zoom into ${title}`, onclick: () => zoom(chart, 0.5) }, "+");
    const bar = element("div", { class: "bar" }, chart.legend, element("div", { class: "zoom" }, more, less, all));
    chart.marks = element("div", { class: "marks" });
    chart.names = element("div", { class: "axis-name" });
    chart.box = element("div", {
      class: "plot", tabindex: "0", role: "img",
      "aria-label": `${title}. Drag or + and - zoom, arrow keys move the cursor, 0 shows the whole range. The values are in the table below.`,
    });
    chart.box.addEventListener("keydown", (event) => onKey(chart, event));
    chart.box.addEventListener("blur", hideTip);
    chart.onZoom = () => {
      const whole = chart.view[0] <= chart.range[0] && chart.view[1] >= chart.range[1];
      less.disabled = all.disabled = whole;
      more.disabled = chart.view[1] - chart.view[0] <= chart.least * 1.001;
    };
    host.append(bar, chart.names, chart.marks, chart.box);
    (groups[chart.group] = groups[chart.group] || []).push(chart);
    charts[name] = chart;
    return chart;
  }

  function options(chart, height, scales, axes, series, draw) {
    return {
      width: Math.max(240, chart.box.clientWidth), height, padding: [8, axes.length > 2 ? 0 : chart.right || 26, 0, 0], legend: { show: false },
      scales: { x: { time: false, auto: false, range: (u, low, high) => [low, high] }, ...scales },
      axes, series: [{}, ...series],
      cursor: {
        y: chart.spec.kind === "heatmap", drag: { x: true, y: false, setScale: false, dist: 4 }, points: { show: chart.spec.kind === "lines", size: 7 },
        sync: { key: chart.group, setSeries: false, scales: ["x", null] }, focus: { prox: -1 },
        bind: { dblclick: () => () => { reset(chart); return null; } },
      },
      hooks: {
        draw: draw ? [draw] : [],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const low = u.posToVal(u.select.left, "x"), high = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          setRange(chart, low, high);
        }],
        ready: [(u) => {
          u.over.addEventListener("mousemove", (event) => chart.hover(event.clientX, event.clientY));
          u.over.addEventListener("mouseleave", () => { hideTip(); chart.leave && chart.leave(); });
          u.over.addEventListener("wheel", (event) => {
            if (!event.ctrlKey) return; // a pinch on a touchpad; a plain wheel scrolls the page
            event.preventDefault();
            const at = u.posToVal(event.clientX - u.over.getBoundingClientRect().left, "x");
            const by = event.deltaY < 0 ? 0.8 : 1.25, [low, high] = chart.view;
            setRange(chart, at - (at - low) * by, at + (high - at) * by);
          }, { passive: false });
        }],
      },
    };
  }

  function xAxis(chart) {
    return {
      scale: "x", font: FONT, stroke: () => palette.soft, grid: { stroke: () => palette.grid, width: 1 }, ticks: { stroke: () => palette.rule, size: 5, width: 1 },
      incrs: chart.group === "steps" ? WHOLE : undefined, size: 30, gap: 5,
      space: (u, axis, low, high) => 24 + Math.max(widthOf(tickTexts([low, high], chart.group === "steps" ? "count" : "ns")[1] || ""), 34),
      values: (u, splits) => tickTexts(splits, chart.group === "steps" ? "count" : "ns"),
    };
  }

  function yAxis(scale, unit, side, first) {
    return {
      scale, side, font: FONT, stroke: () => palette.soft, gap: 6, space: 36,
      grid: { show: first, stroke: () => palette.grid, width: 1 }, ticks: { stroke: () => palette.rule, size: 5, width: 1 },
      incrs: unit === "count" ? WHOLE : unit === "bytes" ? BINARY : undefined,
      values: (u, splits) => tickTexts(splits, unit),
      size: (u, values) => Math.ceil(Math.max(30, ...(values || []).map((v) => widthOf(v)))) + 16,
    };
  }

  function bindMarks(chart) {
    const migrations = (chart.spec.marks || []).some((mark) => mark[1] === "migration");
    const events = (chart.spec.marks || []).some((mark) => mark[1] !== "migration");
    if (!chart.box.closest("figure").classList.contains("wide")) return; // the wide charts of the page explain the lines
    if (migrations) chart.legend.append(element("span", { class: "key" }, element("i", { class: "dash", style: { borderColor: "var(--mark)" } }), "migration"));
    if (events) chart.legend.append(element("span", { class: "key" }, element("i", { class: "dash", style: { borderColor: "var(--event)" } }), "event"));
  }

  // Labels of marks above the plot, in up to three rows; those without space have only their line and tooltip.
  function layMarks(chart) {
    const u = chart.plot, marks = chart.spec.marks || [];
    const state = [...chart.view, u.bbox.left, u.bbox.width].join();
    // uPlot commits a new scale after the call that sets it: until then positions are those of the old scale.
    const isCommitted = u.scales.x.min === chart.view[0] && u.scales.x.max === chart.view[1];
    if (!marks.length || !isCommitted || chart.placed === state) return;
    chart.placed = state;
    chart.marks.replaceChildren();
    const ratio = devicePixelRatio || 1;
    const left = u.bbox.left / ratio, width = u.bbox.width / ratio, total = chart.box.clientWidth;
    const ends = [[], [], []];
    const order = marks.map((mark, at) => at).sort((a, b) => (marks[a][1] === "migration" ? 0 : 1) - (marks[b][1] === "migration" ? 0 : 1) || a - b);
    const placed = [];
    for (const at of order) {
      const [x, kind, name] = marks[at];
      if (x < chart.view[0] || x > chart.view[1]) continue;
      const span = element("span", { class: kind }, name);
      chart.marks.append(span);
      const size = span.getBoundingClientRect().width, spot = left + u.valToPos(x, "x");
      const flip = spot + size > Math.max(left + width, total - 4);
      if (flip) span.classList.add("left");
      const begin = flip ? spot - size + 1 : spot - 1;
      const row = begin < 0 ? -1 : ends.findIndex((taken) => taken.every(([a, b]) => begin + size + LABEL_GAP < a || begin > b + LABEL_GAP));
      if (row < 0) { span.remove(); continue; }
      ends[row].push([begin, begin + size]);
      placed.push([span, begin, row]);
    }
    // Never fewer rows than before: the page would move under the cursor while one zooms.
    const rows = chart.rows = Math.max(chart.rows || 0, ...placed.map((each) => each[2] + 1));
    chart.marks.style.height = rows * MARK_ROW + "px";
    for (const [span, begin, row] of placed) {
      span.style.left = begin + "px";
      span.style.top = (rows - 1 - row) * MARK_ROW + "px";
    }
  }

  function drawMarks(chart, u) {
    const ratio = devicePixelRatio || 1, { ctx, bbox } = u;
    const shown = (chart.spec.marks || []).filter(([x]) => x >= chart.view[0] && x <= chart.view[1]);
    ctx.save();
    ctx.globalAlpha = shown.length > 12 ? 0.45 : 1; // many lines would hide what they mark
    for (const [x, kind] of shown) {
      const at = Math.round(u.valToPos(x, "x", true));
      ctx.strokeStyle = kind === "migration" ? palette.mark : palette.event;
      ctx.lineWidth = (kind === "migration" && shown.length <= 12 ? 1.6 : 1) * ratio;
      ctx.setLineDash([5 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function marksNear(chart, x, within) {
    return (chart.spec.marks || []).filter((mark) => Math.abs(mark[0] - x) <= within);
  }

  function markTips(chart, u, left) {
    const within = Math.abs(u.posToVal(left + 5, "x") - u.posToVal(left, "x"));
    return marksNear(chart, u.posToVal(left, "x"), within).slice(0, 3).map(([, , name, sentence]) => element("p", {}, element("b", {}, name), ": " + sentence));
  }

  function cursorIn(chart, clientX, clientY) {
    const box = chart.plot.over.getBoundingClientRect();
    return [clientX - box.left, clientY - box.top];
  }

  function addChart(chart, opts, data) {
    chart.plot = new uPlot(opts, data, chart.box);
    chart.plot.setScale("x", { min: chart.range[0], max: chart.range[1] });
    chart.onZoom();
    const plotted = () => { layMarks(chart); chart.onDraw && chart.onDraw(); };
    chart.plot.hooks.draw = (chart.plot.hooks.draw || []).concat(plotted);
    plotted();
    let last = chart.box.clientWidth;
    new ResizeObserver(() => {
      const width = chart.box.clientWidth;
      if (width && width !== last) {
        last = width;
        chart.plot.setSize({ width, height: chart.plot.height });
      }
    }).observe(chart.box);
  }

  // ---- lines -----------------------------------------------------------------------------------------------------

  function linesChart(name, spec) {
    const chart = frame(name, spec);
    const data = [spec.x], series = [], bands = [];
    const scales = {};
    spec.axes.forEach((unit, at) => {
      const own = spec.series.filter((each) => each.axis === at);
      const zero = own.every((each) => each.zero);
      scales["y" + at] = {
        range: (u, low, high) => {
          if (low === null || high === null) return [0, 1];
          if (at === 0) high = Math.max(high, spec.top);
          if (zero) return [0, unit === "count" ? Math.ceil(high * 1.15) : unit === "share" ? Math.min(1, Math.max(high * 1.15, 0.02)) : high > 0 ? high * 1.1 : 1];
          if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
          return uPlot.rangeNum(low, high, 0.08, true);
        },
      };
    });
    spec.series.forEach((each, at) => {
      const color = () => palette.lines[(each.color === undefined ? at : each.color) % COLORS];
      const isWide = each.wide === true;
      const shared = { scale: "y" + each.axis, spanGaps: true };
      const main = {
        ...shared, label: each.name, stroke: isWide ? () => alpha(color(), 0.5) : color, width: isWide && !each.points ? 5 : each.thin ? 1.4 : 2,
        points: { show: each.points === true || spec.x.length < 60, size: each.points || spec.x.length < 3 ? 8 : 4, fill: color, stroke: color },
        paths: each.steps ? uPlot.paths.stepped({ align: 1 }) : undefined,
      };
      if (each.points) { main.width = 1.5; main.dash = [4, 4]; }
      chart.colors = (chart.colors || []).concat([color]);
      main.index = data.length;
      data.push(each.y);
      series.push(main);
      each.at = series.length;
      each.parts = [each.at];
      if (each.low) {
        for (const key of ["high", "low"]) {
          data.push(each[key]);
          series.push({ ...shared, stroke: "transparent", width: 0, points: { show: false } });
          each.parts.push(series.length);
        }
        bands.push({ series: [series.length - 1, series.length], fill: () => alpha(color(), 0.18) });
      }
    });
    const axes = [xAxis(chart), ...spec.axes.map((unit, at) => yAxis("y" + at, unit, at === 0 ? 3 : 1, at === 0))];
    const opts = options(chart, 300, scales, axes, series, (u) => drawMarks(chart, u));
    opts.bands = bands;
    opts.cursor.points.show = true;
    if (spec.axes.length > 1) {
      chart.names.append(...spec.axes.map((unit, at) => element("span", {}, (at ? "" : "↑ ") + spec.series.filter((s) => s.axis === at).map((s) => s.name).slice(0, 3).join(", ") + (at ? " ↑" : ""))));
    }
    spec.series.forEach((each, at) => {
      const swatch = element("i", { class: each.points ? "dash" : "", style: { borderColor: `var(--c${(each.color === undefined ? at : each.color) % COLORS})` } });
      const key = element("button", { type: "button", class: "key", "aria-pressed": "true" }, swatch, each.name);
      key.addEventListener("click", () => {
        const show = key.getAttribute("aria-pressed") !== "true";
        key.setAttribute("aria-pressed", String(show));
        each.parts.forEach((part) => chart.plot.setSeries(part, { show }));
      });
      chart.legend.append(key);
    });
    bindMarks(chart);
    chart.hover = (clientX, clientY) => {
      const u = chart.plot, at = u.cursor.idx;
      if (at === null || at === undefined) return hideTip();
      const rows = [];
      spec.series.forEach((each, index) => {
        const value = each.y[at];
        if (value === null || value === undefined || !u.series[each.at].show) return;
        const span = each.low && each.low[at] !== null ? ` (${text(each.low[at], spec.axes[each.axis])} to ${text(each.high[at], spec.axes[each.axis])})` : "";
        rows.push([chart.colors[index](), each.name, text(value, spec.axes[each.axis]) + span]);
      });
      const [left] = cursorIn(chart, clientX, clientY);
      showTip(clientX, clientY, [element("b", {}, "step " + plain(Math.round(spec.x[at]), 0)), tipRows(rows), ...markTips(chart, u, left)]);
    };
    addChart(chart, opts, data);
  }

  // ---- heat map --------------------------------------------------------------------------------------------------

  function rowAxis(names) {
    const height = (u) => u.bbox.height / (devicePixelRatio || 1) / names.length;
    const every = (u) => Math.max(1, Math.ceil(15 / Math.max(height(u), 0.01)));
    return {
      scale: "y", side: 3, font: FONT, stroke: () => palette.soft, gap: 6, grid: { show: false }, ticks: { show: false },
      splits: (u) => names.map((name, at) => at).filter((at) => at % every(u) === 0).map((at) => at + 0.5),
      values: (u, splits) => splits.map((at) => names[Math.floor(at)]),
      size: () => Math.ceil(Math.max(...names.map((name) => widthOf(name)))) + 14,
    };
  }

  function heatMapChart(name, spec) {
    const chart = frame(name, spec), rows = spec.rows.length;
    const most = spec.top / spec.quantum || 1;
    const shade = (value) => value / most;
    chart.paint = () => {
      const sheet = element("canvas", { width: Math.max(1, spec.columns), height: Math.max(1, rows) });
      const ctx = sheet.getContext("2d"), image = ctx.createImageData(sheet.width, sheet.height);
      spec.values.forEach((value, at) => {
        if (value < 0) return;
        image.data.set([...rampAt(shade(value)), 255], 4 * at);
      });
      ctx.putImageData(image, 0, 0);
      chart.sheet = sheet;
    };
    chart.right = 26;
    const stages = spec.partitions.length ? spec.partitions[spec.partitions.length - 1] : null;
    if (stages) chart.right = 24 + widthOf("stage " + stages.workers.length);
    const height = Math.min(620, Math.max(254, rows * 16)) + 46;
    const draw = (u) => {
      const ratio = devicePixelRatio || 1, { ctx, bbox } = u;
      const at = (step) => u.valToPos(step, "x", true), down = (row) => bbox.top + row / rows * bbox.height;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.fillStyle = palette.empty;
      ctx.fillRect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.imageSmoothingEnabled = false;
      const begin = at(spec.first - 0.5), end = at(spec.first - 0.5 + spec.columns * spec.width);
      ctx.drawImage(chart.sheet, begin, bbox.top, end - begin, bbox.height);
      // Thin lines where many stages are close to each other.
      const thick = Math.min(2.8, Math.max(1.6, 40 / (stages ? stages.workers.length : 1) * 0.8));
      for (const [color, width] of [[palette.halo, 2 * thick], [palette.cut, thick]]) {
        ctx.strokeStyle = color;
        ctx.lineWidth = width * ratio;
        ctx.lineJoin = "round";
        spec.partitions.forEach((each, index) => {
          const next = spec.partitions[index + 1];
          each.cuts.forEach((cut, k) => {
            ctx.beginPath();
            ctx.moveTo(at(each.from), down(cut));
            ctx.lineTo(at(each.to), down(cut));
            if (next && next.cuts.length === each.cuts.length) ctx.lineTo(at(each.to), down(next.cuts[k]));
            ctx.stroke();
          });
        });
      }
      ctx.restore();
      drawMarks(chart, u);
    };
    const opts = options(chart, height, { y: { dir: -1, range: [0, rows] } }, [xAxis(chart), rowAxis(spec.rows)], [{ scale: "y", show: true, stroke: "transparent", points: { show: false } }], draw);
    opts.cursor.points = { show: false };
    const highest = (spec.highest > spec.top * 1.001 ? "≥ " : "") + text(spec.top, spec.unit);
    chart.legend.append(element("span", { class: "key scale" }, "0", element("i", {}), highest));
    if (spec.values.some((value) => value < 0)) chart.legend.append(element("span", { class: "key" }, element("i", { class: "box", style: { background: "var(--empty)", outline: "1px solid var(--rule)" } }), "not measured"));
    if (spec.partitions.length) chart.legend.append(element("span", { class: "key" }, element("i", { class: "cuts" }), "stage boundary"));
    bindMarks(chart);
    chart.side = element("div", { "aria-hidden": "true" });
    chart.box.append(chart.side);
    chart.onDraw = () => {
      chart.side.replaceChildren();
      const current = spec.partitions.filter((each) => each.from < chart.view[1] && each.to > chart.view[0]).pop();
      if (!current) return;
      const ratio = devicePixelRatio || 1, u = chart.plot, tall = u.bbox.height / ratio, edges = [0, ...current.cuts, rows];
      let free = -1e9;
      for (let k = 0; k + 1 < edges.length; k++) {
        const y = u.bbox.top / ratio + (edges[k] + edges[k + 1]) / 2 / rows * tall - 8;
        if ((edges[k + 1] - edges[k]) / rows * tall < 15 || y < free) continue;
        free = y + 16;
        chart.side.append(element("span", { class: "side", style: { top: y + "px", left: (u.bbox.left + u.bbox.width) / ratio + 8 + "px" } }, "stage " + k));
      }
    };
    chart.hover = (clientX, clientY) => {
      const [left, topAt] = cursorIn(chart, clientX, clientY), u = chart.plot;
      const step = u.posToVal(left, "x"), row = Math.floor(u.posToVal(topAt, "y"));
      const column = Math.floor((step - spec.first + 0.5) / spec.width);
      if (row < 0 || row >= rows) return hideTip();
      const value = column >= 0 && column < spec.columns ? spec.values[row * spec.columns + column] : -1;
      const first = spec.first + column * spec.width;
      const when = spec.width > 1 && value >= 0 ? `steps ${plain(first, 0)} to ${plain(first + spec.width - 1, 0)}` : "step " + plain(Math.round(step), 0);
      const rowsOf = [[value < 0 ? palette.empty : `rgb(${rampAt(shade(value)).join(",")})`, spec.rows[row], value < 0 ? "not measured" : text(value * spec.quantum, spec.unit)]];
      const current = spec.partitions.find((each) => each.from <= step && step < each.to);
      if (current) {
        const stage = current.cuts.filter((cut) => cut <= row).length;
        rowsOf.push([null, "stage " + stage, current.workers[stage] === undefined ? "" : "worker " + current.workers[stage]]);
      }
      showTip(clientX, clientY, [element("b", {}, when), tipRows(rowsOf), ...markTips(chart, u, left)]);
    };
    chart.paint();
    addChart(chart, opts, [[spec.range[0], spec.range[1]], [null, null]]);
  }

  // ---- timeline --------------------------------------------------------------------------------------------------

  const KINDS = ["forward", "backward", "input gradient", "weight gradient", "output shards", "their gradient"];
  const KIND_COLORS = [0, 1, 1, 2, 3, 2];

  // A row is [gap, duration, kind, microbatch, stage] times the number of operations; gaps are from the previous end.
  function spansOf(spec) {
    return spec.spans.map((flat) => {
      const spans = [];
      let clock = 0;
      for (let at = 0; at < flat.length; at += 5) {
        const start = clock + flat[at], end = start + flat[at + 1];
        spans.push({ start: start * spec.quantum, end: end * spec.quantum, kind: flat[at + 2], microbatch: flat[at + 3], stage: flat[at + 4] });
        clock = end;
      }
      return spans;
    });
  }

  function timelineChart(name, spec) {
    const chart = frame(name, spec), rows = spec.rows.length;
    chart.spans = spansOf(spec);
    const tall = Math.max(18, Math.min(46, 440 / rows)), height = rows * tall + 50;
    const draw = (u) => {
      const ratio = devicePixelRatio || 1, { ctx, bbox } = u;
      const at = (ns) => u.valToPos(ns, "x", true);
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      ctx.font = FONT.replace("12px", 11 * ratio + "px");
      chart.spans.forEach((spans, row) => {
        const top = bbox.top + (row + 0.1) / rows * bbox.height, box = bbox.height / rows * 0.8;
        ctx.fillStyle = palette.shade;
        ctx.fillRect(at(0), top, at(spec.end) - at(0), box);
        for (const span of spans) {
          if (span.end < chart.view[0] || span.start > chart.view[1] || span.end <= span.start) continue;
          const left = at(span.start), wide = Math.max(at(span.end) - left - (at(span.end) - left > 4 * ratio ? ratio : 0), 0.5);
          const color = palette.lines[KIND_COLORS[span.kind]];
          const lit = chart.lit !== undefined && chart.lit !== span.microbatch;
          ctx.globalAlpha = lit ? 0.25 : span.microbatch % 2 ? 0.82 : 1;
          ctx.fillStyle = color;
          ctx.fillRect(left, top, wide, box);
          const shownLeft = Math.max(left, bbox.left), shown = Math.min(left + wide, bbox.left + bbox.width) - shownLeft;
          const number = String(span.microbatch);
          if (shown > (number.length * 7 + 4) * ratio && box > 11 * ratio && !lit) {
            ctx.globalAlpha = 1;
            ctx.fillStyle = inkOn(color);
            ctx.fillText(number, shownLeft + shown / 2, top + box / 2);
          }
        }
        ctx.globalAlpha = 1;
      });
      ctx.restore();
      drawMarks(chart, u);
    };
    const opts = options(chart, height, { y: { dir: -1, range: [0, rows] } }, [xAxis(chart), rowAxis(spec.rows)], [{ scale: "y", stroke: "transparent", points: { show: false } }], draw);
    opts.cursor.points = { show: false };
    opts.axes[0].grid = { show: false };
    spec.kinds.forEach((kind) => {
      chart.legend.append(element("span", { class: "key" }, element("i", { class: "box", style: { background: `var(--c${KIND_COLORS[kind]})` } }), KINDS[kind]));
    });
    chart.legend.append(element("span", { class: "key" }, element("i", { class: "box", style: { background: "var(--shade)", outline: "1px solid var(--rule)" } }), "idle"));
    const light = (microbatch) => {
      if (chart.lit === microbatch) return;
      chart.lit = microbatch;
      chart.plot.redraw(false);
    };
    chart.leave = () => light(undefined);
    chart.hover = (clientX, clientY) => {
      const [left, topAt] = cursorIn(chart, clientX, clientY), u = chart.plot;
      const ns = u.posToVal(left, "x"), row = Math.floor(u.posToVal(topAt, "y"));
      if (row < 0 || row >= rows) return hideTip();
      const span = chart.spans[row].find((each) => each.start <= ns && ns < each.end);
      if (!span) {
        light(undefined);
        return showTip(clientX, clientY, [element("b", {}, spec.rows[row]), tipRows([[null, ns > spec.end ? "after the step" : "idle", "at " + text(Math.max(ns, 0), "ns")]])]);
      }
      light(span.microbatch);
      showTip(clientX, clientY, [
        element("b", {}, `${KINDS[span.kind]} of microbatch ${span.microbatch}`),
        tipRows([[palette.lines[KIND_COLORS[span.kind]], spec.rows[row], "stage " + span.stage], [null, "duration", text(span.end - span.start, "ns")],
          [null, "from", text(span.start, "ns")], [null, "to", text(span.end, "ns")]]),
      ]);
    };
    addChart(chart, opts, [[spec.range[0], spec.range[1]], [null, null]]);
  }

  // ---- page ------------------------------------------------------------------------------------------------------

  function redraw() {
    readPalette();
    for (const chart of Object.values(charts)) {
      if (chart.paint) chart.paint();
      chart.plot.redraw(true, true);
    }
  }

  function themes() {
    const button = document.querySelector(".theme"), names = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
    let theme = "auto";
    try { theme = localStorage.getItem("dynmo-theme") || "auto"; } catch (error) { /* a page of a file may have no storage */ }
    const apply = () => {
      if (theme === "auto") root.removeAttribute("data-theme");
      else root.setAttribute("data-theme", theme);
      button.textContent = names[theme] || names.auto;
      button.setAttribute("aria-label", "Color " + button.textContent.toLowerCase() + "; click to change");
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      theme = { auto: "light", light: "dark", dark: "auto" }[theme] || "auto";
      try { localStorage.setItem("dynmo-theme", theme); } catch (error) { /* as above */ }
      apply();
      redraw();
    });
    apply();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    let before = null;
    addEventListener("beforeprint", () => { before = root.getAttribute("data-theme"); root.setAttribute("data-theme", "light"); redraw(); });
    addEventListener("afterprint", () => { if (before) root.setAttribute("data-theme", before); else root.removeAttribute("data-theme"); redraw(); });
  }

  // Trace Event Format: one process per timeline, one thread per worker, times in microseconds.
  function traceOf(names) {
    const events = [];
    names.forEach((name, pid) => {
      const chart = charts[name];
      const title = document.getElementById(name + "-title").textContent;
      events.push({ name: "process_name", ph: "M", pid, args: { name: title } });
      chart.spans.forEach((spans, tid) => {
        events.push({ name: "thread_name", ph: "M", pid, tid, args: { name: chart.spec.rows[tid] } });
        for (const span of spans) {
          events.push({
            name: `${KINDS[span.kind]} ${span.microbatch}`, cat: KINDS[span.kind], ph: "X", pid, tid, ts: span.start / 1000,
            dur: (span.end - span.start) / 1000, args: { stage: span.stage, microbatch: span.microbatch },
          });
        }
      });
    });
    return { traceEvents: events, displayTimeUnit: "ms" };
  }

  function traces() {
    for (const button of document.querySelectorAll("[data-trace]")) {
      button.hidden = false;
      button.addEventListener("click", () => {
        const blob = new Blob([JSON.stringify(traceOf(button.dataset.trace.split(",")))], { type: "application/json" });
        const link = element("a", { href: URL.createObjectURL(blob), download: button.dataset.file });
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 1000);
      });
    }
  }

  themes();
  readPalette();
  const makers = { lines: linesChart, heatmap: heatMapChart, timeline: timelineChart };
  for (const [name, spec] of Object.entries(specs)) makers[spec.kind](name, spec);
  for (const details of document.querySelectorAll("details.values")) details.open = false;
  for (const figure of document.querySelectorAll("figure.chart")) {
    const group = specs[figure.id] && specs[figure.id].group;
    figure.querySelector(".canvas").append(element("div", { class: "x-name" }, group === "time" ? "time from the start of the step" : "step"));
  }
  traces();
  root.setAttribute("data-ready", "true");
  addEventListener("scroll", hideTip, { passive: true });
  window.dynmoCharts = charts;
})();
