"""The coordinator as a process: servers dial it; it tells them its round, and stops after as many
rounds as it was told.
"""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

from fedbcd.engines.deploy.links.codec import Declared
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.listener import only
from fedbcd.engines.deploy.processes.base import Process
from fedbcd.engines.deploy.processes.logs import Log
from fedbcd.engines.deploy.processes.metrics import Mixing
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.errors import ProtocolError, Refused
from fedbcd.protocol.messages import (
    Actor,
    GlobalUpdated,
    Mixed,
    MixModels,
    ServerReady,
    StepGlobal,
    number_of,
    server_actor,
)
from fedbcd.record.eventlog import Transition


class CoordinatorProcess(Process):
    """The coordinator. After `rounds` rounds it mixes no more, but still repeats answers that were
    lost.
    """

    role: CoordinatorRole

    def __init__(
        self,
        role: CoordinatorRole,
        options: Deploy,
        declared: Declared,
        log: Log,
        rounds: int | None,
    ) -> None:
        super().__init__(role, options, declared, log)
        self.rounds = rounds
        self._mixing = Mixing(self.metrics, role.machine.round)
        self._reports: deque[Letter] = deque()  # handled, but perhaps not yet durable
        self._settled = (
            role.machine.round
        )  # the round that is durable; the machine may be ahead of the disk
        self._round = -1  # that the servers were told
        self._released: dict[int, int] = {}  # server -> the phase that its last answer ended

    @property
    def finished(self) -> bool:
        """Whether all rounds have been played, and are durable."""
        return self.rounds is not None and self._settled >= self.rounds

    async def open_links(self) -> None:
        """Listen for the servers."""
        await self.listen(
            only(map(server_actor, range(len(self.role.blueprint.servers))), self.role.check_guest)
        )

    def begin(self) -> None:
        """Nothing to do: servers report by themselves."""
        self.after([])

    def take(self, letter: Letter, now: float, refused: Callable[[Refused], None]) -> list[Letter]:
        """In the role's thread, one report at a time; one too many for the last round stays
        unanswered.
        """
        if self._is_beyond_the_end(letter):
            return []
        self._reports.append(letter)
        try:
            return self.role.receive(letter, now, refused)
        except ProtocolError:
            self._reports.pop()
            raise

    def _is_beyond_the_end(self, letter: Letter) -> bool:
        """Whether this report would start another mix after the last one; tried on a copy of the
        machine.
        """
        if self.rounds is None or self.role.machine.round < self.rounds:
            return False
        trial = copy.deepcopy(self.role.machine)
        try:
            trial.handle(letter.event)
        except ProtocolError:
            return False  # the role itself will say why
        return trial.round > self.role.machine.round

    def seen(self, step: Transition) -> None:
        """Take note of what was reported and mixed, once it is durable."""
        letter = self._reports.popleft()
        if (
            isinstance(letter.event, ServerReady)
            and letter.model is not None
            and not self.role.blueprint.cloud.sync
        ):
            self._mixing.heard(letter.event.server, letter.model)
        for command in step.commands:
            if isinstance(command, MixModels | StepGlobal):
                self._mixing.mixed(command)
        self._settled = self.role.machine.round

    async def post(self, letters: list[Letter]) -> None:
        """Tell the servers that a round has ended before they get its model: after the last round
        nobody begins another phase's work.
        """
        round_ = self._settled
        if round_ != self._round:
            self._round = round_
            self.log.info("round", round=round_, finished=self.finished)
            await self.broadcast("round", self._notice())
        await super().post(letters)

    def after(self, letters: list[Letter]) -> None:
        """Take note of who was answered."""
        for letter in letters:
            if isinstance(letter.event, Mixed | GlobalUpdated):
                self._released[number_of(letter.to)] = letter.event.phase
        self.metrics.rounds.set(self._settled)

    async def connected(self, peer: Actor, about: dict[str, Any]) -> None:
        """A server has dialled: tell it the round, unless it has lost its store."""
        await super().connected(peer, about)
        if self.listener is not None and await self.greet(
            peer, lambda now: self.role.greet(peer, about, now)
        ):
            await self.listener.notice(peer, "round", self._notice())

    def _notice(self) -> dict[str, Any]:
        return {"round": self._settled, "finished": self.finished}

    def waits_for(self) -> str:
        """Always for servers."""
        return "servers"

    def is_ready(self) -> bool:
        """Whether it listens."""
        return self.listener is not None

    def status(self) -> dict[str, Any]:
        """The round, and who has been answered."""
        released = {str(server): phase for server, phase in self._released.items()}
        return {
            "round": self._settled,
            "rounds": self.rounds,
            "finished": self.finished,
            "released": released,
        }
