"""The coordinator as a process: servers dial it; it tells them its round, and stops after as many rounds as it was told."""

import copy
from typing import Any

from fedbcd.engines.deploy.coordinator import CoordinatorRole
from fedbcd.engines.deploy.letter import Letter
from fedbcd.engines.deploy.logs import Journal
from fedbcd.engines.deploy.metrics import Mixing
from fedbcd.engines.deploy.options import Deploy
from fedbcd.engines.deploy.process import Process
from fedbcd.errors import ProtocolError
from fedbcd.protocol.messages import Actor, GlobalUpdated, Mixed, ServerReady, number_of


class CoordinatorProcess(Process):
    """The coordinator. After `rounds` rounds it mixes no more, but still repeats answers that were lost."""

    role: CoordinatorRole

    def __init__(self, role: CoordinatorRole, options: Deploy, journal: Journal, rounds: int | None) -> None:
        super().__init__(role, options, journal)
        self.rounds = rounds
        self._mixing = Mixing(self.metrics)
        self._round = role.machine.round
        self._released: dict[int, int] = {}  # server -> the phase of its last answer

    @property
    def finished(self) -> bool:
        """Whether all rounds have been played."""
        return self.rounds is not None and self.role.machine.round >= self.rounds
