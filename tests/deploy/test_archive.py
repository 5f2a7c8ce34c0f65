"""The disk of a role is bounded: history before the last snapshot is packed, and copies of letters
leave no trace.
"""

import math
import sqlite3
from pathlib import Path

import pytest

import fedbcd as fb
from faultsim.growth import played, size_of, town as small_town
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.roles.base import Role
from fedbcd.engines.deploy.roles.filestore import FileStore, read_tail
from fedbcd.errors import RecordError
from fedbcd.protocol.messages import TrainOffline, UpdateRequested, Uploaded, Woke
from fedbcd.record.eventlog import Transition
from fedbcd.spec import RunSpec
from support.deployments import BCD, Town, federation


def step(k: int) -> Transition:
    return Transition(k / 8, "device/3", Woke(), (TrainOffline(session=k),))


def written(folder: Path, number: int, every: int) -> FileStore:
    """A store with so many steps, and a snapshot now and then."""
    store = FileStore(folder, begin=True)
    for k in range(number):
        store.commit(step(k), {"snapshot": f"after {k}"} if k % every == every - 1 else None)
    return store


def test_packed_history_is_read_as_if_it_were_not(folder: Path) -> None:
    store, steps = written(folder, 50, 20), [step(k) for k in range(50)]
    with sqlite3.connect(folder / "store.sqlite") as database:
        assert database.execute("SELECT first, last FROM archive").fetchall() == [(0, 18), (19, 38)]
        assert database.execute("SELECT COUNT(*) FROM transition").fetchone() == (11,)
    database.close()
    for since in (0, 7, 18, 19, 39, 49, 50):
        assert [*store.transitions(since)] == steps[since:]
    for place in (3, 19, 45):
        tail = read_tail(folder, place, step(place - 1).time)
        assert (tail.steps, tail.is_same, tail.length) == (steps[place:], True, 50)
        assert read_tail(folder, None, step(place - 1).time).steps == steps[place:]
        found = read_tail(folder, None, 99.0, (place, step(place - 1)))
        assert (found.steps, found.is_same) == (steps[place:], True)
    assert read_tail(folder, None, -math.inf).steps == steps
    other = read_tail(folder, 3, 0.3)
    assert (other.steps, other.is_same) == (steps[3:], False)  # all that is later
    store.close()
    again = FileStore(folder)
    assert (again.length, [*again.transitions()]) == (50, steps)
    again.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("UPDATE archive SET packed = x'00' WHERE first = 19", "archive 19 of the store"),
        ("DELETE FROM archive WHERE first = 0", "are not all in its archive"),
        ("DELETE FROM archive WHERE first = 19", "are not all in its archive"),
    ],
)
def test_a_damaged_archive_is_noticed(damage: str, words: str, folder: Path) -> None:
    written(folder, 50, 20).close()
    with sqlite3.connect(folder / "store.sqlite") as database:
        database.execute(damage)
    database.close()
    with pytest.raises(RecordError, match=words):
        [*FileStore(folder).transitions()]


def test_rows_stay_few_and_all_of_it_is_merged_and_replayed(folder: Path) -> None:
    """The short form of `python -m faultsim.growth`."""
    there = small_town(folder / "town", 2, 1)
    for line in played(there, 40, 20):
        for role in ("coordinator", "server/0", "device/0"):
            assert line[role]["rows"] <= Role.SNAPSHOT_EVERY
    assert line["device/0"]["events"] > 100
    there.replayed()


def test_copies_of_letters_leave_no_rows(folder: Path, towns: list[Town]) -> None:
    """A device that says the same again and again: each is answered, and nothing is kept of it."""
    there = Town(folder / "town", RunSpec(BCD, fb.SyncCloud(), active=1), federation())
    towns.append(there)
    there.start()
    there.drain()
    there.tell("device/0", Woke())
    there.drain()
    there.work("device/0")
    (upload,) = there.post
    assert isinstance(upload.event, Uploaded)
    there.drain()
    role = there.roles[upload.to]
    ask = Letter(upload.sender, upload.to, UpdateRequested(device=0, activation=0), None, 1.0)
    before, rows = role.store.length, size_of(there, upload.to)["rows"]
    for k in range(100):
        assert len(role.receive(upload, 1.0 + k)) == 1  # acknowledged once more
        assert role.receive(ask, 1.0 + k) == []
    assert (role.store.length, size_of(there, upload.to)["rows"]) == (before, rows)
    there.restart(upload.to)
