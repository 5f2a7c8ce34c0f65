"""Options of the test suite."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from budget import NOTES, Notes


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--record` rewrites recorded texts instead of comparing with them; look at the difference
    before you keep it.
    """
    parser.addoption(
        "--record",
        action="store_true",
        help="rewrite the transcripts in tests/scenarios/transcripts",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Files note the CPU time that they take when somebody asks (`budget.py`); and one thread for
    each process that runs tests.
    """
    if NOTES in os.environ:
        config.pluginmanager.register(Notes(Path(os.environ[NOTES])))
    if "FEDBCD_EXPLORE" in os.environ:
        from support import exploring

        config.pluginmanager.register(exploring)
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        import torch  # a second, which the process that only hands out tests need not spend

        torch.set_num_threads(
            1
        )  # the tensors of the tests are small: more threads only wait for each other


def pytest_collection_finish() -> None:
    """What has been imported and collected stays: the collector of garbage need not look at it."""
    import hypothesis  # noqa: F401  it asks the collector who refers to what, once

    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes whole files; and all files that share a cluster, which is slow to start."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "tests/cluster" if file.startswith("tests/cluster/") else file

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture
def record(request: pytest.FixtureRequest) -> bool:
    """Whether recorded texts are to be rewritten."""
    return bool(request.config.getoption("--record"))


@pytest.fixture(params=["compiled", "torch"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once with compiled code for the models that it knows, if it was built, and once without."""
    from fedbcd.algorithm.fused.library import library

    if request.param == "torch":
        monkeypatch.setattr("fedbcd.compute.fused.library", lambda: None)
    elif library() is None:
        pytest.skip("the compiled code was not built")
    return str(request.param)
