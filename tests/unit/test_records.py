"""What a run leaves on disk: the table, the event log, tensors. Round trips, cuts at every byte,
foreign files.
"""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, strategies as st

import fedbcd as fb
from fedbcd.describe import describe
from fedbcd.errors import RecordError
from fedbcd.protocol import messages
from fedbcd.protocol.messages import (
    Absorb,
    Command,
    Event,
    MixModels,
    Send,
    Started,
    StepModel,
    Trained,
    Uploaded,
    Woke,
)
from fedbcd.record.eventlog import BEFORE, LogReader, LogWriter, Transition, decode, encode
from fedbcd.record.history import FIRST_COLUMNS, History, Row, columns_of
from support.exploring import examples

EXACT = examples(30)
floats = st.floats()
COLUMNS = columns_of(["accuracy", "f1_macro", "loss"], validation=True)
rows = st.fixed_dictionaries(
    {name: st.integers(0, 10**9) if name in History.whole else floats for name in COLUMNS}
).map(lambda found: Row({name: found[name] for name in COLUMNS}))


def row(*values: float) -> Row:
    """Of the columns of version 0.1.0, without certificates."""
    return History.of_plain([list(values)])[0]


ROWS = [
    row(0, 0.0, 0, 0.1, 0.1, math.nan, 0.0, 0.0),
    row(5, 12.5, 150, 1 / 3, 0.9, math.nan, 1e-17, 2.0),
    row(10, 31.25, 300, 0.7, 0.95, 0.8, 0.25, 3.0),
]


# ------------------------------------------------------------------------------------------------
# history
@EXACT
@given(table=st.lists(rows, max_size=5))
def test_a_history_survives_being_written(
    table: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every bit of every float, and every column; NaN and infinities too."""
    path = tmp_path_factory.mktemp("history") / "history.csv"
    History(table).write_csv(path)
    assert History.read_csv(path) == History(table)
    assert History.of_plain(json.loads(json.dumps(History(table).plain()))) == History(table)


def test_a_history_is_a_sequence_of_rows() -> None:
    history = History(ROWS[:2])
    history.append(ROWS[2])
    assert len(history) == 3
    assert history[1] is ROWS[1]
    assert history[-1] is history.last is ROWS[2]
    assert list(history) == ROWS
    assert history[1:] == History(ROWS[1:])
    assert history.column("round") == [0, 5, 10]
    assert history.column("personal_accuracy") == [0.1, 0.9, 0.95]


def test_histories_with_nan_in_the_same_places_are_equal() -> None:
    """NaN means 'no test set' here, and two such runs are the same."""
    assert History(ROWS) == History([row.changed() for row in ROWS])
    assert History(ROWS) != History([*ROWS[:2], ROWS[2].changed(worst_decile=math.nan)])
    assert History(ROWS) != History(ROWS[:2])
    assert History(ROWS) != ROWS


def test_an_unknown_column_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no column 'accuracy'.*\?\); there are round, clock"):
        History(ROWS).column("accuracy")


def test_a_history_prints_as_a_table() -> None:
    lines = repr(History(ROWS)).splitlines()
    assert len(lines) == 4
    assert lines[0].split() == list(FIRST_COLUMNS[:8])  # there are no certificates
    assert lines[2].split()[:4] == ["5", "12.5", "150", "0.333333"]


def test_a_history_becomes_a_data_frame() -> None:
    pytest.importorskip("pandas")
    frame = History(ROWS).to_pandas()
    assert list(frame.columns) == list(FIRST_COLUMNS)
    assert frame["round"].tolist() == [0, 5, 10]
    assert frame["round"].dtype.kind == "i"
    assert frame["global_accuracy"].tolist() == [0.1, 1 / 3, 0.7]
    assert frame["worst_decile"].isna().tolist() == [True, True, False]
    assert History().to_pandas().empty


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a,b,c\n1,2,3\n",
        b"round,clock\n1,2\n",
        ",".join(FIRST_COLUMNS).encode() + b"\n1,2,3\n",
        ",".join(FIRST_COLUMNS).encode() + b"\n1,2,3,4,5,6,7,eight\n",
        ",".join(FIRST_COLUMNS).encode() + b"\n1.5,2,3,4,5,6,7,8\n",
        ",".join(FIRST_COLUMNS).encode() + b'\n1,2,3,4,5,6,7,"8',
        ",".join(FIRST_COLUMNS).encode() + b"\n" + b"1" * 200_000 + b",2,3,4,5,6,7,8\n",
        b"\xff\xfe\x00",
        b"PK\x03\x04\x00\x00",
    ],
    ids=[
        "empty",
        "foreign",
        "fewer",
        "short row",
        "word",
        "half round",
        "open quote",
        "huge",
        "not text",
        "zip",
    ],
)
def test_a_foreign_or_damaged_table_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "history.csv"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"history.csv is not a history of this version"):
        History.read_csv(path)


def test_a_missing_table_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"nothing.csv is not a history"):
        History.read_csv(tmp_path / "nothing.csv")


# ------------------------------------------------------------------------------------------------
# messages
KINDS = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Event | Command) and kind not in (Event, Command)
]
EVENTS = [kind for kind in KINDS if issubclass(kind, Event)]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    if hint is int:
        return st.integers(0, 2**53)
    if hint is bool:
        return st.booleans()
    if hint is str:
        return st.text(max_size=8)
    if hint is Event:
        return st.sampled_from(EVENTS).flatmap(message_of)
    assert get_origin(hint) is tuple
    return st.lists(strategy_of(get_args(hint)[0]), max_size=3).map(tuple)


def message_of(kind: type) -> st.SearchStrategy[Any]:
    return st.builds(
        kind, **{name: strategy_of(hint) for name, hint in get_type_hints(kind).items()}
    )


@every_kind
@examples(15)
@given(data=st.data())
def test_every_message_survives_being_recorded(kind: type, data: st.DataObject) -> None:
    message = data.draw(message_of(kind))
    assert decode(json.loads(json.dumps(encode(message)))) == message


def sample_of(kind: type) -> Any:
    samples: dict[Any, Any] = {int: 3, bool: True, str: "z/1", Event: Started()}
    return kind(**{name: samples.get(hint, ()) for name, hint in get_type_hints(kind).items()})


@every_kind
def test_a_message_with_a_field_too_many_or_too_few_is_refused(kind: type) -> None:
    encoded = encode(sample_of(kind))
    fields = encoded[kind.__name__]
    with pytest.raises(ValueError, match=kind.__name__):
        decode({kind.__name__: {**fields, "extra": 1}})
    for name in fields.keys() - BEFORE.get(kind.__name__, {}).keys():
        with pytest.raises(ValueError, match=kind.__name__):
            decode({kind.__name__: {key: value for key, value in fields.items() if key != name}})


@every_kind
def test_a_field_of_the_wrong_type_is_refused(kind: type) -> None:
    encoded, hints = encode(sample_of(kind)), get_type_hints(kind).items()
    for wrong in (None, 1.5, True, {}, [1.5], [[]], ["a", 1]):
        for name in [name for name, hint in hints if type(wrong) is not hint]:
            with pytest.raises(ValueError):
                decode({kind.__name__: {**encoded[kind.__name__], name: wrong}})


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        "Woke",
        [],
        {},
        {"Woke": {}, "Started": {}},
        {"Woke": []},
        {"Event": {}},
        {"Nonsense": {}},
        {"__class__": {}},
        {"Trained": {"activation": [1], "steps": 2}},
        {"Send": {"to": "server/0", "message": {"Dismiss": {"device": 1}}}},
        {"MixModels": {"round": 0, "iteration": 0, "servers": ["a"], "models": [], "results": []}},
    ],
    ids=repr,
)
def test_what_is_no_message_is_refused(data: Any) -> None:
    with pytest.raises(ValueError):
        decode(data)


# ------------------------------------------------------------------------------------------------
# event log
TRANSITIONS = [
    Transition(0.0, "server/0", Started(), ()),
    Transition(
        0.1,
        "device/7",
        Woke(),
        (Send(to="server/0", message=Uploaded(device=7, activation=0, model="x/7/0")),),
    ),
    Transition(
        1 / 3,
        "server/0",
        Uploaded(device=7, activation=0, model="x/7/0"),
        (Absorb(device=7, activation=0),),
    ),
    Transition(
        2.5,
        "coordinator",
        Trained(activation=0, steps=5),
        (
            MixModels(
                round=0,
                iteration=0,
                servers=(1, 0),
                models=("z/1/0", "z/0/0"),
                results=("w/0/0/1", "w/0/0/0"),
            ),
            StepModel(mixed="w/0/0/1", model="z/1/0", result="z/1/1"),
        ),
    ),
]
HEADER = {"identity": {"seed": 3, "text": "Grüße"}, "job": {}}
END = {"transitions": len(TRANSITIONS), "rounds": 1, "clock": 2.5, "digest": "abc"}


def write_log(path: Path, end: dict[str, Any] | None = END) -> Path:
    writer = LogWriter(path, HEADER)
    for step in TRANSITIONS:
        writer.append(step.time, step.actor, step.event, list(step.commands))
    if end is not None:
        writer.end(end)
    writer.close()
    return path


def read_log(path: Path) -> tuple[list[Transition], dict[str, Any] | None]:
    reader = LogReader(path)
    return list(reader), reader.end


def test_a_log_survives_being_written(tmp_path: Path) -> None:
    reader = LogReader(write_log(tmp_path / "events.jsonl"))
    assert reader.header == {"fedbcd_log": 1, **HEADER}
    assert reader.end is None, "not read so far"
    assert list(reader) == TRANSITIONS
    assert reader.end == END


def test_a_log_can_be_read_twice(tmp_path: Path) -> None:
    reader = LogReader(write_log(tmp_path / "events.jsonl"))
    assert list(reader) == list(reader) == TRANSITIONS


def test_a_log_without_an_end_is_a_run_that_goes_on(tmp_path: Path) -> None:
    assert read_log(write_log(tmp_path / "events.jsonl", end=None)) == (TRANSITIONS, None)


def test_the_header_is_on_disk_as_soon_as_the_log_is_open(tmp_path: Path) -> None:
    """A run that is killed at once must leave a log that says whose it is."""
    writer = LogWriter(tmp_path / "events.jsonl", HEADER)
    assert LogReader(tmp_path / "events.jsonl").header["identity"] == HEADER["identity"]
    writer.close()


def test_a_new_log_never_overwrites_an_old_one(tmp_path: Path) -> None:
    path = write_log(tmp_path / "events.jsonl")
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        LogWriter(path, HEADER)
    assert path.read_bytes() == before


def test_going_on_with_a_log_cuts_it_to_what_is_kept(tmp_path: Path) -> None:
    whole = write_log(tmp_path / "whole.jsonl").read_bytes()
    path = write_log(tmp_path / "events.jsonl")
    keep = sum(len(line) for line in whole.splitlines(keepends=True)[:3])
    writer = LogWriter(path, keep=keep)
    for step in TRANSITIONS[2:]:
        writer.append(step.time, step.actor, step.event, list(step.commands))
    writer.end(END)
    assert writer.sync() == len(whole)
    writer.close()
    assert path.read_bytes() == whole


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "events.jsonl", HEADER)
    writer.close()
    writer.close()


def test_a_log_cut_at_any_byte_is_refused_or_read_as_complete_lines(tmp_path: Path) -> None:
    """A crash may cut the file anywhere. What is read is a prefix of what happened; the rest is a
    RecordError, nothing else.
    """
    whole = write_log(tmp_path / "whole.jsonl").read_bytes()
    ends = {0}
    for line in whole.splitlines(keepends=True):
        ends.add(max(ends) + len(line))
    path = tmp_path / "events.jsonl"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        if cut in ends and cut > 0:
            complete = sorted(ends).index(cut) - 1
            assert read_log(path) == (TRANSITIONS[:complete], None)
        else:
            with pytest.raises(RecordError, match=r"events.jsonl line \d+ is damaged or cut short"):
                read_log(path)


def test_a_log_with_any_byte_changed_never_crashes(tmp_path: Path) -> None:
    whole = write_log(tmp_path / "whole.jsonl").read_bytes()
    path = tmp_path / "events.jsonl"
    for place in range(0, len(whole), 3):
        for byte in (0x00, 0x7B, 0x80, 0x22):
            path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            with contextlib.suppress(RecordError):
                read_log(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "line 1 is damaged or cut short"),
        (b"\n", "line 1 is damaged or cut short"),
        (b"hello\n", "line 1 is damaged or cut short"),
        (b"[1, 2]\n", "line 1 is damaged or cut short"),
        (b"\xff\xfe\n", "line 1 is damaged or cut short"),
        (b"[" * 100_000 + b"\n", "line 1 is damaged or cut short"),
        (b'{"a": 1}\n', "is not a fedbcd event log"),
        (b'{"fedbcd_log": 2}\n', "is an event log of version 2; this fedbcd reads version 1"),
        (b'{"fedbcd_log": "1"}\n', "is an event log of version 1; this fedbcd reads version 1"),
    ],
    ids=["empty", "blank", "words", "list", "bytes", "deep", "other json", "newer", "text"],
)
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "foreign.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=f"foreign.jsonl {complaint}"):
        LogReader(path)


def test_a_missing_log_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.jsonl", tmp_path):
        with pytest.raises(RecordError, match="there is no event log at"):
            LogReader(path)


def nested_sends(depth: int) -> str:
    return '{"Send":{"to":"x","message":' * depth + '{"Woke":{}}' + "}}" * depth


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '{"t": 0, "on": "server/0"}',
        '{"t": 0, "on": "server/0", "event": {"Dismiss": {"device": 1}}, "do": []}',
        '{"t": 0, "on": "server/0", "event": {"Woke": {}}, "do": [{"Woke": {}}]}',
        '{"t": 0, "on": "server/0", "event": {"Woke": {}}, "do": {"Woke": {}}}',
        '{"t": 0, "on": "server/0", "event": {"Woke": {}}, "do": 7}',
        '{"t": "soon", "on": "server/0", "event": {"Woke": {}}, "do": []}',
        '{"t": null, "on": "server/0", "event": {"Woke": {}}, "do": []}',
        '{"t": 1' + "0" * 400 + ', "on": "server/0", "event": {"Woke": {}}, "do": []}',
        '{"t": 0, "on": "server/0", "event": {"Woke": {}}, "do": [' + nested_sends(2) + "]}",
        '{"t": 0, "on": "server/0", "event": {"Woke": {}}, "do": [' + nested_sends(700) + "]}",
        '{"end": 3}',
        '{"end": {"digest": "abc"}}',
    ],
    ids=lambda line: line[:70],
)
def test_a_line_that_is_no_transition_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    path = write_log(tmp_path / "events.jsonl", end=None)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RecordError, match=r"events.jsonl line 6"):
        read_log(path)


def test_a_line_after_the_end_is_refused(tmp_path: Path) -> None:
    path = write_log(tmp_path / "events.jsonl")
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines(keepends=True)[1])
    with pytest.raises(RecordError, match=r"events.jsonl line 7 comes after the end"):
        read_log(path)


@pytest.mark.parametrize("gone", range(1, 5))
def test_a_finished_log_that_lost_a_line_is_refused(tmp_path: Path, gone: int) -> None:
    path = write_log(tmp_path / "events.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:gone] + lines[gone + 1 :]))
    with pytest.raises(RecordError, match="ends a run of 4 transitions, but 3 are recorded"):
        read_log(path)


# ------------------------------------------------------------------------------------------------
# describe
@dataclasses.dataclass(frozen=True)
class Inner:
    values: tuple[float, ...]
    name = "inner"


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    items: tuple[Inner, ...]
    count: int | None = None


def test_a_value_is_described_as_plain_data() -> None:
    """Names, lists and numbers only, so that JSON and TOML can hold it. Kinds of fedbcd have their
    name, those of other people the path by which they are imported.
    """
    described = describe(Outer(Inner((1.0, 2.0)), (Inner(()),)))
    assert described == {
        "name": "test_records:Outer",
        "inner": {"name": "test_records:Inner", "values": [1.0, 2.0]},
        "items": [{"name": "test_records:Inner", "values": []}],
        "count": None,
    }
    assert describe(fb.Box(-1, 1)) == {"name": "box", "low": -1.0, "high": 1.0}
    assert json.loads(json.dumps(described)) == described
