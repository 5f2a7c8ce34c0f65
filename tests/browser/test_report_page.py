"""The report in a real browser: every view is drawn, nothing complains, the keyboard works, texts
stay texts.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.record.timeline import Timeline
from fedbcd.report.page import page as html_of, view_of, write_report
from fedbcd.report.runs import Extras
from fedbcd.report.view import RunRecord
from support.runs import fedbcd, train, write_job
from support.waiting import wait_for
from support.web import complaints, show, text_of, unfold

SECTIONS = (
    "summary",
    "next",
    "curves",
    "devices",
    "distances",
    "certificates",
    "protocol",
    "time",
    "partition",
    "plan",
    "settings",
)
EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
# How many different colours a canvas shows: a blank one has one.
COLOURS = """const c = document.querySelector(arguments[0]), s = new Set();
const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
for (let k = 0; k < d.length; k += 16) s.add((d[k] << 16) + (d[k + 1] << 8) + d[k + 2]);
return s.size"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one job, another job on the async cloud, measured in another way, with a title
    that tries to be markup.
    """
    base = tmp_path_factory.mktemp("report")
    changes: dict[str, Any] = {"run.rounds": 12, "run.certify_every": 1}
    job = write_job(base / "job.toml", **changes)
    for seed in "01":
        fedbcd("run", job, "--seed", seed, "--out", base / "runs" / seed)
    changes |= {
        "cloud.name": "async",
        "cloud.first": 2,
        "run.measure": "pooled-labels",
        "title": EVIL,
    }
    other = write_job(base / "job.toml", **changes)
    fedbcd("run", other, "--out", base / "runs" / "other")
    write_report([base / "runs"], base / "report.html")
    return base / "report.html"


@pytest.fixture
def page(browser: Any, report: Path) -> Any:
    browser.set_window_size(1280, 1000)
    show(browser, report)
    unfold(browser)
    return browser


def test_every_view_is_drawn_without_a_complaint(page: Any) -> None:
    for name in SECTIONS:
        assert len(text_of(page, f"#{name}")) > 60, name
    for chart in page.find_elements("css selector", ".uplot canvas"):
        assert chart.size["width"] > 100
    wait_for(lambda: len(page.find_elements("css selector", ".uplot")) == 1 + 3 + 3 + 2 + 3 + 2)
    wait_for(lambda: page.execute_script(COLOURS, "#protocol canvas.timeline") >= 4)
    assert page.execute_script(COLOURS, "#partition canvas") >= 3
    assert len(page.find_elements("css selector", "#devices figure svg path")) == 4
    assert complaints(page) == []


def test_accuracies_by_different_measures_are_said_not_to_compare(page: Any) -> None:
    text = text_of(page, "#summary")
    assert "Personal scores of these runs do not compare: in " in text
    assert "each label counts by its share of the device's own samples; in " in text
    assert "all test samples of a device's labels count alike." in text


def test_seeds_are_one_line_with_a_band(page: Any) -> None:
    assert "(2 seeds)" in text_of(page, "#curves .legend")
    assert "least to most" in _table_of(page, "#curves figure")


def test_one_seed_twice_is_no_second_seed(browser: Any, tmp_path: Path) -> None:
    for name in "ab":
        train("fedbcd-sync", rounds=2, record={"title": "mine"}, out=tmp_path / name)
    _open(browser, tmp_path)
    assert text_of(browser, "#curves .legend") == "mine (2 runs of one seed)"
    unfold(browser)
    names = browser.execute_script(
        "return [...document.querySelectorAll('#next h3')].map((e) => e.textContent)"
    )
    assert [name.startswith("mine, seed 0 [") for name in names] == [True, True]
    assert len(set(names)) == 2


def _open(browser: Any, runs: Path, plan: bool = False) -> None:
    """The report on these runs."""
    write_report([runs], runs / "report.html", plan=plan)
    show(browser, runs / "report.html")


def test_runs_without_personal_models_are_drawn_without_gain_and_are_what_others_gain_against(
    browser: Any, tmp_path: Path
) -> None:
    for case in ("fedprox-sync", "fedbcd-sync"):
        train(case, rounds=6, out=tmp_path / case)
    _open(browser, tmp_path)
    paths = (
        "return [...document.querySelectorAll('#devices figure')].map((f) =>"
        " f.querySelectorAll('svg path').length)"
    )
    assert browser.execute_script(paths) == [2, 1]
    assert text_of(browser, "h1").count("fedbcd-sync ") == 1
    tiles = [one.text.split("\n") for one in browser.find_elements("css selector", ".tile")]
    assert [tile[0] for tile in tiles[:3]] == [
        "Personal accuracy",
        "Worst tenth accuracy",
        "Global accuracy",
    ]
    assert all("against fedprox-sync" in tile for tile in tiles[:3])
    assert "to " in tiles[3][0]
    assert text_of(browser, ".devices figcaption span") == "Each device of fedbcd-sync"
    assert 1 <= len(browser.find_elements("css selector", "ol.next li")) <= 3
    shown = text_of(browser, "#devices")
    assert (
        "Gain is against fedprox-sync: the best run of this job without personal models." in shown
    )
    assert "fedprox-sync has no personal models" in shown
    _open(browser, tmp_path / "fedbcd-sync")
    shown = text_of(browser, "#devices")
    assert (
        "Gain is against the global models of the run itself: no finished run of FedAvg or FedProx"
        in shown
    )
    assert complaints(browser) == []


def test_what_is_said_of_uploads_certificates_and_labels_is_so(
    browser: Any, tmp_path: Path
) -> None:
    fedbcd(
        "run",
        write_job(
            tmp_path / "job.toml",
            **{"federation.servers": 2, "federation.devices": 1, "federation.active": 1},
        ),
        "--out",
        tmp_path / "a",
    )
    (tmp_path / "a" / "deploy.toml").touch()
    train("fedprox-sync", rounds=2, certify_every=0, out=tmp_path / "b")
    _open(browser, tmp_path)
    unfold(browser)
    time, partition, certificates = (
        text_of(browser, f"#{name}") for name in ("time", "partition", "certificates")
    )
    assert "Uploads per device: 4, mean 4." in time
    axes = "return [...document.querySelectorAll('#curves option')].map((e) => e.value)"
    assert browser.execute_script(axes) == ["round", "bytes"]  # a deployment's clock is in seconds
    clocks = [row.text for row in browser.find_elements("css selector", "#summary tbody tr")]
    assert re.search(r" \d+(\.\d+)? (ms|s) ", clocks[0])
    assert "3 of 10 labels each. Nobody owns labels " in partition
    assert "b has no certificates: its algorithm keeps no personal models." in certificates
    assert "the run goes on" not in certificates
    assert "no device owns labels" in text_of(browser, "#next li")


def test_what_is_hidden_takes_no_room(browser: Any, tmp_path: Path) -> None:
    """Whatever else a style says of canvases, labels and controls."""
    data = [(torch.randn(9, 3), torch.randn(9, 1)) for _ in range(4)]
    fb.train(
        fb.Federation(lambda: nn.Linear(3, 1), nn.functional.mse_loss, data, servers=2),
        fb.FedBCD(),
        rounds=3,
        out=tmp_path / "run",
    )
    log = tmp_path / "run" / "events.jsonl"
    log.write_bytes(
        log.read_bytes().splitlines(keepends=True)[0]
    )  # no phase yet: nothing to choose from, nothing to draw
    _open(browser, tmp_path)
    shown = (
        "return [...document.querySelectorAll('[hidden]')].map((e) => [e.outerHTML.slice(0, 60),"
        " e.getClientRects().length])"
    )
    hidden = browser.execute_script(shown)
    assert len(hidden) >= 4
    assert [element for element, boxes in hidden if boxes] == []


# Share of each colour over the rows of the timeline, without the axis: [update, waiting, the rest].
SHARES = """const c = document.querySelector('#protocol canvas.timeline'), g = c.getContext('2d');
const k = window.devicePixelRatio || 1;
const style = (name) => { const e = document.createElement('i');
  e.style.color = `var(--${name})`; document.body.append(e);
  const found = getComputedStyle(e).color.match(/\\d+/g).map(Number); e.remove(); return found; };
const wanted = [style('update'), style('waiting')], sums = [0, 0, 0], rows = arguments[0];
const d = g.getImageData(64 * k, 4 * k, c.width - 76 * k, 44 * k * rows).data;
const wide = c.width - 76 * k;
for (let row = 0; row < 44 * k * rows; row += 1) {
  if (row % (44 * k) < 3 * k || row % (44 * k) >= 41 * k) continue;
  for (let p = 4 * row * wide; p < 4 * (row + 1) * wide; p += 4) {
    const near = wanted.findIndex((w) => w.every((v, j) => Math.abs(v - d[p + j]) < 24));
    sums[near < 0 ? 2 : near] += 1;
  }
}
const all = sums[0] + sums[1] + sums[2]; return sums.map((v) => v / all)"""


def _sync_timeline(rounds: int, servers: int, update: float) -> Timeline:
    """Rounds of length 1, of which every server works for a share `update` and waits for the
    rest.
    """
    timeline = Timeline({"identity": {"servers": [[n] for n in range(servers)], "seed": 0}})
    for n in range(servers):
        timeline.open_phase(n, 0, 0.0)
    for round_ in range(rounds):
        for n in range(servers):
            timeline.end_phase(n, round_ + update)
        timeline.mix(range(servers), round_ + 1.0)
        for n in range(servers) if round_ + 1 < rounds else ():
            timeline.open_phase(n, round_ + 1, round_ + 1.0)
    for place in range(len(timeline.phases)):
        timeline.phases.released[place] = timeline.phases.mixed[place]
    timeline.now = float(rounds)
    timeline.end = {"rounds": rounds}
    return timeline


@pytest.mark.parametrize(
    "rounds", [600, 3_000, 12_000]
)  # of 12,000 rounds the first are known as shares only
def test_phases_too_short_to_be_drawn_are_drawn_as_shares_of_time(
    rounds: int, browser: Any, tmp_path: Path
) -> None:
    """Sixty hundredths of the time are waiting, and so are sixty hundredths of the picture."""
    record = RunRecord(tmp_path / "run", _sync_timeline(rounds, 4, 0.4), Extras())
    (tmp_path / "report.html").write_text(html_of(view_of([record], plan=False)))
    assert (tmp_path / "report.html").stat().st_size < 700_000
    browser.set_window_size(1280, 1000)
    show(browser, tmp_path / "report.html")
    canvas = browser.find_element("css selector", "#protocol canvas.timeline")
    canvas.send_keys(pytest.importorskip("selenium.webdriver.common.keys").Keys.HOME)
    wait_for(lambda: "shares of time" in text_of(browser, "#protocol p.muted"))
    update, waiting, rest = browser.execute_script(SHARES, 4)
    assert update == pytest.approx(0.4, abs=0.04)
    assert waiting == pytest.approx(0.6, abs=0.06)
    assert rest < 0.06  # the edges between the two
    _click(browser, "Longest round")
    wait_for(lambda: not browser.find_element("css selector", "#protocol p.muted").is_displayed())
    assert text_of(browser, "#protocol .told").startswith("Round ")
    assert complaints(browser) == []


def _click(browser: Any, label: str) -> None:
    browser.execute_script(
        "document.querySelector(`button[aria-label='${arguments[0]}']`).click()", label
    )


def _table_of(page: Any, selector: str) -> str:
    page.execute_script(
        "document.querySelector(arguments[0] + ' details.data').open = true", selector
    )
    return str(wait_for(lambda: text_of(page, f"{selector} details.data table")))


def test_the_axis_can_be_rounds_clock_or_bytes_and_logarithmic(page: Any) -> None:
    choose = """const s = document.querySelector('#curves .controls select');
    s.value = arguments[0]; s.dispatchEvent(new Event('change'))"""
    label = lambda: page.find_element("css selector", "#curves .chart").get_attribute("aria-label")  # noqa: E731
    assert "against clock (virtual time)" in label()
    page.execute_script(choose, "bytes")
    assert "against models sent, in bytes" in label()
    table = _table_of(page, "#curves figure")
    assert "kB" in table
    assert "0 B" in table
    page.execute_script("document.querySelector('#curves .controls input').click()")
    wait_for(lambda: "0 B" not in text_of(page, "#curves figure details.data table"))
    assert complaints(page) == []


def test_a_click_on_a_name_takes_its_line_away_everywhere(page: Any) -> None:
    pick = "return document.querySelectorAll('#first .pick')[0].click()"
    label = "return document.querySelector('#curves .chart').getAttribute('aria-label')"
    name = text_of(page, "#first .pick")
    assert name in page.execute_script(label)
    page.execute_script(pick)
    wait_for(lambda: name not in page.execute_script(label))
    assert (
        page.execute_script(
            "return document.querySelector('#first .pick').getAttribute('aria-pressed')"
        )
        == "false"
    )
    page.execute_script(pick)
    wait_for(lambda: name in page.execute_script(label))


def test_texts_from_a_job_stay_texts(page: Any) -> None:
    assert page.execute_script("return window.hacked") is None
    assert not page.find_elements("css selector", "img")
    assert EVIL in text_of(page, "#summary")
    assert complaints(page) == []


def test_the_keyboard_reads_charts_and_walks_the_timeline(page: Any) -> None:
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    chart = page.find_element("css selector", "#curves .chart")
    chart.send_keys(keys.HOME)
    wait_for(lambda: "clock (virtual time) 0: " in text_of(page, "#curves .readout"))
    canvas = page.find_element("css selector", "#protocol canvas.timeline")
    jump = "const i = document.querySelector('#protocol input'); i.value = 0;"
    page.execute_script(f"{jump} i.dispatchEvent(new Event('change'))")
    wait_for(lambda: text_of(page, "#protocol .told").startswith("Round 0, clock 0"))
    canvas.send_keys("n")
    words = wait_for(
        lambda: "Round 1," in text_of(page, "#protocol .told") and text_of(page, "#protocol .told")
    )
    assert "was ready last: its device" in words
    before = canvas.get_attribute("aria-label")
    canvas.send_keys("+")
    wait_for(lambda: canvas.get_attribute("aria-label") != before)
    canvas.send_keys(keys.HOME)
    assert complaints(page) == []


def test_the_planners_slider_changes_the_curve(page: Any) -> None:
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    slider = page.find_element("css selector", "#plan input[type=range]")
    words, label = text_of(page, "#plan p[aria-live]"), _labels(page)
    slider.send_keys(keys.END)
    wait_for(lambda: text_of(page, "#plan p[aria-live]") != words)
    assert _labels(page) != label
    assert "4 of 4" in text_of(page, "#plan output")
    assert "none is left out" in text_of(page, "#plan p[aria-live]")
    assert "waits 0 mixes" not in text_of(page, "#plan p[aria-live]")


def _labels(page: Any) -> list[str]:
    return [
        chart.get_attribute("aria-label")
        for chart in page.find_elements("css selector", "#plan .chart")
    ]


def test_dark_light_phone_and_print(page: Any) -> None:
    light = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    for _ in range(2):
        page.find_element("css selector", "header button.theme").click()
    assert page.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") != light
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 700, "deviceScaleFactor": 2, "mobile": True},
    )
    wait_for(lambda: page.execute_script("return document.documentElement.scrollWidth <= 360"))
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    paper = {"width": 680, "height": 960, "deviceScaleFactor": 1, "mobile": False}
    page.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", paper)
    cut = """return [...document.querySelectorAll('canvas, svg, table, figure')]
    .filter((e) => e.getBoundingClientRect().right > 681).map((e) => e.outerHTML.slice(0, 80))"""
    wait_for(lambda: page.execute_script(cut) == [])
    assert page.find_element("css selector", "#settings table").is_displayed()
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert len(page.print_page()) > 20_000
    assert complaints(page) == []


def test_what_can_be_focused_has_a_name(page: Any) -> None:
    """Screen readers: every control and every drawing says what it is."""
    nameless = page.execute_script(
        """const all = 'button, select, input, canvas, svg:not([aria-hidden]), [tabindex="0"]';
        return [...document.querySelectorAll(all)].filter((e) => {
        const labels = e.labels && [...e.labels].map((l) => l.textContent).join('');
        const text = e.getAttribute('aria-label') || labels || e.textContent;
        return !text.trim() && !e.closest('.chart') }).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    levels = page.execute_script(
        "return [...document.querySelectorAll('h1, h2, h3')].map((e) => Number(e.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1


AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text(encoding="utf-8")
JUDGE = """const done = arguments[0];
const rules = { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] };
axe.run(document, rules).then((found) => done(found.violations.map(
  (one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.html.slice(0, 90))}`)))"""


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_holds_the_accessibility_guidelines(
    width: int, scheme: str, browser: Any, report: Path
) -> None:
    """WCAG 2.1 A and AA, as far as axe-core can tell: contrast, names, roles, order."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        show(browser, report)
        unfold(browser)
        browser.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE})
        assert browser.execute_async_script(JUDGE) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_figure_can_be_kept_as_picture_and_as_data(page: Any, tmp_path: Path) -> None:
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    press = """const figure = document.querySelectorAll(arguments[0])[arguments[1]];
    figure.querySelector(`[aria-label='${arguments[2]}']`).click()"""
    name = "personal-accuracy"
    for label in ("Save as PNG", "Save as SVG", "Save the data as CSV"):
        page.execute_script(press, "#curves figure", 0, label)
    kept = [tmp_path / f"{name}.{ending}" for ending in ("png", "svg", "csv")]
    wait_for(lambda: all(path.is_file() for path in kept))
    png, svg, csv = (path.read_bytes() for path in kept)
    assert png.startswith(b"\x89PNG")
    assert len(png) > 5_000
    assert svg.startswith(b"<svg")
    assert svg.count(b"<polyline") == 2
    assert csv.startswith(b"run,clock (virtual time),value,least to most\n")
    page.execute_script(press, "#devices figure", 0, "Save as SVG")
    drawn = tmp_path / "personal-scores-over-devices.svg"
    wait_for(drawn.is_file)
    assert b"<path" in drawn.read_bytes()


def test_the_result_is_copied_as_markdown(page: Any) -> None:
    page.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    page.find_element("css selector", ".actions button").click()
    read = "navigator.clipboard.readText().then(arguments[0], (e) => arguments[0](String(e)))"
    text = wait_for(lambda: page.execute_async_script(read))
    assert text.startswith(f"**{text_of(page, 'h1')}**")
    assert "- Personal accuracy: " in text
    assert "| run | personal | worst tenth | global | state |" in text


def test_two_runs_that_share_nothing_are_one_card(browser: Any, tmp_path: Path) -> None:
    train("fedbcd-sync", rounds=2, out=tmp_path / "digits")
    pairs = [(torch.randn(9, 3), torch.randn(9)) for _ in range(8)]
    lines = fb.Federation(
        lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)),
        nn.functional.mse_loss,
        [(one, one) for one in pairs],
        servers=2,
    )
    fb.train(lines, fb.FedBCD(), rounds=2, out=tmp_path / "lines")
    _open(browser, tmp_path)
    assert text_of(browser, "h1") == "Nothing to compare: digits by accuracy and lines by mse."
    assert text_of(browser, ".card").startswith("These runs share no measure (")
    assert not browser.find_element("css selector", "#first .pair").is_displayed()
    assert not browser.find_elements("css selector", ".tile, ol.next li")
    assert f"fedbcd report {tmp_path / 'lines'}" in text_of(browser, ".card code")
    assert complaints(browser) == []


def test_a_broken_log_shows_a_message_and_what_came_before(browser: Any, tmp_path: Path) -> None:
    train("fedbcd-async", rounds=6, out=tmp_path / "run")
    log = tmp_path / "run" / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:150], b"\xff\xff<b>\n", *lines[150:]]))
    write_report([tmp_path / "run"], tmp_path / "report.html", plan=False)
    browser.get((tmp_path / "report.html").as_uri())
    wait_for(lambda: "line 151 is damaged" in text_of(browser, ".card"))
    assert "resume=True" in text_of(browser, ".card code")
    assert "mean" in text_of(browser, "#protocol caption")
    assert complaints(browser) == []


def test_a_log_that_has_just_begun_shows_a_message(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text('{"fedbcd_log": 1')
    write_report([tmp_path / "run"], tmp_path / "report.html", plan=False)
    browser.get((tmp_path / "report.html").as_uri())
    wait_for(lambda: "has no whole line yet" in text_of(browser, ".card"))
    assert text_of(browser, "h1") == "This log cannot be read."
    assert complaints(browser) == []


def test_actors_of_a_cluster_are_shown_where_there_were_some(
    browser: Any, report: Path, tmp_path: Path
) -> None:
    run = train("fedbcd-sync", rounds=2, out=tmp_path / "run")
    shards = [
        {"node": "a1", "devices": 9, "expected_share": 0.5, "seconds": 3.0},
        {"node": EVIL, "devices": 7, "expected_share": 0.5, "seconds": 1.0},
    ]
    run.summary["cluster"] = {
        "actors": 2,
        "shards": shards,
        "bytes": {"models": 1, "work": 2, "sums": 3000, "rows": 4},
        "rebuilt": 1,
    }
    run.save(tmp_path / "run")
    write_report([tmp_path / "run"], tmp_path / "report.html")
    show(browser, tmp_path / "report.html")
    unfold(browser)
    shown = text_of(browser, "#cluster")
    assert "75 %" in shown
    assert "1.5 times as long as the mean" in shown
    assert "3 kB of sums in" in shown
    assert EVIL in shown
    assert complaints(browser) == []
    show(browser, report)
    assert not browser.find_element("css selector", "#cluster").is_displayed()
