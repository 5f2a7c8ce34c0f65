"""What a deployment cost beyond what its clock model asks for: seconds per phase and per mix, from
its own log.

Without drawn delays there is no model to compare with; then only durations are reported.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbcd.algorithm import draws
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.processes.timeouts import quantile
from fedbcd.protocol.messages import (
    COORDINATOR,
    Activated,
    MixModels,
    OpenPhase,
    Send,
    ServerReady,
    StepGlobal,
    Trained,
    UpdateRequested,
    Uploaded,
    number_of,
)
from fedbcd.record.eventlog import LogReader
from fedbcd.schedule.delays import Delay
from fedbcd.spec import RunSpec


class _Phase:
    """One phase of one server, as it went."""

    def __init__(self, opened: float, number: int) -> None:
        self.opened = opened
        self.number = number
        self.activated: dict[int, int] = {}  # device -> activation
        self.steps: dict[int, int] = {}
        self.uploaded: set[int] = set()
        self.ended: float | None = None
        # no device was let in on a request from an earlier phase, ahead of its drawn arrival
        self.is_drawn = True


def account(log: Path, spec: RunSpec, options: Deploy) -> dict[str, Any]:
    """Mean and high quantile of what was waited for."""
    reader = _Reader()
    for step in LogReader(log):
        reader.take(step.time, step.actor, step.event, step.commands)
    rounds = np.diff([0.0, *reader.mixes])
    found: dict[str, Any] = {
        "activations": reader.uploads,
        "round_s": _mean(rounds.tolist()),
        "answer_s": _mean(reader.answers),
        "phase_s": _mean([p.ended - p.opened for p in reader.done if p.ended is not None]),
    }
    if options.time_scale is not None:
        beyond = [
            _beyond(phase, spec, options.time_scale) for phase in reader.done if phase.is_drawn
        ]
        last = [_beyond(phase, spec, options.time_scale) for phase in reader.last if phase.is_drawn]
        found["phases_ahead_of_draws"] = sum(not phase.is_drawn for phase in reader.done)
        found |= {"phase_overhead_s": _mean(beyond), "phase_overhead_s_p95": _high(beyond)}
        found["round_overhead_s"] = round(
            _mean(last) + found["answer_s"], 6
        )  # of the server that a mix waited for, and the mix
    return found


class _Reader:
    """Follows a log."""

    def __init__(self) -> None:
        self.open: dict[int, _Phase] = {}
        self.done: list[_Phase] = []
        self.last: list[_Phase] = []  # of each mix, the phase that it waited for
        self.mixes: list[float] = []
        self.answers: list[
            float
        ] = []  # from the report that completed a mix to a released server's next phase
        self.uploads = 0
        self._asked: dict[int, float] = {}  # device -> when its latest request came
        self._last_report = 0.0  # when the server that completed the latest mix had ended its phase
        self._reported: dict[int, float] = {}

    def take(self, time: float, actor: str, event: object, commands: Sequence[object]) -> None:
        """One transition."""
        if actor == COORDINATOR:
            if any(
                isinstance(command, MixModels | StepGlobal) for command in commands
            ) and isinstance(event, ServerReady):
                self.mixes.append(time)
                self._last_report = self._reported.get(event.server, time)
                self.last.append(self.open[event.server])
        elif actor.startswith("server/"):
            self._server(time, number_of(actor), event, commands)
        elif isinstance(event, Trained):
            for phase in self.open.values():
                if number_of(actor) in phase.activated:
                    phase.steps[number_of(actor)] = event.steps

    def _server(self, time: float, server: int, event: object, commands: Sequence[object]) -> None:
        phase = self.open.get(server)
        if isinstance(event, Uploaded) and phase is not None and event.device in phase.activated:
            phase.uploaded.add(event.device)
            self.uploads += 1
        if isinstance(event, UpdateRequested):
            self._asked[event.device] = time
        for command in commands:
            match command:
                case OpenPhase():
                    if phase is not None:
                        self.answers.append(time - self._last_report)
                    self.open[server] = phase = _Phase(time, command.phase)
                case Send(message=Activated() as activated) if phase is not None:
                    phase.activated[number_of(command.to)] = activated.activation
                    phase.is_drawn &= self._asked.get(number_of(command.to), time) >= phase.opened
                case Send(message=ServerReady(iteration=0)) if (
                    phase is not None and phase.ended is None
                ):
                    phase.ended = self._reported[server] = time
                    self.done.append(phase)


def _beyond(phase: _Phase, spec: RunSpec, scale: float) -> float:
    """Seconds that a phase took beyond the drawn arrivals and work of the devices that it waited
    for.
    """
    assert phase.ended is not None
    seed, clock = spec.seed, spec.clock
    due = [
        _quantile(clock.arrival, draws.unit_one(seed, draws.ARRIVAL, device, phase.number))
        + phase.steps.get(device, 0)
        * _quantile(clock.step, draws.unit_one(seed, draws.PROCESS, device, activation))
        for device, activation in phase.activated.items()
        if device in phase.uploaded
    ]
    return phase.ended - phase.opened - scale * max(due, default=0.0)


def _quantile(delay: Delay, u: float) -> float:
    return float(delay.quantile(np.array([u]))[0])


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 6) if values else 0.0


def _high(values: list[float]) -> float:
    return round(quantile(values, 0.95), 6) if values else 0.0
