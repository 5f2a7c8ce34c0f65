"""A Ray of its own: started for one run on the command line, stopped by Ctrl-C, gone afterwards."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster_helpers import QUIET, TWO
from fedbcd.experiments.job import parse
from run_helpers import job_table, write_job

pytestmark = QUIET


def _processes_of(group: int) -> list[str]:
    found = subprocess.run(["ps", "-o", "args=", "--sid", str(group)], capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if line.strip()]


@pytest.mark.usefixtures("two_nodes")
def test_ctrl_c_stops_after_the_round_and_leaves_a_run_to_resume(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    changes = {"run.rounds": 100_000, "run.checkpoint_every": 5, "run.evaluate_every": 50}
    job, out = write_job(tmp_path / "job.toml", **changes), tmp_path / "out"
    command = [sys.executable, "-m", "fedbcd.cli", "run", str(job), "--out", str(out), "--engine", "cluster", "--actors", "2"]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True, env=environment)
        deadline = time.monotonic() + 120
        while not (out / "checkpoint.safetensors").exists():
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all processes of the command
        assert process.wait(60) == 130, (tmp_path / "said").read_text()
    for _ in range(100):
        if not _processes_of(process.pid):
            break
        time.sleep(0.1)
    assert _processes_of(process.pid) == []
    done = (out / "history.csv").read_text().splitlines()
    rounds = max(int(line.split(",")[0]) for line in done[1:])
    again = parse(job_table(**changes | {"run.rounds": rounds + 200}))[0].start(out, resume=True, engine=TWO)
    assert again.finished
    assert again.summary["rounds"] == rounds + 200
