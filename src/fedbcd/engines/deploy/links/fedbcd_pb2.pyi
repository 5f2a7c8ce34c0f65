from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("hello", "welcome", "refused", "message", "chunk", "notice", "got")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    GOT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    welcome: Welcome
    refused: Refused
    message: Message
    chunk: Chunk
    notice: Notice
    got: Got
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., message: _Optional[_Union[Message, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., got: _Optional[_Union[Got, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("oldest", "newest", "software", "actor", "to", "instance", "about", "model", "nonce", "part")
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    oldest: int
    newest: int
    software: str
    actor: str
    to: str
    instance: bytes
    about: str
    model: _containers.RepeatedCompositeFieldContainer[TensorShape]
    nonce: bytes
    part: Part
    def __init__(self, oldest: _Optional[int] = ..., newest: _Optional[int] = ..., software: _Optional[str] = ..., actor: _Optional[str] = ..., to: _Optional[str] = ..., instance: _Optional[bytes] = ..., about: _Optional[str] = ..., model: _Optional[_Iterable[_Union[TensorShape, _Mapping]]] = ..., nonce: _Optional[bytes] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class TensorShape(_message.Message):
    __slots__ = ("name", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "software", "actor", "about", "certificate", "signature", "part")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    version: int
    software: str
    actor: str
    about: str
    certificate: bytes
    signature: bytes
    part: Part
    def __init__(self, version: _Optional[int] = ..., software: _Optional[str] = ..., actor: _Optional[str] = ..., about: _Optional[str] = ..., certificate: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("event", "bytes", "offset", "digest")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    event: bytes
    bytes: int
    offset: int
    digest: bytes
    def __init__(self, event: _Optional[bytes] = ..., bytes: _Optional[int] = ..., offset: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "sentence", "final")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    sentence: str
    final: bool
    def __init__(self, reason: _Optional[str] = ..., sentence: _Optional[str] = ..., final: _Optional[bool] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("number", "event", "clock", "bytes", "offset")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    number: int
    event: bytes
    clock: float
    bytes: int
    offset: int
    def __init__(self, number: _Optional[int] = ..., event: _Optional[bytes] = ..., clock: _Optional[float] = ..., bytes: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("number", "offset", "data", "crc", "digest")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    offset: int
    data: bytes
    crc: int
    digest: bytes
    def __init__(self, number: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Got(_message.Message):
    __slots__ = ("number", "bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    bytes: int
    def __init__(self, number: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "body")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    body: str
    def __init__(self, kind: _Optional[str] = ..., body: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("body",)
    BODY_FIELD_NUMBER: _ClassVar[int]
    body: str
    def __init__(self, body: _Optional[str] = ...) -> None: ...

class ChangeRequest(_message.Message):
    __slots__ = ("what", "device")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    what: str
    device: int
    def __init__(self, what: _Optional[str] = ..., device: _Optional[int] = ...) -> None: ...

class ChangeReply(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    def __init__(self, changed: _Optional[bool] = ...) -> None: ...
