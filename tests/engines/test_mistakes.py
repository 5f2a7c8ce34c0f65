"""What a new user gets wrong, with own data and modules and the habits of other libraries: each
mistake is a sentence with its remedy, before anything runs, and what was reasonable works.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedbcd as fb
from fedbcd.errors import FedBCDError
from fedbcd.export import export_run

X = [(torch.arange(12.0).reshape(4, 3) + i) / 15 for i in range(4)]
Y = torch.tensor([0, 1, 0, 1])
DATA = [(x, Y) for x in X]
CROSS_ENTROPY, MSE = nn.functional.cross_entropy, nn.functional.mse_loss


def line(outputs: int = 2) -> nn.Module:
    return nn.Linear(3, outputs)


def of(model: Any = line, loss: Any = CROSS_ENTROPY, devices: Any = DATA, **more: Any) -> Any:
    """A federation like that of a new user."""
    given = {"servers": 2, "test": DATA[0]} | more
    return fb.Federation(model, loss, devices, **given)


def train(algorithm: Any = None, federation: Any = None, **options: Any) -> fb.Run:
    options = {"rounds": 2, "active": 1, "certify_every": 0} | options
    return fb.train(federation or of(), algorithm or fb.FedBCD(batch=2, steps=2), **options)


def run(*given: Any, **more: Any) -> fb.Run:
    return train(None, of(*given, **more))


def targets(changed: Any, **more: Any) -> fb.Run:
    """All devices and the test set with these."""
    return run(devices=[(x, changed) for x in X], test=(X[0], changed), **more)


def inputs(change: Callable[[torch.Tensor], Any], **more: Any) -> fb.Run:
    return run(devices=[(change(x), Y) for x in X], test=(change(X[0]), Y), **more)


@cache
def plain() -> fb.Run:
    return train()


class Returning(nn.Module):
    """A line whose outputs are handed out in another way."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.line, self.change = nn.Linear(3, 2), change

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(self.line(x))


class Broken(Dataset[Any]):
    """A data set whose samples have no such key."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, position: int) -> Any:
        return {}["image"]


class Ragged(Broken):
    """A data set whose samples are of two lengths."""

    def __getitem__(self, position: int) -> Any:
        return torch.ones(3 + position % 2), 0


class Stream(IterableDataset[Any]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def in_one_column(target: torch.Tensor, loss: Any) -> fb.Run:
    return targets(target, model=lambda: line(1), loss=loss)


def pool(partition: Any, **more: Any) -> fb.Federation:
    samples: Any = more.pop("samples", fb.Samples(X[0], Y))
    return fb.Federation.from_partition(line, CROSS_ENTROPY, samples, partition, 2, **more)


HALVES = fb.IID().split(Y, 2)
DATA_OF_DEVICES: dict[str, tuple[Callable[[], Any], str]] = {
    "no devices": (lambda: run(devices=[]), "`devices` is empty"),
    "None as devices": (lambda: run(devices=None), "devices = None is no list; give a list with"),
    "None as a device": (lambda: run(devices=[DATA[0], None]), "device 1 .*: there are none"),
    "a number of devices": (lambda: run(devices=4), "devices = 4 is no list"),
    "a path": (lambda: run(devices="data"), "devices = 'data' is a path; read what is there"),
    "paths": (lambda: run(devices=[Path("a.csv")]), "device 0 .*: a.csv is a path; read it"),
    "devices by name": (
        lambda: run(devices={"anna": DATA[0], "bob": DATA[1]}),
        r"keys 'anna', 'bob', .* give list\(devices.values\(\)\)",
    ),
    "one pair for all": (lambda: run(devices=DATA[0]), "devices is one tuple, not one for each"),
    "one Dataset for all": (
        lambda: run(devices=TensorDataset(*DATA[0])),
        r"devices is one TensorDataset, .* or split it \(Federation.from_partition\)",
    ),
    "DataLoaders": (
        lambda: run(devices=[DataLoader(TensorDataset(*d)) for d in DATA]),
        "it is a DataLoader, and devices draw their batches themselves; give its .dataset",
    ),
    "a stream": (lambda: run(devices=[Stream()]), "device 0 .*: it has no length"),
    "a Dataset that fails": (lambda: run(devices=[Broken()]), "device 0 cannot be used: .*image"),
    "inputs without targets": (lambda: run(devices=X), "it is one array, without targets"),
    "train, validation, test": (
        lambda: run(devices=[(DATA[0], DATA[1], DATA[2])]),
        "device 0 .*: it is a tuple of 3; give",
    ),
    "samples of two shapes": (
        lambda: run(devices=[Ragged(), Ragged()]),
        r"samples cannot be stacked to a batch .*; bring them to one shape, or say how",
    ),
    "other names of inputs": (
        lambda: run(devices=[({"a": X[0]}, Y), ({"b": X[0]}, Y)]),
        r"device 1 has inputs b \(3,\), device 0 a \(3,\); all devices must hold samples of one",
    ),
    "a device without samples": (
        lambda: run(devices=[(X[0][:0], Y[:0]), *DATA[1:]]),
        "device 0 has no samples; leave it out",
    ),
    "a target too few": (
        lambda: run(devices=[(X[0], Y[:3])]),
        "4 inputs but 3 targets; each input needs one target",
    ),
    "another width": (
        lambda: run(devices=[*DATA, (torch.ones(4, 5), Y)]),
        r"device 4 has inputs of shape \(5,\), device 0 of \(3,\)",
    ),
    "another dtype": (
        lambda: run(devices=[*DATA, (X[0].double(), Y)]),
        "device 4 has inputs of torch.float64, device 0 of torch.float32; use one dtype",
    ),
    "ragged lists": (
        lambda: run(devices=[([[1.0], [1.0, 2.0]], [0, 1])]),
        r"inputs \(list\) cannot be made a tensor: expected sequence of length 1 .* of one shape",
    ),
    "inputs that are None": (lambda: run(devices=[(None, Y)]), r"its inputs \(NoneType\) cannot"),
    "texts as targets": (
        lambda: run(devices=[(x, ["cat", "dog", "cat", "dog"]) for x in X]),
        "its targets are no numbers .*; number what they mean",
    ),
    "a frame with texts": (
        lambda: run(devices=[(pd.DataFrame({"a": [1.0] * 4, "town": ["x"] * 4}), Y)]),
        "its inputs are no numbers in column 'town'; number what it means, or leave it out",
    ),
    "complex inputs": (lambda: inputs(lambda x: x + 0j), "its inputs are complex; give"),
    "sparse inputs": (lambda: inputs(torch.Tensor.to_sparse), r"are sparse; give .to_dense\(\)"),
    "inputs without values": (lambda: inputs(lambda x: x.to("meta")), "on the meta device"),
    "one number": (lambda: run(devices=[(torch.tensor(1.0), Y)]), "first axis must count samples"),
    "NaN": (lambda: inputs(lambda x: x / x * 0 + x.log()), "not finite in input 0; remove"),
    "samples of None": (lambda: fb.Samples(None, None), "its inputs .NoneType. cannot be made"),  # type: ignore[arg-type]
    "a test set without samples": (
        lambda: run(test=(X[0][:0], Y[:0])),
        "the test set is empty; give None, or samples",
    ),
    "a list of test sets": (
        lambda: run(test=DATA),
        r"the test set has inputs of shape \(4, 3\), .*own test sets .*=\[\(train, test\), \.\.\.",
    ),
    "a mapping of test sets": (lambda: run(test={0: DATA[0]}), "it is a mapping with keys 0"),
    "a DataLoader to test on": (
        lambda: run(test=DataLoader(TensorDataset(*DATA[0]))),
        "the test set cannot be used: it is a DataLoader",
    ),
    "a whole data set to test on": (
        lambda: run(test=fb.load_dataset("digits")),
        "the test set .*: it is a whole data set; give its .train, or its .test",
    ),
    "a rule for a partition": (
        lambda: pool(fb.IID()),
        r"partition = IID.* is no Partition; give its .split\(targets, devices\)",
    ),
    "lists for a partition": (
        lambda: pool([[0, 1], [2, 3]]),
        r"is no Partition; give Partition.of\(targets, it\)",
    ),
    "a partition of a larger pool": (
        lambda: pool(HALVES, samples=fb.Samples(X[0][:2], Y[:2])),
        "the partition names sample 3, but the pool has 2",
    ),
    "a whole data set as a pool": (
        lambda: pool(HALVES, samples=fb.load_dataset("digits")),
        "the pool cannot be used: it is a whole data set; give its .train",
    ),
}
TASKS: dict[str, tuple[Callable[[], Any], str]] = {
    "too few outputs": (
        lambda: run(model=lambda: line(1)),
        "labels are 0 to 1, and the loss fails on 1 .*; give the model 2 outputs",
    ),
    "too few outputs for a later device": (
        lambda: run(devices=[*DATA, (X[0], Y + 2)]),
        "labels are 0 to 3, .*; give the model 4 outputs",
    ),
    "too few outputs for the test set": (
        lambda: run(test=(X[0], Y + 1)),
        "labels of the test set are . to 2, and the loss fails on 2",
    ),
    "labels from 1": (lambda: targets(Y + 1), "number labels from 0: targets - 1"),
    "labels -1 and 1": (lambda: targets(2 * Y - 1), "number labels from 0, one for each output"),
    "labels as floats": (
        lambda: targets(Y.float()),
        r"targets of \(2,\) \(torch.float32\) .*; labels are whole numbers: targets.long\(\)",
    ),
    "labels as truth values": (lambda: targets(Y.bool()), r"targets.long\(\)"),
    "one-hot labels": (
        lambda: targets(nn.functional.one_hot(Y, 2)),
        r"labels are numbers: targets.argmax\(1\)",
    ),
    "labels in a column": (lambda: targets(Y[:, None]), r"use targets.squeeze\(1\)"),
    "a column against a row": (
        lambda: in_one_column(Y.float(), lambda o, y: ((o - y) ** 2).mean()),
        r"compares every output with every target\); use targets\[:, None\]",
    ),
    "a column against a row, by torch": (
        lambda: in_one_column(Y.float(), MSE),
        r"use targets\[:, None\], or end the model with nn.Flatten\(0\)",
    ),
    "binary cross-entropy of labels": (
        lambda: in_one_column(Y, nn.BCEWithLogitsLoss()),
        r"use targets.float\(\)\[:, None\]",
    ),
    "whole numbers as inputs": (
        lambda: inputs(lambda x: (x * 15).long()),
        r"torch.int64 is left as it is, for tokens; give inputs.float\(\)",
    ),
    "a module for another width": (
        lambda: run(model=lambda: nn.Linear(7, 2)),
        r"the model fails on inputs of shape \(2, 3\) \(RuntimeError: mat1 and mat2",
    ),
    "one sample for BatchNorm": (
        lambda: train(fb.FedBCD(batch=1), of(model=normed)),
        r"the model fails on inputs of shape \(1, 3\) \(ValueError: Expected more than 1 value",
    ),
    "no model": (lambda: run(model=None), "model = None is no function"),
    "a model by name": (lambda: run(model="mlp"), "model = 'mlp' is no function; give one, such"),
    "a class that needs arguments": (lambda: run(model=nn.Linear), r"model\(\) fails .TypeError"),
    "a model that returns a class": (
        lambda: run(model=lambda: nn.Linear),
        r"model\(\) returned the class Linear; make a value of it",
    ),
    "weights": (lambda: run(model=line().state_dict()), "model = OrderedDict.* is no function"),
    "a model that cannot be made": (
        lambda: run(model=lambda: nn.Linear(-1, 2)),
        r"model\(\) fails \(RuntimeError: ",
    ),
    "a lazy module": (lambda: run(model=lambda: nn.LazyLinear(2)), "lazy layers .*; call it once"),
    "a parallel module": (lambda: run(model=nn.DataParallel(line())), "give its .module"),
    "a module on meta": (lambda: run(model=line().to("meta")), "has no weights; make it on the"),
    "no parameters": (lambda: run(model=nn.Identity()), "Identity has no parameters to train"),
    "all frozen": (lambda: run(model=line().requires_grad_(False)), "let them require gradients"),
    "no outputs": (
        lambda: run(model=lambda: Returning(lambda _: None)),
        "returns a NoneType without logits; return a tensor",
    ),
    "outputs without a gradient": (
        lambda: run(model=lambda: Returning(torch.Tensor.detach)),
        r"the model's outputs have no gradient; leave .detach\(\)",
    ),
    "a class of losses": (lambda: run(loss=nn.CrossEntropyLoss), "value of it, CrossEntropyLoss"),
    "no loss": (lambda: run(loss=None), "loss = None is no function; give one, such as"),
    "a loss by name": (lambda: run(loss="mse"), "loss = 'mse' is no function"),
    "a loss per sample": (
        lambda: run(loss=nn.CrossEntropyLoss(reduction="none")),
        r'returns shape \(2,\); let it return the mean over the batch \(reduction="mean"\)',
    ),
    "a loss as a float": (
        lambda: run(loss=lambda o, y: CROSS_ENTROPY(o, y).item()),
        "the loss returns float; let it return a tensor",
    ),
    "two losses": (lambda: run(loss=lambda o, y: (o.mean(), o)), "the loss returns tuple"),
    "a loss that is detached": (
        lambda: run(loss=lambda o, y: CROSS_ENTROPY(o, y).detach()),
        "the loss has no gradient; leave .item",
    ),
    "a loss of NaN": (lambda: run(loss=lambda o, y: o.mean() * np.nan), "is not finite at x.0."),
    "loss(targets, outputs)": (
        lambda: run(loss=lambda y, o: CROSS_ENTROPY(o, y)),
        r"the loss fails on outputs of \(2, 2\) \(torch.float32\) and targets of \(2,\)",
    ),
    "a transform of one argument": (
        lambda: run(transform=lambda x: x / 255),
        "the transform fails .*; it takes inputs and a dtype, and returns inputs, such as lambda",
    ),
    "a transform by name": (lambda: run(transform="x/255"), "transform = 'x/255' is no function"),
    "a class of transforms": (lambda: run(transform=fb.Scale), r"value of it, Scale\(\.\.\.\)"),
    "a transform to NumPy": (
        lambda: run(transform=lambda x, _: x.numpy()),
        "the transform gives ndarray for 2 samples",
    ),
    "a transform of one sample": (
        lambda: run(transform=lambda x, _: x[0]),
        r"the transform gives shape \(3,\) for 2 samples",
    ),
    "a transform to float64": (
        lambda: run(transform=lambda x, _: x.double()),
        "the transform returns torch.float64; use the dtype that it is given",
    ),
    "a division by 0": (lambda: fb.Scale(0), "divides by 0; give a divisor and a deviation"),
    "a transform that divides by 0": (
        lambda: run(transform=lambda x, _: x / 0),
        "the transform makes values that are not finite",
    ),
    "a function to augment": (
        lambda: run(augment=lambda x: x),
        r"augment = .* has no apply\(inputs, h\); give a value of fb.FlipCrop",
    ),
    "flips of vectors": (lambda: run(augment=fb.FlipCrop()), r"FlipCrop\(padding=4\) fails on"),
    "a metric by a name of nobody": (
        lambda: run(metric="acuracy"),
        r"metric = 'acuracy' is unknown \(did you mean 'accuracy'\?\); known: 'accuracy', 'mse',",
    ),
    "accuracy of numbers": (
        lambda: targets(Y.float()[:, None], model=lambda: line(1), loss=MSE, metric=fb.accuracy),
        "accuracy compares labels, and targets are torch.float32; .* measured by mse or r2",
    ),
    "a share held out of those who bring tests": (
        lambda: run(devices=[(data, data) for data in DATA], holdout=0.2),
        r"test=0.2 keeps nothing back, .* leave one of the two out, .* Holdout\(validation=0.1\)",
    ),
    "cross-entropy of numbers": (
        lambda: targets(Y.float(), model=lambda: line(1)),
        r"cross-entropy is for labels, .* take the squared error: nn.MSELoss\(\)",
    ),
    "a class of metrics": (lambda: run(metric=nn.L1Loss), r"L1Loss is a class; give a value of it"),
    "several as a metric": (
        lambda: run(metric={"mine": fb.accuracy}),
        r"metric = \{'mine': .* is several; give metrics=\[\.\.\.\]",
    ),
    "one as metrics": (lambda: run(metrics=fb.accuracy), "must be a list of fb.Measures and"),
    "a metric without a number": (
        lambda: run(metric=lambda o, y: None),
        "the metric fails on outputs of shape",
    ),
    "a metric of one argument": (
        lambda: run(metric=lambda o: o.mean(1)),
        "the metric fails on outputs of shape .* takes 1 positional argument but 2 were given",
    ),
}
SERVERS: dict[str, tuple[Callable[[], Any], str]] = {
    "2.0": (lambda: of(servers=2.0), "servers = 2.0 must be a whole number or a list; give how"),
    "'2'": (lambda: of(servers="2"), "servers = '2' must be a whole number or a list"),
    "None": (lambda: of(servers=None), "servers = None must be a whole number or a list"),
    "none at all": (lambda: of(servers=0), "servers=0 must be between 1 and the 4 devices"),
    "more than devices": (lambda: of(servers=9), "servers=9 must be between 1 and the 4 devices"),
    "a server per device": (
        lambda: of(servers=[0, 0, 1, 1]),
        r"servers\[0\] = 0 must be a list; give how many, lists of devices, or \{device: server\}",
    ),
    "a device twice": (lambda: of(servers=[[0, 1], [1, 2, 3]]), "device 1 appears 2 times"),
    "a device of nobody": (lambda: of(servers=[[0, 1], [2]]), "device 3 appears 0 times"),
    "a device that is none": (lambda: of(servers=[[0, 1], [2, -1]]), "there is no device -1"),
    "a server without devices": (lambda: of(servers=[[0, 1, 2, 3], []]), "server 1 is empty"),
    "servers by name": (
        lambda: of(servers={0: "a", 1: "a", 2: "b", 3: "b"}),
        r"servers\[0\] = 'a' must be a whole number",
    ),
}
COMPARISONS: dict[str, tuple[Callable[[], Any], str]] = {
    "one method": (
        lambda: fb.compare(of(), fb.FedBCD()),
        r"must be \{title: method, \.\.\.\}, or a",
    ),  # type: ignore[arg-type]
    "no methods": (lambda: fb.compare(of(), []), r"methods=\[\] must be \{title: method"),
    "a class": (lambda: fb.compare(of(), [fb.FedBCD]), "FedBCD is a class; give a value of it"),  # type: ignore[list-item]
    "no seeds": (lambda: fb.compare(of(), ["local"], seeds=0), "seeds=0 must be 1 or more"),  # type: ignore[list-item]
    "seeds=None": (lambda: fb.compare(of(), [fb.Local()], seeds=None), "seeds = None must be a"),  # type: ignore[arg-type]
    "seed=": (lambda: fb.compare(of(), [fb.Local()], seed=1), r"seeds=\[\.\.\.\] says which"),
    "lr=": (
        lambda: fb.compare(of(), [fb.Local()], lr=0.1),
        r"\(it is fb.FedBCD\(device_step=...\)\)",
    ),
    "no end": (lambda: fb.compare(of(), [fb.Local()]), "give either rounds=... or until_clock=..."),
    "data": (lambda: fb.compare(DATA, [fb.Local()], rounds=1), "is no fb.Federation; make one"),  # type: ignore[arg-type]
    "methods first": (lambda: fb.compare([fb.Local()], of(), rounds=1), "is no fb.Federation"),  # type: ignore[arg-type]
    "a baseline that is none": (
        lambda: fb.compare(of(), [fb.Local()], rounds=1, against=["x"]),
        "against: no method is called 'x'",
    ),
    "no workers": (
        lambda: fb.compare(of(), [fb.Local()], rounds=1, active=1, workers=0),
        "workers=0 must be 1 or more",
    ),
    "an option that none is": (
        lambda: fb.compare(of(), {"a": (fb.Local(), {"claud": "async"})}, rounds=1),
        r"claud=... cannot be given to compare: .* \(did you mean 'cloud'\?\)",
    ),
}
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "clients=": (
        lambda: fb.Federation(line, CROSS_ENTROPY, clients=DATA, servers=2),  # type: ignore[call-arg]
        r"Federation takes no 'clients' \(did you mean 'devices'\?\)",
    ),
    "tests=": (lambda: of(tests=DATA), r"takes no 'tests' \(did you mean 'test'\?\)"),
    "no servers": (
        lambda: fb.Federation(line, CROSS_ENTROPY, DATA),  # type: ignore[call-arg]
        "Federation: missing a required argument: 'servers'; it takes model, loss, devices",
    ),
    "lr= of train": (lambda: train(lr=0.1), r"no 'lr' \(it is fb.FedBCD\(device_step=\.\.\.\)\)"),
    "epochs= of train": (lambda: train(epochs=3), r"\(it is fb.FedBCD\(epochs=\.\.\.\)\)"),
    "num_rounds=": (lambda: train(num_rounds=3), r"'num_rounds' \(did you mean 'rounds'\?\)"),
    "join_ratio=": (lambda: train(join_ratio=0.5), r"\(did you mean 'active'\?\)"),
    "lr=": (lambda: fb.FedBCD(lr=0.1), r"FedBCD takes no 'lr' \(did you mean 'device_step'\?\)"),  # type: ignore[call-arg]
    "gamma=": (lambda: fb.FedBCD(gamma=1.0), r"no 'gamma' \(did you mean 'penalty'\?\)"),  # type: ignore[call-arg]
    "mu=": (lambda: fb.FedProx(mu=1.0), r"no 'mu' \(did you mean 'penalty'\?\)"),  # type: ignore[call-arg]
    "local_epochs=": (lambda: fb.FedAvg(local_epochs=1), r"\(did you mean 'epochs'\?\)"),  # type: ignore[call-arg]
    "B=": (lambda: fb.AsyncCloud(B=2), r"AsyncCloud takes no 'B' \(did you mean 'first'\?\)"),  # type: ignore[call-arg]
    "settings without names": (lambda: fb.FedBCD(1.0), "takes settings by their names, not 1.0"),  # type: ignore[misc]
    "no algorithm": (
        lambda: fb.train(of(), rounds=1),  # type: ignore[call-arg]
        "train: missing a required argument: 'algorithm'",
    ),
    "no federation": (lambda: fb.train(None, fb.FedBCD(), rounds=1), "= None is no fb.Federation"),  # type: ignore[arg-type]
    "data for a federation": (
        lambda: fb.train(DATA, fb.FedBCD(), rounds=1),  # type: ignore[arg-type]
        "is no fb.Federation; make one of your model, loss and data",
    ),
    "the federation second": (
        lambda: fb.train(fb.FedBCD(), of(), rounds=1),  # type: ignore[arg-type]
        "federation = FedBCD.* is no fb.Federation; .* give it first",
    ),
    "the name of a class": (lambda: train("FedBCD"), r"\(did you mean 'fedbcd'\?\)"),
    "another's method": (lambda: train("scaffold"), "'scaffold' is unknown; known: fedbcd, "),
    "a class of methods": (lambda: train(fb.FedAvg), r"FedAvg is a class; give a value of it"),
    "the class of a cloud by name": (
        lambda: train(cloud="AsyncCloud"),
        r"cloud.name = 'AsyncCloud' is unknown \(did you mean 'async'\?\)",
    ),
    "more servers than there are": (
        lambda: train(cloud=fb.AsyncCloud(first=5)),
        "first=5 must be between 1 and the 2 servers; to wait for all, use SyncCloud",
    ),
    "rows that are no means": (
        lambda: train(cloud=fb.GraphCloud(np.ones((2, 2)))),
        "row 0 of the mixing matrix sums to 2, not 1",
    ),
    "thirds in float32": (
        lambda: train(cloud=fb.GraphCloud(np.array([[1 / 3, 2 / 3], [2 / 3, 1 / 3]], np.float32))),
        "sums to 1.0000000298, not 1; .* use float64",
    ),
    "patience=": (lambda: train(patience=3), r"takes no 'patience' \(did you mean 'stop'\?\)"),
    "stop=5": (lambda: train(stop=5), r"\[stop\] must be a table, not 5; in Python, a Plateau"),
    "best of no column": (lambda: train(best="accuracy"), "best='accuracy' is no column that can"),
    "no end": (lambda: fb.train(of(), fb.FedBCD()), "give either rounds=... or until_clock="),
    "two ends": (lambda: train(until_clock=3.0), "give either rounds=... or until_clock="),
    "no rounds": (lambda: train(rounds=0), "rounds=0 must be 1 or more"),
    "rounds of -1": (lambda: train(rounds=-1), "rounds=-1 must be 1 or more"),
    "rounds of 2.0": (lambda: train(rounds=2.0), "rounds = 2.0 must be a whole number"),
    "more active than there are": (lambda: train(active=3), "active=3 must be between 1 and 2"),
    "active of a server that is not there": (
        lambda: train(active=[1, 2, 1]),
        r"active=\(1, 2, 1\) has 3 numbers for 2 servers; give one for each, or one for all",
    ),
    "more active than a server has": (
        lambda: train(active=[1, 3]),
        r"active\[1\]=3 must be between 1 and 2, the members of server 1",
    ),
    "a share of active devices": (lambda: train(active=0.5), "active = 0.5 must be a whole number"),
    "no torch device": (lambda: train(torch_device="gpu"), "'gpu' cannot be used here .*; use"),
    "no dtype": (lambda: train(dtype="float12"), "dtype = 'float12' must be one of 'float32'"),
    "no steps": (lambda: fb.FedBCD(steps=0), "with 1 <= low <= high"),
    "momentum of 2": (lambda: fb.FedBCD(momentum=2), "momentum=2 must be at least 0 and below 1"),
    "a penalty too few": (lambda: train(fb.FedBCD(penalty=[1, 2])), "2 values for 4 devices"),
    "a clock by name": (lambda: train(clock="exponential"), "in Python, a Clock"),
    "availability of 0.5": (lambda: train(availability=0.5), "give a value of fb.Chance"),
    "on_round without arguments": (
        lambda: train(on_round=lambda: None),
        "on_round cannot be called as it will be .*; let it be like lambda progress: ...",
    ),
    "a class of trackers": (lambda: train(on_round=fb.trackers.TensorBoard), "TensorBoard is a cl"),
    "True for should_stop": (lambda: train(should_stop=True), "should_stop = True is no function"),
    "a number for out": (lambda: train(out=3), "out = 3 must be a text or a Path"),
    "a text for record": (lambda: train(record="mine"), "record = 'mine' must be a list"),
    "nothing to resume": (lambda: train(resume=True), "give it, out=..."),
    "no start": (lambda: train(start="nowhere"), "holds no models of a run; give the folder"),
    "a data set that is near": (
        lambda: fb.load_dataset("MNST"),
        r"unknown data set 'MNST' \(did you mean 'mnist'\?\)",
    ),
    "a data set by number": (lambda: fb.load_dataset(3), "name = 3 must be a text"),  # type: ignore[arg-type]
    "a data set that is elsewhere": (
        lambda: fb.load_dataset("mnist", "nowhere"),
        "mnist was not found: looked for .*; get it with",
    ),
    "a job that is no file": (lambda: fb.load_job({}), "path = {} must be a text or a Path"),  # type: ignore[arg-type]
    "device 99": (lambda: plain().personal_model(99), "no device 99; there are devices 0 to 3"),
    "device -1": (lambda: plain().personal_model(-1), "there is no device -1"),
    "device '1'": (lambda: plain().personal_model("1"), "device = '1' must be a whole number"),  # type: ignore[arg-type]
    "server 7": (lambda: plain().server_model(7), "no server 7; there are servers 0 to 1"),
    "a replay of a run": (lambda: fb.replay(plain(), of()), "log = Run.* must be a text or a Path"),  # type: ignore[arg-type]
    "a replay of nothing": (lambda: fb.replay("nowhere", of()), "there is no event log at nowhere"),
    "a run that was not saved": (lambda: fb.Run.load("nowhere", of()), "nowhere holds no models"),
    "a collate function for all": (
        lambda: of(collate_fn=lambda samples: samples),
        r"takes no 'collate_fn' \(it is fb.LazySamples\(data, collate=\.\.\.\), for each device\)",
    ),
    "a column that is not there": (
        lambda: plain().history["accuracy"],
        r"no column 'accuracy' \(did you mean 'global_accuracy'\?\); there are round, clock",
    ),
    "a picture in no folder": (
        lambda: plain().plot("nowhere/run.png"),
        "cannot write nowhere/run.png: No such file or directory; name a file in a folder",
    ),
    "a model by number": (
        lambda: export_run("nowhere", 3),  # type: ignore[arg-type]
        r"choice = 3 is no Choice; give Choice\(device=17\)",
    ),
    "an export of nothing": (
        lambda: export_run("nowhere"),
        "missing a required argument: 'choice'",
    ),  # type: ignore[call-arg]
    "a run without its federation": (
        lambda: fb.Run.load("nowhere"),  # type: ignore[call-arg]
        "Run.load: missing a required argument: 'federation'",
    ),
}
MISTAKES = {
    f"{kind}: {name}": case
    for kind, cases in (
        ("data", DATA_OF_DEVICES),
        ("task", TASKS),
        ("servers", SERVERS),
        ("compare", COMPARISONS),
        ("call", CALLS),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(mistake: str) -> None:
    make, sentence = MISTAKES[mistake]
    with pytest.raises(FedBCDError, match=f"(?s){sentence}") as caught:
        make()
    assert "\n" not in str(caught.value).strip()


REASONABLE: dict[str, Callable[[], Any]] = {
    "devices by number": lambda: run(devices=dict(enumerate(DATA))),
    "a generator of devices": lambda: run(devices=(data for data in DATA)),
    "arrays": lambda: run(devices=[(x.numpy(), Y.numpy()) for x in X]),
    "arrays backwards": lambda: run(devices=[(x.numpy()[::-1].copy()[::-1], Y.numpy()) for x in X]),
    "lists": lambda: run(devices=[(x.tolist(), Y.tolist()) for x in X]),
    "lists of tensors": lambda: run(devices=[([*x], [*Y]) for x in X]),
    "lists of arrays": lambda: run(devices=[([*x.numpy()], [*Y.numpy()]) for x in X]),
    "lists of samples": lambda: run(devices=[[*zip(x, Y.tolist(), strict=True)] for x in X]),
    "pairs as lists": lambda: run(devices=[[x, Y] for x in X]),
    "frames": lambda: run(
        devices=[
            (pd.DataFrame(x.numpy(), index=[9, 8, 7, 6]), pd.Series(Y.numpy(), index=[4, 3, 2, 1]))
            for x in X
        ]
    ),
    "Datasets": lambda: run(devices=[TensorDataset(*data) for data in DATA]),
    "samples of arrays": lambda: run(devices=[fb.Samples(x.numpy(), Y.numpy()) for x in X]),  # type: ignore[arg-type]
    "int32 labels": lambda: run(devices=[(x, Y.int()) for x in X]),
    "int16 labels of arrays": lambda: run(devices=[(x, Y.numpy().astype("int16")) for x in X]),
    "inputs with gradients": lambda: run(devices=[(x.clone().requires_grad_(), Y) for x in X]),
    "a test set of arrays": lambda: run(test=(X[0].numpy(), Y.numpy())),
    "a metric by name": lambda: run(metric="accuracy"),
    "metrics by name": lambda: run(metrics=["accuracy"]),
    "no transform": lambda: run(transform=None),
    "servers as ranges": lambda: run(servers=[range(2), range(2, 4)]),
    "servers as sets": lambda: run(servers=[{0, 1}, {2, 3}]),
    "servers as an array": lambda: run(servers=np.array([[0, 1], [2, 3]])),
    "a NumPy number of servers": lambda: run(servers=np.int64(2)),
    "device to server": lambda: run(servers={0: 0, 1: 0, 2: 1, 3: 1}),
    "server to devices": lambda: run(servers={0: [0, 1], 1: [2, 3]}),
    "a loss of torch": lambda: run(loss=nn.CrossEntropyLoss()),
    "cloud='sync'": lambda: train(cloud="sync"),
    "a method by name": lambda: train("fedbcd") and train(),
    "seed=None": lambda: train(seed=None),
    "a NumPy seed": lambda: train(seed=np.int64(0)),
    "dtype='float32'": lambda: train(dtype="float32"),
    "dtype='torch.float32'": lambda: train(dtype="torch.float32"),
    "dtype of NumPy": lambda: train(dtype=np.float32),
    "torch.device": lambda: train(torch_device=torch.device("cpu")),
    "steps=[2, 2]": lambda: train(fb.FedBCD(batch=2, steps=[2, 2])),
}


@pytest.mark.parametrize("case", REASONABLE)
def test_what_was_reasonable_is_the_same_run(case: str) -> None:
    assert REASONABLE[case]().digest == plain().digest


def test_other_reasonable_things_work() -> None:
    """Each by itself, as numbers differ."""
    for change in (
        {"model": line()},
        {"model": line().eval()},
        {"model": line().double()},
        {"model": lambda: nn.Sequential(nn.Linear(3, 3).requires_grad_(False), line())},
        {"model": lambda: nn.Sequential(line(), nn.Dropout(0.5))},
        {"model": lambda: nn.Sequential(line(), nn.ReLU(inplace=True))},
        {"model": normed},
    ):
        run(**change)
    inputs(torch.Tensor.double)
    mixed = run(devices=[(pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": Y > 0}), Y) for x in X])
    assert mixed.federation.pool.take(torch.tensor([1]))[0][0, 2] == 1.0
    assert str(mixed).startswith("fedbcd on the sync cloud, seed 0\nround")
    inputs(lambda x: (x * 15).byte())
    inputs(lambda x: x > 0.5)
    named = run(devices=[{"train": DATA[i], "test": DATA[i - 1]} for i in range(4)])
    pairs = run(devices=[(DATA[i], DATA[i - 1]) for i in range(4)])
    assert (named.digest, named.personal_scores) == (pairs.digest, pairs.personal_scores)
    assert isinstance(plain().personal_model(np.int64(1)), nn.Module)  # type: ignore[arg-type]
    train(federation=pool(HALVES, samples=(X[0], Y), test=DATA[1]))
    fb.personalise(plain(), TensorDataset(*DATA[0]))
    train(dtype="float64", cloud="async")
    run(metric=lambda o, y: (o.argmax(1) == y).float().mean())  # one number for all
    run(metric=lambda o, y: (o.argmax(1) == y).numpy())
    run(metric=lambda o, y: {"right": o.argmax(1) == y})
    assert plain().history["clock"] == plain().history.column("clock")


def test_a_parameter_that_two_layers_share_is_one() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), line()
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.second(self.first(x)))

    model = run(model=Shared).personal_model(0)
    assert torch.equal(model.first.weight, model.second.weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("given", "doubt"),
    [
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "the loss is a sum: .* use the mean"),
        ({"loss": nn.functional.nll_loss}, "nll_loss is for log-probabilities; use cross_entropy"),
        (
            {"model": lambda: nn.Sequential(line(), nn.Softmax(1))},
            "the model gives probabilities to a loss .*; leave the softmax out",
        ),
        (
            {
                "model": lambda: nn.Sequential(line(), nn.LogSoftmax(1)),
                "loss": nn.functional.nll_loss,
            },
            "",
        ),
        ({}, ""),
    ],
)
def test_what_works_and_is_seldom_meant_is_doubted(given: dict[str, Any], doubt: str) -> None:
    said: list[str] = []
    train(federation=of(**given), on_notice=said.append)
    assert len(said) == bool(doubt)
    assert all(re.search(doubt, one) for one in said)


def test_folders(tmp_path: Path) -> None:
    """What is written where, and what is there already."""
    file, out = tmp_path / "file", tmp_path / "out"
    file.write_text("mine")
    train(out=str(out))
    other: list[tuple[Callable[[], Any], str]] = [
        (lambda: train(out=file), r"cannot write to .*file: .* \(--out, in Python out=\.\.\.\)"),
        (lambda: train(out=file / "below"), "cannot write to .*: Not a directory"),
        (lambda: plain().save(file), "cannot write to .*file"),
        (lambda: train(out=out), r"holds a run already \(to go on .* in Python resume=True\)"),
        (lambda: train(out=out, seed=5), "holds a run already .it is another run"),
        (
            lambda: train(out=out, seed=5, resume=True),
            "holds another run .seed: 0 there, 5 here.*; give the same settings",
        ),
        (lambda: train(out=tmp_path), "is not empty; choose another folder"),
        (lambda: fb.Run.load(out, of(devices=DATA[:2])), "this federation has"),
        (lambda: fb.Run.load(out, {}), "federation = {} is no fb.Federation"),  # type: ignore[arg-type]
    ]
    for make, sentence in other:
        with pytest.raises(FedBCDError, match=sentence):
            make()
    assert file.read_text() == "mine"
    assert fb.Run.load(str(out), of()).digest == plain().digest
    assert fb.replay(out, of())["digest"] == plain().digest


def test_a_run_that_is_read_again_knows_how_it_was_trained(tmp_path: Path) -> None:
    plain().save(tmp_path / "saved")
    run = fb.Run.load(tmp_path / "saved", of())
    assert run.spec is not None
    assert run.spec.identity(of()) == plain().spec.identity(of())  # type: ignore[union-attr]
    one = fb.personalise(run, DATA[0], steps=2)
    assert torch.equal(one.x, fb.personalise(plain(), DATA[0], steps=2).x)
    with pytest.raises(FedBCDError, match="does not name its data and model; give the federation"):
        fb.personalise(tmp_path / "saved", DATA[0])
    assert fb.Run.load(tmp_path / "saved", of(devices=DATA[::-1])).spec is None  # other data


def test_data_that_are_fine_are_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write a tensor out takes a millisecond, ten seconds for ten thousand devices."""
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda _: pytest.fail("a tensor is written out"))
    data = [(torch.zeros(3, 2), torch.zeros(3, 1)) for _ in range(2)]
    assert fb.Federation(lambda: nn.Linear(2, 1), nn.functional.mse_loss, data, 1).devices == 2
