"""Plans carried out for a stack of devices against the same plans carried out literally, one device
and one number at a time, in float64.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import fedbcd as fb
from fedbcd.algorithm.interpret import Interpreter
from fedbcd.algorithm.method import Bound, Facts, Keep, Method, Slot
from fedbcd.algorithm.objective import Gradients
from fedbcd.algorithm.params import Layout
from fedbcd.algorithm.plan import (
    Custom,
    Gradient,
    Operation,
    Plan,
    Pull,
    Repeat,
    Repetitions,
    Set,
    Steps,
    Toward,
    batches_of,
    check_plan,
)
from support.exploring import examples

P = 3
REGISTERS = ("a", "b", "z")
Numbers = dict[str, np.ndarray]


def batch(device: int, number: int) -> np.ndarray:
    """What mini-batch `number` of a device is about: g(x) = ||x - batch||^2 / 2."""
    return np.sin(np.arange(P) + 7.0 * device + 3.0 * number)


class Stack:
    """The mini-batches of some devices, numbered by what each has drawn."""

    def __init__(self, devices: list[int]) -> None:
        self.devices, self.drawn = devices, [0] * len(devices)

    def gradients(self, at_NP: Tensor, buffers_NB: Tensor, last: bool = False) -> Gradients:
        rows = []
        for k in range(len(at_NP)):
            rows.append(batch(self.devices[k], self.drawn[k] - last))
            self.drawn[k] += not last
        gradient = at_NP - torch.from_numpy(np.stack(rows))
        return Gradients((gradient,), (gradient**2).sum(1) / 2, buffers_NB)


@dataclass
class Alone:
    """One device: what each operation says, written down."""

    device: int
    steps: int
    gamma: float
    factor: np.ndarray  # of gamma, for each value; infinite: shared
    drawn: int = 0

    def times(self, said: object) -> int:
        return self.steps if said == "K" else int(str(said))

    def gradient(self, x: np.ndarray, last: bool) -> np.ndarray:
        found = x - batch(self.device, self.drawn - last)
        self.drawn += not last
        return found

    def pull(self, toward: Toward, ex: np.ndarray, now: Numbers) -> np.ndarray:
        if toward.penalty is not None:
            return toward.penalty * (ex - now[toward.model])
        finite = np.where(np.isinf(self.factor), 0.0, self.factor)
        return self.gamma * finite * (ex - now[toward.model])

    def run(self, plan: Plan, now: Numbers) -> Numbers:
        for part in plan:
            match part:
                case Steps():
                    now = self.take_steps(part, now)
                case Pull():
                    x, prev = now[part.of], now[part.prev] if part.prev else now[part.of]
                    move, before = x - prev, x
                    for _ in range(self.times(part.times)):
                        before, x = x, x - self.pull(part.toward, x, now)
                    after = {"kept": x - move, "pull": before, "restart": x}[part.contact]
                    now = {**now, part.of: x} | ({part.prev: after} if part.prev else {})
                case Set():
                    value = sum((c * now[name] for c, name in part.terms), np.zeros(P))
                    value = value + sum(
                        (c * now[name] / self.steps for c, name in part.over_steps), np.zeros(P)
                    )
                    if part.columns == "shared":
                        value = np.where(np.isinf(self.factor), value, now[part.into])
                    now = {**now, part.into: value}
                case Gradient():
                    now = {**now, part.into: self.gradient(now[part.at], part.last_batch)}
                case Repeat():
                    for _ in range(self.times(part.times)):
                        now = self.run(part.body, now)
                case Custom():
                    now = {**now, "b": np.tanh(now["a"])}
        return now

    def take_steps(self, part: Steps, now: Numbers) -> Numbers:
        x, prev = now[part.of], now[part.prev] if part.prev else now[part.of]
        for k in range(self.times(part.times)):
            ex = x + part.momentum * (x - prev)
            slope = self.gradient(ex, part.same_batch and k > 0)
            slope = slope + sum((self.pull(pull, ex, now) for pull in part.pulls), np.zeros(P))
            slope = slope + sum((c * now[name] for c, name in part.linear), np.zeros(P))
            stepped = ex - part.step * slope
            if part.only != ("*",):  # the layer's weight, not its bias
                stepped[-1] = x[-1]
            x, prev = stepped, x
        return {**now, part.of: x} | ({part.prev: prev} if part.prev else {})


def bend(registers: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"b": registers["a"].tanh()}


class Any:
    """Operations and plans, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def terms(self, least: int) -> tuple[tuple[float, str], ...]:
        one = self.chance.choice
        count = self.chance.randint(least, 2)
        return tuple((one([1.0, -0.5, 0.25]), one(REGISTERS)) for _ in range(count))

    def operation(self) -> Operation:
        one = self.chance.choice
        times: Repetitions = one(["K", 1, 2])
        toward = [Toward(), Toward("z", 0.1), Toward("b", 0.3), Toward("b")]
        kind = one([Steps, Steps, Pull, Set, Gradient, Custom])
        if kind is Steps:
            return Steps(
                one([0.1, 0.3]),
                of="a",
                prev=one(["", "b"]),
                momentum=one([0.0, 0.9]),
                pulls=tuple(one(toward) for _ in range(one([0, 1, 2]))),
                linear=self.terms(0),
                times=times,
                only=one([("*",), ("*weight",)]),
                same_batch=one([False, True]),
            )
        if kind is Pull:
            contact = one(["kept", "pull", "restart"])
            return Pull("a", one(["", "b"]), one(toward[:2]), times, contact=contact)
        if kind is Set:
            return Set(one("ab"), self.terms(1), one(["all", "shared"]), self.terms(0))
        return Gradient("b", one(REGISTERS)) if kind is Gradient else Custom(bend, ("a",), ("b",))

    def plan(self) -> Plan:
        found: list[Operation] = []
        for _ in range(self.chance.randint(1, 4)):
            one = self.operation()
            if self.chance.random() < 0.25:
                one = Repeat(self.chance.choice(["K", 1, 2]), (one, self.operation()))
            found.append(one)
        return tuple(found)


@examples(60)
@given(seed=st.integers(0, 1_000_000))
def test_a_stack_of_devices_does_what_each_would_do_alone(seed: int) -> None:
    drawn = Any(seed)
    plan, chance = drawn.plan(), drawn.chance
    coupled, same_penalty = chance.random() < 0.5, chance.random() < 0.5
    steps = [chance.randint(1, 4) for _ in range(chance.randint(1, 5))]
    steps = sorted(steps, reverse=True)
    devices = [4, 2, 9, 1, 7][: len(steps)]
    gamma = [0.2] * len(steps) if same_penalty else [0.1 * (1 + k) for k in range(len(steps))]
    by_tensor = {"bias": float("inf"), "weight": 0.5} if coupled else None
    slots = (Slot("a", "parameters"), Slot("b", "parameters"))
    method = Method(
        name="any", plan=plan, slots=slots, sends=(), step=Keep(), personal="a", by_tensor=by_tensor
    )
    bound = Bound(method, Layout(nn.Linear(2, 1)), [1] * len(steps))
    normal = np.random.default_rng(seed).standard_normal
    start = {name: normal((len(steps), P)) for name in REGISTERS}
    penalty = gamma[0] if same_penalty else torch.tensor(gamma, dtype=torch.float64)[:, None]
    stack = Stack(devices)
    found = Interpreter(bound, steps, penalty, stack).run(
        plan, {name: torch.from_numpy(value.copy()) for name, value in start.items()}
    )
    factor = np.array([0.5, 0.5, np.inf]) if coupled else np.ones(P)
    for k, device in enumerate(devices):
        alone = Alone(device, steps[k], gamma[k], factor)
        expected = alone.run(plan, {name: value[k] for name, value in start.items()})
        for name in REGISTERS:
            scale = 1.0 + float(np.abs(expected[name]).max())
            difference = float(np.abs(found[name][k].numpy() - expected[name]).max())
            assert difference <= 1e-12 * scale, (name, device)
        assert stack.drawn[k] == alone.drawn == batches_of(plan, steps[k])


@examples(30)
@given(seed=st.integers(0, 1_000_000))
def test_what_is_given_is_not_changed_in_place(seed: int) -> None:
    plan = Any(seed).plan()
    method = Method(
        name="any",
        plan=plan,
        slots=(Slot("a", "parameters"), Slot("b", "parameters")),
        sends=(),
        step=Keep(),
        personal="a",
    )
    bound = Bound(method, Layout(nn.Linear(2, 1)), [1, 1])
    given_ = {name: torch.ones(2, P, dtype=torch.float64) for name in REGISTERS}
    Interpreter(bound, [3, 1], 0.5, Stack([0, 1])).run(plan, given_)
    assert all(torch.equal(value, torch.ones_like(value)) for value in given_.values())


def test_the_plans_of_the_paper_read_what_devices_have() -> None:
    for kind in (fb.FedBCD, fb.FedBCDI, fb.FedProx, fb.FedAvg):
        method = kind().method(Facts(2, (1, 1)))
        known = {slot.name for slot in method.slots} | {"z"}
        assert {"x"} <= check_plan(method.plan, known, method.name)
