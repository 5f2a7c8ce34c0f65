"""Free space on the disk of a role: new work stops before what is under way has none."""

import os
import time
from pathlib import Path

from fedbcd.engines.deploy.processes.exit_codes import DiskError

LOOK_S = 1.0  # between two looks


class FreeSpace:
    """Of the disk that a store is on. A role ends, in good order, before its disk is full."""

    def __init__(self, folder: Path, reserve_mb: float) -> None:
        self._folder, self._reserve = folder, reserve_mb
        self._looked = -LOOK_S

    @property
    def free_mb(self) -> float:
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize / 1e6

    def check(self) -> None:
        """Raises `DiskError` if less is free than is to be kept free; looks once in a while."""
        now = time.monotonic()
        if now < self._looked + LOOK_S:
            return
        self._looked, free = now, self.free_mb
        if free < self._reserve:
            why = f"{free:.1f} MB are free, fewer than deploy.reserve_mb = {self._reserve:g}"
            raise DiskError(f"the store {self._folder}", OSError(why))
