"""Whose clock is off, and by how much: a role's own against what it has recorded, and those of its
peers against its own.

Nothing is done about it, since nothing has to be: clocks shape the log's times and nothing else.
Operators are told.
"""

from typing import Any

from fedbcd.engines.deploy.processes.clock import OFF_S
from fedbcd.engines.deploy.processes.logs import RoleLog
from fedbcd.engines.deploy.processes.metrics import Metrics
from fedbcd.protocol.messages import Actor


class Skews:
    """What is known of the clocks of connected peers, in seconds ahead of ours; the first time that
    one is off is logged.
    """

    def __init__(self, metrics: Metrics, log: RoleLog) -> None:
        self._metrics = metrics
        self._log = log
        self._of: dict[Actor, float] = {}
        self._told: set[Actor] = set()
        self._own = 0.0  # how far the role's time is ahead of the clock of its machine

    def at_least(self, peer: Actor, ahead: float) -> None:
        """Something that a peer sent at its time has come: it took a while, so the peer is ahead by
        so much at least.
        """
        if ahead > max(self._of.get(peer, 0.0), 0.0):
            self.measured(peer, ahead)

    def measured(self, peer: Actor, ahead: float) -> None:
        self._of[peer] = ahead
        if abs(ahead) <= OFF_S:
            self._told.discard(peer)
        elif peer not in self._told:
            self._told.add(peer)
            self._log.warning(
                "clock_skew",
                peer=peer,
                seconds=round(ahead, 1),
                sentence=f"the clock of {peer} is {_words(ahead)} ours",
            )
        self._show()

    def forget(self, peer: Actor) -> None:
        self._of.pop(peer, None)
        self._show()

    def note_own(self, ahead: float) -> None:
        self._metrics.clock_ahead.set(ahead)
        if abs(ahead) > OFF_S >= abs(self._own):
            sentence = (
                f"what this role has recorded is {_words(ahead)} the clock of its machine; it goes"
                " on all the same"
            )
            self._log.warning("clock", seconds=round(ahead, 1), sentence=sentence)
        self._own = ahead

    def status(self) -> dict[str, Any]:
        peer, seconds = self._worst()
        return {
            "clock_ahead": round(self._own, 3),
            "clock_skew": round(seconds, 3),
            "clock_skew_of": peer,
        }

    def _worst(self) -> tuple[Actor, float]:
        return max(self._of.items(), key=lambda item: abs(item[1]), default=("", 0.0))

    def _show(self) -> None:
        self._metrics.clock_skew.set(self._worst()[1])


def _words(ahead: float) -> str:
    return f"{abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'}"
