"""The functions of somebody's that a run calls: with what, and whether they can be."""

import inspect
from typing import Any

from fedbcd.errors import ConfigError

TAKES = {"on_round": ("progress",), "on_notice": ("sentence",), "should_stop": ()}


def check_listeners(**given: Any) -> None:
    """Refuse what cannot be called as it will be."""
    for name, function in given.items():
        takes = TAKES[name]
        example = f"lambda {', '.join(takes)}: ..." if takes else "lambda: False"
        if function is None:
            continue
        if isinstance(function, type):
            known = function.__name__
            raise ConfigError(f"{name} = {known} is a class; give a value of it, {known}(...)")
        if not callable(function):
            raise ConfigError(
                f"{name} = {function!r:.80} is no function; give one, such as {example}"
            )
        try:
            inspect.signature(function).bind(*takes)
        except TypeError as error:
            raise ConfigError(
                f"{name} cannot be called as it will be ({error}); let it be like {example}"
            ) from None
        except ValueError:  # written in C, so nobody knows
            continue
