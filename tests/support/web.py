"""What the tests of pages share: the dashboard on a real port, a small client, and a headless
browser where there is one.
"""

import contextlib
import http.client
import json
import shutil
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.waiting import LIMIT_S, wait_for

NO_BROWSER = (
    "no headless Chromium here: apt-get install chromium chromium-driver, and pip install selenium"
)


class Site:
    """A dashboard that runs in a thread."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"http://127.0.0.1:{port}/"

    def ask(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None, **query: Any
    ) -> http.client.HTTPResponse:
        """One request; its body has been read into `text`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        connection.request(method, f"{path}?{urllib.parse.urlencode(query)}", headers=headers or {})
        response = connection.getresponse()
        response.text = response.read().decode()  # type: ignore[attr-defined]
        connection.close()
        return response

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of an answer."""
        response = self.ask(path, **query)
        assert response.status == 200, response.text  # type: ignore[attr-defined]
        return json.loads(response.text)  # type: ignore[attr-defined]


@contextlib.contextmanager
def serving(app: Any) -> Iterator[Site]:
    """Serve an application until the block ends."""
    uvicorn = pytest.importorskip(
        "uvicorn", reason="the dashboard is tested with the extra 'dashboard'"
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield Site(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        listener.close()


def start_browser() -> Any:
    """Headless Chromium; the test is skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason=NO_BROWSER)
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip(NO_BROWSER)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1280,1000",
        "--hide-scrollbars",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def complaints(browser: Any) -> list[str]:
    """Everything on the browser's console that is a warning or worse, since the last call."""
    return [
        entry["message"]
        for entry in browser.get_log("browser")
        if entry["level"] in ("WARNING", "SEVERE")
    ]


def text_of(browser: Any, selector: str) -> str:
    """The text of the first element that matches."""
    return str(
        browser.execute_script(
            "const e = document.querySelector(arguments[0]); return e ? e.textContent : ''",
            selector,
        )
    )


def show(browser: Any, path: Path) -> None:
    """Open a page of a file, until all of it is drawn."""
    browser.get(path.as_uri())
    drawn = "return document.documentElement.dataset.drawn === 'all'"
    wait_for(lambda: browser.execute_script(drawn))


def unfold(browser: Any) -> None:
    """Open what is folded, as soon as it is there; what it holds is drawn then."""
    folds = """const found = document.querySelectorAll('details.fold');
    found.forEach((one) => { one.open = true; }); return found.length"""
    wait_for(lambda: browser.execute_script(folds))
    wait_for(lambda: text_of(browser, "#settings table"))
