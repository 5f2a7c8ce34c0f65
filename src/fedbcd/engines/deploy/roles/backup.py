"""Copies of stores: made while their role runs, checked whole, and put back."""

import os
import shutil
import sqlite3
from collections import deque
from pathlib import Path

from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.errors import RecordError
from fedbcd.record.tensorfile import sync

DATABASE, TENSORS = "store.sqlite", "tensors"
TRIES = 50  # tensors may be replaced while they are copied


def back_up(store: Path, place: Path) -> int:
    """Copy a store, whose role may be running, to a folder that is not there yet: all of it as it
    was after one event. How many transitions it has.

    SQLite copies the ledger, tensor files never change: they are linked, or copied to another disk.
    """
    if place.exists():
        raise RecordError(f"{place} is there already; name a new folder for each backup")
    if not (store / DATABASE).is_file():
        raise RecordError(f"there is no store at {store}")
    half = place.with_name(f".{place.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    (half / TENSORS).mkdir(parents=True, mode=0o700)
    half.chmod(0o700)
    for _ in range(TRIES):
        (half / DATABASE).unlink(missing_ok=True)
        _copy_ledger(store / DATABASE, half / DATABASE)
        if _has_linked(store, half):
            break
    else:
        raise RecordError(f"{store} changes too fast to be copied; stop its role for a moment")
    length = check_whole(half)
    for folder in (half / TENSORS, half):
        sync(folder)
    half.rename(place)
    sync(place.parent)
    return length


def _copy_ledger(ledger: Path, copy: Path) -> None:
    here = sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True)
    there = sqlite3.connect(copy)
    try:
        here.backup(there)
        there.execute("PRAGMA journal_mode=DELETE")  # one file; a role that opens it changes that
    except sqlite3.Error as error:
        raise RecordError(f"{ledger} cannot be copied ({error}); is it damaged?") from None
    finally:
        here.close()
        there.close()
    sync(copy)


def _has_linked(store: Path, copy: Path) -> bool:
    """Put the files beside a ledger that it names; False: one has gone meanwhile."""
    with sqlite3.connect(copy / DATABASE) as database:
        wanted = {file for (file,) in database.execute("SELECT file FROM tensor")}
    database.close()
    there = {path.name for path in (copy / TENSORS).iterdir()}
    for file in there - wanted:
        (copy / TENSORS / file).unlink()
    for file in wanted - there:
        try:
            _link(store / TENSORS / file, copy / TENSORS / file)
        except FileNotFoundError:
            return False
    return True


def _link(file: Path, copy: Path) -> None:
    try:
        os.link(file, copy)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one that knows no links
        shutil.copyfile(file, copy)
        sync(copy)


def check_whole(place: Path) -> int:
    """Read every row and every file of a store; a `RecordError` names what is damaged. How many
    transitions it has.
    """
    store = FileStore(place, read_only=True)
    try:
        deque(store.transitions(), maxlen=0)
        for name in store.names():
            store.tensor(name)
        return store.length
    finally:
        store.close()


def put_back(backup: Path, place: Path) -> int:
    """Copy a backup to a new folder, whole; how many transitions it has."""
    check_whole(backup)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(backup, place)
    for path in sorted(place.rglob("*"), reverse=True):
        sync(path)
    return check_whole(place)


def check_free(folder: Path) -> None:
    """Whether a role has nothing in the folder of its store, which may be all that there is."""
    tensors = folder / TENSORS
    if (folder / DATABASE).exists() or (tensors.is_dir() and any(tensors.iterdir())):
        raise RecordError(
            f"{folder} holds a store, or what is left of one; stop its role and move that folder"
            " away (it may be needed once more) before another takes its place"
        )


def take_place(restored: Path, folder: Path) -> None:
    """From now on this is the store of a role that had none."""
    check_free(folder)
    shutil.rmtree(folder, ignore_errors=True)
    restored.rename(folder)
    sync(folder.parent)
