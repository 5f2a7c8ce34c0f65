"""Frozen values as plain data, for configuration files and event logs: {"name": "box", "low": -2.0,
"high": 2.0}.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fedbcd.own import is_own, path_of


def flat(table: Any, prefix: str = "") -> dict[str, Any]:
    """A nested table as one, in order, with dots in its keys."""
    if not isinstance(table, Mapping):
        return {prefix: table}
    rows: dict[str, Any] = {}
    for key, value in table.items():
        rows |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return rows


def describe(value: Any) -> Any:
    """Plain data (dictionaries, lists, numbers, strings) that says what a settings value is."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        if is_own(kind):
            name = {"name": path_of(kind)}
        else:
            name = {"name": value.name} if hasattr(value, "name") else {}
        return name | {
            f.name: describe(getattr(value, f.name))
            for f in fields(value)
            if not f.metadata.get("brief") or getattr(value, f.name) != f.default
        }
    if isinstance(value, list | tuple):
        return [describe(v) for v in value]
    return value
