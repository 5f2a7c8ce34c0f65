"""Whole deployments, with TLS, in processes of their own: undisturbed, hurt, stopped and
resumed.
"""

import json
import os
import re
import signal
import time
from pathlib import Path

import torch
from typer.testing import CliRunner

from fedbcd.cli import app
from fedbcd.engines.deploy.processes.exit_codes import ExitCode
from fedbcd.experiments.job import parse
from fedbcd.record.tensorfile import read_tensors
from support.processes import (
    ENDLESS,
    end_soon,
    go_on,
    job,
    kill,
    pid_of,
    run,
    running,
    status_of,
    stop,
    summary_of,
    write_job,
)
from support.waiting import ended, wait_for


def test_each_role_is_killed_once_and_the_models_are_those_of_the_log(tmp_path: Path) -> None:
    """kill -9 of a coordinator, a server and a device in the middle; the run ends, and its log
    replays to its own digest. One server is slow, and devices are lost during activations.
    """
    out = tmp_path / "run"
    layers = [{"name": "clip", "norm": 0.5}, {"name": "integers"}]
    clock = {"classes": [{"servers": [1], "step": 2}], "dropout": 0.2}
    cloud = {"name": "async", "first": 1}
    table = job(run={**ENDLESS, "uploads": layers}, cloud=cloud, clock=clock)
    file = write_job(tmp_path, table)
    with running("up", file, "--time-scale", "0.1", "--out", out) as up:
        for actor in ("device/1", "server/1", "coordinator"):
            go_on(out, 2)
            kill(out, actor)
        go_on(out)
        stop(up)
    rounds = end_soon(out)
    done = run("up", "--resume", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["rounds"] == rounds
    assert summary["deployment"]["processes"] == 9
    again = run("replay", out, "--exact", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["digest"] == summary["digest"]


def test_each_role_is_killed_once_and_the_digest_is_that_of_the_undisturbed_run(
    tmp_path: Path,
) -> None:
    """Where time decides nothing (Sync-cloud, all devices active, one per server), every x_i and
    z_n of a deployment that was hurt is bit for bit that of one that was not, and of the
    simulation.
    """
    table = job(
        federation={"servers": 2, "devices": 1, "active": 1},
        run={**ENDLESS, "max_batch": 1, "threads": 1},
    )
    table["deploy"] = {"lost_s": [600.0, 3600.0]}  # nobody is given up, however slow the machine is
    hurt, whole = tmp_path / "hurt", tmp_path / "whole"
    with running("up", write_job(tmp_path, table), "--time-scale", "0.1", "--out", hurt) as up:
        for actor in ("device/1", "server/0", "coordinator", "device/0", "server/1"):
            go_on(hurt)
            kill(hurt, actor)
        go_on(hurt)
        stop(up)
    table["run"]["rounds"] = end_soon(hurt)
    for arguments in (
        ("--resume", "--out", hurt),
        (write_job(tmp_path, table), "--time-scale", "0.05", "--out", whole),
    ):
        done = run("up", *arguments)
        assert done.returncode == 0, done.stderr
    parse(table)[0].run(tmp_path / "simulated")
    summaries = {name: summary_of(tmp_path / name) for name in ("hurt", "whole", "simulated")}
    assert {name: summary["rounds"] for name, summary in summaries.items()} == dict.fromkeys(
        summaries, table["run"]["rounds"]
    )
    assert len({summary["digest"] for summary in summaries.values()}) == 1
    assert {(s["measure"], round(s["personal_accuracy"], 9)) for s in summaries.values()} == {
        ("own-shares", round(summaries["simulated"]["personal_accuracy"], 9))
    }
    tensors = [read_tensors(tmp_path / name / "models.safetensors")[0] for name in summaries]
    assert all(torch.equal(tensors[0][key], other[key]) for other in tensors for key in ("x", "z"))


def _silence_is_told(out: Path) -> None:
    """Of a server that stands still, by who waits for it, in seconds and without words of gRPC."""
    server = pid_of(out, "server/1")
    os.kill(server, signal.SIGSTOP)
    try:
        wait_for(lambda: status_of(out, "coordinator").get("silent", {}).get("server/1", 0.0) > 3)
        began = time.monotonic()
        asked = run("status", out, "--plain")
        took_s = time.monotonic() - began
        silent_s = status_of(out, "coordinator")["silent"]["server/1"]
    finally:
        os.kill(server, signal.SIGCONT)
    (told,) = re.findall(r"server 1: no answer for (\d+) s \(network\?\)", asked.stdout)
    assert 3 <= int(told) <= silent_s + 1
    assert asked.returncode == 1
    assert took_s < 2.0 + silent_s  # it does not hang; on a machine with nothing else it takes 2 s
    go_on(out, 2)


def test_a_deployment_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """SIGTERM stops everybody cleanly; --resume takes up what is durable and plays the remaining
    rounds. With FedBCD-I, offline rounds too.

    Where a server has lost its store, --resume begins nothing, not even a process.
    """
    out = tmp_path / "run"
    file = write_job(
        tmp_path,
        job(
            run=ENDLESS,
            algorithm={"name": "fedbcd-i", "device_step": 0.02, "steps": [1, 2]},
            deploy={"peer_s": [2.0, 2.0]},
        ),
    )
    with running("up", file, "--time-scale", "0.05", "--plain", "--out", out) as up:
        go_on(out, 2)
        _silence_is_told(out)
        up.terminate()
        _, said = ended(up)
        assert up.returncode == 130, said
        assert "--resume" in said
    assert not status_of(out, "server/0")
    asked = run("status", out, "--plain")
    assert re.fullmatch(
        r"stopped at round \d+ of 1,000,000; go on with fedbcd up --resume --out"
        rf" {re.escape(str(out))}\n",
        asked.stdout,
    )
    assert (asked.returncode, asked.stderr) == (1, "")
    assert [
        json.loads(line)["code"]
        for line in (out / "logs" / "server-0.log").read_text().splitlines()
        if '"ended"' in line
    ] == [0]
    store, logged = out / "state" / "server-1", (out / "logs" / "coordinator.log").read_text()
    store.rename(tmp_path / "mislaid")
    lost = CliRunner().invoke(app, ["up", "--resume", "--out", str(out)])
    assert f"there is no store in {store}" in str(lost.exception)
    assert getattr(lost.exception, "exit_code", None) == ExitCode.NO_STORE
    assert (store.exists(), (out / "logs" / "coordinator.log").read_text()) == (False, logged)
    (tmp_path / "mislaid").rename(store)
    rounds = end_soon(out)
    done = run("up", "--resume", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == rounds
    assert summary_of(out)["deployment"]["processes"] == 9
    assert run("status", out, "--plain").stdout == f"finished, {rounds} rounds; no role runs\n"


def test_up_refuses_what_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    several = job(runs=[{"title": "a"}, {"title": "b"}])
    for arguments, words in (
        (("up", "--out", tmp_path / "full"), "is not empty"),
        (("up", "--resume", "--out", tmp_path / "full"), "holds no deployment"),
        (("up", "--resume"), "--resume needs --out"),
        (
            ("up", "--resume", "--out", tmp_path / "full", "--rounds", "9", "--plain"),
            "as it was; leave out rounds, plain",
        ),
        (("up", "--servers", "3", "--devices", "10"), "cannot be shared evenly"),
        (("up", write_job(tmp_path, several)), "a deployment runs one job"),
    ):
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert done.exit_code != 0
        assert words in str(done.exception), done.output
