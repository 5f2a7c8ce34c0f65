"""A disk that changes a bit: the role that reads the file must notice, and somebody puts the file
back.
"""

from typing import TYPE_CHECKING

from faultsim.schedule import Fault, Planned

if TYPE_CHECKING:
    from faultsim.world import Node, World


class Damage:
    """Which files are not what was written."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._right: dict[tuple[str, str], bytes] = {}  # actor and file -> what was written

    def strike(self, planned: Planned) -> None:
        """The power fails, and one bit of a file is another."""
        node = self._world.nodes[planned.where]
        files = sorted(file for file, _ in node.disk.tensors_.values())
        if not files or node.role is None:
            return
        self._world.crash(node, 0.05)
        file = files[int(planned.amount * len(files)) % len(files)]
        if file not in node.disk.entries or (node.actor, file) in self._right:
            return
        data = bytearray(node.disk.entries[file].data)
        place = self._world.chance.randrange(len(data) * 8)
        self._right[node.actor, file] = bytes(data)
        data[place // 8] ^= 1 << place % 8
        node.disk.entries[file].data = bytes(data)
        self._world.count(Fault.DAMAGED_DISK)
        self._world.after(planned.length, lambda: self._repair(node, file))

    def is_of(self, node: "Node") -> bool:
        """Whether this disk has a file that is not as it was written."""
        return any(
            actor == node.actor and self._is_there(node, file) for actor, file in self._right
        )

    def _is_there(self, node: "Node", file: str) -> bool:
        return file in node.disk.entries

    def _repair(self, node: "Node", file: str) -> None:
        right = self._right.pop((node.actor, file), None)
        if right is not None and file in node.disk.entries:
            self._world.crash(node, 0.05)
            if file in node.disk.entries:
                node.disk.entries[file].data = right

    def repair_all(self) -> None:
        """Somebody has noticed."""
        for actor, file in [*self._right]:
            self._repair(self._world.nodes[actor], file)
