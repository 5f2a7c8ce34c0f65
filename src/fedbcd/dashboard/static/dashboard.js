// The dashboard: picks runs, asks for their views once a second, and adds what only a live page shows: roles, servers and devices.
"use strict";
(() => {
  const { h, table, section, short, bytes } = fedbcd;
  const root = document.getElementById("page");
  let picked = null, version = "", app = null, plans = new Map(), list = [];

  async function get(path, query = {}) {
    const response = await fetch(`${path}?${new URLSearchParams(query)}`);
    if (response.status === 204) return null;
    if (!response.ok) throw new Error((await response.text()).trim() || response.statusText);
    return response.json();
  }

  // ------------------------------------------------------------------------------------------------------------ sections of its own
  const pickSection = () => {
    const el = section("runs", "Runs", "Pick up to eight runs to look at or to compare; the latest is on top.");
    const place = h("div"), filter = h("input", { type: "search", placeholder: "filter", "aria-label": "Filter runs", oninput: () => draw(true) });
    el.append(h("div", { class: "controls" }, h("label", {}, "find", filter)), place);
    let key = "";
    function draw(force) {
      el.hidden = list.length === 0 && Boolean(app && app.view.deployment);
      const now = JSON.stringify([list, picked]);
      if (now === key && !force) return;
      key = now;
      const words = filter.value.toLowerCase();
      const shown = list.filter((run) => `${run.name} ${run.folder} ${run.algorithm} ${run.cloud}`.toLowerCase().includes(words));
      const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
      place.replaceChildren(table(`${shown.length} of ${list.length} runs`, ["run", "seed", "algorithm", "cloud", "state", "folder"], shown.slice(0, 200).map((run) => [
        h("label", {}, h("input", { type: "checkbox", "data-key": run.key, checked: picked.includes(run.key), onchange: (event) => pick(run.key, event.target.checked) }), run.name),
        run.seed, run.algorithm, run.cloud, run.state, run.folder]), [0, 2, 3, 4, 5]));
      if (focused) place.querySelector(`[data-key="${focused}"]`)?.focus();
    }
    return { id: "runs", title: "Runs", el, update: () => draw(false) };
  };
  function pick(key, on) {
    picked = on ? [...picked.filter((other) => other !== key), key].slice(-8) : picked.filter((other) => other !== key);
    version = "";
    tick(true);
  }

  const liveSection = (app_) => {
    const el = section("live", "Servers and devices now", "Who is doing what, how many mixes each server has missed, and when each device was last heard from (on the run’s clock).");
    const choice = fedbcd.choice("run", [], () => { start = 0; update(); });
    const sort = fedbcd.choice("sorted by", [["contact-1", "latest contact"], ["contact-0", "oldest contact"], ["activations-1", "most uploads"], ["activations-0", "fewest uploads"], ["device-0", "number"]], () => { start = 0; devices(); });
    const only = fedbcd.choice("state", [["", "all"], ["idle", "idle"], ["asking", "asking"], ["working", "working"], ["lost", "lost"], ["left", "left"]], () => { start = 0; devices(); });
    const servers = h("div"), states = h("p"), place = h("div");
    const back = h("button", { type: "button", onclick: () => { start = Math.max(0, start - 20); devices(); } }, "Earlier"), on = h("button", { type: "button", onclick: () => { start += 20; devices(); } }, "Later");
    const controls = h("div", { class: "controls" }, sort.el, only.el, back, on);
    el.append(h("div", { class: "controls" }, choice.el), servers, h("h3", {}, "Devices"), states, controls, place);
    let start = 0, busy = false;
    const run = () => app_.view.runs.find((one) => one.key === choice.select.value) || app_.view.runs.find((one) => one.servers);
    async function devices() {
      const one = run();
      if (!one || one.key === "deployment" || busy) return;
      busy = true;
      try {
        const [column, down] = sort.select.value.split("-");
        const page = await get("api/devices", { run: one.key, sort: column, down, start, only: only.select.value });
        back.disabled = start === 0;
        on.disabled = start + page.rows.length >= page.total;
        place.replaceChildren(table(`Devices ${page.total ? page.start + 1 : 0} to ${page.start + page.rows.length} of ${page.total} that were heard from`, ["device", "server", "state", "last contact", "uploads", "steps", "offline rounds"], page.rows.map((row) => row.map((value, k) => (k === 3 ? short(value) : value))), [0, 2]));
      } catch (error) { place.replaceChildren(h("p", { class: "muted" }, `The table of devices could not be read (${error.message}).`)); } finally { busy = false; }
    }
    function update() {
      const runs = app_.view.runs.filter((one) => one.servers);
      choice.set(runs.map((one) => [one.key, one.name]));
      const one = run();
      el.hidden = !one;
      if (!one) return;
      const now = one.summary.clock, shown = one.servers.length > 100 ? [...one.servers].sort((a, b) => b.missed - a.missed).slice(0, 100) : one.servers;
      servers.replaceChildren(table(`Servers of ${one.name}, ${["finished", "stopped"].includes(one.summary.state) ? "at the end, " : ""}clock ${short(now)}${shown.length < one.servers.length ? ": the 100 that missed most mixes" : ""}`, ["server", "state", "for", "phases", "uploads", "mixes missed"], shown.map((x) => [x.server, x.state, short(Math.max(0, now - x.since - 1e-4)), x.phases, one.key === "deployment" ? null : x.uploads, x.missed]), [0, 1]));
      const counts = Object.entries(one.devices.states);
      states.textContent = one.key === "deployment" ? "Devices of a deployment are listed under Roles, where their addresses are known." : counts.map(([name, count]) => `${count} ${name}`).join(", ");
      controls.hidden = one.key === "deployment";
      if (one.key === "deployment") place.replaceChildren(); else devices();
    }
    return { id: "live", title: "Live", el, update };
  };

  const roleSection = (app_) => {
    const el = section("roles", "Roles of the deployment", "What each process says of itself, asked once a second over its health port.");
    const place = h("div"), below = h("div"), stands = h("p"), kept = h("summary"), fold = h("details", {}, kept);
    const shown = h("div", {}, place, below);
    el.append(stands, fold, shown);
    const sum = (roles, key) => {
      const total = new Map();
      for (const role of roles) for (const [name, value] of Object.entries(role.totals[key] || {})) total.set(name, (total.get(name) || 0) + value);
      return [...total].sort((a, b) => b[1] - a[1]);
    };
    return { id: "roles", title: "Roles", el, update: () => {
      const roles = app_.view.deployment || [];
      el.hidden = !app_.view.deployment;
      if (el.hidden) return;
      const { state, words } = app_.view.standing, over = state === "finished" || state === "stopped";
      stands.textContent = words;
      stands.hidden = !words;
      fold.hidden = !over;
      kept.textContent = `${roles.length} roles, ${roles.filter((role) => role.error).length} of them ended: what they said last`;
      const parent = over ? fold : el;
      if (shown.parentElement !== parent) parent.append(shown);
      place.replaceChildren(table(`${roles.length} roles, ${roles.filter((role) => role.error).length} without an answer`, ["role", "state", "phase or round", "uploads", "peers", "heard", "waits for", "in", "out", "refused", "retries"], roles.slice(0, 300).map((role) => [
        role.actor, role.error ? (over ? "ended" : `no answer: ${role.error}`) : role.state || (role.ready ? "ready" : "not ready"), role.phase ?? role.round ?? role.activation, role.active === undefined ? null : `${role.received} of ${role.active}`, role.peers,
        role.silent_s === null ? "never" : `${role.silent_s} s ago`, role.waits_for, bytes(role.totals.bytes_in), bytes(role.totals.bytes_out), Object.values(role.totals.refused || {}).reduce((a, b) => a + b, 0), role.totals.retries]), [0, 1, 6]));
      const refused = sum(roles, "refused"), waiting = sum(roles, "waiting_s");
      const metrics = app_.view.metrics || {}, mixed = metrics.fedbcd_staleness_rounds_count;
      const apart = Object.entries(metrics).map(([name, value]) => [/server="(\d+)"/.exec(name)?.[1], value]).filter(([server]) => server !== undefined);
      below.replaceChildren(
        apart.length ? table("‖z̄ − zₙ‖ of the models that the coordinator heard last", ["server", ...apart.map(([server]) => server)], [["distance", ...apart.map(([, value]) => short(value))]]) : "",
        mixed ? h("p", {}, `A server that was mixed had missed ${short(metrics.fedbcd_staleness_rounds_sum / mixed)} mixes on average.`) : "",
        waiting.length ? table("Waiting by cause, all roles together", ["cause", "seconds"], waiting.map(([name, value]) => [name, short(value)])) : "",
        refused.length ? table("Refused inputs by reason", ["reason", "times"], refused.map(([name, value]) => [name, short(value)])) : h("p", { class: "muted" }, "No input has been refused."));
    } };
  };

  // --------------------------------------------------------------------------------------------------------------------- the loop
  const source = { timeline: (run, begin, end) => get("api/timeline", { run, begin, end }).catch(() => null) };
  function showPlans(view) {
    for (const run of view.runs) run.plan = plans.get(run.key) || null;
    return view;
  }
  async function fetchPlans() {
    for (const run of app ? app.view.runs : []) {
      if ((run.timeline ? run.timeline.total_phases : 0) < 10) continue;
      const plan = await get("api/plan", { run: run.key }).catch(() => null);
      if (plan && JSON.stringify(plan) !== JSON.stringify(plans.get(run.key))) { plans.set(run.key, plan); showPlans(app.view); app.refresh(["plan"]); }
    }
  }
  // An answer names what is as it was; `before` is the view that it was before.
  function filled(part, before) {
    const { same, grown, ...found } = part;
    for (const name of same || []) found[name] = before[name];
    for (const [name, rows] of Object.entries(grown || {})) found[name] = Object.fromEntries(Object.entries(rows).map(([column, more]) => [column, [...before[name][column], ...more]]));
    return found;
  }
  function whole(answer, before) {
    const runs = answer.runs.map((run) => (run.same ? filled(run, before.runs.find((one) => one.key === run.key)) : run));
    return { ...filled(answer, before), runs };
  }
  let timer = 0, asking = false, trouble = false, ticks = 0;
  async function tick(now) {
    if (asking) { if (now) again(50); return; }
    asking = true;
    let wait = document.hidden ? 5000 : 1000;
    try {
      if (picked === null || ticks % 5 === 0) list = await get("api/runs");
      if (picked === null) picked = firstPick(list);
      ticks += 1;
      const answer = await get("api/view", { runs: picked.join(","), version });
      if (answer) {
        const view = whole(answer, app && app.view);
        version = view.version;
        const unread = view.runs.reduce((sum, run) => sum + run.unread, 0);
        if (unread > 4096) { view.notices = [...(view.notices || []), `reading: ${bytes(unread)} of logs to go`]; wait = 50; }
        showPlans(view);
        if (!app) app = window.app = fedbcd.mount(root, view, source, [["summary", pickSection], ["summary", roleSection], ["devices", liveSection]]);
        else app.show(view);
      } else if (app) {
        app.refresh(["runs"]);
      }
      if (trouble) { trouble = false; if (app) app.show(app.view); }
      if (ticks % 5 === 1) fetchPlans();
    } catch (error) {
      trouble = true;
      const text = `The dashboard does not answer (${error.message}). It is asked again every few seconds.`;
      if (app) app.show({ ...app.view, notices: [text] }); else root.replaceChildren(h("p", { class: "notice", role: "status" }, text));
      version = "";
      wait = 3000;
    } finally { asking = false; }
    again(wait);
  }
  function again(wait) { clearTimeout(timer); timer = setTimeout(tick, wait); }
  function firstPick(runs) {  // the runs that were started together with the latest one
    if (!runs.length) return [];
    const folder = (run) => run.folder.split("/").slice(0, -1).join("/");
    return runs.filter((run) => folder(run) === folder(runs[0])).slice(0, 3).map((run) => run.key).reverse();
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) tick(true); });
  tick();
})();
