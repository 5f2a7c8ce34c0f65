"""Plain tables (TOML, JSON) to typed frozen values and back. Whatever does not fit is named, with
the nearest thing that would.

`build(Kind, table, "algorithm")` makes a dataclass from a table; `choose(KINDS, table,
"algorithm")` picks the class by the table's `name` first. Every complaint says where the value
stands, what it is, and what it may be.
"""

import difflib
import functools
import inspect
import re
import tomllib
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fedbcd.errors import ConfigError, RecordError, RenamedWarning
from fedbcd.own import imported

P = ParamSpec("P")
T = TypeVar("T")


DEEPEST = 50  # brackets in brackets, in a TOML file


def read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        depth = _deepest(text)
        if (
            depth > DEEPEST
        ):  # the parser recurses, and where torch.compile was at work that can end the process
            raise ValueError(f"brackets are nested {depth} deep; at most {DEEPEST} are read")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; give the path of a TOML file"
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # of TOML, of UTF-8, of a number with thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _deepest(text: str) -> int:
    """How deep brackets are nested, about: those in strings count too."""
    deepest = depth = 0
    for mark in re.findall(r"[\[\]{}]", text):
        depth += 1 if mark in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def choose(kinds: Mapping[str, type[T]], table: Any, where: str) -> T:
    """The value described by `table`; its key `name` says of which kind it is. Values stay."""
    if is_dataclass(table):
        return offered(table, where)  # type: ignore[no-any-return]
    if isinstance(table, str) and ":" not in table:
        table = {"name": table}
    if not isinstance(table, Mapping):
        raise ConfigError(
            f'[{where}] must be a table with a name, such as {{ name = "{next(iter(kinds))}" }},'
            f" not {table!r:.80}; known: {', '.join(kinds)}"
        )
    if "name" not in table:
        raise ConfigError(f"[{where}] needs a name; known: {', '.join(kinds)}")
    name = table["name"]
    if isinstance(name, str) and ":" in name:
        kind: type[T] = imported(name, where)
    elif not isinstance(name, str) or name not in kinds:
        raise ConfigError(
            f"{where}.name = {name!r} is unknown{nearest(str(name), kinds)}; known:"
            f" {', '.join(kinds)}, or your own as package.module:Name"
        )
    else:
        kind = kinds[name]
        _check_owner(kinds, name, table, where)
    return build(kind, {k: v for k, v in table.items() if k != "name"}, where)


def _check_owner(
    kinds: Mapping[str, type[Any]], name: str, table: Mapping[str, Any], where: str
) -> None:
    """Refuse a setting that only other kinds have."""
    takes = {kind: {f.name for f in fields(of) if f.init} for kind, of in kinds.items()}
    for key in table:
        owners = [kind for kind, known in takes.items() if key in known]
        if owners and name not in owners:
            raise ConfigError(
                f"[{where}] has {key!r}, which {name!r} does not take; it is a setting of"
                f" {', '.join(map(repr, owners))}"
            )


def build(
    kind: type[T],
    table: Any,
    where: str,
    nested: Mapping[str, Mapping[str, type[Any]]] | None = None,
) -> T:
    """A dataclass from a table. `nested` says which fields are themselves chosen by name."""
    if isinstance(table, kind):
        return table
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"[{where}] must be a table, not {table!r:.80}; in Python, {_a(kind.__name__)}"
        )
    known = {f.name: f for f in fields(kind) if f.init}  # type: ignore[arg-type]
    check_keys(table, known, where)
    missing = [
        n
        for n, f in known.items()
        if f.default is MISSING and f.default_factory is MISSING and n not in table
    ]
    if missing:
        example = known[missing[0]].metadata.get(SUCH_AS, 1)
        raise ConfigError(f"[{where}] needs {missing[0]}, e.g. {missing[0]} = {example}")
    hints = typing.get_type_hints(
        kind.__init__
    )  # what may be given, which can be more than what is kept
    nested = nested or NESTED
    values = {
        key: (
            choose(nested[key], value, f"{where}.{key}")
            if key in nested and value is not None
            else _given(value, hints[key], f"{where}.{key}", known[key].metadata.get(SUCH_AS))
        )
        for key, value in table.items()
    }
    return kind(**values)


SUCH_AS = "such_as"  # in the metadata of a field: an example, as a job file has it


def _given(value: Any, hint: Any, where: str, example: str | None) -> Any:
    """`convert`, with an example where there is one and the value is of another kind."""
    try:
        return convert(value, hint, where)
    except ConfigError as error:
        if example is None or not str(error).startswith(f"{where} = "):
            raise
        raise ConfigError(f"{error}; e.g. {example}") from None


# Fields that are themselves chosen by name; the packages that own the kinds fill this in.
NESTED: dict[str, Mapping[str, type[Any]]] = {}
# Section of a job file in which a key stands, for those who wrote it elsewhere; filled likewise.
HOMES: dict[str, str] = {}


def check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse keys that nobody reads."""
    for key in table:
        if key not in known:
            place = f"[{where}]" if where else "the file"
            home = HOMES.get(key, where)
            hint = nearest(key, known) if home == where else f", which belongs in [{home}]"
            hint = hint or _meant(key) or elsewhere(key)
            raise ConfigError(
                f"{place} has an unknown key {key!r}{hint}; known:"
                f" {', '.join(sorted(known)) or 'none'}"
            )


def _meant(key: str) -> str:
    """Where what others call so stands in a job file, if that is known."""
    ours = [name for name, theirs in ELSEWHERE.items() if key in theirs and name in HOMES]
    return f" (did you mean {ours[0]!r} in [{HOMES[ours[0]]}]?)" if ours else ""


def check_given(kind: Any, name: str, values: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Refuse what is given to a dataclass without a name, or by one that it does not know."""
    if values:
        raise ConfigError(f"{name} takes settings by their names, not {values[0]!r:.80}")
    check_names(kind.__name__, {f.name for f in fields(kind) if f.init}, given)


def check_names(called: str, known: Collection[str], given: Collection[str]) -> None:
    """Refuse names that what is called does not take, with a pointer to the one that was meant."""
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{called} takes no {name!r}{nearest(name, known) or elsewhere(name)}; it takes"
                f" {', '.join(sorted(known))}"
            )


def follow_renamed(
    given: Mapping[str, Any], names: Mapping[str, str], before: str = "", calls: int = 2
) -> dict[str, Any]:
    """`given` by the names of today; an old one gives a `RenamedWarning` that points `calls` calls
    up the stack. In the warning, `before` stands in front of both names.
    """
    for old, new in names.items():
        if old in given:
            if new in given:
                raise ConfigError(f"{before}{old} is now called {new}, and both are given")
            text = f"{before}{old} is now called {new}; the old name goes with the next version"
            warnings.warn(text, RenamedWarning, stacklevel=calls + 1)
    return renamed_keys(given, names)


def renamed_keys(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`given` by the names of today, without a word: records say what was right in their time."""
    return {names.get(key, key): value for key, value in given.items()}


@contextmanager
def writing_file(path: str | Path) -> Iterator[None]:
    """What goes wrong meanwhile is a sentence about the file that somebody has named."""
    convert(path, str | Path, "path")
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror or error}; name a file in a folder that is there"
        ) from None


def called(said: str = "", **names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For what people call, by the name `said`: what it does not take, or needs and is not given,
    is a sentence. `names`: keywords that have new names; the old ones go on, with a warning.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature, what = inspect.signature(function), said or function.__name__
        known = [name for name in signature.parameters if name not in ("self", "cls")]

        @functools.wraps(function)
        def checked(*arguments: P.args, **keywords: P.kwargs) -> T:
            given = follow_renamed(keywords, names) if names else keywords
            check_names(what, known, given)
            try:
                signature.bind(*arguments, **given)
            except TypeError as error:
                of_all = ", ".join(known)
                raise ConfigError(f"{what}: {error}; it takes {of_all}") from None
            return function(*arguments, **given)

        return checked

    return decorate


def settings(kind: type[T]) -> type[T]:
    """For a dataclass that people make: see `called`."""
    type.__setattr__(kind, "__init__", called(kind.__name__)(kind.__init__))
    return kind


# What others call it.
ELSEWHERE = {
    ours: theirs.split()
    for ours, theirs in {
        "device_step": "lr learning_rate eta step_size step local_learning_rate",
        "penalty": "gamma mu lam lambda_ lamda regularization",
        "batch": "batch_size bs minibatch",
        "steps": "local_steps local_iterations num_steps iterations",
        "epochs": "local_epochs num_epochs",
        "server_step": "server_lr server_learning_rate",
        "first": "B wait_for",
        "mixing": "matrix weights adjacency",
        "rounds": "num_rounds global_rounds n_rounds round comm_rounds",
        "active": "fraction join_ratio frac fraction_fit clients_per_round sample_fraction",
        "seed": "random_state random_seed",
        "torch_device": "gpu cuda",
        "out": "folder log_dir save_dir output output_dir path",
        "on_round": "callback callbacks hook",
        "stop": "early_stopping early_stop patience",
        "evaluate_every": "eval_every eval_gap eval_interval",
        "cloud": "server strategy",
        "algorithm": "method strategy",
        "federation": "fed",
        "devices": "clients data datasets train_data client_data",
        "servers": "num_servers n_servers edges",
        "test": "test_data tests test_set testset eval_data val",
        "loss": "criterion loss_fn loss_function",
        "model": "net network module model_fn",
        "metrics": "measures scores",
        "metric": "score score_fn",
        "transform": "transforms preprocess",
        "collate": "collate_fn",
    }.items()
}
# Where what people write elsewhere stands; those who own the kinds fill it in.
PLACES: dict[str, str] = {}


def elsewhere(word: str) -> str:
    """Where something stands that was looked for here, if that is known."""
    meant = [word, *(ours for ours, theirs in ELSEWHERE.items() if word in theirs)]
    places = [PLACES[name] for name in meant if name in PLACES]
    return f" (it is {places[0]})" if places else ""


def nearest(word: str, known: Collection[str]) -> str:
    """A hint at the nearest known word, if one is near."""
    lower = {name.lower(): name for name in known}
    close = [ours for ours, theirs in ELSEWHERE.items() if word in theirs and ours in known]
    close += [lower[found] for found in difflib.get_close_matches(word.lower(), lower, n=1)]
    return f" (did you mean {close[0]!r}?)" if close else ""


def fit(value: Any, where: str = "", but: Collection[str] = (), **offers: str) -> None:
    """Let every field of a frozen dataclass be as its type asks, or refuse it; `where` goes before
    names. `but`: fields that others look at. `offers`: for fields that take values of other people,
    the method that these must have, "this or that" where one will do.
    """
    kind: Any = type(value)
    for name, hint in _hints_of(kind).items():
        if name in but:
            continue
        given, place = getattr(value, name), f"{where}{name}"
        if name in offers:
            optional = given is None and type(None) in typing.get_args(hint)
            kinds = NESTED.get(name, {})
            found = None if optional else offered(given, place, offers[name], kinds=kinds)
        else:
            found = convert(given, hint, place, whole=True)
        if found is not given:
            object.__setattr__(value, name, found)


@functools.cache
def _hints_of(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind) if f.init}


def shown(value: Any) -> str:
    """A value in a sentence: on one line, and cut."""
    return f"{' '.join(repr(value).split()):.80}"


def offered(
    value: Any, where: str, *needs: str, kinds: Mapping[str, type[Any]] = types.MappingProxyType({})
) -> Any:
    """A value of anybody's, which has these methods; `kinds` are those of fedbcd."""
    if isinstance(value, type):
        name = value.__name__
        raise ConfigError(f"{where} = {name} is a class; give a value of it, {name}(...)")
    for need in needs:
        if not any(hasattr(value, name.partition("(")[0]) for name in need.split(" or ")):
            ours = ", ".join(f"fb.{kind.__name__}" for kind in kinds.values()) or "fedbcd's kinds"
            if where.startswith("run."):
                ours = (
                    f'a table such as {{ name = "{next(iter(kinds))}", ... }}, or a value of {ours}'
                )
            else:
                ours = f"a value of {ours}"
            raise ConfigError(
                f"{where} = {value!r:.80} has no {need}; give {ours}, or of a frozen dataclass of"
                f" your own with {', '.join(needs)}"
            )
    return value


def convert(value: Any, hint: Any, where: str, whole: bool = False) -> Any:
    """`value` as the type that `hint` asks for; lists and arrays pass as tuples, whole numbers as
    floats (`whole`: they stay, outside of lists, as records of what was made in Python have them).
    """
    if hasattr(value, "tolist") and not isinstance(value, type):  # an array, or a number of one
        value = value.tolist()
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _first_fit(value, arguments, hint, where, whole)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(
                f"{where} = {value!r} must be one of {', '.join(map(repr, arguments))}"
            )
        return value
    if origin is not None and isinstance(value, origin) and issubclass(origin, Mapping):
        return {
            convert(k, arguments[0], f"{where}: {k!r}"): convert(
                v, arguments[1], f"{where}[{k!r}]", whole
            )
            for k, v in value.items()
        }
    if _is_list(hint) and isinstance(value, list | tuple):
        return _items(value, origin, arguments, where, whole)
    if is_dataclass(hint) and isinstance(value, Mapping):
        assert isinstance(hint, type)
        return build(hint, value, where)
    if hint is float and type(value) is int:
        try:
            number = float(value)
        except OverflowError:
            raise ConfigError(
                f"{where} has {len(str(abs(value)))} digits; a number must be below 1.8e308"
            ) from None
        return value if whole else number
    if not _is_a(value, hint, origin):
        fits = arguments and _is_list(hint) and where[-1:] != "]"
        fits = fits and _is_a(value, arguments[0], typing.get_origin(arguments[0]))
        such = f", such as [{value!r:.60}]" if fits else ""
        raise ConfigError(f"{where} = {value!r:.80} must be {_in_words(hint)}{such}")
    return value


def _is_list(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def _is_a(value: Any, hint: Any, origin: Any) -> bool:
    if hint in WORDS:  # true is no number here
        return type(value) is hint
    return callable(value) if origin is Callable else origin is None and isinstance(value, hint)


def _items(
    value: Sequence[Any], origin: type, arguments: tuple[Any, ...], where: str, whole: bool
) -> tuple[Any, ...]:
    if origin is tuple and Ellipsis not in arguments:
        if len(arguments) != len(value):
            raise ConfigError(f"{where} = {list(value)!r} must have {len(arguments)} values")
        hints = arguments
    else:
        hints = arguments[:1] * len(value)
    if all(type(v) is hint for v, hint in zip(value, hints, strict=True)):  # recorded times, say
        return value if type(value) is tuple else tuple(value)
    whole = whole and isinstance(value, tuple)
    return tuple(
        convert(v, hint, f"{where}[{k}]", whole)
        for k, (v, hint) in enumerate(zip(value, hints, strict=True))
    )


def _first_fit(value: Any, hints: tuple[Any, ...], hint: Any, where: str, whole: bool) -> Any:
    if value is None and type(None) in hints:
        return None
    tables = [option for option in hints if is_dataclass(option)]
    if tables and isinstance(value, Mapping):
        return convert(value, tables[0], where)
    others = [option for option in hints if option is not type(None)]
    if isinstance(value, list | tuple):
        others = [option for option in others if _is_list(option)] or others
    if len(others) == 1:
        return convert(value, others[0], where, whole)
    for option in hints:
        try:
            return convert(value, option, where, whole)
        except ConfigError:
            continue
    raise ConfigError(f"{where} = {value!r:.80} must be {_in_words(hint)}")


WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "left out",
}


def _in_words(hint: Any) -> str:
    if hint in WORDS:
        return WORDS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        words = (_in_words(option) for option in arguments if option is not type(None))
        return " or ".join(dict.fromkeys(words))
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is None:
        return _a(hint.__name__)
    return "a function" if origin is Callable else "a list"


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "AEIO" else f"a {name}"


def dump_toml(table: Mapping[str, Any]) -> str:
    """A table as TOML: plain values first, then tables, then lists of tables. None is left out."""
    return "\n".join(_lines(table, "")).strip() + "\n"


def _lines(table: Mapping[str, Any], path: str) -> list[str]:
    plain = {
        k: v for k, v in table.items() if v is not None and not _is_table(v) and not _is_tables(v)
    }
    lines = [f"{_key(k)} = {_value(v)}" for k, v in plain.items()]
    for key, value in table.items():
        full = f"{path}.{_key(key)}" if path else _key(key)
        if _is_table(value):
            lines += ["", f"[{full}]", *_lines(value, full)]
        elif _is_tables(value):
            for item in value:
                lines += ["", f"[[{full}]]", *_lines(item, full)]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_table, value))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(
            c if c >= " " and c not in '"\\' and c != "\x7f" else f"\\u{ord(c):04x}" for c in value
        )
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if _is_table(value):
        return (
            "{"
            + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
            + "}"
        )
    return repr(value)
