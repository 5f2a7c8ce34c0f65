"""How quickly the dashboard answers for 10,000 devices and 10,000 rounds: a log made by the
simulation's own schedule, without numbers.

python benchmarks/dashboard.py [--out results/dashboard.json] [--rounds N]
"""

import argparse
import gzip
import http.client
import json
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.parse
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import uvicorn
from torch import nn

import fedbcd as fb
from fedbcd.dashboard.app import make_app
from fedbcd.dashboard.library import Library
from fedbcd.engines.environment import environment
from fedbcd.engines.result import notes_of
from fedbcd.engines.setup import make_machines, make_schedule
from fedbcd.record.history import GLOBAL, PERSONAL, WORST, Row, columns_of
from fedbcd.record.runfolder import Checkpoint, RunFolder
from fedbcd.report.page import page, view_of
from fedbcd.report.view import read_run
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Simulation
from support.waiting import wait_for
from support.web import complaints, show, start_browser, text_of

DEVICES, SERVERS = 10_000, 100


def make_run(folder: Path, rounds: int) -> None:
    """A real schedule with its event log, and a history with a row per round whose accuracies are
    made up.
    """
    data = [(torch.zeros(1, 2), torch.tensor([k % 10])) for k in range(DEVICES)]
    federation = fb.Federation(lambda: nn.Linear(2, 10), nn.functional.cross_entropy, data, SERVERS)
    spec = fb.RunSpec(fb.FedBCD(), fb.AsyncCloud(first=3), active=3)
    files = RunFolder(
        folder,
        spec.identity(federation),
        {"title": "10,000 devices", "run": {"rounds": rounds}},
    )
    log = files.open(files.inspect(False), False)
    driver = Driver(make_machines(spec, federation), None, log)
    simulation = Simulation(driver, make_schedule(spec, federation))
    history = fb.History()
    for k in range(rounds):
        simulation.play_round()
        history.append(
            Row(
                dict.fromkeys(columns_of(["accuracy"]), 0.1)
                | dict.fromkeys((GLOBAL, PERSONAL, WORST), k / rounds)
                | {"round": k + 1, "clock": simulation.now, "activations": 9 * k}
            )
        )
    scores = {device: (device % 100) / 100 for device in range(DEVICES)}
    notes = notes_of(federation, scores, dict.fromkeys(range(DEVICES), 0.5), history.measures)
    files.write_checkpoint(
        Checkpoint(rounds, log.sync(), 0.0, "", history, {"x": torch.zeros(1)}, notes)
    )
    log.close()


class Client:
    """The real server on a port of this machine, and a way to ask it."""

    def __init__(self, folder: Path) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(make_app(Library([folder])), log_level="warning"))
        threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
        while not server.started:
            time.sleep(0.01)

    def get(self, path: str, **query: object) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", f"{path}?{urllib.parse.urlencode(query)}")
        return connection.getresponse().read()


def in_browser(client: Client, found: dict[str, float]) -> None:
    """How long the page takes, in headless Chromium where there is one: to open, to take in a new
    view, to draw the timeline.
    """
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        return
    browser = start_browser()
    began = time.perf_counter()
    browser.get(f"http://127.0.0.1:{client.port}/")
    wait_for(lambda: text_of(browser, "#first .tile"))
    found["browser: the first screen"] = round(time.perf_counter() - began, 3)
    drawn = "return document.documentElement.dataset.drawn === 'all'"
    wait_for(lambda: browser.execute_script(drawn))
    found["browser: page opened and drawn"] = round(time.perf_counter() - began, 3)
    frames = """const done = arguments[0], times = [];
    const frame = () => new Promise(requestAnimationFrame);
    (async () => {
      for (let k = 0; k < 5; k += 1) {
        const began = performance.now();
        window.app.show(window.app.view);
        await frame(); await frame();
        times.push(performance.now() - began);
      }
      done(times.sort((a, b) => a - b)[2] / 1000);
    })()"""
    found["browser: a new view taken in and two frames painted"] = round(
        browser.execute_async_script(frames), 3
    )
    print(
        {name: value for name, value in found.items() if name.startswith("browser")},
        complaints(browser),
    )
    browser.quit()


def timed(what: str, found: dict[str, float], action: object) -> object:
    began = time.perf_counter()
    result = action()  # type: ignore[operator]
    found[what] = round(time.perf_counter() - began, 3)
    print(f"{what:<60} {found[what]:8.3f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        make_run(folder, options.rounds)
        found = measure(folder)
    record = {
        "devices": DEVICES,
        "servers": SERVERS,
        "rounds": options.rounds,
        "seconds": found,
        "environment": environment(),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def measure(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {
        "log_megabytes": round((folder / "events.jsonl").stat().st_size / 1e6, 1)
    }
    client = Client(folder)
    key = timed("list of runs", found, lambda: json.loads(client.get("/api/runs")))[0]["key"]

    def read() -> dict[str, object]:
        while True:
            view = json.loads(client.get("/api/view", runs=key))
            if view["runs"][0]["unread"] == 0:
                return view  # type: ignore[no-any-return]

    timed("first look: the whole log read, in pieces of 32 MB", found, read)
    version = json.loads(client.get("/api/view", runs=key))["version"]
    timed("nothing new", found, lambda: client.get("/api/view", runs=key, version=version))
    with (folder / "events.jsonl").open("ab") as log:
        log.write(b'{"t":1e9,"on":"device/1","event":{"Woke":{}},"do":[]}\n')
    answer = timed("a line is new: whole view", found, lambda: client.get("/api/view", runs=key))
    found["view_megabytes"] = round(len(answer) / 1e6, 2)
    with (folder / "events.jsonl").open("ab") as log:
        log.write(b'{"t":1e9,"on":"device/2","event":{"Woke":{}},"do":[]}\n')
    seen = json.loads(answer)["version"]
    tick = timed(
        "the next line: what has changed",
        found,
        partial(client.get, "/api/view", runs=key, version=seen),
    )
    found["tick_kilobytes_compressed"] = round(len(gzip.compress(bytes(tick), 3)) / 1e3, 1)
    middle = json.loads(answer)["runs"][0]["summary"]["clock"] / 2
    timed(
        "zoom into 10 units of clock",
        found,
        lambda: client.get("/api/timeline", run=key, begin=middle, end=middle + 10),
    )
    timed(
        "a page of devices, sorted",
        found,
        lambda: client.get("/api/devices", run=key, sort="contact", down="1"),
    )
    timed("the planner, first time", found, lambda: client.get("/api/plan", run=key))
    in_browser(client, found)
    text = timed(
        "a whole report without plan", found, lambda: page(view_of([read_run(folder)], plan=False))
    )
    found["report_megabytes"] = round(len(str(text)) / 1e6, 2)
    (folder / "report.html").write_text(str(text))
    report_in_browser(folder / "report.html", found)
    return found


def report_in_browser(path: Path, found: dict[str, float]) -> None:
    """When the browser first painted what the report says, and when all of it was drawn."""
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        return
    browser = start_browser()
    began = time.perf_counter()
    show(browser, path)
    found["report: opened and drawn"] = round(time.perf_counter() - began, 3)
    painted = """return performance.getEntriesByType("paint")
    .filter((one) => one.name === "first-contentful-paint").map((one) => one.startTime / 1000)[0]"""
    found["report: first paint"] = round(browser.execute_script(painted), 3)
    print({name: value for name, value in found.items() if name.startswith("report")})
    browser.quit()


if __name__ == "__main__":
    main()
