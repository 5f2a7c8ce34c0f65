"""Stores that are lost, old or empty, in a real deployment with TLS: what becomes of the personal
models on the devices.

`python -m faultsim.lost` prints one object a scene. In each some roles come up with another store
than they had.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from faultsim.processes import PATIENCE_S, Here, Hurt, start, tables
from fedbcd.config import dump_toml
from fedbcd.engines.deploy.local.status_client import ask_status
from fedbcd.engines.deploy.local.up import actors_of
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.protocol.messages import (
    COORDINATOR,
    Acknowledged,
    Actor,
    Event,
    Recovered,
    Restored,
)
from support.processes import run

SERVER = "server/0"
DEVICES = ("device/0", "device/1")
ROUNDS = 3
TOLD = (
    "server/0: device/1 has finished 3 activations and was put in step 0 times, server/0 knows of 0"
    " and 0"
)


class Lost:
    """One deployment, stopped and started again scene after scene."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.here = Here(
            tables(servers=1, devices=2, active=2, cloud={"name": "sync"}), plain=False
        )
        self.options = self.here.options(folder)
        self.hurt: Hurt | None = None
        self._read: dict[Actor, int] = {}  # how much of a log

    def play(self, rounds: int) -> None:
        """To the end of this round, until everybody has nothing to do; then nobody runs."""
        if self.hurt is None:
            self.hurt = start(self.here, self.folder, rounds, lambda _: None)
        else:
            self.run(*actors_of(self.hurt._deployment.blueprint), rounds=rounds)
        for device in DEVICES:
            self.until(
                lambda d=device: self.says(d, activation=rounds, waits_for="phase"),
                f"{device} has not taken part",
            )  # type: ignore[misc]
        self.stop()

    def run(self, *actors: Actor, rounds: int) -> None:
        """Start these."""
        self.hurt = Hurt(self.here.deployment(self.folder, rounds), self.folder, lambda _: None, {})
        self.hurt._actors = [*actors]
        self.hurt.start()

    def stop(self) -> None:
        """Nobody runs."""
        assert self.hurt is not None
        self.hurt.stop()

    def until(self, what: Callable[[], object], why: str) -> None:
        """Wait, and start again what has crashed."""
        assert self.hurt is not None
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, why
            self.hurt.supervisor.look()
            time.sleep(0.05)

    def status(self, actor: Actor) -> dict[str, Any]:
        """What a role says of itself."""
        return ask_status(self.options.folder_of(actor)) or {}

    def says(self, actor: Actor, **what: Any) -> bool:
        """Whether its status says all this."""
        status = self.status(actor)
        return all(status.get(name) == value for name, value in what.items())

    def trouble(self, actor: Actor) -> str:
        """What it says is wrong."""
        return " | ".join(self.status(actor).get("trouble", ()))

    def ended(self, actor: Actor) -> int:
        """The exit code with which a role ends for good."""
        assert self.hurt is not None
        child = self.hurt.supervisor.children[actor]
        self.until(lambda: child.code is not None, f"{actor} does not end")
        return int(child.code or 0)

    def errors(self, actor: Actor) -> list[str]:
        """What it has logged as an error since it was asked last, in a word each, or the exit
        code.
        """
        lines = (self.folder / "logs" / f"{actor.replace('/', '-')}.log").read_text().splitlines()
        new, self._read[actor] = lines[self._read.get(actor, 0) :], len(lines)
        found = [json.loads(line) for line in new if line.startswith("{")]
        return sorted(
            {
                str(line.get("reason", line.get("code")))
                for line in found
                if line["level"] == "error"
            }
        )

    # ---------------------------------------------------------------------------------------------
    # stores
    def place(self, actor: Actor) -> Path:
        """Where its store is."""
        return self.options.folder_of(actor)

    def put(self, actor: Actor, name: str) -> None:
        """Use a copy of its store that was kept under this name; none: nothing is left."""
        shutil.rmtree(self.place(actor), ignore_errors=True)
        if name:
            shutil.copytree(self.folder / name / actor, self.place(actor))

    def keep(self, name: str) -> None:
        """Copy all stores."""
        for actor in (COORDINATOR, SERVER, *DEVICES):
            shutil.copytree(self.place(actor), self.folder / name / actor)

    def begin(self, actor: Actor) -> None:
        """Begin a new store, as `--init` does."""
        FileStore(self.place(actor), begin=True).close()

    def restored(self, device: Actor) -> list[str]:
        """The models that a device was told to start from."""
        store = FileStore(self.place(device), read_only=True)
        try:
            return [
                step.event.model for step in store.transitions() if isinstance(step.event, Restored)
            ]
        finally:
            store.close()

    def told(self) -> str:
        """What `fedbcd status` prints."""
        (self.folder / "deploy.toml").write_text(dump_toml({"deploy": asdict(self.options)}))
        return run("status", self.folder).stdout

    def activations(self) -> list[int]:
        """How many of each device were acknowledged."""
        return [self._count(device, Acknowledged) for device in DEVICES]

    def generation(self) -> int:
        """How often the server had to go on from an older store."""
        return self._count(SERVER, Recovered)

    def _count(self, actor: Actor, kind: type[Event]) -> int:
        store = FileStore(self.place(actor), read_only=True)
        try:
            return sum(isinstance(step.event, kind) for step in store.transitions())
        finally:
            store.close()

    def models(self) -> dict[str, bytes]:
        """The files of all personal models."""
        files = [file for device in DEVICES for file in (self.place(device) / "tensors").iterdir()]
        assert len(files) == 2 * len(DEVICES), files  # x and x_prev of each
        return {str(file): file.read_bytes() for file in files}


def empty_server(lost: Lost) -> dict[str, Any]:
    """A server's folder is empty and its coordinator is down: nobody else can tell it what it has
    lost.
    """
    before = lost.models()
    lost.put(SERVER, "")
    lost.run(SERVER, rounds=ROUNDS)
    refused = lost.ended(SERVER)
    is_untouched = not lost.place(SERVER).exists()
    lost.stop()
    lost.begin(SERVER)  # somebody wants to have it running again
    lost.run(SERVER, *DEVICES, rounds=ROUNDS)
    for device in DEVICES:
        lost.until(
            lambda d=device: "its store is empty or an old one" in lost.trouble(d),
            f"{device} does not say why",
        )  # type: ignore[misc]
    lost.until(
        lambda: "device/0 has" in lost.trouble(SERVER) and "device/1 has" in lost.trouble(SERVER),
        "the server does not say why",
    )
    lost.until(
        lambda: lost.says(SERVER, waits_for="coordinator", state="not started"),
        "the server has begun, or waits for somebody else",
    )
    lost.until(lambda: TOLD in lost.told(), "fedbcd status does not say why")
    lost.stop()
    lost.run(COORDINATOR, SERVER, *DEVICES, rounds=ROUNDS)
    welcomed = lost.ended(SERVER)
    lost.stop()
    errors = {actor: lost.errors(actor) for actor in (COORDINATOR, SERVER, *DEVICES)}
    found = {
        "code": refused,
        "untouched": is_untouched,
        "with_coordinator": welcomed,
        "kept": lost.models() == before,
    }
    return {**found, "errors": errors}


def old_server(lost: Lost) -> dict[str, Any]:
    """A server has an older backup of its store, first without its coordinator, then with it."""
    before = lost.models()
    lost.put(SERVER, "old")
    lost.run(SERVER, *DEVICES, rounds=ROUNDS)
    for device in DEVICES:
        lost.until(
            lambda d=device: "its store is empty or an old one" in lost.trouble(d),
            f"{device} does not say why",
        )  # type: ignore[misc]
    lost.stop()
    lost.run(COORDINATOR, SERVER, *DEVICES, rounds=ROUNDS)
    welcomed = lost.ended(SERVER)
    lost.stop()
    errors = {actor: lost.errors(actor) for actor in (COORDINATOR, SERVER, *DEVICES)}
    return {"with_coordinator": welcomed, "kept": lost.models() == before, "errors": errors}


def empty_coordinator(lost: Lost) -> dict[str, Any]:
    """The coordinator has an empty folder; its server, which has a history, is ahead of it and goes
    on as far as it can.
    """
    lost.put(COORDINATOR, "")
    lost.put(SERVER, "newest")
    lost.run(COORDINATOR, rounds=ROUNDS)
    refused = lost.ended(COORDINATOR)
    lost.stop()
    lost.begin(COORDINATOR)
    lost.run(COORDINATOR, SERVER, *DEVICES, rounds=ROUNDS)
    lost.until(
        lambda: "store of the coordinator back" in lost.trouble(SERVER),
        "the server does not say why",
    )
    lost.until(
        lambda: f"server/0 is in phase {ROUNDS}" in lost.trouble(COORDINATOR),
        "the coordinator does not say why",
    )
    lost.until(lambda: lost.says(SERVER, devices=2), "the devices are not connected")
    lost.stop()
    errors = {actor: lost.errors(actor) for actor in (COORDINATOR, SERVER, *DEVICES)}
    return {
        "code": refused,
        "restored": [lost.restored(device) for device in DEVICES],
        "errors": errors,
    }


def empty_device(lost: Lost) -> dict[str, Any]:
    """The newest stores are back, but for that of one device: its server gives it its last
    contribution, and rounds go on.
    """
    lost.put(COORDINATOR, "newest")
    lost.put("device/1", "")
    lost.play(ROUNDS + 2)
    errors = {actor: lost.errors(actor) for actor in (COORDINATOR, SERVER, *DEVICES)}
    restored = [lost.restored(device) for device in DEVICES]
    return {"restored": restored, "replayed": lost.here.replays(lost.folder), "errors": errors}


def new_generation(lost: Lost) -> dict[str, Any]:
    """A server's disk is gone. Copies were taken while everybody ran; `fedbcd restore` brings it up
    to its last report, and its devices contribute again.
    """
    copies, file = lost.folder / "copies", lost.folder / "restored.toml"
    table = {**lost.here.job.to_table(), "deploy": asdict(lost.options)}
    file.write_text(dump_toml(table))
    lost.run(COORDINATOR, SERVER, *DEVICES, rounds=ROUNDS + 4)
    lost.until(lambda: lost.status(COORDINATOR).get("round", 0) > ROUNDS + 2, "no new round")
    copied = run("backup", lost.place(SERVER), "--out", copies)  # while it runs
    assert copied.returncode == 0, copied.stderr
    lost.stop()
    lost.play(ROUNDS + 5)
    before = lost.activations()
    lost.put(SERVER, "")
    known = lost.place(COORDINATOR)
    command = ("restore", file, SERVER, "--from", copies / "server-0", "--coordinator", known)
    restored = run(*command)
    assert restored.returncode == 0, restored.stderr
    again = run(*command)
    (lost.folder / "events.jsonl").unlink()  # of the generation before
    lost.play(ROUNDS + 8)
    return {
        "said": restored.stdout,
        "again": again.returncode,
        "went_on": [now - then for now, then in zip(lost.activations(), before, strict=True)],
        "generation": lost.generation(),
        "replayed": lost.here.replays(lost.folder),
        "errors": {actor: lost.errors(actor) for actor in (COORDINATOR, SERVER, *DEVICES)},
    }


def rebuilt_coordinator(lost: Lost) -> dict[str, Any]:
    """The coordinator's disk is gone; its log is put together from that of its server."""
    lost.put(COORDINATOR, "")
    file, known = lost.folder / "restored.toml", lost.place(SERVER)
    restored = run("restore", file, COORDINATOR, "--server", known)
    assert restored.returncode == 0, restored.stderr
    (lost.folder / "events.jsonl").unlink()
    lost.play(ROUNDS + 10)
    errors = {actor: lost.errors(actor) for actor in (COORDINATOR, SERVER, *DEVICES)}
    return {
        "said": restored.stdout,
        "replayed": lost.here.replays(lost.folder),
        "errors": errors,
    }


SCENES = (
    *(empty_server, old_server, empty_coordinator, empty_device),
    *(new_generation, rebuilt_coordinator),
)


def main() -> int:
    """All scenes."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as path:
        lost = Lost(Path(path) / "run")
        try:
            lost.play(1)
            lost.keep("old")
            lost.play(ROUNDS)
            lost.keep("newest")
            for scene in SCENES:
                print(json.dumps({"scene": scene.__name__, **scene(lost)}), flush=True)
        finally:
            lost.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
