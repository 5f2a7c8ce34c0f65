"""Devices that do not come any more: a phase ends without them, and their membership does."""

import os
import signal
from pathlib import Path

from fedbcd.engines.deploy.processes.absent import Absent
from support.processes import (
    ENDLESS,
    finish_log,
    go_on,
    job,
    pid_of,
    run,
    running,
    status_of,
    stop,
    write_job,
)
from support.waiting import wait_for


def test_who_is_away_for_long_is_proposed_once_and_counts_anew_after_a_visit() -> None:
    now = 0.0
    absent = Absent(10.0, lambda: now)
    assert absent.look([1, 2, 3], [1]) == []
    now = 9.0
    assert absent.look([1, 2, 3], [1, 2]) == []
    now = 11.0
    assert absent.look([1, 2, 3], [1]) == [3]
    assert "device 3; 'fedbcd dismiss'" in absent.trouble[0]
    assert absent.look([1, 2, 3], []) == []
    now = 30.0
    assert absent.look([1, 2], [2]) == [1]  # 3 has been dismissed
    assert absent.devices == (1,)
    now = 31.0
    assert absent.look([1, 2], [1, 2]) == []
    assert absent.trouble == []


def test_phases_end_without_a_device_that_is_gone_and_it_is_dismissed_by_rule(
    tmp_path: Path,
) -> None:
    """Both devices of server 0 are needed, one is paused for good: the deadline ends the phases,
    in the log; then the rule dismisses it, and the log replays.
    """
    out = tmp_path / "run"
    table = job(
        federation={"servers": 1, "devices": 2, "active": 2},
        run={**ENDLESS, "deadline": {"after": 4.0}},
    )
    table["deploy"] = {
        "lost_s": [600.0, 3600.0],
        "peer_s": [1.0, 2.0],
        "absent_s": 3.0,
        "dismiss_absent": True,
    }
    with running("up", write_job(tmp_path, table), "--time-scale", "0.05", "--out", out) as up:
        go_on(out)
        gone = pid_of(out, "device/1")
        os.kill(gone, signal.SIGSTOP)
        try:
            go_on(out, 3)
            wait_for(lambda: status_of(out, "server/0").get("members") == 1, "it is a member still")
        finally:
            os.kill(gone, signal.SIGCONT)
        stop(up)
    digest = finish_log(out)["digest"]
    text = (out / "events.jsonl").read_text()
    assert '"DeadlinePassed"' in text
    assert '"DeviceLeft":{"device":1,"anew":true,"by":"rule"}' in text
    again = run("replay", out, "--exact", "--json")
    assert again.returncode == 0, again.stderr
    assert digest in again.stdout
