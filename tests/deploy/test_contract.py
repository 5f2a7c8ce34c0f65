"""One scenario on two engines: `simulate` and `deploy` let in the same devices, mix the same
servers, and reach the same models.

Real time jitters, so the scenarios are those among many seeds in which no two things that matter
happen close together. A machine that stalls for longer than they are apart changes their order all
the same; then time goes slower, and it is tried again.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbcd.algorithm import draws
from fedbcd.experiments.job import Job, parse
from fedbcd.planner.record import Record, read_record
from fedbcd.record.eventlog import LogReader
from fedbcd.record.tensorfile import read_tensors
from support.processes import job, run, write_job

ROUNDS = 3
SCALES = (0.4, 0.8, 1.6, 3.2, 6.4, 12.8)  # seconds per unit of the clock


def _job(cloud: dict[str, Any], seed: int) -> dict[str, Any]:
    table = job(
        cloud=cloud,
        run={"rounds": ROUNDS, "seed": seed, "max_batch": 1, "threads": 1, "certify_every": 0},
    )
    return table | {
        "federation": {"servers": 2, "devices": 3, "active": 2},
        "clock": {"arrival": {"name": "uniform", "low": 0.2, "high": 4}},
    }


def _story(record: Record) -> tuple[Any, ...]:
    """Who took part in which phase, in which order uploads came, and who was mixed, as far as both
    engines tell it.
    """
    mixes = [mix.servers for mix in record.mixes][:ROUNDS]
    end = record.mixes[ROUNDS - 1].time
    phases = {
        (p.server, p.number): p for p in record.phases if p.ended is not None and p.ended <= end
    }
    order = {
        key: [v.device for v in sorted(p.complete, key=lambda v: v.uploaded or 0.0)]
        for key, p in phases.items()
    }
    steps = {key: {v.device: v.steps for v in p.complete} for key, p in phases.items()}
    return mixes, order, steps


def _closest(table: dict[str, Any], log: Path) -> float:
    """The smallest distance, in units of the clock, between two events whose order matters."""
    (job_,) = parse(table)
    record = read_record(log)
    gaps = []
    for phase in record.phases:
        if phase.ended is None:
            continue
        gaps.append(_gap_after(job_, phase.server, phase.number))
        gaps += np.diff(
            sorted(v.uploaded for v in phase.complete if v.uploaded is not None)
        ).tolist()
    ends = sorted(phase.ended for phase in record.phases if phase.ended is not None)
    return float(min([*gaps, *np.diff(ends)]))


def _gap_after(job_: Job, server: int, phase: int) -> float:
    """How much later than the last device that is let in the next one would have come."""
    devices, q = job_.federation.devices, job_.active
    members = np.arange(server * devices, (server + 1) * devices)
    arrivals = np.sort(
        job_.spec.clock.arrival.quantile(
            draws.unit(draws.address(job_.spec.seed, draws.ARRIVAL, members, np.array([phase])))
        )
    )
    return float(np.min(np.diff(arrivals)[:q]))


# The seed of 60 in which the events that matter are furthest apart.
CASES = [
    pytest.param({"name": "sync"}, 51, id="sync"),
    pytest.param({"name": "async", "first": 1}, 40, id="async"),
]


@pytest.mark.parametrize(("cloud", "seed"), CASES)
def test_a_deployment_does_what_the_simulation_did(
    cloud: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    table, simulated = _job(cloud, seed), tmp_path / "simulated"
    parse(table)[0].run(simulated, on_notice=lambda _: None)
    assert _closest(table, simulated) * SCALES[0] > 0.13, (
        "another seed has become better; look for it"
    )
    for scale in SCALES:
        deployed = tmp_path / f"deployed-{scale}"
        done = run(
            "up",
            write_job(tmp_path, table),
            "--time-scale",
            str(scale),
            "--plain",
            "--out",
            deployed,
        )
        assert done.returncode == 0, done.stderr
        if _story(read_record(deployed)) == _story(read_record(simulated)):
            break
    else:
        pytest.fail(
            "the devices came in another order, however slow the clock:"
            f" {_story(read_record(deployed))}"
        )
    ours, theirs = (
        read_tensors(folder / "models.safetensors")[0]["z"] for folder in (deployed, simulated)
    )
    assert torch.equal(ours, theirs)
    assert (
        LogReader(deployed / "events.jsonl").header["identity"]
        == LogReader(simulated / "events.jsonl").header["identity"]
    )
