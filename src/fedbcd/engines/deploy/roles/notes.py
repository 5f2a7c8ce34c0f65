"""What a server takes note of: which models it has sent to whom, and who may still ask for one."""

from collections.abc import Callable

from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.protocol.messages import (
    Acknowledged,
    Activated,
    Admit,
    AdoptModel,
    Command,
    CountNobody,
    Declined,
    Dismiss,
    ModelRef,
    Restored,
    Send,
    ServerReady,
    StepLost,
    StepModel,
    number_of,
    version_of,
)


class Notes:
    """From commands alone, so they are the same after a crash."""

    CHANGE = ("_granted", "_begun", "_version", "_unstarted", "_reported")  # names in snapshots

    def __init__(
        self, blueprint: Blueprint, current: ModelRef, drop: Callable[[str], None]
    ) -> None:
        """`current` is the handle of z; `drop` forgets a model that nobody can ask for any more."""
        self._sync, self._keeps_last = blueprint.cloud.sync, blueprint.bound.keeps_last
        self.current, self._first, self._drop = current, current, drop
        # sent to devices whose upload has not been accepted
        self._granted: dict[int, Activated] = {}
        self._begun: dict[int, int] = {}  # device -> the version of z that it was last sent ...
        self._version = 0  # ... and that of the latest
        self._unstarted: set[int] = set()  # who joined and has not been sent what it starts from
        self._reported = False  # Sync-cloud: the sum is on its way

    def take(self, command: Command) -> None:
        """Of one command."""
        match command:
            case Send(message=Activated() as granted):
                device = number_of(command.to)
                self._granted[device], self._begun[device] = granted, version_of(granted.model)
            case Send(message=Acknowledged() | Declined() as answer):
                self._answered(number_of(command.to), answer.activation)
            case Send(message=Restored()):
                self._unstarted.discard(number_of(command.to))
            case Send(message=ServerReady()):
                self._reported = self._sync
            case CountNobody():  # whoever was sent one has to contribute again
                self._granted.clear()
                self._unstarted.clear()
            case StepModel() | StepLost():
                self._version = version_of(command.result)
            case AdoptModel():
                self._version, self._reported = version_of(command.model), False
            case Admit() if self._keeps_last:
                self._unstarted.add(command.device)
            case Dismiss():
                self._unstarted.discard(command.device)

    def _answered(self, device: int, activation: int) -> None:
        """It will not ask for the model of this activation any more."""
        granted = self._granted.get(device)
        if granted is not None and granted.activation == activation:
            del self._granted[device]
            self.release(granted.model)

    def release(self, handle: ModelRef) -> None:
        """Forget a model that nobody can ask for any more."""
        if handle != self.current and not self._is_granted(handle):
            self._drop(handle)

    def _is_granted(self, handle: ModelRef) -> bool:
        """Whether somebody was sent this model, and has not been answered."""
        return any(granted.model == handle for granted in self._granted.values())

    def is_passing(self, handle: ModelRef) -> bool:
        """Whether somebody was sent a model in the transition that made it, and now replaces it: a
        phase that is over as soon as it opens lets in spare devices, and its server steps alone.
        """
        return handle not in (self.current, self._first) and self._is_granted(handle)

    def granted(self, device: int) -> Activated | None:
        """What it was sent, and has not been answered for."""
        return self._granted.get(device)

    def age(self, device: int) -> int:
        """How many versions of z were made since the one that it was last sent."""
        return self._version - self._begun[device]

    def is_unstarted(self, device: int) -> bool:
        """Whether it has joined and has not been sent what it starts from."""
        return device in self._unstarted

    @property
    def reported(self) -> bool:
        """Sync-cloud: whether the sum is on its way."""
        return self._reported
