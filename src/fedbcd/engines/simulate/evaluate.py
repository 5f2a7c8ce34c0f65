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
    """Tests models one after another, a large batch each."""

    chunk = 10_000

    def __init__(self, federation: Federation, objective: Objective, where: torch.device) -> None:
        self._federation = federation
        self._layout = objective.layout
        self._module = copy.deepcopy(objective.module).eval()
        self._test = federation.test
        if self._test is not None:
            self._inputs, self._targets = self._test.inputs.to(where), self._test.targets.to(where)
            self._places = self._places_by_labels()

    def _places_by_labels(self) -> dict[tuple[int, ...], Tensor]:
        """Test samples of each set of labels that some device owns."""
        if self._federation.labels is None:
            return {}
        return {
            labels: torch.isin(self._targets, torch.tensor(labels, device=self._targets.device)).nonzero()[:, 0]
            for labels in set(self._federation.labels)
        }

    def score(self, flat: Tensor, labels: tuple[int, ...] | None = None) -> float:
        """The mean metric of one model, on all test samples or on those of some labels; NaN where there are none."""
        if self._test is None:
            return float("nan")
        inputs, targets = self._inputs, self._targets
        if labels is not None:
            places = self._places[labels]
            inputs, targets = inputs[places], targets[places]
        if len(targets) == 0:
            return float("nan")
        p = self._layout.size_P
        state = (self._layout.parameters_of(flat[:p]), self._layout.buffers_of(flat[p:]), self._layout.counters)
        total = 0.0
        with torch.no_grad():
            for x, y in zip(torch.split(inputs, self.chunk), torch.split(targets, self.chunk), strict=True):
                outputs = functional_call(self._module, state, (self._federation.transform(x, flat.dtype),))
                total += float(self._federation.metric(outputs, y).double().sum())
        return total / len(targets)

    def scores(self, global_VF: Tensor, personal: dict[int, Tensor]) -> Scores:
        """Test every server's and every device's model; models that are the same tensor are tested once."""
        known: dict[tuple[int, tuple[int, ...] | None], float] = {}

        def once(flat: Tensor, labels: tuple[int, ...] | None) -> float:
            key = (flat.data_ptr(), labels)
            if key not in known:
                known[key] = self.score(flat, labels)
            return known[key]

        if self._test is None:
            return Scores((), {})
        rows = [global_VF[0]] * len(global_VF) if _all_equal(global_VF) else list(global_VF)
        owned = self._federation.labels
        devices = {} if owned is None else {i: once(flat, owned[i]) for i, flat in personal.items()}
        return Scores(tuple(once(row, None) for row in rows), devices)


def _all_equal(stack: Tensor) -> bool:
    return bool((stack == stack[0]).all())
