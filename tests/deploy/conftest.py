"""Fixtures of the deployment's tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbcd.engines.deploy.processes import failpoints
from fedbcd.engines.deploy.roles.base import Role
from fedbcd.engines.setup import threads_inside_torch
from support.deployments import Town


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As every process of a deployment computes."""
    with threads_inside_torch(1):
        yield


@pytest.fixture(autouse=True)
def _many_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recoveries in these tests begin at a snapshot as often as not."""
    monkeypatch.setattr(Role, "SNAPSHOT_EVERY", 11)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of syncs take minutes on a slow disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


@pytest.fixture
def towns() -> Iterator[list[Town]]:
    """Closed at the end, whatever happens."""
    found: list[Town] = []
    yield found
    failpoints.disarm()
    for town in found:
        town.close()
