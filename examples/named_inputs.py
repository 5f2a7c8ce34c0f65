"""Inputs by name and an output that is an object, as modules of Hugging Face have them: rows are
mappings, the module gets them as keywords and computes its loss itself.

run: python examples/named_inputs.py
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fedbcd as fb


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Shop(nn.Module):
    """Will they buy it? By age and by what they looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.head = nn.Embedding(12, 6), nn.Linear(7, 2)

    def forward(self, age: Tensor, seen: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(torch.cat([age[..., None], self.seen(seen).mean(-2)], -1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(logits, loss)


def customers(shop: int, samples: int = 50) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(shop)
    age = torch.randn(samples, generator=generator)
    seen = torch.randint(12, (samples, 3), generator=generator)
    bought = ((seen % 4 == shop % 4).any(1) & (age > -0.5)).long()
    return [{"age": a, "seen": s, "labels": b} for a, s, b in zip(age, seen, bought, strict=True)]


def main() -> None:
    shops = [(fb.LazySamples(customers(i)), fb.LazySamples(customers(100 + i))) for i in range(8)]
    federation = fb.Federation(Shop, fb.module_loss, shops, servers=2)
    method = fb.FedBCD(device_step=0.2, penalty=0.1)
    last = fb.train(federation, method, rounds=30, active=2).history.last
    print(f"global {last.global_accuracy:.3f}, personal {last.personal_accuracy:.3f}")


if __name__ == "__main__":
    main()
