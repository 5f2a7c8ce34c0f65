// Puts the sections into a page: headline, sections, notices, theme, print. Used by the report (data in the page) and the dashboard (data by fetch).
"use strict";
(() => {
  const { h, redraw, drawings, copyButton, asMarkdown, textsOf, button } = fedbcd;
  // `section.body` takes what it holds; a folded one is closed until someone opens it, or a link leads to it.
  fedbcd.section = (id, title, lead, folded = false) => {
    const heading = h("h2", { id: `${id}-title` }, title), words = lead ? h("p", { class: "lead" }, lead) : null;
    const el = h("section", { id, "aria-labelledby": `${id}-title` });
    el.isOpen = () => true;
    el.body = el;
    if (!folded) { el.append(heading, ...(words ? [words] : [])); return el; }
    const fold = h("details", { class: "fold" }, h("summary", {}, heading), words);
    el.body = h("div");
    fold.append(el.body);
    el.append(fold);
    el.classList.add("folded");
    el.isOpen = () => fold.open;
    el.open = () => { fold.open = true; };
    fold.addEventListener("toggle", () => { if (fold.open && el.onopen) el.onopen(); });
    return el;
  };
  // A sentence, and the command that helps.
  fedbcd.card = (words, command) => h("div", { class: "card" }, h("p", {}, words), command ? h("div", { class: "command" }, h("code", { tabindex: "0" }, command), copyButton("Copy", `Copy: ${command}`, () => command)) : null);

  function themeButton() {
    const names = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" }, found = h("button", { type: "button", class: "small theme" });
    const set = (name) => {
      if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
      found.textContent = names[name];
      found.dataset.name = name;
      redraw();
    };
    found.addEventListener("click", () => { const order = Object.keys(names); set(order[(order.indexOf(found.dataset.name) + 1) % 3]); });
    set("auto");
    return found;
  }
  function asText(app) {  // the headline, its numbers and the table of runs, to paste elsewhere
    const first = app.view.first, rows = textsOf(document.querySelector("#summary table") || h("table"));
    const tiles = first ? first.tiles.map((one) => `- ${one.label}: ${one.value}${one.change ? ` (${one.change})` : ""}${one.note ? `, ${one.note}` : ""}`) : [];
    const [head, ...body] = rows.length ? rows : [[""]];
    return [first ? `**${first.words}**` : app.view.title, first ? first.facts : "", tiles.join("\n"), rows.length ? asMarkdown(head, body) : ""].filter(Boolean).join("\n\n");
  }
  const ORDER = ["first", "summary", "curves", "devices", "protocol", "time", "plan", "next", "distances", "certificates", "partition", "cluster", "settings"];
  const TESTED = ["curves", "devices", "distances", "certificates", "partition"];  // a deployment seen from outside says nothing about these

  // `source.timeline(run, begin, end)`, where given, fetches details of a stretch of the timeline.
  // `more` are further sections: [the id before which it stands, a function that makes it].
  fedbcd.mount = (root, view, source = {}, more = []) => {
    const app = { view, axis: "clock", logX: false, fit: false, hidden: new Set(), source, isLive: () => view.kind !== "report" };
    const parts = ORDER.flatMap((name) => [...more.filter(([place]) => place === name).map(([, make]) => make(app)), fedbcd.sections[name](app)]);
    const title = h("h1", {}), under = h("p", { class: "facts" }), notices = h("div", { role: "status" });
    const links = parts.filter((part) => part.id !== "first").map((part) => (part.link = h("li", {}, h("a", { href: `#${part.id}`, onclick: () => part.el.open && part.el.open() }, part.title))));
    root.replaceChildren(
      h("header", { class: "top" }, h("div", {}, under, title), h("div", { class: "actions" }, copyButton("Copy as Markdown", "Copy as Markdown", () => asText(app)), button("Print", "Print this page", () => print(), "small"), themeButton())),
      h("nav", { class: "sections", "aria-label": "Sections" }, h("ul", {}, links)),
      h("main", { id: "main", tabindex: "-1" }, notices, parts.map((part) => part.el)),
      h("footer", {}, "Made by fedbcd, from event logs, histories and model heads alone. Charts by uPlot (MIT)."));
    const known = new Map();  // a section that says what it uses is drawn again only when that has changed
    for (const part of parts) part.el.onopen = () => { known.delete(part.id); draw(part); };
    function draw(part) {
      const closed = part.el.isOpen && !part.el.isOpen(), now = part.uses ? JSON.stringify([app.view.runs.map((run) => [run.key, run.name, run.seed, part.uses(run)]), app.view.looks]) : null;
      if (TESTED.includes(part.id)) part.el.hidden = app.view.runs.length > 0 && app.view.runs.every((run) => run.key === "deployment");
      if (part.id === "cluster") part.el.hidden = !app.view.runs.some((run) => run.cluster);
      if (part.link) part.link.hidden = part.el.hidden;
      if (closed || (now !== null && known.get(part.id) === now)) return;
      known.set(part.id, now);
      part.update();
      if (part.link) part.link.hidden = part.el.hidden;
    }
    app.refresh = (ids) => parts.forEach((part) => { if (!ids || ids.includes(part.id)) draw(part); });
    app.refreshCharts = () => parts.forEach((part) => { if (part.charts && (!part.el.isOpen || part.el.isOpen())) part.charts(); });
    let later = 0;
    function drawAll() {  // what is seen first at once, and the rest one by one when that has been painted
      clearTimeout(later);
      const [now, rest] = [parts.filter((part) => part.id === "first" || app.drawn), parts.filter((part) => part.id !== "first" && !app.drawn)];
      now.forEach(draw);
      const on = () => {
        const part = rest.shift();
        if (!part) { app.drawn = true; document.documentElement.dataset.drawn = "all"; return; }
        draw(part);
        later = setTimeout(on, 0);
      };
      later = setTimeout(on, 0);
    }
    app.show = (next) => {
      app.view = next;
      const { first } = next, texts = [...(next.notices || []), ...next.runs.flatMap((run) => run.notices.filter((text) => !first || (text !== run.summary.standing && text !== run.damage)).map((text) => `${run.name}: ${text}`))], seen = texts.join("\n");
      title.textContent = first ? first.words : next.title || "No run";
      title.className = first ? `headline ${first.tone}` : "";
      under.textContent = first ? first.facts : `${next.kind === "report" ? "Report" : "Dashboard"} · ${next.runs.length} ${next.runs.length === 1 ? "run" : "runs"}`;
      document.title = `${next.title || "No run"} · fedbcd`;
      if (notices.dataset.key !== seen) { notices.dataset.key = seen; notices.replaceChildren(...texts.map((text) => h("p", { class: "notice" }, text))); }
      drawAll();
    };
    const opened = () => { const part = parts.find((one) => `#${one.id}` === location.hash); if (part && part.el.open) part.el.open(); };
    addEventListener("hashchange", opened);
    printing();
    app.show(view);
    opened();
    return app;
  };
  function printing() {  // everything on white, with what is folded opened; afterwards as it was
    let theme, opened = [];
    addEventListener("beforeprint", () => {
      theme = document.documentElement.dataset.theme;
      document.documentElement.dataset.theme = "light";
      opened = [...document.querySelectorAll("details.fold:not([open])")];
      opened.forEach((one) => { one.open = true; });
      drawings.forEach((one) => one.redraw());
    });
    addEventListener("afterprint", () => {
      if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
      opened.forEach((one) => { one.open = false; });
      redraw();
    });
  }
  if (document.getElementById("data")) window.app = fedbcd.mount(document.getElementById("page"), JSON.parse(document.getElementById("data").textContent));
})();
