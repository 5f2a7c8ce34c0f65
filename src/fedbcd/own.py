"""Kinds of other people: `package.module:Name` in place of a name that fedbcd knows.

A job file that a user names is trusted to import code. A record (a log, a run folder, a store) is
not, unless told: who opens somebody's results does not want to run somebody's programs.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from fedbcd.errors import ConfigError

_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def imports(allowed: bool) -> Iterator[None]:
    """Whether what is read in here may import code; within an allowance everything may."""
    token = _trusted.set(_trusted.get() or allowed)
    try:
        yield
    finally:
        _trusted.reset(token)


def path_of(kind: type) -> str:
    """By which name it is imported again."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_own(kind: type) -> bool:
    """Whether it is somebody else's."""
    return kind.__module__.partition(".")[0] != "fedbcd"


def modules_of(value: Any) -> set[str]:
    """Where the kinds of other people come from in a settings value, and in its fields."""
    if isinstance(value, tuple):
        return set().union(*map(modules_of, value))
    if not is_dataclass(value) or isinstance(value, type):
        return set()
    own = {type(value).__module__} if is_own(type(value)) else set()
    return own.union(*(modules_of(getattr(value, f.name)) for f in fields(value)))


def names_code(table: object) -> bool:
    """Whether a job or a record names something as `package.module:Name`."""
    if isinstance(table, Mapping):
        return ":" in str(table.get("name", "")) or any(map(names_code, table.values()))
    return isinstance(table, list | tuple) and any(map(names_code, table))


def are_imported() -> bool:
    """Whether what is read here may import code."""
    return _trusted.get()


def imported_object(path: str, where: str) -> Any:
    """What is at `package.module:Name`; modules are found as Python finds them, and in the current
    folder.
    """
    if not _trusted.get():
        raise ConfigError(
            f"{where}.name = {path!r} is code that a record names; if you trust who made it, say so"
            " (--trust, or trust=True)"
        )
    module, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # noqa: BLE001  whatever their module does
        raise ConfigError(
            f"{where}.name = {path!r} cannot be imported ({error}); write package.module:Name, and"
            f" start where Python finds the module, or put it into {here}"
        ) from None
    return found


def imported(path: str, where: str) -> type[Any]:
    """The frozen dataclass there."""
    found = imported_object(path, where)
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ConfigError(
            f"{where}.name = {path!r} must be a dataclass: its fields are what records say of it"
        )
    return found
