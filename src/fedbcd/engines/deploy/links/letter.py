"""What travels between two actors: the event that the receiver handles, and the model that it
names.
"""

from dataclasses import dataclass

from torch import Tensor

from fedbcd.protocol.messages import Actor, Event


@dataclass(frozen=True)
class Letter:
    """One message; it may be lost, repeated or overtaken, since the machines repeat themselves
    until they are answered.
    """

    sender: Actor
    to: Actor
    event: Event  # what the receiver handles
    model: Tensor | None  # flat CPU vector that event.model names, where it names one
    clock: float  # HLC of the sender
