"""The figures of the house: how long functions, lists of parameters, classes and lines may be, who
may ask what kind of thing something is, and where a stranger finds a module's tests.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedbcd as fb

SOURCE = Path(inspect.getfile(fb)).parent
TESTS = Path(__file__).parent.parent
FILES = {
    path.relative_to(SOURCE).with_suffix("").as_posix(): path
    for path in sorted(SOURCE.rglob("*.py"))
    if not path.stem.endswith("_pb2")  # generated
}
COLUMNS, LINES, PARAMETERS, METHODS = 100, 40, 12, 20

# A protocol machine has a method for each event that it handles.
MACHINES = {"protocol/device:Device", "protocol/server:Server"}
# Commands have a parameter for each option, and `train` one for each option of a run.
WITH_OPTIONS = {"engines/run:train"}

# Settings of methods, players of rounds, and what computes sessions: who needs to know what one of
# them can do asks it (a property, a plan's value), not for its class.
KINDS = {"FedBCD", "FedBCDI", "FedAvg", "FedProx", "EventPlayer", "Ahead", "AheadWithEvents"}
KINDS |= {
    "StackedDevices",
    "RemoteDevices",
    "Interpreter",
    "Compiled",
    "ThreadWorkers",
    "OneWorker",
}
CHOOSERS = {"engines/run"}  # the one place that chooses

# The tests of a module are in `test_<module>*.py` or `test_<its folder>*.py`; of these elsewhere:
ELSEWHERE = {
    "addressed": "unit/test_draws.py",
    "compute/batch": "engines/test_workers.py",
    "compute/blocks": "unit/test_lazy.py",
    "compute/certify": "engines/test_certificates.py",
    "compute/contributions": "engines/test_membership.py",
    "compute/evaluate": "unit/test_measure.py",
    "compute/fit": "engines/test_mistakes.py",
    "compute/graphs": "engines/test_ahead.py",
    "compute/local_training": "engines/test_against_oracle.py",
    "compute/numbers": "engines/test_against_oracle.py",
    "compute/outputs": "unit/test_measure.py",
    "compute/players": "engines/test_rounds.py",
    "compute/rows": "engines/test_state_store.py",
    "compute/smoothness": "scenarios/test_check.py",
    "compute/steps": "engines/test_against_oracle.py",
    "compute/tally": "engines/test_membership.py",
    "deploy": "scenarios/test_own_processes.py",
    "describe": "unit/test_config.py",
    "engines/best": "engines/test_stopping.py",
    "engines/deploy/local/account": "deploy/test_pace.py",
    "engines/deploy/local/finish": "deploy/test_up.py",
    "engines/deploy/local/growing_log": "deploy/test_growing.py",
    "engines/deploy/local/log_order": "deploy/test_clocks.py",
    "engines/deploy/local/merged_log": "deploy/test_growing.py",
    "engines/deploy/local/status_client": "deploy/test_exits.py",
    "engines/environment": "unit/test_report.py",
    "engines/interrupts": "engines/test_stopping.py",
    "engines/joining": "scenarios/test_newcomers.py",
    "engines/listeners": "engines/test_mistakes.py",
    "engines/look": "engines/test_certificates.py",
    "engines/participation": "scenarios/test_check.py",
    "engines/progress": "engines/test_stopping.py",
    "engines/result": "engines/test_resume.py",
    "engines/run": "engines/test_against_oracle.py",
    "engines/saving": "engines/test_stopping.py",
    "engines/setup": "engines/test_storage.py",
    "engines/warnings": "engines/test_numerics_guard.py",
    "engines/watcher": "engines/test_certificates.py",
    "errors": "scenarios/test_bad_input.py",
    "schedule/changes": "engines/test_membership.py",
    "schedule/driver": "engines/test_rounds.py",
    "schedule/effort": "unit/test_measures.py",
    "schedule/events": "engines/test_rounds.py",
    "schedule/log": "engines/test_rounds.py",
    "schedule/mixing": "engines/test_own_kinds.py",
    "schedule/work": "engines/test_rounds.py",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes_of(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))))


def functions() -> Iterator[tuple[str, Function]]:
    for module in FILES:
        for node in nodes_of(module):
            if isinstance(node, Function):
                yield f"{module}:{node.name}", node


def lines_of(function: Function) -> int:
    """Of its body, without the docstring."""
    body = function.body[ast.get_docstring(function) is not None :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def parameters_of(function: Function) -> int:
    given = function.args
    return sum(
        one.arg not in ("self", "cls") for one in given.posonlyargs + given.args + given.kwonlyargs
    )


def test_no_function_is_longer_than_a_screen() -> None:
    long = {name: lines_of(node) for name, node in functions() if lines_of(node) > LINES}
    assert not long, f"more than {LINES} lines; take a part out that has a name of its own: {long}"


def test_no_function_takes_more_than_a_dozen_parameters() -> None:
    many = {
        name: parameters_of(node)
        for name, node in functions()
        if parameters_of(node) > PARAMETERS
        and name not in WITH_OPTIONS
        and not (name.startswith("cli/") and name.endswith("_command"))
    }
    assert not many, f"more than {PARAMETERS} parameters; some belong together as a value: {many}"


def test_no_class_does_more_than_one_thing() -> None:
    large = {}
    for module in FILES:
        for node in nodes_of(module):
            if isinstance(node, ast.ClassDef) and f"{module}:{node.name}" not in MACHINES:
                methods = sum(isinstance(part, Function) for part in node.body)
                if methods > METHODS:
                    large[f"{module}:{node.name}"] = methods
    assert not large, f"more than {METHODS} methods; what of it is a class of its own? {large}"


@pytest.mark.parametrize("folder", [SOURCE, TESTS], ids=["source", "tests"])
def test_lines_fit_a_hundred_columns(folder: Path) -> None:
    """But for a remark to a tool, which must stand in the line it is about."""
    remark = re.compile(r"  # (noqa|type: ignore|pragma)")
    wide = [
        f"{path.relative_to(folder)}:{number}"
        for path in sorted(folder.rglob("*.py"))
        if not path.stem.endswith("_pb2")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(remark.split(line)[0]) > COLUMNS
    ]
    assert not wide, f"wider than {COLUMNS} columns: {wide}"


def names_in(module: str) -> Iterator[str]:
    for node in nodes_of(module):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name


def test_letters_of_shapes_are_in_the_glossary_or_at_the_top_of_their_module() -> None:
    page = (TESTS.parent / "docs" / "glossary.md").read_text().partition("Shapes in names: ")[2]
    known = set(re.findall(r"\b([A-Z]) [a-z]", page))
    assert len(known) > 8
    stacked = re.compile(r"[a-z_]*[a-z]_([A-Z]{1,4}|[A-Z0-9]{2,4})")
    unsaid = {}
    for module in FILES:
        found = {m[1] for name in names_in(module) if (m := stacked.fullmatch(name))}
        letters = {letter for each in found for letter in each if letter.isalpha()} - known
        whole = nodes_of(module)[0]
        assert isinstance(whole, ast.Module)
        if letters and "hape" not in (ast.get_docstring(whole) or ""):
            unsaid[module] = sorted(letters)
    assert not unsaid, f"say at the top of the module what these letters are: {unsaid}"


def test_nobody_asks_for_the_class_of_a_method_a_player_or_a_backend() -> None:
    """An `assert` tells a type checker what the place that chooses has seen to."""
    asked = []
    for module in FILES.keys() - CHOOSERS:
        told = {id(node.test) for node in nodes_of(module) if isinstance(node, ast.Assert)}
        for node in nodes_of(module):
            if not (isinstance(node, ast.Call) and id(node) not in told):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
                kinds = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                asked += [f"{module}:{node.lineno} {name}" for name in sorted(kinds & KINDS)]
    assert not asked, f"ask for what it can do, by a property or its plan's value: {asked}"


@cache
def files_of_tests() -> tuple[Path, ...]:
    return tuple(TESTS.rglob("test_*.py"))


def guessed(module: str) -> list[Path]:
    """Where a stranger would look first."""
    *folders, name = module.split("/")
    words = {word.removesuffix("s") for word in (name, *folders)} | {f"{'_'.join(folders)}_{name}"}
    found = re.compile(rf"test_({'|'.join(map(re.escape, sorted(words)))})s?(_\w+)?\.py")
    return [path for path in files_of_tests() if found.fullmatch(path.name)]


def test_a_stranger_guesses_where_the_tests_of_a_module_are() -> None:
    for module in (name for name in FILES if "__" not in name):
        if module in ELSEWHERE:
            assert (TESTS / ELSEWHERE[module]).is_file(), module
            assert not guessed(module), f"{module} is found by its name; take it off the list"
        else:
            assert guessed(module), f"name a file of tests after {module}, or say where they are"


def test_the_version_is_the_same_everywhere() -> None:
    root = TESTS.parent
    places = {"pyproject.toml": 'version = "(.+)"', "CITATION.cff": "version: (.+)"}
    found = {
        name: re.search(f"^{what}$", (root / name).read_text(), re.MULTILINE)
        for name, what in places.items()
    }
    assert {match and match[1] for match in found.values()} == {fb.__version__}


def test_the_list_of_tests_elsewhere_is_of_modules_that_there_are() -> None:
    assert sorted(ELSEWHERE) == list(ELSEWHERE)
    assert ELSEWHERE.keys() <= FILES.keys()
