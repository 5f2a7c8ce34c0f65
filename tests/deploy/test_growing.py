"""The merged log of a deployment that goes on: it grows at its end only, whatever is killed or cut,
and ends as the merged log.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import fedbcd as fb
from fedbcd.engines.deploy.local.growing_log import GrowingLog, LogTail, Settled, stores_in
from fedbcd.engines.deploy.local.merged_log import header_of
from fedbcd.engines.deploy.local.supervisor import Child
from fedbcd.engines.deploy.local.up import Up, actors_of
from fedbcd.engines.deploy.processes.assemble import Deployment
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.errors import LocalProtocolError, RecordError
from fedbcd.experiments.deployed import one_job
from fedbcd.protocol.messages import Actor, device_actor
from fedbcd.record.eventlog import LogReader
from fedbcd.spec import RunSpec
from support.deployments import CASES, Town, Unkind, federation
from support.merging import merge
from support.processes import (
    ENDLESS,
    finish_log,
    go_on,
    job,
    kill,
    run,
    running,
    start,
    state_folder,
    stop,
    write_job,
)
from support.timelines import check_timeline
from support.waiting import ended, wait_for


class Watched(Unkind):
    """An unkind world in which somebody keeps the log; now and then the keeper dies, and leaves
    half a line.
    """

    def begin(self, path: Path) -> None:
        self.path, self.states = path, [b""]
        self.log = self._opened()

    def _opened(self) -> GrowingLog:
        town = self.town
        folders = {
            actor: town.folder / actor
            for actor in [*town.actors, *(device_actor(d) for d in sorted(town.late))]
        }
        return GrowingLog(self.path, header_of(town.spec, town.federation), town.blueprint, folders)

    def _step(self) -> None:
        super()._step()
        if self.chance.random() < 0.1:
            self.look()

    def look(self) -> None:
        self.log.grow({actor: Settled(self.town.now, -1) for actor in self.town.roles})
        state = self.path.read_bytes()
        assert state.startswith(self.states[-1])
        self.states.append(state)
        if self.chance.random() < 0.2:
            self.log.close()
            cut = self.chance.randrange(
                len(self.states[-2]), len(state) + 1
            )  # what was synced before is safe
            self.path.write_bytes(state[:cut])
            self.states[-1] = state[: state.rfind(b"\n", 0, cut) + 1]
            self.log = self._opened()

    def end(self) -> tuple[dict[str, Any], bytes]:
        self.town.close()
        end = self.log.finish()
        self.log.close()
        check_timeline(self.path)
        return end, self.path.read_bytes()


def watched(folder: Path, towns: list[Town], case: str, seed: int, **trouble: float) -> Watched:
    algorithm, cloud = CASES[case]
    town = Town(folder / "town", RunSpec(algorithm, cloud, active=2), federation())
    towns.append(town)
    world = Watched(town, seed, **trouble)
    world.begin(folder / "events.jsonl")
    world.play(12)
    world.calm()
    return world


@pytest.mark.parametrize(
    ("case", "seed"),
    [("fedbcd-sync", 0), ("fedbcd-async", 1), ("fedbcd-i-rigorous", 2), ("fedavg-sync", 3)],
)
def test_the_log_grows_at_its_end_and_ends_as_the_merged_log(
    case: str, seed: int, folder: Path, towns: list[Town]
) -> None:
    world = watched(folder, towns, case, seed)
    end, grown = world.end()
    assert len(world.states) > 20
    assert all(grown.startswith(state) for state in world.states)
    out, merged = world.town.merged()
    assert merged == end
    assert grown == out.read_bytes()
    assert b'"journal"' not in grown  # a report's: the lines of its server, which are there


@pytest.mark.parametrize("seed", [4, 5, 6])
def test_what_was_written_of_a_device_that_lost_its_disk_stays(
    seed: int, folder: Path, towns: list[Town]
) -> None:
    """Its own log is gone, but not from the one that grew; the replay ends with the models of the
    run all the same.
    """
    world = watched(folder, towns, "fedbcd-async", seed, lost_disks=0.004, backups=0.004)
    end, grown = world.end()
    assert all(grown.startswith(state) for state in world.states)
    assert fb.replay(world.path, world.town.federation, exact=True)["digest"] == end["digest"]


def test_a_log_that_is_finished_is_gone_on_with(folder: Path, towns: list[Town]) -> None:
    world = watched(folder, towns, "fedbcd-sync", 7)
    end, grown = world.end()
    for half in (b"", b'{"t": 12.5, "on": "dev'):
        world.path.write_bytes(grown + half)
        again = world._opened()
        assert again.finish() == end
        again.close()
        assert world.path.read_bytes() == grown


def test_a_foreign_log_and_a_server_with_another_store_are_refused(
    folder: Path, towns: list[Town]
) -> None:
    world = watched(folder, towns, "fedbcd-sync", 8)
    world.look()
    world.log.close()
    (folder / "other.jsonl").write_bytes(b'{"fedbcd_log":1,"identity":{}}\n')
    world.path, kept = folder / "other.jsonl", world.path
    with pytest.raises(RecordError, match="log of another run"):
        world._opened()
    world.path = kept
    world.town.close()
    for file in (world.town.folder / "server/1").glob("store.sqlite*"):
        file.unlink()
    log = world._opened()
    with pytest.raises(RecordError, match="store of server/1 does not hold what is in"):
        log.finish()
    log.close()


def test_an_onlooker_sees_every_line_once_and_in_order(folder: Path, towns: list[Town]) -> None:
    algorithm, cloud = CASES["fedbcd-async"]
    town = Town(folder / "town", RunSpec(algorithm, cloud, active=2), federation())
    towns.append(town)
    unkind = Unkind(town, 9)
    unkind.play(4)
    onlooker = LogTail(
        [store for kind in ("server", "device") for store in stores_in(town.folder / kind)]
    )
    seen = onlooker.lines(wait=False)
    assert seen
    assert onlooker.lines(wait=True) == []
    town.close()
    unkind.play(8)
    unkind.calm()
    town.close()
    seen += onlooker.lines(wait=True)
    out, _ = town.merged()
    assert seen == [
        line
        for line in out.read_bytes().splitlines(keepends=True)[1:-1]
        if b'"on":"coordinator"' not in line
    ]
    with pytest.raises(RecordError, match="is no store of a role and holds none"):
        stores_in(folder / "nowhere")


def test_two_do_not_write_the_same_log(
    folder: Path, towns: list[Town], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = watched(folder, towns, "fedbcd-sync", 11)
    half = world.path.read_bytes()[:-5]
    world.path.write_bytes(half)  # the other one is in the middle of a line
    monkeypatch.setattr("fedbcd.engines.deploy.local.growing_log.ALONE_S", 0.1)
    with pytest.raises(RecordError, match="another process writes"):
        world._opened()
    assert world.path.read_bytes() == half
    world.log.close()
    world._opened().close()


def up_of(world: Watched, folder: Path) -> Up:
    """A parent whose children are but names."""
    town = world.town
    plan = Deployment.of(town.federation, town.spec, Deploy(folder=str(town.folder), plain=True))
    up = Up(plan, folder, world.log)
    up.supervisor.children = {actor: Child(actor) for actor in actors_of(town.blueprint)}
    return up


def test_a_log_that_cannot_be_written_does_not_end_the_run(
    folder: Path, towns: list[Town], capsys: pytest.CaptureFixture[str]
) -> None:
    world = watched(folder, towns, "fedbcd-sync", 10)
    up = up_of(world, folder)
    for error in (OSError(28, "No space left on device"), LocalProtocolError("what cannot be")):
        up._grows = True
        world.log.grow = Mock(side_effect=error)  # type: ignore[method-assign]
        up._grow({})
        up._grow({})
        assert world.log.grow.call_count == 1
        assert f"the log does not grow any more: {error}" in capsys.readouterr().err
    world.log.close()


def test_the_store_of_a_new_process_is_read_whatever_its_length(
    folder: Path, towns: list[Town]
) -> None:
    """It may have lost its disk and have done as much since as before."""
    world = watched(folder, towns, "fedbcd-sync", 12)
    up = up_of(world, folder)
    world.log.grow = Mock()  # type: ignore[method-assign]
    told = []
    for pid in (7, 7, 8, 8):
        up.supervisor.children["server/0"].pid = pid
        up._grow({"server/0": {"settled": 5.0, "events": 40, "pid": pid}})
        told.append(world.log.grow.call_args.args[0]["server/0"])
    assert told == [Settled(5.0, -1), Settled(5.0, 40)] * 2
    world.log.close()


def stores_of(out: Path, actors: list[Actor]) -> dict[Actor, FileStore]:
    return {actor: FileStore(state_folder(out, actor), read_only=True) for actor in actors}


def test_the_log_of_a_real_deployment_grows_while_roles_are_killed(tmp_path: Path) -> None:
    """Every state of the file is a prefix of the last one, which is the merged log of the stores;
    `fedbcd log` follows stores.
    """
    out, table = tmp_path / "run", job(run=ENDLESS, cloud={"name": "async", "first": 1})
    states: list[bytes] = []

    def look() -> int:
        states.append((out / "events.jsonl").read_bytes())
        return len({state.count(b"\n") for state in states})

    with (
        running("up", write_job(tmp_path, table), "--time-scale", "0.1", "--out", out) as up,
        (tmp_path / "followed").open("w") as file,
    ):
        for actor in ("device/1", "server/1", "coordinator"):
            go_on(out)
            look()
            kill(out, actor)
            if actor == "device/1":
                follower = start(
                    "log",
                    state_folder(out, "server/0"),
                    state_folder(out, "device/2"),
                    "--follow",
                    stdout=file,
                )
        wait_for(lambda: look() >= 5, "no lines come while rounds go on")
        stop(up)
        finish_log(out)
        final = (out / "events.jsonl").read_bytes()
        expected = [
            line
            for line in final.decode().splitlines()
            if '"on":"server/0"' in line or '"on":"device/2"' in line
        ]
        wait_for(
            lambda: len((tmp_path / "followed").read_text().splitlines()) >= len(expected),
            "not all is followed",
        )
        follower.terminate()
        _, complaints = ended(follower)
    assert all(final.startswith(state) for state in states)
    assert not complaints
    assert (tmp_path / "followed").read_text().splitlines() == expected
    assert len(run("log", out).stdout.splitlines()) == len(list(LogReader(out / "events.jsonl")))
    _same_as_merged(out, table, final, tmp_path / "merged.jsonl")


def _same_as_merged(out: Path, table: dict[str, Any], final: bytes, merged: Path) -> None:
    one = one_job(table)
    data, spec = one.make_federation(), one.spec
    actors = ["coordinator", "server/0", "server/1", *(device_actor(d) for d in range(6))]
    stores = stores_of(out, actors)
    try:
        merge(stores, Blueprint.of(spec, data), header_of(spec, data, one.to_table()), merged)
    finally:
        for store in stores.values():
            store.close()
    assert merged.read_bytes() == final
    assert json.loads(final.splitlines()[-1])["end"]["transitions"] == final.count(b"\n") - 2
