"""How good the models are: global models on the whole test set, personal models on the labels of
their devices (`data.measure`).

Shapes: M models, V servers, P parameters, F values of a model.
"""

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.trees import Tree, shapes
from fedbcd.compute.fit import check_labels, labels_fit
from fedbcd.compute.outputs import Outputs
from fedbcd.compute.workers import OneWorker, Workers
from fedbcd.data.federation import Federation, Key
from fedbcd.data.measure import COMMON, DEFAULT, Measure as Weighting, sample_weights
from fedbcd.data.measures import OWN_LOSS, Better, Measure
from fedbcd.errors import DataError
from fedbcd.own import calling

Weights = Mapping[Key, float]  # of one sample of each kind
Sums = npt.NDArray[np.float64]  # the statistics of all measures, side by side
Value = float | None  # None: it is not defined on these samples
Values = tuple[Value, ...]  # of all measures


REMEMBERED = 20_000  # models; what their tests came to is kept, about a kilobyte of each


@dataclass(frozen=True)
class Tested:
    """The values of one personal model."""

    test: Values = ()  # on its device's own test samples, or its labels
    validation: Values = ()
    train: Values = ()  # of some of the samples that it is trained on
    train_loss: float = math.nan


@dataclass(frozen=True)
class Scores:
    """Of servers and devices; without those for whom there is nothing to test on."""

    measures: dict[str, Better] = field(default_factory=dict)  # of each value, which is better
    of_servers: tuple[Values, ...] = ()
    of_devices: dict[int, Tested] = field(default_factory=dict)
    of_homes: dict[int, Values] = field(default_factory=dict)  # its server's model, as its own

    @property
    def servers(self) -> tuple[float, ...]:
        """By the first measure."""
        return tuple(values[0] for values in self.of_servers if values[0] is not None)

    @property
    def devices(self) -> dict[int, float]:
        """Of personal models, by the first measure."""
        return _first({device: found.test for device, found in self.of_devices.items()})

    @property
    def homes(self) -> dict[int, float]:
        """Of their servers' models on the same samples, by the first measure."""
        return _first(self.of_homes)


def _first(found: Mapping[int, Values]) -> dict[int, float]:
    return {i: values[0] for i, values in found.items() if values and values[0] is not None}


class Evaluator:
    """Tests models kind by kind of samples (of a label, of a device), so that no model sees a
    sample twice, and prepares the samples once.
    """

    def __init__(
        self,
        federation: Federation,
        objective: Objective,
        where: torch.device,
        together: bool = False,
        measure: Weighting = DEFAULT,
    ) -> None:
        """`together` tests all models that want a label in one vectorised call, if there are many;
        for a GPU.
        """
        self._together = together
        self._measure = measure
        self._measures: tuple[Measure, ...] = ()  # as soon as there is a model to ask
        self._widths: list[int] = []  # how many statistics each has
        self._weights: dict[int, Weights] = {}  # of the devices that were asked for
        self._known: dict[tuple[Any, ...], dict[Key, Sums]] = {}  # by model and kinds, of last time
        self._federation = federation
        self._objective = objective
        self.outputs = Outputs(federation, objective, where, together)
        self._spans = self.outputs.spans

    def check(self, flat: Tensor) -> None:
        """Refuse test samples or a metric that do not fit, by the first samples."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            what = "the model or the transform fail on test inputs of shape {}"
            inputs_fit = "test samples must be like those of the devices"
            inputs, targets = self.outputs.first(2)
            with calling(what, shapes(inputs), remedy=inputs_fit, kind=DataError):
                outputs = self.outputs.of_raw(flat, inputs)
            if self._objective.of_scores:
                every, whose = self.outputs.known_targets, " of the test set"
                labels = targets if every is None else every
                check_labels(self._objective.loss, outputs, targets, labels, whose)
            what = "the metric fails on outputs of shape {} and targets of {}"
            sizes = tuple(outputs.shape), tuple(targets.shape)
            with calling(what, *sizes, remedy="use one that fits the task"):
                self._measures = self._federation.measures(outputs, targets)
                tried = [each.sums(outputs, targets, [len(targets)]) for each in self._measures]
                self._widths = [sums.shape[1] for sums in tried]

    @property
    def measures(self) -> dict[str, Better]:
        """Of each value, which is better."""
        return {name: way for each in self._measures for name, way in each.directions.items()}

    def scores(
        self,
        global_VF: Tensor,
        personal: Mapping[int, Tensor],
        workers: Workers,
        homes: Mapping[int, int] | None = None,
    ) -> Scores:
        """Test every server's and every device's model; models that are the same tensor are tested
        once.

        `homes` (device -> server) asks for the server's model on the device's labels too, which
        costs no further test.
        """
        rows = [global_VF[0]] * len(global_VF) if _all_equal(global_VF) else list(global_VF)
        asked: list[tuple[Tensor, Weights]] = [(row, self._everything) for row in rows]
        at_home = [device for device in homes or {} if self.weights(device)]
        asked += [(rows[homes[i]], self.weights(i)) for i in at_home if homes is not None]
        for device, x in personal.items():
            asked += [(x, weights) for weights in self._all_of(device)]
        found = iter(self._score_all(asked, workers))
        of_servers = tuple(next(found) for _ in rows)
        of_homes = {device: next(found) for device in at_home}
        of_devices = {device: self._tested(*(next(found) for _ in range(3))) for device in personal}
        servers = of_servers if self._everything else ()
        return Scores(self.measures, servers, of_devices, of_homes)

    def personal_scores(
        self, personal: Mapping[int, Tensor], workers: Workers
    ) -> dict[int, Tested]:
        """Test these devices' models."""
        asked = [(x, weights) for i, x in personal.items() for weights in self._all_of(i)]
        found = iter(self._score_all(asked, workers))
        return {device: self._tested(*(next(found) for _ in range(3))) for device in personal}

    def _tested(self, test: Values, validation: Values, train: Values) -> Tested:
        loss = dict(zip(self.measures, train, strict=False)).get("loss")
        return Tested(test, validation, train, math.nan if loss is None else loss)

    def _all_of(self, device: int) -> tuple[Weights, Weights, Weights]:
        """What a personal model is tested on, validated on, and has been trained on."""
        validation, train = (
            {key: 1.0} if (key := (kind, device)) in self._spans else {}
            for kind in ("validation", "train")
        )
        return self.weights(device), validation, train

    def weights(self, device: int) -> Weights:
        """How much a test sample of each kind counts for a device."""
        if device not in self._weights:
            tested = {key: stop - start for key, (start, stop) in self._spans.items()}
            self._weights[device] = sample_weights(self._federation, device, self._measure, tested)
        return self._weights[device]

    def tests(self, device: int) -> bool:
        """Whether there is anything to test this device's model on."""
        return any(self._all_of(device))

    def score(self, flat: Tensor) -> float:
        """The first measure of one model on all test samples; NaN where there are none."""
        found = self._score_all([(flat, self._everything)], OneWorker())[0]
        return math.nan if not found or found[0] is None else found[0]

    @functools.cached_property
    def _everything(self) -> Weights:
        """What global models are tested on: what is for all, else what is each device's."""
        for_all = [key for key in self._spans if key[0] in ("label", COMMON[0])]
        own = [key for key in self._spans if key[0] == "test"]
        return dict.fromkeys(for_all or own, 1.0)

    def _score_all(self, asked: list[tuple[Tensor, Weights]], workers: Workers) -> list[Values]:
        """The values of each model, by the weights of its samples."""
        if not asked:
            return []
        if not self._measures:
            self.check(asked[0][0])
        self.outputs.prepare(asked[0][0].dtype)
        models: dict[int, Tensor] = {}
        wanted: dict[int, dict[Key, None]] = {}  # per model: the kinds, in order and once
        for flat, weights in asked:
            models[flat.data_ptr()] = flat
            wanted.setdefault(flat.data_ptr(), {}).update(dict.fromkeys(weights))
        if self.outputs.blocks is not None:
            sums = self.outputs.blocks.sums(models, wanted, self._spans, self._of_block)
        elif self._together and len(models) > len(self._common()):
            # one model takes a call for all labels, many a call for each label
            sums = self._sums_together(models, wanted)
        else:
            sums = self._sums_of_changed(models, wanted, workers)
        return [self._values(sums[flat.data_ptr()], weights) for flat, weights in asked]

    def _sums_of_changed(
        self, models: dict[int, Tensor], wanted: dict[int, dict[Key, None]], workers: Workers
    ) -> dict[int, dict[Key, Sums]]:
        """As `_sums`, for all models; one that is as it was at the last look, to the bit, is not
        tested again: between two looks at every round few devices have been active.
        """
        names = workers.map(_name, models.values(), map(tuple, wanted.values()))
        name_of = dict(zip(models, names, strict=True))
        new = [model for model in models if name_of[model] not in self._known]
        keys = [list(wanted[model]) for model in new]
        found = workers.map(self._sums, [models[model] for model in new], keys)
        known = self._known | {name_of[m]: sums for m, sums in zip(new, found, strict=True)}
        few = len(models) <= REMEMBERED
        self._known = {name: known[name] for name in name_of.values()} if few else {}
        return {model: known[name] for model, name in name_of.items()}

    def _common(self) -> list[Key]:
        """Kinds that several models may want."""
        return [key for key in self._spans if key[0] in ("label", COMMON[0])]

    def _sums_together(
        self, models: dict[int, Tensor], wanted: dict[int, dict[Key, None]]
    ) -> dict[int, dict[Key, Sums]]:
        """As `_sums`, for all models that want a label at once, and for those that want as many
        samples of their own: on a GPU many small calls take longer than one large.
        """
        calls: dict[Key | int, list[tuple[int, Key]]] = {}
        for model, keys in wanted.items():
            for key in keys:
                start, stop = self._spans[key]
                common = key[0] in ("label", COMMON[0])
                calls.setdefault(key if common else stop - start, []).append((model, key))
        sums: dict[int, dict[Key, Sums]] = {key: {} for key in models}
        found = []
        with torch.no_grad():
            for call, pairs in calls.items():
                stacked = torch.stack([models[model] for model, _ in pairs])
                kinds = [call] if isinstance(call, tuple) else [key for _, key in pairs]
                said = self.outputs.together(stacked, kinds)
                sizes = self.outputs.sizes(kinds[:1]) * len(pairs)
                found.append(torch.cat([each.sums(*said, sizes) for each in self._measures], 1))
        rows = torch.cat(found).cpu().numpy() if found else ()
        for (model, key), row in zip(
            (pair for pairs in calls.values() for pair in pairs), rows, strict=True
        ):
            sums[model][key] = row
        return sums

    def _values(self, sums: Mapping[Key, Sums], weights: Weights) -> Values:
        """Of all measures, by the weights of the samples of each kind; empty without any."""
        if not weights:
            return ()
        total = sum(weight * sums[key] for key, weight in weights.items())
        sizes = {key: self._spans[key][1] - self._spans[key][0] for key in weights}
        count = sum(weight * sizes[key] for key, weight in weights.items())
        found: list[Value] = []
        start = 0
        for measure, width in zip(self._measures, self._widths, strict=True):
            part = np.asarray(total)[start : start + width]
            start += width
            values = (
                tuple((part / count).tolist())
                if measure.finish is None
                else measure.value(torch.from_numpy(part), count)
            )
            defined = not np.isfinite(part).all()  # a model that has diverged has no value
            found += [value if defined or math.isfinite(value) else None for value in values]
        return tuple(found)

    def _of_block(self, flat: Tensor, inputs: Tree, targets: Tensor) -> Sums:
        """The sums of statistics of one model over a block of samples."""
        own, size = torch.tensor(math.nan), len(targets)
        with torch.no_grad(), labels_fit(targets):
            if OWN_LOSS in self._measures:
                outputs, own = self.outputs.with_loss(flat, inputs, targets)
            else:
                outputs = self.outputs.of_batch(flat, inputs)
            found = [
                (own.double() * size).reshape(1)
                if measure is OWN_LOSS
                else measure.sums(outputs, targets, [size])[0]
                for measure in self._measures
            ]
        return torch.cat(found).cpu().numpy()

    def _sums(self, flat: Tensor, keys: list[Key]) -> dict[Key, Sums]:
        """The sums of statistics over the samples of each kind."""
        if not keys:
            return {}
        sizes = self.outputs.sizes(keys)
        with torch.no_grad():
            said = self.outputs.of(flat, keys)
            found = [measure.sums(*said, sizes) for measure in self._measures]
        return dict(zip(keys, torch.cat(found, 1).cpu().numpy(), strict=True))


def _name(flat: Tensor, keys: tuple[Key, ...]) -> tuple[Any, ...]:
    """Of a model's bits, and of what it is tested on."""
    bits = flat.detach().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(bits.data, digest_size=16).digest(), keys


def _all_equal(stack: Tensor) -> bool:
    return bool((stack == stack[0]).all())
