"""A small coverage-guided fuzzer for everything that comes from a wire or a file. `python -m
faultsim.fuzz --seconds 60`.

Inputs are mutated; one that reaches a new line of fedbcd joins the corpus. Each must be taken or
refused with a sentence of fedbcd's own; what is refused has changed nothing.
"""

import argparse
import hashlib
import json
import os
import random
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from google.protobuf.message import DecodeError

import fedbcd
from faultsim.disk import Disk
from faultsim.schedule import blueprint_of
from fedbcd.config import dump_toml, read_toml
from fedbcd.engines.deploy.links.codec import Assembler, WireLimits, encode
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.traffic import parse_text
from fedbcd.engines.deploy.processes.options import merge_options
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.errors import FedBCDError, Refused
from fedbcd.experiments.deployed import one_job
from fedbcd.protocol.messages import (
    Activated,
    Mixed,
    Send,
    Started,
    Train,
    UpdateRequested,
    Uploaded,
    upload_ref,
)
from fedbcd.record.eventlog import LogReader, LogWriter
from fedbcd.record.tensorfile import read_tensors, write_tensors

SOURCES = str(Path(fedbcd.__file__).parent)
INTERESTING = [
    0,
    1,
    2,
    127,
    128,
    255,
    4096,
    65535,
    2**31 - 1,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
WORDS = [
    b"null",
    b"NaN",
    b"Infinity",
    b"-1",
    b"1e999",
    b"9" * 400,
    b"[" * 3000,
    b"../../x",
    b'"',
    b"{}",
    b"\x00",
    b"\xff\xfe",
    b"F64",
    b"true",
]


class Finding(AssertionError):
    """An input that was neither taken nor refused properly."""


class Target:
    """Something that takes bytes."""

    name = ""
    corpus: list[bytes]

    def take(self, data: bytes) -> None:
        """Use it; raises a FedBCDError to refuse it."""
        raise NotImplementedError

    def state(self) -> object:
        """What must not change when something is refused."""
        return None


class Wire(Target):
    """Frames from device/0 and the coordinator, through assembler and role of a server."""

    name = "wire"

    def __init__(self) -> None:
        self.plan = blueprint_of(1, 2, 1)
        size = self.plan.size_F
        self.limits = WireLimits(frozenset({("F32", size), ("F64", size + 1)}))
        self.begin()
        model = torch.arange(float(size))
        ask = Letter("device/0", "server/0", UpdateRequested(device=0, activation=0), None, 1.0)
        upload = Letter(
            "device/0",
            "server/0",
            Uploaded(device=0, activation=0, model=upload_ref(0, 0, 0)),
            model,
            1.0,
        )
        bad = [
            Letter("device/0", "server/0", upload.event, model * float(k), 1.0)
            for k in ("nan", "inf", "1e38")
        ]
        far = [
            Letter(
                "device/0",
                "server/0",
                Uploaded(device=0, activation=a, model=f"x/0/{a}"),
                model,
                1.0,
            )
            for a in (1, 7, 2**53)
        ]
        mixed = Letter(
            "coordinator", "server/0", Mixed(phase=0, iteration=0, model="w/0/0"), model, 1.0
        )
        self.corpus = [
            self.packed([ask]),
            self.packed([ask, upload]),
            self.packed([ask, upload, mixed]),
            self.packed([upload]),
        ]
        self.corpus += [self.packed([ask, letter]) for letter in (*bad, *far)]

    def begin(self) -> None:
        """A fresh server."""
        self.role = ServerRole.open(Disk(random.Random(0), 1).store("fuzz"), self.plan, 0)
        self.role.tell(Started(), 0.0)

    @staticmethod
    def packed(letters: Sequence[Letter]) -> bytes:
        """Frames one after the other: who speaks, a length, the bytes."""
        parts = [
            (bytes([letter.sender == "coordinator"]), f.SerializeToString())
            for letter in letters
            for f in encode(letter)
        ]
        return b"".join(who + struct.pack("<H", len(raw)) + raw for who, raw in parts)

    def take(self, data: bytes) -> None:
        """All frames in turn, whatever is refused; raises the last refusal."""
        self.begin()
        ends = [Assembler(who, "server/0", self.limits) for who in ("device/0", "coordinator")]
        place, refusal = 0, None
        while place + 3 <= len(data):
            (length,) = struct.unpack_from("<H", data, place + 1)
            end, raw = ends[data[place] & 1], data[place + 3 : place + 3 + length]
            place += 3 + length
            before = self.state()
            try:
                self._frame(end, raw)
            except FedBCDError as error:
                refusal = error
                if self.state() != before:
                    raise Finding("a refused frame has changed the server") from None
        if refusal is not None:
            raise refusal

    def _frame(self, end: Assembler, raw: bytes) -> None:
        try:
            frame = Frame.FromString(raw)
        except DecodeError:
            raise Refused("frame", "no frame; gRPC ends such a stream") from None
        letter = end.message(frame.message) if frame.HasField("message") else end.chunk(frame.chunk)
        if letter is not None:
            self.role.receive(letter, 1.0)
            if not bool(torch.isfinite(self.role.z).all()):
                raise Finding("the model of the server is not finite")

    def state(self) -> object:
        """Log, files, machine and sums."""
        role = self.role
        machine = {k: repr(v) for k, v in vars(role.machine).items()}
        return (
            role.store.length,
            sorted(role.store.names()),
            machine,
            role.z.tolist(),
            role._sum.vector().tolist(),
            role._clock.last,
        )


class Greeting(Target):
    """What a device says of itself to its server, or a server to the coordinator, when it
    connects.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.begin()
        counters = (
            {"activation": 0, "incarnation": 0, "uploading": False}
            if name == "device"
            else {"phase": 0, "iteration": 0}
        )
        hello = {"store": "ab", "size": 3, "run": self.role.store.facts["run"], **counters}
        self.corpus = [
            json.dumps({**hello, **more}).encode()
            for more in ({}, {"activation": 2**70}, {"phase": 1e300}, {"store": "s" * 70})
        ]

    def begin(self) -> None:
        """A fresh role."""
        store, plan = Disk(random.Random(0), 1).store("fuzz"), blueprint_of(1, 2, 1)
        if self.name == "device":
            self.role: ServerRole | CoordinatorRole = ServerRole.open(store, plan, 0)
            self.role.tell(Started(), 0.0)
        else:
            self.role = CoordinatorRole.open(store, plan)

    def take(self, data: bytes) -> None:
        """Greet."""
        self.role.greet(f"{self.name}/0", parse_text(data.decode("utf-8", "replace")), 1.0)
        self.begin()

    def state(self) -> object:
        """Its log and facts."""
        return self.role.store.length, dict(self.role.store.facts)


class FileTarget(Target):
    """Something that reads a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / self.name

    def take(self, data: bytes) -> None:
        """Write it, read it."""
        self.file.write_bytes(data)
        self.read()

    def read(self) -> None:
        """As fedbcd does."""
        raise NotImplementedError


class Log(FileTarget):
    """An event log."""

    name = "events.jsonl"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / "good.jsonl"
        log = LogWriter(path, {"identity": {}, "job": {}})
        granted = Activated(activation=0, model="z/0/0")
        log.append(
            0.5,
            "server/0",
            UpdateRequested(device=0, activation=0),
            [Send(to="device/0", message=granted)],
        )
        log.append(0.6, "device/0", granted, [Train(activation=0, session=0, model="z/0/0")])
        log.end({"transitions": 2, "rounds": 0, "clock": 0.6, "digest": "00"})
        log.close()
        self.corpus = [path.read_bytes()]

    def read(self) -> None:
        """All lines."""
        for _ in LogReader(self.file):
            pass


class Job(FileTarget):
    """A job file with its `[deploy]` table."""

    name = "job.toml"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        table = {
            "data": {"name": "digits", "samples": 12},
            "federation": {"servers": 2, "devices": 2, "active": 1},
            "model": {"name": "mlp", "hidden": [4]},
            "algorithm": {"name": "fedbcd-i", "device_step": 0.02, "steps": [1, 3]},
            "cloud": {"name": "async", "first": 1},
            "run": {"rounds": 3},
            "deploy": {"servers": ["127.0.0.1:1"], "retry_s": [1.0, 2.0]},
        }
        self.corpus = [dump_toml(table).encode()]

    def read(self) -> None:
        """As every role does when it starts."""
        table = read_toml(self.file)
        one_job(table)
        merge_options(table.get("deploy", {}), {}, {})


class Checkpoint(FileTarget):
    """A file of tensors: a checkpoint, a result."""

    name = "models.safetensors"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        write_tensors(
            folder / "good.safetensors",
            {"x": torch.arange(6.0), "z": torch.arange(3)},
            {"summary": "{}"},
        )
        self.corpus = [(folder / "good.safetensors").read_bytes()]

    def read(self) -> None:
        """Whole."""
        read_tensors(self.file)


class TensorFile(Target):
    """A tensor file of a store: every change must be noticed."""

    name = "store"

    def __init__(self) -> None:
        self.disk = Disk(random.Random(0), 1)
        self.store = self.disk.store("fuzz")
        self.store.save("x", torch.arange(5.0))
        self.store.commit()
        (self.file,) = self.disk.entries
        self.good = self.disk.entries[self.file].data
        self.corpus = [self.good]

    def take(self, data: bytes) -> None:
        """Put it in the place of the good one."""
        self.disk.entries[self.file].data = data
        self.store.tensor("x")
        if data != self.good:
            raise Finding("a changed file was taken")


# ------------------------------------------------------------------------------------------------
# mutation
def mutated(chance: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One input from one or two others."""
    data = bytearray(chance.choice(corpus))
    for _ in range(chance.choice([1, 1, 2, 4, 8])):
        place, other = chance.randrange(len(data) + 1), chance.choice(corpus)
        match chance.randrange(8):
            case 0 if data:
                data[place % len(data)] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[place % len(data)] = chance.randrange(256)
            case 2:
                del data[place : place + chance.choice([1, 2, 8, 64])]
            case 3:
                data[place:place] = chance.choice(WORDS)
            case 4:
                start = chance.randrange(len(other) + 1)
                data[place:place] = other[start : start + chance.choice([1, 4, 16, 256])]
            case 5:
                value = chance.choice(INTERESTING)
                raw = struct.pack(chance.choice(["<Q", ">Q"]), value)[: chance.choice([1, 2, 4, 8])]
                data[place : place + len(raw)] = raw
            case 6:
                data[place : place + 1] = str(chance.choice(INTERESTING)).encode()
            case _:
                del data[place:]
    return bytes(data[:200_000])


class Coverage:
    """Lines of fedbcd that were reached. Python 3.11 has no cheaper way than a trace function."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()

    def of(self, act: Callable[[], None]) -> bool:
        """Whether something reached a new line."""
        before = len(self.lines)
        sys.settrace(self._call)
        try:
            act()
        finally:
            sys.settrace(None)
        return len(self.lines) > before

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(SOURCES) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def attempt(target: Target, data: bytes) -> str:
    """`taken`, or the kind of refusal; raises `Finding`."""
    before = target.state()
    try:
        target.take(data)
    except FedBCDError as error:
        if not str(error):
            raise Finding(f"{type(error).__name__} without a word") from error
        if target.state() != before and not isinstance(target, Wire):
            raise Finding("a refused input has changed something") from error
        return type(error).__name__
    except Finding:
        raise
    except Exception as error:
        raise Finding("".join(traceback.format_exception(error)[-3:])) from error
    return "taken"


def cuts(target: Target) -> Iterator[bytes]:
    """Every good input, cut at every byte."""
    for good in target.corpus[:4]:
        yield from (good[:length] for length in range(len(good)))


def fuzz(target: Target, seed: int, seconds: float = 0.0, mutations: int = 0) -> dict[str, Any]:
    """Cut at every byte, then mutate for some seconds or so many times, whichever is more."""
    chance, coverage, counts = random.Random(f"{target.name} {seed}"), Coverage(), Counter[str]()
    findings: list[str] = []
    until = time.monotonic() + seconds
    inputs: Iterator[bytes] = cuts(target)
    tried = 0
    while True:
        data = next(inputs, None)
        if data is None:
            if time.monotonic() > until and mutations <= 0:
                break
            mutations -= 1
            data = mutated(chance, target.corpus)
        tried += 1
        kinds: list[str] = []
        try:
            if coverage.of(lambda data=data, kinds=kinds: kinds.append(attempt(target, data))):  # type: ignore[misc]
                target.corpus.append(data)
        except Finding as finding:
            findings.append(
                f"{finding} [{target.name}: {data[:300]!r}, sha256"
                f" {hashlib.sha256(data).hexdigest()[:12]}]"
            )
            if len(findings) >= 5:
                break
        counts.update(kinds)
    return {
        "target": target.name,
        "inputs": tried,
        "lines": len(coverage.lines),
        "corpus": len(target.corpus),
        **counts,
        "findings": findings,
    }


def targets(folder: Path) -> list[Target]:
    """All of them."""
    return [
        Wire(),
        Greeting("device"),
        Greeting("server"),
        Log(folder),
        Job(folder),
        Checkpoint(folder),
        TensorFile(),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m faultsim.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    bad = 0
    with tempfile.TemporaryDirectory() as path:
        for target in targets(Path(path)):
            found = fuzz(target, asked.seed, asked.seconds)
            bad += len(found["findings"])
            print(json.dumps(found), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
