"""How good the models are: global models on the whole test set, personal models on the labels of
their devices (`data.measure`).

Shapes: M models, V servers, P parameters, F values of a model.
"""

import copy
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedbcd.algorithm.fused.library import ChainTester
from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.trees import Tree, called, scores_of, shapes
from fedbcd.compute.blocks import Blocks
from fedbcd.compute.fit import check_labels
from fedbcd.compute.fused import tester_for
from fedbcd.compute.workers import OneWorker, Workers
from fedbcd.data.federation import FOR_ALL, Federation
from fedbcd.data.measure import DEFAULT, Measure, is_lower_better, sample_weights
from fedbcd.data.samples import Samples
from fedbcd.errors import ConfigError, DataError
from fedbcd.own import calling

INPUT_VALUES_AT_ONCE = 2**27  # elements of the inputs of all models in one call on a GPU

Weights = Mapping[int, float]  # of one test sample of each label


@dataclass(frozen=True)
class Scores:
    """Per server and per device; without those for whom there is nothing to test on."""

    servers: tuple[float, ...]
    devices: dict[int, float]  # each personal model on its own labels
    homes: dict[int, float] = field(
        default_factory=dict
    )  # and its server's model on those, by the same weights


class Evaluator:
    """Tests models label by label, so that no model sees a test sample twice, and prepares the test
    set once.
    """

    keep = 2**28  # bytes; a prepared test set up to this size is kept

    def __init__(
        self,
        federation: Federation,
        objective: Objective,
        where: torch.device,
        together: bool = False,
        measure: Measure = DEFAULT,
    ) -> None:
        """`together` tests all models that want a label in one vectorised call, if there are many;
        for a GPU.
        """
        self._together = together
        self._measure = measure
        self.lower = is_lower_better(federation.metric)
        self._weights: dict[int, Weights] = {}  # of the devices that were asked for
        self._federation = federation
        self._objective = objective
        self._layout = objective.layout
        self._template = copy.deepcopy(objective.to_test)
        self._own = threading.local()
        self.chunk = 1_000 if where.type == "cpu" else 10_000  # samples in one forward pass
        self._test = federation.test
        self._where = where
        self._ready: Tensor | None = None  # the test inputs as the model wants them, or ...
        self._tester: ChainTester | None = (
            None  # ... as compiled code wants them, where there is some for the model
        )
        self._blocks = torch.empty(0)
        self._blocks_of: dict[int, Tensor] = {}  # label -> numbers of its blocks
        self._asked_for: torch.dtype | None = None
        self._spans: dict[int, tuple[int, int]] = {}
        self._read: Blocks | None = None  # test samples that are not tensors
        if self._test is not None:
            by_label = federation.labels is not None and federation.own_tests is None
            if by_label:
                self._test = self._test.only(self._test.all_targets.argsort(stable=True))
            self._test = self._test.to(where)
            self._spans = self._spans_of_labels()
            if isinstance(self._test, Samples):
                self._inputs, self._targets = self._test.inputs, self._test.targets
            else:
                self._read = Blocks(self._test, federation.transform, self.chunk, self.keep)

    def check(self, flat: Tensor) -> None:
        """Refuse test samples or a metric that do not fit, by the first samples."""
        if self._test is None:
            return
        inputs, targets = self._test.take(torch.arange(min(2, len(self._test)), device=self._where))
        p, shape = self._layout.size_P, shapes(inputs)
        state = self._layout.parameters_of(flat[:p]), self._layout.buffers_of(flat[p:])
        inputs_fit = "test samples must be like those of the devices"
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            what = "the model or the transform fail on test inputs of shape {}"
            with calling(what, shape, remedy=inputs_fit, kind=DataError):
                inputs = self._federation.transform(inputs, flat.dtype)
                outputs = scores_of(called(self._module(), (*state, self._layout.counters), inputs))
            known = self._test.known_targets
            labels, whose = targets if known is None else known, " of the test set"
            if self._objective.of_scores:
                check_labels(self._objective.loss, outputs, targets, labels, whose)
            what = "the metric fails on outputs of shape {} and targets of {}"
            sizes = tuple(outputs.shape), tuple(targets.shape)
            with calling(what, *sizes, remedy="use one that fits the task"):
                found = torch.as_tensor(self._federation.metric(outputs, targets))
        if found.shape[:1] != targets.shape[:1]:
            raise ConfigError(
                f"the metric gives shape {tuple(found.shape)} for {len(targets)} samples; it must"
                " give a number for each"
            )

    def _spans_of_labels(self) -> dict[int, tuple[int, int]]:
        """Where each label's samples begin and end, or each owner's; without either, one span for
        all.
        """
        if self._federation.own_tests is not None:
            return self._federation.own_tests
        assert self._test is not None
        if self._federation.labels is None:
            return {0: (0, len(self._test))}
        labels, counts = torch.unique_consecutive(self._test.all_targets, return_counts=True)
        ends = counts.cumsum(0).tolist()
        return {int(k): (end - int(n), end) for k, n, end in zip(labels, counts, ends, strict=True)}

    def scores(
        self,
        global_VF: Tensor,
        personal: dict[int, Tensor],
        workers: Workers,
        homes: Mapping[int, int] | None = None,
    ) -> Scores:
        """Test every server's and every device's model; models that are the same tensor are tested
        once.

        `homes` (device -> server) asks for the server's model on the device's labels too, which
        costs no further test.
        """
        if self._test is None:
            return Scores((), {})
        rows = [global_VF[0]] * len(global_VF) if _all_equal(global_VF) else list(global_VF)
        devices = [device for device in personal if self.tests(device)]
        at_home = [device for device in devices if homes is not None and device in homes]
        asked = [(row, self._everything) for row in rows]
        asked += [(personal[device], self.weights(device)) for device in devices]
        asked += [
            (rows[homes[device]], self.weights(device)) for device in at_home if homes is not None
        ]
        found = self._score_all(asked, workers)
        of_devices, of_homes = (
            found[len(rows) : len(rows) + len(devices)],
            found[len(rows) + len(devices) :],
        )
        return Scores(
            tuple(found[: len(rows)]),
            dict(zip(devices, of_devices, strict=True)),
            dict(zip(at_home, of_homes, strict=True)),
        )

    def weights(self, device: int) -> Weights:
        """How much a test sample of each label counts for a device."""
        if device not in self._weights:
            tested = {label: stop - start for label, (start, stop) in self._spans.items()}
            self._weights[device] = sample_weights(self._federation, device, self._measure, tested)
        return self._weights[device]

    def tests(self, device: int) -> bool:
        """Whether there is anything to test this device's model on."""
        return self._test is not None and len(self.weights(device)) > 0

    def personal_scores(self, personal: dict[int, Tensor], workers: Workers) -> dict[int, float]:
        """Test these devices' models on their own labels."""
        return dict(
            zip(
                personal,
                self._score_all([(x, self.weights(i)) for i, x in personal.items()], workers),
                strict=True,
            )
        )

    def score(self, flat: Tensor) -> float:
        """The mean metric of one model on all test samples; NaN where there are none."""
        return (
            float("nan")
            if self._test is None
            else self._score_all([(flat, self._everything)], OneWorker())[0]
        )

    @property
    def _everything(self) -> Weights:
        """What global models are tested on: what is for all, where something is."""
        for_all = self._federation.own_tests is not None and FOR_ALL in self._spans
        return dict.fromkeys([FOR_ALL] if for_all else self._spans, 1.0)

    def _score_all(self, asked: list[tuple[Tensor, Weights]], workers: Workers) -> list[float]:
        """The mean metric of each model, by the weights of its samples."""
        self._prepare(asked[0][0].dtype)
        models: dict[int, Tensor] = {}
        wanted: dict[int, dict[int, None]] = {}  # per model: the labels, in order and once
        for flat, weights in asked:
            models[flat.data_ptr()] = flat
            wanted.setdefault(flat.data_ptr(), {}).update(dict.fromkeys(weights))
        if self._read is not None:
            sums = self._read.sums(models, wanted, self._spans, self._of_block)
        elif self._together and len(models) > len(
            self._spans
        ):  # one model takes a call for all labels, many a call for each label
            sums = self._sums_together(models, wanted)
        else:
            sums = dict(
                zip(
                    models,
                    workers.map(self._sums, models.values(), map(list, wanted.values())),
                    strict=True,
                )
            )
        return [self._mean(sums[flat.data_ptr()], weights) for flat, weights in asked]

    def _sums_together(
        self, models: dict[int, Tensor], wanted: dict[int, dict[int, None]]
    ) -> dict[int, dict[int, float]]:
        """As `_sums`, for all models that want a label at once: on a GPU many small calls take
        longer than one large.
        """
        asked = {
            label: [key for key, labels in wanted.items() if label in labels]
            for label in self._spans
        }
        asked = {label: keys for label, keys in asked.items() if keys}
        with torch.no_grad():
            found = [
                self._sums_of_label(torch.stack([models[key] for key in keys]), label)
                for label, keys in asked.items()
            ]
        values = torch.cat(found).tolist() if found else []
        sums: dict[int, dict[int, float]] = {key: {} for key in models}
        for (key, label), value in zip(
            ((key, label) for label, keys in asked.items() for key in keys), values, strict=True
        ):
            sums[key][label] = value
        return sums

    def _of_block(self, flat: Tensor, inputs: Tree, targets: Tensor) -> float:
        """The sum of the metric of one model."""
        p = self._layout.size_P
        state = self._layout.parameters_of(flat[:p]), self._layout.buffers_of(flat[p:])
        with torch.no_grad():
            outputs = called(self._module(), (*state, self._layout.counters), inputs)
            metric = self._federation.metric(scores_of(outputs), targets)
        return float(per_sample(metric, len(targets)).sum())

    def _sums_of_label(self, models_MF: Tensor, label: int) -> Tensor:
        start, stop = self._spans[label]
        inputs = self._prepared(start, stop, models_MF.dtype)
        size = max(1, INPUT_VALUES_AT_ONCE // (len(models_MF) * max(1, inputs[0].numel())))
        p = self._layout.size_P

        def forward(flat: Tensor, part: Tensor) -> Tensor:
            state = (
                self._layout.parameters_of(flat[:p]),
                self._layout.buffers_of(flat[p:]),
                self._layout.counters,
            )
            return scores_of(called(self._module(), state, part))

        total = torch.zeros(len(models_MF), dtype=torch.float64, device=models_MF.device)
        for part, targets in zip(
            torch.split(inputs, size), torch.split(self._targets[start:stop], size), strict=True
        ):
            outputs = vmap(forward, in_dims=(0, None))(models_MF, part)
            metric = self._federation.metric(
                outputs.flatten(0, 1), targets.repeat(len(models_MF), *[1] * (targets.ndim - 1))
            )
            total += per_sample(metric, len(outputs.flatten(0, 1))).view(len(models_MF), -1).sum(1)
        return total

    def _mean(self, sums: dict[int, float], weights: Weights) -> float:
        total = sum(
            weight * (self._spans[label][1] - self._spans[label][0])
            for label, weight in weights.items()
        )
        return (
            sum(weight * sums[label] for label, weight in weights.items()) / total
            if total
            else float("nan")
        )

    def _sums(self, flat: Tensor, labels: list[int]) -> dict[int, float]:
        """The sum of the metric over each label's samples."""
        if not labels:
            return {}
        targets = torch.cat([self._targets[slice(*self._spans[label])] for label in labels])
        with torch.no_grad():
            outputs = (
                self._outputs(flat, labels)
                if self._tester is None
                else self._fused_outputs(self._tester, flat, labels)
            )
            metric = per_sample(self._federation.metric(outputs, targets), len(targets))
        sizes = [stop - start for start, stop in (self._spans[label] for label in labels)]
        return {
            label: float(part.sum())
            for label, part in zip(labels, torch.split(metric, sizes), strict=True)
        }

    def _outputs(self, flat: Tensor, labels: list[int]) -> Tensor:
        """Of one model on the samples of these labels."""
        p = self._layout.size_P
        state = (
            self._layout.parameters_of(flat[:p]),
            self._layout.buffers_of(flat[p:]),
            self._layout.counters,
        )
        prepared = (
            self._prepared(start, stop, flat.dtype)
            for start, stop in stretches(self._spans[label] for label in labels)
        )
        parts = (part for stretch in prepared for part in torch.split(stretch, self.chunk))
        return torch.cat([scores_of(called(self._module(), state, part)) for part in parts])

    def _fused_outputs(self, tester: ChainTester, flat: Tensor, labels: list[int]) -> Tensor:
        """The same by compiled code; blocks of samples begin anew with each label, and are filled
        up.
        """
        chosen = [self._blocks_of[label] for label in labels]
        found = torch.split(
            tester.outputs(flat, self._blocks, torch.cat(chosen)),
            [len(blocks) for blocks in chosen],
        )
        sizes = (stop - start for start, stop in (self._spans[label] for label in labels))
        return torch.cat(
            [blocks.flatten(0, 1)[:size] for blocks, size in zip(found, sizes, strict=True)]
        )

    def _module(self) -> nn.Module:
        """A copy per thread: `functional_call` writes into it for a moment."""
        if not hasattr(self._own, "module"):
            self._own.module = copy.deepcopy(self._template)
        module: nn.Module = self._own.module
        return module

    def _prepare(self, dtype: torch.dtype) -> None:
        """Have the test set ready, if it is not too large, before several workers want it."""
        if dtype == self._asked_for:
            return
        self._asked_for, self._tester = dtype, None
        if self._read is not None or self._inputs.numel() * dtype.itemsize > self.keep:
            return
        ready = self._federation.transform(self._inputs, dtype)
        if not self._together:
            self._tester = tester_for(
                self._objective, self._where, dtype, (ready[:2], self._targets[:2])
            )
        if self._tester is None:
            self._ready = ready
            return
        parts = [self._tester.blocks_of(ready[start:stop]) for start, stop in self._spans.values()]
        numbers = torch.split(torch.arange(sum(map(len, parts))), [len(part) for part in parts])
        self._blocks, self._blocks_of = (
            torch.cat(parts),
            dict(zip(self._spans, numbers, strict=True)),
        )

    def _prepared(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if self._ready is not None and self._ready.dtype in (dtype, self._inputs.dtype):
            return self._ready[start:stop]
        inputs: Tensor = self._federation.transform(self._inputs[start:stop], dtype)
        return inputs


def stretches(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where samples begin and end, as few stretches, in order."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


def per_sample(metric: Tensor, samples: int) -> Tensor:
    """Float64; a sample with a score per token has their mean."""
    return metric.double().reshape(samples, -1).mean(1)


def _all_equal(stack: Tensor) -> bool:
    return bool((stack == stack[0]).all())
