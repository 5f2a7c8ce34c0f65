// The views of a run: tables, curves, the timeline of the protocol. Used by the report (data in the page) and the dashboard (data by fetch).
// Every text goes into the page as text, never as markup.
"use strict";
const fedbcd = (() => {
  // ---------------------------------------------------------------------------------------------------------------- small things
  const SVG = "http://www.w3.org/2000/svg";
  function fill(element, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (key === "value") element.value = value;
      else if (key === "color") element.style.background = value;
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return element;
  }
  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (k) => `var(--run-${k % 8})`;
  const drawn = (k) => css(`--run-${k % 8}`);
  const isNumber = (v) => typeof v === "number" && Number.isFinite(v);
  function short(v) {
    if (!isNumber(v)) return "–";
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size >= 1e6 || size < 1e-3) return v.toExponential(2);
    return size >= 1000 ? v.toFixed(0) : String(Number(v.toPrecision(size >= 100 ? 4 : 3)));
  }
  function ticks(low, high, count, least = 0) {  // round numbers between two values
    const raw = Math.max((high - low) / Math.max(1, count), least, 1e-12), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * power).find((v) => v >= raw * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(Number((k * step).toPrecision(10)));
    return found;
  }
  const score = (v) => (isNumber(v) ? v.toFixed(3) : "–");
  const percent = (v) => (isNumber(v) ? `${(100 * v).toFixed(v > 0 && v < 0.0995 ? 1 : 0)} %` : "–");
  function bytes(v) {
    if (!isNumber(v)) return "–";
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let k = 0;
    while (Math.abs(v) >= 1000 && k < units.length - 1) { v /= 1000; k += 1; }
    return `${Number(v.toPrecision(3))} ${units[k]}`;
  }
  const AXES = { round: ["rounds", short], clock: ["clock", short], bytes: ["bytes of models sent", bytes] };

  function table(caption, head, rows, textColumns = [0]) {
    const cell = (tag, value, k) => h(tag, { class: textColumns.includes(k) ? "text" : null, scope: tag === "th" ? "col" : null }, value === null || value === undefined ? "–" : value);
    return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      h("table", {}, h("caption", {}, caption),
        h("thead", {}, h("tr", {}, head.map((name, k) => cell("th", name, k)))),
        h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value, k) => cell("td", value, k)))))));
  }
  function lazyTable(caption, make) {
    const details = h("details", {}, h("summary", {}, "Data as a table"));
    details.addEventListener("toggle", () => {
      details.querySelectorAll(".scroll").forEach((old) => old.remove());
      if (details.open) details.append(make());
    });
    details.refresh = () => { if (details.open) { details.querySelectorAll(".scroll").forEach((old) => old.remove()); details.append(make()); } };
    return details;
  }
  const swatch = (colours, text) => h("li", {}, h("span", { class: "swatch", color: colours, "aria-hidden": "true" }), text);
  function choice(label, options, onchange) {  // a labelled select that keeps its choice when the options change
    const select = h("select", { onchange });
    const set = (list) => {
      const before = select.value;
      if ([...select.options].map((o) => o.value + o.text).join("\n") === list.map(([v, t]) => v + t).join("\n")) return;
      select.replaceChildren(...list.map(([value, text]) => h("option", { value }, text)));
      if (list.some(([value]) => value === before)) select.value = before;
    };
    set(options);
    return { el: h("label", {}, label, select), select, set };
  }

  // ------------------------------------------------------------------------------------------------------- runs and their seeds
  function several(runs) {  // one seed twice is no second seed
    const seeds = new Set(runs.map((run) => run.seed)).size;
    return seeds === runs.length ? `${seeds} seeds` : `${runs.length} runs of ${seeds === 1 ? "one seed" : `${seeds} seeds`}`;
  }
  function groupsOf(view) {
    const groups = new Map();
    for (const run of view.runs) {
      if (!groups.has(run.group)) groups.set(run.group, { runs: [], number: groups.size });
      groups.get(run.group).runs.push(run);
    }
    const found = [...groups.values()];
    for (const group of found) {
      const names = [...new Set(group.runs.map((run) => run.name))];
      group.name = group.runs.length > 1 ? `${names[0]} (${several(group.runs)})` : names[0];
    }
    const names = found.map((group) => group.name);
    for (const group of found) if (names.filter((name) => name === group.name).length > 1) group.name = `${group.name} [${group.runs[0].folder}]`;
    return found;
  }
  function named(app, run) {
    const others = app.view.runs.filter((other) => other !== run && other.name === run.name);
    if (others.some((other) => other.seed === run.seed)) return `${run.name}, seed ${run.seed} [${run.folder}]`;
    return others.length ? `${run.name}, seed ${run.seed}` : run.name;
  }
  function pairs(run, x, column, positive) {
    const xs = [], ys = [];
    run.history[x].forEach((value, k) => {
      const y = (run.history[column] || [])[k];
      if (isNumber(value) && isNumber(y) && (!positive || y > 0) && (xs.length === 0 || value > xs[xs.length - 1])) { xs.push(value); ys.push(y); }
    });
    return [xs, ys];
  }
  function at(xs, ys, x) {
    let k = xs.findIndex((value) => value >= x);
    if (k < 0) k = xs.length - 1;
    if (k === 0 || xs[k] === x) return ys[k];
    const share = (x - xs[k - 1]) / (xs[k] - xs[k - 1]);
    return ys[k - 1] + share * (ys[k] - ys[k - 1]);
  }
  function band(group, x, column, positive) {  // mean, least and most over the seeds, where all of them have been
    const curves = group.runs.map((run) => pairs(run, x, column, positive)).filter(([xs]) => xs.length > 0);
    if (curves.length === 0) return [[], [], [], []];
    if (curves.length === 1) return [curves[0][0], curves[0][1], curves[0][1], curves[0][1]];
    const low = Math.max(...curves.map(([xs]) => xs[0])), high = Math.min(...curves.map(([xs]) => xs[xs.length - 1]));
    const grid = [...new Set(curves.flatMap(([xs]) => xs))].filter((v) => v >= low && v <= high).sort((a, b) => a - b);
    const values = grid.map((v) => curves.map(([xs, ys]) => at(xs, ys, v)));
    return [grid, values.map((v) => v.reduce((a, b) => a + b) / v.length), values.map((v) => Math.min(...v)), values.map((v) => Math.max(...v))];
  }

  // ----------------------------------------------------------------------------------------------------------------- line charts
  const charts = new Set();
  // `lines()` gives {x: label, formatX, formatY, curves: [{name, number, xs, ys, low, high, dash}], log}
  function lineChart(title, lines) {
    const place = h("div", { class: "chart", tabindex: "0", role: "img" });
    const readout = h("div", { class: "readout", "aria-live": "polite" });
    let state = lines(), chart = null, shape = "", data = [[]];
    const details = lazyTable(title, () => {
      const rows = [];
      for (const curve of state.curves) curve.xs.forEach((x, k) => rows.push([curve.name, state.formatX(x), state.formatY(curve.ys[k])].concat(curve.low ? [`${state.formatY(curve.low[k])} to ${state.formatY(curve.high[k])}`] : [])));
      return table(title, ["run", state.x, "value"].concat(state.curves.some((c) => c.low) ? ["least to most"] : []), rows.slice(0, 2000));
    });
    const figure = h("figure", {}, h("figcaption", {}, title), place, readout, details);

    function join() {
      const tables = state.curves.map((c) => (c.low ? [c.xs, c.ys, c.low, c.high] : [c.xs, c.ys]));
      return tables.length ? uPlot.join(tables) : [[]];
    }
    function options() {
      const series = [{}], bands = [];
      for (const c of state.curves) {
        const stroke = () => drawn(c.number);
        series.push({ label: c.name, stroke, width: 2, dash: c.dash, spanGaps: true, points: { show: c.xs.length < 60, size: c.size || 5 } });
        if (c.low) {
          const plain = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
          series.push({ ...plain, label: `${c.name}, least` }, { ...plain, label: `${c.name}, most` });
          bands.push({ series: [series.length - 1, series.length - 2], fill: () => `${drawn(c.number)}33` });
        }
      }
      const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line") }, font: "12px system-ui, sans-serif" };
      return {
        width: Math.max(200, place.clientWidth), height: 240, series, bands,
        scales: { x: { time: false }, y: state.log ? { distr: 3 } : {} },
        axes: [
          { ...axis, size: 32, label: state.x, labelSize: 16, labelGap: 0, labelFont: "12px system-ui, sans-serif", space: 70, values: (_, ticks) => ticks.map(state.formatX) },
          { ...axis, size: 58, values: (_, ticks) => ticks.map((v) => (v === null ? "" : state.formatY(v))) },
        ],
        hooks: { setCursor: [(u) => say(u.cursor.idx)] },
        cursor: { drag: { x: true, y: false } },
        legend: { show: false },
      };
    }
    function say(k) {
      if (k === null || k === undefined || !data[0].length) { readout.textContent = ""; return; }
      const x = data[0][k];
      const parts = state.curves.filter((c) => c.xs.length && x >= c.xs[0] && x <= c.xs[c.xs.length - 1]).map((c) => `${c.name} ${state.formatY(at(c.xs, c.ys, x))}`);
      readout.textContent = `${state.x} ${state.formatX(x)}: ${parts.join("; ")}`;
    }
    function label() {
      const ends = state.curves.filter((c) => c.xs.length).map((c) => `${c.name} ends at ${state.formatY(c.ys[c.ys.length - 1])}`);
      place.setAttribute("aria-label", `${title} against ${state.x}. ${ends.join(". ") || state.none || "no data yet"}. Arrow keys read values.`);
    }
    function update() {
      state = lines();
      data = join();
      label();
      const now = JSON.stringify([state.x, state.log, state.curves.map((c) => [c.name, c.number, Boolean(c.low), c.dash, c.xs.length < 60])]);
      if (chart && now === shape) chart.setData(data);
      else {
        if (chart) chart.destroy();
        place.replaceChildren();
        chart = null;
        if (data[0].length) chart = new uPlot(options(), data, place);
        else place.append(h("p", { class: "muted" }, state.none || "no data yet"));
        shape = now;
      }
      details.refresh();
    }
    place.addEventListener("keydown", (event) => {
      if (!chart || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
      event.preventDefault();
      if (event.key === "Escape") { chart.setData(data); return; }
      const last = data[0].length - 1, now = chart.cursor.idx;
      const k = { Home: 0, End: last, ArrowLeft: Math.max(0, (now ?? last + 1) - 1), ArrowRight: Math.min(last, (now ?? -1) + 1) }[event.key];
      chart.setCursor({ left: chart.valToPos(data[0][k], "x"), top: 10 });
      say(k);
    });
    new ResizeObserver(() => { if (chart && place.clientWidth) chart.setSize({ width: place.clientWidth, height: 240 }); }).observe(place);
    const self = { el: figure, update, redraw: () => { if (chart) chart.redraw(false, true); }, points: () => data };
    charts.add(self);
    return self;
  }
  function historyChart(app, title, column, options = {}) {
    return lineChart(title, () => {
      const [x, formatX] = AXES[app.axis];
      const curves = groupsOf(app.view).map((group) => {
        const [xs, ys, low, high] = band(group, app.axis, column, options.log);
        return { name: group.name, number: group.number, xs, ys, ...(group.runs.length > 1 ? { low, high } : {}) };
      }).filter((curve) => curve.xs.length);
      const none = app.view.runs.every((run) => run.summary.state === "finished") ? "not measured" : "no data yet";
      return { x, formatX, formatY: options.format || short, log: options.log, curves, none };
    });
  }

  // ------------------------------------------------------------------------------------------------------------------- sections
  const KINDS = [["global", "global models"], ["personal", "personal models, each on its own"], ["worst", "worst tenth of the personal models"]];
  function measuresOf(app) {  // of all runs, each once
    return [...new Map(app.view.runs.flatMap((run) => run.measures).map((m) => [m.name, m])).values()];
  }
  const sections = {};
  function section(id, title, lead) {
    const el = h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), lead ? h("p", { class: "lead" }, lead) : null);
    return el;
  }
  function legend(app) {
    const list = h("ul", { class: "legend" });
    return { el: list, update: () => list.replaceChildren(...groupsOf(app.view).map((group) => swatch(colour(group.number), group.name))) };
  }

  sections.summary = (app) => {
    const el = section("summary", "Summary", "Where each run ended, by its first measure, on test data; a device's personal model is tested on its own test samples, or on the labels it owns. “Worst tenth” is the mean over the worst tenth of the devices.");
    const place = h("div"), goals = h("div"), goal = h("input", { type: "number", min: "0", max: "1", step: "0.005", oninput: () => reach() });
    const which = choice("score", [], () => { goal.value = ""; reach(); });
    el.append(place, h("h3", {}, "Time to a score"), h("div", { class: "controls" }, which.el, h("label", {}, "goal", goal)), goals);
    function state(run) {
      const s_ = run.summary;
      if (s_.state === "finished") return "finished";
      const bar = h("i");
      bar.style.width = `${100 * (s_.fraction || 0)}%`;
      return h("span", { class: "state" }, `${{ stopped: "stopped", silent: "no answer" }[s_.state] || "goes on"}${s_.fraction === null ? "" : `, ${Math.floor(100 * s_.fraction)} %`}`, h("span", { class: "bar", "aria-hidden": "true" }, bar));
    }
    function reach() {
      const columns = measuresOf(app).flatMap((m) => KINDS.map(([kind, title]) => [m[kind], `${m.name}, ${title}`, m.better]));
      which.set(columns.map(([column, text]) => [column, text]));
      const column = which.select.value, lower = (columns.find(([name]) => name === column) || [])[2] === "lower";
      const values = (run) => (run.history[column] || []), sign = lower ? -1 : 1;
      const best = app.view.runs.map((run) => Math.max(...values(run).filter(isNumber).map((v) => sign * v), -Infinity));
      const usual = sign * Math.min(...best.filter(Number.isFinite));
      goal.placeholder = score(usual);
      const wanted = goal.value === "" ? usual : Number(goal.value);
      if (!Number.isFinite(wanted)) { goals.replaceChildren(h("p", { class: "muted" }, "no run has been tested")); return; }
      const rows = app.view.runs.map((run) => {
        const k = values(run).findIndex((v) => isNumber(v) && sign * v >= sign * wanted - 1e-12);
        return [run.name, run.seed, k < 0 ? "not reached" : short(run.history.clock[k]), k < 0 ? "–" : run.history.round[k], k < 0 ? "–" : bytes(run.history.bytes[k])];
      });
      goals.replaceChildren(table(`First evaluation with ${score(wanted)} or ${lower ? "less" : "more"}${goal.value === "" ? ", which every run reaches" : ""}`, ["run", "seed", "clock", "rounds", "bytes"], rows));
    }
    return { id: "summary", title: "Summary", el, update: () => {
      const rows = app.view.runs.map((run) => {
        const r = run.summary;
        return [run.name, run.seed, state(run), r.rounds, short(r.clock), r.values ? bytes(r.bytes) : "–", score(r.global), score(r.personal), score(r.worst), r.seconds === null || r.seconds === undefined ? "–" : short(r.seconds)];
      });
      place.replaceChildren(table("Runs", ["run", "seed", "state", "rounds", "clock", "bytes", "global", "personal", "worst tenth", "seconds"], rows, [0, 2]));
      place.append(h("p", { class: "muted" }, measured(app.view.runs)));
      reach();
    } };
  };

  /* How test samples are weighted in personal scores, and whether it is the same in all runs. */
  function measured(runs) {
    const words = { "own-shares": "each label counts by its share of the device's own samples", "own-tests": "each device on test samples of its own", "pooled-labels": "all test samples of a device's labels count alike" };
    const [one, ...others] = Object.keys(words).map((measure) => [words[measure], runs.filter((run) => run.summary.measure === measure).map((run) => run.name)]).filter(([, names]) => names.length);
    if (!one) return "";
    return others.length ? `Personal scores of these runs do not compare: ${[one, ...others].map(([text, names]) => `in ${names.join(", ")} ${text}`).join("; ")}.` : `In personal scores ${one[0]}.`;
  }

  sections.next = (app) => {
    const el = section("next", "What to try next", "Remarks drawn from the numbers of each run; each names the figure it rests on.");
    const place = h("div");
    el.append(place);
    return { id: "next", title: "Next", el, uses: (run) => run.advice, update: () => place.replaceChildren(...app.view.runs.flatMap((run) => [
      app.view.runs.length > 1 ? h("h3", {}, named(app, run)) : null, h("ul", { class: "advice" }, (run.advice || []).map((text) => h("li", {}, text)))]).filter(Boolean)) };
  };

  sections.curves = (app) => {
    const el = section("curves", "Curves", "Drag over a chart to zoom in, double-click to zoom out; arrow keys read values.");
    const key = legend(app);
    const axes = h("fieldset", {}, h("legend", {}, "against"), Object.entries(AXES).map(([name, [label]]) => h("label", {}, h("input", { type: "radio", name: "axis", value: name, checked: name === app.axis, onchange: () => { app.axis = name; app.refresh(["curves", "distances", "certificates"]); } }), label)));
    const place = h("div", { class: "grid" }), drawn = new Map();
    el.append(h("div", { class: "controls" }, axes), key.el, place);
    function parts() {  // a chart for each column, as soon as a run has it
      for (const m of measuresOf(app)) for (const [kind, title] of KINDS) if (!drawn.has(m[kind])) {
        const chart = historyChart(app, `${m.name}, ${title}`, m[kind], { format: score });
        drawn.set(m[kind], chart);
        place.append(chart.el);
      }
      return [...drawn.values()];
    }
    return { id: "curves", title: "Curves", el, update: () => [key, ...parts()].forEach((part) => part.update()) };
  };

  function histogram(title, xLabel, edges, sets, zero) {  // sets: [{name, number, counts}]
    const width = 560, height = 220, left = 44, bottom = 34, top = 8;
    const used = edges.slice(0, -1).map((_, k) => sets.some((set) => set.counts[k] > 0));
    let first = Math.max(0, used.indexOf(true) - 1), last = Math.min(used.length - 1, used.lastIndexOf(true) + 1);
    if (first > last) { first = 0; last = used.length - 1; }
    const most = Math.max(1, ...sets.flatMap((set) => set.counts));
    const x = (v) => left + (width - left - 8) * (v - edges[first]) / (edges[last + 1] - edges[first]);
    const y = (v) => height - bottom - (height - bottom - top) * v / most;
    const words = sets.map((set) => `${set.name}: ${set.counts.reduce((a, b) => a + b, 0)} devices`).join("; ");
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}. ${words}` });
    for (const v of ticks(0, most, 4, 1)) svg.append(s("line", { class: "axisline", x1: left, x2: width - 8, y1: y(v), y2: y(v) }), s("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, String(v)));
    for (const set of sets) {
      let path = `M${x(edges[first])},${y(0)}`;
      for (let k = first; k <= last; k += 1) path += `V${y(set.counts[k])}H${x(edges[k + 1])}`;
      const shape = s("path", { d: `${path}V${y(0)}`, "stroke-width": 2 });
      shape.style.stroke = colour(set.number);
      shape.style.fill = colour(set.number);
      shape.style.fillOpacity = sets.length > 1 ? 0.18 : 0.45;
      svg.append(shape);
    }
    if (zero && edges[first] < 0 && edges[last + 1] > 0) {
      const line = s("line", { x1: x(0), x2: x(0), y1: top, y2: y(0), "stroke-width": 1.5, "stroke-dasharray": "4 3" });
      line.style.stroke = "var(--ink)";
      svg.append(line);
    }
    for (const v of ticks(edges[first], edges[last + 1], 6)) svg.append(s("text", { x: x(v), y: height - bottom + 15, "text-anchor": v === edges[last + 1] ? "end" : "middle" }, String(v)));
    svg.append(s("text", { x: (left + width) / 2, y: height - 3, "text-anchor": "middle" }, xLabel));
    const rows = () => table(title, ["from", "to", ...sets.map((set) => set.name)], edges.slice(0, -1).map((v, k) => [short(v), short(edges[k + 1]), ...sets.map((set) => set.counts[k])]).filter((_, k) => used[k]));
    return h("figure", {}, h("figcaption", {}, title), svg, lazyTable(title, rows));
  }
  function summed(histograms) {
    return histograms[0].counts.map((_, k) => histograms.reduce((total, one) => total + one.counts[k], 0));
  }
  sections.devices = (app) => {
    const el = section("devices", "Devices", "How personal scores are spread over the devices, and who gains or loses by a model of their own, tested on the same labels.");
    const key = legend(app), place = h("div");
    el.append(key.el, place);
    const OWN = "its own global models";
    const row = (d) => [d.device, d.server, d.labels ? d.labels.join(", ") : "–", score(d.personal), score(d.against), isNumber(d.against) && isNumber(d.personal) ? h("span", { class: d.personal >= d.against ? "better" : "worse" }, (d.personal - d.against >= 0 ? "+" : "−") + Math.abs(d.personal - d.against).toFixed(3)) : "–"];
    const head = (gain) => ["device", "server", "labels", "own model", gain && gain.against ? gain.against : "global model", "difference"];
    function reference(tested, compared) {  // what gains are measured against, in a sentence for each kind of it
      const one = tested.flatMap((group) => group.runs).filter((run) => !run.personal.own).map((run) => named(app, run));
      const runs = compared.flatMap((group) => group.runs), best = [...new Set(runs.map((run) => run.personal.gain.against).filter(Boolean))];
      const own = runs.filter((run) => !run.personal.gain.against).map((run) => named(app, run));
      return [best.length ? `Gain is against ${best.join(", ")}: the best run of this job without personal models.` : "",
        one.length ? `${one.join(", ")} ${one.length === 1 ? "has" : "have"} no personal models: the one model for all is tested on what each device owns.` : "",
        own.length ? `${best.length ? `Gain of ${own.join(", ")} is` : "Gain is"} against the global models of the run itself: no finished run of FedAvg or FedProx on the same data and seed is here to compare with.` : ""].filter(Boolean).join(" ");
    }
    function update() {
      key.update();
      const groups = groupsOf(app.view).filter((group) => group.runs.some((run) => run.personal));
      if (!groups.length) { place.replaceChildren(h("p", { class: "muted" }, "No device has been tested: the run has no test data with labels, or no checkpoint yet.")); return; }
      const tested = groups.map((group) => ({ ...group, runs: group.runs.filter((run) => run.personal) }));
      const compared = tested.map((group) => ({ ...group, runs: group.runs.filter((run) => run.personal.gain) })).filter((group) => group.runs.length);
      const figures = [histogram("Personal scores over devices", `test ${tested[0].runs[0].summary.metric} on the device's own samples`, tested[0].runs[0].personal.histogram.edges, tested.map((g) => ({ name: g.runs[0].personal.own ? g.name : `${g.name} (one model for all)`, number: g.number, counts: summed(g.runs.map((r) => r.personal.histogram)) })))];
      if (compared.length) figures.push(histogram("Gain of a model of one’s own", "by how much its own model is better than the other", compared[0].runs[0].personal.gain.histogram.edges, compared.map((g) => ({ name: g.name, number: g.number, counts: summed(g.runs.map((r) => r.personal.gain.histogram)) })), true));
      const parts = [h("div", { class: "grid" }, figures), h("p", {}, reference(tested, compared))];
      parts.push(table("Spread over devices", ["run", "devices", "mean", "worst tenth", "gain", "equal", "lose", "mean gain", "against"], tested.flatMap((g) => g.runs.map((r) => {
        const p = r.personal, gain = p.gain || {};
        return [r.name, p.devices, score(p.mean), score(p.worst_decile), gain.better, gain.same, gain.worse, score(gain.mean), p.gain ? gain.against || OWN : p.own ? null : "has no personal models"];
      })), [0, 8]));
      for (const group of tested) for (const run of group.runs) {
        const gain = run.personal.gain;
        const open = openDetails.has(`worst-${run.key}`);
        const details = h("details", { open, ontoggle: () => (details.open ? openDetails.add(`worst-${run.key}`) : openDetails.delete(`worst-${run.key}`)) }, h("summary", {}, run.personal.own ? `Devices of ${run.name}: worst, and those that lose or gain most` : `Devices of ${run.name}: the worst`),
          table(run.personal.own ? "Worst personal scores" : "Worst scores", head(gain), run.personal.worst.map(row), [0, 2]),
          gain && gain.losers.length ? table(`Would do better with ${gain.against || "the global model"}`, head(gain), gain.losers.map(row), [0, 2]) : null,
          gain && gain.winners.length ? table("Gain most from a model of their own", head(gain), gain.winners.map(row), [0, 2]) : null);
        parts.push(details);
      }
      place.replaceChildren(...parts);
    }
    const openDetails = new Set();
    return { id: "devices", title: "Devices", el, uses: (run) => run.personal, update };
  };

  sections.distances = (app) => {
    const el = section("distances", "How far apart models are", "Mean over devices of ‖xᵢ − zₙ‖, which the penalty keeps small, and mean over servers of ‖z̄ − zₙ‖, which mixing keeps small (zero on the Sync-cloud).");
    const key = legend(app), parts = [historyChart(app, "Personal from global: ‖xᵢ − zₙ‖", "distance"), historyChart(app, "Servers from their mean: ‖z̄ − zₙ‖", "disagreement")];
    el.append(key.el, h("div", { class: "grid" }, parts.map((part) => part.el)));
    return { id: "distances", title: "Distances", el, update: () => [key, ...parts].forEach((part) => part.update()) };
  };

  sections.certificates = (app) => {
    const el = section("certificates", "Certificates of Theorem 1", "First-order gap of the personal models (mean over a sample of devices; where X is not bounded there is none, and this is the norm of the gradient mapping, without X that of the gradient), pull ‖Σ γᵢ(z̄ − xᵢ)‖², and the largest ‖z̄ − zₙ‖; all go to zero where the theory applies. Logarithmic scales.");
    const key = legend(app), ends = h("div");
    const parts = [historyChart(app, "Gap", "gap", { log: true }), historyChart(app, "Pull", "pull", { log: true }), historyChart(app, "Spread", "spread", { log: true })];
    el.append(key.el, h("div", { class: "grid" }, parts.map((part) => part.el)), ends);
    return { id: "certificates", title: "Certificates", el, update: () => {
      [key, ...parts].forEach((part) => part.update());
      const taken = app.view.runs.filter((run) => !run.summary.certificates.none), without = app.view.runs.filter((run) => run.summary.certificates.none);
      const rows = taken.map((run) => { const c = run.summary.certificates; return [run.name, run.seed, c.round, short(c.gap), short(c.worst_gap), short(c.pull), short(c.spread)]; });
      ends.replaceChildren(...(rows.length ? [table("The last that were taken", ["run", "seed", "after round", "gap", "worst gap", "pull", "spread"], rows)] : []),
        ...without.map((run) => h("p", { class: "muted" }, `${named(app, run)} has no certificates: ${run.summary.certificates.none}.`)));
    } };
  };

  // ---------------------------------------------------------------------------------------------- the timeline of the protocol
  sections.protocol = (app) => {
    const el = section("protocol", "The protocol", "Each server’s response-and-update phases, its waiting, and the mixes of the coordinator, drawn from the event log as in the paper’s Figure 2. Drag to move; click, then turn the wheel, or use + and − to zoom; n and p step through rounds.");
    const canvas = h("canvas", { class: "timeline", tabindex: "0", role: "img" });
    const words = h("p", { class: "readout", "aria-live": "polite" }), note = h("p", { class: "muted" });
    const pick = choice("run", [], () => { range = null; last = null; chosen = null; update(); });
    const jump = h("input", { type: "number", min: "0", onchange: () => show(Number(jump.value)) });
    const button = (text, label, action) => h("button", { type: "button", "aria-label": label, title: label, onclick: action }, text);
    el.append(h("div", { class: "controls" }, pick.el, h("label", {}, "round", jump),
      button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)), button("◀", "Earlier", () => move(-0.5)), button("▶", "Later", () => move(0.5)), button("All", "Show everything", () => { range = null; settle(); })),
    h("ul", { class: "legend" }, swatch("var(--update)", "response and update"), swatch("var(--visit)", "a device at work"), swatch("var(--straggler)", "the last one: it was waited for"), swatch("var(--waiting)", "waiting for other servers"), swatch("var(--mix)", "aggregation: who is mixed with whom")), canvas, note, words);
    const rows = h("div");
    el.append(rows);
    let range = null, last = null, chosen = null, data = null, frame = 0, timer = 0, hover = null;
    const LEFT = 58, BOTTOM = 24, NARROW = 3;
    const run = () => app.view.runs.find((one) => one.key === pick.select.value) || app.view.runs.find((one) => one.timeline);
    const whole = () => { const t = run().timeline; return [app.isLive() && t.overview ? 0 : t.begin, Math.max(t.end, t.begin + 1e-9)]; };
    const view = () => range || whole();

    function zoom(factor, centre) {
      const [a, b] = view(), c = centre === undefined ? (a + b) / 2 : centre, [begin, end] = whole();
      const low = Math.max(begin, c - (c - a) * factor), high = Math.min(end, c + (b - c) * factor);
      range = high - low >= (end - begin) * 0.999 ? null : [low, Math.max(high, low + (end - begin) * 1e-6)];
      settle();
    }
    function move(share) {
      const [a, b] = view(), [begin, end] = whole();
      const by = Math.min(Math.max((b - a) * share, begin - a), end - b);
      if (by !== 0) { range = [a + by, b + by]; settle(); }
    }
    function settle() {  // draw what is there, and in the dashboard ask for the details of this stretch
      draw();
      if (!app.source.timeline || !run()) return;
      clearTimeout(timer);
      timer = setTimeout(async () => {
        const [a, b] = view(), key = run().key;
        const found = range ? await app.source.timeline(key, a, b) : null;
        if (run() && run().key === key) { data = found; draw(); }
      }, 120);
    }
    function source() { return range && data ? data : run().timeline; }

    function draw() { cancelAnimationFrame(frame); frame = requestAnimationFrame(paint); }
    function paint() {
      const one = run();
      if (!one || !one.timeline || !canvas.clientWidth) return;
      const t = source(), servers = Math.max(1, t.servers);
      const rowHeight = Math.max(4, Math.min(30, Math.floor(560 / servers)));
      const width = canvas.clientWidth, height = servers * rowHeight + BOTTOM + 4, ratio = window.devicePixelRatio || 1;
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      const g = canvas.getContext("2d"), [a, b] = view();
      g.setTransform(ratio, 0, 0, ratio, 0, 0);
      g.fillStyle = css("--card");
      g.fillRect(0, 0, width, height);
      const x = (time) => LEFT + (width - LEFT - 6) * (time - a) / (b - a);
      const y = (server) => 4 + server * rowHeight;
      const colours = Object.fromEntries(["update", "visit", "straggler", "waiting", "mix", "soft", "line", "ink"].map((name) => [name, css(`--${name}`)]));
      g.font = "11px system-ui, sans-serif";
      g.save();
      g.beginPath();
      g.rect(LEFT, 0, width - LEFT - 6, height);
      g.clip();
      const crowded = crowdedServers(t, x, a, b);
      overview(g, t, x, y, rowHeight, colours, crowded);
      stretches(g, t, x, y, rowHeight, colours, a, b, crowded);
      shares(g, t, x, y, rowHeight, colours, a, b, width, crowded);
      devices(g, t, x, y, rowHeight, colours, a, b, crowded);
      mixes(g, t, x, y, rowHeight, colours, a, b, servers);
      g.restore();
      note.hidden = !crowded.size;
      note.textContent = crowded.size ? `Phases of ${crowded.size === servers ? "all servers" : crowded.size === 1 ? "one server" : `${crowded.size} servers`} are too short to be drawn one by one here: their rows are filled by shares of time. Zoom in to see them.` : "";
      axis(g, x, a, b, width, height, servers, rowHeight, colours);
      canvas.setAttribute("aria-label", `Timeline of ${one.name}, clock ${short(a)} to ${short(b)}: ${t.servers} servers, ${t.mixes.round.length} mixes in view or near. Step through rounds with n and p; the text below describes the chosen round.`);
    }
    function stack(g, left, wide, top, tall, parts) {  // shares of a stretch of time, one above the other
      let base = top + tall;
      for (const [share, colour_] of parts) {
        if (!(share > 0)) continue;
        g.fillStyle = colour_;
        g.fillRect(left, base - tall * share, wide, tall * share);
        base -= tall * share;
      }
    }
    function earlier(t, each) {  // stretches of time before the phases that are known one by one, with the shares of each server
      const o = t.overview, until = t.phases.opened[0] ?? Infinity;
      if (!o) return;
      const step = (o.end - o.begin) / (o.collecting[0] || []).length;
      o.collecting.forEach((row, server) => row.forEach((share, k) => {
        const from = o.begin + k * step, to = Math.min(from + step, until);
        if (from < to) each(server, from, to, [share, o.waiting[server][k]]);
      }));
    }
    function overview(g, t, x, y, rowHeight, colours, crowded) {
      earlier(t, (server, from, to, [update, waiting]) => {
        if (!crowded.has(server)) stack(g, x(from), x(to) - x(from) + 0.5, y(server) + 1, rowHeight - 2, [[update, colours.update], [waiting, colours.waiting]]);
      });
    }
    // When a phase ended, was mixed and was followed by the next; what has not happened yet happens at the end of what is known.
    function times(t, k) {
      const p = t.phases, ended = p.ended[k] < 0 ? t.end : p.ended[k], released = p.released[k] < 0 ? t.end : p.released[k];
      return [p.opened[k], ended, p.mixed[k] < 0 ? released : Math.max(ended, p.mixed[k]), released];
    }
    function crowdedServers(t, x, a, b) {  // whose phases are narrower than NARROW on average in this view
      const seen = new Map();
      t.phases.server.forEach((server, k) => {
        const [opened, , , released] = times(t, k);
        if (released < a || opened > b) return;
        const one = seen.get(server) || { count: 0, wide: 0 };
        one.count += 1;
        one.wide += x(Math.min(released, b)) - x(Math.max(opened, a));
        seen.set(server, one);
      });
      return new Set([...seen].filter(([, one]) => one.count > 1 && one.wide / one.count < NARROW).map(([server]) => server));
    }
    function shares(g, t, x, y, rowHeight, colours, a, b, width, crowded) {  // bars of NARROW pixels, so that no phase hides another
      const bins = Math.ceil((width - LEFT - 6) / NARROW), spent = new Map([...crowded].map((server) => [server, [0, 1, 2].map(() => new Float64Array(bins))]));
      const place = (time) => (x(Math.min(Math.max(time, a), b)) - LEFT) / NARROW;
      const spread = (server, cause, begin, end, share) => {
        const bin = spent.get(server)[cause], from = place(begin), to = place(end);
        for (let n = Math.floor(from); n < to && n < bins; n += 1) bin[n] += share * (Math.min(to, n + 1) - Math.max(from, n));
      };
      earlier(t, (server, from, to, both) => { if (spent.has(server)) both.forEach((share, cause) => spread(server, cause, from, to, share)); });
      t.phases.server.forEach((server, k) => {
        if (!spent.has(server)) return;
        const moments = times(t, k);
        for (const cause of [0, 1, 2]) spread(server, cause, moments[cause], moments[cause + 1], 1);
      });
      for (const [server, [update, waiting, mixing]] of spent) {
        for (let n = 0; n < bins; n += 1) {
          stack(g, LEFT + n * NARROW, NARROW, y(server) + 1, rowHeight - 2, [[update[n], colours.update], [waiting[n], colours.waiting], [mixing[n], colours.mix]]);
        }
      }
    }
    function stretches(g, t, x, y, rowHeight, colours, a, b, crowded) {
      const p = t.phases;
      for (let k = 0; k < p.server.length; k += 1) {
        const [opened, ended, mixed, released] = times(t, k);
        if (released < a || opened > b || crowded.has(p.server[k])) continue;
        const top = y(p.server[k]) + 1, tall = rowHeight - 2;
        g.fillStyle = colours.update;
        g.fillRect(x(opened), top, x(ended) - x(opened), tall);
        if (released > ended) {
          g.fillStyle = colours.waiting;
          g.fillRect(x(ended), top + tall * 0.3, x(released) - x(ended), tall * 0.4);
        }
        if (x(released) - x(mixed) > 0.5) {
          g.fillStyle = colours.mix;
          g.fillRect(x(mixed), top, x(released) - x(mixed), tall);
        }
      }
    }
    function devices(g, t, x, y, rowHeight, colours, a, b, crowded) {
      if (rowHeight < 10) return;
      const v = t.visits, p = t.phases, lanes = new Map();
      g.lineWidth = 2;
      for (let k = 0; k < v.phase.length; k += 1) {
        const phase = v.phase[k], uploaded = v.uploaded[k] < 0 ? t.end : v.uploaded[k];
        const lane = lanes.get(phase) || 0;
        lanes.set(phase, lane + 1);
        if (uploaded < a || v.admitted[k] > b || x(uploaded) - x(v.admitted[k]) < 1.5 || crowded.has(p.server[phase])) continue;
        const tall = rowHeight - 6, line = y(p.server[phase]) + 4 + (tall > 8 ? (lane * 5) % tall : tall / 2);
        const late = p.last_device[phase] === v.device[k] && p.ended[phase] >= 0;
        g.strokeStyle = late ? colours.straggler : colours.visit;
        g.beginPath();
        g.moveTo(x(v.admitted[k]), line);
        g.lineTo(x(uploaded), line);
        g.stroke();
        if (x(uploaded) - x(v.admitted[k]) > 46 && rowHeight >= 24) { g.fillStyle = g.strokeStyle; g.fillText(String(v.device[k]), x(v.admitted[k]) + 2, line + 10); }
      }
    }
    function mixes(g, t, x, y, rowHeight, colours, a, b, servers) {
      const m = t.mixes, wide = x(b) - x(a);
      const near = m.time.reduce((count, time) => count + (time >= a && time <= b ? 1 : 0), 0);
      const room = wide / Math.max(1, near);
      for (let k = 0; k < m.time.length; k += 1) {
        const time = m.time[k];
        if (time < a || time > b) continue;
        const members = m.servers[k], mine = m.round[k] === chosen;
        if (room < NARROW && !mine) continue;
        g.strokeStyle = g.fillStyle = colours.mix;
        g.globalAlpha = mine ? 1 : Math.min(1, Math.max(0.25, room / 14));
        g.lineWidth = mine ? 3 : 1;
        g.beginPath();
        g.moveTo(x(time), y(Math.min(...members)) + rowHeight / 2);
        g.lineTo(x(time), y(Math.max(...members)) + rowHeight / 2);
        g.stroke();
        if (room > 14 || mine) for (const server of members) { g.beginPath(); g.arc(x(time), y(server) + rowHeight / 2, Math.min(4, rowHeight / 3), 0, 7); g.fill(); }
        g.globalAlpha = 1;
      }
    }
    function axis(g, x, a, b, width, height, servers, rowHeight, colours) {
      g.fillStyle = colours.soft;
      g.textAlign = "right";
      const every = Math.max(1, Math.ceil(14 / rowHeight));
      for (let n = 0; n < servers; n += every) g.fillText(n === 0 ? "server 0" : String(n), LEFT - 5, 4 + n * rowHeight + rowHeight / 2 + 4);
      g.textAlign = "center";
      for (const v of ticks(a, b, Math.max(2, (width - LEFT) / 90))) {
        g.fillText(String(v), x(v), height - 7);
        g.fillRect(x(v), height - BOTTOM, 1, 5);
      }
      g.textAlign = "left";
    }
    function show(round) {
      const t = run() && run().timeline;
      if (!t) return;
      const m = t.mixes, k = m.round.indexOf(Math.max(m.round[0] ?? 0, Math.min(round, m.round[m.round.length - 1] ?? 0)));
      if (k < 0) return;
      chosen = m.round[k];
      jump.value = chosen;
      const length = Math.max((k > 0 ? m.time[k] - m.time[k - 1] : m.time[k] - t.begin), 1e-6);
      const [begin, end] = whole();
      const span = range ? Math.min(range[1] - range[0], 30 * length) : 8 * length;
      range = [Math.max(begin, m.time[k] - 0.7 * span), Math.min(end, m.time[k] + 0.3 * span)];
      words.textContent = tell(t, k);
      settle();
    }
    function tell(t, k) {
      const p = t.phases, members = [];
      p.round.forEach((round, place) => { if (round === t.mixes.round[k]) members.push(place); });
      const before = k > 0 ? t.mixes.time[k - 1] : t.begin, time = t.mixes.time[k];
      const all = t.mixes.servers[k];
      let text = `Round ${t.mixes.round[k]}, clock ${short(before)} to ${short(time)}: ${all.length === t.servers ? `all ${all.length} servers` : `servers ${[...all].sort((p_, q) => p_ - q).join(", ")} of ${t.servers}`} were mixed.`;
      if (!members.length) return text;
      const late = members.reduce((best, place) => (p.ended[place] > p.ended[best] ? place : best));
      const arrival = Math.max(0, p.last_admitted[late] - p.opened[late]), work = p.ended[late] - Math.max(p.last_admitted[late], p.opened[late]);
      text += ` Server ${p.server[late]} was ready last: its device ${p.last_device[late]} came ${short(arrival)} after the phase opened and worked for ${short(work)}.`;
      const waits = members.filter((place) => place !== late).map((place) => time - p.ended[place]);
      if (waits.length) text += ` The others waited ${short(waits.reduce((p_, q) => p_ + q, 0))} in all, ${short(Math.max(...waits))} at most.`;
      return text;
    }
    canvas.addEventListener("keydown", (event) => {
      const first = run() && run().timeline && run().timeline.mixes.round[0];
      const actions = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), Home: () => { range = null; settle(); }, n: () => show(chosen === null ? first : chosen + 1), p: () => show(chosen === null ? first : chosen - 1) };
      if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
    });
    canvas.addEventListener("wheel", (event) => {
      if (document.activeElement !== canvas && !event.ctrlKey) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect(), [a, b] = view();
      zoom(event.deltaY > 0 ? 1.3 : 1 / 1.3, a + (b - a) * (event.clientX - box.left - LEFT) / (box.width - LEFT - 6));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { last = event.clientX; hover = event.clientX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (last === null) return;
      const [a, b] = view();
      move((last - event.clientX) / (canvas.clientWidth - LEFT - 6) * (b - a) / (b - a));
      last = event.clientX;
    });
    canvas.addEventListener("pointerup", (event) => {
      if (last !== null && Math.abs(event.clientX - hover) < 4) choose(event);
      last = null;
    });
    canvas.addEventListener("pointercancel", () => { last = null; });
    function choose(event) {  // the mix nearest to a click
      const t = source(), box = canvas.getBoundingClientRect(), [a, b] = view();
      const time = a + (b - a) * (event.clientX - box.left - LEFT) / (box.width - LEFT - 6);
      if (!t.mixes.time.length) return;
      let best = 0;
      t.mixes.time.forEach((other, k) => { if (Math.abs(other - time) < Math.abs(t.mixes.time[best] - time)) best = k; });
      chosen = t.mixes.round[best];
      jump.value = chosen;
      words.textContent = tell(t, best);
      draw();
    }
    new ResizeObserver(draw).observe(canvas);
    function update() {
      const runs = app.view.runs.filter((one) => one.timeline);
      pick.set(runs.map((one) => [one.key, named(app, one)]));
      canvas.hidden = !runs.length;
      if (!runs.length) { words.textContent = "No phase has been recorded yet."; rows.replaceChildren(); return; }
      const one = run();
      if (chosen === null) words.textContent = one.timeline.overview ? `${one.timeline.total_phases} phases; of those before the latest ${one.timeline.phases.server.length} only shares of time are kept.` : "";
      const lengths = one.rounds;
      const now = JSON.stringify([one.key, lengths]);
      if (app.source.timeline && range) settle();
      if (rows.dataset.key === now) { draw(); return; }
      rows.dataset.key = now;
      rows.replaceChildren(...(lengths ? [table(`Rounds of ${one.name}: mean ${short(lengths.mean)}, median ${short(lengths.median)}, 95 in 100 below ${short(lengths.high)}. The longest:`, ["round", "length", "waited for server", "and its device", "which came after", "and worked for"], lengths.longest.map((r) => [h("button", { type: "button", onclick: () => { show(r.round); canvas.focus(); } }, String(r.round)), short(r.length), r.server, r.device, short(r.arrival), short(r.work)]))] : []));
      draw();
    }
    const self = { redraw: draw };
    charts.add(self);
    return { id: "protocol", title: "Protocol", el, update, range: view };
  };

  sections.time = (app) => {
    const el = section("time", "Where the time went", "Server time by cause: until the last device was let in, until that device’s upload, until the coordinator’s mix, until the next phase.");
    const CAUSES = [["arrival", "waiting for devices to come"], ["work", "devices at work"], ["waiting", "waiting for other servers"], ["aggregation", "aggregation"]];
    const pick = choice("servers of", [], () => update()), place = h("div");
    el.append(h("ul", { class: "legend" }, CAUSES.map(([name, text]) => swatch(`var(--${name})`, text))), place);
    const below = h("div");
    el.append(h("div", { class: "controls" }, pick.el), below);
    function bars(rows, label) {  // rows: [name, {cause: value}]
      const width = 720, tall = 22, left = 170;
      const svg = s("svg", { class: "bars", viewBox: `0 0 ${width} ${rows.length * tall + 4}`, role: "img", "aria-label": label });
      rows.forEach(([name, parts], k) => {
        const total = CAUSES.reduce((sum, [cause]) => sum + parts[cause], 0) || 1;
        let x = left;
        svg.append(s("text", { x: left - 8, y: k * tall + 15, "text-anchor": "end" }, name.length > 24 ? `${name.slice(0, 23)}…` : name));
        for (const [cause, text] of CAUSES) {
          const wide = (width - left - 4) * parts[cause] / total;
          const rect = s("rect", { x, y: k * tall + 2, width: Math.max(0, wide), height: tall - 5 }, s("title", {}, `${name}: ${text} ${percent(parts[cause] / total)}`));
          rect.style.fill = `var(--${cause})`;
          svg.append(rect);
          x += wide;
        }
      });
      return svg;
    }
    function update() {
      const runs = app.view.runs.filter((run) => run.spent);
      pick.set(runs.map((run) => [run.key, named(app, run)]));
      pick.el.hidden = !runs.length;
      if (!runs.length) { place.replaceChildren(h("p", { class: "muted" }, "No phase has been recorded yet.")); below.replaceChildren(); return; }
      const shares = runs.map((run) => [run.name, run.spent.share]);
      place.replaceChildren(bars(shares, "Share of server time by cause, per run"), table("Share of server time", ["run", ...CAUSES.map(([, text]) => text)], shares.map(([name, share]) => [name, ...CAUSES.map(([cause]) => percent(share[cause]))])));
      const run = runs.find((one) => one.key === pick.select.value) || runs[0], per = run.spent.per_server;
      const order = per.waiting.map((_, n) => n);
      const shown = order.length > 30 ? order.sort((a, b) => per.waiting[b] - per.waiting[a]).slice(0, 30).sort((a, b) => a - b) : order;
      const parts = [h("h3", {}, `Servers of ${run.name}${shown.length < per.waiting.length ? `: the ${shown.length} that waited longest` : ""}`), bars(shown.map((n) => [`server ${n}`, Object.fromEntries(CAUSES.map(([cause]) => [cause, per[cause][n]]))]), "Share of time by cause, per server")];
      const stale = run.staleness;
      if (stale && stale.missed.some((k) => k > 0)) parts.push(table("Mixes that a server had missed when it was mixed", ["missed", ...stale.missed.slice(0, 20).map(String)], [["times", ...stale.count.slice(0, 20)]]));
      const activity = run.devices && run.devices.activations;
      if (activity && activity.times.length) {
        const many = activity.times.reduce((sum, times, k) => sum + times * activity.devices[k], 0), all = activity.devices.reduce((a, b) => a + b, 0);
        parts.push(h("p", {}, `Uploads per device: ${activity.times.length === 1 ? "" : `from ${activity.times[0]} to `}${activity.times[activity.times.length - 1]}, mean ${short(many / all)}${run.devices.never ? `; ${run.devices.never} of ${all} devices have not uploaded` : ""}.`));
      }
      const events = Object.entries(run.events || {});
      if (events.length) parts.push(h("p", {}, `Also recorded: ${events.map(([name, count]) => `${count} ${name}`).join(", ")}.`));
      below.replaceChildren(...parts);
    }
    return { id: "time", title: "Time", el, update };
  };

  sections.partition = (app) => {
    const el = section("partition", "Who owns what", "Samples of each label (rows) on each device (columns, in order of servers); darker is more.");
    const pick = choice("run", [], () => update()), canvas = h("canvas", { role: "img" }), words = h("p"), rows = h("div");
    el.append(h("div", { class: "controls" }, pick.el), canvas, words, rows);
    canvas.style.width = "100%";
    function update() {
      const runs = app.view.runs.filter((run) => run.partition);
      pick.set(runs.map((run) => [run.key, named(app, run)]));
      canvas.hidden = true;
      if (!runs.length) { words.textContent = "The split was not recorded (yet)."; return; }
      const part = (runs.find((run) => run.key === pick.select.value) || runs[0]).partition;
      const z = part.sizes;
      words.textContent = `${part.devices} devices with ${z.least === z.most ? z.least : `${z.least} to ${z.most} (median ${z.median})`} samples each, ${z.all} in all` + (part.labels ? `; ${part.per_device.least === part.per_device.most ? part.per_device.least : `${part.per_device.least} to ${part.per_device.most}`} of ${part.labels.length} labels each.${part.unowned.length ? ` Nobody owns ${part.unowned.length === 1 ? "label" : "labels"} ${part.unowned.join(", ")}.` : ""}` : ". The targets are not labels.") + (part.shown.length < part.devices ? ` Every ${Math.round(part.devices / part.shown.length)}th device is drawn.` : "");
      rows.replaceChildren();
      if (!part.labels) return;
      canvas.hidden = false;
      canvas.setAttribute("aria-label", `Samples per label: ${part.labels.map((label, k) => `${label}: ${part.per_label[k]}`).join(", ")}`);
      paint(part);
      rows.replaceChildren(table("Samples of each label, over all devices", ["label", ...part.labels.map(String)], [["samples", ...part.per_label]]));
    }
    function paint(part) {
      const width = Math.max(canvas.clientWidth, 300), tall = Math.max(3, Math.min(18, 360 / part.labels.length)), left = 34, ratio = window.devicePixelRatio || 1;
      const height = tall * part.labels.length + 20;
      canvas.style.height = `${height}px`;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      const g = canvas.getContext("2d"), wide = (width - left) / part.shown.length;
      g.setTransform(ratio, 0, 0, ratio, 0, 0);
      const most = Math.max(1, ...part.counts.map((row) => Math.max(...row)));
      const ink = css("--run-0");
      part.counts.forEach((row, device) => row.forEach((count, label) => {
        g.globalAlpha = count ? 0.15 + 0.85 * count / most : 0.04;
        g.fillStyle = ink;
        g.fillRect(left + device * wide, label * tall, Math.max(0.8, wide - 0.6), tall - 1);
      }));
      g.globalAlpha = 1;
      g.fillStyle = css("--soft");
      g.font = "11px system-ui, sans-serif";
      const every = Math.ceil(12 / tall);
      part.labels.forEach((label, k) => { if (k % every === 0) g.fillText(String(label), 8, k * tall + tall / 2 + 4); });
      part.servers.forEach((server, device) => {
        if (device > 0 && part.servers[device - 1] !== server) g.fillRect(left + device * wide - 0.8, 0, 1, height - 18);
        if ((device === 0 || part.servers[device - 1] !== server) && (wide * part.servers.filter((n) => n === server).length > 22)) g.fillText(device === 0 ? `server ${server}` : String(server), left + device * wide + 2, height - 5);
      });
    }
    charts.add({ redraw: update });
    return { id: "partition", title: "Partition", el, uses: (run) => run.partition, update };
  };

  sections.plan = (app) => {
    const el = section("plan", "Planner: how many servers to wait for", "Expected time between two mixes on the Async-cloud for each B, from this run’s own phases (the planner’s simulation of consecutive rounds, with 95 % bars).");
    const pick = choice("from the arrivals of", [], () => { touched = false; update(); });
    const slider = h("input", { type: "range", min: "1", max: "1", value: "1", "aria-label": "B, servers to wait for", oninput: () => { touched = true; refresh(); } });
    const output = h("output", {}), words = h("p", { "aria-live": "polite" }), none = h("p", { class: "muted" });
    let touched = false;
    const run = () => app.view.runs.find((one) => one.key === pick.select.value && one.plan) || app.view.runs.find((one) => one.plan);
    const place = () => { const p = run().plan; return Math.min(Number(slider.value) - 1, p.first.length - 1); };
    const times = lineChart("Time between two mixes", () => {
      const one = run(), base = { x: "B, servers to wait for", formatX: (v) => (Number.isInteger(v) ? String(v) : ""), formatY: short };
      if (!one) return { ...base, curves: [] };
      const p = one.plan, k = place();
      return { ...base, curves: [
        { name: "expected round time", number: 0, xs: p.first, ys: p.round_time, low: p.round_time.map((v, j) => v - (p.error[j] || 0)), high: p.round_time.map((v, j) => v + (p.error[j] || 0)) },
        { name: `B = ${p.first[k]}`, number: 1, size: 12, xs: [p.first[k]], ys: [p.round_time[k]] }] };
    });
    const ahead = lineChart("Rounds by clock time", () => {
      const one = run(), base = { x: "clock", formatX: short, formatY: short };
      if (!one) return { ...base, curves: [] };
      const p = one.plan, k = place(), end = one.summary.clock || 1, m = one.timeline.mixes, step = Math.max(1, Math.floor(m.time.length / 300));
      const xs = [0], ys = [m.round.length ? m.round[0] : 0];
      m.time.forEach((time, j) => { if ((j % step === 0 || j === m.time.length - 1) && time > xs[xs.length - 1]) { xs.push(time); ys.push(m.round[j] + 1); } });
      if (m.round[0] > 0) { xs.shift(); ys.shift(); }
      const line = Array.from({ length: 21 }, (_, j) => end * j / 20);
      return { ...base, curves: [{ name: "recorded", number: 6, xs, ys }, { name: `expected with B = ${p.first[k]}`, number: 1, dash: [8, 4], xs: line, ys: line.map((v) => v / p.round_time[k]) }] };
    });
    const body = h("div", {}, h("div", { class: "controls" }, pick.el, h("label", {}, "B", slider, output)), words,
      h("ul", { class: "legend" }, swatch(colour(0), "expected, every B"), swatch(colour(1), "expected with the chosen B"), swatch(colour(6), "recorded")), h("div", { class: "grid" }, times.el, ahead.el));
    el.append(none, body);
    function refresh() {
      const p = run().plan, k = place();
      output.textContent = `${p.first[k]} of ${p.servers}`;
      slider.setAttribute("aria-valuetext", `${p.first[k]} of ${p.servers} servers`);
      words.textContent = `With B = ${p.first[k]}: a round every ${short(p.round_time[k])}${isNumber(p.error[k]) ? ` (± ${short(p.error[k])})` : ""}, ${percent(p.round_time[k] / p.round_time[p.round_time.length - 1])} of the time of waiting for all; ${short(p.updates[k])} server steps per unit of the clock; ${p.first[k] < p.servers ? `a server that is left out waits ${short(p.staleness[k])} mixes on average, 95 in 100 at most ${short(p.staleness_high[k])}` : "none is left out"}. Servers that start together would take ${short(p.fresh[k])} (eq. 7).`;
      times.update();
      ahead.update();
    }
    function update() {
      const runs = app.view.runs.filter((one) => one.plan);
      body.hidden = !runs.length;
      none.hidden = runs.length > 0;
      none.textContent = app.isLive() ? "No plan yet: it needs ten finished phases and two servers." : "No plan in this page: it needs ten finished phases and two servers, and the command fedbcd report, which takes the time to make one.";
      if (!runs.length) return;
      pick.set(runs.map((one) => [one.key, named(app, one)]));
      const p = run().plan;
      slider.max = String(p.first.length);
      if (!touched) {
        const first = Number(Object.fromEntries(run().settings)["cloud.first"] || Math.max(1, Math.round(0.3 * p.servers)));
        slider.value = String(Math.max(1, p.first.findIndex((b) => b >= first) + 1));
      }
      refresh();
    }
    return { id: "plan", title: "Planner", el, update };
  };

  sections.cluster = (app) => {
    const el = section("cluster", "Actors of the cluster", "Each actor’s part of the devices, its expected share of the work, and how long it was busy. A round waits for the slowest, so one whose share of the busy time is well above its expected share holds up the others.");
    const place = h("div");
    el.append(place);
    return { id: "cluster", title: "Cluster", el, uses: (run) => run.cluster, update: () => {
      const runs = app.view.runs.filter((run) => run.cluster);
      el.hidden = !runs.length;
      place.replaceChildren(...runs.flatMap((run) => {
        const { shards, bytes: moved, rebuilt } = run.cluster, all = shards.reduce((sum, shard) => sum + shard.seconds, 0) || 1;
        const slow = Math.max(...shards.map((shard) => shard.seconds)) / (all / shards.length);
        const rows = shards.map((shard, k) => [`actor ${k}`, shard.node, shard.devices, percent(shard.expected_share), percent(shard.seconds / all), short(shard.seconds)]);
        return [table(`${run.name}: who did how much`, ["actor", "node", "devices", "expected share", "share of busy time", "busy seconds"], rows, [0, 1]),
          h("p", {}, `The busiest actor worked ${short(slow)} times as long as the mean. Moved by the driver: ${bytes(moved.models)} of models and ${bytes(moved.work)} of work out, ${bytes(moved.sums)} of sums in, ${bytes(moved.rows)} of other rows. Actors brought back: ${rebuilt}.`)];
      }));
    } };
  };

  sections.settings = (app) => {
    const el = section("settings", "What was run", "Settings in which the runs differ, then every setting, seed, version and machine.");
    const place = h("div");
    el.append(place);
    const open = new Set();
    return { id: "settings", title: "Settings", el, uses: (run) => [run.settings, run.environment, run.summary.digest], update: () => {
      const parts = [], runs = app.view.runs, wrap = (text) => h("span", {}, text === null || text === undefined ? "–" : text);
      if (runs.length > 1) parts.push(app.view.differences.length ? table("Differences", ["setting", ...runs.map((run) => run.name)], app.view.differences.map((row) => [row.key, ...row.values.map(wrap)]), [0, ...runs.map((_, k) => k + 1)]) : h("p", {}, "These runs have the same settings."));
      for (const run of runs) {
        const machine = Object.entries(run.environment), id = run.key;
        const details = h("details", { open: open.has(id) || runs.length === 1, ontoggle: () => (details.open ? open.add(id) : open.delete(id)) }, h("summary", {}, `${run.name}: all settings`),
          h("p", { class: "muted" }, `Folder ${run.folder}. ${run.summary.values ? `${run.summary.values} numbers in a model, ` : ""}${run.summary.devices} devices, ${run.summary.servers} servers.`, run.summary.digest ? ` Digest ${run.summary.digest}.` : ""),
          table("Settings", ["setting", "value"], run.settings, [0, 1]), machine.length ? table("Versions and machine", ["what", "value"], machine, [0, 1]) : h("p", { class: "muted" }, "Versions and machine were not recorded."));
        parts.push(details);
      }
      place.replaceChildren(...parts);
    } };
  };

  // ------------------------------------------------------------------------------------------------------------------- the page
  function themeButton(redraw) {
    const names = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
    const button = h("button", { type: "button" });
    const set = (name) => {
      if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
      button.textContent = names[name];
      button.dataset.name = name;
      redraw();
    };
    button.addEventListener("click", () => { const order = Object.keys(names); set(order[(order.indexOf(button.dataset.name) + 1) % 3]); });
    set("auto");
    return button;
  }
  const ORDER = ["summary", "next", "curves", "devices", "distances", "certificates", "protocol", "time", "partition", "cluster", "plan", "settings"];
  const TESTED = ["curves", "devices", "distances", "certificates", "partition"];  // a deployment seen from outside says nothing about these
  // Puts the views into `root`. `source.timeline(run, begin, end)`, where given, fetches details of a stretch of the timeline.
  // `more` are further sections: [the id before which it stands, a function that makes it].
  function mount(root, view, source = {}, more = []) {
    const app = { view, axis: "clock", source, isLive: () => view.kind !== "report" };
    const redraw = () => charts.forEach((chart) => chart.redraw());
    const parts = ORDER.flatMap((name) => [...more.filter(([place]) => place === name).map(([, make]) => make(app)), sections[name](app)]);
    const title = h("h1", {}), under = h("p", {}), notices = h("div", { role: "status" });
    root.replaceChildren(
      h("header", { class: "top" }, h("div", {}, title, under), themeButton(redraw)),
      h("nav", { class: "sections", "aria-label": "Sections" }, h("ul", {}, parts.map((part) => (part.link = h("li", {}, h("a", { href: `#${part.id}` }, part.title)))))),
      h("main", { id: "main", tabindex: "-1" }, notices, parts.map((part) => part.el)),
      h("footer", {}, "Made by fedbcd, from event logs, histories and model heads alone. Charts by uPlot (MIT)."));
    const known = new Map();  // a section that says what it uses is drawn again only when that has changed
    app.refresh = (ids) => parts.forEach((part) => {
      if (ids && !ids.includes(part.id)) return;
      const now = part.uses ? JSON.stringify([app.view.runs.map((run) => [run.key, run.name, part.uses(run)])]) : null;
      if (now !== null && known.get(part.id) === now) return;
      known.set(part.id, now);
      if (TESTED.includes(part.id)) part.el.hidden = app.view.runs.length > 0 && app.view.runs.every((run) => run.key === "deployment");
      part.update();
      part.link.hidden = part.el.hidden;
    });
    app.show = (next) => {
      app.view = next;
      title.textContent = next.title || "No run";
      under.textContent = `${next.kind === "report" ? "Report" : "Dashboard"} · ${next.runs.length} ${next.runs.length === 1 ? "run" : "runs"}`;
      document.title = `${next.title || "No run"} · fedbcd`;
      const texts = [...(next.notices || []), ...next.runs.flatMap((run) => run.notices.map((text) => `${run.name}: ${text}`))];
      const key = texts.join("\n");
      if (notices.dataset.key !== key) { notices.dataset.key = key; notices.replaceChildren(...texts.map((text) => h("p", { class: "notice" }, text))); }
      app.refresh();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    let theme;
    addEventListener("beforeprint", () => { theme = document.documentElement.dataset.theme; document.documentElement.dataset.theme = "light"; charts.forEach((chart) => chart.redraw()); });
    addEventListener("afterprint", () => { if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme; redraw(); });
    app.show(view);
    return app;
  }
  return { mount, h, table, section, choice, short, score, percent, bytes, lineChart };
})();
if (document.getElementById("data")) window.app = fedbcd.mount(document.getElementById("page"), JSON.parse(document.getElementById("data").textContent));
