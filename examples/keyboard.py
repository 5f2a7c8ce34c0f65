"""The keyboard of Remark 2: writers with little text each and habits of their own, a small network
that guesses the next character, and what a new writer gets from z (docs/keyboard.md).

run: python examples/keyboard.py                                     made-up writers, in seconds
     python examples/keyboard.py plays.txt.gz --writers 100          speaking roles of plays
"""

import argparse
import gzip
import random
import re
from collections import defaultdict
from collections.abc import Collection

import torch
from torch import Tensor, nn

import fedbcd as fb

LETTERS = "abcdefghijklmnopqrstuvwxyz .,;:!?'-\n"
WINDOW = 20  # characters that are read at a time
Text = tuple[Tensor, Tensor]  # windows of characters, and the character after each


class Keyboard(nn.Module):
    """A guess of the next character after each one."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), 16)
        self.memory = nn.GRU(16, 48, batch_first=True)
        self.guess = nn.Linear(48, len(LETTERS))

    def forward(self, text: Tensor) -> Tensor:
        return self.guess(self.memory(self.letters(text))[0])


def loss(guesses: Tensor, text: Tensor) -> Tensor:
    return nn.functional.cross_entropy(guesses.flatten(0, 1), text.flatten())


def made_up(writers: int) -> list[str]:
    """What people write to each other: everybody has favourites, and a way to spell them."""
    slots = (
        ("hello|hi|dear friend|good morning|hey you", ", "),
        ("i|we|my sister|the children|our neighbours", " "),
        ("bought|lost|found|painted|talked about|dreamt of", " "),
        ("a red bicycle|the old house|some flowers|the garden|two tickets|your letter", " "),
        ("yesterday|in the morning|last summer|on the train|after school", ". "),
        ("see you soon|call me|with love|best wishes|take care", "!\n"),
    )
    texts = []
    for writer in range(writers):
        own = random.Random(writer)
        spelling = own.choice([("", ""), ("you", "u"), ("e", "ee"), ("ing", "in'"), (" ", "  ")])
        favourites = [own.choice(words.split("|")) for words, _ in slots]
        text = ""
        for _ in range(40):
            for favourite, (words, end) in zip(favourites, slots, strict=True):
                text += (favourite if own.random() < 0.6 else own.choice(words.split("|"))) + end
        texts.append(text.replace(*spelling))
    return texts


def roles(path: str, writers: int) -> list[str]:
    """What the roles with most text say in a file of plays: `=== play`, then speeches after
    `NAME.`; 4,000 characters of each.
    """
    said: dict[tuple[str, str], str] = defaultdict(str)
    play = role = ""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in map(str.strip, file):
            name = re.match(r"([A-Z][A-Z' ]{2,}|[A-Z][a-z]+(?=\.$))\.", line)
            if line.startswith("==="):
                play, role = line, ""
            elif name:
                role, line = name[1], line[name.end() :]
            if role and line and not line.startswith("["):
                said[play, role] += line.strip() + "\n"
    longest = sorted(said.values(), key=len, reverse=True)[:writers]
    return [text[:4000] for text in longest]


def windows(text: str) -> Text:
    numbers = torch.tensor([max(0, LETTERS.find(letter)) for letter in text.lower()])
    rows = numbers[: (len(numbers) - 1) // WINDOW * WINDOW].reshape(-1, WINDOW)
    after = numbers[1 : rows.numel() + 1].reshape(-1, WINDOW)
    return rows, after


def halves(text: str) -> tuple[Text, Text]:
    """What a writer learns from, and the text after that, on which nobody learns."""
    end = len(text) * 3 // 4
    return windows(text[:end]), windows(text[end:])


def mean(scores: Collection[float]) -> float:
    return sum(scores) / len(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description="next characters, with fedbcd")
    parser.add_argument("plays", nargs="?", help="a file of plays; without one: made-up writers")
    parser.add_argument("--writers", type=int, default=10, help="a fifth of them is new at the end")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="that a new writer takes from z")
    said = parser.parse_args()
    texts = roles(said.plays, said.writers) if said.plays else made_up(said.writers)
    random.Random(0).shuffle(texts)
    everybody = [halves(text) for text in texts]
    new, known = everybody[: len(texts) // 5], everybody[len(texts) // 5 :]
    federation = fb.Federation(Keyboard, loss, known, servers=4)
    algorithms = [  # momentum makes steps ten times as long; FedAvg has none
        fb.Local(device_step=0.3, batch=16),
        fb.FineTuned(device_step=2.0, batch=16),
        fb.FedBCD(device_step=0.3, batch=16, penalty=0.03),
        fb.FedBCDI(device_step=0.3, batch=16),
    ]
    print(f"{len(known)} writers, {len(new)} new ones; share of held-out characters guessed")
    print(f"{'':12}{'z':>8}{'own':>8}{'new: z':>10}{'own':>8}")
    for algorithm in algorithms:
        run = fb.train(federation, algorithm, rounds=said.rounds, seed=0)
        came = [fb.personalise(run, learns, test=test, steps=said.steps) for learns, test in new]
        scores = [
            run.global_scores.values(),
            run.personal_scores.values(),
            [newcomer.global_score for newcomer in came],
            [newcomer.score for newcomer in came],
        ]
        print("{:12}{:8.3f}{:8.3f}{:10.3f}{:8.3f}".format(algorithm.name, *map(mean, scores)))


if __name__ == "__main__":
    main()
