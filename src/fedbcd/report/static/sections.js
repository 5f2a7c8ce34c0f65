// The sections of a page: first what it came to, then why, then everything.
"use strict";
(() => {
  const { h, s, css, ink, drawings, isNumber, count, short, percent, score, change, bytes, seconds, clock, table, choice, swatch, copyButton, key } = fedbcd;
  const { groupsOf, lookOf, named, historyChart, legend, axisControls, measuresOf, histogram } = fedbcd;
  const KINDS = [["personal", "Personal"], ["global", "Global"], ["worst", "Worst tenth"]];
  const sections = fedbcd.sections;
  const duration = (v) => (isNumber(v) ? seconds(v) : "–");
  const stateOf = (run) => ({ finished: "finished", stopped: "stopped", failed: "failed", silent: "no answer" }[run.summary.state] || "goes on");

  // ------------------------------------------------------------------------------------------------------------------ first screen
  // What it came to: a sentence, four numbers, one chart, each device, and what to do next.
  sections.first = (app) => {
    const el = h("section", { id: "first", class: "first", "aria-label": "What it came to" });
    const cards = h("div"), tiles = h("div", { class: "tiles" }), keys = legend(app), controls = axisControls(app), next = h("div");
    const kind = choice("show", [], () => main.update());
    const main = historyChart(app, () => `${kind.select.selectedOptions[0] ? kind.select.selectedOptions[0].textContent : "Scores"}`, () => kind.select.value, { height: 290 });
    const devices = h("div", { class: "devices" }), charts = h("div", { class: "pair" }, h("div", {}, main.el, controls.el), devices);
    controls.el.prepend(kind.el);
    el.append(cards, tiles, keys.el, charts, next);
    let drawn = null;
    function ofDevices(first) {
      const run = app.view.runs.find((one) => one.key === first.devices && one.personal && one.personal.pairs);
      devices.hidden = !run;
      charts.classList.toggle("single", !run);
      const now = run ? JSON.stringify([run.key, run.name, run.personal.pairs]) : "";
      if (devices.dataset.key === now) return;
      devices.dataset.key = now;
      if (drawn) drawn.forget();
      if (!run) return devices.replaceChildren();
      const { pairs, gain, own } = run.personal, unit = run.summary.unit, better = run.measures.length ? run.measures[0].better : "higher";
      const other = pairs.other && gain ? gain.against || "its server’s global model" : null;
      drawn = fedbcd.dumbbells(own ? `Each device of ${run.name}` : `Each device, with ${run.name}`, { ...pairs, other: other ? pairs.other : null }, lookOf(app, run), { format: score(unit), better, range: unit === "share" ? [0, 1] : null, names: [own ? "its own model" : "the one model for all", other], fits: () => app.fit });
      return devices.replaceChildren(drawn.el);
    }
    function tile(one) {
      return h("div", { class: `tile ${one.tone || ""}` }, h("span", { class: "label" }, one.label), h("strong", {}, one.value), one.change ? h("span", { class: `change ${one.tone || ""} ${one.change.startsWith("−") ? "fewer" : "more"}` }, one.change) : null, one.note ? h("span", { class: "note" }, one.note) : null);
    }
    function step(one) {
      return h("li", {}, h("p", {}, one.words), one.command ? h("div", { class: "command" }, h("code", { tabindex: "0" }, one.command), copyButton("Copy", `Copy: ${one.command}`, () => one.command)) : null);
    }
    const update = () => {
      const first = app.view.first;
      el.hidden = !first;
      if (!first) return;
      cards.replaceChildren(...first.cards.map((card) => fedbcd.card(card.words, card.command)));
      tiles.replaceChildren(...first.tiles.map(tile));
      tiles.hidden = !first.tiles.length;
      const [measure] = measuresOf(app), drawable = Boolean(measure) && first.compares && app.view.runs.some((run) => Object.values(run.history).some((column) => column.length > 1));
      kind.set(measure ? KINDS.map(([name, text]) => [measure[name], `${text} ${measure.name}`]) : []);
      keys.update();
      controls.update();
      charts.hidden = !drawable;
      if (!drawable) keys.el.hidden = true;
      if (drawable) main.update();
      ofDevices(first);
      next.replaceChildren(...(first.next.length ? [h("h2", {}, "Next"), h("ol", { class: "next" }, first.next.map(step))] : []));
    };
    return { id: "first", title: "Result", el, charts: () => { keys.update(); if (!charts.hidden) main.update(); if (drawn) drawn.redraw(); }, update };
  };

  // -------------------------------------------------------------------------------------------------------------------------- runs
  sections.summary = (app) => {
    const el = fedbcd.section("summary", "Scores of the runs", "Where each run ended, by its first measure, on test data; a device’s personal model is tested on its own test samples, or on the labels it owns. “Worst tenth” is the mean over the worst tenth of the devices.");
    const place = h("div"), goals = h("div"), goal = h("input", { type: "number", step: "any", oninput: () => reach() });
    const which = choice("score", [], () => { goal.value = ""; reach(); });
    el.append(place, h("details", {}, h("summary", {}, "Time to a score"), h("div", { class: "controls" }, which.el, h("label", {}, "goal", goal)), goals));
    function state(run) {
      const r = run.summary;
      if (r.state === "finished") return "finished";
      const bar = h("i");
      bar.style.width = `${100 * (r.fraction || 0)}%`;
      return h("span", { class: "state" }, `${stateOf(run)}${r.fraction === null ? "" : `, ${Math.floor(100 * r.fraction)} %`}`, h("span", { class: "bar", "aria-hidden": "true" }, bar));
    }
    function reach() {
      const columns = measuresOf(app).flatMap((m) => KINDS.map(([kind, title]) => [m[kind], `${title} ${m.name}`, m]));
      which.set(columns.map(([column, text]) => [column, text]));
      const column = which.select.value, measure = (columns.find(([name]) => name === column) || [])[2] || {}, lower = measure.better === "lower";
      const values = (run) => (run.history[column] || []), sign = lower ? -1 : 1, factor = measure.unit === "share" ? 100 : 1, format = score(measure.unit);
      const best = app.view.runs.map((run) => values(run).reduce((most, v) => (isNumber(v) ? Math.max(most, sign * v) : most), -Infinity));
      const usual = sign * Math.min(...best.filter(Number.isFinite));
      goal.placeholder = Number.isFinite(usual) ? String(Number((factor * usual).toPrecision(4))) : "";
      const wanted = goal.value === "" ? usual : Number(goal.value) / factor;
      if (!Number.isFinite(wanted)) { goals.replaceChildren(h("p", { class: "muted" }, "No run has been tested.")); return; }
      const rows = app.view.runs.map((run) => {
        const k = values(run).findIndex((v) => isNumber(v) && sign * v >= sign * wanted - 1e-12), reached = k >= 0;
        return [named(app, run), run.seed, reached ? clock(run.summary)(run.history.clock[k]) : "not reached", reached ? run.history.round[k] : null, reached ? bytes(run.history.bytes[k]) : null];
      });
      goals.replaceChildren(table(`First test with ${format(wanted)} or ${lower ? "less" : "more"}${goal.value === "" ? ", which every run reaches" : ""}`, ["run", "seed", "clock", "rounds", "models sent"], rows, [0], "cards"));
    }
    return { id: "summary", title: "Scores", el, update: () => {
      measuresOf(app);
      const rows = app.view.runs.map((run) => {
        const r = run.summary, format = score(r.unit);
        return [h("span", { class: "named" }, key(lookOf(app, run)), named(app, run)), format(r.personal), format(r.worst), format(r.global), state(run), r.rounds, clock(r)(r.clock), r.values ? bytes(r.bytes) : null, duration(r.seconds), String(run.seed)];
      });
      place.replaceChildren(table("Where runs ended", ["run", "personal", "worst tenth", "global", "state", "rounds", "clock", "models sent", "took", "seed"], rows, [0, 4], "cards"), h("p", { class: "muted" }, measured(app.view.runs)));
      reach();
    } };
  };
  // How test samples are weighted in personal scores, and whether it is the same in all runs.
  function measured(runs) {
    const words = { "own-shares": "each label counts by its share of the device's own samples", "own-tests": "each device on test samples of its own", "pooled-labels": "all test samples of a device's labels count alike" };
    const [one, ...others] = Object.keys(words).map((measure) => [words[measure], runs.filter((run) => run.summary.measure === measure).map((run) => run.name)]).filter(([, names]) => names.length);
    if (!one) return "";
    return others.length ? `Personal scores of these runs do not compare: ${[one, ...others].map(([text, names]) => `in ${names.join(", ")} ${text}`).join("; ")}.` : `In personal scores ${one[0]}.`;
  }

  sections.next = (app) => {
    const el = fedbcd.section("next", "All remarks", "Drawn from the numbers of each run; each names the figure it rests on.", !app.isLive());
    const place = h("div");
    el.body.append(place);
    return { id: "next", title: "Remarks", el, uses: (run) => run.advice, update: () => place.replaceChildren(...app.view.runs.flatMap((run) => [
      app.view.runs.length > 1 ? h("h3", {}, named(app, run)) : null, h("ul", { class: "advice" }, (run.advice || []).map((text) => h("li", {}, text)))]).filter(Boolean)) };
  };

  // ------------------------------------------------------------------------------------------------------------------------ curves
  sections.curves = (app) => {
    const el = fedbcd.section("curves", "Curves", "Personal: each device’s own model on its own test samples, the mean over devices. Worst tenth: of these, the worst. Global: the servers’ models on the common test samples. Drag over a chart to zoom in, double-click to zoom out; arrow keys read values; a click on a name takes its line away.");
    const keys = legend(app), controls = axisControls(app), place = h("div", { class: "grid" }), more = h("div", { class: "grid" }), others = h("details", { class: "fold" }, h("summary", {}, "Other measures"), more), drawn = new Map();
    el.append(controls.el, keys.el, place, others);
    others.addEventListener("toggle", () => charts());
    function charts() {  // a chart for each column, as soon as a run has it
      measuresOf(app).forEach((m, k) => KINDS.forEach(([kind, title]) => {
        if (drawn.has(m[kind])) return;
        const chart = historyChart(app, `${title} ${m.name}`, m[kind]);
        drawn.set(m[kind], [chart, k > 0]);
        (k > 0 ? more : place).append(chart.el);
      }));
      others.hidden = !more.children.length;
      keys.update();
      for (const [chart, folded] of drawn.values()) if (!folded || others.open) chart.update();
    }
    return { id: "curves", title: "Curves", el, charts, update: () => { controls.update(); charts(); } };
  };

  // ----------------------------------------------------------------------------------------------------------------------- devices
  const summed = (histograms) => histograms[0].counts.map((_, k) => histograms.reduce((total, one) => total + one.counts[k], 0));
  sections.devices = (app) => {
    const el = fedbcd.section("devices", "Who gains", "How personal scores are spread over the devices, and who gains or loses by a model of their own, tested on the same samples.");
    const place = h("div"), opened = new Set(), OWN = "its own global models";
    let shown = [];
    el.append(place);
    function row(unit, better) {
      return (d) => {
        const differs = isNumber(d.against) && isNumber(d.personal), by = differs ? d.personal - d.against : 0;
        return [String(d.device), d.server === null ? null : String(d.server), d.labels ? d.labels.join(", ") : "–", score(unit)(d.personal), score(unit)(d.against), differs ? h("span", { class: (better === "lower" ? -by : by) >= 0 ? "better" : "worse" }, change(unit, by)) : "–"];
      };
    }
    const head = (gain) => ["device", "server", "labels", "own model", gain && gain.against ? gain.against : "global model", "difference"];
    function reference(tested, compared) {  // what gains are measured against, in a sentence for each kind of it
      const one = tested.flatMap((group) => group.runs).filter((run) => !run.personal.own).map((run) => named(app, run));
      const runs = compared.flatMap((group) => group.runs), best = [...new Set(runs.map((run) => run.personal.gain.against).filter(Boolean))];
      const own = runs.filter((run) => !run.personal.gain.against).map((run) => named(app, run));
      return [best.length ? `Gain is against ${best.join(", ")}: the best run of this job without personal models.` : "",
        one.length ? `${one.join(", ")} ${one.length === 1 ? "has" : "have"} no personal models: the one model for all is tested on what each device owns.` : "",
        own.length ? `${best.length ? `Gain of ${own.join(", ")} is` : "Gain is"} against the global models of the run itself: no finished run of FedAvg or FedProx on the same data and seed is here to compare with.` : ""].filter(Boolean).join(" ");
    }
    function details(run) {
      const gain = run.personal.gain, unit = run.summary.unit, rows = row(unit, (run.measures[0] || {}).better), own = run.personal.own;
      const found = h("details", { open: opened.has(run.key), ontoggle: () => (found.open ? opened.add(run.key) : opened.delete(run.key)) }, h("summary", {}, own ? `Devices of ${named(app, run)}: worst, and those that lose or gain most` : `Devices of ${named(app, run)}: the worst`),
        table(own ? "Worst personal scores" : "Worst scores", head(gain), run.personal.worst.map(rows), [0, 2], "cards"),
        gain && gain.losers.length ? table(`Would do better with ${gain.against || "the global model"}`, head(gain), gain.losers.map(rows), [0, 2], "cards") : null,
        gain && gain.winners.length ? table("Gain most from a model of their own", head(gain), gain.winners.map(rows), [0, 2], "cards") : null);
      return found;
    }
    function update() {
      shown.forEach((one) => one.forget());
      shown = [];
      const groups = groupsOf(app.view).filter((group) => group.runs.some((run) => run.personal));
      if (!groups.length) { place.replaceChildren(h("p", { class: "muted" }, "No device has been tested: the run has no test data with labels, or no checkpoint yet.")); return; }
      const tested = groups.map((group) => ({ ...group, runs: group.runs.filter((run) => run.personal) }));
      const compared = tested.map((group) => ({ ...group, runs: group.runs.filter((run) => run.personal.gain) })).filter((group) => group.runs.length);
      const { unit, metric } = tested[0].runs[0].summary, same = (list, of) => list.filter((g) => g.runs.every((r) => JSON.stringify(of(r).edges) === JSON.stringify(of(list[0].runs[0]).edges)));
      const ofScores = (r) => r.personal.histogram, ofGains = (r) => r.personal.gain.histogram, format = score(unit), signed = (v) => (unit === "share" ? `${change(unit, v).replace(/\.0$/, "")}` : change(unit, v));
      const sets = (list, of, name) => same(list, of).map((g) => ({ name: name(g), look: g.look, counts: summed(g.runs.map(of)) }));
      shown.push(histogram("Personal scores over devices", `test ${metric} on the device’s own samples`, ofScores(tested[0].runs[0]).edges, sets(tested, ofScores, (g) => (g.runs[0].personal.own ? g.name : `${g.name} (one model for all)`)), { format: unit === "share" ? percent : format }));
      if (compared.length) shown.push(histogram("Gain of a model of one’s own", unit === "share" ? "percentage points by which its own model is better" : "by how much its own model is better", ofGains(compared[0].runs[0]).edges, sets(compared, ofGains, (g) => g.name), { zero: true, format: signed }));
      const parts = [h("ul", { class: "legend quiet" }, groups.map((group) => h("li", {}, key(group.look), group.name))), h("div", { class: "grid" }, shown.map((one) => one.el)), h("p", {}, reference(tested, compared))];
      parts.push(table("Spread over devices", ["run", "devices", "mean", "worst tenth", "gain", "equal", "lose", "mean gain", "against"], tested.flatMap((g) => g.runs.map((r) => {
        const p = r.personal, gain = p.gain || {};
        return [named(app, r), p.devices, format(p.mean), format(p.worst_decile), gain.better, gain.same, gain.worse, p.gain ? change(unit, gain.mean) : null, p.gain ? gain.against || OWN : p.own ? null : "has no personal models"];
      })), [0, 8], "cards"));
      place.replaceChildren(...parts, ...tested.flatMap((group) => group.runs.map(details)));
    }
    return { id: "devices", title: "Who gains", el, uses: (run) => run.personal, update };
  };

  // ----------------------------------------------------------------------------------------------------- distances and certificates
  sections.distances = (app) => {
    const el = fedbcd.section("distances", "How far apart models are", "Mean over devices of ‖xᵢ − zₙ‖, which the penalty keeps small, and mean over servers of ‖z̄ − zₙ‖, which mixing keeps small (zero on the Sync-cloud).", true);
    const parts = [historyChart(app, "Personal from global: ‖xᵢ − zₙ‖", "distance", { format: short }), historyChart(app, "Servers from their mean: ‖z̄ − zₙ‖", "disagreement", { format: short })];
    el.body.append(h("div", { class: "grid" }, parts.map((part) => part.el)));
    const update = () => parts.forEach((part) => part.update());
    return { id: "distances", title: "Distances", el, charts: update, update };
  };
  sections.certificates = (app) => {
    const el = fedbcd.section("certificates", "Certificates of Theorem 1", "First-order gap of the personal models (mean over a sample of devices; where X is not bounded there is none, and this is the norm of the gradient mapping, without X that of the gradient), pull ‖Σ γᵢ(z̄ − xᵢ)‖², and the largest ‖z̄ − zₙ‖; all go to zero where the theory applies. Logarithmic scales.", true);
    const last = h("div"), parts = [["Gap", "gap"], ["Pull", "pull"], ["Spread", "spread"]].map(([title, column]) => historyChart(app, title, column, { log: true, format: short }));
    el.body.append(h("div", { class: "grid" }, parts.map((part) => part.el)), last);
    const charts = () => parts.forEach((part) => part.update());
    return { id: "certificates", title: "Certificates", el, charts, update: () => {
      charts();
      const taken = app.view.runs.filter((run) => !run.summary.certificates.none), without = app.view.runs.filter((run) => run.summary.certificates.none);
      const rows = taken.map((run) => { const c = run.summary.certificates; return [named(app, run), String(run.seed), c.round, short(c.gap), short(c.worst_gap), short(c.pull), short(c.spread)]; });
      last.replaceChildren(...(rows.length ? [table("The last that were taken", ["run", "seed", "after round", "gap", "worst gap", "pull", "spread"], rows, [0], "cards")] : []),
        ...without.map((run) => h("p", { class: "muted" }, `${named(app, run)} has no certificates: ${run.summary.certificates.none}.`)));
    } };
  };

  // -------------------------------------------------------------------------------------------------------------------------- time
  sections.time = (app) => {
    const el = fedbcd.section("time", "Where the time went", "Server time by cause: until the last device was let in, until that device’s upload, until the coordinator’s mix, until the next phase.");
    const CAUSES = [["arrival", "waiting for devices to come"], ["work", "devices at work"], ["waiting", "waiting for other servers"], ["aggregation", "aggregation"]];
    const pick = choice("servers of", [], () => update()), place = h("div"), below = h("div"), fold = h("details", {}, h("summary", {}, "Server by server"), pick.el, below);
    el.append(h("ul", { class: "legend quiet" }, CAUSES.map(([name, text]) => swatch(`var(--${name})`, text))), place, fold);
    let shown = [];
    const bars = (title, rows) => { const one = fedbcd.bars(title, CAUSES, rows, percent); shown.push(one); return one.el; };
    const sharesOf = (parts) => { const total = CAUSES.reduce((sum, [cause]) => sum + parts[cause], 0) || 1; return Object.fromEntries(CAUSES.map(([cause]) => [cause, parts[cause] / total])); };
    function update() {
      shown.forEach((one) => one.forget());
      shown = [];
      const runs = app.view.runs.filter((run) => run.spent);
      pick.set(runs.map((run) => [run.key, named(app, run)]));
      fold.hidden = !runs.length;
      if (!runs.length) { place.replaceChildren(h("p", { class: "muted" }, "No phase has been recorded yet.")); below.replaceChildren(); return; }
      place.replaceChildren(bars("Share of server time by cause", runs.map((run) => [named(app, run), sharesOf(run.spent.share)])));
      const run = runs.find((one) => one.key === pick.select.value) || runs[0], per = run.spent.per_server, order = per.waiting.map((_, n) => n);
      const listed = order.length > 30 ? order.sort((a, b) => per.waiting[b] - per.waiting[a]).slice(0, 30).sort((a, b) => a - b) : order;
      const parts = [bars(`Servers of ${named(app, run)}${listed.length < per.waiting.length ? `: the ${listed.length} that waited longest` : ""}`, listed.map((n) => [`server ${n}`, sharesOf(Object.fromEntries(CAUSES.map(([cause]) => [cause, per[cause][n]])))]))];
      const stale = run.staleness, activity = run.devices && run.devices.activations, events = Object.entries(run.events || {});
      if (stale && stale.missed.some((k) => k > 0)) parts.push(table("Mixes that a server had missed when it was mixed", ["missed", ...stale.missed.slice(0, 20).map(String)], [["times", ...stale.count.slice(0, 20)]]));
      if (activity && activity.times.length) {
        const many = activity.times.reduce((sum, times, k) => sum + times * activity.devices[k], 0), all = activity.devices.reduce((a, b) => a + b, 0);
        parts.push(h("p", {}, `Uploads per device: ${activity.times.length === 1 ? "" : `from ${count(activity.times[0])} to `}${count(activity.times[activity.times.length - 1])}, mean ${short(many / all)}${run.devices.never ? `; ${run.devices.never} of ${all} devices have not uploaded` : ""}.`));
      }
      if (events.length) parts.push(h("p", {}, `Also recorded: ${events.map(([name, times]) => `${count(times)} ${name}`).join(", ")}.`));
      below.replaceChildren(...parts);
    }
    return { id: "time", title: "Time", el, uses: (run) => [run.spent, run.staleness, run.devices, run.events], update };
  };

  // --------------------------------------------------------------------------------------------------------------------- partition
  sections.partition = (app) => {
    const el = fedbcd.section("partition", "Who owns what", "Samples of each label (rows) on each device (columns, in order of servers); darker is more.", true);
    const pick = choice("run", [], () => update()), canvas = h("canvas", { role: "img", class: "split" }), words = h("p"), rows = h("div");
    el.body.append(h("div", { class: "controls" }, pick.el), canvas, words, rows);
    const range = (z) => (z.least === z.most ? count(z.least) : `${count(z.least)} to ${count(z.most)}`);
    function update() {
      const runs = app.view.runs.filter((run) => run.partition);
      pick.set(runs.map((run) => [run.key, named(app, run)]));
      canvas.hidden = true;
      rows.replaceChildren();
      if (!runs.length) { words.textContent = "The split was not recorded (yet)."; return; }
      const part = (runs.find((run) => run.key === pick.select.value) || runs[0]).partition, z = part.sizes;
      words.textContent = [`${count(part.devices)} devices with ${range(z)} ${z.least === z.most ? "" : `(median ${short(z.median)}) `}samples each, ${count(z.all)} in all`,
        part.labels ? `; ${range(part.per_device)} of ${part.labels.length} labels each.` : ". The targets are not labels.",
        part.labels && part.unowned.length ? ` Nobody owns ${part.unowned.length === 1 ? "label" : "labels"} ${part.unowned.join(", ")}.` : "",
        part.shown.length < part.devices ? ` Every ${Math.round(part.devices / part.shown.length)}th device is drawn.` : ""].join("");
      if (!part.labels) return;
      canvas.hidden = false;
      canvas.setAttribute("aria-label", `Samples per label: ${part.labels.map((label, k) => `${label}: ${part.per_label[k]}`).join(", ")}`);
      paint(part);
      rows.replaceChildren(table("Samples of each label, over all devices", ["label", ...part.labels.map(String)], [["samples", ...part.per_label]]));
    }
    function paint(part) {
      const width = Math.max(canvas.clientWidth, 300), tall = Math.max(3, Math.min(18, 360 / part.labels.length)), left = 34, ratio = window.devicePixelRatio || 1, height = tall * part.labels.length + 20;
      canvas.style.height = `${height}px`;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      const g = canvas.getContext("2d"), wide = (width - left) / part.shown.length, most = part.counts.reduce((a, row) => Math.max(a, ...row), 1), every = Math.ceil(12 / tall);
      g.setTransform(ratio, 0, 0, ratio, 0, 0);
      g.fillStyle = css("--accent");
      part.counts.forEach((row, device) => row.forEach((many, label) => {
        g.globalAlpha = many ? 0.15 + 0.85 * many / most : 0.04;
        g.fillRect(left + device * wide, label * tall, Math.max(0.8, wide - 0.6), tall - 1);
      }));
      g.globalAlpha = 1;
      g.fillStyle = css("--soft");
      g.font = "11px system-ui, sans-serif";
      part.labels.forEach((label, k) => { if (k % every === 0) g.fillText(String(label), 8, k * tall + tall / 2 + 4); });
      let free = left;  // where the next server's name can stand without covering another
      part.servers.forEach((server, device) => {
        const at = left + device * wide, text = device === 0 ? `server ${server}` : String(server);
        if (device > 0 && part.servers[device - 1] === server) return;
        if (device > 0) g.fillRect(at - 0.8, 0, 1, height - 18);
        if (at >= free) { g.fillText(text, at + 2, height - 5); free = at + g.measureText(text).width + 8; }
      });
    }
    drawings.add({ redraw: () => { if (el.isOpen()) update(); } });
    return { id: "partition", title: "Partition", el, uses: (run) => run.partition, update };
  };

  // ----------------------------------------------------------------------------------------------------------------------- planner
  sections.plan = (app) => {
    const el = fedbcd.section("plan", "Planner: how many servers to wait for", "Expected time between two mixes on the Async-cloud for each B, the number of servers it waits for, from this run’s own phases (with 95 % bars).");
    const pick = choice("from the arrivals of", [], () => { touched = false; update(); });
    const slider = h("input", { type: "range", min: "1", max: "1", value: "1", "aria-label": "B, servers to wait for", oninput: () => { touched = true; refresh(); } });
    const output = h("output", {}), words = h("p", { "aria-live": "polite" }), none = h("p", { class: "muted" });
    let touched = false;
    const look = (light, dark, dash = []) => ({ light, dark, mark: "circle", dash }), EXPECTED = look("#0a3e80", "#b2d1f9"), CHOSEN = look("#d27409", "#fcc29c", [8, 4]), RECORDED = look("#5b6570", "#a4adb7");
    const run = () => app.view.runs.find((one) => one.key === pick.select.value && one.plan) || app.view.runs.find((one) => one.plan);
    const place = () => { const p = run().plan; return Math.min(Number(slider.value) - 1, p.first.length - 1); };
    const times = fedbcd.lineChart("Time between two mixes", () => {
      const one = run(), base = { x: "B, servers to wait for", formatX: (v) => (Number.isInteger(v) ? String(v) : ""), formatY: one ? clock(one.summary) : short };
      if (!one) return { ...base, curves: [] };
      const p = one.plan, k = place(), errors = p.round_time.map((_, j) => p.error[j] || 0);
      return { ...base, curves: [{ name: "expected", plain: true, look: EXPECTED, size: 5, xs: p.first, ys: p.round_time, low: p.round_time.map((v, j) => v - errors[j]), high: p.round_time.map((v, j) => v + errors[j]) }, { name: `B = ${p.first[k]}`, plain: true, look: CHOSEN, size: 12, xs: [p.first[k]], ys: [p.round_time[k]] }] };
    }, { height: 240 });
    const ahead = fedbcd.lineChart("Rounds by clock time", () => {
      const one = run(), base = { x: "clock", formatX: one ? clock(one.summary) : short, formatY: count };
      if (!one) return { ...base, curves: [] };
      const p = one.plan, k = place(), end = one.summary.clock || 1, { time, done } = one.rounds.pace, line = Array.from({ length: 21 }, (_, j) => end * j / 20);
      return { ...base, curves: [{ name: "recorded", look: RECORDED, xs: time, ys: done }, { name: `B = ${p.first[k]}`, look: CHOSEN, xs: line, ys: line.map((v) => Math.round(v / p.round_time[k])) }] };
    }, { height: 240 });
    const body = h("div", {}, h("div", { class: "controls" }, pick.el, h("label", {}, "B", slider, output)), words, h("div", { class: "grid" }, times.el, ahead.el));
    el.append(none, body);
    function refresh() {
      const p = run().plan, k = place(), format = clock(run().summary), last = p.round_time.length - 1;
      output.textContent = `${p.first[k]} of ${p.servers}`;
      slider.setAttribute("aria-valuetext", `${p.first[k]} of ${p.servers} servers`);
      const waits = p.first[k] < p.servers ? `a server that is left out waits ${short(p.staleness[k])} mixes on average, 95 in 100 at most ${short(p.staleness_high[k])}` : "none is left out";
      words.textContent = `With B = ${p.first[k]}: a round every ${format(p.round_time[k])}${isNumber(p.error[k]) ? ` (± ${format(p.error[k])})` : ""}, ${percent(p.round_time[k] / p.round_time[last])} of the time of waiting for all; ${short(p.updates[k])} server steps per ${run().summary.time === "seconds" ? "second" : "unit of the clock"}; ${waits}. Servers that start together would take ${format(p.fresh[k])} (eq. 7).`;
      times.update();
      ahead.update();
    }
    function update() {
      const runs = app.view.runs.filter((one) => one.plan);
      body.hidden = !runs.length;
      none.hidden = runs.length > 0;
      none.textContent = app.isLive() ? "No plan yet: it needs ten finished phases and two servers." : `No plan in this page: it needs ten finished phases and two servers, and fedbcd report ${app.view.runs.length ? app.view.runs[0].folder : "RUN"}, which takes the time to make one.`;
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

  // ------------------------------------------------------------------------------------------------------------ cluster and settings
  sections.cluster = (app) => {
    const el = fedbcd.section("cluster", "Actors of the cluster", "Each actor’s part of the devices, its expected share of the work, and how long it was busy. A round waits for the slowest, so one whose share of the busy time is well above its expected share holds up the others.", true);
    const place = h("div");
    el.body.append(place);
    return { id: "cluster", title: "Cluster", el, uses: (run) => run.cluster, update: () => {
      const runs = app.view.runs.filter((run) => run.cluster);
      el.hidden = !runs.length;
      place.replaceChildren(...runs.flatMap((run) => {
        const { shards, bytes: moved, rebuilt } = run.cluster, all = shards.reduce((sum, shard) => sum + shard.seconds, 0) || 1, slow = Math.max(...shards.map((shard) => shard.seconds)) / (all / shards.length);
        const rows = shards.map((shard, k) => [`actor ${k}`, shard.node, shard.devices, percent(shard.expected_share), percent(shard.seconds / all), seconds(shard.seconds)]);
        return [table(`${run.name}: who did how much`, ["actor", "node", "devices", "expected share", "share of busy time", "busy"], rows, [0, 1], "cards"),
          h("p", {}, `The busiest actor worked ${short(slow)} times as long as the mean. Moved by the driver: ${bytes(moved.models)} of models and ${bytes(moved.work)} of work out, ${bytes(moved.sums)} of sums in, ${bytes(moved.rows)} of other rows. Actors brought back: ${rebuilt}.`)];
      }));
    } };
  };
  sections.settings = (app) => {
    const el = fedbcd.section("settings", "What was run", "Settings in which the runs differ, then every setting, seed, version and machine.", true);
    const place = h("div"), open = new Set();
    el.body.append(place);
    const wrap = (text) => h("span", {}, text === null || text === undefined ? "–" : text);
    return { id: "settings", title: "Settings", el, uses: (run) => [run.settings, run.environment, run.summary.digest], update: () => {
      const parts = [], runs = app.view.runs;
      if (runs.length > 1) parts.push(app.view.differences.length ? table("Differences", ["setting", ...runs.map((run) => run.name)], app.view.differences.map((row) => [row.key, ...row.values.map(wrap)]), [0, ...runs.map((_, k) => k + 1)]) : h("p", {}, "These runs have the same settings."));
      for (const run of runs) {
        const machine = Object.entries(run.environment);
        const details = h("details", { open: open.has(run.key) || runs.length === 1, ontoggle: () => (details.open ? open.add(run.key) : open.delete(run.key)) }, h("summary", {}, `${named(app, run)}: all settings`),
          h("p", { class: "muted" }, `Folder ${run.folder}. ${run.summary.values ? `${count(run.summary.values)} numbers in a model, ` : ""}${count(run.summary.devices)} devices, ${count(run.summary.servers)} servers.`, run.summary.digest ? ` Digest ${run.summary.digest}.` : ""),
          table("Settings", ["setting", "value"], run.settings.map(([name, value]) => [name, wrap(value)]), [0, 1]), machine.length ? table("Versions and machine", ["what", "value"], machine, [0, 1]) : h("p", { class: "muted" }, "Versions and machine were not recorded."));
        parts.push(details);
      }
      place.replaceChildren(...parts);
    } };
  };
  fedbcd.stateOf = stateOf;
})();
