"""What has happened at a role, as a short text that its peer keeps: so its log is in two places."""

import base64
import json
import zlib
from collections.abc import Sequence

from fedbcd.errors import RecordError
from fedbcd.protocol.messages import Event
from fedbcd.record.eventlog import decode, encode

MOST_BYTES = 1 << 24  # of what a text may hold


def pack(first: int, events: Sequence[Event]) -> str:
    """Events of a log, the first of which has this number."""
    plain = json.dumps([encode(event) for event in events], separators=(",", ":")).encode()
    return f"{first}:{base64.b64encode(zlib.compress(plain)).decode()}"


def unpack(text: str) -> tuple[int, list[Event]]:
    """The inverse; a `RecordError` for what is none."""
    try:
        first, _, packed = text.partition(":")
        stream = zlib.decompressobj()
        plain = stream.decompress(base64.b64decode(packed, validate=True), MOST_BYTES)
        if not stream.eof:
            raise ValueError("it is cut off, or too long")
        events = [decode(data) for data in json.loads(plain)]
        if not all(isinstance(event, Event) for event in events) or int(first) < 0:
            raise ValueError("events are expected")
        return int(first), events  # type: ignore[return-value]
    except (ValueError, TypeError, zlib.error, RecursionError) as error:
        raise RecordError(f"what a peer has kept of a log is damaged ({error})") from None
