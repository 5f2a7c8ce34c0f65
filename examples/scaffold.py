"""SCAFFOLD (Karimireddy et al., 2020) as a method of one's own: a bundle {z, c} at the servers, a
control variate c_i on each device, two sent vectors with a sum each.

run: python examples/scaffold.py; in a job file: algorithm.name = "scaffold:Scaffold"
"""

from dataclasses import dataclass

import torch
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.method import Facts, Method, Model, Part, Sent, Slot, Sums
from fedbcd.algorithm.plan import Set, Steps


@dataclass(frozen=True)
class Move:
    eta: float

    def __call__(self, w: Model, sums: Sums) -> Model:
        """z moves by the mean of dy, c by the sum of dc over all devices."""
        z = w["z"] + self.eta * sums.totals["dy"] / sums.count
        return {"z": z, "c": w["c"] + sums.totals["dc"] / sums.members}


@dataclass(frozen=True)
class Scaffold:
    step: float = 0.05
    eta: float = 1.0
    steps: tuple[int, int] = (1, 5)  # K_i

    def method(self, facts: Facts) -> Method:
        return Method(
            name="scaffold",
            plan=(
                Set("x", ((1.0, "z"),)),
                Steps(self.step, linear=((1.0, "c"), (-1.0, "c_i"))),  # by g - c_i + c
                Set("dy", ((1.0, "x"), (-1.0, "z"))),
                Set("dc", ((-1.0, "c"),), over_steps=((-1 / self.step, "dy"),)),
                Set("c_i", ((1.0, "c_i"), (1.0, "dc"))),
            ),
            slots=(Slot("c_i", "parameters", start=0.0),),
            sends=(Sent("dy", difference=True), Sent("dc", "parameters", difference=True)),
            model=(Part("z"), Part("c", "parameters", start=0.0)),
            hears=2,  # devices are sent both parts
            step=Move(self.eta),
            personal="z",  # no personal models
            cloud="sync",
            steps=self.steps,
            batch=8,
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    data = [(torch.randn(30, 4), torch.randn(30, 1) - i % 3) for i in range(12)]
    federation = fb.Federation(lambda: nn.Linear(4, 1), nn.functional.mse_loss, data, servers=3)
    print(fb.train(federation, Scaffold(), active=2, rounds=20).summary)
