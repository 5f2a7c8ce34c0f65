"""Any `nn.Module`, any loss: flat vectors, vectorised gradients, one-by-one gradients and ordinary
autograd say the same.
"""

import copy
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fedbcd as fb
from fedbcd.algorithm.objective import Gradients, Loss, Objective, _generators
from fedbcd.algorithm.params import Layout
from fedbcd.algorithm.traced import LONG_SUM_TERMS, _does_nothing, product_in_two, trace
from fedbcd.errors import ConfigError, DataError
from support.exploring import examples

N, R, CLASSES = 3, 4, 3


class Tied(nn.Module):
    """Encoder and decoder share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6, bias=False)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decode(torch.tanh(self.encode(x))))


class Scalar(nn.Module):
    """A 0-d parameter, a 0-d buffer that the forward pass reassigns, a constant buffer and an
    integer one.
    """

    factor: Tensor
    seen: Tensor
    constant: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.tensor(0.25))
        self.register_buffer("constant", torch.arange(3.0))
        self.register_buffer("calls", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.5 * self.seen + 0.5 * x.detach().mean()
        return self.factor * self.linear(x) + self.constant


class Branching(nn.Module):
    """Looks at its data with `.item()`: it cannot be vectorised."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.mean().item() > 0 else -self.linear(x)


class Branchless(Branching):
    """The same function without looking."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.mean() > 0, self.linear(x), -self.linear(x))


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 2, 2, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES)
    ),
    "batch norm on images": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 2, 2),
        nn.BatchNorm2d(2),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    ),
    "layer norm": lambda: nn.Sequential(
        nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, CLASSES)
    ),
    "tied weights": Tied,
    "scalars": Scalar,
}
every_module = pytest.mark.parametrize("name", MODULES)


def made(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODULES[name]().double()


def batches(seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, R, 6, generator=generator, dtype=torch.float64), torch.randint(
        CLASSES, (N, R), generator=generator
    )


def stacked(modules: Sequence[nn.Module]) -> tuple[Tensor, Tensor]:
    """Parameters and buffers of some modules as stacks of flat vectors."""
    layout = Layout(modules[0])
    flat = torch.stack([layout.flatten(module, torch.float64) for module in modules])
    return flat[:, : layout.size_P], flat[:, layout.size_P :]


def by_ordinary_autograd(
    modules: Sequence[nn.Module], inputs: Tensor, targets: Tensor, loss: Loss
) -> Gradients:
    """What a plain training loop sees: forward in train mode, backward, then read gradients and
    buffers.
    """
    rows = []
    for module, x, y in zip(modules, inputs, targets, strict=True):
        module = copy.deepcopy(module).train()
        value = loss(module(x), y)
        value.backward()
        layout = Layout(module)
        gradient = torch.cat(
            [p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]
        )
        rows.append(
            (gradient, value.detach(), layout.flatten(module, torch.float64)[layout.size_P :])
        )
    gradient_NP, loss_N, buffers_NB = (torch.stack(column) for column in zip(*rows, strict=True))
    return Gradients((gradient_NP,), loss_N, buffers_NB)


def assert_same(one: Gradients, other: Gradients) -> None:
    torch.testing.assert_close(one.gradient_NP, other.gradient_NP, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one[1:], other[1:], rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------------
# flat vectors
@every_module
def test_a_module_survives_being_flat(name: str) -> None:
    module, other = made(name, 0), made(name, 1)
    layout = Layout(module)
    flat = layout.flatten(module, torch.float64)
    assert flat.shape == (layout.size_F,)
    layout.load(other, flat)
    for key, tensor in module.state_dict().items():
        assert torch.equal(other.state_dict()[key], tensor), key


@every_module
def test_parameters_come_first_and_every_entry_has_one_place(name: str) -> None:
    module = made(name)
    layout = Layout(module)
    assert layout.size_P == sum(p.numel() for p in module.parameters())
    assert layout.size_F == layout.size_P + sum(
        b.numel() for b in module.buffers() if b.is_floating_point()
    )
    slots = [*layout.parameters, *layout.buffers]
    assert [slot.start for slot in slots] == [0, *(slot.stop for slot in slots[:-1])]


@every_module
def test_views_of_a_stack_are_views_of_its_rows(name: str) -> None:
    layout = Layout(made(name))
    params, buffers = stacked([made(name, k) for k in range(N)])
    for cut, stack in ((layout.parameters_of, params), (layout.buffers_of, buffers)):
        for key, tensor in cut(stack).items():
            for row in range(N):
                assert torch.equal(tensor[row], cut(stack[row])[key])
    assert torch.equal(layout.join(layout.parameters_of(params), layout.parameters, params), params)
    assert torch.equal(layout.join(layout.buffers_of(buffers), layout.buffers, buffers), buffers)


def test_scalars_and_buffers_have_their_places() -> None:
    """A 0-d parameter takes one entry; an integer buffer is a counter, not model."""
    layout = Layout(made("scalars"))
    assert [(slot.name, slot.shape) for slot in layout.parameters] == [
        ("factor", ()),
        ("linear.weight", (3, 6)),
        ("linear.bias", (3,)),
    ]
    assert [(slot.name, slot.shape) for slot in layout.buffers] == [
        ("seen", ()),
        ("constant", (3,)),
    ]
    assert {name: int(value) for name, value in layout.counters.items()} == {"calls": 7}


def test_a_tied_weight_counts_once() -> None:
    module = made("tied weights")
    assert [slot.name for slot in Layout(module).parameters] == [
        "encode.weight",
        "decode.bias",
        "head.weight",
        "head.bias",
    ]


def test_loading_keeps_tied_weights_tied() -> None:
    module = made("tied weights")
    layout = Layout(module)
    layout.load(module, torch.ones(layout.size_F, dtype=torch.float64))
    assert isinstance(module, Tied)
    assert module.decode.weight is module.encode.weight


@examples(12)
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_any_shapes_survive_being_flat(shapes: list[list[int]], seed: int) -> None:
    torch.manual_seed(seed)
    module = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    layout = Layout(module)
    flat = layout.flatten(module, torch.float64)
    empty = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    assert torch.equal(layout.flatten(layout.load(empty, flat), torch.float64), flat)
    assert math.prod(flat.shape) == sum(math.prod(shape) for shape in shapes)


def test_a_vector_of_the_wrong_length_is_refused() -> None:
    module = made("mlp")
    with pytest.raises(DataError, match=r"a model of \(5,\) values does not fit a module of 83"):
        Layout(module).load(module, torch.zeros(5))


def test_a_module_without_parameters_is_refused_by_its_class() -> None:
    for module in (Bare(), nn.BatchNorm1d(3, affine=False)):
        with pytest.raises(DataError, match=f"{type(module).__name__} has no parameters to train"):
            Objective(module, F.cross_entropy)


# ------------------------------------------------------------------------------------------------
# gradients
@every_module
def test_vectorised_one_by_one_and_ordinary_gradients_are_the_same(name: str) -> None:
    """The mini-batch gradient of eq. (4b): losses, gradients and buffers after the step, for
    different models in one stack.
    """
    modules = [made(name, k) for k in range(N)]
    inputs, targets = batches()
    objective, state = Objective(modules[0], F.cross_entropy), stacked(modules)
    expected = by_ordinary_autograd(modules, inputs, targets, F.cross_entropy)
    assert_same(objective.gradients(*state, inputs, targets), expected)
    assert_same(objective.gradients_one_by_one(*state, inputs, targets), expected)


@every_module
def test_these_modules_can_be_vectorised_and_draw_nothing(name: str) -> None:
    module = made(name)
    objective = Objective(module, F.cross_entropy)
    inputs, targets = batches()
    assert (
        objective.why_not_vectorised(
            objective.layout.flatten(module, torch.float64), inputs[0], targets[0]
        )
        is None
    )
    assert not objective.stochastic


@every_module
def test_gradients_leave_models_data_and_module_alone(name: str) -> None:
    module = made(name)
    objective = Objective(module, F.cross_entropy)
    given = [*stacked([made(name, k) for k in range(N)]), *batches()]
    copies, before = [t.clone() for t in given], copy.deepcopy(objective.module.state_dict())
    objective.gradients(*given)
    objective.gradients_one_by_one(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    assert all(
        torch.equal(value, before[key]) for key, value in objective.module.state_dict().items()
    )
    assert all(p.grad is None for p in (*objective.module.parameters(), *module.parameters()))


def test_running_statistics_follow_an_ordinary_module_over_several_steps() -> None:
    module, (inputs, targets) = made("batch norm"), batches()
    objective, ordinary = Objective(module, F.cross_entropy), copy.deepcopy(module).train()
    params, buffers = stacked([module])
    for x, y in zip(inputs, targets, strict=True):
        ordinary(x)
        buffers = objective.gradients(params, buffers, x[None], y[None]).buffers_NB
    torch.testing.assert_close(
        buffers[0], objective.layout.flatten(ordinary, torch.float64)[objective.layout.size_P :]
    )


def test_gradients_without_gradient_mode() -> None:
    """The engine may run without autograd switched on; the gradient is there all the same."""
    modules = [made("mlp", k) for k in range(N)]
    objective, state, data = Objective(modules[0], F.cross_entropy), stacked(modules), batches()
    expected = objective.gradients(*state, *data)
    with torch.no_grad():
        assert_same(objective.gradients_one_by_one(*state, *data), expected)
        assert_same(objective.gradients(*state, *data), expected)


def test_the_objective_trains_even_if_the_module_was_in_evaluation_mode() -> None:
    module = made("batch norm").eval()
    objective = Objective(module, F.cross_entropy)
    assert objective.module.training
    assert not module.training


def weighted_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own: squared error, the first output counting twice."""
    return (((outputs - targets) ** 2) * torch.tensor([2.0, 1.0, 1.0], dtype=outputs.dtype)).mean()


@pytest.mark.parametrize(
    "loss", [F.mse_loss, nn.MSELoss(), weighted_error], ids=["mse", "module", "own"]
)
def test_any_differentiable_loss_will_do(loss: Loss) -> None:
    modules, (inputs, _) = [made("mlp", k) for k in range(N)], batches()
    targets = batches(6)[0][..., :CLASSES]
    objective = Objective(modules[0], loss)
    expected = by_ordinary_autograd(modules, inputs, targets, loss)
    assert_same(objective.gradients(*stacked(modules), inputs, targets), expected)
    assert_same(objective.gradients_one_by_one(*stacked(modules), inputs, targets), expected)


def test_a_parameter_that_the_loss_does_not_see_has_gradient_zero() -> None:
    module = nn.ModuleDict({"used": nn.Linear(6, CLASSES), "spare": nn.Linear(2, 2)}).double()

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["used"](x)

    inputs, targets = batches()
    objective = Objective(Half(), F.cross_entropy)
    state = stacked([Half() for _ in range(N)])
    spare = [slot for slot in objective.layout.parameters if "spare" in slot.name]
    for call in (objective.gradients, objective.gradients_one_by_one):
        gradient = call(*state, inputs, targets).gradient_NP
        assert all(bool((gradient[:, slot.start : slot.stop] == 0).all()) for slot in spare)
        assert bool((gradient != 0).any())


# ------------------------------------------------------------------------------------------------
# traces
class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.before: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.before.append(1.0)
        return self.linear(x) * len(self.before)  # not a function of its input: two calls differ


@every_module
def test_a_trace_gives_the_bits_of_the_vectorised_call(name: str) -> None:
    """When a trace comes in must not matter, or a run that was resumed would differ from one that
    was not.
    """
    objective, plain = (
        Objective(made(name), F.cross_entropy),
        Objective(made(name), F.cross_entropy),
    )
    objective.TRACE_AFTER, plain.traceable = 2, False
    for seed in range(6):
        given = [*stacked([made(name, seed + k) for k in range(N)]), *batches(seed)]
        given = [t.float() if t.is_floating_point() else t for t in given]
        found, expected = objective.gradients(*given), plain.gradients(*given)
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                (*found.parts, *found[1:]), (*expected.parts, *expected[1:]), strict=True
            )
        )
    assert objective.traceable
    assert len(objective._traces) == 1


@every_module
def test_a_trace_is_a_shorter_list_of_the_same_operations(name: str) -> None:
    objective = Objective(made(name), F.cross_entropy)
    given = (*stacked([made(name, k) for k in range(N)]), *batches())
    traced = trace(objective._vectorised, given)
    nodes = [node for node in traced.__self__.graph.nodes if node.op == "call_function"]  # type: ignore[attr-defined]
    assert not any(_does_nothing(node) for node in nodes)
    assert all(
        torch.equal(a, b)
        for a, b in zip(traced(*given), objective._vectorised(*given), strict=True)
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_in_two_is_the_product(transposed: bool) -> None:
    a = torch.randn(3, 5, 20, dtype=torch.float64)
    b = (
        torch.randn(3, 7, 20, dtype=torch.float64).transpose(1, 2)
        if transposed
        else torch.randn(3, 20, 7, dtype=torch.float64)
    )
    torch.testing.assert_close(product_in_two(a, b), torch.bmm(a, b), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("inputs", "models", "halved"),
    [
        (LONG_SUM_TERMS, 2, 1),
        (LONG_SUM_TERMS - 2, 2, 0),
        (LONG_SUM_TERMS + 1, 2, 0),
        (LONG_SUM_TERMS, 3, 0),
    ],
)
def test_only_long_and_small_products_are_taken_in_two(
    inputs: int, models: int, halved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbcd.algorithm.traced.SMALL_PRODUCT_ENTRIES", 2 * 5 * 8)
    module = nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    objective = Objective(module, F.cross_entropy)
    flat = objective.layout.flatten(module, torch.float64).repeat(models, 1)
    given = (
        flat,
        flat[:, :0],
        torch.randn(models, 5, inputs, dtype=torch.float64),
        torch.randint(3, (models, 5)),
    )
    operations = trace(objective._vectorised, given, halve=True)
    found = [node for node in operations.__self__.graph.nodes if node.target is product_in_two]  # type: ignore[attr-defined]
    assert len(found) == halved
    for ours, expected in zip(operations(*given), objective._vectorised(*given), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_a_module_that_is_no_function_of_its_input_is_not_traced() -> None:
    objective = Objective(Counting().double(), F.cross_entropy)
    objective.TRACE_AFTER = 1
    for _ in range(4):
        objective.gradients(*stacked([made_counting()] * N), *batches())
    assert not objective.traceable
    assert not objective._traces


class Drawing(nn.Module):
    """Stochastic depth, with a generator that no tracer sees."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.block, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.block(x) if self.draw() < 0.9 else x)  # two calls mostly agree


DRAWS: dict[str, Callable[[], float]] = {
    "random": lambda: random.random(),
    "numpy": (lambda: np.random.random()),  # noqa: NPY002 - the global generator is what a module would use
    "torch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("source", ["random", "numpy"])
def test_a_module_that_draws_in_python_is_not_traced(source: str) -> None:
    module = Drawing(DRAWS[source]).double()
    objective = Objective(module, F.cross_entropy)
    objective.TRACE_AFTER = 1
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    given = (*stacked([module] * N), *batches())
    norms = {float(objective.gradients(*given).gradient_NP.norm()) for _ in range(60)}
    assert not objective.traceable
    assert not objective._traces
    assert len(norms) == 2  # with the block, and without


@pytest.mark.parametrize("source", DRAWS)
def test_a_draw_while_tracing_shows_in_the_state_of_its_generator(source: str) -> None:
    before = _generators()
    assert _generators() == before
    DRAWS[source]()
    assert _generators() != before


def made_counting() -> nn.Module:
    torch.manual_seed(0)
    return Counting().double()


def test_threads_share_an_objective() -> None:
    """`functional_call` writes into the module for a moment: each thread has its own."""
    objective = Objective(made("batch norm"), F.cross_entropy)
    objective.TRACE_AFTER = 10**9
    states = [
        [*stacked([made("batch norm", s + k) for k in range(N)]), *batches(s)] for s in range(8)
    ]
    expected = [objective.gradients(*state) for state in states]
    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(
            pool.map(lambda state: objective.gradients(*state), states * 5),
            expected * 5,
            strict=True,
        ):
            assert torch.equal(found.gradient_NP, wanted.gradient_NP)


# ------------------------------------------------------------------------------------------------
# dropout, branching
def test_dropout_is_recognised_as_drawing_random_numbers() -> None:
    module = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, CLASSES)).double()
    objective = Objective(module, F.cross_entropy)
    inputs, targets = batches()
    state = torch.get_rng_state()
    assert (
        objective.why_not_vectorised(
            objective.layout.flatten(module, torch.float64), inputs[0], targets[0]
        )
        is None
    )
    assert objective.stochastic
    assert torch.equal(torch.get_rng_state(), state), (
        "the trial must not disturb the user's generator"
    )
    same = inputs[:1].expand(N, -1, -1), targets[:1].expand(N, -1)
    losses = objective.gradients(*(s.expand(N, -1) for s in stacked([module])), *same).loss_N
    assert len(set(losses.tolist())) == N, "devices draw different masks"


def test_a_module_that_looks_at_its_data_is_not_vectorised_and_says_why() -> None:
    torch.manual_seed(0)
    module = Branching().double()
    objective = Objective(module, F.cross_entropy)
    inputs, targets = batches()
    reason = objective.why_not_vectorised(
        objective.layout.flatten(module, torch.float64), inputs[0], targets[0]
    )
    assert reason is not None
    assert ".item()" in reason
    assert "\n" not in reason
    assert not objective.stochastic
    modules = [copy.deepcopy(module) for _ in range(N)]
    expected = by_ordinary_autograd(modules, inputs, targets, F.cross_entropy)
    assert_same(objective.gradients_one_by_one(*stacked(modules), inputs, targets), expected)


# ------------------------------------------------------------------------------------------------
# through the public call
def tiny_data(seed: int = 11, devices: int = 4, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 6, generator=generator) + i,
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for i in range(devices)
    ]


def tiny_federation(model: Callable[[], nn.Module], servers: int = 1) -> fb.Federation:
    return fb.Federation(model, F.cross_entropy, tiny_data(), servers)


@pytest.mark.filterwarnings("ignore::fedbcd.errors.BorderWarning")
def test_training_averages_buffers_and_neither_steps_nor_projects_them() -> None:
    """SPEC item 9: buffers are 'averaged and mixed as parameters are, never penalised, stepped or
    projected'.
    """
    federation, box = tiny_federation(MODULES["batch norm"]), fb.Box(-0.2, 0.2)
    algorithm = fb.FedBCD(
        batch="all", steps=(1, 1), device_step=0.1, server_step=1.0, penalty=3.0, projection=box
    )
    run = fb.train(federation, algorithm, rounds=1, active=4, seed=3, dtype=torch.float64)
    initial = federation.make_model(3).double()
    layout = Layout(initial)
    begin = layout.flatten(initial, torch.float64)
    begin[: layout.size_P] = box.project(begin[: layout.size_P])
    expected = []
    for inputs, _ in tiny_data():
        ordinary = layout.load(federation.make_model(3).double(), begin).train()
        ordinary(inputs.double())
        expected.append(layout.flatten(ordinary, torch.float64)[layout.size_P :])
    buffers = run.personal_NF[:, layout.size_P :]
    torch.testing.assert_close(buffers, torch.stack(expected))
    torch.testing.assert_close(run.global_VF[0, layout.size_P :], torch.stack(expected).mean(0))
    assert box.contains(run.personal_NF[:, : layout.size_P])
    assert not box.contains(buffers)


def test_training_mixes_buffers_between_servers() -> None:
    """SPEC item 9 with eq. (6): after mixing all servers and a step of almost nothing, their
    buffers agree.
    """
    algorithm = fb.FedBCD(batch="all", steps=(1, 1), server_step=1e-9)
    federation = tiny_federation(MODULES["batch norm"], servers=2)
    run = fb.train(
        federation, algorithm, cloud=fb.AsyncCloud(first=2), rounds=2, active=2, dtype=torch.float64
    )
    torch.testing.assert_close(run.global_VF[0], run.global_VF[1], rtol=0, atol=1e-6)


def test_penalty_steps_leave_buffers_alone() -> None:
    """SPEC item 9: FedBCD-I's penalty loop is no forward pass; buffers change in offline rounds
    only.
    """
    federation = tiny_federation(MODULES["batch norm"])
    common: dict[str, Any] = {
        "batch": "all",
        "steps": (1, 1),
        "device_step": 0.1,
        "available": 4,
        "offline_limit": 1,
    }
    runs = [
        fb.train(
            federation,
            fb.FedBCDI(penalty=penalty, **common),
            rounds=1,
            active=4,
            dtype=torch.float64,
        )
        for penalty in (0.1, 0.9)
    ]
    size = Layout(federation.make_model(0)).size_P
    assert torch.equal(runs[0].personal_NF[:, size:], runs[1].personal_NF[:, size:])
    assert not torch.equal(runs[0].personal_NF[:, :size], runs[1].personal_NF[:, :size])


def test_the_models_of_a_run_carry_their_buffers() -> None:
    run = fb.train(tiny_federation(MODULES["batch norm"]), fb.FedBCD(batch=4), rounds=3, active=2)
    model = run.global_model
    assert not model.training
    layout = Layout(model)
    torch.testing.assert_close(layout.flatten(model, torch.float32), run.global_VF[0])
    torch.testing.assert_close(
        layout.flatten(run.personal_model(2), torch.float32), run.personal_NF[2]
    )


@pytest.mark.parametrize("max_batch", [None, 1, 2])
def test_dropout_does_not_spoil_repeatability(max_batch: int | None) -> None:
    """A run is a pure function of configuration and seed (docs/determinism.md), whatever the user's
    generator does.
    """

    def digest(seed: int) -> str:
        torch.seed()  # a new state of the global generator each time
        federation = tiny_federation(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
        )
        return fb.train(
            federation, fb.FedBCD(batch=3), rounds=4, active=2, max_batch=max_batch, seed=seed
        ).digest

    assert digest(0) == digest(0)
    assert digest(0) != digest(1)


def test_training_leaves_the_users_generator_alone() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    fb.train(
        tiny_federation(lambda: nn.Sequential(nn.Linear(6, CLASSES), nn.Dropout(0.1))),
        fb.FedBCD(batch=2),
        rounds=2,
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_that_cannot_be_vectorised_trains_one_device_at_a_time_and_says_so() -> None:
    notices: list[str] = []
    algorithm = fb.FedBCD(batch=3, device_step=0.1)
    one_by_one = fb.train(
        tiny_federation(Branching),
        algorithm,
        rounds=4,
        active=2,
        dtype=torch.float64,
        on_notice=notices.append,
    )
    vectorised = fb.train(
        tiny_federation(Branchless), algorithm, rounds=4, active=2, dtype=torch.float64
    )
    assert len(notices) == 1
    assert "cannot be vectorised" in notices[0]
    assert ".item()" in notices[0]
    torch.testing.assert_close(one_by_one.personal_NF, vectorised.personal_NF, rtol=0, atol=1e-12)
    torch.testing.assert_close(one_by_one.global_VF, vectorised.global_VF, rtol=0, atol=1e-12)


def test_a_module_that_can_be_vectorised_is_no_news() -> None:
    notices: list[str] = []
    fb.train(tiny_federation(Branchless), fb.FedBCD(batch=3), rounds=1, on_notice=notices.append)
    assert notices == []


def test_batching_changes_rounding_only() -> None:
    """docs/determinism.md, section 3: 'numbers that differ by rounding only'."""
    runs = [
        fb.train(
            tiny_federation(MODULES["cnn"]),
            fb.FedBCD(batch=3, device_step=0.1),
            rounds=4,
            active=3,
            max_batch=m,
            dtype=torch.float64,
        )
        for m in (None, 2, 1)
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run.personal_NF, runs[0].personal_NF, rtol=0, atol=1e-12)


def test_regression_with_a_loss_of_its_own_learns() -> None:
    """Float targets, MSE, a metric of one's own: nothing in the algorithm is about classes."""
    generator = torch.Generator().manual_seed(1)
    slope = torch.tensor([[1.0], [-0.5]])
    inputs = [torch.randn(20, 2, generator=generator) for _ in range(4)]
    devices = [(x, x @ slope) for x in inputs]
    negative_error = lambda outputs, targets: -((outputs - targets) ** 2).mean(-1)  # noqa: E731
    federation = fb.Federation(
        lambda: nn.Linear(2, 1), F.mse_loss, devices, 1, test=devices[0], metric=negative_error
    )
    run = fb.train(federation, fb.FedBCD(batch="all", device_step=0.1), rounds=60, active=4)
    scores = run.history.column("global_score")
    assert scores[-1] > -0.01 > scores[0]
    assert math.isnan(run.history.last.personal_score)


def test_a_module_without_parameters_is_refused_before_training() -> None:
    with pytest.raises(DataError, match="Bare has no parameters"):
        fb.train(tiny_federation(Bare), fb.FedBCD(), rounds=1)


def test_a_model_that_does_not_fit_the_data_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"the model fails on inputs of shape \(2, 6\)"):
        fb.train(tiny_federation(lambda: nn.Linear(5, CLASSES)), fb.FedBCD(), rounds=1)


def test_frozen_parameters_are_not_trained_and_come_back_as_the_seed_made_them() -> None:
    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 5).requires_grad_(False)
            self.head = nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.body(x)))

    data = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(4)]
    federation = fb.Federation(Backbone, nn.functional.cross_entropy, data, servers=2)
    run = fb.train(federation, fb.FedBCD(device_step=0.1), rounds=3, seed=3)
    start = federation.make_model(3)
    assert run.personal_NF.shape == (4, 12)
    assert torch.equal(run.personal_model(0).body.weight, start.body.weight)
    assert not torch.equal(run.global_model.head.weight, start.head.weight)


def test_a_device_with_one_sample_does_not_keep_batch_norm_from_being_vectorised() -> None:
    notices: list[str] = []
    data = [(torch.randn(n, 4), torch.randint(2, (n,))) for n in (1, 8)]
    federation = fb.Federation(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
        nn.functional.cross_entropy,
        data,
        1,
    )
    fb.train(federation, fb.FedBCD(batch=4), rounds=2, on_notice=notices.append)
    assert notices == []


def test_penalties_may_be_a_list_an_array_or_a_tensor() -> None:
    expected = fb.FedBCD(penalty=(0.5, 1.0))
    assert fb.FedBCD(penalty=[0.5, 1.0]) == expected
    assert fb.FedBCD(penalty=torch.tensor([0.5, 1.0])) == expected
