// What all pages are made of: elements, numbers as people read them, tables, what can be copied and kept.
// Every text goes into the page as text, never as markup.
"use strict";
const fedbcd = { sections: {} };
(() => {
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

  // -------------------------------------------------------------------------------------------------------------------- themes
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const ink = (look) => (isDark() ? look.dark : look.light);
  const drawings = new Set();  // with a `redraw`, for another theme or another width
  const redraw = () => drawings.forEach((one) => one.redraw());
  system.addEventListener("change", redraw);

  // ------------------------------------------------------------------------------------------------------------------- numbers
  const isNumber = (v) => typeof v === "number" && Number.isFinite(v);
  const grouped = (v, digits = 0) => v.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const count = (v) => (isNumber(v) ? grouped(v) : "–");
  const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  function power(v) {  // 2.1 · 10⁻⁷
    const at = Math.floor(Math.log10(Math.abs(v)));
    const raised = [...String(Math.abs(at))].map((digit) => RAISED[Number(digit)]).join("");
    return `${Number((v / 10 ** at).toPrecision(2))} · 10${at < 0 ? "⁻" : ""}${raised}`;
  }
  function short(v) {
    if (!isNumber(v)) return "–";
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size >= 1e9 || size < 1e-4) return power(v);
    if (size >= 1000) return grouped(v);
    return String(Number(v.toPrecision(size >= 100 ? 4 : 3)));
  }
  const percent = (v) => (isNumber(v) ? `${(100 * v).toFixed(v > 0 && v < 0.0995 ? 1 : 0)} %` : "–");
  const score = (unit) => (v) => (!isNumber(v) ? "–" : unit === "share" ? `${(100 * v).toFixed(1)} %` : short(v));
  function change(unit, v) {  // a difference of two scores
    if (!isNumber(v)) return "–";
    const size = unit === "share" ? (100 * Math.abs(v)).toFixed(1) : short(Math.abs(v));
    return Number(size) === 0 ? "±0" : `${v < 0 ? "−" : "+"}${size}`;
  }
  function scaled(v, units, base) {
    let k = 0;
    while (Math.abs(v) >= base && k < units.length - 1) { v /= base; k += 1; }
    return `${Number(v.toPrecision(3))} ${units[k]}`;
  }
  const bytes = (v) => (isNumber(v) ? scaled(v, ["B", "kB", "MB", "GB", "TB", "PB"], 1000) : "–");
  function seconds(v) {
    if (!isNumber(v)) return "–";
    if (v === 0) return "0 s";
    const size = Math.abs(v);
    if (size < 1) return size < 1e-3 ? `${Number((1e6 * v).toPrecision(2))} µs` : `${Number((1e3 * v).toPrecision(2))} ms`;
    if (size < 100) return `${Number(v.toPrecision(3))} s`;
    if (size < 5400) return `${Math.floor(v / 60)} min ${Math.round(v % 60)} s`;
    return `${Math.floor(v / 3600)} h ${Math.round((v % 3600) / 60)} min`;
  }
  const clock = (summary) => (summary && summary.time === "seconds" ? seconds : short);
  function ticks(low, high, wanted, least = 0) {  // round numbers between two values
    const raw = Math.max((high - low) / Math.max(1, wanted), least, 1e-12), power_ = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * power_).find((v) => v >= raw * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(Number((k * step).toPrecision(10)));
    return found;
  }

  // -------------------------------------------------------------------------------------------------------------------- tables
  // A cell is a text, a number or an element. On a narrow screen the rows of a table of class `cards` stand one below the other.
  function table(caption, head, rows, textColumns = [0], kind = null) {
    const cell = (tag, value, k) => h(tag, { class: textColumns.includes(k) ? "text" : null, scope: tag === "th" ? "col" : null, "data-of": tag === "td" && kind && k > 0 ? head[k] : null },
      value === null || value === undefined ? "–" : typeof value === "number" ? count(value) : value);
    return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      h("table", { class: kind }, h("caption", {}, caption),
        h("thead", {}, h("tr", {}, head.map((name, k) => cell("th", name, k)))),
        h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value, k) => cell("td", value, k)))))));
  }
  const escaped = (text) => (/[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
  const asCsv = (head, rows) => [head, ...rows].map((row) => row.map((value) => escaped(value === null || value === undefined ? "" : String(value))).join(",")).join("\n");
  function asMarkdown(head, rows) {
    const line = (cells) => `| ${cells.map((value) => String(value ?? "").replace(/\|/g, "\\|").replace(/\n/g, " ")).join(" | ")} |`;
    return [line(head), `|${"---|".repeat(head.length)}`, ...rows.map(line)].join("\n");
  }
  const textsOf = (place) => [...place.querySelectorAll("tr")].map((row) => [...row.children].map((one) => one.textContent));

  // -------------------------------------------------------------------------------------------------------- copying and keeping
  async function copy(text, button) {
    let done = false;
    try { await navigator.clipboard.writeText(text); done = true; } catch { done = copyByHand(text, button); }
    const before = button.dataset.name || button.textContent;
    button.dataset.name = before;
    button.textContent = done ? "Copied" : "Not allowed here";
    setTimeout(() => { button.textContent = before; }, 1500);
  }
  function copyByHand(text, button) {  // a page from disk has no clipboard in some browsers
    const area = h("textarea", { value: text, "aria-hidden": "true", class: "away" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    button.focus();
    return done;
  }
  const copyButton = (name, label, text) => {
    const button = h("button", { type: "button", class: "small", "aria-label": label, onclick: () => copy(text(), button) }, name);
    return button;
  };
  function keep(name, address) {
    const link = h("a", { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
  }
  function keepText(name, type, text) {
    const address = URL.createObjectURL(new Blob([text], { type }));
    keep(name, address);
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  // ------------------------------------------------------------------------------------------------------------------- controls
  function choice(label, options, onchange) {  // a labelled select that keeps its choice when the options change
    const select = h("select", { onchange });
    const set = (list) => {
      const before = select.value;
      if ([...select.options].map((o) => o.value + o.text).join("\n") === list.map(([v, t]) => v + t).join("\n")) return;
      select.replaceChildren(...list.map(([value, text]) => h("option", { value }, text)));
      if (list.some(([value]) => value === before)) select.value = before;
      el.hidden = list.length < 2;
    };
    const el = h("label", {}, label, select);
    set(options);
    return { el, select, set };
  }
  const button = (text, label, action, kind = null) => h("button", { type: "button", class: kind, "aria-label": label, title: label, onclick: action }, text);
  const swatch = (colour, text) => h("li", {}, h("span", { class: "swatch", color: colour, "aria-hidden": "true" }), text);

  // ----------------------------------------------------------------------------------------------------------------------- marks
  const MARKS = {  // around the origin, about 10 wide
    circle: "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0Z", square: "M-4,-4H4V4H-4Z", diamond: "M0,-5.5L5.5,0L0,5.5L-5.5,0Z",
    triangle: "M0,-5L5,4.2H-5Z", down: "M0,5L5,-4.2H-5Z", cross: "M-4.5,-2.2L-2.2,-4.5L0,-2.2L2.2,-4.5L4.5,-2.2L2.2,0L4.5,2.2L2.2,4.5L0,2.2L-2.2,4.5L-4.5,2.2L-2.2,0Z",
  };
  function key(look) {  // a stretch of the line with its mark, as in the charts
    const line = s("line", { x1: 1, x2: 27, y1: 7, y2: 7, "stroke-width": 2.5, "stroke-dasharray": look.dash.join(" ") || null });
    const mark = s("path", { d: MARKS[look.mark], transform: "translate(14 7)" });
    const svg = s("svg", { class: "key", viewBox: "0 0 28 14", "aria-hidden": "true" }, line, mark);
    const paint = () => { line.style.stroke = mark.style.fill = ink(look); };
    paint();
    svg.paint = paint;
    return svg;
  }

  Object.assign(fedbcd, { h, s, css, isDark, ink, drawings, redraw, isNumber, count, short, percent, score, change, bytes, seconds, clock, ticks, table, asCsv, asMarkdown, textsOf, copyButton, keep, keepText, choice, button, swatch, MARKS, key });
})();
