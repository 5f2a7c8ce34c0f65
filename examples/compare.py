"""Five methods, two seeds, a figure with bands: is it worth learning together?

python examples/compare.py [FIGURE.png]
"""

import sys

import torch
from torch import nn

import fedbcd as fb

digits = fb.load_dataset("digits")
inputs, targets = digits.transform(digits.train.inputs, torch.float32), digits.train.targets
test = digits.transform(digits.test.inputs, torch.float32), digits.test.targets


def federation(seed: int) -> fb.Federation:
    """Twelve devices under four servers; another split for each seed."""
    split = fb.Dirichlet(alpha=0.3).split(targets, devices=12, seed=seed)
    devices = [(inputs[own], targets[own]) for own in split.samples]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return fb.Federation(model, nn.CrossEntropyLoss(), devices, servers=4, test=test)


found = fb.compare(
    federation,
    {
        "alone": fb.Local(device_step=0.1),
        "FedAvg": fb.FedAvg(device_step=0.2),
        "fine-tuned": fb.FineTuned(device_step=0.2),
        "FedBCD": fb.FedBCD(device_step=0.1, penalty=0.3),
        "FedBCD-I": (fb.FedBCDI(device_step=0.1), {"cloud": "async"}),
    },
    seeds=2,
    until_clock=100,
    looks=5,
    certify_every=0,
)
print(found)
for one in found.against("alone"):
    print(one.sentence)
if sys.argv[1:]:
    found.plot(sys.argv[1])
