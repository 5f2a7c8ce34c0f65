"""Work of fixed shape, recorded once as a CUDA graph and replayed, and compiled if that is asked
for; called as it is where there is no GPU.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedbcd.errors import ConfigError

# Kernels are chosen without trying some on the spot: bits that do not change from run to run, and
# no copies of all models to try them on.
INDUCTOR_OPTIONS = {"deterministic": True, "triton.autotune_pointwise": False}


class Compiler:
    """Fuses functions by torch.compile, if asked for; what cannot be compiled runs as it is."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._failed: set[Callable[..., Any]] = set()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled when it is first called."""
        if not self.wanted:
            return function
        known = torch._inductor.config.get_config_copy()
        options: dict[str, Any] = {
            name: on for name, on in INDUCTOR_OPTIONS.items() if name in known
        }
        compiled = torch.compile(function, dynamic=False, options=options)

        def call(*arguments: Any) -> Any:
            if function in self._failed:
                return function(*arguments)
            try:
                with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=64):
                    warnings.simplefilter("ignore")
                    return compiled(*arguments)
            except (
                torch._dynamo.exc.TorchDynamoException,
                torch._inductor.exc.InductorError,
            ) as error:
                self._failed.add(function)
                reason = str(error).strip().partition("\n")[0]
                warnings.warn(
                    f"{function.__name__.strip('_')} cannot be compiled and runs as it is"
                    f" ({reason})",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return function(*arguments)

        return call


class Program:
    """Work on tensors that stay where they are: recorded as a CUDA graph, or called as it is where
    there is no GPU.
    """

    WARM_UPS = 2

    def __init__(
        self, function: Callable[[Tensor], None], idle: Tensor, changes: tuple[Tensor, ...]
    ) -> None:
        """`idle` is an input that changes no model; what else the function changes is put back
        after trying it.
        """
        self._function = function
        self._given = idle
        self._graph: torch.cuda.CUDAGraph | None = None
        if idle.is_cuda:
            saved = [tensor.clone() for tensor in changes]
            self._record()
            for tensor, value in zip(changes, saved, strict=True):
                tensor.copy_(value)

    def _record(self) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(self.WARM_UPS):
                    self._function(self._given)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._function(self._given)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"this run cannot be recorded for the GPU ({reason}); set ahead=False to play it"
                " event by event"
            ) from error
        self._graph = graph

    def run(self, given: Tensor) -> None:
        """Do it for this input."""
        if self._graph is None:
            self._function(given.to(self._given.device))
            return
        self._given.copy_(
            given.pin_memory(), non_blocking=True
        )  # otherwise the copy would wait for the work before it
        self._graph.replay()
