"""Commands and pools in processes of their own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedbcd.experiments.job import parse
from fedbcd.experiments.pool import run_jobs
from support.runs import job_table, train
from support.waiting import wait_for
from support.web import Site


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_command_serves_until_it_is_interrupted(host: str, tmp_path: Path) -> None:
    """A real process: its address on stderr, with a token where others could reach it; Ctrl-C ends
    it without a complaint.
    """
    command = [
        sys.executable,
        "-m",
        "fedbcd",
        "dashboard",
        str(tmp_path),
        "--host",
        host,
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(r"dashboard at http://[^:]+:(\d+)/(?:\?token=(.*))?\n", line)
        assert found is not None, line
        site, token = Site(int(found[1])), found[2]
        assert (token is None) == (host == "127.0.0.1")
        wait_for(lambda: _answers(site))
        assert site.ask("/api/runs").status == (200 if token is None else 401)
        assert site.ask("/api/runs", headers={"Authorization": f"Bearer {token}"}).status == 200
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 0
    assert "Traceback" not in rest


def _answers(site: Site) -> bool:
    try:
        return site.ask("/").status > 0
    except OSError:
        return False


def test_parallel_processes_give_the_same_results(tmp_path: Path) -> None:
    jobs = [parse(job_table(**{"run.seed": s}))[0] for s in range(2)]
    alone, together = run_jobs(jobs, tmp_path / "a"), run_jobs(jobs, tmp_path / "b", workers=2)
    assert [r.summary["digest"] for r in alone] == [r.summary["digest"] for r in together]


def test_it_can_be_turned_off_and_is_then_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own, in which FEDBCD_FUSED=0."""
    program = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from fedbcd.algorithm.fused.library import library\n"
        "from support.runs import train\n"
        "assert library() is None\n"
        "print(train('fedbcd-sync', rounds=3).digest)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "FEDBCD_FUSED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr("fedbcd.compute.fused.library", lambda: None)
    assert done.stdout.strip() == train("fedbcd-sync", rounds=3).digest
