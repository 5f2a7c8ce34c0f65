"""What a round asks for beside work: who counts, and with what (`schedule.work` has the rest)."""

from dataclasses import dataclass

from fedbcd.protocol.messages import ModelRef


@dataclass(frozen=True, slots=True)
class Admit:
    """A device joins, or comes back, and begins at `model`."""

    server: int
    device: int
    model: ModelRef


@dataclass(frozen=True, slots=True)
class Dismiss:
    """A device leaves; `anew`: the sum is formed from those who are left."""

    server: int
    device: int
    anew: bool


@dataclass(frozen=True, slots=True)
class CountNobody:
    """What the members of a server have contributed is lost."""

    server: int


@dataclass(frozen=True, slots=True)
class Recall:
    """A device stands by what it has contributed last; an upload that waits is that."""

    device: int


@dataclass(frozen=True, slots=True)
class Recount:
    """A device has contributed again."""

    server: int
    device: int


@dataclass(frozen=True, slots=True)
class Accept:
    """A server has an upload for good; only of devices that will be restored."""

    device: int


@dataclass(frozen=True, slots=True)
class Restore:
    """A device that lost its memory starts again from what its server accepted last, `model`."""

    device: int
    model: ModelRef
