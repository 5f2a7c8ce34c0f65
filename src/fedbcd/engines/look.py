"""A look at the models of a run between two rounds: how good they are, and how far apart."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedbcd.compute.certify import Certificates
from fedbcd.compute.evaluate import Evaluator, Scores, Tested, Value, Values
from fedbcd.compute.numbers import Numbers
from fedbcd.compute.rows import ManyModels, Rows
from fedbcd.data.federation import Federation
from fedbcd.record.history import TRAIN_LOSS, WORK, DeviceTable, Row, column_of, columns_of
from fedbcd.schedule.driver import Machines
from fedbcd.schedule.effort import Effort
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
    found = evaluator.scores(z_VF, {}, numbers.workers, homes)
    return replace(found, of_devices=_tested_in_blocks(numbers, [*homes], evaluator))


def _tested_in_blocks(
    numbers: Numbers, devices: list[int], evaluator: Evaluator
) -> dict[int, Tested]:
    """Test personal models that are not in memory, a few at a time."""
    assert isinstance(numbers.personal_NF, Rows)
    if not devices:
        return {}
    found: dict[int, Tested] | None = numbers.personal_NF.tested(devices)
    if found is None:
        found = {}
        for block in numbers.personal_NF.blocks(torch.tensor(devices)):
            part = devices[len(found) : len(found) + len(block)]
            models = dict(zip(part, block.to(numbers.dtype), strict=True))
            found |= evaluator.personal_scores(models, numbers.workers)
    return found


def row_of(
    numbers: Numbers,
    machines: Machines,
    scores: Scores,
    clock: float,
    done: Effort,
    found: Certificates,
) -> Row:
    """A row of the history."""
    z_VF = numbers.global_VF()
    mean_z = z_VF.double().mean(0)
    activations = sum(device.activation for device in machines.devices.values())
    measured = measured_in(scores)
    row = {
        "round": machines.coordinator.round,
        "clock": clock,
        "activations": activations,
        **work_of(numbers, activations, done),
        **measured,
        "disagreement": float((z_VF.double() - mean_z).norm(dim=1).mean()),
        "distance": numbers.distance(members_of(machines))
        if numbers.method.keeps_personal
        else 0.0,
        **asdict(found),
    }
    has_validation = any(tested.validation for tested in scores.of_devices.values())
    return Row({name: row[name] for name in columns_of(scores.measures, has_validation)})


def work_of(numbers: Numbers, activations: int, done: Effort) -> dict[str, float]:
    """Gradient steps, samples, and bytes of models that devices have sent and were sent."""
    width = numbers.dtype.itemsize
    sizes = (numbers.bound.upload.size, numbers.bound.heard.size)
    traffic = (activations * size * width for size in sizes)
    return dict(zip(WORK, (done.gradient_steps, done.samples, *traffic), strict=True))


def measured_in(scores: Scores) -> dict[str, float]:
    """The columns of all measures: means over servers, over devices, and over the worst tenth of
    these; and the training loss.
    """
    tested = scores.of_devices.values()
    row = {TRAIN_LOSS: mean(each.train_loss for each in tested if each.train)}
    for k, (name, better) in enumerate(scores.measures.items()):
        personal = sorted(_values((each.test for each in tested), k), reverse=better == "lower")
        row[column_of("global", name)] = mean(_values(scores.of_servers, k))
        row[column_of("personal", name)] = mean(personal)
        row[column_of("worst", name)] = mean(personal[: max(1, len(personal) // 10)])
        row[column_of("validation", name)] = mean(_values((each.validation for each in tested), k))
    return row


def summary_of(scores: Scores, last: Row, mean_model: float) -> dict[str, Any]:
    """What the summary of a run says of its last look; `mean_model` is the score of the servers'
    mean.
    """
    first = next(iter(scores.measures))
    both: tuple[Literal["global", "personal"], ...] = ("global", "personal")
    ends = [column_of(each, name) for name in scores.measures for each in both]
    return {
        **{name: last[name] for name in (*ends, TRAIN_LOSS)},
        "measures": scores.measures,
        f"server_{first}": [round(score, 6) for score in scores.servers],
        f"mean_model_{first}": mean_model,
    }


def _values(found: Iterable[Values], k: int) -> list[float]:
    return [value for values in found if values and (value := values[k]) is not None]


def device_table(federation: Federation, scores: Scores) -> DeviceTable:
    """What each device has: its server, its samples, and each measure by its own model, by its
    server's global model, and what the own one gains.
    """
    homes = {i: n for n, members in enumerate(federation.servers) for i in members}
    rows = []
    for device, tested in sorted(scores.of_devices.items()):
        row: dict[str, float] = {
            "device": device,
            "server": homes[device],
            "samples": federation.sizes[device],
        }
        of_home = scores.of_homes.get(device, ())
        for k, (name, better) in enumerate(scores.measures.items()):
            own, home = _value(tested.test, k), _value(of_home, k)
            gain = home - own if better == "lower" else own - home
            row |= {column_of("personal", name): own, column_of("global", name): home}
            row |= {} if better == "neither" else {f"gain_{name}": gain}
            if tested.validation:
                row[column_of("validation", name)] = _value(tested.validation, k)
        rows.append(Row(row | {TRAIN_LOSS: tested.train_loss}))
    return DeviceTable(rows)


def _value(values: Values, k: int) -> float:
    found: Value = values[k] if values else None
    return math.nan if found is None else found


def mean(values: Iterable[float]) -> float:
    found = [*values]
    return sum(found) / len(found) if found else math.nan
