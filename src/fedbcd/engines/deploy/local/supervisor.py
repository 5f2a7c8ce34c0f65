"""Child processes of one preloaded parent: forked, so that memory is shared; watched, and started
again when they crash.

The parent has one thread, always: only then is a fork safe. Nothing here may start another.
"""

import contextlib
import ctypes
import gc
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fedbcd.engines.deploy.processes.exit_codes import ExitCode
from fedbcd.protocol.messages import Actor

BACKOFF_S = (0.2, 10.0)  # before a crashed child starts again: the first pause, and the longest
STEADY_S = 30.0  # a child that has lived this long starts its backoff anew
PR_SET_PDEATHSIG = 1
LOG_BYTES = 10_000_000  # a longer log is kept under another name, and begun anew
ROTATE_EVERY_S = 5.0  # between two looks at their lengths


@dataclass
class Child:
    """One actor and the process that plays it."""

    actor: Actor
    pid: int | None = None
    started_at: float = 0.0
    crashes: int = 0  # since it was last steady
    restarts: int = 0  # in all
    due: float | None = None  # when to start it again
    code: int | None = None  # how it ended, once it has ended for good


class Supervisor:
    """All children of this process. `play(actor)` runs in the child and returns its exit code."""

    def __init__(self, play: Callable[[Actor], int], logs: Path) -> None:
        self._play = play
        self._logs = logs
        self.children: dict[Actor, Child] = {}
        self._rotated = time.monotonic()
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, actors: Iterable[Actor]) -> None:
        gc.collect()
        gc.freeze()  # the collector would touch, and so copy, every page that is shared
        for actor in actors:
            self.children[actor] = child = Child(actor)
            self._fork(child)

    def _fork(self, child: Child) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._run_child(child.actor)
        child.pid, child.started_at, child.due = pid, time.monotonic(), None

    def _run_child(self, actor: Actor) -> None:
        code = int(ExitCode.BUG)
        try:
            os.setpgid(0, 0)  # Ctrl-C is for the parent, which stops its children in order
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            log = os.open(
                self._logs / f"{actor.replace('/', '-')}.log",
                os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                0o644,
            )
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = self._play(actor)
        except BaseException:  # noqa: BLE001  a child must never return into the parent's code
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    # ---------------------------------------------------------------------------------------------
    # watching
    def look(self) -> list[Child]:
        """Take note of children that ended, start those again that are due; returns those that
        ended for good just now.
        """
        ended = []
        self._rotate()
        for child in self.children.values():
            if child.pid is not None and self._has_ended(child) and child.code is not None:
                ended.append(child)
            if child.due is not None and child.due <= time.monotonic():
                child.restarts += 1
                self._fork(child)
        return ended

    def _rotate(self) -> None:
        """Logs that have grown long are kept once, and begun anew; children only append."""
        now = time.monotonic()
        if now < self._rotated + ROTATE_EVERY_S:
            return
        self._rotated = now
        for log in self._logs.glob("*.log"):
            if log.stat().st_size > LOG_BYTES:
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                os.truncate(log, 0)

    def _has_ended(self, child: Child) -> bool:
        assert child.pid is not None
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid == 0:
            return False
        code = os.waitstatus_to_exitcode(status)
        child.pid = None
        if code == 0 or (code > 0 and _is_final(code)):
            child.code = code
            return True
        child.crashes = 1 if time.monotonic() - child.started_at > STEADY_S else child.crashes + 1
        first, longest = BACKOFF_S
        child.due = time.monotonic() + min(
            first * 2 ** (child.crashes - 1), longest
        ) * random.uniform(0.8, 1.2)
        return True

    @property
    def running(self) -> list[Child]:
        return [child for child in self.children.values() if child.pid is not None]

    @property
    def restarts(self) -> int:
        return sum(child.restarts for child in self.children.values())

    # ---------------------------------------------------------------------------------------------
    # stopping
    def stop(self, actors: Iterable[Actor], patience_s: float = 20.0) -> dict[Actor, int]:
        """SIGTERM, wait, and SIGKILL for those that do not listen; their exit codes."""
        chosen = [self.children[actor] for actor in actors]
        for child in chosen:
            child.due = None
            if child.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        for child in chosen:
            self._await(child, deadline)
        return {child.actor: child.code for child in chosen if child.code is not None}

    def _await(self, child: Child, deadline: float) -> None:
        while child.pid is not None:
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid != 0:
                child.code, child.pid = os.waitstatus_to_exitcode(status), None
            elif time.monotonic() > deadline:
                os.kill(child.pid, signal.SIGKILL)
                deadline += 1.0
            else:
                time.sleep(0.01)

    # ---------------------------------------------------------------------------------------------
    # memory
    def memory_bytes(self) -> int:
        """What this process and its children use together; a page that several share counts once
        (PSS).
        """
        return sum(
            pss_bytes(pid)
            for pid in (
                os.getpid(),
                *(child.pid for child in self.running if child.pid is not None),
            )
        )


def pss_bytes(pid: int) -> int:
    """The proportional set size of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _is_final(code: int) -> bool:
    return code in set(ExitCode) and ExitCode(code).is_final
