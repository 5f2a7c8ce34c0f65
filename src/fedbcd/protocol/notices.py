"""What peers tell each other beside the protocol, so that nobody polls: how a phase or a round
stands, and pings. A notice may be lost, and none changes a machine.
"""

from dataclasses import dataclass


class Notice:
    """Something that a peer ought to know."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseNotice(Notice):
    """A server tells its devices how its phase stands; -1 stands for none yet."""

    phase: int
    round: int  # of the coordinator
    open: bool = False
    finished: bool = False  # all rounds have been played
    elapsed: float = 0.0  # seconds since the phase was opened
    members: tuple[int, ...] = ()  # told where it is drawn which of them are available


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundNotice(Notice):
    """The coordinator tells servers its round."""

    round: int
    finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Notice):
    """To be answered at once, so that one learns how long the other takes."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong(Notice):
    """The answer."""

    number: int
    clock: float | None = None  # of who answers; older software does not say
