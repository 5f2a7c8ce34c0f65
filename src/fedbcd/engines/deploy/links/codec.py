"""Letters <-> frames. A model travels as a safetensors file in chunks, each with a CRC, the whole
with a SHA-256.

Nothing that arrives is trusted: an `Assembler` checks who may say what, every length before memory
is taken, and every byte after. What does not fit raises `Refused`; the letter is dropped, the rest
of its chunks is passed over, and later letters are unaffected.
"""

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedbcd.algorithm.params import Layout
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.refusals import MissingExtra
from fedbcd.errors import Refused
from fedbcd.protocol.messages import Actor, Event
from fedbcd.protocol.notices import Notice, PhaseNotice, Ping, Pong, RoundNotice
from fedbcd.protocol.senders import (
    MOST,
    SENDERS,
    check_clock,
    check_sender,
    check_values,
    is_counter,
    is_time,
)
from fedbcd.record import tensorfile
from fedbcd.record.eventlog import decode as decode_event, encode as encode_event

try:
    from fedbcd.engines.deploy.links.fedbcd_pb2 import (
        Chunk,
        Frame,
        Message,
        Notice as NoticeFrame,
        Part,
    )
except ImportError as missing:
    raise MissingExtra(missing.name or "protobuf") from None

CHUNK_BYTES = 1 << 17  # of a letter, at most; what is sent at a time follows the line
LEAST_CHUNK = 1 << 14  # beside the last: a slow line shows that it is alive
EVENT_BYTES = 4096
JOURNAL_BYTES = 1 << 17  # of a report, beside that
HEADER_BYTES = 1024  # of the safetensors file
WIRE_DTYPES = {code: tensorfile.DTYPES[code] for code in ("F32", "F64", "I32")}  # that may travel
NOTICES: dict[str, Any] = {
    "phase": PhaseNotice,
    "round": RoundNotice,
    "ping": Ping,
    "pong": Pong,
}
LARGEST_NUMBER = 2**63 - 1

Vectors = frozenset[tuple[int, torch.dtype]]


@dataclass(frozen=True)
class Declared:
    """The model that a process works on: name and shape of each tensor, in the order of the flat
    vector.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    # (length, dtype) of what comes with an event, where that is known
    vectors: Mapping[type[Event], Vectors] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls, layout: Layout, vectors: Mapping[type[Event], Vectors] = MappingProxyType({})
    ) -> "Declared":
        spans = (*layout.parameters, *layout.buffers)
        return cls(tuple((span.name, tuple(span.shape)) for span in spans), vectors)

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors)

    def difference(self, other: "Declared") -> str | None:
        """The first thing in which the other model differs, in words; None if it does not."""
        if len(self.tensors) != len(other.tensors):
            return f"{len(other.tensors)} tensors instead of {len(self.tensors)}"
        for (name, shape), (its_name, its_shape) in zip(self.tensors, other.tensors, strict=True):
            if (name, shape) != (its_name, its_shape):
                return (
                    f"a tensor {its_name!r:.80} of shape {its_shape} instead of {name!r} of shape"
                    f" {shape}"
                )
        return None


@dataclass(frozen=True)
class WireLimits:
    """The vectors that may arrive, as (dtype, length): everything else is refused before memory is
    taken.
    """

    vectors: frozenset[tuple[str, int]]
    exact: Mapping[type[Event], frozenset[tuple[str, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, declared: Declared) -> "WireLimits":
        """Of an event of which nothing is known: models in float32; sums of Sync-cloud in float64,
        alone or with their weight behind them.
        """
        size = declared.size
        exact = {
            kind: frozenset((tensorfile.CODES[dtype], length) for length, dtype in vectors)
            for kind, vectors in declared.vectors.items()
        }
        return cls(frozenset({("F32", size), ("F64", size), ("F64", size + 1)}), exact)

    def with_event(self, event: Event) -> frozenset[tuple[str, int]]:
        return self.exact.get(type(event), self.vectors)

    def largest_bytes(self, event: Event) -> int:
        vectors = self.with_event(event)
        most = max((size * WIRE_DTYPES[dtype].itemsize for dtype, size in vectors), default=0)
        return most + 8 + HEADER_BYTES


# ------------------------------------------------------------------------------------------------
# sending
class Parcel:
    """A letter on its way out; beyond the model itself, memory for one chunk is taken."""

    def __init__(self, letter: Letter, number: int = 0) -> None:
        self.letter = letter
        self.number = number
        self._event = json.dumps(encode_event(letter.event), separators=(",", ":")).encode()
        self._header, self._body = b"", memoryview(b"")
        if letter.model is not None:
            self._header = tensorfile.file_head({str(letter.event.model): letter.model})  # type: ignore[attr-defined]
            self._body = tensorfile.values_of(letter.model)
        self.total = len(self._header) + len(self._body)
        self.filled = self._offset = 0
        self._digest = hashlib.sha256()

    @property
    def is_whole(self) -> bool:
        return self.filled == self.total

    def go_on_from(self, part: Part) -> None:
        """Leave out what the receiver has, if that is the beginning of this letter."""
        if part.event != self._event or not 0 < part.offset < part.bytes == self.total:
            return
        digest = hashlib.sha256()
        for start in range(0, part.offset, CHUNK_BYTES):
            digest.update(self._data(start, min(start + CHUNK_BYTES, part.offset)))
        if digest.digest() == part.digest:
            self.filled = self._offset = part.offset
            self._digest = digest

    def message(self) -> Frame:
        return Frame(
            message=Message(
                number=self.number,
                event=self._event,
                clock=self.letter.clock,
                bytes=self.total,
                offset=self._offset,
            )
        )

    def chunk(self, size: int) -> Frame:
        """The next part of the model, of at most so many bytes."""
        start, stop = self.filled, min(self.filled + size, self.total)
        data = self._data(start, stop)
        self._digest.update(data)
        self.filled = stop
        last = self._digest.digest() if self.is_whole else b""
        crc = zlib.crc32(data)
        return Frame(chunk=Chunk(number=self.number, offset=start, data=data, crc=crc, digest=last))

    def _data(self, start: int, stop: int) -> bytes:
        head = len(self._header)
        body = self._body[max(start - head, 0) : max(stop - head, 0)]
        return self._header[start:stop] + bytes(body)


def encode(letter: Letter, number: int = 0) -> Iterator[Frame]:
    """The frames of a letter, made one at a time."""
    parcel = Parcel(letter, number)
    yield parcel.message()
    while not parcel.is_whole:
        yield parcel.chunk(CHUNK_BYTES)


# ------------------------------------------------------------------------------------------------
# receiving
def decode(frames: Iterable[Frame], limits: WireLimits, sender: Actor, to: Actor) -> Letter:
    """The letter that these frames hold, all of them; raises `Refused`."""
    assembler = Assembler(sender, to, limits)
    letter = None
    for frame in frames:
        if letter is not None:
            raise Refused("chunk", f"a frame follows the end of the letter from {sender}")
        letter = (
            assembler.message(frame.message)
            if frame.HasField("message")
            else assembler.chunk(frame.chunk)
        )
    if letter is None:
        raise Refused("cut", f"the frames from {sender} end before the letter does")
    return letter


class Assembler:
    """Puts the letters of one peer together, at most one at a time."""

    def __init__(
        self, sender: Actor, to: Actor, limits: WireLimits, kept: "Arriving | None" = None
    ) -> None:
        """`kept` is what a connection that broke has brought of a letter."""
        self.sender = sender
        self.to = to
        self.limits = limits
        self._kept = kept
        self._parcel: Arriving | None = None
        self._passed_over: int | None = None

    @property
    def is_open(self) -> bool:
        return self._parcel is not None

    def take(self) -> "Arriving | None":
        """What is here of a letter; it goes on elsewhere."""
        taken, self._parcel = self._parcel or self._kept, None
        if taken is not None:
            self._kept, self._passed_over = None, taken.message.number
        return taken

    def pass_over(self, number: int) -> None:
        """Chunks of this letter are thrown away: it has been refused."""
        self._parcel, self._passed_over = None, number

    def message(self, message: Message) -> Letter | None:
        """Begin a letter; it is returned if nothing follows."""
        cut = self._parcel
        self.pass_over(message.number)
        if cut is not None:
            raise Refused(
                "cut",
                f"{self.sender} began letter {message.number} before letter {cut.message.number}"
                " had ended; both are dropped",
            )
        event = self._event(message.event)
        check_clock(message.clock)
        if message.bytes == 0:
            return Letter(self.sender, self.to, event, None, message.clock)
        self._check_length(event, message.bytes)
        kept, self._kept = self._kept, None
        parcel = Arriving(message, event, self.limits)
        if message.offset > 0:
            if kept is None or not kept.goes_on_with(message):
                raise Refused(
                    "chunk",
                    f"a letter goes on at byte {message.offset}, but not so much of it is here",
                )
            parcel, parcel.message = kept, message
        self._parcel, self._passed_over = parcel, None
        return None

    def chunk(self, chunk: Chunk) -> Letter | None:
        """Go on with a letter; it is returned with its last chunk."""
        if self._parcel is None and chunk.number == self._passed_over:
            return None
        parcel = self._parcel
        if parcel is None or chunk.number != parcel.message.number:
            raise Refused(
                "chunk", f"a chunk of letter {chunk.number} came, but no such letter was begun"
            )
        try:
            model = parcel.add(chunk)
        except Refused:
            self.pass_over(chunk.number)
            raise
        if model is None:
            return None
        self._parcel = None
        return Letter(self.sender, self.to, parcel.event, model, parcel.message.clock)

    def _event(self, raw: bytes) -> Event:
        is_report = raw.startswith(b'{"ServerReady"')
        most = EVENT_BYTES + JOURNAL_BYTES * is_report
        if len(raw) > most:
            raise Refused("event", f"an event of {len(raw)} bytes exceeds {most}")
        try:
            event = decode_event(json.loads(raw))
        except (ValueError, RecursionError, TypeError) as error:
            raise Refused(
                "event", f"not an event that this version knows: {error!s:.200}"
            ) from None
        check_sender(event, self.sender, self.to)
        check_values(event)
        assert isinstance(event, Event)
        return event

    def _check_length(self, event: Event, length: int) -> None:
        if not hasattr(event, "model"):
            raise Refused(
                "model",
                f"{type(event).__name__} comes with a model of {length} bytes, but names none",
            )
        most = self.limits.largest_bytes(event)
        if length > most:
            raise Refused(
                "size",
                f"a model of {length} bytes exceeds {most}, the most that can come with"
                f" {type(event).__name__}",
            )


def encode_notice(notice: Any) -> Frame:
    """One frame: the kind, and its fields as JSON, without those that say nothing."""
    (kind,) = (kind for kind, form in NOTICES.items() if form is type(notice))
    fields = ((name, getattr(notice, name)) for name in type(notice).__slots__)
    body = {name: value for name, value in fields if value not in (None, ())}
    return Frame(notice=NoticeFrame(kind=kind, body=json.dumps(body)))


def decode_notice(kind: str, body: Mapping[str, Any], sender: Actor, to: Actor) -> Notice | None:
    """The inverse; None for a kind that only newer software knows. So are fields passed over."""
    form = NOTICES.get(kind)
    if form is None:
        return None
    try:
        notice: Notice = form(
            **{name: _READ[name](body[name]) for name in form.__slots__ if name in body}
        )
    except (TypeError, ValueError):
        raise Refused("notice", f"{sender} gave a notice that cannot be: {body!r:.200}") from None
    if form in SENDERS:
        check_sender(notice, sender, to)
    return notice


def _counter(value: Any) -> int:
    if not is_counter(value) and not (type(value) is int and value == -1):
        raise ValueError(value)
    return int(value)


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MOST:
        raise ValueError(value)
    return float(value)


def _members(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(is_counter, value)):
        raise ValueError(value)
    return tuple(value)


_READ: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("phase", "round", "number"), _counter),
    **dict.fromkeys(("open", "finished"), bool),
    "elapsed": _seconds,
    "members": _members,
    "clock": lambda value: value if is_time(value) else None,  # one that is wrong says nothing
}


class Arriving:
    """A letter of which not all chunks are here yet."""

    def __init__(self, message: Message, event: Event, limits: WireLimits) -> None:
        self.message = message
        self.event = event
        self._vectors = limits.with_event(event)
        self._filled = 0
        self._digest = hashlib.sha256()
        self._model = torch.empty(0)
        self._header_bytes = 0

    @property
    def part(self) -> Part:
        """What is here, for its sender."""
        message = self.message
        digest = self._digest.digest()
        return Part(event=message.event, bytes=message.bytes, offset=self._filled, digest=digest)

    def goes_on_with(self, message: Message) -> bool:
        return (message.event, message.bytes, message.offset) == (
            self.message.event,
            self.message.bytes,
            self._filled,
        )

    def add(self, chunk: Chunk) -> Tensor | None:
        """Check a chunk and put it in its place; the model, once it is whole."""
        data, total = chunk.data, self.message.bytes
        least, most = (min(size, total - self._filled) for size in (LEAST_CHUNK, CHUNK_BYTES))
        if chunk.offset != self._filled or not least <= len(data) <= most:
            raise Refused(
                "chunk",
                f"a chunk of {len(data)} bytes at {chunk.offset} came; {least} to {most} bytes at"
                f" {self._filled} were due",
            )
        if zlib.crc32(data) != chunk.crc:
            raise Refused(
                "checksum",
                f"the chunk at {chunk.offset} was damaged on its way: its CRC does not fit",
            )
        if self._filled == 0:
            self._begin(data)
        self._digest.update(data)
        self._place(data)
        if self._filled < total:
            return None
        if self._digest.digest() != chunk.digest:
            raise Refused(
                "checksum",
                f"the model {self._name} was damaged on its way: its digest does not fit",
            )
        return self._model

    @property
    def _name(self) -> str:
        return str(getattr(self.event, "model", ""))

    def _begin(self, data: bytes) -> None:
        """Read the header of the file and take memory for the vector that it declares, if that may
        come.
        """
        (length,) = struct.unpack_from("<Q", data) if len(data) >= 8 else (0,)
        if not 2 <= length <= min(HEADER_BYTES, len(data) - 8):
            raise Refused(
                "model",
                f"a safetensors header of {length} bytes in a first chunk of {len(data)}; at most"
                f" {HEADER_BYTES} may come",
            )
        dtype, size = _declared_vector(data[8 : 8 + length], self._name)
        if (dtype, size) not in self._vectors:
            allowed = ", ".join(f"{n} of {d}" for d, n in sorted(self._vectors))
            raise Refused(
                "model", f"a model of {size} values of {dtype} does not fit; accepted: {allowed}"
            )
        if self.message.bytes != 8 + length + size * WIRE_DTYPES[dtype].itemsize:
            raise Refused(
                "size",
                f"{self.message.bytes} bytes were announced, but {size} values of {dtype} need"
                " another length",
            )
        self._header_bytes = 8 + length
        self._model = torch.empty(size, dtype=WIRE_DTYPES[dtype])
        self._bytes = self._model.view(torch.uint8).numpy()

    def _place(self, data: bytes) -> None:
        body = memoryview(data)[max(self._header_bytes - self._filled, 0) :]
        start = max(self._filled - self._header_bytes, 0)
        self._bytes.data[start : start + len(body)] = body
        self._filled += len(data)


def _declared_vector(header: bytes, name: str) -> tuple[str, int]:
    """Dtype and length of the one flat tensor that a safetensors header declares."""
    try:
        its_name, dtype, (size,), start, stop = tensorfile.sole_tensor(header)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Refused(
            "model", f"the header of the model does not declare one flat tensor ({error!s:.100})"
        ) from None
    if its_name != name:
        raise Refused(
            "model", f"the model is called {its_name!r:.80}, but the event names {name!r}"
        )
    if not isinstance(dtype, str) or dtype not in WIRE_DTYPES:
        raise Refused(
            "dtype", f"a model of dtype {dtype!r:.20} came; known: {', '.join(WIRE_DTYPES)}"
        )
    if not (
        type(size) is int
        and 0 <= size <= LARGEST_NUMBER
        and start == 0
        and stop == size * WIRE_DTYPES[dtype].itemsize
    ):
        raise Refused(
            "model",
            f"the header declares {size!s:.30} values in bytes {start!s:.30} to {stop!s:.30}, which"
            " do not agree",
        )
    return dtype, size
