"""Copies of stores: whole, of one moment, made while the role goes on; a damaged one is refused."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedbcd as fb
from fedbcd.cli import app
from fedbcd.engines.deploy.roles import backup
from fedbcd.engines.deploy.roles.backup import back_up, check_free, check_whole, take_place
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.errors import RecordError
from fedbcd.protocol.messages import Woke
from fedbcd.record.eventlog import Transition
from fedbcd.spec import RunSpec
from support.deployments import BCD, Town, Unkind, federation
from support.processes import job, write_job

MODEL = torch.arange(5, dtype=torch.float32)
STEP = Transition(0.5, "device/3", Woke(), ())


def test_a_role_goes_on_while_its_store_is_copied(folder: Path, towns: list[Town]) -> None:
    """Files are linked and never change; the copy opens as the role was."""
    town = Town(folder / "town", RunSpec(BCD, fb.SyncCloud(), active=2), federation())
    towns.append(town)
    unkind = Unkind(town, 3, death=0.0, fail=0.0)
    unkind.play(2)
    for actor in ("coordinator", "server/0", "device/0"):
        store = town.roles[actor].store
        length, place = store.length, folder / "copies" / actor
        place.parent.mkdir(parents=True, exist_ok=True)
        assert back_up(town.folder / actor, place) == length
        kept = {name: store.tensor(name) for name in store.names()}
        (file,) = [*(place / "tensors").iterdir()][:1]
        assert file.stat().st_nlink == 2
        for _ in range(300):
            unkind._step()
        copy = FileStore(place, read_only=True)
        assert copy.length == length
        assert {name: copy.tensor(name).tolist() for name in copy.names()} == {
            name: tensor.tolist() for name, tensor in kept.items()
        }
        copy.close()
        with pytest.raises(RecordError, match="is there already"):
            back_up(town.folder / actor, place)


def test_a_tensor_that_goes_while_it_is_copied_is_looked_for_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(folder / "role", begin=True)
    store.save("x", MODEL)
    store.commit(STEP)
    link, lost = backup._link, []

    def go_on(file: Path, copy: Path) -> None:
        if not lost:
            lost.append(file)
            store.save("x", MODEL + 1)
            store.commit(STEP)
        link(file, copy)

    monkeypatch.setattr(backup, "_link", go_on)
    assert back_up(folder / "role", folder / "copy") == 2
    copy = FileStore(folder / "copy", read_only=True)
    assert torch.equal(copy.tensor("x"), MODEL + 1)
    copy.close()
    store.close()


@pytest.mark.parametrize("damage", ["file", "ledger"])
def test_a_damaged_copy_is_not_put_back(damage: str, folder: Path) -> None:
    store = FileStore(folder / "state" / "device-0", begin=True)
    store.save("x", MODEL)
    store.commit(STEP)
    store.close()
    options = {"folder": str(folder / "other"), "servers": ["127.0.0.1:1", "127.0.0.1:2"]}
    file = write_job(folder, job(deploy=options))
    run = CliRunner()
    copied = run.invoke(app, ["backup", str(folder / "state"), "--out", str(folder / "copies")])
    assert copied.exit_code == 0, copied.output
    copy = folder / "copies" / "device-0"
    restore = ["restore", str(file), "device/0", "--from", str(copy)]
    place = copy / "store.sqlite" if damage == "ledger" else next((copy / "tensors").iterdir())
    whole = place.read_bytes()
    place.unlink()  # it may be a link
    spoiled = whole.replace(b"Woke", b"Wake", 1)
    place.write_bytes(spoiled if damage == "ledger" else whole[:-7] + bytes(7))
    failed = run.invoke(app, restore)
    assert isinstance(failed.exception, RecordError)
    assert "damaged" in str(failed.exception)
    assert not (folder / "other" / "device-0").exists()
    place.write_bytes(whole)
    assert run.invoke(app, restore).exit_code == 0
    assert check_whole(folder / "other" / "device-0") == 1
    again = run.invoke(app, restore)
    assert "holds a store, or what is left of one" in str(again.exception)


def test_nothing_takes_the_place_of_what_is_left_of_a_store(folder: Path) -> None:
    (folder / "role" / "tensors").mkdir(parents=True)
    (folder / "role" / "health.json").write_text("{}")
    check_free(folder / "role")
    (folder / "role" / "tensors" / "x-0").write_bytes(b"1")
    with pytest.raises(RecordError, match="move that folder"):
        take_place(folder / "new", folder / "role")
    with pytest.raises(RecordError, match="there is no store at"):
        back_up(folder / "role", folder / "copy")


def test_restore_says_what_it_needs(folder: Path) -> None:
    options = {"folder": str(folder / "state"), "servers": ["127.0.0.1:1", "127.0.0.1:2"]}
    file = write_job(folder, job(deploy=options))
    for arguments, words in (
        (["server/0"], "name a copy of its store with --from"),
        (["device/0", "--coordinator", str(folder)], "--coordinator is for servers"),
        (["server/0", "--server", str(folder)], "--server is for the coordinator"),
        (["coordinator", "--server", str(folder), "--from", str(folder)], "not both"),
        (["printer/0", "--from", str(folder)], "'printer/0' is no role"),
        (["server/7", "--from", str(folder)], "there is no server/7"),
    ):
        failed = CliRunner().invoke(app, ["restore", str(file), *arguments])
        assert words in str(failed.exception)
