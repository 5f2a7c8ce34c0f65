"""What happens to an upload between a device and its server's sum: a chain of layers, an option of
a run (`RunSpec.uploads`).

Without layers an upload is what the plan gives, and a server adds weight times it, one upload after
the other: the bits of its sum depend on their order. With layers a device sends a difference,
times its weight, from what its server has of it already; both keep

    contribution = weight (what was sent - x(0)),    a sum of messages, in float64.

In integers that is a vector of whole numbers, which float64 holds exactly; sums of such have the
same bits in any order. A server counts contributions and reads the sum when it steps. What a layer
takes off a message stays in the next difference, where members count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedbcd.config import fit
from fedbcd.errors import ConfigError, NumericalError
from fedbcd.own import calling, is_own

RING = 2**32  # of integers: the sum of a phase's messages is less than half of it
EXACT = 2**53  # up to here float64 holds every whole number
SQUARES_AT_ONCE = 2**14  # squares that are added up together: so few that no two threads share them


@dataclass(frozen=True, slots=True)
class Sender:
    """Whose message it is; activation -1: nobody's, but of what both sides know."""

    device: int
    activation: int
    weight: float


class Layer(Protocol):
    """One thing that is done to messages; a frozen dataclass."""

    whole: ClassVar[bool]  # whether it gives whole numbers; such a layer is the last

    def send(self, message: Tensor, sender: Sender) -> Tensor:
        """On the device, float64."""
        ...

    def read(self, total: Tensor) -> Tensor:
        """What a sum of what `send` gave means, on either side."""
        ...


@dataclass(frozen=True)
class Clip:
    """A device's model changes by at most this Euclidean norm in one upload."""

    norm: float
    name: ClassVar[str] = "clip"
    whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        fit(self, "clip ")
        if not 0 < self.norm < math.inf:
            raise ConfigError(f"norm={self.norm} of a clip must be a finite number above 0")

    def send(self, message: Tensor, sender: Sender) -> Tensor:
        """Shortened, if it is longer."""
        parts = [part.square().sum() for part in torch.split(message, SQUARES_AT_ONCE)]
        length, most = math.sqrt(float(torch.stack(parts).sum())), self.norm * sender.weight
        return message if length <= most else message * (most / length)

    def read(self, total: Tensor) -> Tensor:
        """As it is."""
        return total


@dataclass(frozen=True)
class Integers:
    """Fixed-point numbers: whole multiples of `scale`, which is a power of two."""

    scale: float = 2.0**-20
    name: ClassVar[str] = "integers"
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        fit(self, "integers ")
        if not (0 < self.scale < math.inf and math.frexp(self.scale)[0] == 0.5):
            near = 2.0 ** round(math.log2(self.scale)) if 0 < self.scale < math.inf else 2.0**-20
            raise ConfigError(
                f"scale={self.scale} of integers must be a power of two above 0, such as {near},"
                " so that multiples of it are exact"
            )

    def send(self, message: Tensor, sender: Sender) -> Tensor:  # noqa: ARG002
        """The nearest whole numbers."""
        return torch.round(message / self.scale)

    def read(self, total: Tensor) -> Tensor:
        """Times the scale."""
        return total * self.scale


LAYERS: dict[str, type[Clip] | type[Integers]] = {kind.name: kind for kind in (Clip, Integers)}


def check_layers(layers: Sequence[Layer], discount: bool = False) -> None:
    """Refuse a chain that cannot be; `discount`: the method weighs uploads by their age."""
    for number, layer in enumerate(layers):
        for name in ("whole", "send", "read"):
            if not hasattr(layer, name):
                raise ConfigError(
                    f"uploads[{number}]={layer!r:.80} has no {name}; a layer is fb.Clip(norm),"
                    " fb.Integers(scale), or your own with whole, send(message, sender) and"
                    " read(total)"
                )
        if layer.whole and number < len(layers) - 1:
            raise ConfigError(
                f"uploads[{number}]={layer!r:.80} gives whole numbers, which the layer after it"
                " would spoil; put it last"
            )
    if layers and discount:
        raise ConfigError(
            "uploads have layers, and this method weighs them by their age: a weight is multiplied"
            " on the device, which does not know how old its upload will be; leave uploads out, or"
            " use a method without a discount"
        )


def exact_weights(weights: Sequence[float]) -> list[float]:
    """The same to 2^-30 of the largest, as multiples of one power of two: sums of four million of
    them are exact.
    """
    unit = 2.0 ** (math.frexp(max(weights))[1] - 30)
    return [max(1.0, round(weight / unit)) * unit if weight else 0.0 for weight in weights]


def _try(layer: Layer, like: Tensor) -> None:
    """Refuse a layer of somebody's own that gives other things than messages, by sending one."""
    values = torch.linspace(-1.0, 1.0, len(like), dtype=torch.float64, device=like.device)
    needs = "send(message, sender) and read(total) take a vector of float64 and return another"
    with calling("the layer {!r:.80} fails", layer, remedy=needs):
        sent: Any = layer.send(values.clone(), Sender(0, 0, 1.0))
        read: Any = layer.read(values.clone())
    for name, found in (("send", sent), ("read", read)):
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (
            like.shape,
            values.dtype,
        ):
            raise ConfigError(f"the layer {layer!r:.80}: {name} gives {found!r:.80}; {needs}")
    if layer.whole and not torch.equal(sent, sent.round()):
        raise ConfigError(
            f"the layer {layer!r:.80} has whole=True, but sends {sent!r:.80}; round what it sends,"
            " or say whole=False"
        )


class Wire:
    """The layers of a run."""

    def __init__(self, layers: Sequence[Layer], start: Tensor, most: int, devices: int) -> None:
        """`start`: what is sent at x(0), which both sides know; `most` of all devices count in a
        phase.
        """
        self.layers = tuple(layers)
        self.start = start.double()
        for layer in self.layers:
            if is_own(type(layer)):
                _try(layer, self.start)
        self.whole = self.layers[-1].whole
        self.limit = (RING // 2 - 1) // most  # of a message
        self.exact = EXACT // devices  # of a contribution
        self.dtype = torch.int32 if self.whole else torch.float64  # in which messages travel

    def message(self, sent: Tensor, base: Tensor, sender: Sender) -> Tensor:
        """On the device: by how much its contribution, `base`, is to change, float64."""
        message = sender.weight * (sent.double() - self.start) - self.read(base)
        for layer in self.layers:
            message = layer.send(message, sender)
        self._check(message, self.limit, sender)
        self._check(base + message, self.exact, sender)
        return message

    def known(self, sent: Tensor, sender: Sender) -> Tensor:
        """The contribution of one who has sent this, where that needs no message."""
        change = sender.weight * (sent.double() - self.start)
        if self.whole:
            change = self.layers[-1].send(change, sender)
            self._check(change, self.exact, sender)
        return change

    def beyond(self, integers: Tensor, limit: int) -> int | None:
        """The place of the first integer beyond a limit, if there is one."""
        if not self.whole:
            return None
        wrong = ~((integers >= -limit) & (integers <= limit))  # -2^31 has no absolute value
        return int(wrong.nonzero()[0]) if bool(wrong.any()) else None

    def _check(self, integers: Tensor, limit: int, sender: Sender) -> None:
        place = self.beyond(integers, limit)
        if place is not None:
            raise NumericalError(
                f"value {place} of what device {sender.device} sends is"
                f" {float(integers[place]):g} in integers, beyond {limit:g}, which a server's sum"
                " has room for; use a larger scale, or clip before"
            )

    def read(self, total: Tensor) -> Tensor:
        """What a sum of contributions, or one of them, means."""
        for layer in reversed(self.layers):
            total = layer.read(total)
        return total

    def value(self, total: Tensor, weight: float | Tensor) -> Tensor:
        """The sum of weight times what was sent."""
        return self.read(total) + weight * self.start
