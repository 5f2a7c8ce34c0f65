"""A look at the models of a run between two rounds: how good they are, and how far apart."""

import math
from collections.abc import Collection
from dataclasses import asdict

import torch

from fedbcd.compute.certify import Certificates
from fedbcd.compute.evaluate import Evaluator, Scores
from fedbcd.compute.numbers import Numbers
from fedbcd.compute.rows import Rows
from fedbcd.record.history import Row
from fedbcd.schedule.driver import Machines


def members_of(machines: Machines) -> list[tuple[int, int]]:
    return [(device, server.server) for server in machines.servers for device in server.members]


def scores_of(numbers: Numbers, machines: Machines, evaluator: Evaluator) -> Scores:
    numbers.settle()
    homes = {device: server for device, server in members_of(machines) if evaluator.tests(device)}
    z_VF = numbers.global_VF()
    if not isinstance(numbers.personal_NF, Rows):
        personal = {device: numbers.personal(device, server) for device, server in homes.items()}
        if machines.coordinator.round == 0 and all(
            torch.equal(x, z_VF[0]) for x in personal.values()
        ):
            personal = dict.fromkeys(
                homes, z_VF[0]
            )  # at the start all models are one, which is tested once
        return evaluator.scores(z_VF, personal, numbers.workers, homes)
    found = evaluator.scores(z_VF, {}, numbers.workers)
    return Scores(found.servers, _scores_in_blocks(numbers, [*homes], evaluator))


def _scores_in_blocks(
    numbers: Numbers, devices: list[int], evaluator: Evaluator
) -> dict[int, float]:
    """Test personal models that are not in memory, a few at a time."""
    assert isinstance(numbers.personal_NF, Rows)
    if not devices:
        return {}
    scores = numbers.personal_NF.scores(devices)
    if scores is None:
        scores = {}
        for block in numbers.personal_NF.blocks(torch.tensor(devices)):
            part = devices[len(scores) : len(scores) + len(block)]
            scores |= evaluator.personal_scores(
                dict(zip(part, block.to(numbers.dtype), strict=True)), numbers.workers
            )
    return scores


def row_of(
    numbers: Numbers, machines: Machines, scores: Scores, clock: float, found: Certificates
) -> Row:
    z_VF = numbers.global_VF()
    mean_z = z_VF.double().mean(0)
    personal = sorted(scores.devices.values())
    return Row(
        round=machines.coordinator.round,
        clock=clock,
        activations=sum(device.activation for device in machines.devices.values()),
        global_accuracy=mean(scores.servers),
        personal_accuracy=mean(personal),
        worst_decile=mean(personal[: max(1, len(personal) // 10)]),
        disagreement=float((z_VF.double() - mean_z).norm(dim=1).mean()),
        distance=numbers.distance(members_of(machines)) if numbers.method.has_personal else 0.0,
        **asdict(found),
    )


def mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else math.nan
