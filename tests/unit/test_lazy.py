"""Data that are read when they are needed, samples of several inputs, and modules that return
objects: they train, and they are tested.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import fedbcd as fb
from fedbcd.compute.backends import ONE_BY_ONE
from fedbcd.engines.run import explain_backend
from fedbcd.errors import ConfigError, DataError, FedBCDError

DEVICES, SAMPLES, CLASSES = 4, 12, 3
METHOD = fb.FedBCD(device_step=0.1, batch=4, steps=(1, 3))
ROUNDS: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "dtype": torch.float64}


def numbers(device: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(device)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :CLASSES].argmax(1)


class Read(Dataset[Any]):
    """Samples in any shape, and which of them were read."""

    def __init__(self, samples: Any) -> None:
        self.samples, self.reads = samples, list[int]()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return self.samples[index]


def rows(device: int) -> list[tuple[Tensor, int]]:
    inputs, targets = numbers(device)
    return list(zip(inputs, targets.tolist(), strict=True))


class Net(nn.Module):
    """No chain that compiled code knows, so that data are what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES))

    def forward(self, inputs: Tensor) -> Any:
        return self.layers(inputs)


def federation(devices: Any, model: Any = Net, loss: Any = F.cross_entropy, **more: Any) -> Any:
    return fb.Federation(model, loss, devices, 2, **more)


def run(given: fb.Federation, **more: Any) -> fb.Run:
    options = {"algorithm": METHOD, "cloud": fb.SyncCloud(), "active": 2, **ROUNDS, **more}
    return fb.train(given, **options)


@pytest.fixture(scope="module")
def expected() -> fb.Run:
    """Of tensors."""
    return run(federation([numbers(i) for i in range(DEVICES)], test=numbers(9)))


def assert_same(one: fb.Run, other: fb.Run) -> None:
    torch.testing.assert_close(one.personal_NF, other.personal_NF, rtol=1e-12, atol=1e-12)
    assert one.personal_scores == pytest.approx(other.personal_scores)
    assert one.history[-1].global_accuracy == pytest.approx(other.history[-1].global_accuracy)


# ------------------------------------------------------------------------------------------------
# read when needed
def test_a_dataset_is_read_when_needed_and_gives_the_same_run(expected: fb.Run) -> None:
    data = [Read(rows(i)) for i in range(DEVICES)]
    test = Read(rows(9))
    made = federation(data, test=test)
    assert {index for part in (*data, test) for index in part.reads} == {0}
    assert max(len(part.reads) for part in (*data, test)) <= 2  # to know what they are
    found = run(made)
    assert found.digest == expected.digest
    assert found.personal_scores == expected.personal_scores
    assert test.reads.count(3) <= 3  # to sort, to try, and once for all models


def test_a_dataset_may_be_a_pool_or_each_devices_own_tests(expected: fb.Run) -> None:
    everything = [row for i in range(DEVICES) for row in rows(i)]
    labels = torch.tensor([label for _, label in everything])
    parts = [np.arange(i * SAMPLES, (i + 1) * SAMPLES) for i in range(DEVICES)]
    split = fb.Partition.of(labels, parts)
    pool: Any = Read(everything)
    given = (Net, F.cross_entropy, pool, split, 2)
    assert run(fb.Federation.from_partition(*given, test=numbers(9))).digest == expected.digest
    lazy, plain = (
        run(federation([(kind(i), kind(i + 20)) for i in range(DEVICES)]))
        for kind in (lambda i: Read(rows(i)), numbers)
    )
    assert lazy.digest == plain.digest
    assert lazy.personal_scores == plain.personal_scores


def test_a_cache_reads_a_sample_once() -> None:
    data = [Read(rows(i)) for i in range(DEVICES)]
    run(federation([fb.LazySamples(part, cache=True) for part in data], test=numbers(9)))
    for part in data:
        assert len(part.reads) == len(set(part.reads))


class Noisy(Read):
    """A random transform that draws from torch's, NumPy's and Python's own generators."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.samples[index]
        noise = float(torch.rand(())) + np.random.random() + random.random()  # noqa: NPY002
        self.reads.append(index)
        self.noise: list[float] = [*getattr(self, "noise", []), noise]
        return inputs + noise, target


def test_random_transforms_draw_anew_and_are_addressed(tmp_path: Path) -> None:
    """Anew in every step, alike in every run, also one that is resumed; nobody else's draws
    change.
    """
    data = [Noisy(rows(i)) for i in range(DEVICES)]
    made = federation(data)
    before = torch.get_rng_state(), np.random.random.__self__.get_state()[1].sum()  # type: ignore[attr-defined]
    whole = run(made, out=tmp_path / "whole")
    assert torch.equal(torch.get_rng_state(), before[0])
    again = [noise for part in data for noise in part.noise]
    assert len({*again}) > len(again) / 3  # looks read the same again
    run(made, rounds=2, out=tmp_path / "parts")
    parts = run(made, out=tmp_path / "parts", resume=True)
    assert parts.digest == whole.digest
    replayed = fb.replay(tmp_path / "whole" / "events.jsonl", federation=made)
    assert replayed["digest"] == whole.digest


def test_targets_that_are_listed_are_not_read() -> None:
    """As torchvision lists them; not where they are others than samples have."""
    data = Read(rows(0))
    data.targets = [label for _, label in rows(0)]  # type: ignore[attr-defined]
    listed = fb.LazySamples(Subset(data, [3, 5, 7]))
    assert listed.known_targets is not None
    assert listed.known_targets.tolist() == [data.targets[k] for k in (3, 5, 7)]  # type: ignore[attr-defined]
    data.targets = [7] * SAMPLES  # type: ignore[attr-defined]
    assert fb.LazySamples(data).known_targets is None
    told = Read(rows(0))
    assert fb.LazySamples(told, targets=range(SAMPLES)).all_targets.tolist() == [*range(SAMPLES)]
    assert not told.reads


# ------------------------------------------------------------------------------------------------
# several inputs
class Two(Net):
    """Takes its input in two parts."""

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.layers(torch.cat([left, right], -1))


class Whole(Net):
    """Takes the parts as one argument."""

    def forward(self, batch: Any) -> Any:
        parts = batch.values() if isinstance(batch, Mapping) else batch
        return self.layers(torch.cat([*parts], -1))


def parted(form: str, device: int) -> Any:
    inputs, targets = numbers(device)
    left, right = inputs[:, :2], inputs[:, 2:]
    pairs = zip(left, right, targets.tolist(), strict=True)
    match form:
        case "tensors by name":
            return {"left": left, "right": right}, targets
        case "tensors in a row":
            return (left, right), targets
        case "rows with names":
            return Read([{"left": a, "right": b, "label": y} for a, b, y in pairs])
        case "rows of three":
            return Read([(a, b, y) for a, b, y in pairs])
    return Read([((a, b), y) for a, b, y in pairs])


@pytest.mark.parametrize("model", [Two, Whole])
@pytest.mark.parametrize(
    "form",
    ["tensors by name", "tensors in a row", "rows with names", "rows of three", "rows of pairs"],
)
def test_inputs_may_be_several(form: str, model: Any, expected: fb.Run) -> None:
    made = federation([parted(form, i) for i in range(DEVICES)], model, test=parted(form, 9))
    assert_same(run(made), expected)


# ------------------------------------------------------------------------------------------------
# outputs
@dataclass
class Output:
    """As modules of Hugging Face return it."""

    logits: Tensor
    loss: Tensor | None = None


class AsObject(Net):
    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layers(inputs)
        return Output(logits, None if labels is None else F.cross_entropy(logits, labels))


class AsTuple(Net):
    def forward(self, inputs: Tensor) -> Any:
        return self.layers(inputs).sum(), self.layers(inputs), inputs


class AsMapping(Net):
    def forward(self, inputs: Tensor) -> Any:
        return {"features": inputs, "logits": self.layers(inputs)}


def own(outputs: Any, targets: Tensor) -> Tensor:
    """A loss of one's own is given what the module returns."""
    return F.cross_entropy(outputs.logits, targets)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (AsObject, F.cross_entropy),
        (AsObject, nn.CrossEntropyLoss()),
        (AsObject, own),
        (AsObject, fb.module_loss),
        (AsTuple, F.cross_entropy),
        (AsMapping, F.cross_entropy),
    ],
)
def test_outputs_may_be_objects(model: Any, loss: Any, expected: fb.Run) -> None:
    by_name = loss is fb.module_loss

    def data(device: int) -> Any:
        inputs, targets = numbers(device)
        return ({"inputs": inputs} if by_name else inputs), targets

    made = federation([data(i) for i in range(DEVICES)], model, loss, test=data(9))
    found = run(made)
    assert_same(found, expected)
    for column in ("global_loss", "personal_loss", "train_loss") if loss is not own else ():
        theirs = expected.history.column(column)
        assert found.history.column(column) == pytest.approx(theirs, abs=1e-5), column


class Mislabelled(Read):
    """One sample has a label that no output stands for."""

    def __getitem__(self, position: int) -> Any:
        x, y = super().__getitem__(position)
        return x, (9 if position == 7 else y)


@pytest.mark.parametrize("where", ["train", "test"])
def test_a_label_that_is_found_only_when_it_is_read_is_a_sentence(where: str) -> None:
    kinds = (Mislabelled, Read) if where == "train" else (Read, Mislabelled)
    data = [tuple(kind(rows(i)) for kind in kinds) for i in range(DEVICES)]
    with pytest.raises(DataError, match=r"targets of 0 to 9 have come, .* number labels from 0"):
        fb.train(federation(data), METHOD, rounds=30, active=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": "y"}, "whose parts have no names; leave 'y' out"),
        ({"inputs": ("a", "b")}, "have no names"),
        ({"cache": "yes"}, "cache = 'yes' must be true or false"),
        ({"target": 3}, "target = 3 must be a text"),
    ],
)
def test_options_that_samples_do_not_have_are_refused(options: Any, says: str) -> None:
    with pytest.raises(FedBCDError, match=says):
        federation([fb.LazySamples(rows(i), **options) for i in range(DEVICES)])


# ------------------------------------------------------------------------------------------------
# ragged sequences
class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        words = self.embedding(tokens) * mask[..., None]
        return self.head(words.sum(-2) / mask.sum(-1, keepdim=True))  # type: ignore[no-any-return]


def padded(samples: list[tuple[Tensor, int]]) -> Any:
    tokens = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
    mask = (tokens > 0).double()
    return {"tokens": tokens, "mask": mask}, torch.tensor([label for _, label in samples])


def texts(device: int) -> Any:
    generator = torch.Generator().manual_seed(device)
    lengths = torch.randint(2, 9, (20,), generator=generator).tolist()
    found = [torch.randint(1, 11, (length,), generator=generator) for length in lengths]
    return [(words, int((words > 5).double().mean() > 0.5)) for words in found]


def test_ragged_sequences_need_a_collate_function() -> None:
    ragged = [fb.LazySamples(texts(i), collate=padded) for i in range(DEVICES)]
    made = federation(ragged, Reader, test=fb.LazySamples(texts(9), collate=padded))
    spec = fb.RunSpec(algorithm=METHOD, active=2, **{**ROUNDS, "rounds": 20})
    found = fb.train(made, spec)
    assert found.history[-1].global_accuracy > 0.6
    chosen = next(choice for choice in explain_backend(made, spec) if not choice.reason)
    assert chosen.backend == ONE_BY_ONE
    with pytest.raises(DataError, match=r"cannot be stacked.*fb.LazySamples\(data, collate=...\)"):
        run(federation([Read(texts(i)) for i in range(DEVICES)], Reader))


# ------------------------------------------------------------------------------------------------
# other people's data sets
class Table:
    """A data set of Hugging Face, as far as it is used here: columns, and rows that are
    mappings.
    """

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns
        self.column_names = [*columns]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: column[key] for name, column in self.columns.items()}


class Partitions:
    """As flwr-datasets hand them out."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.partitioners = {"train": self}
        self.num_partitions = len(parts)

    def load_partition(self, number: int) -> Any:
        return self.parts[number]


def table(device: int, make: Any) -> Any:
    inputs, targets = numbers(device)
    return make({"pixels": inputs.tolist(), "label": targets.tolist()})


@pytest.mark.parametrize("kind", ["alike", "datasets"])
def test_partitions_of_tables_are_devices_data(kind: str, expected: fb.Run) -> None:
    make = Table if kind == "alike" else pytest.importorskip("datasets").Dataset.from_dict
    parts = Partitions([table(i, make) for i in range(DEVICES)])
    wide = {"transform": lambda x, dtype: x.to(dtype)}
    made = federation(parts, test=table(9, make), **wide)
    assert made.pool.known_targets is not None
    found = run(made)
    torch.testing.assert_close(found.personal_NF, expected.personal_NF, rtol=0, atol=1e-5)
    del parts.num_partitions
    parts.partitioners = {}
    with pytest.raises(ConfigError, match="has 0 partitioners"):
        federation(parts)


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        ({"x": [1.0]}, "none is called label or labels or"),
        ({"x": "a word", "label": 1}, "x of a sample is 'a word', which is no number"),
        (torch.zeros(2), "a sample is a Tensor; it must be"),
    ],
)
def test_samples_that_cannot_be_used_are_refused(sample: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        federation([Read([sample])] * 2)
    with pytest.raises(DataError, match="cannot be read sample by sample"):
        fb.LazySamples(7)
    for data, failure in (
        (Read({3: 4}), "sample 0 cannot be read .KeyError: 0, test_lazy.py line"),
        (fb.LazySamples(rows(0), collate=lambda rows: rows[99]), "the collate function fails"),
    ):
        with pytest.raises(DataError, match=failure):
            federation([data] * 2)
