"""What runs are called that nobody gave a name: by what differs between them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedbcd.describe import describe, flat
from fedbcd.spec import RunSpec

PROPER = {"fedbcd": "FedBCD", "fedbcd-i": "FedBCD-I", "fedavg": "FedAvg", "fedprox": "FedProx"}
PROPER |= {"fedavg-ft": "FedAvg, fine-tuned", "local": "Local"}
KINDS = ("algorithm", "cloud")  # sections whose kind is said before their settings
NOWHERE = object()


def titles_of(specs: Sequence[RunSpec]) -> list[str]:
    """Of runs in one federation: "FedBCD, penalty 0.1"."""
    return by_what_differs([spec.to_table() for spec in specs])


def by_what_differs(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """A title for each: its algorithm, its cloud where there are several, and every setting in
    which it differs from another run with the same. What is left alike is numbered.
    """
    rows = [flat(table) for table in tables]
    clouds = {row.get("cloud.name") for row in rows}
    found = []
    for row in rows:
        algorithm = str(row.get("algorithm.name", ""))
        words = [PROPER.get(algorithm, algorithm.rpartition(":")[2])]
        words += [f"{row.get('cloud.name')} cloud"] if len(clouds) > 1 else []
        found.append(", ".join([*words, *_settings(row, rows)]))
    again = Counter(found)
    numbers: Counter[str] = Counter()
    for k, title in enumerate(found):
        numbers[title] += 1
        found[k] = f"{title} ({numbers[title]})" if again[title] > 1 else title
    return found


def _settings(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Those in which it differs from others of its kinds."""
    words = []
    for key, value in row.items():
        section = key.partition(".")[0]
        if key in ("title", *(f"{kind}.name" for kind in KINDS)):
            continue
        same = f"{section}.name" if section in KINDS else ""
        like = [other for other in rows if not same or other.get(same) == row.get(same)]
        if any(other.get(key, NOWHERE) != value for other in like):
            words.append(f"{key.rpartition('.')[2].replace('_', ' ')} {in_a_word(value)}")
    return words


def in_a_word(value: Any) -> str:
    """A value of a setting in a title or a table; of a section its kind, and what is said of it."""
    value = describe(value)
    if isinstance(value, Mapping):
        name = str(value.get("title", value.get("name", "")))
        rest = [f"{k}={in_a_word(v)}" for k, v in value.items() if k not in ("name", "title")]
        return name if "title" in value else " ".join([*([name] if name else []), *rest])
    if isinstance(value, list):
        return "[" + ", ".join(map(in_a_word, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
