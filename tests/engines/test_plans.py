"""Any plan, for many devices at once and for one device after the other: the second is the
reference that every other way is compared with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedbcd as fb
from fedbcd.algorithm.method import AddMean, Facts, Method, Sent, Slot
from fedbcd.algorithm.plan import Custom, Gradient, Plan, Pull, Repeat, Set, Steps, Toward
from support.runs import largest_difference

B = (1.0, "b")


def bend(registers: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Something that no operation says, row by row."""
    a, b = registers["a"], registers["b"]
    return {"b": b + 0.1 * torch.tanh(a - b).mean(1, keepdim=True) * a}


STEPS = Steps(0.1, of="a", prev="b", momentum=0.5, pulls=(Toward(), Toward("b", 0.2)))
PLANS: dict[str, Plan] = {
    "repeat": (
        Repeat("K", (Steps(0.1, of="a", times=2), Set("b", ((0.5, "a"), (0.5, "b"))))),
        Repeat(2, (Repeat("K", (Gradient("g", "b"), Set("b", (B, (-0.1, "g"))))),)),
    ),
    "custom": (STEPS, Custom(bend, ("a", "b"), ("b",)), Steps(0.1, of="b", times=2)),
    "same batch": (
        Steps(0.1, of="a", same_batch=True),
        Steps(0.1, of="b", same_batch=True, times=3, linear=((0.1, "a"),)),
        Gradient("g", "b", loss="l", last_batch=True),
        Set("b", (B, (-0.1, "g"))),
    ),
    "over steps": (STEPS, Set("b", (B, (-0.2, "z")), over_steps=((1.0, "a"), (-1.0, "z")))),
    "shared": (
        Set("a", ((1.0, "z"),), columns="shared"),
        Steps(0.1, of="a", only=("*bias",), pulls=(Toward(),)),
        Pull("b", toward=Toward(penalty=0.3), times=2),
    ),
}


@dataclass(frozen=True)
class Planned:
    """A method with a plan of two vectors, of which the first is a personal model."""

    plan: Plan
    coupled: bool

    def method(self, facts: Facts) -> Method:
        """Penalties differ, and so do numbers of steps."""
        return Method(
            name="planned",
            plan=(*self.plan, Set("d", ((1.0, "a"), (-1.0, "z"))), Set("e", (B, (-1.0, "z")))),
            slots=(Slot("a", restored=""), Slot("b")),
            sends=(Sent("d", difference=True), Sent("e", difference=True)),
            penalty=tuple(0.1 + 0.05 * i for i in range(facts.devices)),
            by_tensor={"*bias": float("inf"), "*": 0.5} if self.coupled else None,
            step=AddMean(0.5),
            personal="a",
            steps=(1, 4),
            batch=3,
        )


@cache
def federation() -> fb.Federation:
    chance = torch.Generator().manual_seed(1)

    def device(samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, 3, generator=chance), torch.randn(samples, 1, generator=chance)

    return fb.Federation(
        nn.Linear(3, 1), nn.functional.mse_loss, [device(5 + i % 3) for i in range(12)], servers=3
    )


def trained(algorithm: Any, **options: Any) -> fb.Run:
    return fb.train(
        federation(),
        algorithm,
        cloud=fb.AsyncCloud(first=2),
        active=2,
        rounds=6,
        dtype=torch.float64,
        certify_every=0,
        looks=1,
        **options,
    )


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_devices_together_and_one_by_one_do_the_same(name: str, coupled: bool) -> None:
    algorithm = Planned(PLANS[name], coupled)
    one_by_one = trained(algorithm, max_batch=1)
    assert largest_difference(trained(algorithm), one_by_one) < 1e-12
    assert largest_difference(trained(algorithm, max_batch=2), one_by_one) < 1e-12
    assert float(one_by_one.personal_NF.abs().max()) < 10, "it must not diverge"
    assert largest_difference(one_by_one, trained(Planned((), coupled))) > 1e-3, "it does something"
