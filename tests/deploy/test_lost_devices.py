"""A device that dies holds its phase up for seconds; one that is only slow is not given up for
ever.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fedbcd.engines.deploy.local.status_client import ask_status
from fedbcd.engines.deploy.local.up import free_ports
from fedbcd.engines.deploy.processes.timeouts import GROWTH, MULTIPLE, LostTimeout
from support.processes import job, running, write_job
from support.waiting import wait_for

LEAST, MOST = 10.0, 3600.0


def test_before_any_upload_a_device_is_given_up_after_seconds() -> None:
    assert LostTimeout(LEAST, MOST).seconds(0) == LEAST


def test_those_who_were_let_in_together_make_patience_grow_once() -> None:
    patience = LostTimeout(LEAST, MOST)
    for device in range(5):
        patience.seconds(device)
    for device in range(5):
        patience.given_up(device)
    assert patience.seconds(5) == 2 * LEAST


@pytest.mark.parametrize("takes", [5.0, 60.0, 600.0, 3000.0])
def test_slow_devices_are_soon_given_the_time_that_they_take(takes: float) -> None:
    """Each that is given up makes room for the next; nobody is, once the first upload has come,
    however late.
    """
    patience = LostTimeout(LEAST, MOST)
    now, given_up = 0.0, 0
    while now + patience.seconds(given_up) < takes:
        now += patience.seconds(given_up)
        patience.given_up(given_up)
        given_up += 1
    assert given_up <= 8
    patience.observe(0, takes)
    assert all(patience.seconds(one) >= min(MULTIPLE * takes, MOST) for one in range(100))


def test_a_slow_device_among_quick_ones_is_given_the_time_that_it_took() -> None:
    patience = LostTimeout(LEAST, MOST)
    for k in range(200):
        patience.observe(k % 20, 60.0 if k % 20 == 3 and k < 20 else 1.0 if k % 20 != 3 else 60.0)
    assert patience.seconds(4) <= MULTIPLE * 60.0
    for k in range(64):
        patience.observe(5 + k % 5, 1.0)
    assert patience.seconds(4) == LEAST
    assert patience.seconds(3) == MULTIPLE * 60.0


def test_patience_stays_within_its_bounds() -> None:
    patience = LostTimeout(LEAST, MOST)
    for device in range(100):
        assert LEAST <= patience.seconds(device) <= MOST
        patience.given_up(device)
    assert patience.seconds(0) == MOST
    patience.observe(0, 1e9)
    assert patience.seconds(0) == MOST


def test_no_member_makes_patience_grow_without_bound() -> None:
    """A device that takes a day for one upload, and one that does so again and again: patience
    with the others grows by a bounded factor each time.
    """
    patience, factor = LostTimeout(LEAST, MOST), GROWTH * MULTIPLE
    for k in range(1, 4):
        before = patience.seconds(1)
        patience.observe(0, 86_400.0)
        assert patience.seconds(1) <= factor * before, k
    assert patience.seconds(0) <= MOST


def test_a_phase_goes_on_within_seconds_when_a_device_is_killed_in_its_first_training(
    tmp_path: Path,
) -> None:
    """One place, two devices: the second one has it as soon as the first is given up."""
    ports = free_ports(2)
    deploy = {
        "plain": True,
        "folder": str(tmp_path),
        "coordinator": f"127.0.0.1:{ports[0]}",
        "servers": [f"127.0.0.1:{ports[1]}"],
    }
    table = job(
        federation={"servers": 1, "devices": 2, "active": 1},
        algorithm={"name": "fedbcd", "device_step": 0.02, "steps": [1, 1]},
        clock={
            "arrival": {"name": "constant", "value": 0.1},
            "step": {"name": "constant", "value": 3.0},
        },
    )
    file = write_job(
        tmp_path, table | {"deploy": deploy | {"time_scale": 1.0, "lost_s": [1.0, 3600.0]}}
    )

    def status(role: str) -> dict[str, object]:
        return ask_status(tmp_path / role) or {}

    def trains(device: int) -> Callable[[], bool]:
        return lambda: status(f"device-{device}").get("waits_for") == "training"

    coordinator, server = (
        running("coordinator", file, "--init"),
        running("server", file, "--id", "0", "--init"),
    )
    with coordinator, server, running("device", file, "--id", "0") as first:
        wait_for(trains(0), "no training")
        os.kill(first.pid, signal.SIGKILL)
        with running("device", file, "--id", "1"):
            wait_for(lambda: status("server-0").get("devices") == 1, "nobody else is there")
            wait_for(
                lambda: int(str(status("coordinator").get("round", 0))) >= 1,
                "the phase stands still",
            )  # the limit is a fifth of 900 s
