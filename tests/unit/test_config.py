"""Tables to values and back: what fits, and how what does not fit is named."""

import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, strategies as st

import fedbcd as fb
from fedbcd.algorithm.methods import ALGORITHMS
from fedbcd.config import NESTED, build, check_keys, choose, convert, dump_toml, nearest, read_toml
from fedbcd.describe import describe
from fedbcd.errors import ConfigError
from fedbcd.protocol.clouds import CLOUDS
from fedbcd.schedule.delays import DELAYS
from support.exploring import examples

EXACT = examples(50)


@dataclass(frozen=True)
class Tree:
    height: float
    rings: int = 1
    name: ClassVar[str] = "tree"


@dataclass(frozen=True)
class Garden:
    size: int
    place: Literal["front", "back"] = "front"
    title: str | None = None
    shared: bool = False
    rows: tuple[int, int] = (1, 2)
    widths: tuple[float, ...] = ()
    plant: Tree = field(default_factory=lambda: Tree(1.0))
    secret: int = field(default=0, init=False)


# ------------------------------------------------------------------------------------------------
# build
def test_a_table_becomes_a_value() -> None:
    table = {
        "size": 3,
        "place": "back",
        "title": "ours",
        "shared": True,
        "rows": [4, 5],
        "widths": [1, 2.5],
    }
    built = build(Garden, table, "garden")
    assert built == Garden(3, "back", "ours", True, (4, 5), (1.0, 2.5))
    assert isinstance(built.widths[0], float)


def test_what_is_left_out_keeps_its_default() -> None:
    assert build(Garden, {"size": 3}, "garden") == Garden(3)


def test_nested_values_are_chosen_by_name() -> None:
    nested = {"plant": {"tree": Tree}}
    assert build(
        Garden, {"size": 1, "plant": {"name": "tree", "height": 7}}, "garden", nested
    ).plant == Tree(7.0)
    with pytest.raises(ConfigError, match=r"garden.plant.name = 'bush' is unknown; known: tree"):
        build(Garden, {"size": 1, "plant": {"name": "bush"}}, "garden", nested)
    with pytest.raises(ConfigError, match=r"garden.plant.height = 'tall' must be a number"):
        build(Garden, {"size": 1, "plant": {"name": "tree", "height": "tall"}}, "garden", nested)


def test_projections_are_nested_in_algorithms() -> None:
    assert "projection" in NESTED
    table = {"name": "fedbcd", "projection": {"name": "ball", "radius": 3}}
    assert choose(ALGORITHMS, table, "algorithm") == fb.FedBCD(projection=fb.Ball(3.0))


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        (
            {"size": 1, "sise": 2},
            (
                r"\[garden\] has an unknown key 'sise' \(did you mean 'size'\?\); known: place,"
                r" plant, rows, shared"
            ),
        ),
        ({"size": 1, "zzz": 2}, r"\[garden\] has an unknown key 'zzz'; known: "),
        ({"size": 1, "secret": 2}, r"unknown key 'secret'"),
        ({}, r"\[garden\] needs size, e.g. size = 1"),
        ({"size": "big"}, r"garden.size = 'big' must be a whole number"),
        ({"size": 1.0}, r"garden.size = 1.0 must be a whole number"),
        ({"size": True}, r"garden.size = True must be a whole number"),
        ({"size": 1, "shared": 1}, r"garden.shared = 1 must be true or false"),
        ({"size": 1, "title": 4}, r"garden.title = 4 must be a text"),
        ({"size": 1, "place": "side"}, r"garden.place = 'side' must be one of 'front', 'back'"),
        ({"size": 1, "rows": [1]}, r"garden.rows = \[1\] must have 2 values"),
        ({"size": 1, "rows": [1, "b"]}, r"garden.rows\[1\] = 'b' must be a whole number"),
        ({"size": 1, "rows": 5}, r"garden.rows = 5 must be a list"),
        ({"size": 1, "widths": [1.0, "wide"]}, r"garden.widths\[1\] = 'wide' must be a number"),
        (7, r"\[garden\] must be a table, not 7"),
        ([{"size": 1}], r"\[garden\] must be a table"),
    ],
)
def test_what_does_not_fit_is_named_in_words(table: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build(Garden, table, "garden")


def test_a_value_that_its_class_refuses_is_refused_with_the_words_of_the_class() -> None:
    with pytest.raises(ConfigError, match=r"box low=3.0 must be below high=1.0"):
        choose(
            ALGORITHMS,
            {"name": "fedbcd", "projection": {"name": "box", "low": 3, "high": 1}},
            "algorithm",
        )


# ------------------------------------------------------------------------------------------------
# choose
@pytest.mark.parametrize("table", [{}, {"penalty": 1.0}, 3, None])
def test_a_choice_needs_a_name(table: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"\[algorithm\] (needs|must be a table with) a name.*; known: fedbcd, fedbcd-i, fed",
    ):
        choose(ALGORITHMS, table, "algorithm")
    assert choose(ALGORITHMS, "fedbcd", "algorithm") == choose(
        ALGORITHMS, {"name": "fedbcd"}, "algorithm"
    )


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "fedbdc",
            r"algorithm.name = 'fedbdc' is unknown \(did you mean 'fedbcd'\?\); known: fedbcd",
        ),
        ("scaffold", r"algorithm.name = 'scaffold' is unknown; known: fedbcd"),
        (3, r"algorithm.name = 3 is unknown"),
        (["fedbcd"], r"algorithm.name = \['fedbcd'\] is unknown"),
        ({}, r"algorithm.name = \{\} is unknown"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_nearest(name: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose(ALGORITHMS, {"name": name}, "algorithm")


def test_choosing_leaves_the_table_alone() -> None:
    table = {"name": "fedbcd", "penalty": 2}
    choose(ALGORITHMS, table, "algorithm")
    assert table == {"name": "fedbcd", "penalty": 2}


@pytest.mark.parametrize(
    ("kinds", "value"),
    [
        (
            ALGORITHMS,
            fb.FedBCD(
                penalty=(1.0, 2.0), batch="all", server_step=0.01, server_step_form="absolute"
            ),
        ),
        (ALGORITHMS, fb.FedBCDI(available=4, projection=fb.TensorBoxes(((1, 0.0, 1.0),)))),
        (ALGORITHMS, fb.FedProx(projection=fb.NoProjection())),
        (ALGORITHMS, fb.FedAvg(steps=(2, 2), projection=fb.Simplex(2.0))),
        (CLOUDS, fb.SyncCloud()),
        (CLOUDS, fb.AsyncCloud(first=2)),
        (CLOUDS, fb.RigorousCloud(first=1)),
        (CLOUDS, fb.GraphCloud([[0.5, 0.5], [0.5, 0.5]])),
        (CLOUDS, fb.GraphCloud([[[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]])),
        (CLOUDS, fb.DynamicGraph([(0, 1), (2, 1)], first=2, link_failure=0.1)),
        (CLOUDS, fb.DynamicGraph([[(0, 1)], []], first=2, seed=4)),
        (DELAYS, fb.Trace((1.0, 2.0))),
        (DELAYS, fb.Weibull(shape=2.0, scale=0.5)),
    ],
    ids=lambda value: repr(value)[:60] if not isinstance(value, dict) else "",
)
def test_what_is_described_can_be_chosen_again_even_through_a_file(kinds: Any, value: Any) -> None:
    """describe -> TOML text -> table -> choose."""
    assert choose(kinds, describe(value), "here") == value
    assert (
        choose(kinds, tomllib.loads(dump_toml({"here": describe(value)}))["here"], "here") == value
    )


# ------------------------------------------------------------------------------------------------
# convert
@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, float, 3.0),
        (2.5, float, 2.5),
        (3, int, 3),
        ("a", str, "a"),
        (False, bool, False),
        (None, int | None, None),
        (4, int | None, 4),
        ("all", int | Literal["all"], "all"),
        (3, float | str, 3.0),
        ([1, 2], tuple[int, int], (1, 2)),
        ((1, 2), tuple[float, ...], (1.0, 2.0)),
        ([], tuple[int, ...], ()),
        ([[1, 0.5]], tuple[tuple[int, float], ...], ((1, 0.5),)),
    ],
)
def test_values_that_fit_are_converted(value: Any, hint: Any, expected: Any) -> None:
    converted = convert(value, hint, "x")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "words"),
    [
        ("3", int, "a whole number"),
        (3.0, int, "a whole number"),
        (True, float, "a number"),
        (None, float, "a number"),
        (1, str, "a text"),
        ("true", bool, "true or false"),
        ("x", int | None, "a whole number"),
        ("most", int | Literal["all"], "a whole number or 'all'"),
        ({}, float | tuple[float, ...], "a number or a list"),
    ],
)
def test_values_that_do_not_fit_are_refused_in_words(value: Any, hint: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(value, hint, "part.key")
    assert str(caught.value) == f"part.key = {value!r} must be {words}"


def test_nearest_hints_only_at_near_words() -> None:
    assert nearest("momentun", ["momentum", "penalty"]) == " (did you mean 'momentum'?)"
    assert nearest("qqq", ["momentum", "penalty"]) == ""


def test_unknown_keys_of_the_whole_file_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"the file has an unknown key 'cluod' \(did you mean 'cloud'\?\)"
    ):
        check_keys({"cluod": {}}, ["cloud", "clock"], "")


# ------------------------------------------------------------------------------------------------
# TOML
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
keys = st.one_of(st.from_regex(r"[a-z][a-z_0-9-]{0,7}", fullmatch=True), texts)
numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
scalars = st.one_of(st.booleans(), numbers, texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)
tables = st.dictionaries(keys, values, max_size=5)


@EXACT
@given(table=tables)
def test_every_table_survives_being_written(table: dict[str, Any]) -> None:
    text = dump_toml(table)
    assert tomllib.loads(text) == table
    assert text.endswith("\n")


def test_values_that_are_not_numbers_survive_too() -> None:
    table = tomllib.loads(
        dump_toml({"a": math.nan, "b": -math.inf, "c": [math.inf], "d": -0.0, "e": 1e-300})
    )
    assert math.isnan(table["a"])
    assert (table["b"], table["c"], table["e"]) == (-math.inf, [math.inf], 1e-300)
    assert math.copysign(1, table["d"]) == -1


def test_none_is_left_out() -> None:
    assert tomllib.loads(dump_toml({"a": None, "b": {"c": None, "d": 1}, "e": [{"f": None}]})) == {
        "b": {"d": 1},
        "e": [{}],
    }


def test_a_written_table_reads_well() -> None:
    table = {
        "algorithm": {"name": "fedbcd", "projection": {"name": "box", "low": -2.0}},
        "title": 'a "quoted" one',
        "runs": [{"x": 1}, {"x": 2}],
    }
    assert dump_toml(table).splitlines() == [
        r'title = "a \u0022quoted\u0022 one"',
        "",
        "[algorithm]",
        'name = "fedbcd"',
        "",
        "[algorithm.projection]",
        'name = "box"',
        "low = -2.0",
        "",
        "[[runs]]",
        "x = 1",
        "",
        "[[runs]]",
        "x = 2",
    ]


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('title = "Grüße"\n[run]\nrounds = 3\n', encoding="utf-8")
    assert read_toml(path) == {"title": "Grüße", "run": {"rounds": 3}}


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"a = 1\nb = \n", "line 2"),
        (b"a = 1\n\n[x\n", "line 3"),
        (b"a = 1\na = 2\n", "line 2"),
        (b"a = '\xff'", "byte 0xff"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_by_name_and_place(
    tmp_path: Path, content: bytes, place: str
) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"broken.toml is not valid TOML: .*{place}"):
        read_toml(path)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing.toml: No such file"):
        read_toml(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        read_toml(tmp_path)
