"""Every backend says what it can do, or why it cannot; the run's record says which computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.compute import backends
from fedbcd.engines.run import explain_backend
from support.runs import LOGISTIC, federation

BCD = fb.FedBCD(steps=(1, 2), batch=4)


def curved() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))


@pytest.mark.parametrize(
    ("model", "options", "chosen", "reasons"),
    [
        (LOGISTIC, {}, "compiled", {"planned ahead": "does not pay"}),
        (LOGISTIC, {"ahead": True}, "planned ahead", {"compiled": "what is above"}),
        (LOGISTIC, {"dtype": torch.float64}, "vectorised", {"compiled": "in float64 on cpu"}),
        (curved, {}, "vectorised", {"compiled": "no chain of linear layers"}),
        (LOGISTIC, {"max_batch": 1}, "one by one", {"vectorised": "max_batch = 1"}),
        (LOGISTIC, {"joins": {3: 2}}, "compiled", {"planned ahead": "devices join or leave"}),
    ],
)
def test_which_backend_computes_and_why_not_another(
    model: Callable[[], nn.Module], options: dict[str, Any], chosen: str, reasons: dict[str, str]
) -> None:
    spec = fb.RunSpec(BCD, active=2, rounds=1, **options)
    found = explain_backend(federation(model), spec)
    used = next(choice.backend for choice in found if not choice.reason)
    assert used.startswith(chosen)
    for name, reason in reasons.items():
        assert reason in next(c.reason for c in found if c.backend.startswith(name))
    assert fb.train(federation(model), spec).summary["backend"] == used
    assert [c.backend for c in found][3:] == [backends.VECTORISED, backends.ONE_BY_ONE]


def test_without_compiled_code_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbcd.compute.fused.library", lambda: None)
    found = explain_backend(federation(LOGISTIC), fb.RunSpec(BCD, active=2, rounds=1))
    assert any("nothing was compiled" in choice.reason for choice in found)
