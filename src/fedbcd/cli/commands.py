"""How a function becomes a command: with the options that all have, and help that is shown as it is
written. (Rich would take brackets in it, such as those of [clock], for markup.)
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from typer.models import ParameterInfo

from fedbcd.cli.output import talk

Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing beside results and errors.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Say more: each new row of a run, traces of errors.")
]


def add_command(app: typer.Typer, name: str, command: Callable[..., None]) -> None:
    """Put a function into a program."""
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    hints |= {"quiet": Quiet, "verbose": Verbose}
    parameters = [
        *(
            each.replace(annotation=_shown(hints[each.name]))
            for each in signature.parameters.values()
        ),
        *(
            inspect.Parameter(
                each, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=hints[each]
            )
            for each in ("quiet", "verbose")
        ),
    ]

    @functools.wraps(command)
    def called(*, quiet: bool, verbose: bool, **given: Any) -> None:
        talk(quiet, verbose)
        command(**given)

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(name, help=escape(inspect.getdoc(command) or ""))(called)


def _shown(hint: Any) -> Any:
    """The same option, whose help is no markup."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, *about = get_args(hint)
    return Annotated[(kind, *map(_as_written, about))]


def _as_written(about: Any) -> Any:
    if not (isinstance(about, ParameterInfo) and about.help):
        return about
    shown = copy.copy(about)
    shown.help = escape(about.help)
    return shown
