"""The pictures of real pages in README and docs, taken with headless Chromium.

fedbcd run examples/diversity.toml --out runs/pictures
python benchmarks/screenshots.py runs/pictures --out docs/images
"""

import argparse
import base64
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fedbcd.dashboard.app import make_app
from fedbcd.dashboard.library import Library
from fedbcd.report.page import write_report
from support.waiting import wait_for
from support.web import serving, start_browser

CHOOSE = """const s = document.querySelector('#protocol select');
const i = document.querySelector('#protocol input');
s.value = arguments[0]; s.dispatchEvent(new Event('change'));
i.value = arguments[1]; i.dispatchEvent(new Event('change'));"""


def picture(browser: Any, path: Path, first: str, last: str | None = None) -> None:
    """From the top of one section to the bottom of another."""
    box = """const b = document.querySelector(arguments[0]).getBoundingClientRect();
    return [b.left, b.top + scrollY, b.width, b.bottom + scrollY]"""
    left, top, width, bottom = browser.execute_script(box, first)
    bottom = browser.execute_script(box, last)[3] if last else bottom
    clip = {"x": left, "y": top, "width": width, "height": bottom - top, "scale": 1}
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True}
    )
    path.write_bytes(base64.b64decode(shot["data"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    browser = start_browser()
    browser.set_window_size(1180, 1000)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        count = write_report([options.runs], page)
        browser.get(page.as_uri())
        time.sleep(1)
        browser.execute_script(CHOOSE, str(count - 1), 300)
        time.sleep(1)
        picture(browser, options.out / "report.png", "header", "#curves")
        picture(browser, options.out / "report-devices.png", "#devices")
        picture(browser, options.out / "report-timeline.png", "#protocol")
    with serving(make_app(Library([options.runs]))) as site:
        browser.get(site.address)
        wait_for(
            lambda: (
                "With B ="
                in browser.execute_script(
                    "return document.querySelector('#plan')?.textContent || ''"
                )
            )
        )
        browser.execute_script(
            "document.documentElement.dataset.theme = 'dark'; window.app.show(window.app.view)"
        )
        time.sleep(2)
        picture(browser, options.out / "dashboard.png", "header", "#summary")
        picture(browser, options.out / "dashboard-live.png", "#live")
        picture(browser, options.out / "dashboard-planner.png", "#plan")
    browser.quit()


if __name__ == "__main__":
    main()
