"""What users rely on: the names, their documents, the rows of the architecture, and what a `Run`
gives back.
"""

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.fused.chain import LinearLayer
from fedbcd.errors import RecordError
from fedbcd.record import names
from fedbcd.record.history import columns_of
from support.rounding import ROUNDED_64, U, exact_outputs
from support.runs import LOGISTIC, MLP, federation, outputs, train

SOURCE = Path(inspect.getfile(fb)).parent
FILES = sorted(
    path for path in SOURCE.rglob("*.py") if not path.stem.endswith("_pb2")
)  # generated code has its own test
MODULES = {
    ".".join(("fedbcd", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in FILES
}


@cache
def tree_of(name: str) -> ast.Module:
    """The source of a module, parsed."""
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), str(MODULES[name]))


# Imports point down only. Siblings of row 1 do not know each other; row 2 may look sideways only
# where it is said here.
ROWS = {
    **dict.fromkeys(("addressed", "errors", "config", "describe", "own", "palette", "recorded"), 0),
    **dict.fromkeys(("algorithm", "protocol", "theory"), 1),
    **dict.fromkeys(("data", "models", "record"), 2),
    **dict.fromkeys(("schedule", "compute", "spec"), 3),
    "engines": 4,
    **dict.fromkeys(("experiments", "planner", "report", "export", "newcomers", "trackers"), 5),
    **dict.fromkeys(("cli", "dashboard", "deploy"), 6),
    "__main__": 7,
    "": 7,  # fedbcd/__init__.py, the public API
}
SIDEWAYS = {
    ("config", "errors"),
    ("config", "own"),
    ("describe", "own"),
    ("own", "errors"),
    ("recorded", "config"),
    ("recorded", "describe"),
    ("compute", "schedule"),
    ("spec", "schedule"),
    ("planner", "experiments"),
    ("report", "planner"),
    ("export", "experiments"),
    ("newcomers", "experiments"),
    ("cli", "dashboard"),
}
CORE = ("algorithm", "protocol", "theory", "schedule", "compute")
PURE = tuple(f"fedbcd.{name}" for name in CORE)


def _imports(tree: ast.AST) -> Iterator[str]:
    """Full names of everything that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


@cache
def imports_of(name: str) -> tuple[str, ...]:
    """Of a module."""
    return tuple(_imports(tree_of(name)))


def _part(module: str) -> str:
    """The part of the package that a module belongs to: fedbcd.engines.run is of `engines`."""
    return (*module.split("."), "")[1]


# ------------------------------------------------------------------------------------------------
# names
def test_the_public_names_are_sorted_and_exist() -> None:
    assert fb.__all__ == sorted(fb.__all__)
    assert len(set(fb.__all__)) == len(fb.__all__)
    for name in fb.__all__:
        assert hasattr(fb, name), name


def test_every_public_import_is_a_public_name() -> None:
    imported = {
        name
        for name, value in vars(fb).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert imported == set(fb.__all__)


def test_every_public_name_has_a_docstring() -> None:
    for name in fb.__all__:
        thing = getattr(fb, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert (thing.__doc__ or "").strip(), name
            assert not str(thing.__doc__).startswith(f"{name}("), (
                f"{name} has only the docstring that dataclass writes"
            )
        else:  # a union of classes, such as Algorithm
            assert all((member.__doc__ or "").strip() for member in thing.__args__), name


def test_every_public_module_and_class_has_a_docstring() -> None:
    """A function has one where its name and its types do not say it all."""
    for name in MODULES:
        tree = tree_of(name)
        assert ast.get_docstring(tree), f"{name} has no docstring"
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{name}.{node.name} (line {node.lineno})"


def test_every_module_can_be_imported_alone() -> None:
    found = {
        module.name
        for module in pkgutil.walk_packages(fb.__path__, "fedbcd.")
        if not module.name.endswith("_pb2")
    }
    found = {
        name for name in found if not name.startswith("fedbcd.algorithm.fused._chain")
    }  # compiled, and loaded by ctypes
    assert found == {name for name in MODULES if name != "fedbcd"}
    for name in found:
        importlib.import_module(name)


# ------------------------------------------------------------------------------------------------
# rows
def test_imports_point_down_only() -> None:
    for name in MODULES:
        mine = _part(name)
        assert mine in ROWS, f"{name} is new: say in ROWS which row it belongs to"
        for target in imports_of(name):
            if target.split(".")[0] != "fedbcd":
                continue
            theirs = _part(target)
            if theirs == "" and target == "fedbcd":
                assert ROWS[mine] >= 6, f"{name} imports the public API, which is above it"
            elif theirs != mine:
                assert ROWS[theirs] < ROWS[mine] or (mine, theirs) in SIDEWAYS, (
                    f"{name} imports {target}, which is not below it"
                )


@pytest.mark.parametrize(("mine", "other"), [("cluster", "deploy"), ("deploy", "cluster")])
def test_engines_do_not_import_each_other(mine: str, other: str) -> None:
    for name in MODULES:
        if name.startswith(f"fedbcd.engines.{mine}"):
            seen = imports_of(name)
            assert not [n for n in seen if n.startswith(f"fedbcd.engines.{other}")], name


def test_the_core_imports_torch_numpy_scipy_and_the_standard_library_only() -> None:
    for name in (name for name in MODULES if name.startswith(PURE)):
        allowed = {"fedbcd", *sys.stdlib_module_names}
        if not name.startswith("fedbcd.protocol"):  # machines know no tensors
            allowed |= {"torch", "numpy", "scipy"}
        assert {target.split(".")[0] for target in imports_of(name)} <= allowed, name


def test_one_module_knows_the_format_of_tensors_and_one_the_names_of_files() -> None:
    known = {f'"{name}"' for key, name in vars(names).items() if key.isupper()}
    for name, path in MODULES.items():
        format_ = name == "fedbcd.record.tensorfile"
        assert format_ or not [n for n in imports_of(name) if n.startswith("safetensors")], name
        text = path.read_text(encoding="utf-8")
        assert name == names.__name__ or not [file for file in known if file in text], name


PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
EVALUATE = {"eval", "exec", "compile", "torch.load", "builtins.eval"}


def test_nothing_is_unpickled_or_evaluated() -> None:
    for name in MODULES:
        assert not {target.split(".")[0] for target in imports_of(name)} & PICKLES, name
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                call = ast.unparse(node.func)
                assert call not in EVALUATE, f"{name} line {node.lineno}: {call}"
                if call in ("np.load", "numpy.load"):
                    assert "allow_pickle=False" in ast.unparse(node), f"{name} line {node.lineno}"


# ------------------------------------------------------------------------------------------------
# what a run is
@pytest.fixture(scope="module")
def run() -> fb.Run:
    return train("fedbcd-async", rounds=5, evaluate_every=2)


def _inputs(run: fb.Run) -> torch.Tensor:
    test = run.federation.test
    assert test is not None
    return run.federation.transform(test.inputs[:7], torch.float32)


LAYERS = (LinearLayer(64, 12, 0, 768, True), LinearLayer(12, 10, 780, 900, False))


def _by_hand(run: fb.Run, flat: torch.Tensor) -> torch.Tensor:
    """The network 64-12-10, written out."""
    x = _inputs(run).flatten(1).to(flat.dtype)
    w1, b1, w2, b2 = torch.split(flat, [12 * 64, 12, 10 * 12, 10])
    return torch.relu(x @ w1.view(12, 64).T + b1) @ w2.view(10, 12).T + b2


def test_models_are_modules_that_give_the_outputs_of_the_stored_numbers(run: fb.Run) -> None:
    inputs = _inputs(run)
    pairs: list[tuple[nn.Module, torch.Tensor]] = [
        (run.global_model, run.global_VF.double().mean(0).float())
    ]
    pairs += [(run.personal_model(device), run.personal_NF[device]) for device in (0, 7, 15)]
    pairs += [(run.server_model(server), run.global_VF[server]) for server in range(4)]
    for module, flat in pairs:
        assert not module.training
        exact, bound = exact_outputs(LAYERS, flat, inputs)
        assert torch.allclose(
            exact,
            _by_hand(run, flat.double()),
            rtol=0,
            atol=ROUNDED_64 * float(exact.abs().max() + 1),
        )
        assert bool(((outputs(module, inputs) - exact).norm(dim=1) <= bound).all())


def test_a_model_is_a_copy_that_does_not_change_the_run(run: fb.Run) -> None:
    before = run.personal_NF.clone()
    module = run.personal_model(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(run.personal_NF, before)


def test_scores_are_the_accuracies_of_the_models(run: fb.Run) -> None:
    """Personal accuracy: the mean over a device's training samples of how good its model is on test
    images of their labels.
    """
    test = run.federation.test
    assert test is not None
    everything = run.federation.transform(test.inputs, torch.float32)
    for device in (0, 9):
        right = (outputs(run.personal_model(device), everything).argmax(1) == test.targets).double()
        own = run.federation.pool.targets[run.federation.owned(device)].tolist()
        score = np.mean([float(right[test.targets == label].mean()) for label in own])
        assert run.personal_scores[device] == pytest.approx(score, abs=1e-12)
    of_servers = torch.stack(
        [outputs(run.server_model(n), everything).argmax(1) == test.targets for n in range(4)]
    )
    assert run.history.last.global_accuracy == pytest.approx(
        float(of_servers.double().mean()), abs=1e-12
    )
    assert run.history.last.personal_accuracy == pytest.approx(
        np.mean(list(run.personal_scores.values())), abs=1e-12
    )


def test_a_run_survives_being_saved(run: fb.Run, tmp_path: Path) -> None:
    run.save(tmp_path / "new" / "folder")
    again = fb.Run.load(tmp_path / "new" / "folder", federation())
    assert torch.equal(again.personal_NF, run.personal_NF)
    assert torch.equal(again.global_VF, run.global_VF)
    assert again.history == run.history
    assert again.summary == run.summary
    assert again.personal_scores == run.personal_scores
    assert again.finished
    assert again.digest == run.digest


def test_what_training_leaves_in_its_folder_is_what_it_returns(tmp_path: Path) -> None:
    run = train("fedbcd-i-async", rounds=2, out=tmp_path)
    again = fb.Run.load(tmp_path, federation())
    assert torch.equal(again.personal_NF, run.personal_NF)
    assert again.history == run.history
    stopped = train("fedbcd-i-async", rounds=2, out=tmp_path / "stopped", should_stop=lambda: True)
    assert not stopped.finished
    assert not fb.Run.load(tmp_path / "stopped", federation()).finished


def test_a_saved_run_does_not_load_into_another_model(run: fb.Run, tmp_path: Path) -> None:
    run.save(tmp_path)
    with pytest.raises(
        RecordError,
        match=r"holds models of \(16, 910\) \(devices, values\); this federation has \(16, 650\)",
    ):
        fb.Run.load(tmp_path, federation(LOGISTIC))


def test_the_history_is_a_data_frame(run: fb.Run) -> None:
    frame = run.history.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert tuple(frame.columns) == columns_of(["accuracy", "loss"])
    assert frame["round"].tolist() == [0, 2, 4, 5]
    assert frame["clock"].is_monotonic_increasing
    assert frame["activations"].is_monotonic_increasing
    assert frame.iloc[-1]["global_accuracy"] == run.summary["global_accuracy"]


def test_progress_is_told_after_every_round() -> None:
    told: list[fb.Progress] = []
    run = train("fedbcd-sync", rounds=4, evaluate_every=2, on_round=told.append)
    assert [p.round for p in told] == [1, 2, 3, 4]
    assert [p.fraction for p in told] == [0.25, 0.5, 0.75, 1.0]
    assert [p.latest.round for p in told] == [0, 2, 2, 4]
    assert told[-1].clock == run.summary["clock"]


def test_the_summary_has_what_the_command_line_prints(run: fb.Run) -> None:
    names = (
        "algorithm",
        "cloud",
        "rounds",
        "clock",
        "global_accuracy",
        "personal_accuracy",
        "seconds",
        "digest",
    )
    assert set(run.summary) >= set(names)


def test_a_module_that_is_given_is_where_training_starts() -> None:
    module = MLP()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    data = federation()
    given = fb.Federation(module, data.loss, _samples(data), data.servers, transform=data.transform)
    run = fb.train(given, fb.FedBCD(device_step=1e-12, server_step=1e-12), rounds=1, active=1)
    flat = torch.cat([value.reshape(-1) for value in before.values()])
    assert float((run.global_VF[0] - flat).abs().max()) < 16 * U * float(
        flat.abs().max()
    )  # fifteen steps of nothing, and the sum
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def _samples(data: fb.Federation) -> list[Any]:
    return [
        (data.pool.inputs[places], data.pool.targets[places])
        for places in map(data.owned, range(data.devices))
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 0}, "rounds=0 must be 1 or more"),
        ({"rounds": None}, "give either rounds=... or until_clock=..."),
        ({"until_clock": 5.0}, "give either rounds=... or until_clock=..."),
        ({"active": 0}, "active=0 must be between 1 and 4"),
        ({"active": 5}, "active=5 must be between 1 and 4"),
        ({"max_batch": 0}, "max_batch=0 must be 1 or more"),
        ({"evaluate_every": 0}, "evaluate_every=0 must be 1 or more"),
        ({"dtype": torch.int64}, "must be a floating-point dtype"),
        ({"torch_device": "gpu"}, "torch_device='gpu' cannot be used here"),
    ],
)
def test_impossible_settings_are_value_errors_with_a_remedy(
    options: dict[str, Any], words: str
) -> None:
    settings: dict[str, Any] = {"rounds": 1, "active": 2, **options}
    with pytest.raises(ValueError, match=words.replace("...", r"\.\.\.")):
        fb.train(federation(), fb.FedBCD(), **settings)
