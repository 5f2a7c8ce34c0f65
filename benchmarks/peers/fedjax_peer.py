"""FedJAX: its own `fed_prox`, jitted steps, data in memory; devices differ in their number of steps
by their datasets' views.

usage: python benchmarks/peers/fedjax_peer.py {round,epoch,scale} [--threads 2]
"""

import os
from importlib.metadata import version

from workload import (
    BATCH,
    LEARNING_RATE,
    MOMENTUM,
    PENALTY,
    WORKLOADS,
    Array,
    Round,
    Task,
    measure,
    parser,
    peak_mib,
    report,
)

chosen = parser(__doc__).parse_args()
if chosen.threads == 1:  # one thread for a matrix product; read once, when JAX is imported
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import fedjax
import jax
import jax.numpy as jnp
from fedjax.algorithms import fed_prox

jax.tree_map = jax.tree_util.tree_map  # FedJAX still uses this older name, which JAX has dropped


class Counted(fedjax.ClientDataset):
    """A dataset that knows how many steps its device takes this round."""

    steps = 1

    def shuffle_repeat_batch(self, hparams=None, **kwargs):
        return super().shuffle_repeat_batch(hparams, num_steps=self.steps, **kwargs)


def per_example_loss(
    params: list[jax.Array], batch: dict[str, jax.Array], rng: jax.Array
) -> jax.Array:
    del rng
    hidden = batch["x"]
    for weight, bias in zip(params[0:-2:2], params[1:-2:2], strict=True):
        hidden = jax.nn.relu(hidden @ weight + bias)
    scores = jax.nn.log_softmax(hidden @ params[-2] + params[-1])
    return -jnp.take_along_axis(scores, batch["y"][:, None], 1)[:, 0]


def transposed(model: list[Array]) -> list[Array]:
    """Weights as JAX likes them, (inputs, outputs), or back."""
    return [value.T for value in model]


def main() -> None:
    task = Task(WORKLOADS[chosen.workload])
    targets = task.targets.astype("int32")
    datasets = [
        Counted({"x": task.inputs[task.owned(i)], "y": targets[task.owned(i)]})
        for i in range(task.workload.devices)
    ]
    algorithm = fed_prox.fed_prox(
        per_example_loss,
        fedjax.optimizers.sgd(LEARNING_RATE, momentum=MOMENTUM),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=None),
        proximal_weight=PENALTY,
    )
    state = algorithm.init([jnp.asarray(value) for value in transposed(task.start)])
    keys = list(
        jax.random.split(jax.random.PRNGKey(0), task.workload.active)
    )  # nothing random depends on them

    def play(rounds: list[Round]) -> None:
        nonlocal state
        for active in rounds:
            for device, steps in active:
                datasets[device].steps = steps
            state, _ = algorithm.apply(
                state,
                [
                    (device, datasets[device], key)
                    for (device, _), key in zip(active, keys, strict=True)
                ],
            )
        jax.block_until_ready(state.params)

    seconds = measure(task, play)
    variant = f"{chosen.threads} threads, jax {jax.__version__}"
    report(
        task, "FedJAX", version("fedjax"), seconds, transposed(state.params), peak_mib(), variant
    )


if __name__ == "__main__":
    main()
