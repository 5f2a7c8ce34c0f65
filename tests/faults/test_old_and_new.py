"""Stores and logs that earlier versions of fedbcd have left: this one goes on with them, to the
same bits.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbcd as fb
from fedbcd.engines.deploy.local.merged_log import header_of
from fedbcd.engines.deploy.roles.blueprint import Blueprint, OwnData
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.engines.deploy.roles.device import DeviceRole
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.experiments.deployed import one_job
from fedbcd.protocol.messages import COORDINATOR, RetryDue, number_of
from fedbcd.record.eventlog import LogReader
from fedbcd.recorded import in_record
from support.merging import merge
from support.rounding import of_run

VERSIONS = sorted((Path(__file__).parent / "fixtures").iterdir())


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy: opening a store sweeps it."""
    return Path(shutil.copytree(request.param, tmp_path / "old"))


def job_of(old: Path) -> Any:
    return one_job(json.loads((old / "about.json").read_text())["job"])


def stores_of(old: Path) -> dict[str, Path]:
    return {folder.name.replace("-", "/"): folder for folder in sorted((old / "state").iterdir())}


def test_the_log_replays(old: Path) -> None:
    """To the models in the stores; the last bits may be those of another processor, so the log's
    own digest is not asked for.
    """
    log, seen = old / "events.jsonl", []
    log.write_bytes(
        b"".join(
            line
            for line in log.read_bytes().splitlines(keepends=True)
            if not line.startswith(b'{"end"')
        )
    )
    found = fb.replay(
        log,
        job_of(old).make_federation(),
        exact=True,
        on_step=lambda _, driver: seen.append(driver),
    )
    assert found["rounds"] == 3
    for server, z in enumerate(seen[-1].numbers.global_VF()):
        store = FileStore(stores_of(old)[f"server/{server}"], read_only=True)
        torch.testing.assert_close(z, store.tensor("z/3"), rtol=0, atol=of_run(3))
        store.close()


def test_the_stores_make_the_same_log(old: Path) -> None:
    job, log = job_of(old), LogReader(old / "events.jsonl")
    federation, spec = job.make_federation(), job.spec
    steps = list(log)
    stores = {actor: FileStore(folder, read_only=True) for actor, folder in stores_of(old).items()}
    out = old / "again.jsonl"
    end = merge(
        stores,
        Blueprint.of(spec, federation),
        header_of(spec, federation, job.to_table()),
        out,
    )
    for store in stores.values():
        store.close()
    assert end == log.end
    assert list(LogReader(out)) == steps


def test_every_role_goes_on(old: Path) -> None:
    """Each is recovered from its store, is in step with its peers, and says the next thing."""
    job = job_of(old)
    federation = job.make_federation()
    plan = Blueprint.of(job.spec, federation)
    roles: dict[str, Any] = {}
    for actor, folder in stores_of(old).items():
        store = FileStore(folder)
        if actor == COORDINATOR:
            roles[actor] = CoordinatorRole.open(store, plan)
        elif actor.startswith("server/"):
            roles[actor] = ServerRole.open(store, plan, number_of(actor))
        else:
            roles[actor] = DeviceRole.open(
                store, plan, number_of(actor), OwnData.of(federation, number_of(actor), plan.seed)
            )
    recorded = LogReader(old / "events.jsonl").header["identity"]["algorithm"]
    for role in roles.values():  # the job file says nothing of it
        assert in_record(role.blueprint.algorithm) == recorded
        assert role.store.facts["algorithm"] == json.dumps(recorded), (
            "it is written down from now on"
        )
    late = 1e6
    for actor in ("server/0", "server/1"):
        assert roles[COORDINATOR].greet(actor, roles[actor].hello(), late) == []
        device = f"device/{plan.servers[number_of(actor)][0]}"
        assert roles[actor].greet(device, roles[device].hello(), late) == []
        roles[actor].tell(RetryDue(), late)
    for role in roles.values():
        role.close()
