"""The dashboard in a real browser: live updates arrive, runs are picked and compared, the slider
moves the curve, trouble is told.
"""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the dashboard is tested with the extra 'dashboard'")

from fedbcd.dashboard.app import make_app
from fedbcd.dashboard.deployment import WatchedDeployment
from fedbcd.dashboard.library import Library
from support.roles import Roles, over
from support.runs import train
from support.waiting import wait_for
from support.web import complaints, serving, text_of, unfold

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("finished")
    for case in ("fedbcd-sync", "fedbcd-async"):
        train(case, rounds=12, evaluate_every=2, certify_every=1, out=base / case)
    return base


@contextmanager
def opened(
    browser: Any, library: Library, deployment: WatchedDeployment | None = None
) -> Iterator[None]:
    """The dashboard of these runs in the browser; nothing may complain until the block ends."""
    with serving(make_app(library, deployment)) as site:
        complaints(browser)  # of other tests
        browser.get(site.address)
        try:
            yield
            assert complaints(browser) == []
        finally:
            browser.get("about:blank")
            complaints(browser)  # requests that were under way


def _rounds(browser: Any) -> int:
    return int(
        browser.execute_script(
            "return window.app ? Math.max(0, ...window.app.view.runs.map((r) =>"
            " r.summary.rounds)) : 0"
        )
    )


def test_a_run_in_progress_advances_on_the_page(browser: Any, tmp_path: Path) -> None:
    """A real training in another thread, slowed down so that it can be watched."""
    goes_on = threading.Event()
    job = threading.Thread(
        target=lambda: train(
            "fedbcd-i-async",
            rounds=1_000_000,
            evaluate_every=5,
            out=tmp_path / "live",
            on_round=lambda _: time.sleep(0.05),
            should_stop=goes_on.is_set,
        )
    )
    job.start()
    try:
        wait_for(lambda: (tmp_path / "live" / "events.jsonl").exists())
        with opened(browser, Library([tmp_path])):
            first = wait_for(lambda: _rounds(browser) > 3 and _rounds(browser))
            rows = browser.execute_script("return window.app.view.runs[0].history.round.length")
            wait_for(lambda: _rounds(browser) > first + 5)
            wait_for(
                lambda: (
                    browser.execute_script("return window.app.view.runs[0].history.round.length")
                    > rows
                )
            )
            assert "goes on" in text_of(browser, "#summary table")
            assert "collecting" in text_of(browser, "#live table")
            wait_for(lambda: "that were heard from" in text_of(browser, "#live"))
            goes_on.set()
            job.join()
            wait_for(lambda: "live" in text_of(browser, "#runs table"))
    finally:
        goes_on.set()
        job.join()


def test_every_view_renders_and_runs_can_be_picked(browser: Any, finished: Path) -> None:
    with opened(browser, Library([finished])):
        unfold(browser)
        for name in (
            "runs",
            "live",
            "summary",
            "next",
            "curves",
            "devices",
            "distances",
            "certificates",
            "protocol",
            "time",
            "partition",
        ):
            assert len(text_of(browser, f"#{name}")) > 60, name
        assert not browser.find_element("css selector", "#roles").is_displayed()
        assert browser.execute_script("return window.app.view.runs.length") == 2
        assert "cloud.name" in text_of(browser, "#settings")
        browser.execute_script("document.querySelector('#runs input[type=checkbox]').click()")
        wait_for(lambda: browser.execute_script("return window.app.view.runs.length") == 1)


def test_the_slider_moves_the_curve(browser: Any, finished: Path) -> None:
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    with opened(browser, Library([finished / "fedbcd-async"])):
        wait_for(lambda: "With B =" in text_of(browser, "#plan"))
        label = browser.find_elements("css selector", "#plan .chart")[1].get_attribute("aria-label")
        words = text_of(browser, "#plan p[aria-live]")
        browser.find_element("css selector", "#plan input[type=range]").send_keys(keys.END)
        wait_for(lambda: text_of(browser, "#plan p[aria-live]") != words)
        assert (
            browser.find_elements("css selector", "#plan .chart")[1].get_attribute("aria-label")
            != label
        )


def test_zooming_fetches_details(browser: Any, finished: Path) -> None:
    with opened(browser, Library([finished / "fedbcd-async"])):
        wait_for(lambda: text_of(browser, "#protocol table"))
        canvas = browser.find_element("css selector", "#protocol canvas.timeline")
        for key in ("n", "n", "+", "+"):
            canvas.send_keys(key)
        wait_for(lambda: "Round " in text_of(browser, "#protocol .told"))
        wait_for(lambda: any("api/timeline" in e for e in _requests(browser)))


def _requests(browser: Any) -> list[str]:
    return list(
        browser.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    )


def test_a_log_that_breaks_while_one_looks_is_told(
    browser: Any, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "fedbcd-async", tmp_path / "run")
    log = tmp_path / "run" / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:200]))
    with opened(browser, Library([tmp_path])):
        wait_for(lambda: _rounds(browser) > 0)
        with log.open("ab") as file:
            file.write(b"garbage <img src=x onerror=alert(1)>\n")
        wait_for(lambda: "line 201 is damaged" in text_of(browser, "#first .card"))
        assert _rounds(browser) > 0
        assert not browser.find_elements("css selector", "img")


def test_a_dashboard_that_goes_away_is_told_and_with_a_token_the_page_opens(
    browser: Any, finished: Path
) -> None:
    with serving(make_app(Library([finished]), token=TOKEN)) as site:
        browser.get(f"{site.address}?token={TOKEN}")
        wait_for(lambda: text_of(browser, "#summary table"))
        assert TOKEN not in browser.current_url
    wait_for(lambda: "does not answer" in text_of(browser, "[role=status]"))
    complaints(browser)  # failed requests are what is expected here
    browser.get("about:blank")


@pytest.mark.parametrize(
    ("end", "words"),
    [(True, "finished, 12 rounds"), (False, "stopped at round 12; go on with fedbcd up")],
)
def test_a_deployment_that_is_over_is_no_row_of_failures(
    end: bool, words: str, browser: Any, finished: Path, tmp_path: Path
) -> None:
    """One sentence, with the roles folded away."""
    folder = over(finished / "fedbcd-async", tmp_path / "up", end)
    deployment = WatchedDeployment(folder=folder)
    deployment.start()
    try:
        with opened(browser, Library([folder]), deployment):
            wait_for(lambda: words in text_of(browser, "#roles"))
            seen = "return document.querySelector('#roles table').checkVisibility()"
            assert not browser.execute_script(seen)  # in one step: it is drawn anew every second
            assert "no answer" not in browser.find_element("css selector", "#page").text
            browser.find_element("css selector", "#roles summary").click()
            wait_for(lambda: browser.execute_script(seen))
            assert "ended" in text_of(browser, "#roles table")
            assert words in text_of(browser, "#next li") or end
    finally:
        deployment.stop()


def test_a_deployment_shows_its_roles(browser: Any, tmp_path: Path) -> None:
    """Statuses as the roles of a deployment tell them, from small servers of the test's own."""
    roles = Roles()
    totals = {"refused": {"<b>too far</b>": 2}, "waiting_s": {"devices": 3.5}}
    addresses = [roles.add("coordinator", clock=1.0, round=2, rounds=9, released={"0": 1})]
    addresses += [
        roles.add(
            f"server/{n}",
            clock=1.0,
            phase=0,
            state="waiting for the coordinator",
            received=1,
            active=2,
        )
        for n in range(2)
    ]
    roles.statuses["server/1"]["totals"] = totals
    deployment = WatchedDeployment(addresses)
    deployment.start()
    try:
        with opened(browser, Library([tmp_path]), deployment):
            wait_for(lambda: "server/1" in text_of(browser, "#roles"))
            assert "<b>too far</b>" in text_of(browser, "#roles")
            assert "22 %" in text_of(browser, "#summary")
            assert "waiting" in text_of(browser, "#live table")
            assert not browser.find_element("css selector", "#curves").is_displayed()
            roles.say("coordinator", clock=2.0, round=5, rounds=9, released={"1": 1})
            wait_for(lambda: "55 %" in text_of(browser, "#summary"))
            roles.stop("coordinator")
            wait_for(lambda: text_of(browser, "#next li").startswith("coordinator (for"))
            assert "levelled off" not in text_of(browser, "#next")
    finally:
        deployment.stop()
        roles.close()
