"""A recorded run again: the event log is the schedule, so the numbers follow from it alone."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedbcd.compute.numbers import Numbers
from fedbcd.config import called, convert
from fedbcd.data.federation import Federation, check_federation
from fedbcd.engines.setup import (
    find_torch_device,
    make_machines,
    make_numbers,
    make_reader,
    threads_inside_torch,
)
from fedbcd.errors import ConfigError, RecordError, ReplayMismatch
from fedbcd.own import imports
from fedbcd.protocol.messages import number_of
from fedbcd.record.eventlog import LogReader
from fedbcd.record.start import copy_beside
from fedbcd.schedule.effort import Effort
from fedbcd.schedule.log import LogRounds
from fedbcd.spec import RunSpec

OTHER_ORDER = (
    "cluster",
    "ahead",
)  # engines that add up sums in another order than events do, so that the digest is another
OnStep = Callable[[float, "Replaying"], None]


@called(device="torch_device")
def replay(
    log: str | Path,
    federation: Federation,
    *,
    torch_device: str | torch.device = "cpu",
    exact: bool = False,
    on_step: OnStep | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Recompute a recorded run from its event log alone; raises if a machine or the final digest
    disagrees with the record.

    `exact` asks for one device at a time in one thread, as a deployment computes: the digest is
    then that of its stores, bit for bit. `on_step` is called before each transition with its time
    and what is being replayed: it may look at its `machines` and `numbers`. The digest is not
    compared if the run was computed on a cluster or ahead of its events; the result then names that
    `engine`. `trust`: code that the log names, kinds of other people, may be imported.
    """
    check_federation(federation)
    reader = LogReader(Path(convert(log, str | Path, "log")))
    with imports(allowed=trust):
        spec = recorded_spec(reader, federation)
    if spec.start is not None:
        spec = replace(spec, start=copy_beside(reader.path, str(spec.start)))
    with threads_inside_torch(1 if exact else None):
        where = find_torch_device("cpu" if exact else torch_device)
        return _replayed(reader, spec, federation, where, exact, on_step)


def _replayed(
    reader: LogReader,
    spec: RunSpec,
    federation: Federation,
    device: torch.device,
    exact: bool,
    on_step: OnStep | None,
) -> dict[str, Any]:
    if exact and spec.max_batch != 1:
        raise RecordError(
            f"{reader.path} is of a run that trained devices together"
            f" (max_batch={spec.max_batch}), and its digest depends on that; replay it without"
            " --exact"
        )
    remember, undone = _looked_ahead(reader.path)
    numbers = make_numbers(spec, federation, device)
    numbers.trainer.check_vectorised(numbers.global_VF()[0])
    numbers.devices.contributions.remember(remember)
    rounds = LogRounds(
        reader,
        make_machines(spec, federation),
        make_reader(spec, federation, remember, undone),
        spec.method_of(federation),
    )
    replaying = Replaying(rounds, numbers)
    if on_step is not None:
        rounds.before = lambda time: on_step(time, replaying)
    for round_ in rounds:
        numbers.play(round_)
    result = {
        "rounds": rounds.machines.coordinator.round,
        "clock": rounds.clock,
        "digest": numbers.digest(),
    }
    end = reader.end
    other_order = (
        {} if end is None or end.get("engine") not in OTHER_ORDER else {"engine": end["engine"]}
    )
    for key, value in result.items() if end is not None else ():
        if end is not None and end.get(key) != value and not (key == "digest" and other_order):
            raise ReplayMismatch(
                f"{reader.path} line {rounds.line + 1} ends with {key} {end.get(key)}, the replay"
                f" with {value}"
            )
    return {**result, "complete": end is not None, **other_order}


def _looked_ahead(path: Path) -> tuple[set[int], set[tuple[int, int]]]:
    """Who was put in step on the way: their last contributions are to be remembered. And the
    activations that were undone, of a device each: what was trained in them is not to be computed.
    What is wrong with a line is found later.
    """
    restored: set[int] = set()
    undone: set[tuple[int, int]] = set()
    with path.open("rb") as file:
        for raw in file:
            if raw.startswith(b'{"t"') and (
                b'"event":{"Restored":' in raw
                or b'"event":{"Declined":' in raw
                or b'"event":{"Recalled":' in raw
            ):
                with suppress(ValueError, KeyError, TypeError, AttributeError):
                    line = json.loads(raw)
                    device = number_of(line["on"])
                    if "Restored" in line["event"]:
                        restored.add(device)
                    undone |= {
                        (device, command["Undo"]["activation"])
                        for command in line["do"]
                        if "Undo" in command
                    }
    return restored, undone


class Replaying:
    """A replay under way: its machines, and its numbers as they are at this point of the log."""

    def __init__(self, rounds: LogRounds, numbers: Numbers) -> None:
        self.machines = rounds.machines
        self._rounds, self._numbers = rounds, numbers

    @property
    def done(self) -> Effort:
        """What devices have done until here."""
        return self._rounds.done

    @property
    def numbers(self) -> Numbers:
        self._numbers.play(self._rounds.take())
        self._numbers.settle()
        return self._numbers


def recorded_spec(reader: LogReader, federation: Federation) -> RunSpec:
    """The run in the head of a log, if it belongs to this federation."""
    return spec_of(reader.header.get("identity"), reader.path, federation)


def spec_of(identity: Any, path: Path, federation: Federation) -> RunSpec:
    """The run of an identity that is kept in this file."""
    try:
        spec = RunSpec.from_identity(identity)
    except ConfigError as error:
        raise RecordError(f"{path} records a run that cannot be: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"{path} does not say how its run was set up ({error}); it is not of this version"
        ) from None
    if identity != json.loads(json.dumps(spec.identity(federation))):
        raise RecordError(
            f"{path} was recorded with other data, other servers or another model than the"
            " federation given"
        )
    spec.check(federation)
    return spec
