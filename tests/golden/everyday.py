"""The few cases of every `make test`, against digests that are written down for a version of torch
and a processor.

Where there are none for this machine, values are compared instead: numbers that are near where
models are near. The name of the processor is part of the key, since libraries for matrix products
choose by more than its vector width.
"""

import json
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from golden import tree
from golden.cases import Case, all_cases
from golden.outcome import apart, differences, plain, shadows

DIGESTS = Path(__file__).parent / "digests.json"
BOUNDS = {"float64": 1e-9, "float32": 1e-5}  # of numbers on another machine
COUNTED = (
    "global_accuracy",
    "personal_accuracy",
    "worst_decile",
)  # a sample that stands on the border counts on one side or the other
FEW = (
    "fedbcd/sync/one-by-one/float64",
    "fedbcd/async/events/float32",
    "fedbcd/rigorous/files/float64",
    "fedbcd/graph/one-by-one/float32",
    "fedbcd/async/ahead/float64",
    "fedbcd-twice/async/events/float64",
    "fedbcd-twice/graph/one-by-one/float64",
    "fedbcd-i-kept/sync/ahead/float64",
    "fedbcd-i-kept/async/events/float64",
    "fedbcd-i-pull/rigorous/one-by-one/float32",
    "fedbcd-i-restart/graph/events/float64",
    "fedavg/sync/events/float64",
    "fedprox/sync/one-by-one/float64",
    "fedbcd/async/chain/float32",
    "fedbcd-i-kept/rigorous/chain/float32",
    "fedprox/sync/chain/float32",
    "comes-and-goes: fedbcd/rigorous/events",
    "comes-and-goes: fedbcd-i-kept/async/events",
    "penalties: fedbcd/async/events",
    "buffers: fedbcd/async/events",
    "handed-over: fedbcd-i-kept/async/events",
)


def few() -> list[Case]:
    """The cases."""
    known = {case["name"]: case for case in all_cases()}
    return [known[name] for name in FEW]


def machine() -> str:
    """What digests depend on."""
    return (
        f"torch {torch.__version__.partition('+')[0]}, {torch.backends.cpu.get_cpu_capability()},"
        f" {_processor()}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def computed(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outcome of a case with the tree: digests, and values."""
    threads = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = tree.perform(case, Path(folder), None)
    finally:
        torch.set_num_threads(threads)
    exact = plain(found)
    digests = {
        "digest": exact["digest"],
        "models": {which: exact["models"][which] for which in ("x", "z")},
    }
    return digests, {"models": shadows(found["models"]), "history": found["history"]}


def is_compiled(case: Case) -> bool:
    """Whether the case is about compiled code, which may not be here."""
    return case["group"] == "compiled"


def wrong(case: Case, recorded: dict[str, Any], here: str) -> list[str]:
    """Where a case came to something else than was written down."""
    digests, found = computed(case)
    known = not (is_compiled(case) and tree.about()["compiled"] == "no")
    if known and (expected := recorded["digests"].get(here, {}).get(case["name"])) is not None:
        return list(differences(expected, digests))
    return list(_apart(recorded["values"][case["name"]], found, BOUNDS[case["train"]["dtype"]]))


def _apart(expected: dict[str, Any], found: dict[str, Any], bound: float) -> Iterator[str]:
    if len(expected["history"]) != len(found["history"]):
        yield f"the table has {len(found['history'])} rows, not {len(expected['history'])}"
        return
    yield from apart(expected["models"], found["models"], bound, "models")
    for number, (one, other) in enumerate(zip(expected["history"], found["history"], strict=True)):
        for key in one:
            few_samples = 0.1 if key in COUNTED and bound > 1e-9 else bound
            yield from apart(one[key], other.get(key), few_samples, f"history[{number}].{key}")


def read() -> dict[str, Any]:
    """What is written down."""
    found: dict[str, Any] = json.loads(DIGESTS.read_text())
    return found


def record() -> int:
    """Write down what the tree computes on this machine. Digests of other machines go if values
    have changed: they are of other code.
    """
    recorded = read() if DIGESTS.exists() else {"digests": {}, "values": {}}
    outcomes = {case["name"]: (case, *computed(case)) for case in few()}
    changed = [
        name
        for name, (case, _, found) in outcomes.items()
        if _is_other(recorded["values"].get(name), case, found)
    ]
    digests = {} if changed else recorded["digests"]
    uncompiled = tree.about()["compiled"] == "no"
    digests[machine()] = {
        name: exact
        for name, (case, exact, _) in outcomes.items()
        if not (uncompiled and is_compiled(case))
    }
    values = {
        name: found if name in changed else recorded["values"][name]
        for name, (_, _, found) in outcomes.items()
    }
    DIGESTS.write_text(_written({"digests": digests, "values": values}))
    print(
        f"{len(outcomes)} cases of {machine()} written to {DIGESTS}; other values than before:"
        f" {', '.join(changed) or 'none'}"
    )
    return 0


def _is_other(before: dict[str, Any] | None, case: Case, found: dict[str, Any]) -> bool:
    return before is None or any(
        _apart(before, json.loads(json.dumps(found)), BOUNDS[case["train"]["dtype"]])
    )


def _written(recorded: dict[str, Any]) -> str:
    """A line for each case, so that a difference shows which."""
    lines = [
        f"{json.dumps(part)}: {{\n{_lines(table)}\n}}"
        for part, table in recorded["digests"].items()
    ]
    digests = "{\n" + ",\n".join(lines) + "\n}"
    return f'{{"digests": {digests},\n"values": {{\n{_lines(recorded["values"])}\n}}}}\n'


def _lines(table: dict[str, Any]) -> str:
    return ",\n".join(
        f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}"
        for name, value in table.items()
    )
