"""The folder of a run, and when it gets a checkpoint: by rounds, and by time."""

from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from fedbcd.data.federation import Federation
from fedbcd.data.functions import functions_of
from fedbcd.record.eventlog import LogWriter
from fedbcd.record.runfolder import Checkpoint, RunFolder
from fedbcd.spec import RunSpec

MOST_SHARE = 0.1  # of the time, that checkpoints by time may take


def folder_of(
    path: Path, federation: Federation, spec: RunSpec, job: Mapping[str, Any]
) -> RunFolder:
    """That of this run and no other."""
    functions = functions_of(federation, federation.make_model(spec.seed))
    return RunFolder(path, spec.identity(federation), dict(job), functions)


class Checkpoints:
    """Those of one run in its folder; without a folder there are none."""

    def __init__(
        self, folder: RunFolder | None, log: LogWriter | None, spec: RunSpec, by_time: bool
    ) -> None:
        """`by_time`: whether one may be written whenever it is time."""
        self.folder, self.log, self._every = folder, log, spec.checkpoint_every
        self._seconds = spec.checkpoint_seconds if by_time else 0.0
        self._last, self._took = monotonic(), 0.0

    def are_due(self, round_: int, look: bool, last: bool) -> bool:
        """After a round; `look`: the models were looked at, `last`: there is no round after it."""
        if self.folder is None or last:
            return self.folder is not None
        by_rounds = look if self._every is None else round_ % self._every == 0
        pause = max(self._seconds, self._took / MOST_SHARE)
        return by_rounds or (self._seconds > 0 and monotonic() - self._last > pause)

    def write(self, checkpoint: Checkpoint) -> None:
        assert self.folder is not None
        began = monotonic()
        self.folder.write_checkpoint(checkpoint)
        self._last = monotonic()
        self._took = self._last - began
