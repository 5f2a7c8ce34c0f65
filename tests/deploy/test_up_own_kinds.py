"""Methods and rules of other people in real processes, by name in a job file."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedbcd as fb
from fedbcd.engines.deploy.local.up import rehearse_apart
from fedbcd.errors import ConfigError
from support.naive import EXAMPLES
from support.processes import job, run, write_job
from support.runs import federation

JOBS = {
    "scaffold": {"algorithm": {"name": "scaffold:Scaffold"}},
    "fedbuff": {
        "algorithm": {"name": "fedbuff:FedBuff", "at_once": 2},
        "cloud": {"name": "async", "first": 2},
    },
    "own_availability": {
        "cloud": {"name": "own_availability:Turns"},
        "run": {"rounds": 3, "availability": {"name": "own_availability:Shifts"}},
    },
}


@pytest.mark.parametrize("case", JOBS)
def test_a_deployment_replays_to_its_own_digest(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fedbcd up` replays the log, and compares the digests. What goes on from a record must be
    told to trust it.
    """
    monkeypatch.chdir(EXAMPLES)
    small = {"federation": {"servers": 2, "devices": 2, "active": 1}, "model": {"name": "logistic"}}
    file = write_job(tmp_path, job(**small, **({"run": {"rounds": 3}} | JOBS[case])))
    out = tmp_path / "run"
    done = run("up", file, "--time-scale", "0.05", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 3
    if case == "scaffold":
        again = run("up", "--resume", "--out", out)
        assert "--trust" in again.stderr
        assert run("up", "--resume", "--trust", "--out", out).returncode == 0


def test_code_that_fails_is_named_before_a_process_begins() -> None:
    """And the process that has found it out is not this one, which forks the roles later."""

    def fails(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise KeyError(len(outputs) + len(targets))

    fine = federation()
    spec = fb.RunSpec(fb.FedBCD(batch=2), active=2)
    rehearse_apart(spec, fine)
    for name, given in (("metric", {"metrics": (fails,)}), ("loss", {"loss": fails})):
        wrong = copy.copy(fine)
        vars(wrong).update(given)
        with pytest.raises(ConfigError, match=rf"{name} fail.*KeyError: .*own_kinds.py line \d+\)"):
            rehearse_apart(spec, wrong)


def test_a_parent_that_has_used_several_threads_of_torch_does_not_stop_its_children() -> None:
    """As on every machine with several cores; the tests have one thread."""
    script = (
        "import torch, fedbcd as fb;"
        "from fedbcd.engines.deploy.local.up import rehearse_apart;"
        "from support.runs import federation;"
        "torch.set_num_threads(2);"
        "torch.ones(2**18).exp().sum();"
        "rehearse_apart(fb.RunSpec(fb.FedBCD(batch=2), active=2), federation())"
    )
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": tests, "OMP_NUM_THREADS": "2"},
        timeout=100,
        check=False,
    )
    assert done.returncode == 0
