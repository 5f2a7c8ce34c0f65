"""Which backend computes a run, and why not another. Each recognises what it can do by itself and
gives a reason where it cannot; here they are put in order, the first that can computes.
"""

from dataclasses import dataclass

from fedbcd.algorithm.fused.library import build_name
from fedbcd.compute.numbers import Numbers

RAY = "Ray: devices in the workers of a cluster, each of which chooses among the following"
AHEAD = "planned ahead: rounds of fixed shape, on a GPU recorded as CUDA graphs"
VECTORISED = "vectorised: many devices in each of torch's operations"
ONE_BY_ONE = "one by one: a device after the other, by torch"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, and why it does not compute this run; it does where the reason is empty."""

    backend: str
    reason: str = ""


def choices(numbers: Numbers, why_not_ahead: str) -> list[BackendChoice]:
    """All backends in order of preference; `why_not_ahead` is empty where rounds are planned."""
    trainer = numbers.trainer
    chain = f"compiled: chains of linear layers in C (build: {build_name()})"
    one = trainer.why_one_by_one
    found = [
        BackendChoice(
            RAY, "" if numbers.devices.engine else "engine = 'cluster' was not asked for"
        ),
        BackendChoice(AHEAD, why_not_ahead),
        BackendChoice(chain, trainer.why_not_compiled),
        BackendChoice(VECTORISED, one),
        BackendChoice(ONE_BY_ONE),
    ]
    local = next(k for k, choice in enumerate(found) if k > 0 and not choice.reason)
    return [
        BackendChoice(
            choice.backend, choice.reason or (k > local) * "what is above can, and is faster"
        )
        for k, choice in enumerate(found)
    ]
