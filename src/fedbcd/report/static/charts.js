// Charts: lines by uPlot with labels at their ends, bars and devices as SVG; each with its data as a table, and to keep as PNG, SVG, CSV or Markdown.
"use strict";
(() => {
  const { h, s, css, ink, drawings, isNumber, ticks, table, asCsv, asMarkdown, copyButton, keep, keepText, button, MARKS } = fedbcd;
  const FONT = "12px system-ui, sans-serif", LABEL = 210, NARROW = 520;  // pixels: of the longest label at the end of a line, and of a chart too narrow for labels
  const ruler = document.createElement("canvas").getContext("2d");
  const widthOf = (text) => { ruler.font = FONT; return ruler.measureText(text).width; };
  const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const fileOf = (title) => title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "figure";

  // A figure has its title, what is drawn, and below it: its data as a table, and what can be kept of it.
  // `rows()` is [head, rows of texts]; `picture()` an SVG element that stands for itself, on white.
  function framed(title, place, rows, picture, note = null) {
    const details = h("details", { class: "data" }, h("summary", {}, "Data as a table"));
    const fillIn = () => {
      details.querySelectorAll(".scroll").forEach((old) => old.remove());
      if (details.open) { const [head, body] = rows(); details.append(table(title(), head, body.slice(0, 2000))); }
    };
    details.addEventListener("toggle", fillIn);
    const name = () => fileOf(title());
    const tools = h("details", { class: "tools" }, h("summary", { "aria-label": "Keep this figure" }, "Keep"), h("div", {},
      picture ? button("PNG", "Save as PNG", () => asPng(picture(), `${name()}.png`), "small") : null,
      picture ? button("SVG", "Save as SVG", () => keepText(`${name()}.svg`, "image/svg+xml", textOf(picture())), "small") : null,
      button("CSV", "Save the data as CSV", () => keepText(`${name()}.csv`, "text/csv", asCsv(...rows())), "small"),
      copyButton("Markdown", "Copy the data as Markdown", () => asMarkdown(...rows()))));
    const caption = h("span", {}, title());
    const el = h("figure", {}, h("figcaption", {}, caption, tools), place, note, details);
    return { el, refresh: () => { caption.textContent = title(); if (details.open) fillIn(); } };
  }
  const textOf = (svg) => new XMLSerializer().serializeToString(svg);
  function asPng(svg, name) {
    const width = Number(svg.getAttribute("width")), height = Number(svg.getAttribute("height")), image = new Image();
    image.addEventListener("load", () => {
      const canvas = h("canvas", { width: 2 * width, height: 2 * height });
      canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
      keep(name, canvas.toDataURL("image/png"));
    });
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(textOf(svg))}`;
  }
  function tooltip() {  // beside the pointer, inside the figure, so that the page does not move
    const el = h("div", { class: "tip", "aria-hidden": "true" });
    el.hidden = true;
    return { el, hide: () => { el.hidden = true; }, show: (left, width, rows) => {
      el.replaceChildren(...rows);
      el.hidden = false;
      el.style.left = `${Math.max(0, Math.min(left + 14, width - el.offsetWidth - 2))}px`;
      if (left + 14 + el.offsetWidth > width) el.style.left = `${Math.max(0, left - el.offsetWidth - 14)}px`;
    } };
  }
  const tipLine = (look, text) => { const dot = h("i"); if (look) dot.style.background = ink(look); return h("div", {}, look ? dot : null, text); };

  function at(xs, ys, x) {  // between two points, on the straight line
    let k = xs.findIndex((value) => value >= x);
    if (k < 0) k = xs.length - 1;
    if (k === 0 || xs[k] === x) return ys[k];
    const share = (x - xs[k - 1]) / (xs[k] - xs[k - 1]);
    return ys[k - 1] + share * (ys[k] - ys[k - 1]);
  }
  function apart(places, least, low, high) {  // heights of labels, moved so that none covers another
    const order = places.map((_, k) => k).sort((a, b) => places[a] - places[b]), found = [...places];
    order.forEach((k, j) => { if (j > 0) found[k] = Math.max(found[k], found[order[j - 1]] + least); });
    for (let j = order.length - 1; j >= 0; j -= 1) {
      const most = j === order.length - 1 ? high : found[order[j + 1]] - least;
      found[order[j]] = Math.max(low, Math.min(found[order[j]], most));
    }
    return found;
  }

  // ----------------------------------------------------------------------------------------------------------------- line charts
  // `lines()` gives {x, formatX, formatY, curves: [{name, look, xs, ys, low, high, size}], log, logX, range, none}
  function lineChart(title, lines, { height = 300, sync = null } = {}) {
    const place = h("div", { class: "chart", tabindex: "0", role: "img" }), says = h("div", { class: "readout away", "aria-live": "polite" }), tip = tooltip();
    let state = lines(), chart = null, shape = "", data = [[]], byKey = false;
    const name = () => (typeof title === "function" ? title() : title);
    function rows() {
      const spread = state.curves.some((c) => c.low);
      return [["run", state.x, "value", ...(spread ? ["least to most"] : [])],
        state.curves.flatMap((c) => c.xs.map((x, k) => [c.name, state.formatX(x), state.formatY(c.ys[k]), ...(spread ? [c.low ? `${state.formatY(c.low[k])} to ${state.formatY(c.high[k])}` : ""] : [])]))];
    }
    const frame = framed(name, h("div", { class: "drawn" }, place, says), rows, () => still(name(), state));

    function join() {
      const tables = state.curves.map((c) => (c.low ? [c.xs, c.ys, c.low, c.high] : [c.xs, c.ys]));
      return tables.length ? uPlot.join(tables) : [[]];
    }
    const labelled = () => place.clientWidth >= NARROW && state.curves.some((c) => !c.plain);
    const labelOf = (c) => `${state.formatY(c.ys[c.ys.length - 1])}  ${shortened(c.name, 24)}`;
    const room = () => (labelled() ? Math.min(LABEL, 26 + Math.max(0, ...state.curves.filter((c) => c.xs.length && !c.plain).map((c) => widthOf(labelOf(c))))) : 14);
    function options() {
      const series = [{}], bands = [];
      for (const c of state.curves) {
        series.push({ label: c.name, stroke: () => ink(c.look), width: 2.25, dash: c.look.dash, spanGaps: true, points: { show: Boolean(c.size), size: c.size || 5 } });
        if (c.low) {
          const plain = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
          series.push({ ...plain, label: `${c.name}, least` }, { ...plain, label: `${c.name}, most` });
          bands.push({ series: [series.length - 1, series.length - 2], fill: () => `${ink(c.look)}33` });
        }
      }
      const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { stroke: () => css("--line"), size: 4 }, font: FONT };
      return {
        width: Math.max(200, place.clientWidth), height, series, bands, padding: [10, Math.ceil(room()), 0, 0],
        scales: { x: { time: false, ...(state.logX ? { distr: 3 } : {}) }, y: { ...(state.log ? { distr: 3 } : {}), ...(state.range ? { range: state.range } : {}) } },
        axes: [
          { ...axis, grid: { show: false }, size: 30, label: state.x, labelSize: 18, labelGap: 0, labelFont: FONT, space: 70, values: (_, found) => found.map((v) => (v === null ? "" : state.formatX(v))) },
          { ...axis, size: 56, ticks: { show: false }, values: (_, found) => found.map((v) => (v === null ? "" : (state.formatTick || state.formatY)(v))) },
        ],
        hooks: { setCursor: [hover], draw: [ends] },
        cursor: { drag: { x: true, y: false }, ...(sync ? { sync: { key: sync, scales: ["x", null] } } : {}), points: { size: 7 }, y: false },
        legend: { show: false },
      };
    }
    function ends(u) {  // a mark at the end of each line, and its name where there is room
      const g = u.ctx, ratio = devicePixelRatio || 1, shown = state.curves.filter((c) => c.xs.length && !c.plain);
      const places = shown.map((c) => u.valToPos(c.ys[c.ys.length - 1], "y"));
      const texts = labelled() ? apart(places, 15, 4, u.over.clientHeight - 4) : places;
      g.save();
      g.translate(u.bbox.left, u.bbox.top);
      g.scale(ratio, ratio);
      g.font = FONT;
      g.textBaseline = "middle";
      g.textAlign = "left";
      shown.forEach((c, k) => {
        const x = u.valToPos(c.xs[c.xs.length - 1], "x"), right = u.over.clientWidth;
        if (!(x >= 0 && x <= right + 1 && isNumber(places[k]))) return;
        g.fillStyle = ink(c.look);
        g.save();
        g.translate(x, places[k]);
        g.fill(new Path2D(MARKS[c.look.mark]));
        g.restore();
        if (!labelled()) return;
        g.strokeStyle = g.fillStyle;
        g.globalAlpha = 0.6;
        g.beginPath();
        g.moveTo(x + 6, places[k]);
        g.lineTo(right + 12, texts[k]);
        g.stroke();
        g.globalAlpha = 1;
        g.fillStyle = css("--ink");
        g.fillText(labelOf(c), right + 16, texts[k]);
      });
      g.restore();
    }
    function values(x) {
      return state.curves.filter((c) => c.xs.length && x >= c.xs[0] && x <= c.xs[c.xs.length - 1]).map((c) => [c, at(c.xs, c.ys, x)]).sort((a, b) => b[1] - a[1]);
    }
    function hover(u) {
      const k = u.cursor.idx, mine = byKey || (u.cursor.event && u.cursor.left >= 0);
      if (k === null || k === undefined || !mine || !data[0].length) { tip.hide(); return; }
      const x = data[0][k];
      tip.show(u.valToPos(x, "x"), u.over.clientWidth, [h("b", {}, `${state.x} ${state.formatX(x)}`), ...values(x).map(([c, v]) => tipLine(c.look, `${state.formatY(v)}  ${shortened(c.name, 30)}`))]);
    }
    function label() {
      const last = state.curves.filter((c) => c.xs.length).map((c) => `${c.name} ends at ${state.formatY(c.ys[c.ys.length - 1])}`);
      place.setAttribute("aria-label", `${name()} against ${state.x}. ${last.join(". ") || state.none || "no data yet"}. Arrow keys read values.`);
    }
    function update() {
      state = lines();
      data = join();
      label();
      const now = JSON.stringify([state.x, state.log, state.logX, state.range, Math.ceil(room()), state.curves.map((c) => [c.name, c.look, Boolean(c.low), c.size])]);
      if (chart && now === shape) chart.setData(data);
      else {
        if (chart) chart.destroy();
        chart = null;
        place.replaceChildren();
        if (data[0].length) { chart = new uPlot(options(), data, place); chart.over.append(tip.el); } else place.append(h("p", { class: "muted" }, state.none || "no data yet"));
        shape = now;
      }
      frame.refresh();
    }
    place.addEventListener("keydown", (event) => {
      if (!chart || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
      event.preventDefault();
      if (event.key === "Escape") { chart.setData(data); tip.hide(); return; }
      const last = data[0].length - 1, now = chart.cursor.idx;
      const k = { Home: 0, End: last, ArrowLeft: Math.max(0, (now ?? last + 1) - 1), ArrowRight: Math.min(last, (now ?? -1) + 1) }[event.key];
      byKey = true;
      chart.setCursor({ left: chart.valToPos(data[0][k], "x"), top: 10 });
      byKey = false;
      says.textContent = `${state.x} ${state.formatX(data[0][k])}: ${values(data[0][k]).map(([c, v]) => `${c.name} ${state.formatY(v)}`).join("; ")}`;
    });
    place.addEventListener("blur", tip.hide);
    let wide = 0;
    new ResizeObserver(() => {
      if (!place.clientWidth || place.clientWidth === wide) return;
      wide = place.clientWidth;
      update();  // with or without labels
      if (chart && chart.width !== wide) chart.setSize({ width: wide, height });
    }).observe(place);
    const self = { el: frame.el, update, redraw: () => { if (chart) chart.redraw(false, true); } };
    drawings.add(self);
    return self;
  }

  // The same as a picture that stands for itself: with its title, on white, in the colours of light.
  function still(title, state, width = 760, height = 400) {
    const left = 64, right = 170, top = 40, bottom = 46, curves = state.curves.filter((c) => c.xs.length);
    const xs = curves.flatMap((c) => c.xs), ys = curves.flatMap((c) => (c.low ? [...c.ys, ...c.low, ...c.high] : c.ys));
    const scale = (log, low, high, from, to) => {
      const f = log ? Math.log10 : (v) => v, span = f(high) - f(low) || 1;
      return (v) => from + (to - from) * (f(v) - f(low)) / span;
    };
    const bounds = (values, given) => given || [Math.min(...values), Math.max(...values)];
    const [x0, x1] = bounds(xs.length ? xs : [0, 1]), [y0, y1] = bounds(ys.length ? ys : [0, 1], state.range);
    const x = scale(state.logX, x0, x1, left, width - right), y = scale(state.log, y0, y1, height - bottom, top);
    const places = (log, low, high, many) => (log ? Array.from({ length: 40 }, (_, k) => 10 ** (k - 20)).filter((v) => v >= low * 0.999 && v <= high * 1.001) : ticks(low, high, many));
    const words = (px, py, text, more = {}) => s("text", { x: px, y: py, fill: "#3c4046", "font-size": 12, ...more }, text);
    const svg = s("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, "font-family": "system-ui, sans-serif" },
      s("rect", { width, height, fill: "#ffffff" }), words(left, 22, title, { "font-size": 15, "font-weight": 600, fill: "#1c2024" }),
      places(state.log, y0, y1, 5).map((v) => [s("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), stroke: "#e4e7eb" }), words(left - 8, y(v) + 4, (state.formatTick || state.formatY)(v), { "text-anchor": "end" })]).flat(),
      places(state.logX, x0, x1, 6).map((v) => words(x(v), height - bottom + 18, state.formatX(v), { "text-anchor": "middle" })),
      words((left + width - right) / 2, height - 8, state.x, { "text-anchor": "middle" }));
    const heights = apart(curves.map((c) => y(c.ys[c.ys.length - 1])), 15, top, height - bottom);
    curves.forEach((c, k) => {
      const points = (values) => c.xs.map((v, j) => `${x(v).toFixed(1)},${y(values[j]).toFixed(1)}`);
      if (c.low) svg.append(s("polygon", { points: [...points(c.low), ...points(c.high).reverse()].join(" "), fill: c.look.light, "fill-opacity": 0.18 }));
      const end = [x(c.xs[c.xs.length - 1]), y(c.ys[c.ys.length - 1])];
      svg.append(s("polyline", { points: points(c.ys).join(" "), fill: "none", stroke: c.look.light, "stroke-width": 2.25, "stroke-dasharray": c.look.dash.join(" ") || null }),
        s("path", { d: MARKS[c.look.mark], transform: `translate(${end[0]} ${end[1]})`, fill: c.look.light }),
        words(width - right + 16, heights[k] + 4, `${state.formatY(c.ys[c.ys.length - 1])}  ${shortened(c.name, 20)}`));
    });
    return svg;
  }

  // ------------------------------------------------------------------------------------------------ drawn as SVG, anew for each width
  // `draw(svg, width)` fills an empty SVG element and returns its height and what it says.
  function drawing(title, draw, rows, note = null) {
    const svg = s("svg", { role: "img", "aria-label": title }), place = h("div", { class: "drawn" }, svg);
    const frame = framed(() => title, place, rows, () => standing(svg), note);
    function redraw() {
      const width = place.clientWidth;
      if (!width) return;
      svg.replaceChildren();
      const [height, words] = draw(svg, width);
      for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height, "aria-label": `${title}. ${words}` })) svg.setAttribute(name, value);
      frame.refresh();
    }
    let wide = 0;
    new ResizeObserver(() => { if (place.clientWidth !== wide) { wide = place.clientWidth; redraw(); } }).observe(place);
    const self = { el: frame.el, svg, place, redraw };
    drawings.add(self);
    self.forget = () => drawings.delete(self);
    return self;
  }
  function standing(svg) {  // a copy of what is on the page that does not need the page's styles
    const copy = svg.cloneNode(true), from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
    from.forEach((one, k) => {
      const style = getComputedStyle(one);
      for (const name of ["fill", "stroke", "fill-opacity", "stroke-width", "font-size", "font-weight"]) to[k].setAttribute(name, style.getPropertyValue(name));
      to[k].removeAttribute("style");
      to[k].removeAttribute("class");
    });
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("font-family", "system-ui, sans-serif");
    copy.prepend(s("rect", { width: "100%", height: "100%", fill: css("--card") }));
    return copy;
  }
  const words = (x, y, text, anchor = "middle") => s("text", { x, y, "text-anchor": anchor }, text);
  const styled = (element, look) => { Object.assign(element.style, look); return element; };

  function histogram(title, xLabel, edges, sets, { zero = false, format = String } = {}) {  // sets: [{name, look, counts}]
    const used = edges.slice(0, -1).map((_, k) => sets.some((set) => set.counts[k] > 0));
    let first = Math.max(0, used.indexOf(true) - 1), last = Math.min(used.length - 1, used.lastIndexOf(true) + 1);
    if (first > last) { first = 0; last = used.length - 1; }
    const most = Math.max(1, ...sets.flatMap((set) => set.counts));
    const rows = () => [["from", "to", ...sets.map((set) => set.name)], edges.slice(0, -1).map((v, k) => [format(v), format(edges[k + 1]), ...sets.map((set) => set.counts[k])]).filter((_, k) => used[k])];
    return drawing(title, (svg, width) => {
      const height = 240, left = 40, bottom = 40, top = 10;
      const x = (v) => left + (width - left - 12) * (v - edges[first]) / (edges[last + 1] - edges[first]);
      const y = (v) => height - bottom - (height - bottom - top) * v / most;
      for (const v of ticks(0, most, 4, 1)) svg.append(s("line", { class: "gridline", x1: left, x2: width - 12, y1: y(v), y2: y(v) }), words(left - 6, y(v) + 4, String(v), "end"));
      for (const set of sets) {
        let path = `M${x(edges[first])},${y(0)}`;
        for (let k = first; k <= last; k += 1) path += `V${y(set.counts[k])}H${x(edges[k + 1])}`;
        svg.append(styled(s("path", { d: `${path}V${y(0)}`, "stroke-width": 2, "stroke-dasharray": set.look.dash.join(" ") || null }), { stroke: ink(set.look), fill: ink(set.look), fillOpacity: sets.length > 1 ? 0.1 : 0.4 }));
      }
      if (zero && edges[first] < 0 && edges[last + 1] > 0) svg.append(styled(s("line", { x1: x(0), x2: x(0), y1: top, y2: y(0), "stroke-width": 1.5, "stroke-dasharray": "4 3" }), { stroke: "var(--ink)" }));
      for (const v of ticks(edges[first], edges[last + 1], width / 90)) svg.append(words(x(v), height - bottom + 16, format(v)));
      svg.append(words((left + width) / 2, height - 6, xLabel));
      return [height, sets.map((set) => `${set.name}: ${set.counts.reduce((a, b) => a + b, 0)} devices`).join("; ")];
    }, rows);
  }

  // Each device: from what it would have otherwise (a ring) to its own model (a dot), in order of its own; who loses is red and marked.
  // `pairs` is {device, own, other} in columns; `told(k)` the lines of a tooltip.
  function dumbbells(title, pairs, look, { format, better, range, names, fits = null, height = 300 }) {
    const many = pairs.device.length, sign = better === "lower" ? -1 : 1, loses = (k) => pairs.other !== null && sign * (pairs.own[k] - pairs.other[k]) < 0;
    const all = [...pairs.own, ...(pairs.other || [])].filter(isNumber);
    const bounds = range || [Math.min(0, ...all), Math.max(...all) || 1];
    const rows = () => [["device", names[0], ...(pairs.other ? [names[1], "difference"] : [])], pairs.device.map((device, k) => [device, format(pairs.own[k]), ...(pairs.other ? [format(pairs.other[k]), fedbcd.change(range ? "share" : "", pairs.own[k] - pairs.other[k])] : [])])];
    let place = () => 0, chosen = null;
    const key = h("div", { class: "legend quiet" }, pairs.other ? [h("span", {}, "○ ", names[1]), h("span", {}, "● ", names[0]), h("span", { class: "worse" }, "▾ loses")] : h("span", {}, "● ", names[0]));
    const self = drawing(title, (svg, width) => {
      const left = 56, right = 12, top = 10, bottom = 42, [low, high] = fits && fits() ? [Math.min(...all), Math.max(...all)] : bounds;
      const x = (k) => left + (width - left - right) * (k + 0.5) / many, y = (v) => height - bottom - (height - bottom - top) * (v - low) / (high - low || 1);
      place = (px) => Math.max(0, Math.min(many - 1, Math.floor((px - left) / (width - left - right) * many)));
      for (const v of ticks(low, high, 5)) svg.append(s("line", { class: "gridline", x1: left, x2: width - right, y1: y(v), y2: y(v) }), words(left - 8, y(v) + 4, format(v).replace(/\.0 %/, " %"), "end"));
      const size = Math.max(1.3, Math.min(4.5, (width - left) / many / 2.2)), rings = s("g"), dots = s("g");
      const colour = ink(look), bad = "var(--worse)";
      pairs.own.forEach((own, k) => {
        const stroke = loses(k) ? bad : colour;
        if (pairs.other) {
          svg.append(styled(s("line", { x1: x(k), x2: x(k), y1: y(pairs.other[k]), y2: y(own), "stroke-width": Math.max(1, size * 0.6) }), { stroke, strokeOpacity: loses(k) ? 1 : 0.45 }));
          rings.append(styled(s("circle", { cx: x(k), cy: y(pairs.other[k]), r: size * 0.8, "stroke-width": 1.4 }), { stroke: loses(k) ? bad : "var(--soft)", fill: "var(--card)" }));
          if (loses(k)) dots.append(styled(s("path", { d: "M0,5L4.5,-3H-4.5Z", transform: `translate(${x(k)} ${height - bottom + 8}) scale(${Math.min(1, size / 3)})` }), { fill: bad }));
        }
        dots.append(styled(s("circle", { cx: x(k), cy: y(own), r: size }), { fill: stroke }));
      });
      svg.append(rings, dots, words((left + width - right) / 2, height - 8, `${many === pairs.all ? `${many} devices` : `${many} of ${pairs.all} devices, evenly spread`}, by the score of ${names[0]}`));
      if (chosen !== null) svg.append(styled(s("line", { x1: x(chosen), x2: x(chosen), y1: top, y2: height - bottom }), { stroke: "var(--soft)", strokeDasharray: "2 3" }));
      const lost = pairs.own.filter((_, k) => loses(k)).length;
      return [height, pairs.other ? `${many - lost} of ${many} devices drawn do not lose, ${lost} lose` : `${many} devices`];
    }, rows, key);
    const tip = tooltip();
    self.place.append(tip.el);
    const point = (k, left) => {
      const lines = [h("b", {}, `device ${pairs.device[k]}${pairs.server && pairs.server[k] !== null ? `, server ${pairs.server[k]}` : ""}`), tipLine(look, `${format(pairs.own[k])}  ${names[0]}`)];
      if (pairs.other) lines.push(tipLine(null, `${format(pairs.other[k])}  ${names[1]}`), h("div", { class: loses(k) ? "worse" : null }, `${fedbcd.change(range ? "share" : "", pairs.own[k] - pairs.other[k])} ${loses(k) ? "loses" : "by its own"}`));
      tip.show(left, self.place.clientWidth, lines);
    };
    self.svg.addEventListener("pointermove", (event) => { const left = event.clientX - self.svg.getBoundingClientRect().left; point(place(left), left); });
    self.svg.addEventListener("pointerleave", tip.hide);
    return self;
  }

  // Stacked bars, one for each row: [name, {cause: share}], with the shares written where there is room.
  function bars(title, causes, rows, format) {
    const data = () => [["", ...causes.map(([, text]) => text)], rows.map(([name, parts]) => [name, ...causes.map(([cause]) => format(parts[cause]))])];
    return drawing(title, (svg, width) => {
      const tall = 26, left = Math.min(170, width * 0.34), most = Math.floor(left / 7);
      rows.forEach(([name, parts], k) => {
        let x = left;
        svg.append(words(left - 8, k * tall + 17, shortened(name, most), "end"));
        for (const [cause, text] of causes) {
          const share = parts[cause] || 0, wide = (width - left - 4) * share;
          svg.append(styled(s("rect", { x, y: k * tall + 2, width: Math.max(0, wide), height: tall - 6 }, s("title", {}, `${name}: ${text} ${format(share)}`)), { fill: `var(--${cause})` }));
          if (wide > 38) svg.append(styled(words(x + wide / 2, k * tall + 16, format(share)), { fill: `var(--on-${cause})` }));
          x += wide;
        }
      });
      return [rows.length * tall + 4, rows.map(([name, parts]) => `${name}: ${causes.map(([cause, text]) => `${text} ${format(parts[cause])}`).join(", ")}`).join(". ")];
    }, data);
  }

  Object.assign(fedbcd, { lineChart, histogram, dumbbells, bars, drawing, tooltip, framed, at });
})();
