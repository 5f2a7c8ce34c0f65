"""Kinds of other people: `package.module:Name` in place of a name that fedbcd knows.

A job file that a user names is trusted to import code. A record (a log, a run folder, a store) is
not, unless told: who opens somebody's results does not want to run somebody's programs.
"""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from fedbcd.errors import ConfigError, FedBCDError

_trusted: ContextVar[bool] = ContextVar("trusted", default=False)
_folder: ContextVar[str] = ContextVar("folder", default="")  # of the job file that is read


@contextmanager
def imports(allowed: bool, folder: str = "") -> Iterator[None]:
    """Whether what is read in here may import code, from this folder too; within an allowance
    everything may.
    """
    tokens = _trusted.set(_trusted.get() or allowed), _folder.set(folder or _folder.get())
    try:
        yield
    finally:
        _trusted.reset(tokens[0])
        _folder.reset(tokens[1])


@contextmanager
def calling(
    what: str, *about: object, remedy: str, kind: type[FedBCDError] = ConfigError
) -> Iterator[None]:
    """Code that somebody else has written: where it fails, a sentence says so, `what` formatted
    with the rest, and names the line of theirs.
    """
    try:
        yield
    except FedBCDError:
        raise
    except Exception as error:
        raise kind(f"{what.format(*about)} ({_failure(error)}); {remedy}") from error


def _failure(error: Exception) -> str:
    ours = ("fedbcd", "torch", "numpy", "contextlib")
    theirs = [
        f", {Path(frame.f_code.co_filename).name} line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ours
    ]
    reason = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {reason}{''.join(theirs[-1:])}"


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
        several = table.get("metrics", ())
        named = [str(table.get(key, "")) for key in ("name", "loss", "metric")]
        named += map(str, several if isinstance(several, list | tuple) else ())
        return any(":" in name for name in named) or any(map(names_code, table.values()))
    return isinstance(table, list | tuple) and any(map(names_code, table))


def are_imported() -> bool:
    """Whether what is read here may import code."""
    return _trusted.get()


def imported_object(path: str, where: str) -> Any:
    """What is at `package.module:Name`, which stands at the key `where`; modules are found as
    Python finds them, in the folder of the job file, and in the current one.
    """
    if not _trusted.get():
        raise ConfigError(
            f"{where} = {path!r} is code that a record names; if you trust who made it, say so"
            " (--trust, or trust=True)"
        )
    module, _, name = path.partition(":")
    places = [place for place in (_folder.get(), str(Path.cwd())) if place]
    sys.path.extend(place for place in places if place not in sys.path)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # noqa: BLE001  whatever their module does
        raise ConfigError(
            f"{where} = {path!r} cannot be imported ({error}); write package.module:Name, and"
            f" start where Python finds the module, or put it into {places[0]}"
        ) from None
    _check_place(module.partition(".")[0], f"{where} = {path!r}")
    return found


def _check_place(module: str, said: str) -> None:
    """Refuse another module than the one that lies beside the job file, or a copy of it."""
    loaded, folder = Path(getattr(sys.modules[module], "__file__", None) or ""), _folder.get()
    for meant in (Path(folder, f"{module}.py"), Path(folder, module, "__init__.py")):
        both = folder and loaded.is_file() and meant.is_file()
        if both and meant.read_bytes() != loaded.read_bytes():
            raise ConfigError(
                f"{said}: {meant} is hidden by another module of that name, {loaded}; give it"
                " another name"
            )


def imported_function(path: str, where: str, what: str) -> Callable[..., Any]:
    """The function there, or class; `what` it does."""
    found = imported_object(path, where)
    if not callable(found):
        raise ConfigError(
            f"{where} = {path!r} is not callable; name a function or class that {what}"
        )
    return found  # type: ignore[no-any-return]


def imported(path: str, where: str) -> type[Any]:
    """The frozen dataclass there."""
    found = imported_object(path, f"{where}.name")
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ConfigError(
            f"{where}.name = {path!r} must be a dataclass: its fields are what records say of it"
        )
    return found
