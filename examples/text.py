"""Sentences of different lengths: samples are read when they are needed, and a collate function
pads them to batches.

run: python examples/text.py
"""

import torch
from torch import Tensor, nn

import fedbcd as fb

WORDS, TOPICS = 40, 4


def sentences(device: int, samples: int = 40) -> list[tuple[Tensor, int]]:
    """Words of a topic, and common ones; each device writes about two topics."""
    generator = torch.Generator().manual_seed(device)
    found = []
    for _ in range(samples):
        topic = (device + int(torch.randint(2, (), generator=generator))) % TOPICS
        length = int(torch.randint(3, 12, (), generator=generator))
        words = torch.randint(1, WORDS, (length,), generator=generator)
        about = torch.rand(length, generator=generator) < 0.4
        found.append((torch.where(about, words % 8 + 8 * topic + 1, words), topic))
    return found


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    words = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
    return words, torch.tensor([topic for _, topic in samples])


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, TOPICS)

    def forward(self, words: Tensor) -> Tensor:
        mask = (words > 0)[..., None]  # 0 fills up
        return self.head((self.embedding(words) * mask).sum(-2) / mask.sum(-2))


def main() -> None:
    data = [
        (
            fb.LazySamples(sentences(i), collate=padded),
            fb.LazySamples(sentences(100 + i), collate=padded),
        )
        for i in range(8)
    ]
    federation = fb.Federation(Reader, nn.functional.cross_entropy, data, servers=2)
    last = fb.train(federation, fb.FedBCD(device_step=0.3), rounds=20, active=2).history.last
    print(f"global {last.global_accuracy:.3f}, personal {last.personal_accuracy:.3f}")


if __name__ == "__main__":
    main()
