"""What models say of the samples that they are tested on: kind by kind (of a label, of a device),
prepared once, by compiled code where there is some.

Shapes: M models, F values of a model.
"""

import copy
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedbcd.algorithm.fused.library import ChainTester
from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.trees import Tree, called, module_loss, scores_of, with_labels
from fedbcd.compute.blocks import PreparedBlocks
from fedbcd.compute.fused import tester_for
from fedbcd.data.federation import FOR_ALL, Federation, Key, joined_pool
from fedbcd.data.measure import COMMON
from fedbcd.data.samples import Pool, Samples

INPUT_VALUES_AT_ONCE = 2**27  # elements of the inputs of all models in one call on a GPU
TRAINING_SAMPLES = 2_000  # of all devices together, for the training loss: far fewer than tests
LEAST_OF_A_DEVICE = 8  # of these


class Outputs:
    """Outputs of models on samples, with the targets of these."""

    keep = 2**28  # bytes; prepared samples up to this size are kept

    def __init__(
        self, federation: Federation, objective: Objective, where: torch.device, together: bool
    ) -> None:
        self._federation = federation
        self._objective = objective
        self._layout = objective.layout
        self._template = copy.deepcopy(objective.to_test)
        self._own = threading.local()
        self._together = together
        self.chunk = 1_000 if where.type == "cpu" else 10_000  # samples in one forward pass
        self._where = where
        self._ready: Tensor | None = None  # the inputs as the model wants them, or ...
        self.tester: ChainTester | None = (
            None  # ... as compiled code wants them, where there is some for the model
        )
        self._blocks = torch.empty(0)
        self._blocks_of: dict[Key, Tensor] = {}  # numbers of the blocks of each kind
        self._asked_for: torch.dtype | None = None
        pool, self.spans = evaluation_samples(federation)
        self._pool = pool.to(where)
        self.blocks: PreparedBlocks | None = None  # of samples that are not tensors
        if isinstance(self._pool, Samples):
            self._inputs, self._targets = self._pool.inputs, self._pool.targets
        else:
            self.blocks = PreparedBlocks(self._pool, federation.transform, self.chunk, self.keep)

    @property
    def known_targets(self) -> Tensor | None:
        """Of all samples, where they are known without reading these."""
        return self._pool.known_targets

    def first(self, samples: int) -> tuple[Tree, Tensor]:
        """The first samples."""
        return self._pool.take(torch.arange(min(samples, len(self._pool)), device=self._where))

    def of_raw(self, flat: Tensor, inputs: Tree) -> Tensor:
        """Of one model on samples as the data have them."""
        return self.of_batch(flat, self._federation.transform(inputs, flat.dtype))

    def of_batch(self, flat: Tensor, inputs: Tree) -> Tensor:
        """Of one model on samples that are ready for it."""
        return scores_of(called(self._module(), self._state(flat), inputs))

    def _state(self, flat: Tensor) -> tuple[Any, Any, Any]:
        p = self._layout.size_P
        return (
            self._layout.parameters_of(flat[:p]),
            self._layout.buffers_of(flat[p:]),
            self._layout.counters,
        )

    def with_loss(self, flat: Tensor, inputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the loss that the module computes itself."""
        returned = called(self._module(), self._state(flat), with_labels(inputs, targets))
        return scores_of(returned), module_loss(returned, targets)

    def sizes(self, keys: Sequence[Key]) -> list[int]:
        """How many samples there are of each kind."""
        return [stop - start for start, stop in (self.spans[key] for key in keys)]

    def of(self, flat: Tensor, keys: list[Key]) -> tuple[Tensor, Tensor]:
        """Of one model on all samples of these kinds, with their targets."""
        targets = torch.cat([self._targets[slice(*self.spans[key])] for key in keys])
        if self.tester is not None:
            return self._fused_outputs(self.tester, flat, keys), targets
        return self._outputs(flat, keys), targets

    def together(self, models_MF: Tensor, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        """Of many models: all on the samples of one kind, or each on those of its own, as many."""
        same = len(keys) == 1
        spans = [self.spans[key] for key in keys]
        parts = [self._prepared(start, stop, models_MF.dtype) for start, stop in spans]
        inputs = parts[0] if same else torch.stack(parts)
        targets = torch.stack([self._targets[start:stop] for start, stop in spans])
        size = INPUT_VALUES_AT_ONCE // (len(models_MF) * max(1, parts[0][0].numel()))
        chunks = torch.split(inputs, max(1, size), dim=0 if same else 1)
        call = vmap(self.of_batch, in_dims=(0, None if same else 0))
        outputs = torch.cat([call(models_MF, chunk) for chunk in chunks], dim=1)
        targets = targets.expand(len(models_MF), *targets.shape[1:])
        return outputs.flatten(0, 1), targets.flatten(0, 1)

    def _outputs(self, flat: Tensor, keys: list[Key]) -> Tensor:
        stretches = (
            self._prepared(start, stop, flat.dtype) for start, stop in self._stretches(keys)
        )
        parts = (part for stretch in stretches for part in torch.split(stretch, self.chunk))
        return torch.cat([self.of_batch(flat, part) for part in parts])

    def _fused_outputs(self, tester: ChainTester, flat: Tensor, keys: list[Key]) -> Tensor:
        """The same by compiled code; blocks of samples begin anew with each kind, and are filled
        up.
        """
        chosen = [self._blocks_of[key] for key in keys]
        found = torch.split(
            tester.outputs(flat, self._blocks, torch.cat(chosen)),
            [len(blocks) for blocks in chosen],
        )
        return torch.cat(
            [
                blocks.flatten(0, 1)[:size]
                for blocks, size in zip(found, self.sizes(keys), strict=True)
            ]
        )

    def _stretches(self, keys: list[Key]) -> list[tuple[int, int]]:
        """The samples of these kinds as few stretches, in the order of the kinds."""
        stretches: list[tuple[int, int]] = []
        for start, stop in (self.spans[key] for key in keys):
            if stretches and stretches[-1][1] == start:
                start = stretches.pop()[0]
            stretches.append((start, stop))
        return stretches

    def _module(self) -> nn.Module:
        """A copy per thread: `functional_call` writes into it for a moment."""
        if not hasattr(self._own, "module"):
            self._own.module = copy.deepcopy(self._template)
        module: nn.Module = self._own.module
        return module

    def prepare(self, dtype: torch.dtype) -> None:
        """Have the test set ready, if it is not too large, before several workers want it."""
        if dtype == self._asked_for:
            return
        self._asked_for, self.tester = dtype, None
        if self.blocks is not None or self._inputs.numel() * dtype.itemsize > self.keep:
            return
        ready = self._federation.transform(self._inputs, dtype)
        if not self._together:
            self.tester = tester_for(
                self._objective, self._where, dtype, (ready[:2], self._targets[:2])
            )
        if self.tester is None:
            self._ready = ready
            return
        parts = [self.tester.blocks_of(ready[start:stop]) for start, stop in self.spans.values()]
        numbers = torch.split(torch.arange(sum(map(len, parts))), [len(part) for part in parts])
        self._blocks, self._blocks_of = (
            torch.cat(parts),
            dict(zip(self.spans, numbers, strict=True)),
        )

    def _prepared(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if self._ready is not None and self._ready.dtype in (dtype, self._inputs.dtype):
            return self._ready[start:stop]
        inputs: Tensor = self._federation.transform(self._inputs[start:stop], dtype)
        return inputs


def evaluation_samples(federation: Federation) -> tuple[Pool, dict[Key, tuple[int, int]]]:
    """All samples that models are tested on, kind by kind, and where each kind is: test samples for
    all, by label where there are labels; those of each device, those to validate on, and a few of
    those that it trains on.
    """
    places: dict[Key, Tensor] = {}
    test = federation.test
    if test is not None and federation.common_test is not None:
        places |= _common_places(federation, test)
    spans = [("test", federation.own_tests or {}), ("validation", federation.validation)]
    for kind, of_devices in spans:
        places |= {(kind, i): torch.arange(*span) for i, span in of_devices.items() if i != FOR_ALL}
    trained = _training_places(federation)
    parts = [] if test is None else [test.only(torch.cat([*places.values()]))]
    seen = _like(test, federation.pool, torch.cat([*trained.values()]))
    if seen is not None:
        parts.append(seen)
        places |= trained
    ends = np.cumsum([0, *map(len, places.values())]).tolist()
    return joined_pool(parts), dict(zip(places, pairwise(ends), strict=True))


def _like(test: Pool | None, pool: Pool, places: Tensor) -> Pool | None:
    """Some samples that devices train on, beside test samples; None where these are of another
    kind, or of another shape.
    """
    if not isinstance(test, Samples):
        return pool.only(places)
    inputs, targets = pool.take(places)
    if not isinstance(inputs, Tensor):
        return None
    alike = _alike(test.inputs, inputs) and _alike(test.targets, targets)
    return Samples(inputs, targets) if alike else None


def _common_places(federation: Federation, test: Pool) -> dict[Key, Tensor]:
    start, stop = federation.common_test or (0, 0)
    if federation.labels is None:
        return {COMMON: torch.arange(start, stop)}
    targets = test.all_targets[start:stop]
    order = targets.argsort(stable=True)
    labels, counts = torch.unique_consecutive(targets[order], return_counts=True)
    parts = torch.split(order + start, counts.tolist())
    return {("label", label): part for label, part in zip(labels.tolist(), parts, strict=True)}


def _training_places(federation: Federation) -> dict[Key, Tensor]:
    """Samples that some devices train on, of each as many, evenly spaced, all where they are few;
    enough for a look at the training loss.
    """
    count = min(federation.devices, TRAINING_SAMPLES // LEAST_OF_A_DEVICE)
    most = TRAINING_SAMPLES // count
    places: dict[Key, Tensor] = {}
    for device in _evenly(federation.devices, count):
        owned = federation.owned(device)
        places["train", device] = owned[_evenly(len(owned), min(most, len(owned)))]
    return places


def _evenly(number: int, chosen: int) -> list[int]:
    return [k * number // chosen for k in range(chosen)]


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape[1:]) == (b.dtype, b.shape[1:])
