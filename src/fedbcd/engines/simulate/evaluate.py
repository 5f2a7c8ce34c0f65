"""How good the models are: global models on the whole test set, personal models on the test samples of their own labels."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from fedbcd.algorithm.objective import Objective
from fedbcd.data.federation import Federation


@dataclass(frozen=True)
class Scores:
    """Per server and per device; empty where there is nothing to test on."""

    servers: tuple[float, ...]
    devices: dict[int, float]


class Evaluator:
    """Tests models label by label, so that no model sees a test sample twice, and prepares the test set once."""

    chunk = 10_000  # samples in one forward pass
    keep = 2**28  # bytes; a prepared test set up to this size is kept

    def __init__(self, federation: Federation, objective: Objective, where: torch.device) -> None:
        self._federation = federation
        self._layout = objective.layout
        self._module = copy.deepcopy(objective.module).eval()
        self._test = federation.test
        self._ready: Tensor | None = None  # the test inputs as the model wants them
        if self._test is not None:
            order = torch.arange(len(self._test)) if federation.labels is None else self._test.targets.argsort(stable=True)
            self._inputs, self._targets = self._test.inputs[order].to(where), self._test.targets[order].to(where)
            self._spans = self._spans_of_labels()

    def _spans_of_labels(self) -> dict[int, tuple[int, int]]:
        """Where each label's samples begin and end; without labels, one span for all."""
        if self._federation.labels is None:
            return {0: (0, len(self._targets))}
        labels, counts = torch.unique_consecutive(self._targets, return_counts=True)
        ends = counts.cumsum(0).tolist()
        return {int(k): (end - int(n), end) for k, n, end in zip(labels, counts, ends, strict=True)}

    def scores(self, global_VF: Tensor, personal: dict[int, Tensor]) -> Scores:
        """Test every server's and every device's model; models that are the same tensor are tested once."""
        if self._test is None:
            return Scores((), {})
        known: dict[int, dict[int, float]] = {}
        rows = [global_VF[0]] * len(global_VF) if _all_equal(global_VF) else list(global_VF)
        servers = tuple(self.score(row, None, known.setdefault(row.data_ptr(), {})) for row in rows)
        owned = self._federation.labels
        if owned is None:
            return Scores(servers, {})
        return Scores(servers, {i: self.score(x, owned[i], known.setdefault(x.data_ptr(), {})) for i, x in personal.items()})

    def score(self, flat: Tensor, labels: tuple[int, ...] | None = None, known: dict[int, float] | None = None) -> float:
        """The mean metric of one model, on all test samples or on those of some labels; NaN where there are none.

        `known` holds the sums of labels that this model was tested on before.
        """
        if self._test is None:
            return float("nan")
        known = {} if known is None else known
        wanted = [label for label in (self._spans if labels is None else labels) if label in self._spans]
        missing = [label for label in wanted if label not in known]
        if missing:
            known.update(self._sums(flat, missing))
        count = sum(stop - start for start, stop in (self._spans[label] for label in wanted))
        return sum(known[label] for label in wanted) / count if count else float("nan")

    def _sums(self, flat: Tensor, labels: list[int]) -> dict[int, float]:
        """The sum of the metric over each label's samples."""
        p = self._layout.size_P
        state = (self._layout.parameters_of(flat[:p]), self._layout.buffers_of(flat[p:]), self._layout.counters)
        inputs = torch.cat([self._prepared(*self._spans[label], flat.dtype) for label in labels])
        targets = torch.cat([self._targets[slice(*self._spans[label])] for label in labels])
        with torch.no_grad():
            outputs = torch.cat([functional_call(self._module, state, (part,)) for part in torch.split(inputs, self.chunk)])
            metric = self._federation.metric(outputs, targets).double()
        sizes = [stop - start for start, stop in (self._spans[label] for label in labels)]
        return {label: float(part.sum()) for label, part in zip(labels, torch.split(metric, sizes), strict=True)}

    def _prepared(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if self._ready is None and self._inputs.numel() * dtype.itemsize <= self.keep:
            self._ready = self._federation.transform(self._inputs, dtype)
        if self._ready is not None and self._ready.dtype in (dtype, self._inputs.dtype):
            return self._ready[start:stop]
        return self._federation.transform(self._inputs[start:stop], dtype)


def _all_equal(stack: Tensor) -> bool:
    return bool((stack == stack[0]).all())
