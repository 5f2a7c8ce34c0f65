"""Clocks that are wrong, by minutes, days or years: nobody stands still, nobody's time is carried
along, and the log goes on.
"""

import itertools
import json
import math
import time
from pathlib import Path

import pytest

import fedbcd as fb
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.local.growing_log import GrowingLog, Settled
from fedbcd.engines.deploy.local.log_order import Order
from fedbcd.engines.deploy.local.merged_log import header_of
from fedbcd.engines.deploy.processes.clock import (
    AHEAD_S,
    FALSE_CLOCKS,
    LASTING_S,
    OFF_S,
    TICK_S,
    HybridClock,
    SteadyClock,
    said_at,
    wall,
)
from fedbcd.engines.deploy.processes.logs import log_of
from fedbcd.engines.deploy.processes.metrics import Metrics
from fedbcd.engines.deploy.processes.skew import Skews
from fedbcd.protocol.messages import (
    COORDINATOR,
    Acknowledged,
    Activated,
    Actor,
    Send,
    UpdateRequested,
    Uploaded,
    Woke,
)
from fedbcd.record.eventlog import LogReader, Transition
from fedbcd.spec import RunSpec
from support.deployments import BCD, CASES, Town, Unkind, federation
from support.processes import (
    ENDLESS,
    finish_log,
    job,
    kill,
    metrics_of,
    round_of,
    run,
    start,
    status_of,
    stop,
    write_job,
)
from support.waiting import wait_for

MINUTES, DAYS, YEARS = 300.0, 2 * 86_400.0, 30 * 365.25 * 86_400.0
JUMPS = [sign * jump for jump in (MINUTES, DAYS, YEARS) for sign in (1, -1)]


# ------------------------------------------------------------------------------------------------
# time of one role
@pytest.mark.parametrize("ahead", [MINUTES, 80_000.0, DAYS, YEARS, 1e18])
def test_what_arrives_carries_time_ahead_by_seconds_at_most(ahead: float) -> None:
    clock = HybridClock(100.0)
    assert clock.after(100.0 + ahead, 100.0) <= 100.0 + AHEAD_S + TICK_S
    assert clock.after(98.0, 100.0) == 100.0 + TICK_S
    assert clock.after(103.0, 100.0) == 103.0 + TICK_S


@pytest.mark.parametrize("ahead", [MINUTES, DAYS, YEARS, 1e15])
def test_a_role_whose_time_is_far_ahead_counts_until_its_clock_has_caught_up(ahead: float) -> None:
    clock = HybridClock(100.0 + ahead)
    times = [clock.last]
    for k in range(1000):
        clock.last = clock.at(100.0 + k / 10)
        times.append(clock.last)
    assert all(one < other for one, other in itertools.pairwise(times))
    assert times[-1] - times[0] < max(1.0, 1000 * math.ulp(times[0]) * 2)
    assert clock.at(200.0 + ahead) == pytest.approx(200.0 + ahead)


def test_a_role_that_counts_tells_its_peers_the_time_by_its_clock() -> None:
    assert said_at(100.0 + DAYS, 100.0) == 100.0 + AHEAD_S
    assert said_at(99.0, 100.0) == 99.0
    assert said_at(TICK_S, -YEARS) == 0.0


class Machine:
    """A machine's clocks: the one on the wall, which may jump, and the steady one."""

    def __init__(self) -> None:
        self.wall, self.steady = 1000.0, 0.0

    def clock(self) -> SteadyClock:
        return SteadyClock(900.0, lambda: self.wall, lambda: self.steady)

    def passes(self, seconds: float) -> None:
        self.wall, self.steady = self.wall + seconds, self.steady + seconds


@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_for_a_moment_does_not_move_a_process_that_runs(jump: float) -> None:
    machine = Machine()
    clock = machine.clock()
    assert clock.now() == 100.0
    machine.wall += jump
    for _ in range(5):
        machine.passes(10.0)
        clock.now()
    assert clock.now() == pytest.approx(150.0)
    machine.wall -= jump
    machine.passes(1.0)
    assert clock.now() == pytest.approx(151.0)


def test_the_wall_is_followed_where_it_is_ahead_for_good() -> None:
    """A little at once; more, as after a machine has slept or was set right, once it has lasted."""
    machine = Machine()
    clock = machine.clock()
    machine.wall += AHEAD_S / 2
    assert clock.now() == 100.0 + AHEAD_S / 2
    machine.wall += DAYS
    clock.now()
    machine.passes(LASTING_S + 1)
    assert (
        clock.now()
        == clock.on_the_wall()
        == pytest.approx(100.0 + AHEAD_S / 2 + DAYS + LASTING_S + 1)
    )


def test_a_clock_that_is_set_back_goes_on_at_the_rate_of_time() -> None:
    machine = Machine()
    clock = machine.clock()
    clock.begin_at(50.0)
    assert clock.now() == 100.0
    clock.begin_at(120.0)
    machine.wall -= YEARS
    machine.passes(3600.0)
    assert clock.now() == pytest.approx(120.0 + 3600.0)


def test_a_false_clock_is_that_of_one_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clocks").write_text("device/1 80000\nserver/0 -3600\n")
    monkeypatch.setenv(FALSE_CLOCKS, str(tmp_path / "clocks"))
    assert wall("device/1") - time.time() == pytest.approx(80_000, abs=5)
    assert wall("server/0") - time.time() == pytest.approx(-3600, abs=5)
    assert wall("device/2") - time.time() == pytest.approx(0, abs=5)


def test_skew_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("server/0")
    skews = Skews(metrics, log_of("server/0"))
    for ahead in (1.0, 80_000.0, 80_001.0):
        skews.at_least("device/1", ahead)
    skews.at_least("device/1", -3.0)  # it took long to come, which says nothing
    skews.measured("device/2", -MINUTES)
    assert skews.status()["clock_skew"] == 80_001.0
    assert skews.status()["clock_skew_of"] == "device/1"
    assert metrics.value("fedbcd_clock_skew_seconds") == 80_001.0
    skews.forget("device/1")
    assert metrics.value("fedbcd_clock_skew_seconds") == -MINUTES
    assert [
        (record.getMessage(), record.fields["peer"], record.fields["seconds"])
        for record in caplog.records
    ] == [
        ("clock_skew", "device/1", 80_000.0),
        ("clock_skew", "device/2", -MINUTES),
    ]
    caplog.clear()
    skews.note_own(DAYS)
    skews.note_own(DAYS)
    (record,) = caplog.records
    assert "ahead of the clock of its machine; it goes on all the same" in record.fields["sentence"]


# ------------------------------------------------------------------------------------------------
# order of logs
def test_a_cause_comes_before_its_effect_whatever_their_times() -> None:
    """A device that is a day ahead asks, is let in, and uploads; its server's times are right. Then
    the other way round.
    """
    for ahead in (86_400.0, -86_400.0):
        lines = _ordered(ahead)
        assert [(line.actor, type(line.event).__name__) for line in lines] == [
            ("device/0", "Woke"),
            ("server/0", "UpdateRequested"),
            ("device/0", "Activated"),
            ("server/0", "Uploaded"),
            ("device/0", "Acknowledged"),
        ]
        assert all(one.time <= other.time for one, other in itertools.pairwise(lines))
    grown = _ordered(86_400.0, before=50.0)
    assert [line.time for line in grown] == [
        2.0,
        2.0,
        4.0,
        4.0,
    ]  # the server's, and what they rest on


def _ordered(ahead: float, before: float = math.inf) -> list[Transition]:
    ask, start = UpdateRequested(device=0, activation=0), Activated(activation=0, model="z/0/0")
    upload, done = Uploaded(device=0, activation=0, model="x/0/0"), Acknowledged(activation=0)
    order = Order(lambda _: 0)
    device = [(Woke(), ask), (start, upload), (done, None)]
    server = [(ask, start), (upload, done)]
    for actor, to, steps, first in (
        ("device/0", "server/0", device, 1 + ahead),
        ("server/0", "device/0", server, 2.0),
    ):
        said = [
            (event, () if answer is None else (Send(to=to, message=answer),))
            for event, answer in steps
        ]
        order.add(
            actor,
            [
                Transition(first + 2 * k, actor, event, commands)
                for k, (event, commands) in enumerate(said)
            ],
        )
    return order.due(before)


# ------------------------------------------------------------------------------------------------
# roles hand-fed
@pytest.mark.parametrize("actor", ["device/1", "server/1", COORDINATOR])
def test_rounds_and_the_log_go_on_whatever_the_clock_of_a_role_does(
    actor: Actor, folder: Path, towns: list[Town]
) -> None:
    """Jumps by minutes, days and years, there and back, each followed by a restart with the wrong
    clock and one with the right one.
    """
    algorithm, cloud = CASES["fedbcd-async"]
    town = Town(folder / "town", RunSpec(algorithm, cloud, active=2), federation())
    towns.append(town)
    world = Unkind(town, 1, loss=0.05, death=0.0, fail=0.0, give_up=0.0)
    town.start()
    for jump in JUMPS:
        for offset, again in ((jump, False), (jump, True), (0.0, False), (0.0, True)):
            town.offsets[actor] = offset
            if again:
                town.restart(actor)
            _one_more_round(world)
            others = {one: role for one, role in town.roles.items() if one != actor}
            assert all(
                role.earliest(town.now) <= town.now + 2 * AHEAD_S for role in others.values()
            )
    assert not [
        sentence for sentence in town.refused if "clock" in sentence or "sent at" in sentence
    ]
    world.calm()
    town.replayed()
    times = [line.time for line in LogReader(town.folder / "events.jsonl")]
    assert times == sorted(times)


def _one_more_round(world: Unkind) -> None:
    goal = world.town.rounds + 1
    for _ in range(5000):
        world._step()
        if world.town.rounds >= goal:
            return
    raise AssertionError(f"no round {goal}: {world.town.refused[-3:]}")


@pytest.mark.parametrize("actor", ["device/1", "server/1", COORDINATOR])
def test_the_growing_log_does_not_wait_for_a_role_that_is_ahead(
    actor: Actor, folder: Path, towns: list[Town]
) -> None:
    """What its peers have heard of it is written, at the time at which they heard it; also by a
    writer that begins again.
    """
    algorithm, cloud = CASES["fedbcd-async"]
    town = Town(folder / "town", RunSpec(algorithm, cloud, active=2), federation())
    towns.append(town)
    world = Unkind(town, 2, loss=0.05, death=0.0, fail=0.0, give_up=0.0)
    town.start()
    path, states = folder / "events.jsonl", [b""]

    def settled(one: Actor) -> Settled:
        time, now = town.roles[one].earliest(town.by_clock_of(one)), town.by_clock_of(one)
        found = Settled.of({"settled": time, "events": -1, "counting": time > now + OFF_S})
        assert found is not None
        return found

    def look() -> int:
        """Grow, and how many rounds are in the log."""
        folders = {one: town.folder / one for one in town.actors}
        log = GrowingLog(path, header_of(town.spec, town.federation), town.blueprint, folders)
        for _ in range(2):
            log.grow({one: settled(one) for one in town.roles})
        assert log.clock <= town.now + 3 * AHEAD_S
        log.close()
        states.append(path.read_bytes())
        assert states[-1].startswith(states[-2])
        return states[-1].count(b'"MixModels"')

    _one_more_round(world)
    for offset in (80_000.0, 0.0):
        town.offsets[actor] = offset
        town.restart(actor)
        for _ in range(3):
            before = look()
            _one_more_round(world)
            town.now += 2 * AHEAD_S  # the others may be ahead by seconds
            _one_more_round(world)
            town.now += 2 * AHEAD_S
            assert look() > before
    town.offsets[actor] = 80_000.0
    _one_more_round(world)
    world.calm()
    town.close()
    log = GrowingLog(
        path,
        header_of(town.spec, town.federation),
        town.blueprint,
        {one: town.folder / one for one in town.actors},
    )
    for _ in range(2):
        log.grow({}, until=town.now + AHEAD_S)
    log.close()
    log = GrowingLog(
        path,
        header_of(town.spec, town.federation),
        town.blueprint,
        {one: town.folder / one for one in town.actors},
    )
    end = log.finish()
    assert (
        end["clock"] <= town.now + 3 * AHEAD_S
    )  # also what nobody has heard is written at a time that can be
    log.close()
    assert path.read_bytes().startswith(states[-1])
    assert fb.replay(path, town.federation, exact=True)["digest"] == end["digest"]


def test_a_log_that_stood_still_goes_on_when_everybody_was_carried_away(
    folder: Path, towns: list[Town]
) -> None:
    """As one phone did to a federation of 0.1.0: all have recorded times that are a day ahead, and
    count from there.
    """
    algorithm, cloud = CASES["fedbcd-async"]
    town = Town(folder / "town", RunSpec(algorithm, cloud, active=2), federation())
    towns.append(town)
    world = Unkind(town, 3, loss=0.05, death=0.0, fail=0.0, give_up=0.0)
    town.start()
    _one_more_round(world)
    folders = {one: town.folder / one for one in town.actors}
    for round_, offset in enumerate((80_000.0, 0.0, 0.0)):
        town.offsets = dict.fromkeys(town.actors, offset)
        _one_more_round(world)
        said = {one: role.earliest(town.by_clock_of(one)) for one, role in town.roles.items()}
        counting = [
            Settled.of(
                {"settled": time, "events": -1, "counting": time > town.now + offset + OFF_S}
            )
            for time in said.values()
        ]
        log = GrowingLog(
            folder / "events.jsonl",
            header_of(town.spec, town.federation),
            town.blueprint,
            folders,
        )
        log.grow({one: each for one, each in zip(said, counting, strict=True) if each is not None})
        log.close()
        assert (
            round_ == 0
            or (folder / "events.jsonl").read_bytes().count(b'"MixModels"') == town.rounds
        )
    world.calm()
    town.replayed()


def test_a_letter_of_0_1_0_from_a_clock_that_is_days_ahead_is_taken(
    folder: Path, towns: list[Town]
) -> None:
    """It says the time by the sender's log, however far ahead that is; nothing else in it has
    changed.
    """
    town = Town(folder, RunSpec(BCD, fb.AsyncCloud(first=1), active=2), federation())
    towns.append(town)
    town.start()
    answers = town.roles["server/0"].receive(
        Letter(
            "device/0", "server/0", UpdateRequested(device=0, activation=0), None, town.now + DAYS
        ),
        town.now,
    )
    assert [type(letter.event) for letter in answers] == [Activated]
    assert answers[0].clock <= town.now + AHEAD_S + TICK_S


# ------------------------------------------------------------------------------------------------
# processes
def test_processes_go_on_whatever_their_clocks_do(tmp_path: Path) -> None:
    """While they run, after a restart with the wrong clock, and after one with the right clock
    again; for each kind of role.
    """
    out, clocks = tmp_path / "run", tmp_path / "clocks"
    file = write_job(tmp_path, job(run=ENDLESS, cloud={"name": "async", "first": 1}))
    wrong = {"coordinator": -YEARS, "server/0": DAYS, "device/1": 80_000.0}
    clocks.write_text("")

    def written() -> int:
        return (
            (out / "events.jsonl").read_bytes().count(b'"MixModels"')
            if (out / "events.jsonl").exists()
            else 0
        )

    def goes_on() -> None:
        round_, line = round_of(out), written()
        wait_for(lambda: round_of(out) > round_ + 2, "rounds stand still")
        wait_for(lambda: written() > line + 2, "events.jsonl stands still")

    up = start(
        "up", file, "--time-scale", "0.05", "--out", out, environment={FALSE_CLOCKS: str(clocks)}
    )
    try:
        wait_for(lambda: round_of(out) > 1, "no first round")
        clocks.write_text("".join(f"{actor} {seconds}\n" for actor, seconds in wrong.items()))
        goes_on()
        assert status_of(out, "server/0")["clock"] < 10_000
        assert status_of(out, "server/0")["clock_ahead"] < -10_000
        for actor in wrong:
            kill(out, actor)
        goes_on()
        assert status_of(out, "server/0")["clock"] > DAYS
        wait_for(
            lambda: abs(status_of(out, COORDINATOR).get("clock_skew", 0.0) - DAYS) < 600, "no skew"
        )
        assert "server/0 +17" in run("status", out).stdout  # 172,800 s, as the coordinator sees it
        assert "fedbcd_clock_skew_seconds 17" in metrics_of(out, COORDINATOR)
        clocks.write_text("")
        for actor in wrong:
            kill(out, actor)
        goes_on()
        assert status_of(out, "server/0")["clock_ahead"] > DAYS / 2
        assert status_of(out, "server/1")["clock"] < 10_000
        stop(up)
    finally:
        up.kill()
        up.communicate()
    end = finish_log(out)
    assert json.loads(run("replay", out, "--exact", "--json").stdout)["digest"] == end["digest"]
