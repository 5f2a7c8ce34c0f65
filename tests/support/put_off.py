"""Rounds of fixed shape from those of a schedule in which members stay and no server is isolated:
local work waits for the round in which its server steps. A planned round is just that, so events
and arrays can be compared as values.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

from fedbcd.schedule.work import Count, Instruction, Mix, Round, Sessions, Step, StepGlobal

Local = Sessions | Count


class PutOff:
    """Sound because the work of a device keeps its order, and nobody reads it before its server
    steps.
    """

    def __init__(self, rounds: Iterator[Round]) -> None:
        self._rounds = rounds
        self._waiting: list[Local] = []
        self._last: Round | None = None

    def __iter__(self) -> Iterator[Round]:
        return self

    def __next__(self) -> Round:
        self._last = round_ = next(self._rounds)
        steps = {part.server for part in round_.work if isinstance(part, Step)}
        work: list[Instruction] = []
        for part in round_.work:
            if isinstance(part, Local):
                self._waiting.append(part)
                continue
            if isinstance(part, Mix):
                work += self._due(steps)
            elif isinstance(part, StepGlobal):
                work, self._waiting = [*work, *self._waiting], []
            work.append(part)
        uploads = (len(part.uploads) for part in self._waiting if isinstance(part, Count))
        return replace(round_, activations=round_.activations - sum(uploads), work=tuple(work))

    def settled(self) -> Round:
        """What waits, as a round before a look; it does not come again."""
        assert self._last is not None
        work, self._waiting = tuple(self._waiting), []
        return replace(self._last, work=work)

    def _due(self, servers: Collection[int]) -> list[Local]:
        """All work of devices that these servers count; the rest goes on waiting."""
        uploads = (u for part in self._waiting if isinstance(part, Count) for u in part.uploads)
        devices = {device for server, device, _ in uploads if server in servers}
        due, self._waiting = (
            [found for part in self._waiting if (found := _of(part, devices, inside))]
            for inside in (True, False)
        )
        return due


def _of(part: Local, devices: Collection[int], inside: bool) -> Local | None:
    """What of it is of these devices, or of all others; None: nothing."""
    if isinstance(part, Sessions):
        sessions = tuple(s for s in part.sessions if (s.device in devices) == inside)
        return Sessions(sessions) if sessions else None
    uploads = tuple(each for each in part.uploads if (each[1] in devices) == inside)
    return Count(uploads) if uploads else None
