"""The compiled library: found, loaded and called. A call sets the interpreter free, so threads
compute at the same time.

Shapes: N sessions, each of one device; P parameters, K steps, R samples of a mini-batch.
"""

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from fedbcd.algorithm.device import Contact
from fedbcd.algorithm.fused.chain import LinearLayer
from fedbcd.algorithm.projection import Box, NoProjection, Projection, ours

_BUILDS = {
    "AVX512": ("_chain_avx512", "_chain_avx2"),
    "AVX2": ("_chain_avx2",),
}  # by what torch has found the processor to know
PORTABLE = "_chain"
Bounds = tuple[float, float]
_Int, _Float, _Pointer = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


# The structures of chain.c.
class _CLayer(ctypes.Structure):
    _fields_ = [(name, _Int) for name in ("inputs", "outputs", "weight", "bias", "relu")]


class _Task(ctypes.Structure):
    _fields_ = [
        ("layers", _Pointer),
        *((name, _Int) for name in ("depth", "parameters", "samples")),
        *((name, _Pointer) for name in ("bytes", "number_of", "floats", "targets")),
        *((name, _Float) for name in ("step", "momentum", "low", "high")),
        ("contact", _Int),
    ]


class _CRows(ctypes.Structure):
    _fields_ = [("first", _Pointer), ("distance", _Int), ("rows", _Pointer)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("devices", _Int),
        ("steps", _Pointer),
        ("positions", _Pointer),
        ("most", _Int),
        *(
            (name, _CRows)
            for name in ("x", "prev", "z", "penalty", "new_x", "new_prev", "before", "after")
        ),
        ("losses", _Pointer),
        ("finite", _Pointer),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The build for this processor; None if there is none, or if FEDBCD_FUSED=0 asks to do
    without.
    """
    if os.environ.get("FEDBCD_FUSED") == "0":
        return None
    able = _BUILDS.get(torch.backends.cpu.get_cpu_capability(), ())
    return next((found for name in (*able, PORTABLE) if (found := load(name)) is not None), None)


def build_name() -> str:
    """Which build trains chains of linear layers here, for people; "no" if torch does."""
    found = library()
    return (
        "no"
        if found is None
        else Path(found._name).name.partition(".")[0].removeprefix("_chain").lstrip("_")
        or "portable"
    )


def load(build: str) -> ctypes.CDLL | None:
    """One build by its name, if it is there."""
    for path in Path(__file__).parent.glob(f"{build}.*"):
        try:
            found = ctypes.CDLL(str(path))
            if found.fedbcd_task_size() != ctypes.sizeof(_Task):
                continue
        except (OSError, AttributeError):  # of another processor, or of another version of chain.c
            continue
        found.fedbcd_scratch.restype = _Int
        found.fedbcd_train.restype = found.fedbcd_absorb.restype = found.fedbcd_outputs.restype = (
            None
        )
        return found
    return None


class SamplePool(NamedTuple):
    """Samples to train on: inputs as bytes, with the number that each of the 256 stands for, or as
    float32; targets are classes.
    """

    inputs: Tensor  # one sample after the other: uint8 or float32
    number_of: Tensor | None  # (256,) float32, for bytes
    targets: Tensor  # int64


class ChainSessions(NamedTuple):
    """K_i of each device, and where its mini-batches are; those without take steps of the penalty
    alone.
    """

    steps: list[int]
    pool: SamplePool | None = None
    positions_NKR: Tensor | None = None


class ModelRows(NamedTuple):
    """Where the models of some devices are, and where they are to be. All float32, no gaps within a
    row.
    """

    x: Tensor
    prev: Tensor
    new_x: Tensor  # may be x ...
    new_prev: Tensor  # ... and x_prev
    rows: Tensor | None = (
        None  # which rows of these four are theirs; None: the first, the second, ...
    )
    before: Tensor | None = None  # if given, x as it was ...
    after: Tensor | None = None  # ... and as it is then are copied there


class Outcome(NamedTuple):
    """What is known of sessions when they are over."""

    losses_NK: Tensor  # before each step; 0 where a device had no more
    finite: bool  # all losses and models are


class Together(Protocol):
    """Several threads, or one."""

    @property
    def count(self) -> int:
        """How many."""
        ...

    def map(self, function: Callable[..., None], /, *things: Iterable[object]) -> Iterable[None]:
        """As the built-in `map`."""
        ...


def bounds_of(projection: Projection) -> Bounds | None:
    """The box that is projected onto, if it is one."""
    match ours(projection):
        case NoProjection():
            return -math.inf, math.inf
        case Box(low, high):
            return low, high
    return None


class _OfChain:
    """What training and testing share."""

    def __init__(
        self, layers: tuple[LinearLayer, ...], parameters: int, compiled: ctypes.CDLL
    ) -> None:
        self.classes = layers[-1].outputs
        self._layers = (_CLayer * len(layers))(*(_CLayer(*layer) for layer in layers))
        self._parameters = parameters
        self._compiled = compiled
        self._own = threading.local()

    def _task(
        self,
        samples: int,
        pool: SamplePool | None = None,
        step: float = 0.0,
        momentum: float = 0.0,
        bounds: Bounds = (0.0, 0.0),
        contact: Contact = "kept",
    ) -> _Task:
        layers, place = ctypes.cast(self._layers, _Pointer), get_args(Contact).index(contact)
        return _Task(
            layers,
            len(self._layers),
            self._parameters,
            samples,
            *_places(pool),
            step,
            momentum,
            *bounds,
            place,
        )

    def _scratch(self, task: _Task) -> Tensor:
        """Memory of this thread; its layout depends on the number of samples, and what is between
        is expected to be 0.
        """
        known: tuple[int, Tensor] | None = getattr(self._own, "scratch", None)
        if known is None or known[0] != task.samples:
            known = self._own.scratch = (
                task.samples,
                torch.zeros(self._compiled.fedbcd_scratch(ctypes.byref(task))),
            )
        return known[1]


class ChainTester(_OfChain):
    """Outputs of models of one kind."""

    BLOCK = 32  # samples that go through the layers together

    def blocks_of(self, inputs: Tensor) -> Tensor:
        """Inputs as `outputs` takes them: (blocks, features, BLOCK); the last one is filled up."""
        flat = inputs.flatten(1)
        missing = -len(flat) % self.BLOCK
        return (
            torch.nn.functional.pad(flat, (0, 0, 0, missing))
            .reshape(-1, self.BLOCK, flat.shape[1])
            .transpose(1, 2)
            .contiguous()
        )

    def outputs(self, flat: Tensor, blocks: Tensor, chosen: Tensor) -> Tensor:
        """Of one model for these blocks: (chosen, BLOCK, classes)."""
        assert flat.dtype == blocks.dtype == torch.float32
        found, task = torch.empty(len(chosen), self.BLOCK, self.classes), self._task(self.BLOCK)
        given = [_Pointer(tensor.data_ptr()) for tensor in (flat.contiguous(), blocks, chosen)]
        scratch = _Pointer(self._scratch(task).data_ptr())
        self._compiled.fedbcd_outputs(
            ctypes.byref(task), *given, _Int(len(chosen)), _Pointer(found.data_ptr()), scratch
        )
        return found


class ChainTrainer(_OfChain):
    """Trains models of one kind."""

    def train(
        self,
        models: ModelRows,
        sessions: ChainSessions,
        anchor_NP: Tensor | None,
        penalty_N: Tensor,
        together: Together,
        *,
        step: float = 0.0,
        momentum: float = 0.0,
        bounds: Bounds,
        contact: Contact = "kept",
    ) -> Outcome:
        """Eq. (4) or the steps of the penalty, K_i times for each device."""
        n, positions = len(sessions.steps), sessions.positions_NKR
        most, samples = (0, 1) if positions is None else positions.shape[1:]
        steps_N, losses_NK, finite_N = (
            torch.tensor(sessions.steps),
            torch.zeros(n, most),
            torch.zeros(n, dtype=torch.bool),
        )
        given = (models.x, models.prev, anchor_NP, penalty_N, models.new_x, models.new_prev)
        of_their_own = (True, True, False, False, True, True)
        tables = [
            _table(tensor, models.rows if own else None)
            for tensor, own in zip(given, of_their_own, strict=True)
        ]
        tables += [_table(models.before, None), _table(models.after, None)]
        task = self._task(samples, sessions.pool, step, momentum, bounds, contact)
        batch = _Batch(
            n,
            steps_N.data_ptr(),
            _place(positions),
            most,
            *tables,
            losses_NK.data_ptr(),
            finite_N.data_ptr(),
        )
        taken = _Int(0)

        def take_part(_: object) -> None:
            scratch = _Pointer(self._scratch(task).data_ptr())
            self._compiled.fedbcd_train(
                ctypes.byref(task), ctypes.byref(batch), ctypes.byref(taken), scratch
            )

        for _ in together.map(take_part, range(together.count)):
            pass  # raises what a thread raised
        return Outcome(losses_NK, bool(finite_N.all()) and bool(losses_NK.isfinite().all()))

    def absorb(self, total: Tensor, weight: float, after: Tensor, before: Tensor | None) -> None:
        """As `cloud.absorb`, in one pass."""
        sum_, new, old = (_Pointer(_place(tensor)) for tensor in (total, after, before))
        self._compiled.fedbcd_absorb(sum_, ctypes.c_double(weight), new, old, _Int(len(total)))


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _places(pool: SamplePool | None) -> tuple[int | None, ...]:
    """Where bytes, their numbers, floats and targets begin."""
    if pool is None:
        return (None,) * 4
    inputs, targets = pool.inputs.data_ptr(), pool.targets.data_ptr()
    return (
        (None, None, inputs, targets)
        if pool.number_of is None
        else (inputs, pool.number_of.data_ptr(), None, targets)
    )


def _table(rows_NP: Tensor | None, chosen: Tensor | None) -> _CRows:
    if rows_NP is None:
        return _CRows(None, 0, None)
    assert rows_NP.dtype == torch.float32
    assert rows_NP.ndim == 1 or rows_NP.stride(1) == 1
    return _CRows(rows_NP.data_ptr(), rows_NP.stride(0), _place(chosen))
