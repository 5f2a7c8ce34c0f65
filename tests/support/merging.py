"""The log of a deployment that has stopped, from its stores, in one go: what the log that grew
while it ran must come to.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbcd.engines.deploy.local.log_order import Order
from fedbcd.engines.deploy.local.merged_log import Merger
from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.engines.deploy.roles.store import Store
from fedbcd.errors import RecordError
from fedbcd.protocol.messages import COORDINATOR, Actor, server_actor
from fedbcd.record.eventlog import LogWriter


def merge(
    stores: Mapping[Actor, Store], blueprint: Blueprint, header: dict[str, Any], out: Path
) -> dict[str, Any]:
    """Write the log of a deployment that has stopped to `out`; returns its end: transitions,
    rounds, clock, digest.

    A device without a store has not begun. Coordinator and servers must be there.
    """
    for actor in (COORDINATOR, *(server_actor(n) for n in range(len(blueprint.servers)))):
        if actor not in stores:
            raise RecordError(
                f"the store of {actor} is missing; without it the run cannot be put together"
            )
    merger = Merger(blueprint)
    log = LogWriter(out, header)
    try:
        order = Order(blueprint.home_of)
        for actor, store in stores.items():
            order.add(actor, store.transitions())
        for step in order.due(math.inf):
            for line in merger.take(step):
                log.append(line.time, line.actor, line.event, list(line.commands))
        end = merger.end(stores)
        log.end(end)
    finally:
        log.close()
    return end
