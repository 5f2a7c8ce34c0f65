"""Ctrl-C, politely: the first one ends a run after its present round, the second one at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_interrupt(
    say: Callable[[str], None], *, whoever: bool = False
) -> Iterator[Callable[[], bool]]:
    """Whether somebody has asked to stop. Only Python's own answer to Ctrl-C is replaced: a program
    around this one that has another keeps it, unless the answer is to be replaced `whoever` gave
    it.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.default_int_handler(number, frame)
        asked = True
        say("stopping after this round ...")

    before = signal.getsignal(signal.SIGINT)
    on_main = threading.current_thread() is threading.main_thread()
    if not (on_main and (whoever or before is signal.default_int_handler)):
        yield lambda: False
        return
    signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
