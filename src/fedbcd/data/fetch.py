"""Downloads that can be interrupted: into NAME.part, resumed by HTTP Range, and renamed only after
their checksum was found right.
"""

import hashlib
import http.client
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedbcd.config import nearest
from fedbcd.data.sources import SOURCES, Source
from fedbcd.errors import ConfigError, DataError

Progress = Callable[
    [str, int, int | None], None
]  # file, bytes so far, bytes in all where the server says so

BLOCK_BYTES = 1 << 18
# of what was taken out of an archive, so that it need not be kept to know them again
SUMS = "SHA256SUMS"


class Interrupted(Exception):
    """A reply broke off; what came is in the part file."""


@dataclass(frozen=True)
class Patience:
    """How often a file is asked for while the connection fails, how long to wait in between, and
    how long for an answer.
    """

    attempts: int = 4
    pause_s: float = 1.0
    timeout_s: float = 30.0


def fetch(
    name: str,
    folder: Path,
    *,
    base: str | None = None,
    progress: Progress | None = None,
    patience: Patience | None = None,
) -> list[Path]:
    """Bring a data set into `folder`, in the layout its reader looks for, and return its files.
    What is there and right is left alone.
    """
    if name not in SOURCES:
        raise DataError(
            f"no source is known for {name!r}{nearest(name, SOURCES)}; known: {', '.join(SOURCES)}"
        )
    return fetch_source(SOURCES[name], folder, base=base, progress=progress, patience=patience)


def fetch_source(
    source: Source,
    folder: Path,
    *,
    base: str | None = None,
    progress: Progress | None = None,
    patience: Patience | None = None,
) -> list[Path]:
    """`fetch`, for any source; `base` is another address to take its files from."""
    place, address = folder / source.folder, _checked_base(base or source.base)
    with _writing(place):
        place.mkdir(parents=True, exist_ok=True)
    if source.members and _sums_hold(place, source.members):
        return [place / name for name in source.members.values()]
    paths = [
        _fetch_file(
            address + file,
            place / file,
            digest,
            progress or (lambda *_: None),
            patience or Patience(),
        )
        for file, digest in source.files.items()
    ]
    if not source.members:
        return paths
    return [path for archive in paths for path in _unpack(archive, place, source.members)]


def _checked_base(base: str) -> str:
    if not base.startswith(("http://", "https://")):
        raise ConfigError(
            f"--url-base {base} is not an address; it must start with http:// or https://"
        )
    return base if base.endswith("/") else base + "/"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write to {path}: {error.strerror or error}; choose another folder with"
            " --data DIR"
        ) from None


# ------------------------------------------------------------------------------------------------
# one file
def _fetch_file(url: str, path: Path, digest: str, progress: Progress, patience: Patience) -> Path:
    if path.is_file() and _matches(path, digest):
        size = path.stat().st_size
        progress(path.name, size, size)
        return path
    part = path.with_name(path.name + ".part")
    _download(url, part, progress, patience)
    algorithm, _, expected = digest.partition(":")
    found, size = _digest(part, algorithm), part.stat().st_size
    if found != expected:
        part.unlink()
        raise DataError(
            f"{url} is not the file it should be: {path.name} of {size} bytes has {algorithm}"
            f" {found}, expected {expected}. It was removed; fetch it again, or from another mirror"
            " with --url-base URL"
        )
    with _writing(path):
        os.replace(part, path)
    return path


def _download(url: str, part: Path, progress: Progress, patience: Patience) -> None:
    """Fill `part`, going on where the last attempt ended; a server that is busy or breaks off is
    asked again.
    """
    for attempt in range(1, patience.attempts + 1):
        try:
            return _append(url, part, progress, patience.timeout_s)
        except Interrupted as error:
            if attempt == patience.attempts:
                kept = (
                    f". What came is kept in {part}; the same command goes on from there"
                    if part.exists()
                    else ""
                )
                raise DataError(
                    f"{url} could not be fetched in {attempt} attempts:"
                    f" {error}{kept or '; try again later'}"
                ) from None
            time.sleep(patience.pause_s * attempt)


def _append(url: str, part: Path, progress: Progress, timeout_s: float) -> None:
    """One request for what is missing. Raises `Interrupted` if it breaks off."""
    start = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "fedbcd", "Accept-Encoding": "identity"} | (
        {"Range": f"bytes={start}-"} if start else {}
    )
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout_s
        ) as reply:
            if not _continues(reply, start):
                start = 0  # the server does not know ranges and sends all of it
            _copy(reply, part, start, progress)
    except urllib.error.HTTPError as error:
        with error:
            _refused(url, error, start)
    except urllib.error.URLError as error:
        raise Interrupted(f"no connection: {error.reason}") from None
    except (http.client.HTTPException, OSError) as error:
        raise Interrupted(f"the connection broke: {str(error) or type(error).__name__}") from None


def _continues(reply: Any, start: int) -> bool:
    """Whether a reply goes on at byte `start`, as it was asked to."""
    return reply.status == 206 and str(reply.headers.get("Content-Range", "")).startswith(
        f"bytes {start}-"
    )


def _refused(url: str, error: urllib.error.HTTPError, start: int) -> None:
    if error.code == 416 and start:
        return  # nothing is missing; the checksum decides whether it is right
    if error.code in (408, 425, 429) or error.code >= 500:
        raise Interrupted(f"the server answered {error.code} {error.reason}")
    raise DataError(
        f"{url} cannot be had: the server answered {error.code} {error.reason}; try another mirror"
        " with --url-base URL"
    )


def _copy(reply: Any, part: Path, start: int, progress: Progress) -> None:
    length = reply.headers.get("Content-Length")
    total = start + int(length) if length and length.isdigit() else None
    name, done = part.name.removesuffix(".part"), start
    with _writing(part):
        file = part.open("r+b" if start else "wb")
    with file:
        file.seek(start)
        progress(name, done, total)
        while block := reply.read(BLOCK_BYTES):
            with _writing(part):
                file.write(block)
            done += len(block)
            progress(name, done, total)
    if total is not None and done < total:
        raise Interrupted(f"the reply was cut short, {done} of {total} bytes came")


def _matches(path: Path, digest: str) -> bool:
    algorithm, _, expected = digest.partition(":")
    return path.is_file() and _digest(path, algorithm) == expected


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.new(algorithm, usedforsecurity=False)
        ).hexdigest()


# ------------------------------------------------------------------------------------------------
# archives
def _unpack(archive: Path, place: Path, members: Mapping[str, str]) -> list[Path]:
    """Take the wanted members out of an archive whose checksum was right, note their own checksums,
    and remove the archive.

    Only regular files under expected names are taken, and they are written under names of ours: no
    path in it is followed.
    """
    taken: dict[str, str] = {}
    try:
        for member, content in _regular_files(archive):
            if member in members:
                taken[members[member]] = _extract(content, place / members[member])
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{archive} cannot be unpacked: {error}; remove it and fetch it again"
        ) from None
    missing = [name for name in members.values() if name not in taken]
    if missing:
        raise DataError(
            f"{archive} lacks {', '.join(missing)}; it is not the archive that was expected"
        )
    with _writing(place):
        (place / SUMS).write_text(
            "".join(f"{digest}  {name}\n" for name, digest in sorted(taken.items()))
        )
        archive.unlink()
    return [place / name for name in members.values()]


def _regular_files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Names and contents of the regular files in a tar or zip archive, one after another."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as pack:
            for entry in pack.infolist():
                if not entry.is_dir():
                    with pack.open(entry) as content:
                        yield entry.filename, content
        return
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            opened = tar.extractfile(member) if member.isreg() else None
            if opened is not None:
                with opened:
                    yield member.name, opened


def _extract(content: IO[bytes], path: Path) -> str:
    """Write one member under a temporary name, rename it, and return its SHA-256."""
    part = path.with_name(path.name + ".part")
    with _writing(path):
        with part.open("wb") as file:
            shutil.copyfileobj(content, file, BLOCK_BYTES)
        digest = _digest(part, "sha256")
        os.replace(part, path)
    return digest


def _sums_hold(place: Path, members: Mapping[str, str]) -> bool:
    """Whether all members are there and as they were when they came out of the archive."""
    try:
        lines = (place / SUMS).read_text().splitlines()
    except OSError:
        return False
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    return all(
        name in sums and _matches(place / name, f"sha256:{sums[name]}") for name in members.values()
    )
