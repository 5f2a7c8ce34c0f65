"""Who speaks when: the state machines of device, server and coordinator.

Pure and silent: events in, commands out, standard library only. Machines hold model *handles*,
never tensors, and have neither a clock nor chance of their own. Read `messages`, then
`coordinator`, `server`, `device`; each ends with its table of transitions.
"""

from fedbcd.protocol.coordinator import (
    AsyncCoordinator,
    Coordinator,
    RigorousCoordinator,
    SyncCoordinator,
)
from fedbcd.protocol.device import Device, DeviceState
from fedbcd.protocol.server import Server, ServerState

__all__ = [
    "AsyncCoordinator",
    "Coordinator",
    "Device",
    "DeviceState",
    "RigorousCoordinator",
    "Server",
    "ServerState",
    "SyncCoordinator",
]
