"""Chains of linear layers for the tests of compiled sessions: examples, and the same by hand."""

import copy
import ctypes
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbcd.algorithm.device import Iterates
from fedbcd.algorithm.fused.chain import LinearLayer
from fedbcd.algorithm.fused.library import (
    PORTABLE,
    ChainSessions,
    ChainTrainer,
    ModelRows,
    SamplePool,
    load,
)
from fedbcd.algorithm.objective import Objective
from fedbcd.compute.workers import OneWorker, ThreadWorkers
from fedbcd.data.samples import BYTES
from support.rounding import Given, Rule

RULE = Rule(step=0.05, momentum=0.9, low=-0.6, high=0.7)


def runs_here(build: str) -> bool:
    able = torch.backends.cpu.get_cpu_capability()
    return build == PORTABLE or able == "AVX512" or (able == "AVX2" and build == "_chain_avx2")


def builds() -> list[ctypes.CDLL]:
    """All that are there and that this processor can run."""
    found = [load(name) for name in ("_chain_avx512", "_chain_avx2", PORTABLE) if runs_here(name)]
    return [build for build in found if build is not None]


class Example:
    """Some devices with some work."""

    def __init__(
        self,
        widths: list[int],
        samples: int,
        steps: list[int],
        bytes_: bool,
        anchored: bool,
        bias: bool,
        seed: int,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.arguments = (widths, samples, steps, bytes_, anchored, bias, seed)
        relu = [
            module
            for a, b in pairwise(widths)
            for module in (nn.Linear(a, b, bias=bias), nn.ReLU())
        ]
        self.module = nn.Sequential(*relu[:-1])
        self.objective = Objective(self.module.double(), functional.cross_entropy)
        size, n = self.objective.layout.size_P, len(steps)
        self.rows = Iterates(0.3 * normal(n, size), 0.3 * normal(n, size))
        self.anchor = normal(n, size) if anchored else None
        self.penalty = 0.5 + torch.rand(n, 1, generator=generator)
        self.steps = steps
        inputs = (
            torch.randint(256, (40, widths[0]), generator=generator).to(torch.uint8)
            if bytes_
            else normal(40, widths[0])
        )
        targets = torch.randint(widths[-1], (40,), generator=generator)
        number_of = BYTES(torch.arange(256, dtype=torch.uint8), torch.float32) if bytes_ else None
        self.pool = SamplePool(inputs, number_of, targets)
        self.inputs = inputs.double() if number_of is None else number_of.double()[inputs.long()]
        self.positions = torch.randint(40, (n, max(steps), samples), generator=generator)

    @cached_property
    def layers(self) -> tuple[LinearLayer, ...]:
        """Found when they are needed."""
        found = self.objective.chain(
            self.rows.x_NP[0].double(), self.inputs[:4], self.pool.targets[:4]
        )
        assert found is not None
        return found

    def __repr__(self) -> str:
        return f"Example{self.arguments}"

    def part(self, devices: Sequence[int], k: int, rows: Iterates) -> "Example":
        """Step k alone, of these devices, from these rows."""
        part = copy.copy(self)
        part.rows, part.steps = Iterates(*(table[devices] for table in rows)), [1] * len(devices)
        part.anchor = None if self.anchor is None else self.anchor[devices]
        part.penalty, part.positions = self.penalty[devices], self.positions[devices, k : k + 1]
        return part

    def given(self, device: int, k: int, rows: Iterates) -> Given:
        """What a device's step k begins with, from these rows."""
        at = self.positions[device, k]
        anchor = None if self.anchor is None else self.anchor[device]
        x, prev = (table[device] for table in rows)
        return Given(
            x, prev, anchor, float(self.penalty[device]), self.inputs[at], self.pool.targets[at]
        )

    def fused(
        self, compiled: ctypes.CDLL, threads: int = 1, how: str = "apart", rule: Rule = RULE
    ) -> tuple[Tensor, ...]:
        """New x, new x_prev, losses."""
        trainer = ChainTrainer(self.layers, self.rows.x_NP.shape[1], compiled)
        sessions = ChainSessions(self.steps, self.pool, self.positions)
        x, prev = self.rows.x_NP.clone(), self.rows.prev_NP.clone()
        models = (
            ModelRows(x, prev, torch.empty_like(x), torch.empty_like(x))
            if how == "apart"
            else ModelRows(x, prev, x, prev)
        )
        more: dict[str, Any] = {
            "step": rule.step,
            "momentum": rule.momentum,
            "bounds": (rule.low, rule.high),
        }
        with ThreadWorkers(threads) as crew:
            outcome = trainer.train(
                models,
                sessions,
                self.anchor,
                self.penalty[:, 0],
                crew if threads > 1 else OneWorker(),
                **more,
            )
        assert outcome.finite
        return models.new_x, models.new_prev, outcome.losses_NK
