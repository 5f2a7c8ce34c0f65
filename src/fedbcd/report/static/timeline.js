// The timeline of the protocol: what each server did when, and who was mixed with whom. It opens on the longest round; the strip above it shows all of the run.
"use strict";
(() => {
  const { h, s, css, drawings, isNumber, count, clock, ticks, table, choice, button, swatch, tooltip } = fedbcd;
  const LEFT = 62, RIGHT = 8, BOTTOM = 26, NARROW = 3, STRIP = 40, BINS = 300;
  const NAMES = ["update", "visit", "straggler", "waiting", "mix", "soft", "line", "ink", "card", "accent", "on-visit", "on-straggler"];
  const KEYS = [["update", "response and update"], ["visit", "a device at work"], ["straggler", "the device that its round waited for"], ["waiting", "waiting for other servers"], ["mix", "who is mixed with whom"]];

  // When a phase ended, was mixed and was followed by the next; what has not happened yet happens at the end of what is known.
  function times(t, k) {
    const p = t.phases, ended = p.ended[k] < 0 ? t.end : p.ended[k], released = p.released[k] < 0 ? t.end : p.released[k];
    return [p.opened[k], ended, p.mixed[k] < 0 ? released : Math.max(ended, p.mixed[k]), released];
  }
  // Of the stretches that are known as shares only: each server's, bin by bin.
  function unknown(t, each) {
    const o = t.overview;
    if (!o) return;
    const step = (o.end - o.begin) / (o.collecting[0] || []).length;
    o.collecting.forEach((row, server) => row.forEach((share, k) => {
      let from = o.begin + k * step;
      const to = from + step;
      for (const [a, b] of [...t.known, [Infinity, Infinity]]) {
        if (b <= from) continue;
        if (Math.min(a, to) > from) each(server, from, Math.min(a, to), [share / 100, o.waiting[server][k] / 100]);
        from = Math.max(from, b);
        if (from >= to) break;
      }
    }));
  }
  // How much of each bin of [a, b] went into update, waiting and mixing; of each server that is asked for.
  function spentIn(t, a, b, bins, servers) {
    const spent = new Map([...servers].map((server) => [server, [0, 1, 2].map(() => new Float64Array(bins))]));
    const place = (time) => (Math.min(Math.max(time, a), b) - a) / (b - a) * bins;
    const spread = (server, cause, begin, end, share) => {
      const bin = spent.get(server)[cause], from = place(begin), to = place(end);
      for (let n = Math.floor(from); n < to && n < bins; n += 1) bin[n] += share * (Math.min(to, n + 1) - Math.max(from, n));
    };
    unknown(t, (server, from, to, both) => { if (spent.has(server)) both.forEach((share, cause) => spread(server, cause, from, to, share)); });
    t.phases.server.forEach((server, k) => {
      if (!spent.has(server)) return;
      const moments = times(t, k);
      for (const [from, to] of t.known) for (const cause of [0, 1, 2]) spread(server, cause, Math.max(from, moments[cause]), Math.max(from, Math.min(to, moments[cause + 1])), 1);
    });
    return spent;
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
  function stack(g, left, wide, top, tall, parts) {  // shares of a stretch of time, one above the other
    let base = top + tall;
    for (const [share, colour] of parts) {
      if (!(share > 0)) continue;
      g.fillStyle = colour;
      g.fillRect(left, base - tall * share, wide, tall * share);
      base -= tall * share;
    }
  }
  function prepared(canvas, height) {
    const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1, g = canvas.getContext("2d");
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = css("--card");
    g.fillRect(0, 0, width, height);
    g.font = "11px system-ui, sans-serif";
    return [g, width, Object.fromEntries(NAMES.map((name) => [name, css(`--${name}`)]))];
  }

  // Draws a stretch of time onto a canvas: one row for each server.
  function paintTimeline(canvas, t, [a, b], chosen, format) {
    const servers = Math.max(1, t.servers), row = Math.max(4, Math.min(44, Math.floor(480 / servers)));
    const height = servers * row + BOTTOM + 4, [g, width, colours] = prepared(canvas, height);
    const x = (time) => LEFT + (width - LEFT - RIGHT) * (time - a) / (b - a), y = (server) => 4 + server * row;
    const crowded = crowdedServers(t, x, a, b), view = { g, t, x, y, row, colours, a, b, crowded, chosen };
    g.save();
    g.beginPath();
    g.rect(LEFT, 0, width - LEFT - RIGHT, height);
    g.clip();
    const bare = overview(view);
    phases(view);
    shares(view, width);
    visits(view);
    mixes(view);
    g.restore();
    axis(view, width, height, servers, format);
    return { crowded, bare, row, servers };
  }
  function overview({ g, t, x, y, row, colours, a, b, crowded }) {  // stretches without phases of their own; whether there are any in view
    let some = false;
    unknown(t, (server, from, to, [update, waiting]) => {
      if (to < a || from > b) return;
      some = true;
      if (!crowded.has(server)) stack(g, x(from), x(to) - x(from) + 0.5, y(server) + 2, row - 4, [[update, colours.update], [waiting, colours.waiting]]);
    });
    return some;
  }
  function shares({ g, t, y, row, colours, a, b, crowded }, width) {  // bars of NARROW pixels, so that no phase hides another
    const bins = Math.ceil((width - LEFT - RIGHT) / NARROW);
    for (const [server, [update, waiting, mixing]] of spentIn(t, a, a + (b - a) * bins * NARROW / (width - LEFT - RIGHT), bins, crowded)) {
      for (let n = 0; n < bins; n += 1) stack(g, LEFT + n * NARROW, NARROW, y(server) + 1, row - 2, [[update[n], colours.update], [waiting[n], colours.waiting], [mixing[n], colours.mix]]);
    }
  }
  function phases({ g, t, x, y, row, colours, a, b, crowded }) {
    const p = t.phases;
    for (let k = 0; k < p.server.length; k += 1) {
      const [opened, ended, mixed, released] = times(t, k);
      if (released < a || opened > b || crowded.has(p.server[k])) continue;
      const top = y(p.server[k]) + 2, tall = row - 4;
      g.fillStyle = colours.update;
      g.fillRect(x(opened), top, x(ended) - x(opened), tall);
      if (released > ended) {
        g.fillStyle = colours.waiting;
        g.fillRect(x(ended), top + tall * 0.34, x(released) - x(ended), tall * 0.32);
      }
      if (x(released) - x(mixed) > 0.5) {
        g.fillStyle = colours.mix;
        g.fillRect(x(mixed), top, x(released) - x(mixed), tall);
      }
    }
  }
  function waitedFor(p) {  // of each round the phase that was ready last
    const last = new Map();
    p.round.forEach((round, k) => { if (round >= 0 && p.ended[k] >= 0 && !(last.has(round) && p.ended[last.get(round)] >= p.ended[k])) last.set(round, k); });
    return new Set(last.values());
  }
  function visits({ g, t, x, y, row, colours, a, b, crowded }) {  // each device of a phase in a lane of its own
    if (row < 10) return;
    const v = t.visits, p = t.phases, lanes = new Map(), seen = new Map(), waited = waitedFor(p);
    for (const phase of v.phase) lanes.set(phase, (lanes.get(phase) || 0) + 1);
    for (let k = 0; k < v.phase.length; k += 1) {
      const phase = v.phase[k], uploaded = v.uploaded[k] < 0 ? t.end : v.uploaded[k], place = seen.get(phase) || 0;
      seen.set(phase, place + 1);
      if (uploaded < a || v.admitted[k] > b || crowded.has(p.server[phase])) continue;
      const left = x(v.admitted[k]), wide = Math.max(1, x(uploaded) - left), lane = (row - 8) / Math.max(1, lanes.get(phase));
      const top = y(p.server[phase]) + 4 + place * lane, tall = Math.max(1.5, Math.min(16, lane - 1));
      const late = waited.has(phase) && p.last_device[phase] === v.device[k], text = String(v.device[k]);
      g.fillStyle = late ? colours.straggler : colours.visit;
      g.fillRect(left, top, wide, tall);
      const from = Math.max(left, LEFT);  // a number stands where all of it can be read, or nowhere
      if (tall >= 10 && left + wide - from > g.measureText(text).width + 6) { g.fillStyle = late ? colours["on-straggler"] : colours["on-visit"]; g.fillText(text, from + 3, top + tall / 2 + 4); }
    }
  }
  function mixes({ g, t, x, y, row, colours, a, b, chosen }) {
    const m = t.mixes, near = m.time.reduce((sum, time) => sum + (time >= a && time <= b ? 1 : 0), 0), room = (x(b) - x(a)) / Math.max(1, near);
    for (let k = 0; k < m.time.length; k += 1) {
      const time = m.time[k], members = m.servers[k], mine = m.round[k] === chosen;
      if (time < a || time > b || (room < NARROW && !mine)) continue;
      g.strokeStyle = g.fillStyle = colours.mix;
      g.globalAlpha = mine ? 1 : Math.min(1, Math.max(0.25, room / 14));
      g.lineWidth = mine ? 3 : 1.25;
      g.beginPath();
      g.moveTo(x(time), y(Math.min(...members)) + row / 2);
      g.lineTo(x(time), y(Math.max(...members)) + row / 2);
      g.stroke();
      if (room > 14 || mine) for (const server of members) { g.beginPath(); g.arc(x(time), y(server) + row / 2, Math.min(4.5, row / 3), 0, 7); g.fill(); }
      g.globalAlpha = 1;
    }
  }
  function axis({ g, x, row, colours, a, b }, width, height, servers, format) {
    g.fillStyle = colours.soft;
    g.textAlign = "right";
    const every = Math.max(1, Math.ceil(14 / row));
    for (let n = 0; n < servers; n += every) g.fillText(n === 0 ? "server 0" : String(n), LEFT - 7, 4 + n * row + row / 2 + 4);
    g.textAlign = "center";
    let last = -Infinity;
    for (const v of ticks(a, b, Math.max(2, (width - LEFT) / 110))) {
      const text = format(v), half = g.measureText(text).width / 2;
      if (x(v) - half < last + 8 || x(v) - half < LEFT - 20 || x(v) + half > width) continue;
      g.fillText(text, x(v), height - 7);
      g.fillRect(x(v), height - BOTTOM + 1, 1, 5);
      last = x(v) + half;
    }
    g.textAlign = "left";
  }
  function paintStrip(canvas, t, [begin, end], [a, b]) {
    const [g, width, colours] = prepared(canvas, STRIP), servers = Array.from({ length: t.servers }, (_, n) => n), bins = Math.min(BINS, Math.max(1, Math.floor((width - LEFT - RIGHT) / 2)));
    const total = [0, 1, 2].map(() => new Float64Array(bins));
    for (const parts of spentIn(t, begin, end, bins, servers).values()) parts.forEach((bin, cause) => bin.forEach((share, k) => { total[cause][k] += share / servers.length; }));
    const wide = (width - LEFT - RIGHT) / bins, x = (time) => LEFT + (width - LEFT - RIGHT) * (time - begin) / (end - begin);
    for (let k = 0; k < bins; k += 1) stack(g, LEFT + k * wide, wide + 0.4, 4, STRIP - 8, [[total[0][k], colours.update], [total[1][k], colours.waiting], [total[2][k], colours.mix]]);
    g.fillStyle = colours.soft;
    g.textAlign = "right";
    g.fillText("all", LEFT - 7, STRIP / 2 + 4);
    g.textAlign = "left";
    g.fillStyle = colours.card;
    g.globalAlpha = 0.62;
    g.fillRect(LEFT, 0, x(a) - LEFT, STRIP);
    g.fillRect(x(b), 0, width - RIGHT - x(b), STRIP);
    g.globalAlpha = 1;
    g.strokeStyle = colours.accent;
    g.lineWidth = 2;
    g.strokeRect(x(a), 1, Math.max(3, x(b) - x(a)), STRIP - 2);
  }
  // A round in words: who was ready last, and why.
  function tell(t, k, format) {
    const p = t.phases, members = [];
    p.round.forEach((round, place) => { if (round === t.mixes.round[k]) members.push(place); });
    const before = k > 0 && t.mixes.round[k - 1] === t.mixes.round[k] - 1 ? t.mixes.time[k - 1] : Math.min(t.mixes.time[k], ...members.map((place) => p.opened[place])), time = t.mixes.time[k], all = t.mixes.servers[k];
    let text = `Round ${t.mixes.round[k]}, clock ${format(before)} to ${format(time)}: ${all.length === t.servers ? `all ${all.length} servers` : `servers ${[...all].sort((p_, q) => p_ - q).join(", ")} of ${t.servers}`} were mixed.`;
    if (!members.length) return text;
    const late = members.reduce((best, place) => (p.ended[place] > p.ended[best] ? place : best));
    if (p.last_device[late] >= 0) {
      const arrival = Math.max(0, p.last_admitted[late] - p.opened[late]), work = p.ended[late] - Math.max(p.last_admitted[late], p.opened[late]);
      text += ` Server ${p.server[late]} was ready last: its device ${p.last_device[late]} came ${format(arrival)} after the phase opened and worked for ${format(work)}.`;
    } else text += ` Server ${p.server[late]} was ready last.`;
    const waits = members.filter((place) => place !== late).map((place) => time - p.ended[place]);
    if (waits.length) text += ` The others waited ${format(waits.reduce((p_, q) => p_ + q, 0))} in all, ${format(Math.max(...waits))} at most.`;
    return text;
  }
  function pointed(t, server, time, format) {  // what a server did at a moment, for the tooltip
    const p = t.phases;
    for (let k = p.server.length - 1; k >= 0; k -= 1) {
      const [opened, ended, mixed, released] = times(t, k);
      if (p.server[k] !== server || time < opened || time > released) continue;
      const came = t.visits.phase.map((phase, j) => (phase === k ? t.visits.device[j] : null)).filter(isNumber);
      const lines = [h("b", {}, `server ${server}${p.round[k] >= 0 ? `, round ${p.round[k]}` : ""}`), h("div", {}, `response and update ${format(ended - opened)}${p.ended[k] < 0 ? " so far" : ""}`)];
      if (came.length) lines.push(h("div", {}, `devices ${came.slice(0, 12).join(", ")}${came.length > 12 ? " ..." : ""}`));
      if (p.last_device[k] >= 0 && p.ended[k] >= 0) lines.push(h("div", {}, `the last was device ${p.last_device[k]}`));
      if (mixed > ended) lines.push(h("div", {}, `waited ${format(mixed - ended)} for others`));
      return lines;
    }
    return null;
  }

  fedbcd.sections.protocol = (app) => {
    const el = fedbcd.section("protocol", "Timeline", "Each server’s response-and-update phases, its waiting, and the mixes of the coordinator, as in the paper’s Figure 2. It opens on the longest round.");
    const canvas = h("canvas", { class: "timeline", tabindex: "0", role: "img" }), strip = h("canvas", { class: "strip", role: "img", "aria-label": "All of the run; drag to choose a stretch of it" });
    const words = h("p", { class: "told", "aria-live": "polite" }), note = h("p", { class: "muted" }), rows = h("div"), tip = tooltip();
    const pick = choice("run", [], () => { range = undefined; chosen = null; data = null; update(); });
    const jump = h("input", { type: "number", min: "0", onchange: () => show(Number(jump.value)) });
    const controls = h("div", { class: "controls" }, pick.el, h("label", {}, "round", jump), button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)), button("◀", "Earlier", () => move(-0.5)), button("▶", "Later", () => move(0.5)),
      button("Longest", "Longest round", () => longest()), button("All", "All: show everything", () => { range = null; settle(); }));
    const drawn = h("div", { class: "drawn" }, strip, canvas, tip.el);
    el.append(controls, h("ul", { class: "legend quiet" }, KEYS.map(([name, text]) => swatch(`var(--${name})`, text))), drawn, note, words,
      h("p", { class: "muted hint" }, "Drag to move, or a stretch of the strip to show it; click a mix for its story. With the keyboard: + and − zoom, arrows move, n and p step through rounds, Home shows all."), rows);
    let range, chosen = null, data = null, frame = 0, timer = 0, drag = null, shown = null;  // range: undefined before it was set, null for all
    const usual = () => app.view.runs.filter((one) => one.timeline).sort((p, q) => Number(q.summary.cloud !== "sync" && q.summary.cloud !== "") - Number(p.summary.cloud !== "sync" && p.summary.cloud !== ""))[0];
    const run = () => app.view.runs.find((one) => one.key === pick.select.value && one.timeline) || usual();
    const format = (v) => clock(run().summary)(v);
    const whole = () => { const t = run().timeline; return [t.overview ? t.overview.begin : t.begin, Math.max(t.end, t.begin + 1e-9)]; };
    const view = () => range || whole();
    const source = () => (range && data ? data : run().timeline);
    const timeAt = (px, [a, b]) => a + (b - a) * (px - LEFT) / (canvas.clientWidth - LEFT - RIGHT);

    function zoom(factor, centre) {
      const [a, b] = view(), c = centre === undefined ? (a + b) / 2 : centre, [begin, end] = whole();
      const low = Math.max(begin, c - (c - a) * factor), high = Math.min(end, c + (b - c) * factor);
      range = high - low >= (end - begin) * 0.999 ? null : [low, Math.max(high, low + (end - begin) * 1e-6)];
      settle();
    }
    function move(share) {
      const [a, b] = view(), [begin, end] = whole(), by = Math.min(Math.max((b - a) * share, begin - a), end - b);
      if (by !== 0) { range = [a + by, b + by]; settle(); }
    }
    function settle() {  // draw what is there, and in the dashboard ask for the details of this stretch
      draw();
      if (!app.source.timeline || !run()) return;
      clearTimeout(timer);
      timer = setTimeout(async () => {
        const [a, b] = view(), key = run().key, found = range ? await app.source.timeline(key, a, b) : null;
        if (run() && run().key === key) { data = found; draw(); }
      }, 120);
    }
    function draw() { cancelAnimationFrame(frame); frame = requestAnimationFrame(paint); }
    function paint() {
      const one = run();
      if (!one || !one.timeline || !canvas.clientWidth) return;
      const t = source(), [a, b] = view();
      shown = paintTimeline(canvas, t, [a, b], chosen, format);
      paintStrip(strip, one.timeline, whole(), [a, b]);
      const { crowded, bare, servers } = shown, whose = crowded.size === servers ? "all servers" : crowded.size === 1 ? "one server" : `${crowded.size} servers`;
      note.hidden = !crowded.size && !bare;
      note.textContent = crowded.size ? `Phases of ${whose} are too short to be drawn one by one here: their rows are filled by shares of time. Zoom in to see them.` : bare ? `Some of what is in view is known as shares of time only${app.source.timeline ? "" : ": one by one this page keeps the longest rounds and the last ones"}.` : "";
      canvas.setAttribute("aria-label", `Timeline of ${one.name}, clock ${format(a)} to ${format(b)}: ${t.servers} servers, ${t.mixes.round.length} mixes in view or near. Step through rounds with n and p; the text below describes the chosen round.`);
    }
    function near(round) {  // of a round whose details are fetched: about when it was
      const { time, done } = run().rounds.pace, at = fedbcd.at(done, time, round + 1), half = 4 * run().rounds.mean, [begin, end] = whole();
      range = [Math.max(begin, at - half), Math.min(end, at + half)];
      words.textContent = `Around round ${count(round)}: click a mix for its story.`;
      settle();
    }
    function show(round) {
      const t = run() && run().timeline;
      if (!t || !t.mixes.round.length) return;
      if (app.source.timeline && run().rounds && !t.mixes.round.includes(round) && round >= 0 && round < run().rounds.rounds) { near(round); return; }
      const m = t.mixes, [first, last] = [m.round[0], m.round[m.round.length - 1]], wanted = Math.max(first, Math.min(round, last));
      const k = m.round.findIndex((one) => one >= wanted);
      chosen = m.round[k];
      jump.value = chosen;
      const length = Math.max(k > 0 && m.round[k - 1] === chosen - 1 ? m.time[k] - m.time[k - 1] : run().rounds ? run().rounds.mean : m.time[k] - t.begin, 1e-6);
      const [begin, end] = whole(), span = Math.min(range ? range[1] - range[0] : Infinity, end - begin, 8 * length), from = Math.max(begin, Math.min(end - span, m.time[k] - 0.75 * span));
      range = [from, from + span];
      words.textContent = (chosen === round ? "" : `Of round ${round} this page keeps shares of time only; the next one kept: `) + tell(t, k, format);
      settle();
    }
    function longest() {
      const lengths = run() && run().rounds;
      if (!lengths || !lengths.longest.length) { range = null; return settle(); }
      const one = lengths.longest[0], [begin, end] = whole(), span = Math.min(end - begin, Math.max(1.6 * one.length, 8 * lengths.mean));
      const place = run().timeline.mixes.round.indexOf(one.round), time = place < 0 ? end : run().timeline.mixes.time[place];
      show(one.round);
      const from = Math.max(begin, Math.min(end - span, time - one.length - 0.3 * (span - one.length)));
      range = [from, from + span];
      return settle();
    }
    const step = (by) => { const m = run().timeline.mixes.round, k = m.indexOf(chosen); show(k < 0 ? m[0] : m[Math.max(0, Math.min(m.length - 1, k + by))]); };
    canvas.addEventListener("keydown", (event) => {
      const actions = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), Home: () => { range = null; settle(); }, n: () => step(1), p: () => step(-1) };
      if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
    });
    canvas.addEventListener("wheel", (event) => {
      if (document.activeElement !== canvas && !event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.3 : 1 / 1.3, timeAt(event.clientX - canvas.getBoundingClientRect().left, view()));
    }, { passive: false });
    function dragging(target, onmove, onend) {
      target.addEventListener("pointerdown", (event) => { drag = { from: event.clientX, last: event.clientX }; target.setPointerCapture(event.pointerId); });
      target.addEventListener("pointermove", (event) => { if (drag) { onmove(event); drag.last = event.clientX; } });
      target.addEventListener("pointerup", (event) => { if (drag) onend(event); drag = null; });
      target.addEventListener("pointercancel", () => { drag = null; });
    }
    dragging(canvas, (event) => move((drag.last - event.clientX) / (canvas.clientWidth - LEFT - RIGHT)), (event) => { if (Math.abs(event.clientX - drag.from) < 4) choose(event); });
    dragging(strip, (event) => brush(event), (event) => { if (Math.abs(event.clientX - drag.from) < 4) centre(event); });
    const onStrip = (px) => { const [begin, end] = whole(); return Math.max(begin, Math.min(end, timeAt(px - strip.getBoundingClientRect().left, [begin, end]))); };
    function brush(event) {
      const [a, b] = [onStrip(drag.from), onStrip(event.clientX)].sort((p, q) => p - q);
      if (b > a) { range = [a, b]; settle(); }
    }
    function centre(event) {
      const [a, b] = view(), [begin, end] = whole(), from = Math.max(begin, Math.min(end - (b - a), onStrip(event.clientX) - (b - a) / 2));
      range = [from, from + (b - a)];
      settle();
    }
    function choose(event) {  // the mix nearest to a click
      const t = source(), time = timeAt(event.clientX - canvas.getBoundingClientRect().left, view());
      if (!t.mixes.time.length) return;
      let best = 0;
      t.mixes.time.forEach((other, k) => { if (Math.abs(other - time) < Math.abs(t.mixes.time[best] - time)) best = k; });
      chosen = t.mixes.round[best];
      jump.value = chosen;
      words.textContent = tell(t, best, format);
      draw();
    }
    canvas.addEventListener("pointermove", (event) => {
      if (drag || !shown || !run()) return tip.hide();
      const box = canvas.getBoundingClientRect(), server = Math.floor((event.clientY - box.top - 4) / shown.row);
      const lines = shown.crowded.has(server) ? null : pointed(source(), server, timeAt(event.clientX - box.left, view()), format);
      return lines ? tip.show(event.clientX - box.left, canvas.clientWidth, lines) : tip.hide();
    });
    canvas.addEventListener("pointerleave", tip.hide);
    new ResizeObserver(draw).observe(canvas);
    function update() {
      const runs = app.view.runs.filter((one) => one.timeline), first = usual();
      pick.set([first, ...runs.filter((one) => one !== first)].filter(Boolean).map((one) => [one.key, fedbcd.named(app, one)]));
      drawn.hidden = controls.hidden = !runs.length;
      if (!runs.length) { words.textContent = "No phase has been recorded yet."; rows.replaceChildren(); return; }
      const one = run(), lengths = one.rounds, now = JSON.stringify([one.key, lengths]);
      if (range === undefined) longest();
      else if (app.source.timeline && range) settle();
      if (rows.dataset.key === now) { draw(); return; }
      rows.dataset.key = now;
      rows.replaceChildren(...(lengths ? [table(`Rounds of ${one.name}: mean ${format(lengths.mean)}, median ${format(lengths.median)}, 95 in 100 below ${format(lengths.high)}. The longest:`, ["round", "length", "waited for server", "and its device", "which came after", "and worked for"], lengths.longest.map((r) => [h("button", { type: "button", class: "small", "aria-label": `Show round ${r.round}`, onclick: () => { show(r.round); canvas.focus(); } }, count(r.round)), format(r.length), r.server, r.device, format(r.arrival), format(r.work)]), [0], "cards")] : []));
      draw();
    }
    drawings.add({ redraw: draw });
    return { id: "protocol", title: "Timeline", el, update, range: view };
  };
})();
