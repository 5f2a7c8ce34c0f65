"""FedBuff (Nguyen et al., 2022) as a method of one's own: a server steps as soon as its buffer has
`active` updates, while `at_once` devices are at work; an update counts the less the older the z is
that it began from.

run: python examples/fedbuff.py; in a job file: algorithm.name = "fedbuff:FedBuff"
"""

from dataclasses import dataclass

import torch
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.method import AddMean, Facts, Method, Sent
from fedbcd.algorithm.plan import Set, Steps


def discount(age: int) -> float:
    return (1.0 + age) ** -0.5


@dataclass(frozen=True)
class FedBuff:
    step: float = 0.05
    eta: float = 1.0
    at_once: int = 6
    steps: tuple[int, int] = (1, 5)  # K_i

    def method(self, facts: Facts) -> Method:
        return Method(
            name="fedbuff",
            plan=(
                Set("x", ((1.0, "z"),)),
                Steps(self.step),
                Set("d", ((1.0, "x"), (-1.0, "z"))),
            ),
            slots=(),
            sends=(Sent("d", difference=True),),
            discount=discount,
            step=AddMean(self.eta, by_count=True),  # z <- z + eta / K times the sum of discounted d
            personal="z",  # no personal models
            cloud="async",
            at_once=self.at_once,
            steps=self.steps,
            batch=8,
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    data = [(torch.randn(30, 4), torch.randn(30, 1) - i % 3) for i in range(12)]
    federation = fb.Federation(lambda: nn.Linear(4, 1), nn.functional.mse_loss, data, servers=1)
    print(fb.train(federation, FedBuff(), cloud=fb.AsyncCloud(1), active=3, rounds=20).summary)
