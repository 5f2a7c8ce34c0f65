"""What a job file can name: `fedbcd algorithms` with clouds, and `fedbcd models` with data sets."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from fedbcd.algorithm.methods import ALGORITHMS, STEPS
from fedbcd.cli.output import Grid, say, show, table_of
from fedbcd.config import nearest
from fedbcd.data.datasets import DATASETS
from fedbcd.describe import describe
from fedbcd.errors import ConfigError
from fedbcd.models import MODELS
from fedbcd.protocol.clouds import CLOUDS

Kinds = Mapping[str, Callable[..., Any]]
# What a setting is, in all kinds that have it.
MEANING = {
    "device_step": "eta_x, the length of a device's step",
    "batch": 'R, samples in a mini-batch; "all" takes exact gradients',
    "steps": "K_i, how many mini-batch steps: a number, or a range to draw from",
    "epochs": "in place of steps: passes over the device's data",
    "projection": "the set X that weights are kept in: none, box, ball, simplex, tensor-boxes",
    "penalty": "gamma_i, the pull between x_i and z: one for all, or one per device",
    "momentum": "zeta, of the extrapolation before a step",
    "weight_decay": "adds weight_decay/2 ||x||^2 to what a device minimises",
    "schedule": "of device_step, by a device's sessions: stairs, cosine",
    "optimizer": "of device steps: sgd, adam; left out, ASPG",
    "server_step": "eta_z, how far z goes towards its devices' mean",
    "server_step_form": '"relative": 1 is the mean; "absolute": the printed form',
    "cloud_iterations": "K_z, server steps in a phase",
    "available": "how many of a server's members can take part (0.8 of them)",
    "offline_limit": "offline rounds in a row without contact",
    "offline_time": '"timed": offline rounds take the time of their steps; "free": none',
    "pull_steps": "penalty steps of a contact (as many as in the latest offline round)",
    "momentum_after_contact": 'x - x_prev after a contact: "kept", "pull" or "restart"',
    "weight": 'of a device in the average: its number of samples ("size"), or "one"',
    "tuning_steps": "mini-batch steps from z, before a model is tested",
    "tuning_step": "their length (as in training)",
    "first": "B, how many servers to finish first are mixed",
    "mixing": "a_nm: a matrix whose rows and columns sum to one, or several in turn",
    "edges": "links, pairs of servers; or several lists of them, in turn",
    "link_failure": "the probability with which a link fails in a round",
    "seed": "of the links that fail",
    "inputs": "values of a sample, as the data have",
    "classes": "outputs, as the data have",
    "hidden": "widths of the hidden layers",
    "norm": 'normalisation: "batch" or "group"',
}


def names_of(*kinds: Iterable[str]) -> Callable[[str], list[str]]:
    """What a shell completes a word to."""

    def complete(incomplete: str) -> list[str]:
        return [name for each in kinds for name in each if name.startswith(incomplete)]

    return complete


def algorithms_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Only this algorithm or cloud.", autocompletion=names_of(ALGORITHMS, CLOUDS)
        ),
    ] = None,
) -> None:
    """List the algorithms and clouds that a job file can name, with their settings."""
    _list({"algorithm": ALGORITHMS, "cloud": CLOUDS}, name)
    say('Of your own: name = "package.module:Name" (docs/api.md).', Console())


def models_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Only this model or data set.", autocompletion=names_of(MODELS, DATASETS)
        ),
    ] = None,
) -> None:
    """List the networks and data sets that a job file can name."""
    _list({"model": MODELS, "data set": DATASETS}, name)
    say('A model of your own: name = "package.module:factory".', Console())


def _list(registries: Mapping[str, Kinds], name: str | None) -> None:
    known = [each for kinds in registries.values() for each in kinds]
    if name is not None and name not in known:
        raise ConfigError(
            f"there is no {name!r}{nearest(name, known)}; there are: {', '.join(known)}"
        )
    for title, registry in registries.items():
        kinds = {key: kind for key, kind in registry.items() if name in (None, key)}
        if not kinds:
            continue
        table = table_of(title, "what it is", words=(title, "what it is"), plain=True)
        for key, kind in kinds.items():
            table.add_row(key, _headline(kind))
        show(table, Console())
        if (settings := _settings_table(kinds)).row_count:
            show(settings, Console())


def _settings_table(kinds: Kinds) -> Grid:
    """Each setting once, with its default; where kinds differ in that, with all of theirs."""
    names = ("setting", "default", "what it is")
    table = table_of(*names, words=names)
    found: dict[str, dict[str, str]] = {}
    for key, kind in kinds.items():
        for setting, default in _settings_of(kind):
            found.setdefault(setting, {})[key] = default
    for setting, defaults in found.items():
        common = max(defaults.values(), key=[*defaults.values()].count)
        others = [f"{key} {value}" for key, value in defaults.items() if value != common]
        shown = common + (f" ({', '.join(others)})" if others else "")
        only = "" if len(defaults) == len(kinds) else f" [{', '.join(defaults)}]"
        table.add_row(setting, shown, MEANING[setting] + only)
    return table


def _settings_of(kind: Callable[..., Any]) -> Iterable[tuple[str, str]]:
    """Names and defaults, of a settings value or of a function with settings."""
    if is_dataclass(kind):
        return [(each.name, _default(each)) for each in fields(kind) if each.init]
    given = inspect.signature(kind).parameters.values()
    return [(each.name, _plain(each.default)) for each in given if each.name in MEANING]


def _default(each: Field[Any]) -> str:
    if each.name == "steps":
        return _plain(STEPS)
    made = each.default_factory() if callable(each.default_factory) else each.default
    return _plain(made)


def _plain(value: Any) -> str:
    if value is MISSING or value is inspect.Parameter.empty:
        return "needed"
    plain = describe(value)
    if isinstance(plain, dict):
        plain = plain["name"]
    return "-" if plain is None else str([*plain] if isinstance(plain, tuple) else plain)


def _headline(thing: Any) -> str:
    """The first sentence of what its docstring says, over as many lines as it takes."""
    words = " ".join((thing.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<!Eq)\. ", words)[0].rstrip(".")
