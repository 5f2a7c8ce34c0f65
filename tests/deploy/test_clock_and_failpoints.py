"""Time that respects causes, and places to die at."""

import subprocess
import sys
from random import Random

import pytest

from fedbcd.engines.deploy.processes import failpoints
from fedbcd.engines.deploy.processes.clock import AHEAD_S, TICK_S, HybridClock
from fedbcd.engines.deploy.processes.failpoints import Failpoint, Stopped
from fedbcd.errors import ConfigError


def tick(clock: HybridClock, now: float, sent: float | None = None) -> float:
    clock.last = clock.at(now) if sent is None else clock.after(sent, now)
    return clock.last


def test_time_is_real_time_where_nothing_forbids_it() -> None:
    clock = HybridClock()
    assert tick(clock, 3.0) == 3.0
    assert tick(clock, 5.0, sent=1.0) == 5.0


def test_time_never_goes_back_when_the_local_clock_does() -> None:
    clock = HybridClock()
    times = [tick(clock, now) for now in (10.0, 9.0, 2.0, 10.0)]
    assert times == sorted(set(times))


def test_an_effect_is_later_than_its_cause_where_clocks_are_right_within_seconds() -> None:
    chance = Random(0)
    clocks, skew = [HybridClock() for _ in range(4)], [0.0, -2.0, AHEAD_S / 2, 1.0]
    for now in range(1000):
        a, b = chance.sample(range(4), 2)
        sent = tick(clocks[a], now + skew[a])
        assert tick(clocks[b], now + skew[b], sent) >= sent + TICK_S


def test_off_a_place_does_nothing() -> None:
    failpoints.hit(Failpoint.BEFORE_COMMIT, "Uploaded")


def test_a_place_acts_at_the_asked_time_and_for_the_asked_thing() -> None:
    failpoints.arm(Failpoint.BEFORE_COMMIT, "Uploaded", times=2)
    try:
        failpoints.hit(Failpoint.BEFORE_COMMIT, "Woke")
        failpoints.hit(Failpoint.AFTER_COMMIT, "Uploaded")
        failpoints.hit(Failpoint.BEFORE_COMMIT, "Uploaded")
        with pytest.raises(Stopped):
            failpoints.hit(Failpoint.BEFORE_COMMIT, "Uploaded")
        failpoints.hit(Failpoint.BEFORE_COMMIT, "Uploaded")
    finally:
        failpoints.disarm()


@pytest.mark.parametrize("text", ["nowhere", "before_commit:many", "before_commit:-1", ":3"])
def test_a_place_that_does_not_exist_is_named(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"FEDBCD_FAILPOINT=.* must be NAME\[@WHAT\]\[:TIMES\], NAME one of before_write",
    ):
        failpoints.arm_from_environment(text)


def test_the_environment_kills_the_process() -> None:
    code = (
        "from fedbcd.engines.deploy.processes import failpoints as f; f.arm_from_environment();"
        "[(f.hit(f.Failpoint.AFTER_RENAME, 'x'), print(k, flush=True)) for k in range(9)]"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"FEDBCD_FAILPOINT": "after_rename@x:3", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -9, ended.stderr
    assert ended.stdout.split() == ["0", "1"]
