"""The schedule of a recorded run: its event log, read as rounds."""

from collections.abc import Callable, Iterator

from fedbcd.algorithm.method import Method
from fedbcd.errors import ProtocolError, RecordError, ReplayMismatch
from fedbcd.protocol.messages import (
    Actor,
    Command,
    DeviceJoined,
    DeviceLeft,
    Event,
    Failed,
    OfflineDue,
    OfflineTrained,
    Trained,
    Woke,
)
from fedbcd.record.eventlog import LogReader, Transition
from fedbcd.schedule.driver import Driver, Machines
from fedbcd.schedule.effort import Effort
from fedbcd.schedule.work import Reader, Round

# nothing brings them about
BEGINNINGS = (Woke, Trained, Failed, OfflineDue, OfflineTrained, DeviceJoined, DeviceLeft)


class LogRounds:
    """Rounds of a log. Machines are fed its events and must answer as they did then; every
    complaint names its line.
    """

    def __init__(self, log: LogReader, machines: Machines, reader: Reader, method: Method) -> None:
        """`method` says how many steps a session may have."""
        self.machines = machines
        self.line = 1
        self.clock = 0.0
        self.before: Callable[[float], None] | None = None  # each transition, with its time
        self._log, self._reader, self._method = log, reader, method
        self._driver = Driver(machines, reader, self)
        self._round = 0  # of the last `take`
        self._expected: tuple[Command, ...] = ()

    def __iter__(self) -> Iterator[Round]:
        """A round ends before the first event that the last mix has not brought about, once all
        servers of that mix have stepped.
        """
        for step in self._log:
            if self._is_over and (step.time > self.clock or isinstance(step.event, BEGINNINGS)):
                yield self.take()
            if self.before is not None:
                self.before(step.time)
            self._deliver(step)
        yield self.take()

    @property
    def _is_over(self) -> bool:
        return self.machines.coordinator.round > self._round and self._reader.is_settled

    @property
    def done(self) -> Effort:
        """What devices have done so far."""
        return self._reader.done

    def take(self) -> Round:
        """What has been read since the last round."""
        self._round = self.machines.coordinator.round
        activations = sum(device.activation for device in self.machines.devices.values())
        return self._reader.take(self._round, self.clock, activations)

    def _deliver(self, step: Transition) -> None:
        """Feed one recorded event to the machines."""
        self.line += 1
        if not step.time >= self.clock:
            raise ReplayMismatch(
                f"{self._place()}: time goes back from {self.clock} to {step.time}"
            )
        if isinstance(step.event, Trained | OfflineTrained):
            offline = isinstance(step.event, OfflineTrained)
            low, high = self._method.lengths(offline=offline)
            if not low <= step.event.steps <= high:
                raise ReplayMismatch(
                    f"{self._place()}: {step.actor} took {step.event.steps} steps, but the run"
                    f" allows {low} to {high}"
                )
        self.clock, self._expected = step.time, step.commands
        try:
            self._driver.deliver(step.time, step.actor, step.event)
        except (ProtocolError, RecordError) as error:
            raise ReplayMismatch(f"{self._place()}: {error}") from None
        except KeyError as error:
            raise ReplayMismatch(
                f"{self._place()}: at this point there is no model {error}"
            ) from None

    def append(self, time: float, actor: Actor, event: Event, commands: list[Command]) -> None:  # noqa: ARG002
        """As a log: compare what a machine answers with what it answered then."""
        if tuple(commands) != self._expected:
            raise ReplayMismatch(
                f"{self._place()}: {actor} now answers {event} differently than recorded"
            )

    def _place(self) -> str:
        return f"{self._log.path} line {self.line}"
