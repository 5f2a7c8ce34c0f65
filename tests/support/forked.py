"""Programs in processes of their own that need not load torch: they are forked from one that has.

A `Forked` is a `Popen` in all that a test can see: a child of this process, with its own memory,
files, signals and exit status. Only how an interpreter starts is left out, so what is about that
starts one (`tests/scenarios/test_cli.py`, `tests/deploy/test_exits.py`).
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
CLI = "fedbcd"
# What commands load themselves, sooner or later.
DEPLOY = ("local.finish", "local.growing_log", "local.up", "links.operator_client")
DEPLOY += ("processes.coordinator", "processes.device", "processes.server")
LOADED = (
    "fedbcd.cli",
    *(f"fedbcd.engines.deploy.{name}" for name in DEPLOY),
    "torch._dynamo",
    "torch._inductor.config",
)


class Forked(subprocess.Popen[str]):
    """A module as the main program: `[module, *arguments]`.

    Where processes cannot be handed over from one parent to another, in a fresh interpreter.
    """

    def __init__(self, words: list[str], strict: bool = False, **how: Any) -> None:
        """`strict`: its warnings are errors."""
        self._strict = strict
        self._is_handed_over = sys.platform == "linux"
        warned = ("-W", "error") if strict else ()
        start = () if self._is_handed_over else (sys.executable, *warned, "-m")
        super().__init__([*start, *words], text=True, **how)

    def _execute_child(self, args: list[str], executable: Any, *how: Any) -> None:
        """What a Popen does once it has made the pipes."""
        if not self._is_handed_over:
            super()._execute_child(args, executable, *how)  # type: ignore[misc]
            return
        cwd, env, pipes = how[3], how[4], how[8:14]
        out, err = pipes[3], pipes[5]
        asked = {
            "words": args,
            "strict": self._strict,
            "session": how[19],
            "folder": str(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
        }
        try:
            self.pid = _fork(asked, [1 if out == -1 else out, 2 if err == -1 else err])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _fork(asked: dict[str, Any], files: list[int]) -> int:
    """A process that does this; it becomes a child of this one, as its own parent has ended."""
    line = json.dumps(asked).encode()
    control = _source()
    with _adopting():
        socket.send_fds(control, [len(line).to_bytes(4, "big")], files)
        control.sendall(line)
        found = control.recv(5, socket.MSG_WAITALL)
    if len(found) != 5:
        raise RuntimeError(
            "the process that others are forked from has ended; try tests/support/forked.py 0"
        )
    return int.from_bytes(found[:4], "big")


@contextmanager
def _adopting() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@cache
def _source() -> socket.socket:
    """The way to the process that has loaded everything; it ends with this one."""
    here, there = socket.socketpair()
    with there:
        source = subprocess.Popen(
            [sys.executable, "-P", __file__, str(there.fileno())],
            pass_fds=[there.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def stop() -> None:
        here.close()
        source.wait()

    atexit.register(stop)
    return here


# ------------------------------------------------------------------ the process that is forked from
def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for whoever asks. In what was forked: what it is to do; None when nobody asks."""
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that is shared
    while True:
        length, files, _, _ = socket.recv_fds(control, 4, 2)
        if not length:
            return None
        line = control.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
        between = os.fork()
        if between == 0:
            if own := os.fork():
                control.sendall(own.to_bytes(4, "big"))
                os._exit(0)
            for file, number in zip(files, (1, 2), strict=True):
                os.dup2(file, number)
            asked: dict[str, Any] = json.loads(line)
            break
        os.waitpid(between, 0)
        control.sendall(b".")  # now it belongs to who has asked
        for file in files:
            os.close(file)
    control.close()
    for file in files:
        os.close(file)
    return asked


def _be(asked: dict[str, Any]) -> None:
    """What a fresh interpreter would do with these words."""
    module, *arguments = asked["words"]
    if asked["session"]:
        os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[0:0] = filter(None, ["", *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    if asked["strict"]:
        warnings.simplefilter("error")
    sys.argv = [module, *arguments]
    if module == CLI:  # it has been imported
        import_module("fedbcd.cli").main()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _main() -> None:
    for name in LOADED:
        import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "threads are not forked"
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        _be(asked)


if __name__ == "__main__":
    _main()
