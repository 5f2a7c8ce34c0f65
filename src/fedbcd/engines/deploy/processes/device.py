"""A device as a process: it dials its server, asks when it can take part, trains in a thread of its
own, uploads.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedbcd.engines.deploy.links.codec import Declared
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.processes.base import Process
from fedbcd.engines.deploy.processes.logs import RoleLog
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.processes.pace import Pace
from fedbcd.engines.deploy.roles.device import DeviceRole
from fedbcd.engines.deploy.roles.local_work import WorkDone
from fedbcd.protocol.device import DeviceState
from fedbcd.protocol.messages import (
    DROPOUT,
    NOT_FINITE,
    Actor,
    Declined,
    Failed,
    OfflineDue,
    OfflineTrained,
    Trained,
    Undo,
    Woke,
)
from fedbcd.protocol.notices import Notice, PhaseNotice
from fedbcd.record.eventlog import Transition

POLL_S = 5.0  # how often a device that is not available now is asked again
POLL = "poll"
TRAINING = "training"  # the name of the thread
WAITS_FOR = {
    DeviceState.IDLE: "phase",
    DeviceState.OFFLINE: "offline_training",
    DeviceState.SUSPENDED: "phase",
    DeviceState.ASKING: "activation",
    DeviceState.ASKING_OFFLINE: "offline_training",
    DeviceState.TRAINING: "training",
    DeviceState.UPLOADING: "acknowledgement",
    DeviceState.WITHDRAWING: "acknowledgement",
}
UNANSWERED = {
    DeviceState.ASKING: "ask",
    DeviceState.ASKING_OFFLINE: "ask",
    DeviceState.UPLOADING: "upload",
    DeviceState.WITHDRAWING: "upload",
}


class DeviceProcess(Process):
    """One device. Its server's notices say when a phase opens and fills; its pace says what it
    makes of that.
    """

    role: DeviceRole

    def __init__(
        self, role: DeviceRole, options: Deploy, declared: Declared, log: RoleLog, pace: Pace
    ) -> None:
        super().__init__(role, options, declared, log)
        self.pace = pace
        self._computing = False
        self._phase = PhaseNotice(phase=-1, round=-1)  # the server's latest notice
        self._heard_at = 0.0
        self._round = -1  # the latest round of the coordinator that it has heard of
        self._undone = 0  # activations and offline rounds, since this process began
        self._trouble = ""  # why the latest of them was
        self._asked = -1  # the latest phase in which it asked; a device takes part once in a phase
        self._uploaded = -1  # the latest activation whose upload was begun

    # ---------------------------------------------------------------------------------------------
    # the process
    async def open_links(self) -> None:
        self.tasks.spawn(self.peers.dial(self.role.machine.server).run())

    def begin(self) -> None:
        self.after([])
        if self.pace.has_own_timers and self.role.machine.offline_limit is not None:
            self._offline_in(self.options.offline_every_s)

    def after(self, letters: list[Letter]) -> None:  # noqa: ARG002
        machine = self.role.machine
        is_uploading = machine.state in (DeviceState.UPLOADING, DeviceState.WITHDRAWING)
        # also when it was let in on a request from an earlier phase. An upload that is said again
        # after a cut may be of a phase that is over; who asks too early waits for the next
        if is_uploading and not (self.pace.has_own_timers and self._uploaded == machine.activation):
            self._uploaded = machine.activation
            self._asked = max(self._asked, self._phase.phase)
        self.metrics.rounds.set(machine.activation)
        kind = UNANSWERED.get(machine.state)
        self.retry.expect(None if kind is None else (kind, machine.activation))
        if self.role.work is not None and not self._computing:
            self._computing = True
            self.tasks.spawn(self._work())
        self._see_when_to_ask()
        self._see_when_to_train()

    def waits_for(self) -> str:
        return WAITS_FOR[self.role.machine.state]

    def status(self) -> dict[str, Any]:
        machine = self.role.machine
        travelled = (
            ("in", "Activated"),
            ("in", "Restored"),
            ("out", "Uploaded"),
        )  # since this process began
        models = sum(
            int(self.metrics.value("fedbcd_letters_total", direction=d, event=e))
            for d, e in travelled
        )
        counters = {"activation": machine.activation, "session": machine.session, "models": models}
        undone = {"undone": self._undone, "trouble": self._trouble} if self._undone else {}
        return {"state": machine.state.value, **counters, "server": machine.server, **undone}

    # ---------------------------------------------------------------------------------------------
    # training
    async def _work(self) -> None:
        """Compute in a thread; hand the result in once the work has taken as long as the pace
        says.
        """
        began, work = time.monotonic(), self.role.work
        done = await _in_thread(self.role.compute)
        self.metrics.training.observe(time.monotonic() - began)
        if work is not None and isinstance(done.event, Trained | OfflineTrained):
            now = self.clock.now() - time.monotonic() + began
            took, part = self.pace.work(work, now), None
            if isinstance(done.event, Trained):
                part = self.pace.lost_after(done.event.activation)
            if part is not None:
                number = work.session
                lost = Failed(session=number, reason=DROPOUT)
                done = replace(done, event=lost, trouble=f"lost in session {number}")
                took *= part
            await asyncio.sleep(max(began + took - time.monotonic(), 0.0))
        await self.events.do(lambda now: self._hand_in(done, now))

    def _hand_in(self, done: WorkDone, now: float) -> list[Letter]:
        """In the role's turn: an event that comes in between must not start the same work again."""
        self._computing = False
        if isinstance(done.event, Failed) and done.work == self.role.work:
            self._note_undone(
                done.event.reason,
                f"{done.trouble}; this is undone, and the device goes on with the model of before",
                self.log.error if done.event.reason == NOT_FINITE else self.log.warning,
            )
        return self.role.finish(done, now)

    def seen(self, step: Transition, model: Tensor | None) -> None:  # noqa: ARG002
        """An activation that was declined; its server's sentence comes beside, as with all that is
        refused.
        """
        if isinstance(step.event, Declined) and any(
            isinstance(command, Undo) for command in step.commands
        ):
            activation, server = step.event.activation, self.role.machine.server
            sentence = (
                f"{server} has refused the upload of activation {activation}; it is undone, and the"
                " device goes on with the model of before"
            )
            self._note_undone(step.event.reason, sentence, self.log.warning)

    def _note_undone(self, reason: str, sentence: str, log: Callable[..., None]) -> None:
        self._undone, self._trouble = self._undone + 1, sentence
        self.metrics.undone.labels(reason=reason).inc()
        log("undone", reason=reason, sentence=sentence)

    # ---------------------------------------------------------------------------------------------
    # asking
    async def noticed(self, sender: Actor, notice: Notice) -> None:
        if not isinstance(notice, PhaseNotice):
            await super().noticed(sender, notice)
            return
        if notice.phase != self._phase.phase or not self._phase.open:
            self._heard_at = time.monotonic() - notice.elapsed
        self._phase = notice
        if notice.members:
            self.pace = self.pace.among(notice.members)
        self._new_round(notice.round)
        self._see_when_to_ask()

    def _see_when_to_ask(self) -> None:
        """Set the timer of the next request: at its arrival in this phase, unless the phase is
        full.
        """
        state = self.role.machine.state
        asks = state in (DeviceState.IDLE, DeviceState.SUSPENDED)
        # who takes time offline asks when that is over
        if not self.role.blueprint.method.takes_time_offline:
            asks = asks or state is DeviceState.OFFLINE
        phase = self._phase.phase
        if not (asks and self._phase.open and phase > self._asked):
            self.timers.drop(Woke)
            polls = asks and self.pace.has_own_timers and not self._phase.finished
            if polls and POLL not in self.timers:
                self.timers.set(POLL, self.options.retry_s[1], self._poll)
            return
        opened = self.clock.now() - time.monotonic() + self._heard_at
        arrival = self.pace.arrival(phase, self._round, opened)
        if arrival is not None and Woke not in self.timers:
            self.timers.set(Woke, max(self._heard_at + arrival - time.monotonic(), 0.0), self._wake)

    def _wake(self) -> None:
        if not self.pace.is_available():
            self.timers.set(Woke, POLL_S, self._wake)
        else:
            self._asked = self._phase.phase
            self.tasks.spawn(self.tell(Woke()))

    def _poll(self) -> None:
        """Notices may be lost, so a device that has heard nothing for long asks all the same."""
        could_ask = self.role.machine.state in (DeviceState.IDLE, DeviceState.SUSPENDED)
        if could_ask and self.pace.is_available():
            self.tasks.spawn(self.tell(Woke()))
        else:
            self._see_when_to_ask()

    def is_ready(self) -> bool:
        return self.role.machine.server in self.peers.connected

    # ---------------------------------------------------------------------------------------------
    # offline rounds
    def _new_round(self, round_: int) -> None:
        """FedBCD-I in the experiments' clock model: one offline round per round of the coordinator,
        if drawn to be available.
        """
        if round_ <= self._round:
            return
        self._round = round_
        if self.pace.trains_offline(round_) and not self._phase.finished:
            self.tasks.spawn(self.tell(OfflineDue()))

    def _see_when_to_train(self) -> None:
        """FedBCD-I with offline rounds that take time: by a timer that begins after each piece of
        work.
        """
        machine = self.role.machine
        rest = self.pace.rest(machine.session, machine.activation, self.clock.now())
        if rest is None:
            return
        if machine.state is not DeviceState.IDLE or self._phase.finished:
            self.timers.drop(OfflineDue)
        elif OfflineDue not in self.timers:
            self.timers.set(OfflineDue, rest, lambda: self.tasks.spawn(self.tell(OfflineDue())))

    def _offline_in(self, seconds: float) -> None:
        def due() -> None:
            self.tasks.spawn(self.tell(OfflineDue()))
            self._offline_in(self.options.offline_every_s)

        self.timers.set(OfflineDue, seconds, due)


async def _in_thread(compute: Callable[[], WorkDone]) -> WorkDone:
    """Like `asyncio.to_thread`, but the event loop need not wait for it to end: the work is started
    again next time.

    The thread is no daemon: an interpreter that ends while torch computes aborts. Who does not want
    to wait leaves with `os._exit`.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[WorkDone] = loop.create_future()

    def finish(done: WorkDone | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            assert done is not None
            future.set_result(done)

    def work() -> None:
        done, error = None, None
        try:
            done = compute()
        except Exception as caught:  # noqa: BLE001  it is raised where the result is awaited
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(finish, done, error)

    threading.Thread(target=work, name=TRAINING).start()
    return await future
