"""Stores notice damage: no flipped bit changes what a role knows, nothing is deleted from a damaged
store, and who only looks writes nothing.
"""

import shutil
import sqlite3
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import fedbcd as fb
from fedbcd.engines.deploy.roles import snapshot
from fedbcd.engines.deploy.roles.filestore import FileStore, read_tail
from fedbcd.errors import RecordError
from fedbcd.protocol.messages import COORDINATOR, TrainOffline, Woke
from fedbcd.record.eventlog import Transition
from fedbcd.spec import RunSpec
from support.deployments import BCD, Town, Unkind, federation

MODEL = torch.arange(5, dtype=torch.float32) / 3
STEP = Transition(0.1 + 0.2, "device/3", Woke(), (TrainOffline(session=4),))


def known(town: Town, actor: str, place: Path) -> dict[str, Any]:
    """All that a role knows that comes up with this store."""
    store = FileStore(place)
    try:
        role = town._opened(actor, store)
        tensors = {name: store.tensor(name).tolist() for name in sorted(store.names())}
        log = [*store.transitions()]
        return {
            "state": snapshot.take(role._parts(), store.length, role._clock.last),
            "facts": dict(store.facts),
            "tensors": tensors,
            "log": log,
        }
    finally:
        store.close()


@pytest.mark.parametrize("actor", [COORDINATOR, "server/0", "device/0"])
def test_no_flipped_bit_changes_what_a_role_knows(
    actor: str, folder: Path, towns: list[Town]
) -> None:
    """Of 300 flips in stores without checksums, 9, 9 and 19 had changed it unnoticed, as an
    activation from 21 to 0.
    """
    town = Town(folder / "town", RunSpec(BCD, fb.AsyncCloud(first=2), active=2), federation())
    towns.append(town)
    Unkind(town, 5, death=0.0, fail=0.0).play(6)
    town.close()
    place = folder / "town" / actor
    right, database = known(town, actor, place), place / "store.sqlite"
    whole, chance, noticed = database.read_bytes(), Random(7), 0
    for _ in range(60):
        data, bit = bytearray(whole), chance.randrange(8 * len(whole))
        data[bit // 8] ^= 1 << bit % 8
        database.write_bytes(data)
        files = {path.name for path in (place / "tensors").iterdir()}
        try:
            assert known(town, actor, place) == right, f"bit {bit} was flipped unnoticed"
        except RecordError:
            noticed += 1
        assert files == {path.name for path in (place / "tensors").iterdir()}
        for left in ("-wal", "-shm"):
            (place / f"store.sqlite{left}").unlink(missing_ok=True)
    assert noticed > 2  # most bits of a small store are of nothing
    database.write_bytes(whole)


def test_a_store_of_0_1_0_opens_as_it_is_and_is_given_checksums(folder: Path) -> None:
    store = FileStore(folder, begin=True)
    store.save("x", MODEL)
    store.commit(STEP, {"phase": "7"})
    store.close()
    with sqlite3.connect(folder / "store.sqlite") as db:  # as 0.1.0 made it
        for table in ("fact", "tensor", "transition"):
            db.execute(f"ALTER TABLE {table} DROP COLUMN sum")
        db.execute("UPDATE fact SET value = '1' WHERE key = 'version'")
    db.close()
    looked = FileStore(folder, read_only=True)
    assert (list(looked.transitions()), looked.facts["version"]) == ([STEP], "1")
    looked.close()
    again = FileStore(folder)
    assert (list(again.transitions()), again.facts["phase"]) == ([STEP], "7")
    assert again.facts["version"] == "2"
    assert torch.equal(again.tensor("x"), MODEL)
    again.commit(STEP)
    again.close()
    with sqlite3.connect(folder / "store.sqlite") as db:
        db.execute("UPDATE fact SET value = '8' WHERE key = 'phase'")
    db.close()
    with pytest.raises(RecordError, match=r"fact phase of the store .* is damaged: its checksum"):
        FileStore(folder)


@pytest.mark.parametrize("damage", ["file", "missing", "row"])
def test_nothing_is_deleted_from_a_damaged_store(damage: str, folder: Path) -> None:
    """What is swept after a crash may be all that is left of what a damaged file held."""
    store = FileStore(folder, begin=True)
    store.save("x", MODEL)
    store.save("y", MODEL)
    store.commit(STEP)
    store.close()
    one, two = sorted((folder / "tensors").iterdir())
    (folder / "tensors" / "z-9").write_bytes(one.read_bytes())  # as a crash leaves it
    match damage:
        case "file":
            data = bytearray(two.read_bytes())
            data[-1] ^= 1
            two.write_bytes(data)
        case "missing":
            two.unlink()
        case "row":
            with sqlite3.connect(folder / "store.sqlite") as db:
                db.execute("UPDATE tensor SET name = 'v' WHERE name = 'y'")
            db.close()
    there = {path.name for path in (folder / "tensors").iterdir()}
    with pytest.raises(RecordError, match=r"damaged|lacks 1 files"):
        FileStore(folder)
    assert {path.name for path in (folder / "tensors").iterdir()} == there


def test_a_transition_that_is_gone_is_noticed(folder: Path) -> None:
    store = FileStore(folder, begin=True)
    for _ in range(5):
        store.commit(STEP)
    store.close()
    with sqlite3.connect(folder / "store.sqlite") as db:
        db.execute("DELETE FROM transition WHERE number = 2")
    db.close()
    with pytest.raises(RecordError, match="it has 4 of the transitions 0 to 4"):
        FileStore(folder)


def test_who_only_looks_writes_nothing(folder: Path) -> None:
    """Also at a store whose role was killed, with what it wrote last still in the write-ahead
    log.
    """
    store = FileStore(folder / "role", begin=True)
    store.save("x", MODEL)
    store.commit(STEP)
    shutil.copytree(folder / "role", folder / "killed")
    store.close()
    for place in (folder / "role", folder / "killed"):
        before = {p.name: p.read_bytes() for p in place.iterdir() if p.suffix == ".sqlite"}
        log = place / "store.sqlite-wal"
        before |= {log.name: log.read_bytes()} if log.exists() else {}
        looked = FileStore(place, read_only=True)
        assert list(looked.transitions()) == [STEP]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            looked._ledger._db.execute("DELETE FROM fact")  # type: ignore[attr-defined]
        looked.close()
        assert read_tail(place, 0, -float("inf")).steps == [STEP]
        assert {name: (place / name).read_bytes() for name in before} == before
