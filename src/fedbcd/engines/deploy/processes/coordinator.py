"""The coordinator as a process: servers dial it; it tells them its round, and stops after as many
rounds as it was told.
"""

from typing import Any

from torch import Tensor

from fedbcd.engines.deploy.links.codec import Declared
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.listener import only
from fedbcd.engines.deploy.processes.base import Process
from fedbcd.engines.deploy.processes.logs import RoleLog
from fedbcd.engines.deploy.processes.metrics import Mixing
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
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
from fedbcd.protocol.notices import RoundNotice
from fedbcd.record.eventlog import Transition


class CoordinatorProcess(Process):
    """The coordinator."""

    role: CoordinatorRole

    def __init__(
        self,
        role: CoordinatorRole,
        options: Deploy,
        declared: Declared,
        log: RoleLog,
    ) -> None:
        super().__init__(role, options, declared, log)
        self._mixing = Mixing(self.metrics, role.machine.round)
        self._settled = (
            role.machine.round
        )  # the round that is durable; the machine may be ahead of the disk
        self._round = -1  # that the servers were told
        self._released: dict[int, int] = {}  # server -> the phase that its last answer ended

    @property
    def finished(self) -> bool:
        return self.role.rounds is not None and self._settled >= self.role.rounds

    async def open_links(self) -> None:
        servers = map(server_actor, range(len(self.role.blueprint.servers)))
        await self.peers.listen(only(servers, self.role.check_guest), self.monitor.status)

    def begin(self) -> None:
        self.after([])

    def seen(self, step: Transition, model: Tensor | None) -> None:
        is_sync = self.role.blueprint.cloud.sync
        if isinstance(step.event, ServerReady) and model is not None and not is_sync:
            self._mixing.heard(step.event.server, model)
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
            await self.peers.broadcast(self._notice())
        await super().post(letters)

    def after(self, letters: list[Letter]) -> None:
        for letter in letters:
            if isinstance(letter.event, Mixed | GlobalUpdated):
                self._released[number_of(letter.to)] = letter.event.phase
        self.metrics.rounds.set(self._settled)

    async def connected(self, peer: Actor, about: dict[str, Any]) -> None:
        """A server has dialled: tell it the round, unless it has lost its store."""
        await super().connected(peer, about)
        if await self.greet(peer, lambda now: self.role.greet(peer, about, now)):
            await self.peers.notify(peer, self._notice())

    def _notice(self) -> RoundNotice:
        return RoundNotice(round=self._settled, finished=self.finished)

    def waits_for(self) -> str:
        return "servers"

    def is_ready(self) -> bool:
        return self.peers.listener is not None

    def status(self) -> dict[str, Any]:
        released = {str(server): phase for server, phase in self._released.items()}
        listener = self.peers.listener
        silent = {} if listener is None else listener.silent_s
        return {
            "silent": {server: round(seconds, 1) for server, seconds in silent.items()},
            "round": self._settled,
            "rounds": self.role.rounds,
            "finished": self.finished,
            "released": released,
        }
