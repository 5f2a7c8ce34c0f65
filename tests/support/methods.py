"""Methods in tests: what an algorithm computes, and one of its sessions by itself."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import fedbcd as fb
from fedbcd.algorithm.device import Iterates
from fedbcd.algorithm.interpret import Interpreter
from fedbcd.algorithm.method import Bound, Facts, Method
from fedbcd.algorithm.objective import Gradients
from fedbcd.algorithm.params import Layout


def method_of(algorithm: fb.Algorithm, sizes: Sequence[int] = (1,) * 10) -> Method:
    """For devices with so many samples each."""
    return algorithm.method(Facts(len(sizes), tuple(sizes)))


class GivenGradients:
    """Mini-batches of which the gradient is a function of the point alone."""

    def __init__(self, gradient: Callable[[Tensor], Tensor]) -> None:
        self._gradient = gradient

    def gradients(self, at_NP: Tensor, buffers_NB: Tensor, last: bool = False) -> Gradients:
        """At these points."""
        return Gradients((self._gradient(at_NP),), at_NP.new_zeros(len(at_NP)), buffers_NB)


def session(
    algorithm: fb.Algorithm,
    rows: Iterates,
    z_NP: Tensor,
    steps: Sequence[int],
    *,
    offline: bool = False,
    gradient: Callable[[Tensor], Tensor] = Tensor.clone,
) -> Iterates:
    """x and x_prev after a session of each device, by the interpreter; rows in descending order of
    steps, one number per device; g_i(x) = x^2 / 2 unless said otherwise.
    """
    method = method_of(algorithm, (1,) * len(steps))
    bound = Bound(method, Layout(nn.Linear(1, 1, bias=False)), (1,) * len(steps))
    penalty_N1 = torch.as_tensor(bound.penalty_N)[:, None].to(rows.x_NP)
    interpreter = Interpreter(bound, list(steps), penalty_N1, GivenGradients(gradient))
    registers = {"x": rows.x_NP, "x_prev": rows.prev_NP, "z": z_NP}
    after = interpreter.run(method.offline if offline else method.plan, registers)
    return Iterates(after["x"], after["x_prev"])
