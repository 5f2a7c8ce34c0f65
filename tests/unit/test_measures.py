"""Measures: what each says in the words of its definition, statistics that add however samples are
divided, and what is measured where nobody says: with tests that devices bring or keep back.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedbcd as fb
from fedbcd.data.measures import (
    F1,
    MSE,
    R2,
    Measure,
    binary_accuracy,
    fitting_measures,
    loss_measure,
    token_accuracy,
)
from fedbcd.errors import ConfigError
from fedbcd.record.history import CERTIFICATES, WORK

SAMPLES = 12


# ------------------------------------------------------------------------------------------------
# the oracle: float64, one sample after another
def r2_of(outputs: Any, targets: Any) -> list[float]:
    found = []
    for k in range(targets.shape[1]):
        true, said = targets[:, k], outputs[:, k]
        mean = sum(true) / len(true)
        errors = sum((t - o) ** 2 for t, o in zip(true, said, strict=True))
        found.append(1 - errors / sum((t - mean) ** 2 for t in true))
    return [sum(found) / len(found)]


def f1_of(outputs: Any, targets: Any) -> list[float]:
    hits, errors = np.zeros(targets.shape[1]), np.zeros(targets.shape[1])
    for said, true in zip(outputs > 0, targets > 0.5, strict=True):
        for k, (s, t) in enumerate(zip(said, true, strict=True)):
            hits[k] += s and t
            errors[k] += s != t
    each = [2 * h / (2 * h + e) for h, e in zip(hits, errors, strict=True) if h + e > 0]
    return [2 * hits.sum() / (2 * hits.sum() + errors.sum()), sum(each) / len(each)]


def log_loss_of(outputs: Any, targets: Any) -> list[float]:
    found = []
    for said, true in zip(np.moveaxis(outputs, 1, -1), targets, strict=True):
        for row, label in zip(np.atleast_2d(said), np.atleast_1d(true), strict=True):
            if label != -100:
                found.append(math.log(sum(math.exp(v) for v in row)) - row[label])
    return [sum(found) / len(found)]


def tokens_right(outputs: Any, targets: Any) -> list[float]:
    pairs = [
        (int(np.argmax(row)), label)
        for said, true in zip(np.moveaxis(outputs, 1, -1), targets, strict=True)
        for row, label in zip(said, true, strict=True)
    ]
    known = [said == label for said, label in pairs if label != -100]
    return [sum(known) / len(known)]


def mse_of(outputs: Any, targets: Any) -> list[float]:
    return [float(np.mean([np.mean((o - t) ** 2) for o, t in zip(outputs, targets, strict=True)]))]


def draws(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(shape: tuple[int, ...], ignored: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    found = torch.randint(5, shape, generator=generator)
    return torch.where(torch.arange(shape[-1]) == 1, -100, found) if ignored else found


NUMBERS = draws((SAMPLES, 3), 0), draws((SAMPLES, 3), 1)
ZEROS_AND_ONES = draws((SAMPLES, 4), 0), (draws((SAMPLES, 4), 1) > 0).double()
ZEROS_AND_ONES[1][:, 2] = 0.0
ZEROS_AND_ONES[0][:, 2] = -1.0  # a label that neither occurs nor is predicted
TOKENS = draws((SAMPLES, 5, 4), 0), labels((SAMPLES, 4), ignored=True)
CLASSES = draws((SAMPLES, 5), 0), labels((SAMPLES,))
CASES: dict[str, tuple[Measure, tuple[Tensor, Tensor], Callable[..., list[float]]]] = {
    "mse": (MSE, NUMBERS, mse_of),
    "r2": (R2, NUMBERS, r2_of),
    "f1": (F1, ZEROS_AND_ONES, f1_of),
    "tokens": (token_accuracy(1), TOKENS, tokens_right),
    "binary": (
        binary_accuracy(0.0),
        (CLASSES[0][:, :1], (CLASSES[1] > 2).double()),
        lambda o, t: [float(np.mean((o[:, 0] > 0) == (t > 0)))],
    ),
    "accuracy": (
        fitting_measures(F.cross_entropy, CLASSES[1])[0],
        CLASSES,
        lambda o, t: [float(np.mean([int(np.argmax(a)) == b for a, b in zip(o, t, strict=True)]))],
    ),
    "cross-entropy": (loss_measure(F.cross_entropy, CLASSES[1]), CLASSES, log_loss_of),
    "cross-entropy-of-tokens": (loss_measure(F.cross_entropy, TOKENS[1]), TOKENS, log_loss_of),
    "a loss of one's own": (
        loss_measure(lambda o, t: ((o - t) ** 2).mean(), NUMBERS[1]),
        NUMBERS,
        mse_of,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_measure_says_what_its_definition_does_however_samples_are_divided(name: str) -> None:
    measure, (outputs, targets), oracle = CASES[name]
    expected = oracle(outputs.numpy(), targets.numpy())
    for sizes in ([SAMPLES], [1] * SAMPLES, [5, 3, 4]):
        total = measure.sums(outputs, targets, sizes).sum(0)
        assert measure.value(total, SAMPLES) == pytest.approx(expected, rel=1e-12)
        parts = zip(torch.split(outputs, sizes), torch.split(targets, sizes), strict=True)
        apart = sum(measure.sums(*part, [len(part[1])])[0] for part in parts)
        torch.testing.assert_close(apart, total, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------
# tasks
def rows_of(device: int, count: int = 20) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(device))


def concept_shift(device: int) -> Any:
    """The same inputs, and labels that every device calls otherwise."""
    x = rows_of(device, 30)
    return x, (x[:, :3].argmax(1) + device) % 3


def feature_shift(device: int) -> Any:
    x, y = rows_of(device, 30), concept_shift(0)[1]
    x[:, 0] += 3.0 * (y == 0) + device
    return x, y


def regression(device: int) -> Any:
    x = rows_of(device)
    return x, (x @ torch.tensor([1.0, -1.0, 0.5, float(device)]))[:, None]


def several_labels(device: int) -> Any:
    x = rows_of(device)
    return x, (x[:, :3] * (1 if device % 2 else -1) > 0).float()


def sequences(device: int) -> Any:
    text = torch.randint(3, (20, 5), generator=torch.Generator().manual_seed(device))
    return text, (text + device) % 3


def next_token() -> nn.Module:
    class Last(nn.Module):
        def forward(self, outputs: Tensor) -> Tensor:
            return outputs.transpose(1, 2)

    return nn.Sequential(nn.Embedding(3, 6), nn.Linear(6, 3), Last())


def scored(kind: str, outputs: Tensor, targets: Tensor) -> float:
    said, true = outputs.detach().double().numpy(), targets.double().numpy()
    if kind == "mse":
        return mse_of(said, true)[0]
    if kind == "f1_micro":
        return f1_of(said, true)[0]
    return float((outputs.argmax(1) == targets).double().mean())


TASKS: dict[str, tuple[Any, Any, Any, str, dict[str, str]]] = {
    "concept shift": (
        concept_shift, lambda: nn.Linear(4, 3), F.cross_entropy, "accuracy", {"accuracy": "higher"}
    ),
    "feature shift": (
        feature_shift, lambda: nn.Linear(4, 3), F.cross_entropy, "accuracy", {"accuracy": "higher"}
    ),
    "regression": (
        regression, lambda: nn.Linear(4, 1), F.mse_loss, "mse", {"mse": "lower", "r2": "higher"}
    ),
    "several labels": (
        several_labels,
        lambda: nn.Linear(4, 3),
        F.binary_cross_entropy_with_logits,
        "f1_micro",
        {"f1_micro": "higher", "f1_macro": "higher"},
    ),
    "sequences": (
        sequences, next_token, F.cross_entropy, "accuracy", {"accuracy": "higher"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("brought", [True, False], ids=["brought", "kept back"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_its_measures_and_each_device_its_own_tests(
    task: str, brought: bool
) -> None:
    make, model, loss, first, measures = TASKS[task]
    data = [make(device) for device in range(4)]
    given: Any = [((x[5:], y[5:]), (x[:5], y[:5])) for x, y in data] if brought else data
    kept = {} if brought else {"holdout": fb.Holdout(0.25, 0.1, seed=3)}
    federation = fb.Federation(model, loss, given, 2, **kept)
    method = fb.FedBCD(device_step=0.1, penalty=0.01, steps=(20, 20))
    run = fb.train(federation, method, rounds=5, active=2, certify_every=0)
    assert run.history.measures == measures | {"loss": "lower"}
    assert federation.own_tests is not None
    own = {}
    for device, (start, stop) in federation.own_tests.items():
        inputs, targets = federation.test.inputs[start:stop], federation.test.targets[start:stop]
        assert stop - start == (5 if brought else round(0.25 * len(data[device][0])))
        own[device] = scored(first, run.personal_model(device)(inputs), targets)
        assert run.personal_scores[device] == pytest.approx(own[device], rel=1e-5)
        row = run.devices[device]
        assert row[f"personal_{first}"] == run.personal_scores[device]
        sign = -1 if measures[first] == "lower" else 1
        assert row[f"gain_{first}"] == sign * (row[f"personal_{first}"] - row[f"global_{first}"])
    last = run.history.last
    assert last[f"personal_{first}"] == pytest.approx(np.mean([*own.values()]), rel=1e-5)
    assert last.train_loss < run.history[0].train_loss
    assert ("accuracy" in run.history.measures) == (first == "accuracy")
    assert brought or math.isfinite(last.validation_loss)


def test_what_is_kept_back_is_nobodys_to_train_on_and_a_sample_is_left() -> None:
    data = [(rows_of(i, n), torch.arange(n) % 3) for i, n in enumerate((1, 2, 3, 40))]
    made = [
        fb.Federation(lambda: nn.Linear(4, 3), F.cross_entropy, data, 2, holdout=how)
        for how in (fb.Holdout(0.25, 0.25), 0.5, fb.Holdout(0.25, 0.25, seed=1))
    ]
    assert made[0].sizes == [1, 1, 1, 20]
    assert made[1].sizes == [1, 1, 1, 20]
    assert made[0].validation.keys() == {2, 3}
    assert set(made[0].own_tests or {}) == {1, 2, 3}
    assert made[0].fingerprint() != made[2].fingerprint()
    trained = {*map(tuple, data[3][0][made[0].owned(3) - 6].tolist())}
    start, stop = (made[0].own_tests or {})[3]
    assert made[0].test is not None
    assert not trained & {*map(tuple, made[0].test.inputs[start:stop].tolist())}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="together below 1: devices train on what is left"):
        fb.Holdout(0.6, 0.4)


def test_who_has_no_tests_is_tested_by_its_labels_on_those_for_all() -> None:
    x, y = rows_of(9, 60), torch.arange(60) % 3
    mine = [(x[k::4], y[k::4]) for k in range(4)]
    given: Any = [(mine[0], None), *((own, (own[0][:4], own[1][:4])) for own in mine[1:])]
    made = fb.Federation(lambda: nn.Linear(4, 3), F.cross_entropy, given, 2, test=(x, y))
    alone = fb.Federation(lambda: nn.Linear(4, 3), F.cross_entropy, mine, 2, test=(x, y))
    runs = [fb.train(each, fb.FedBCD(), rounds=2, active=1) for each in (made, alone)]
    assert runs[0].personal_scores[0] == runs[1].personal_scores[0]
    assert sorted(runs[0].personal_scores) == [0, 1, 2, 3]
    assert runs[0].history.last.global_accuracy == runs[1].history.last.global_accuracy


# ------------------------------------------------------------------------------------------------
# of one's own, on every engine
def recall(outputs: Tensor, targets: Tensor) -> Tensor:
    one = F.one_hot(targets, 3).double()
    return torch.cat((one * (outputs.argmax(-1) == targets)[:, None], one), 1)


def both(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    margin = outputs.max(-1).values - outputs.min(-1).values
    return {"margin": margin, "wrong": float((outputs.argmax(-1) != targets).double().mean())}


both.better = {"wrong": "lower"}  # type: ignore[attr-defined]
RECALL = fb.Measure(
    "recall", recall, lambda total, _: total[:3] / total[3:], columns=("0", "1", "2")
)
METRICS = [fb.accuracy, RECALL, both]


def shifted(**more: Any) -> fb.Federation:
    given: dict[str, Any] = {"holdout": fb.Holdout(0.25, 0.1), "metrics": METRICS, **more}
    data = [concept_shift(device) for device in range(4)]
    return fb.Federation(lambda: nn.Linear(4, 3), F.cross_entropy, data, 2, **given)


def trained(**more: Any) -> fb.Run:
    options: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "active": 1, **more}
    return fb.train(shifted(), fb.FedBCD(batch=4), device_tables=True, **options)


def test_engines_agree_on_every_column_and_a_resume_goes_on(tmp_path: Path) -> None:
    whole = trained(out=tmp_path / "whole")
    assert list(whole.history.measures) == [
        "accuracy", "recall_0", "recall_1", "recall_2", "margin", "wrong", "loss"
    ]  # fmt: skip
    last = whole.history.last
    assert last.personal_wrong == pytest.approx(1 - last.personal_accuracy)
    assert last.samples_seen == 4 * last.gradient_steps > 0
    assert last.bytes_up == last.bytes_down == last.activations * 15 * 4
    trained(rounds=2, out=tmp_path / "parts")
    others = {
        "resumed": trained(out=tmp_path / "parts", resume=True),
        "ahead": trained(ahead=True),
        "files": trained(state=tmp_path / "rows"),
    }
    for name, run in others.items():
        for mine, theirs in zip(run.history, whole.history, strict=True):
            names = [each for each in theirs if each not in CERTIFICATES]
            found = [mine[each] for each in names]
            assert found == pytest.approx([theirs[n] for n in names], rel=1e-5, nan_ok=True), name
            assert [mine[each] for each in WORK] == [theirs[each] for each in WORK]
        for mine, theirs in zip(run.devices, whole.devices, strict=True):
            assert dict(mine) == pytest.approx(dict(theirs), rel=1e-5, abs=1e-6, nan_ok=True)
    assert sorted(whole.device_tables) == [0, 2, 4]
    for place in ("whole", "parts"):
        files = {path.name for path in (tmp_path / place).glob("devices*.csv")}
        assert files == {"devices.csv", *(f"devices-{k}.csv" for k in (0, 2, 4))}
    again = fb.Run.load(tmp_path / "whole", shifted())
    assert again.devices == whole.devices
    assert again.history.measures == whole.history.measures
    assert max(map(len, repr(whole.history).splitlines())) <= 100
    assert "personal_recall_2" in repr(whole.history)


def test_steps_are_counted_by_what_a_plan_takes() -> None:
    """FedBCD-I's activations pull and take no gradients; its offline rounds do."""
    last = fb.train(shifted(), fb.FedBCDI(steps=(3, 3), batch=5), rounds=3, active=1).history.last
    assert last.samples_seen == 5 * last.gradient_steps
    assert last.gradient_steps % 3 == 0
    assert last.gradient_steps != 3 * last.activations


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ([fb.accuracy, fb.accuracy], "two measures are called 'accuracy'"),
        ([lambda o, _: o[:, :2].sum(0)[:1].expand(7)], "gives shape"),
        ([fb.Measure("two", lambda o, _: o[:, 0], columns=("a", "b"))], "gives 1 values for its 2"),
    ],
)
def test_measures_that_do_not_fit_are_refused(metrics: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fb.train(shifted(metrics=metrics), fb.FedBCD(), rounds=1, active=1)


def test_a_measure_is_refused_for_its_name_and_its_directions() -> None:
    with pytest.raises(ConfigError, match="columns are named after it"):
        fb.Measure("top 5", recall)
    with pytest.raises(ConfigError, match='use "higher", "lower" or "neither"'):
        fb.Measure("top5", recall, better="more")  # type: ignore[arg-type]
