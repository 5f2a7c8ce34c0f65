"""A look at the models of a run between two rounds: how good they are, and how far apart."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from fedbcd.compute.certify import Certificates
from fedbcd.compute.evaluate import Evaluator, Scores
from fedbcd.compute.numbers import Numbers
from fedbcd.compute.rows import ManyModels, Rows
from fedbcd.record.history import Row
from fedbcd.schedule.driver import Machines
from fedbcd.schedule.work import Session

TESTED = -1  # the number of the session that comes before a test; no other has it


def members_of(machines: Machines) -> list[tuple[int, int]]:
    return [(device, server.server) for server in machines.servers for device in server.members]


def tested(numbers: Numbers, homes: Mapping[int, int]) -> dict[int, Tensor]:
    """The models of devices as they are tested; `homes` names the server of each."""
    method, trainer = numbers.method, numbers.trainer
    if not method.at_evaluation:
        return {device: numbers.personal(device, server) for device, server in homes.items()}
    found: dict[int, Tensor] = {}
    most = {device: method.steps[1] * method.pass_of(device, offline=False) for device in homes}
    work = [Session(device, TESTED, most[device], None, False) for device in homes]
    for part in trainer.parts(work):
        devices = [session.device for session in part]
        rows = torch.tensor(devices, device=numbers.sums.total_VU.device)
        tables = {slot.name: numbers.devices.tables[slot.name] for slot in method.slots}
        kept = {name: table.index_select(0, rows) for name, table in tables.items()}
        heard = [numbers.models[numbers.held[homes[device]]] for device in devices]
        bundle = numbers.bound.heard.views(torch.stack(heard)[:, : numbers.bound.heard.size])
        registers = {name: values.to(numbers.dtype) for name, values in kept.items()} | bundle
        after = trainer.interpreted(method.at_evaluation, part, registers)
        found |= dict(zip(devices, after[method.personal], strict=True))
    return {device: found[device] for device in homes}


def all_personal(numbers: Numbers, homes: Mapping[int, int]) -> ManyModels:
    """The model of every device, as it is tested; rows that are kept elsewhere as they are to be
    kept. `homes` names the server of each.
    """
    x_NF = numbers.personal_NF
    if isinstance(x_NF, Rows) and not numbers.method.at_evaluation:
        return x_NF.kept()
    in_order = {device: homes[device] for device in sorted(homes)}
    return torch.stack([*tested(numbers, in_order).values()]).cpu()


def scores_of(numbers: Numbers, machines: Machines, evaluator: Evaluator) -> Scores:
    numbers.settle()
    homes = {device: server for device, server in members_of(machines) if evaluator.tests(device)}
    z_VF = numbers.global_VF()
    if numbers.method.at_evaluation or not isinstance(numbers.personal_NF, Rows):
        personal = tested(numbers, homes)
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
    numbers: Numbers,
    machines: Machines,
    scores: Scores,
    clock: float,
    found: Certificates,
    *,
    lower: bool = False,
) -> Row:
    """`lower`: the lower a score, the better."""
    z_VF = numbers.global_VF()
    mean_z = z_VF.double().mean(0)
    personal = sorted(scores.devices.values(), reverse=lower)
    return Row(
        round=machines.coordinator.round,
        clock=clock,
        activations=sum(device.activation for device in machines.devices.values()),
        global_accuracy=mean(scores.servers),
        personal_accuracy=mean(personal),
        worst_decile=mean(personal[: max(1, len(personal) // 10)]),
        disagreement=float((z_VF.double() - mean_z).norm(dim=1).mean()),
        distance=numbers.distance(members_of(machines)) if numbers.method.keeps_personal else 0.0,
        **asdict(found),
    )


def mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else math.nan
