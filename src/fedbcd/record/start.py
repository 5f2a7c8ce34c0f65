"""The models that a run begins with, where that is not x(0): those of an earlier run.

A run keeps a copy of them beside its log, and its identity names them by their hash.
"""

from pathlib import Path

from torch import Tensor

from fedbcd.errors import ConfigError
from fedbcd.record.names import MODELS
from fedbcd.record.tensorfile import digest_of, read_tensors, write_tensors

COPY = "start.safetensors"
HASH = "sha256:"  # how a record names them


def models_of(start: str | Path) -> tuple[Tensor, Tensor]:
    """x_i of all devices and z_n of all servers: of a run's folder, or of one file of it."""
    path = Path(start) / MODELS if Path(start).is_dir() else Path(start)
    tensors = read_tensors(path)[0] if path.is_file() else {}
    found = [tensors.get(name) for name in ("x", "z")]
    match found:
        case [Tensor(ndim=2) as x, Tensor(ndim=2) as z] if x.shape[1] == z.shape[1]:
            return x, z
    raise ConfigError(
        f"start = {str(start)!r} holds no models of a run; give the folder of a finished one, or"
        f" its models.safetensors (a run that was begun so keeps its own copy, {COPY})"
    )


def named(start: str | Path | None) -> str | None:
    """By hash."""
    if start is None or str(start).startswith(HASH):
        return start if start is None else str(start)
    models = models_of(start)
    return HASH + digest_of((each.dtype, tuple(each.shape), (each,)) for each in models)


def keep_copy(start: str | Path, folder: Path) -> None:
    """In the folder of the run that begins so, unless it is there."""
    if not (folder / COPY).exists():
        write_tensors(folder / COPY, dict(zip(("x", "z"), models_of(start), strict=True)), {})


def copy_beside(log: Path, start: str) -> Path:
    """The models that a log names by hash."""
    path = log.parent / COPY
    if not path.is_file() or named(path) != start:
        raise ConfigError(
            f"{log} is of a run that began with other models than x(0), which {path} does not hold;"
            " put that file back"
        )
    return path
