"""The store: all of a commit or none of it, one process at a time, and nothing damaged is read."""

import math
import sqlite3
from pathlib import Path
from random import Random

import pytest
import torch

from fedbcd.engines.deploy.processes import failpoints
from fedbcd.engines.deploy.processes.exit_codes import ExitCode
from fedbcd.engines.deploy.processes.failpoints import Failpoint, Stopped
from fedbcd.engines.deploy.roles.filestore import FileStore, NoStore, Tail, read_tail
from fedbcd.errors import RecordError
from fedbcd.protocol.messages import Started, TrainOffline, Woke
from fedbcd.record.eventlog import Transition

STEP = Transition(0.1 + 0.2, "device/3", Woke(), (TrainOffline(session=4),))
MODEL = torch.arange(5, dtype=torch.float32) / 3
OF_A_STORE = [
    point for point in Failpoint if point not in (Failpoint.BEFORE_SEND, Failpoint.AFTER_SEND)
]


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "tensors").iterdir()}


def test_what_was_committed_is_there_after_it_was_opened_again(folder: Path) -> None:
    store = FileStore(folder, begin=True)
    name = store.id
    store.save("z/3/17", MODEL)
    store.save("total", MODEL.double())
    store.commit(STEP, {"phase": "7"})
    store.close()
    again = FileStore(folder)
    assert (again.id, again.length, again.facts["phase"]) == (name, 1, "7")
    assert list(again.transitions()) == [STEP]
    assert sorted(again.names()) == ["total", "z/3/17"]
    assert torch.equal(again.tensor("z/3/17"), MODEL)
    assert again.tensor("total").dtype == torch.float64
    again.close()


def test_what_was_not_committed_is_gone_and_swept(folder: Path) -> None:
    store = FileStore(folder, begin=True)
    store.save("x", MODEL)
    store.commit(STEP)
    kept = files(folder)
    store.save("x", MODEL + 1)
    store.save("y", MODEL)
    store.drop("x")
    store.close()
    again = FileStore(folder)
    assert again.names() == ["x"]
    assert torch.equal(again.tensor("x"), MODEL)
    assert files(folder) == kept
    again.close()


def test_a_replaced_and_a_dropped_tensor_leave_no_file(folder: Path) -> None:
    store = FileStore(folder, begin=True)
    for k in range(4):
        store.save("x", MODEL + k)
        store.save(f"y/{k}", MODEL)
        store.drop(f"y/{k - 1}")
        store.drop("never there")
        store.commit()
    assert sorted(store.names()) == ["x", "y/3"]
    assert len(files(folder)) == 2
    assert torch.equal(store.tensor("x"), MODEL + 3)
    store.close()


def test_a_renamed_tensor_keeps_its_file_whatever_takes_its_name(folder: Path) -> None:
    store = FileStore(folder, begin=True)
    store.save("x", MODEL)
    store.commit()
    (file,) = files(folder)
    store.rename("x", "before")
    store.save("x", MODEL + 1)
    store.commit()
    assert file in files(folder)
    store.close()
    again = FileStore(folder)
    assert torch.equal(again.tensor("before"), MODEL)
    assert torch.equal(again.tensor("x"), MODEL + 1)
    again.rename("before", "x")
    again.commit()
    assert again.names() == ["x"]
    assert files(folder) == {file}
    with again.group_commit():  # there and back again before anything is durable
        again.rename("x", "before")
        again.save("x", MODEL + 2)
        again.commit(STEP)
        again.drop("before")
        again.commit(STEP)
    assert again.names() == ["x"]
    assert len(files(folder)) == 1
    assert torch.equal(again.tensor("x"), MODEL + 2)
    again.close()


@pytest.mark.parametrize("point", OF_A_STORE)
def test_a_crash_at_any_place_leaves_all_of_a_commit_or_none(
    point: Failpoint, folder: Path
) -> None:
    store = FileStore(folder, begin=True)
    store.save("x", MODEL)
    store.commit(STEP, {"phase": "1"})
    failpoints.arm(point)
    try:
        with pytest.raises(Stopped):
            _second_commit(store)
    finally:
        failpoints.disarm()
    store.close()
    again = FileStore(folder)
    done = point in (Failpoint.AFTER_COMMIT, Failpoint.AFTER_REMOVE)
    assert again.length == 1 + done
    assert again.facts["phase"] == ("2" if done else "1")
    assert torch.equal(again.tensor("x"), MODEL + done)
    assert again.names() == (["x", "y"] if done else ["x"])
    assert len(files(folder)) == len(again.names())
    _second_commit(again)
    assert torch.equal(again.tensor("x"), MODEL + 1)
    again.close()


def _second_commit(store: FileStore) -> None:
    store.save("x", MODEL + 1)
    store.save("y", MODEL)
    store.commit(Transition(2.0, "device/3", Started(), ()), {"phase": "2"})


@pytest.mark.parametrize("point", OF_A_STORE)
def test_a_crash_at_any_place_leaves_all_of_a_group_or_none(point: Failpoint, folder: Path) -> None:
    """Two commits held together, the second of which saves a tensor again that the first has saved
    and drops another.
    """
    store = FileStore(folder, begin=True)
    store.save("y", MODEL)
    store.commit(STEP)
    failpoints.arm(point)
    try:
        _group(store)
        pytest.fail("nothing was hit")
    except Stopped:
        failpoints.disarm()
    store.close()
    again = FileStore(folder)
    whole = point in (Failpoint.AFTER_COMMIT, Failpoint.AFTER_REMOVE)
    assert (again.length, again.names(), again.facts.get("phase")) == (
        (3, ["x"], "2") if whole else (1, ["y"], None)
    )
    if not whole:
        _group(again)
    assert torch.equal(again.tensor("x"), MODEL + 2)
    assert len(files(folder)) == 1
    again.close()


def _group(store: FileStore) -> None:
    with store.group_commit():
        for number in (1, 2):
            store.save("x", MODEL + number)
            store.commit(STEP, {"phase": str(number)})
            assert torch.equal(store.tensor("x"), MODEL + number)
            assert (store.length, store.facts["phase"]) == (1 + number, str(number))
        store.drop("y")


def test_one_process_at_a_time(folder: Path) -> None:
    store = FileStore(folder, begin=True)
    with pytest.raises(RecordError, match=f"another process uses the store {folder}"):
        FileStore(folder)
    looked = FileStore(folder, read_only=True)
    assert looked.id == store.id
    looked.close()
    store.close()
    FileStore(folder).close()


def test_two_stores_have_two_names(folder: Path) -> None:
    one, two = FileStore(folder / "1", begin=True), FileStore(folder / "2", begin=True)
    assert one.id != two.id
    one.close()
    two.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda _: b"",
    ],
)
def test_a_damaged_tensor_is_refused(damage: object, folder: Path) -> None:
    store = FileStore(folder, begin=True)
    store.save("x", MODEL)
    store.commit()
    (path,) = (folder / "tensors").iterdir()
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(RecordError, match="damaged"):
        store.tensor("x")
    path.unlink()
    with pytest.raises(RecordError, match="missing or damaged"):
        store.tensor("x")
    store.close()


def test_a_store_of_another_version_is_refused(folder: Path) -> None:
    FileStore(folder, begin=True).close()
    with sqlite3.connect(folder / "store.sqlite") as db:
        db.execute("UPDATE fact SET value = '99' WHERE key = 'version'")
    db.close()
    with pytest.raises(
        RecordError, match="is a store of version 99; this fedbcd reads versions 1 and 2"
    ):
        FileStore(folder)


def test_a_file_that_is_no_database_is_refused(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "store.sqlite").write_bytes(b"not a database, " * 100)
    with pytest.raises(RecordError, match="cannot be used"):
        FileStore(folder)


def test_a_store_is_begun_only_where_that_is_asked_for(folder: Path) -> None:
    """An empty folder may be a disk that is not mounted. Nothing is made, also where making it was
    interrupted before.
    """
    place = folder / "role"
    with pytest.raises(
        NoStore, match=r"there is no store in .*role.*put its newest store back\. .*--init"
    ) as missing:
        FileStore(place)
    assert missing.value.exit_code == ExitCode.NO_STORE
    assert not place.exists()
    (place / "tensors").mkdir(parents=True)
    sqlite3.connect(place / "store.sqlite").close()
    (place / "store.sqlite").touch()
    with pytest.raises(NoStore):
        FileStore(place)
    FileStore(place, begin=True).close()
    FileStore(place).close()


def test_to_look_at_no_store_is_an_error(folder: Path) -> None:
    with pytest.raises(RecordError, match="there is no store at"):
        FileStore(folder / "nothing", read_only=True)


def test_a_damaged_transition_is_named(folder: Path) -> None:
    store = FileStore(folder, begin=True)
    store.commit(STEP)
    store.close()
    with sqlite3.connect(folder / "store.sqlite") as db:
        db.execute("""UPDATE transition SET event = '{"Exploded":{}}'""")
    db.close()
    again = FileStore(folder)
    with pytest.raises(RecordError, match="transition 0 of the store"):
        list(again.transitions())
    again.close()


def test_a_full_disk_is_a_sentence_and_the_role_answers_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(folder, begin=True)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    store.save("x", MODEL)
    with pytest.raises(
        RecordError, match=r"cannot write to the store .*No space left on device.*make room"
    ):
        store.commit(STEP)
    monkeypatch.undo()
    store.close()
    again = FileStore(folder)
    assert again.names() == []
    assert files(folder) == set()
    again.close()


def test_a_damaged_database_is_a_sentence_whatever_was_hit(folder: Path) -> None:
    store = FileStore(folder / "whole", begin=True)
    store.save("x", MODEL)
    for _ in range(200):
        store.commit(STEP)
    store.close()
    whole = (folder / "whole" / "store.sqlite").read_bytes()
    random, seen = Random(3), 0
    for k in range(60):
        data = bytearray(whole[: random.randrange(1, len(whole))] if k % 3 == 0 else whole)
        for _ in range(0 if k % 3 == 0 else 50 * (k % 3)):
            data[random.randrange(len(data))] = random.randrange(256)
        (folder / "whole" / "store.sqlite").write_bytes(data)
        try:
            hurt = FileStore(folder / "whole", read_only=True)
            try:
                list(hurt.transitions())
            finally:
                hurt.close()
        except RecordError:
            seen += 1
    assert seen > 30


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_store_without_its_database_is_not_mistaken_for_a_new_one(
    damage: str, folder: Path
) -> None:
    """Its tensors are acknowledged uploads; they must not be swept."""
    store = FileStore(folder / "store", begin=True)
    store.save("x", MODEL)
    store.commit(STEP)
    store.close()
    kept, database = files(folder / "store"), folder / "store" / "store.sqlite"
    database.unlink()
    if damage == "empty":
        database.touch()
    with pytest.raises(RecordError, match="was damaged; restore a backup"):
        FileStore(folder / "store", begin=True)
    assert files(folder / "store") == kept


def test_others_cannot_read_a_store(folder: Path) -> None:
    FileStore(folder / "state" / "device-1", begin=True).close()
    assert (folder / "state" / "device-1").stat().st_mode & 0o077 == 0


def test_a_store_that_is_being_made_is_empty_for_those_who_look_on(folder: Path) -> None:
    """Roles make theirs while the log of the deployment begins to follow them."""
    assert read_tail(folder, 0, -math.inf) == Tail(0, [], True)
    folder.mkdir(exist_ok=True)
    half = sqlite3.connect(folder / "store.sqlite", isolation_level=None)
    half.execute("PRAGMA journal_mode=WAL")
    assert read_tail(folder, 0, -math.inf) == Tail(0, [], True)
    assert not read_tail(folder, 3, 1.5).is_same
    with pytest.raises(RecordError, match="its role has just begun"):
        FileStore(folder, read_only=True)
    half.close()
    store = FileStore(folder, begin=True)
    store.commit(STEP)
    assert read_tail(folder, 0, -math.inf) == Tail(1, [STEP], True)
    store.close()
