"""A plan carried out by torch, for a stack of devices: the reference that every other way to
compute a plan is compared with. The equations are in `algorithm.device`.

Rows are devices, in descending order of K: those still at work are the first n, so fewer steps cost
less.

Shapes: N devices, F values of a model: P parameters, then B values of buffers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbcd.algorithm.device import Iterates, Work, aspg, in_loop, optimized, penalty_steps
from fedbcd.algorithm.method import Bound
from fedbcd.algorithm.objective import Gradients
from fedbcd.algorithm.optimizers import PLAIN
from fedbcd.algorithm.plan import (
    Custom,
    Gradient,
    Plan,
    Pull,
    Repeat,
    Repetitions,
    Set,
    Steps,
    Toward,
    count,
)
from fedbcd.errors import ConfigError

LIFE = 2**32  # sessions between a device's lives
Registers = dict[str, Tensor]  # (N, width) each, by name


class BatchGradients(Protocol):
    """The gradients of some devices' sessions."""

    def gradients(self, at_NP: Tensor, buffers_NB: Tensor, last: bool = False) -> Gradients:
        """Of the first rows, at these points, each on its next mini-batch, or on the `last`."""
        ...


class Interpreter:
    """Carries out plans for devices whose sessions take `steps` steps (K), in descending order."""

    def __init__(
        self,
        bound: Bound,
        steps: Sequence[int],
        penalty: Tensor | float,
        batches: BatchGradients,
        sessions: Sequence[int] = (),
    ) -> None:
        """`penalty`: gamma_i, one for all or (N, 1); `sessions`: their numbers, for schedules."""
        self._bound, self._k, self._batches = bound, list(steps), batches
        self._penalty = penalty
        # a life after a loss of memory begins a schedule anew, as does a session before all others
        self._t = [max(0, session) % LIFE for session in sessions or [0] * len(self._k)]
        self._p = bound.layout.size_P

    def run(self, plan: Plan, registers: Registers) -> Registers:
        """All registers afterwards. Those that were given are not changed in place."""
        for operation in plan:
            match operation:
                case Steps():
                    registers = {**registers, **self._steps(operation, registers)}
                case Pull():
                    registers = {**registers, **self._pull(operation, registers)}
                case Set():
                    registers = {**registers, operation.into: self._set(operation, registers)}
                case Gradient():
                    registers = {**registers, **self._gradient(operation, registers)}
                case Repeat():
                    registers = self._repeat(operation, registers)
                case Custom():
                    found = operation.function({name: registers[name] for name in operation.reads})
                    _check_found(operation, found, len(next(iter(registers.values()))))
                    registers = {**registers, **found}
        return registers

    def _counts(self, times: Repetitions, rows: int) -> list[int]:
        return [count(times, k) for k in self._k[:rows]]

    def _repeat(self, operation: Repeat, registers: Registers) -> Registers:
        rows = len(next(iter(registers.values())))
        return in_loop(
            registers,
            self._counts(operation.times, rows),
            lambda _, now: self.run(operation.body, now),
        )

    # ---------------------------------------------------------------------------------------------
    # steps
    def _steps(self, operation: Steps, registers: Registers) -> Registers:
        """Eq. (4)."""
        x_NF, p = registers[operation.of], self._p
        rows, buffers_NB = self._rows(operation.of, operation.prev, registers), x_NF[:, p:].clone()
        pulls = [self._toward(pull, registers, p) for pull in operation.pulls]
        z_NP, penalty = pulls[0] if pulls else (None, 0.0)

        def gradient(k: int, ex: Tensor) -> tuple[Tensor, ...]:
            last = operation.same_batch and k > 0
            found = self._batches.gradients(ex, buffers_NB[: len(ex)], last)
            buffers_NB[: len(ex)] = found.buffers_NB
            return found.parts

        work = Work(
            self._counts(operation.times, len(x_NF)),
            gradient,
            z_NP,
            penalty,
            pulls[1:],
            self._linear(operation, registers),
            self._bound.moves(operation.only),
            operation.decay,
        )
        eta, zeta, projection = operation.step, operation.momentum, operation.projection
        if operation.optimizer is None and operation.schedule is None:
            after = aspg(rows, work, eta, zeta, projection)
        else:
            step_N1 = self._scheduled(operation, x_NF)
            by = operation.optimizer or PLAIN
            after = optimized(rows, work, step_N1, zeta, by, projection)
        return self._kept(operation.of, operation.prev, after, buffers_NB)

    def _scheduled(self, operation: Steps, x_NF: Tensor) -> Tensor:
        """eta_x of each device."""
        schedule, rows = operation.schedule, len(x_NF)
        factors = [1.0 if schedule is None else schedule.factor(t) for t in self._t[:rows]]
        return operation.step * torch.tensor(factors, dtype=torch.float64).to(x_NF)[:, None]

    def _pull(self, operation: Pull, registers: Registers) -> Registers:
        """Algorithm 2, lines 14-18."""
        x_NF, p = registers[operation.of], self._p
        rows = self._rows(operation.of, operation.prev, registers)
        z_NP, penalty = self._toward(operation.toward, registers, p)
        counts = self._counts(operation.times, len(x_NF))
        work = Work(counts, _no_gradient, z_NP, penalty)
        after = penalty_steps(rows, work, operation.projection, operation.contact)
        return self._kept(operation.of, operation.prev, after, x_NF[:, p:])

    def _rows(self, of: str, prev: str, registers: Registers) -> Iterates:
        x_NP = registers[of][:, : self._p]
        return Iterates(x_NP, registers[prev][:, : self._p] if prev else x_NP)

    def _kept(self, of: str, prev: str, rows: Iterates, buffers_NB: Tensor) -> Registers:
        x_NF = torch.cat([rows.x_NP, buffers_NB], 1) if buffers_NB.shape[1] else rows.x_NP
        return {of: x_NF, prev: rows.prev_NP} if prev else {of: x_NF}

    def _toward(
        self, toward: Toward, registers: Registers, width: int
    ) -> tuple[Tensor, Tensor | float]:
        """A model to be pulled to, and by how much."""
        model_NP = registers[toward.model][:, :width]
        coupling_F = self._bound.coupling_F
        gamma = self._penalty if toward.penalty is None else toward.penalty
        if toward.penalty is None and not isinstance(gamma, float):
            gamma = gamma[: len(model_NP)]
        if toward.penalty is not None or coupling_F is None:
            return model_NP, gamma
        # what is one with the server's needs no pull
        rho_P = torch.where(coupling_F.isinf(), 0.0, coupling_F)[:width].to(model_NP)
        return model_NP, gamma * rho_P.expand(len(model_NP), -1)

    def _linear(self, operation: Steps, registers: Registers) -> Tensor | None:
        terms = [c * registers[name][:, : self._p] for c, name in operation.linear]
        return sum(terms[1:], terms[0]) if terms else None

    # ---------------------------------------------------------------------------------------------
    # the others
    def _set(self, operation: Set, registers: Registers) -> Tensor:
        width = min(
            registers[name].shape[1] for _, name in (*operation.terms, *operation.over_steps)
        )
        total: Tensor | None = None
        for coefficient, name in operation.terms:
            value = registers[name][:, :width]
            value = value if coefficient == 1.0 else coefficient * value
            total = value if total is None else total + value
        if operation.over_steps:
            rows = len(registers[operation.over_steps[0][1]])
            k_N1 = torch.tensor(self._k[:rows])[:, None]
            for coefficient, name in operation.over_steps:
                value = coefficient * registers[name][:, :width]
                value = value / k_N1.to(value)
                total = value if total is None else total + value
        assert total is not None
        if operation.columns == "all":
            return total
        before, coupling_F = registers[operation.into][:, :width], self._bound.coupling_F
        if coupling_F is None:  # no tensor is one with the server's
            return before
        return torch.where(coupling_F.isinf()[:width].to(total.device), total, before)

    def _gradient(self, operation: Gradient, registers: Registers) -> Registers:
        at_NF = registers[operation.at]
        p = self._p
        found = self._batches.gradients(at_NF[:, :p], at_NF[:, p:], operation.last_batch)
        whole = {operation.into: found.gradient_NP}
        return {**whole, operation.loss: found.loss_N[:, None]} if operation.loss else whole


def _check_found(operation: Custom, found: Any, rows: int) -> None:
    """What a function of somebody's has returned."""
    fits = isinstance(found, Mapping) and all(
        name in operation.writes and isinstance(value, Tensor) and len(value) == rows
        for name, value in found.items()
    )
    if not fits:
        raise ConfigError(
            f"Custom: its function returns {found!r:.80}; it must return a mapping of"
            f" {', '.join(operation.writes)}, as `writes` says, to tensors with a row for each of"
            f" the {rows} devices"
        )


def _no_gradient(k: int, ex: Tensor) -> Tensor:  # noqa: ARG001
    raise AssertionError("steps of the penalty take no gradients")
