"""What the tests of runs share: a small federation, a small job file, the command line in this
process, and the hash of a folder.
"""

import contextlib
import copy
import hashlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import fedbcd as fb
from fedbcd.config import dump_toml
from fedbcd.models import logistic, mlp

SERVERS, DEVICES = 4, 16
MLP: Callable[[], nn.Module] = partial(mlp, 64, 10, (12,))
LOGISTIC: Callable[[], nn.Module] = partial(logistic, 64, 10)

BCD = fb.FedBCD(device_step=0.05, batch=8)
BCDI = fb.FedBCDI(device_step=0.05, batch=8)
CASES: dict[str, tuple[fb.Algorithm, fb.Cloud]] = {
    "fedbcd-sync": (BCD, fb.SyncCloud()),
    "fedbcd-async": (BCD, fb.AsyncCloud(first=2)),
    "fedbcd-rigorous": (BCD, fb.RigorousCloud(first=2)),
    "fedbcd-graph": (
        BCD,
        fb.GraphCloud([[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0.5]]),
    ),
    "fedbcd-i-sync": (replace(BCDI, offline_time="free"), fb.SyncCloud()),
    "fedbcd-i-async": (BCDI, fb.AsyncCloud(first=2)),
    "fedbcd-i-rigorous": (BCDI, fb.RigorousCloud(first=2)),
    "fedavg-sync": (fb.FedAvg(device_step=0.05, batch=8), fb.SyncCloud()),
    "fedprox-sync": (fb.FedProx(device_step=0.05, batch=8), fb.SyncCloud()),
}


@cache
def _digits() -> tuple[Any, fb.Partition]:
    data = fb.load_dataset("digits")
    return data, fb.diversity(data.train.targets, DEVICES, 3, 30)


def federation(model: Callable[[], nn.Module] = MLP) -> fb.Federation:
    """Sixteen devices under four servers, thirty digits of three kinds each; a quarter of the test
    set.
    """
    data, split = _digits()
    test = fb.Samples(data.test.inputs[::4], data.test.targets[::4])
    return fb.Federation.from_partition(
        model,
        nn.functional.cross_entropy,
        data.train,
        split,
        SERVERS,
        test=test,
        transform=data.transform,
    )


def train(case: str, rounds: int = 6, **options: Any) -> fb.Run:
    """A short run of one algorithm on one cloud."""
    algorithm, cloud = CASES[case]
    if "projection" in options:
        algorithm = replace(algorithm, projection=options.pop("projection"))
    model = options.pop("model", MLP)
    return fb.train(
        federation(model),
        algorithm,
        cloud=cloud,
        rounds=rounds,
        active=options.pop("active", 2),
        **options,
    )


def largest_difference(a: fb.Run, b: fb.Run) -> float:
    """Over all entries of all personal and global models."""
    pairs = ((a.personal_NF, b.personal_NF), (a.global_VF, b.global_VF))
    return max(float((x - y).abs().max()) for x, y in pairs)


# ------------------------------------------------------------------------------------------------
# the command line
JOB: dict[str, Any] = {
    "data": {"name": "digits", "diversity": 3, "samples": 20},
    "federation": {"servers": SERVERS, "devices": 4, "active": 2},
    "model": {"name": "logistic"},
    "algorithm": {"name": "fedbcd", "device_step": 0.05, "batch": 8},
    "cloud": {"name": "sync"},
    "run": {"rounds": 4, "evaluate_every": 2},
}


def job_table(**changes: Any) -> dict[str, Any]:
    """The small job with some keys changed: `job_table(**{"run.rounds": 7})`; None removes a
    key.
    """
    table = copy.deepcopy(JOB)
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
        if value is None:
            del place[key]
    return table


def write_job(path: Path, **changes: Any) -> Path:
    """The small job as a file."""
    path.write_text(dump_toml(job_table(**changes)), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        """The object on the last line, of --json."""
        found = json.loads(self.out.splitlines()[-1])
        assert isinstance(found, dict)
        return found


def fedbcd(*arguments: str | Path) -> Answer:
    """The command line, in this process. An exception that it does not turn into a sentence comes
    out here.
    """
    from fedbcd.cli import main

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        mock.patch.object(sys, "argv", ["fedbcd", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int), code
    return Answer(code, out.getvalue(), err.getvalue())


def hash_folder(path: Path) -> dict[str, str]:
    """Every file and folder below `path`, by content."""
    return {
        str(p.relative_to(path)): (
            hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
        )
        for p in sorted(path.rglob("*"))
    }


def log_lines(path: Path) -> list[str]:
    """The transitions of an event log: all but its header and its end."""
    lines = (path / "events.jsonl").read_text().splitlines()
    return [line for line in lines[1:] if not line.startswith('{"end"')]


def outputs(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """What a module says."""
    with torch.no_grad():
        result = module(inputs)
    assert isinstance(result, torch.Tensor)
    return result


def outgrown() -> fb.Federation:
    """Six devices in linear regression, the first of which is ten thousand million times farther
    than the others want to go.
    """
    chance = torch.Generator().manual_seed(0)
    inputs = [torch.randn(8, 3, generator=chance) for _ in range(6)]
    data = [(x, x @ torch.full((3, 1), 1.0 if device else 1e10)) for device, x in enumerate(inputs)]
    line = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(line.weight)
    return fb.Federation(line, nn.functional.mse_loss, data, servers=2)


OUTGROWN = fb.FedBCD(
    device_step=0.1,
    batch="all",
    penalty=[1.0] + [1e-15] * 5,
    server_step=1.0,
    projection=fb.NoProjection(),
)
