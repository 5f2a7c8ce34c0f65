"""g_i and its mini-batch gradient, for any `nn.Module` and any differentiable loss; many devices at
once or one at a time.

Shapes: N devices, P parameters, B values of buffers.
"""

import copy
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from fedbcd.algorithm.fused.chain import LinearLayer, chain_of
from fedbcd.algorithm.params import Layout
from fedbcd.algorithm.traced import Operations, trace
from fedbcd.algorithm.trees import Tree, called, mapped, module_loss, scores_of, with_labels

Loss = Callable[[Any, Tensor], Tensor]
Shapes = tuple[torch.Size | torch.dtype, ...]


class Gradients(NamedTuple):
    """Per device: the mean gradient over the mini-batch, the loss, and the buffers after the
    forward pass.
    """

    # the gradient in pieces of columns, as they came out of the backward pass: (N, some of P) each
    parts: tuple[Tensor, ...]
    loss_N: Tensor
    buffers_NB: Tensor

    @property
    def gradient_NP(self) -> Tensor:
        """The pieces side by side."""
        return torch.cat(self.parts, dim=1)


class Objective:
    """The loss of a module on a mini-batch as a function of flat parameter vectors. Threads may
    share one.
    """

    # calls with one set of shapes; a trace takes 0.1 s and saves 1 ms a call, so fewer are not
    # worth one
    TRACE_AFTER = 100
    MOST_TRACES = 64
    # a batch is padded by models of at most this number of parameters in all, so that its size, and
    # with it a trace, comes up again: they cost little beside the call
    PADDING_PARAMETERS = 50_000

    def __init__(
        self, module: nn.Module, loss: Loss, arithmetic: torch.dtype | None = None
    ) -> None:
        """`arithmetic` is what the module computes in, if not in the dtype of its parameters;
        losses and steps are not affected.
        """
        self.arithmetic = arithmetic
        self.module = copy.deepcopy(module).train()
        self.to_test = _sharing_parameters(
            self.module
        ).eval()  # computes in its own dtype, whatever `arithmetic` is
        self.loss = loss
        self.of_scores = takes_scores(loss)
        self.layout = Layout(module)
        self.stochastic = False  # draws random numbers in its forward pass (dropout)
        self.traceable = True
        self._own = (
            threading.local()
        )  # a copy of the module per thread: `functional_call` writes into it for a moment
        self._multiple = max(1, min(8, self.PADDING_PARAMETERS // self.layout.size_P))
        self._seen: Counter[Shapes] = Counter()
        self._traces: dict[Shapes, Operations] = {}
        self._exact = (
            _keep_statistics_exact(self.module, arithmetic)
            if arithmetic is not None
            else frozenset()
        )

    def to(self, device: torch.device) -> "Objective":
        """Move the module's own tensors (constants, counters) to a device."""
        self.module.to(device)
        self.to_test.to(device)
        self.layout.counters = {
            name: value.to(device) for name, value in self.layout.counters.items()
        }
        return self

    def gradients(
        self, params_NP: Tensor, buffers_NB: Tensor, inputs: Tree, targets: Tensor
    ) -> Gradients:
        """All devices in one vectorised call; inputs and targets have a leading axis of N devices,
        then R samples.
        """
        devices = len(params_NP)
        missing = 0 if self.stochastic else -devices % self._multiple
        if missing:
            params_NP, buffers_NB, inputs, targets = (
                mapped(lambda t: _filled(t, missing), tree)
                for tree in (params_NP, buffers_NB, inputs, targets)
            )
        call = self._worthwhile(params_NP, buffers_NB, inputs, targets) or self._vectorised
        *parts, loss, buffers = call(params_NP, buffers_NB, inputs, targets)
        if missing:
            return Gradients(
                tuple(part[:devices] for part in parts), loss[:devices], buffers[:devices]
            )
        return Gradients(tuple(parts), loss, buffers)

    def _vectorised(
        self, params_NP: Tensor, buffers_NB: Tensor, inputs: Tree, targets: Tensor
    ) -> tuple[Tensor, ...]:
        randomness = "different" if self.stochastic else "error"
        call = vmap(grad_and_value(self._loss, has_aux=True), randomness=randomness)
        gradient, (loss, buffers) = call(
            self.layout.parameters_of(params_NP),
            self.layout.buffers_of(buffers_NB),
            inputs,
            targets,
        )
        parts = (
            gradient[slot.name].flatten(1) if slot.shape else gradient[slot.name][:, None]
            for slot in self.layout.parameters
        )
        return (*parts, loss, self.layout.join(buffers, self.layout.buffers, buffers_NB))

    def _worthwhile(self, *tensors: Tensor) -> Operations | None:
        """A trace for tensors of these shapes, once it pays; it gives the same bits, so when it
        comes in does not matter. Inputs that are several tensors have none.
        """
        if not isinstance(tensors[2], Tensor):
            return None
        shapes = _shapes(tensors)
        known = self._traces.get(shapes)
        if known is not None or self.stochastic or not self.traceable:
            return known
        self._seen[shapes] += 1
        if self._seen[shapes] <= self.TRACE_AFTER or len(self._traces) >= self.MOST_TRACES:
            return None
        return self._trace(shapes, tensors)

    def operations(self, *tensors: Tensor) -> Operations:
        """`gradients` for tensors of these shapes: a trace if the module can be traced, otherwise
        the vectorised call.
        """
        shapes = _shapes(tensors)
        known = self._traces.get(shapes)
        if known is None and self.traceable and not self.stochastic:
            known = self._trace(shapes, tensors)
        return known or self._vectorised

    def _trace(self, shapes: Shapes, tensors: tuple[Tensor, ...]) -> Operations | None:
        before = _generators()
        try:
            halve = tensors[0].is_cuda and torch.get_float32_matmul_precision() == "highest"
            operations = trace(self._vectorised, tensors, halve)
        except Exception:  # noqa: BLE001 - whatever a user's module does to a tracer, it still works without
            self.traceable = False
            return None
        if _generators() != before or not self._agrees(
            operations, *tensors
        ):  # what it drew would be frozen
            self.traceable = False
            return None
        self._traces[shapes] = operations
        return operations

    def _agrees(
        self,
        operations: Operations,
        params_NP: Tensor,
        buffers_NB: Tensor,
        inputs: Tensor,
        targets: Tensor,
    ) -> bool:
        """Whether a trace gives the same bits on other data than those it was made with; on a GPU,
        where sums may vary, nearly.
        """
        other = (params_NP, buffers_NB, inputs.flip(1), targets)
        same = torch.equal if not inputs.is_cuda else _nearly
        return all(
            same(a, b) for a, b in zip(operations(*other), self._vectorised(*other), strict=True)
        )

    def gradients_one_by_one(
        self, params_NP: Tensor, buffers_NB: Tensor, inputs: Tree, targets: Tensor
    ) -> Gradients:
        """The same, one device after another with ordinary autograd: works for every module, and no
        row depends on another.
        """
        rows = [
            self._gradient(params_NP[k], buffers_NB[k], row_of(inputs, k), targets[k])
            for k in range(len(params_NP))
        ]
        gradient, loss, buffers = (torch.stack(column) for column in zip(*rows, strict=True))
        return Gradients((gradient,), loss, buffers)

    def _gradient(
        self, params: Tensor, buffers: Tensor, inputs: Tree, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        params = params.detach().requires_grad_(True)
        with torch.enable_grad():
            loss, after = self._loss(
                self.layout.parameters_of(params), self.layout.buffers_of(buffers), inputs, targets
            )
            (gradient,) = torch.autograd.grad(loss, params)
        return (
            gradient,
            loss.detach(),
            self.layout.join(after, self.layout.buffers, buffers).detach(),
        )

    def _loss(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tree, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, state = self.outputs(params, buffers, inputs, targets)
        return self.loss(outputs, targets), {name: state[name] for name in buffers}

    def outputs(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tree, targets: Tensor
    ) -> tuple[Any, dict[str, Tensor]]:
        """Of the module with these tensors in it, and all its tensors afterwards."""
        counters = {name: value.clone() for name, value in self.layout.counters.items()}
        dtype = self.arithmetic
        if dtype is not None:
            params = {
                name: value if name in self._exact else value.to(dtype)
                for name, value in params.items()
            }
            inputs = mapped(lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
        state = {**params, **buffers, **counters}
        # writes buffers that the forward pass has changed back to `state`
        return self.taken(self._module(), state, inputs, targets), state

    def taken(
        self, module: nn.Module, state: dict[str, Tensor], inputs: Tree, targets: Tensor
    ) -> Any:
        """What the module returns with these tensors, as the loss takes it."""
        if self.loss is module_loss:
            inputs = with_labels(inputs, targets)
        outputs = called(module, state, inputs)
        outputs = scores_of(outputs) if self.of_scores else outputs
        exact = self.arithmetic is not None and isinstance(outputs, Tensor)
        return outputs.float() if exact else outputs

    def _module(self) -> nn.Module:
        if not hasattr(self._own, "module"):
            main = threading.current_thread() is threading.main_thread()
            self._own.module = self.module if main else _sharing_parameters(self.module)
        module: nn.Module = self._own.module
        return module

    def chain(
        self, flat: Tensor, inputs: Tensor, targets: Tensor, testing: bool = False
    ) -> tuple[LinearLayer, ...] | None:
        """The layers, if module and loss are a chain of them (`fused/chain.py`); flat, inputs and
        targets are an example.
        """
        module = self.to_test if testing else self.module
        if (
            self.layout.buffers
            or self.layout.counters
            or (self.arithmetic is not None and not testing)
        ):
            return None
        names = [slot.name for slot in self.layout.parameters]

        def loss(parameters: tuple[Tensor, ...], inputs: Tensor, targets: Tensor) -> Tensor:
            state = dict(zip(names, parameters, strict=True))
            return self.loss(self.taken(module, state, inputs, targets), targets)

        return chain_of(loss, self.layout.parameters, flat, inputs, targets)

    def why_not_vectorised(self, flat: Tensor, inputs: Tree, targets: Tensor) -> str | None:
        """Try a small vectorised gradient. None: it works (`stochastic` is set on the way).
        Otherwise: the reason, in a sentence.
        """
        p = self.layout.size_P
        stack = flat.expand(2, -1)
        sample = (
            stack[:, :p],
            stack[:, p:],
            mapped(lambda t: t.expand(2, *t.shape), inputs),
            targets.expand(2, *targets.shape),
        )
        reason = None
        for self.stochastic in (False, True):
            try:
                with torch.random.fork_rng(devices=[]):
                    self._vectorised(*sample)
            except (RuntimeError, ValueError) as error:
                reason = (
                    str(error).strip().splitlines()[0]
                    if str(error).strip()
                    else type(error).__name__
                )
                continue
            return None
        self.stochastic = False
        return reason


def takes_scores(loss: Loss) -> bool:
    """Whether a loss is given the scores: torch's own and those of this package, as they know
    nothing else. Others get what the module returns, as it is.
    """
    loss = getattr(loss, "func", loss)  # of a partial
    where = getattr(loss, "__module__", None) or type(loss).__module__
    return loss is not module_loss and where.partition(".")[0] in ("torch", "fedbcd")


def _sharing_parameters(module: nn.Module) -> nn.Module:
    """A copy with the same parameters, whose own values nobody reads: `functional_call` brings
    others.
    """
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


def _keep_statistics_exact(module: nn.Module, arithmetic: torch.dtype) -> frozenset[str]:
    """Let layers with running statistics (BatchNorm) compute in the dtype of their parameters;
    returns the names of those.
    """
    found: set[str] = set()
    for prefix, layer in module.named_modules():
        if any(True for _ in layer.buffers(recurse=False)):
            layer.register_forward_pre_hook(
                lambda _, inputs: tuple(value.float() for value in inputs)
            )
            layer.register_forward_hook(lambda _, __, outputs: outputs.to(arithmetic))
            found |= {f"{prefix}.{name}" for name, _ in layer.named_parameters(recurse=False)}
    return frozenset(found)


def _filled(rows: Tensor, missing: int) -> Tensor:
    """With copies of the first row at its end."""
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])])


def row_of(inputs: Tree, row: int) -> Tree:
    return mapped(lambda t: t[row], inputs)


def _nearly(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= 1e-2 * b.norm())


def _shapes(tensors: tuple[Tensor, ...]) -> Shapes:
    return (tensors[0].dtype, *(tensor.shape for tensor in tensors))


def _generators() -> tuple[object, ...]:
    """The states of the generators that a forward pass may draw from, for comparison."""
    name, key, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one is what a module would use
    return (
        random.getstate(),
        name,
        np.asarray(key).tobytes(),
        rest,
        torch.random.get_rng_state().numpy().tobytes(),
    )
