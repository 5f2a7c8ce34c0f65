"""g_i and its mini-batch gradient, for any `nn.Module` and any differentiable loss; many devices at once or one at a time."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedbcd.algorithm.params import Layout

Loss = Callable[[Tensor, Tensor], Tensor]


class Gradients(NamedTuple):
    """Per device: the mean gradient over the mini-batch, the loss, and the buffers after the forward pass."""

    gradient_NP: Tensor
    loss_N: Tensor
    buffers_NB: Tensor


class Objective:
    """The loss of a module on a mini-batch as a function of flat parameter vectors."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        self.module = copy.deepcopy(module).train()
        self.loss = loss
        self.layout = Layout(module)
        self.stochastic = False  # draws random numbers in its forward pass (dropout)

    def to(self, device: torch.device) -> "Objective":
        """Move the module's own tensors (constants, counters) to a device."""
        self.module.to(device)
        self.layout.counters = {name: value.to(device) for name, value in self.layout.counters.items()}
        return self

    def gradients(self, params_NP: Tensor, buffers_NB: Tensor, inputs: Tensor, targets: Tensor) -> Gradients:
        """All devices in one vectorised call; inputs and targets have a leading axis of N devices, then R samples."""
        randomness = "different" if self.stochastic else "error"
        call = vmap(grad_and_value(self._loss, has_aux=True), randomness=randomness)
        params = self.layout.parameters_of(params_NP)
        gradient, (loss, buffers) = call(params, self.layout.buffers_of(buffers_NB), inputs, targets)
        return Gradients(
            self.layout.join(gradient, self.layout.parameters, params_NP),
            loss,
            self.layout.join(buffers, self.layout.buffers, buffers_NB),
        )

    def gradients_one_by_one(self, params_NP: Tensor, buffers_NB: Tensor, inputs: Tensor, targets: Tensor) -> Gradients:
        """The same, one device after another with ordinary autograd: works for every module, and no row depends on another."""
        rows = [self._gradient(*row) for row in zip(params_NP, buffers_NB, inputs, targets, strict=True)]
        return Gradients(*(torch.stack(column) for column in zip(*rows, strict=True)))

    def _gradient(self, params: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        params = params.detach().requires_grad_(True)
        with torch.enable_grad():
            loss, after = self._loss(self.layout.parameters_of(params), self.layout.buffers_of(buffers), inputs, targets)
            (gradient,) = torch.autograd.grad(loss, params)
        return gradient, loss.detach(), self.layout.join(after, self.layout.buffers, buffers).detach()

    def _loss(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        counters = {name: value.clone() for name, value in self.layout.counters.items()}
        state = {**params, **buffers, **counters}
        outputs = functional_call(self.module, state, (inputs,))  # writes buffers that the forward pass has changed back to `state`
        return self.loss(outputs, targets), {name: state[name] for name in buffers}

    def why_not_vectorised(self, flat: Tensor, inputs: Tensor, targets: Tensor) -> str | None:
        """Try a small vectorised gradient. None: it works (`stochastic` is set on the way). Otherwise: the reason, in a sentence."""
        p = self.layout.size_P
        stack = flat.expand(2, -1)
        sample = (stack[:, :p], stack[:, p:], inputs.expand(2, *inputs.shape), targets.expand(2, *targets.shape))
        reason = None
        for self.stochastic in (False, True):
            try:
                with torch.random.fork_rng(devices=[]):
                    self.gradients(*sample)
            except (RuntimeError, ValueError) as error:
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                continue
            return None
        self.stochastic = False
        return reason
