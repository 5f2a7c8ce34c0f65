"""One schedule, run and judged; and a shorter one that fails as well."""

import traceback
from dataclasses import dataclass, replace

from faultsim.model import check
from faultsim.schedule import CASES, Planned, Schedule
from faultsim.world import Violation, World


@dataclass(frozen=True)
class Outcome:
    """What a run gave; `sentence` is empty if everything held."""

    seed: int
    sentence: str
    rounds: int
    letters: int
    refused: int
    recovered_s: float
    faults: dict[str, int]


def run(schedule: Schedule) -> Outcome:
    """Play it and check its history."""
    world, sentence = World(schedule), ""
    try:
        world.play()
        check(world)
    except Violation as violation:
        sentence = str(violation)
    except Exception as error:  # noqa: BLE001  whatever a role raises that is no refusal is a finding
        sentence = "".join(traceback.format_exception(error)[-4:])
    faults = {fault.name: count for fault, count in world.happened.items()}
    faults["in groups"] = sum(size * times for size, times in world.groups.items() if size > 1)
    faults["split stores"], faults["turned away"] = int(world.stores.are_split), world.turned_away
    faults["torn files"] = sum(node.disk.torn for node in world.nodes.values())
    faults["lost names"] = sum(node.disk.lost for node in world.nodes.values())
    return Outcome(
        schedule.seed,
        sentence,
        max(world.rounds, 0),
        len(world.sent),
        len(world.refused),
        world.recovered_s,
        faults,
    )


def shrink(schedule: Schedule) -> Schedule:
    """Leave out faults as long as it still fails: halves first, then one by one."""
    faults = list(schedule.faults)
    size = max(len(faults) // 2, 1)
    while True:
        shorter = _without_one_piece(schedule, faults, size)
        if shorter is not None:
            faults = shorter
        elif size == 1:
            return replace(schedule, faults=tuple(faults))
        else:
            size //= 2


def _without_one_piece(
    schedule: Schedule, faults: list[Planned], size: int
) -> list[Planned] | None:
    for start in range(0, len(faults), size):
        rest = faults[:start] + faults[start + size :]
        if run(replace(schedule, faults=tuple(rest))).sentence:
            return rest
    return None


def report(schedule: Schedule) -> str:
    """What failed, the shrunk schedule, and the command that shows it again."""
    lines = [f"  {planned}" for planned in schedule.faults]
    head = (
        f"seed {schedule.seed} ({CASES[schedule.case][0]}) fails with {len(lines)} faults:"
        f" {run(schedule).sentence}"
    )
    return "\n".join(
        [head, *lines, f"again: PYTHONPATH=src:tests python -m faultsim --seed {schedule.seed}"]
    )
