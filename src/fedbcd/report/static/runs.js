// Runs and their seeds: what they are called, how they look, and their curves.
"use strict";
(() => {
  const { h, isNumber, short, bytes, clock, score, count, key } = fedbcd;
  const PLAIN = { light: "#3c4046", dark: "#cccfd4", mark: "circle", dash: [] };
  const UNITS = { virtual: "clock (virtual time)", seconds: "time since the start" };

  function several(runs) {  // one seed twice is no second seed
    const seeds = new Set(runs.map((run) => run.seed)).size;
    return seeds === runs.length ? `${seeds} seeds` : `${runs.length} runs of ${seeds === 1 ? "one seed" : `${seeds} seeds`}`;
  }
  function groupsOf(view) {
    const groups = new Map();
    for (const run of view.runs) {
      if (!groups.has(run.group)) groups.set(run.group, { id: run.group, runs: [], look: (view.looks || {})[run.key] || PLAIN });
      groups.get(run.group).runs.push(run);
    }
    const found = [...groups.values()];
    for (const group of found) {
      const names = [...new Set(group.runs.map((run) => run.name))];
      group.name = group.runs.length > 1 ? `${names[0]} (${several(group.runs)})` : names[0];
    }
    const names = found.map((group) => group.name);
    for (const group of found) if (names.filter((name) => name === group.name).length > 1) group.name = `${group.name} [${group.runs[0].differs || group.runs[0].folder}]`;
    return found;
  }
  const lookOf = (app, run) => groupsOf(app.view).find((group) => group.runs.includes(run)).look;
  function named(app, run) {
    const others = app.view.runs.filter((other) => other !== run && other.name === run.name);
    if (others.some((other) => other.seed === run.seed)) return `${run.name}, seed ${run.seed} [${run.differs || run.folder}]`;
    return others.length ? `${run.name}, seed ${run.seed}` : run.name;
  }

  // ---------------------------------------------------------------------------------------------------------------------- axes
  // Seconds and virtual time are never on one axis: with runs of both kinds there is no axis of time.
  const timesOf = (app) => [...new Set(app.view.runs.map((run) => run.summary.time || "virtual"))];
  function axesOf(app) {
    const kinds = timesOf(app), axes = { round: ["rounds", count], bytes: ["models sent, in bytes", bytes] };
    return kinds.length === 1 ? { clock: [UNITS[kinds[0]], clock({ time: kinds[0] })], ...axes } : axes;
  }
  const axisOf = (app) => { const axes = axesOf(app); return axes[app.axis] ? app.axis : "round"; };
  function pairs(run, x, column, positive, beyond = -Infinity) {
    const xs = [], ys = [];
    run.history[x].forEach((value, k) => {
      const y = (run.history[column] || [])[k];
      if (isNumber(value) && isNumber(y) && value > beyond && (!positive || y > 0) && (xs.length === 0 || value > xs[xs.length - 1])) { xs.push(value); ys.push(y); }
    });
    return [xs, ys];
  }
  function band(group, x, column, positive, beyond) {  // mean, least and most over the seeds, where all of them have been
    const curves = group.runs.map((run) => pairs(run, x, column, positive, beyond)).filter(([xs]) => xs.length > 0);
    if (curves.length === 0) return [[], [], [], []];
    if (curves.length === 1) return [curves[0][0], curves[0][1], curves[0][1], curves[0][1]];
    const low = Math.max(...curves.map(([xs]) => xs[0])), high = Math.min(...curves.map(([xs]) => xs[xs.length - 1]));
    const grid = [...new Set(curves.flatMap(([xs]) => xs))].filter((v) => v >= low && v <= high).sort((a, b) => a - b);
    const values = grid.map((v) => curves.map(([xs, ys]) => fedbcd.at(xs, ys, v)));
    return [grid, values.map((v) => v.reduce((a, b) => a + b) / v.length), values.map((v) => Math.min(...v)), values.map((v) => Math.max(...v))];
  }
  // Of a column of the history, one line for each group; `options`: height, log, unit, format.
  function historyChart(app, title, column, options = {}) {
    const wanted = () => (typeof column === "function" ? column() : column);
    return fedbcd.lineChart(title, () => {
      const name = axisOf(app), [x, formatX] = axesOf(app)[name], unit = options.unit || (app.units || {})[wanted()], format = options.format || score(unit);
      const curves = groupsOf(app.view).filter((group) => !app.hidden.has(group.id)).map((group) => {
        const [xs, ys, low, high] = band(group, name, wanted(), options.log, app.logX ? 0 : undefined);
        return { name: group.name, look: group.look, xs, ys, ...(group.runs.length > 1 ? { low, high } : {}) };
      }).filter((curve) => curve.xs.length);
      const none = app.hidden.size && !curves.length ? "no run is shown" : app.view.runs.every((run) => run.summary.state === "finished") ? "not measured" : "no data yet";
      const full = unit === "share" && !app.fit && curves.every((c) => c.ys.every((v) => v >= 0 && v <= 1));
      return { x, formatX, formatY: format, formatTick: unit === "share" ? fedbcd.percent : format, log: options.log, logX: app.logX, range: full ? [0, 1] : null, curves, none };
    }, { height: options.height, sync: "history" });
  }
  // Which runs are drawn: a click takes one away, or brings it back.
  function legend(app) {
    const list = h("ul", { class: "legend picks" });
    let before = "";
    return { el: list, update: () => {
      const groups = groupsOf(app.view), now = JSON.stringify([groups.map((g) => [g.id, g.name, g.look]), [...app.hidden]]);
      if (now === before) return;
      before = now;
      list.hidden = groups.length < 2;
      list.replaceChildren(...groups.map((group) => h("li", {}, h("button", { type: "button", class: "pick", "aria-pressed": String(!app.hidden.has(group.id)), onclick: (event) => {
        if (app.hidden.has(group.id)) app.hidden.delete(group.id); else app.hidden.add(group.id);
        app.refreshCharts();
        const again = list.children[groups.indexOf(group)];
        if (event.detail === 0 && again) again.firstChild.focus();
      } }, key(group.look), group.name))));
    } };
  }
  fedbcd.drawings.add({ redraw: () => document.querySelectorAll("svg.key").forEach((one) => one.paint && one.paint()) });
  // The axis of all charts of histories, logarithmic or not, and whether shares are drawn on 0 to 100 %.
  function axisControls(app) {
    const select = fedbcd.choice("against", [], () => { app.axis = select.select.value; app.refreshCharts(); });
    const box = (text, name) => h("label", {}, h("input", { type: "checkbox", checked: app[name], onchange: (event) => { app[name] = event.target.checked; app.refreshCharts(); } }), text);
    const el = h("div", { class: "controls" }, select.el, box("log axis", "logX"), box("fit height", "fit"));
    return { el, update: () => {
      select.set(Object.entries(axesOf(app)).map(([name, [label]]) => [name, label]));
      select.select.value = axisOf(app);
    } };
  }
  function measuresOf(app) {  // of all runs, each once
    const found = [...new Map(app.view.runs.flatMap((run) => run.measures).map((m) => [m.name, m])).values()];
    app.units = Object.fromEntries(found.flatMap((m) => ["global", "personal", "worst"].map((kind) => [m[kind], m.unit])));
    return found;
  }
  Object.assign(fedbcd, { several, groupsOf, lookOf, named, axesOf, axisOf, historyChart, legend, axisControls, measuresOf });
})();
