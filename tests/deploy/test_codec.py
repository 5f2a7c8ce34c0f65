"""Letters as frames: bit for bit there and back, and nothing that does not fit comes through."""

import random
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from google.protobuf.message import DecodeError
from safetensors.torch import load

from fedbcd.algorithm.params import Layout
from fedbcd.engines.deploy.links import fedbcd_pb2
from fedbcd.engines.deploy.links.codec import (
    CHUNK_BYTES,
    Assembler,
    Declared,
    WireLimits,
    decode,
    encode,
)
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.errors import Refused
from fedbcd.protocol.messages import DeviceLost, Event, ServerReady, UpdateRequested, Uploaded
from support.wire import DEVICE, SERVER, declared, up

SIZE = 3 * CHUNK_BYTES // 4 + 5  # floats: a bit more than three chunks
MODEL = torch.arange(SIZE, dtype=torch.float32)


def _decode(frames: list[Frame], size: int = SIZE) -> Letter:
    return decode(frames, WireLimits.of(declared(size)), DEVICE, SERVER)


def _frames() -> list[Frame]:
    return list(encode(up(MODEL, 4), number=9))


def test_the_generated_code_is_that_of_the_schema(tmp_path: Path) -> None:
    here = Path(str(fedbcd_pb2.__file__))
    source = here.parents[4]
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I",
        str(source),
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
    ]
    subprocess.run([*command, "fedbcd/engines/deploy/links/fedbcd.proto"], check=True, cwd=source)
    for suffix in (".py", ".pyi"):
        fresh = tmp_path / "fedbcd/engines/deploy/links" / f"fedbcd_pb2{suffix}"
        assert fresh.read_text() == here.with_suffix(suffix).read_text(), (
            f"run: python -m grpc_tools.protoc (see {here.name})"
        )


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES // 4 - 1, CHUNK_BYTES // 4, 109_386])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_letter_comes_back_bit_for_bit(size: int, dtype: torch.dtype) -> None:
    model = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=dtype)
    got = _decode(list(encode(up(model, 4))), size)
    assert got.model is not None
    assert torch.equal(got.model.view(torch.uint8), model.view(torch.uint8))
    assert (got.sender, got.to, got.event, got.clock) == (DEVICE, SERVER, up(model, 4).event, 1.0)


def test_values_that_are_not_numbers_keep_their_bits() -> None:
    """The codec is no judge of values: what is not finite is for the role to refuse."""
    model = torch.tensor([float("nan"), float("inf"), -0.0])
    got = _decode(list(encode(up(model))), 3)
    assert got.model is not None
    assert torch.equal(got.model.view(torch.int32), model.view(torch.int32))


def test_the_chunks_are_a_safetensors_file() -> None:
    data = b"".join(frame.chunk.data for frame in _frames()[1:])
    (name,) = load(data)
    assert name == "x/7/4"
    assert torch.equal(load(data)[name], MODEL)


def test_a_strided_model_is_sent_as_it_reads() -> None:
    model = torch.arange(10.0)[::2]
    got = _decode(list(encode(up(model))), 5)
    assert got.model is not None
    assert torch.equal(got.model, model)


def test_frames_are_made_one_at_a_time() -> None:
    frames = encode(up(MODEL))
    assert next(frames).message.bytes > SIZE * 4
    assert len(next(frames).chunk.data) == CHUNK_BYTES


def test_what_is_declared_is_the_layout_of_the_module() -> None:
    layout = Layout(torch.nn.Linear(4, 2))
    assert Declared.of(layout) == Declared((("weight", (2, 4)), ("bias", (2,))))
    assert Declared.of(layout).size == 10


def test_the_first_difference_between_two_models_is_named() -> None:
    mine = Declared((("weight", (2, 4)), ("bias", (2,))))
    assert mine.difference(mine) is None
    assert (
        mine.difference(Declared((("weight", (2, 5)), ("bias", (2,)))))
        == "a tensor 'weight' of shape (2, 5) instead of 'weight' of shape (2, 4)"
    )
    assert mine.difference(Declared(())) == "0 tensors instead of 2"


# ------------------------------------------------------------------------------------------------
# refusals
def _set_chunk(frames: list[Frame], place: int, /, **fields: object) -> None:
    for name, value in fields.items():
        setattr(frames[place].chunk, name, value)


def _damage(frames: list[Frame]) -> None:
    data = bytearray(frames[2].chunk.data)
    data[17] ^= 1
    _set_chunk(frames, 2, data=bytes(data))


def _damage_with_good_crc(frames: list[Frame]) -> None:
    _damage(frames)
    _set_chunk(frames, 2, crc=zlib.crc32(frames[2].chunk.data))


def _header(old: bytes, new: bytes) -> Callable[[list[Frame]], None]:
    def change(frames: list[Frame]) -> None:
        data = frames[1].chunk.data
        assert old in data[:200]
        assert len(old) == len(new)
        data = data.replace(old, new, 1)
        _set_chunk(frames, 1, data=data, crc=zlib.crc32(data))

    return change


def _first_bytes(new: bytes) -> Callable[[list[Frame]], None]:
    def change(frames: list[Frame]) -> None:
        data = new + frames[1].chunk.data[len(new) :]
        _set_chunk(frames, 1, data=data, crc=zlib.crc32(data))

    return change


def _message(**fields: object) -> Callable[[list[Frame]], None]:
    def change(frames: list[Frame]) -> None:
        for name, value in fields.items():
            setattr(frames[0].message, name, value)

    return change


def _chunk(place: int, /, **fields: object) -> Callable[[list[Frame]], None]:
    return lambda frames: _set_chunk(frames, place, **fields)


REFUSALS: list[tuple[str, str, Callable[[list[Frame]], object]]] = [
    ("checksum", "chunk at 131072 was damaged", _damage),
    ("checksum", "its digest does not fit", _damage_with_good_crc),
    ("checksum", "its digest does not fit", _chunk(4, digest=b"")),
    ("chunk", "were due", _chunk(2, offset=7)),
    ("chunk", "were due", _chunk(1, data=b"")),
    ("chunk", "were due", _chunk(2, data=b"short")),
    ("chunk", "were due", _chunk(2, data=bytes(CHUNK_BYTES + 1))),
    ("chunk", "no such letter", _chunk(2, number=8)),
    ("chunk", "no such letter", lambda frames: frames.pop(0)),
    ("chunk", "were due", lambda frames: frames.pop(2)),
    ("chunk", "follows the end", lambda frames: frames.append(frames[-1])),
    ("cut", "end before the letter does", lambda frames: frames.pop()),
    ("cut", "end before the letter does", lambda frames: frames.clear()),
    ("cut", "before letter 9 had ended", lambda frames: frames.insert(2, frames[0])),
    ("size", "exceeds", _message(bytes=2**63)),
    ("size", "exceeds", _message(bytes=SIZE * 8 + 5000)),
    ("size", "need another length", _message(bytes=SIZE * 4 + 400)),
    ("chunk", "were due", _message(bytes=100)),
    ("dtype", "dtype 'I16' came; known: F32, F64, I32", _header(b"F32", b"I16")),
    ("model", "do not agree", _header(b"F32", b"F64")),
    ("model", "do not agree", _header(b'"shape":[98309', b'"shape":[98308')),
    ("model", "is called 'x/8/4'", _header(b"x/7/4", b"x/8/4")),
    ("model", "one flat tensor", _header(b'{"x/7/4"', b'["x/7/4"')),
    ("model", "one flat tensor", _header(b'"dtype"', b'"dtypo"')),
    ("model", "safetensors header", _first_bytes(bytes(8))),
    ("model", "safetensors header", _first_bytes(b"\xff" * 8)),
    ("model", "safetensors header", _first_bytes((1025).to_bytes(8, "little"))),
    ("clock", "which is no time", _message(clock=float("nan"))),
    ("clock", "which is no time", _message(clock=-1.0)),
    ("event", "not an event", _message(event=b"")),
    ("event", "not an event", _message(event=b"\xff\xfe")),
    ("event", "not an event", _message(event=b"[" * 4000)),
    ("event", "exceeds 4096", _message(event=b" " * 4097)),
    ("event", "not an event", _message(event=b'{"Nonsense":{}}')),
    (
        "event",
        "not an event",
        _message(event=b'{"Uploaded":{"device":7,"activation":"4","model":"x/7/4"}}'),
    ),
    (
        "event",
        "not an event",
        _message(event=b'{"Uploaded":{"device":7,"activation":true,"model":"x/7/4"}}'),
    ),
    (
        "event",
        "not an event",
        _message(event=b'{"Uploaded":{"device":7,"activation":4,"model":"x/7/4","more":1}}'),
    ),
    (
        "range",
        "must be from 0 to 2^53 - 1",
        _message(event=b'{"Uploaded":{"device":7,"activation":-1,"model":"x/7/4"}}'),
    ),
    (
        "range",
        "must be from 0 to 2^53 - 1",
        _message(
            event=b'{"Uploaded":{"device":7,"activation":9223372036854775808,"model":"x/7/4"}}'
        ),
    ),
    (
        "event",
        "names no model",
        _message(event=b'{"Uploaded":{"device":7,"activation":4,"model":"../../etc"}}'),
    ),
    (
        "event",
        "must be a word",
        _message(
            event=b'{"Withdrawn":{"device":7,"activation":4,"incarnation":0,"reason":"../../etc"}}'
        ),
    ),
    ("event", "may not send", _message(event=b'{"Absorb":{"device":7,"activation":4}}')),
    (
        "identity",
        "which only device/8 may say",
        _message(event=b'{"Uploaded":{"device":8,"activation":4,"model":"x/8/4"}}'),
    ),
    ("model", "but names none", _message(event=b'{"UpdateRequested":{"device":7,"activation":4}}')),
]


@pytest.mark.parametrize(("reason", "words", "change"), REFUSALS)
def test_what_does_not_fit_is_refused(
    reason: str, words: str, change: Callable[[list[Frame]], object]
) -> None:
    frames = _frames()
    change(frames)
    with pytest.raises(Refused, match=re.escape(words)) as refused:
        _decode(frames)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "event",
    [
        DeviceLost(device=7, activation=1),
        ServerReady(server=3, phase=0, iteration=0, model="z/3/0"),
    ],
)
def test_a_device_says_only_what_is_its_to_say(event: Event) -> None:
    frames = list(encode(Letter(DEVICE, SERVER, event, None, 0.0)))
    with pytest.raises(Refused, match=r"device/7 may not send"):
        _decode(frames)


def test_a_server_speaks_for_itself_only() -> None:
    letter = Letter(
        "server/4",
        "coordinator",
        ServerReady(server=3, phase=0, iteration=0, model="z/3/0"),
        None,
        0.0,
    )
    with pytest.raises(Refused, match=r"which only server/3 may say"):
        decode(encode(letter), WireLimits.of(declared(1)), "server/4", "coordinator")


def test_after_a_refusal_the_next_letter_is_as_good_as_ever() -> None:
    assembler = Assembler(DEVICE, SERVER, WireLimits.of(declared(SIZE)))
    frames = _frames()
    _damage(frames)
    assert assembler.message(frames[0].message) is None
    assert assembler.chunk(frames[1].chunk) is None
    with pytest.raises(Refused):
        assembler.chunk(frames[2].chunk)
    assert not assembler.is_open
    assert [assembler.chunk(frame.chunk) for frame in frames[3:]] == [None] * (
        len(frames) - 3
    )  # passed over
    request = UpdateRequested(device=7, activation=1)
    (frame,) = encode(Letter(DEVICE, SERVER, request, None, 0.0), 10)
    letter = assembler.message(frame.message)
    assert letter is not None
    assert letter.event == request


def test_a_model_of_another_size_is_refused_with_what_would_fit() -> None:
    with pytest.raises(
        Refused,
        match=r"a model of 9 values of F32 does not fit; accepted: 10 of F32, 10 of F64, 11 of F64",
    ):
        _decode(list(encode(up(torch.zeros(9)))), 10)


def test_no_memory_is_taken_for_a_model_that_is_refused() -> None:
    frames = list(encode(up(torch.zeros(10))))
    frames[0].message.bytes = 2**40
    assembler = Assembler(DEVICE, SERVER, WireLimits.of(declared(10)))
    with pytest.raises(Refused):
        assembler.message(frames[0].message)
    assert not assembler.is_open


def test_no_mutation_of_the_bytes_comes_through_as_another_model() -> None:
    """2,000 seeded mutations of the serialised frames: refused, unreadable as protobuf, or the very
    same model.
    """
    model = torch.arange(20.0)
    whole = [frame.SerializeToString() for frame in encode(up(model, 4), number=9)]
    chance = random.Random(5)
    refused = 0
    for _ in range(2000):
        raw = [bytearray(part) for part in whole]
        part = chance.choice(raw)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(part))
            if chance.random() < 0.3:
                del part[place]
            else:
                part[place] = chance.randrange(256)
        try:
            frames = [Frame.FromString(bytes(part)) for part in raw]
        except DecodeError:
            continue
        try:
            letter = _decode(frames, 20)
        except Refused:
            refused += 1
            continue
        if letter.model is not None:
            assert torch.equal(letter.model, model)
            assert isinstance(letter.event, Uploaded)
    assert refused > 500


def test_an_unknown_field_of_a_newer_peer_is_passed_over() -> None:
    frames = list(encode(up(torch.zeros(3))))
    frames[1] = Frame.FromString(frames[1].SerializeToString() + b"\xba\x3e\x03abc")  # field 999
    assert _decode(frames, 3).model is not None
