"""The pictures of real pages in README and docs, taken with headless Chromium: reports of finished
runs at several widths, light and dark, and the dashboard.

python benchmarks/pictures.py --only report      makes the runs, and calls this
"""

import base64
import io
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from fedbcd.dashboard.app import make_app
from fedbcd.dashboard.library import Library
from fedbcd.report.page import write_report
from support.waiting import wait_for
from support.web import serving, show, start_browser, text_of


def sized(browser: Any, width: int, height: int, scheme: str = "light") -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def picture(browser: Any, path: Path, section: str | None = None) -> None:
    """Of a section, or of what is on the screen."""
    clip = {}
    if section is not None:
        box = """const one = document.querySelector(arguments[0]);
        const b = one.getBoundingClientRect();
        return [b.left + scrollX, b.top + scrollY, b.width, b.height]"""
        left, top, width, height = browser.execute_script(box, section)
        area = {"x": left, "y": top, "width": width, "height": height, "scale": 1}
        clip = {"clip": area, "captureBeyondViewport": True}
    time.sleep(0.5)  # what was drawn last is painted
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", clip)
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    few = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def take(job: Path, default: Path, out: Path) -> None:
    """Of the report on `job` and on the default job, and of the dashboard on `job`."""
    browser = start_browser()
    with tempfile.TemporaryDirectory() as folder:
        page, other = Path(folder) / "report.html", Path(folder) / "default.html"
        write_report([job], page)
        write_report([default], other, plan=False)
        for width, height, scheme in (
            (1440, 900, "light"),
            (1024, 860, "dark"),
            (390, 844, "light"),
        ):
            sized(browser, width, height, scheme)
            show(browser, other)
            picture(browser, out / f"report-{width}.png")
        sized(browser, 1280, 1000)
        show(browser, page)
        picture(browser, out / "report-timeline.png", "#protocol .drawn")
        picture(browser, out / "report-devices.png", "#devices")
    sized(browser, 1280, 1000, "dark")
    with serving(make_app(Library([job]))) as site:
        browser.get(site.address)
        wait_for(lambda: "With B =" in text_of(browser, "#plan"))
        time.sleep(1)
        picture(browser, out / "dashboard.png")
        picture(browser, out / "dashboard-live.png", "#live")
        picture(browser, out / "dashboard-planner.png", "#plan")
    browser.quit()
