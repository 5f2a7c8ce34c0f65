"""Downloads, against a server on this machine that truncates, corrupts, refuses, drops and resumes
as it is told.
"""

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbcd.cli import app
from fedbcd.data import fetch as fetching
from fedbcd.data.cifar import ROW, TEST, TRAIN
from fedbcd.data.datasets import DATASETS, load_dataset
from fedbcd.data.fetch import SUMS, Patience, fetch, fetch_source
from fedbcd.data.idx import MNIST_FILES
from fedbcd.data.sources import SOURCES, Source
from fedbcd.errors import ConfigError, DataError

CONTENT = hashlib.shake_128(b"some file").digest(100_000)
ONCE, EAGER = (
    Patience(attempts=1, pause_s=0.0, timeout_s=5.0),
    Patience(attempts=4, pause_s=0.0, timeout_s=5.0),
)


class Fault(Enum):
    """What a reply can suffer."""

    NONE = "none"
    TRUNCATED = "announces all, sends 60,000 bytes less"
    CORRUPTED = "one byte is another"
    DROPPED = "closes the connection without a reply"
    BUSY = "answers 503"
    GONE = "answers 404"
    NO_RANGE = "sends all of it, whatever was asked for"
    NO_LENGTH = "does not say how long it is"


@dataclass
class Mirror:
    """A server of `files`; the n-th request suffers the n-th fault, later ones the last."""

    files: dict[str, bytes]
    faults: list[Fault] = field(default_factory=lambda: [Fault.NONE])
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    base: str = ""

    def fault(self) -> Fault:
        return self.faults[min(len(self.asked), len(self.faults)) - 1]

    def reply(self, request: BaseHTTPRequestHandler) -> None:
        name, wanted = request.path.strip("/"), request.headers.get("Range")
        self.asked.append((name, wanted))
        fault = self.fault()
        if fault is Fault.DROPPED:
            return
        if fault is Fault.BUSY or fault is Fault.GONE or name not in self.files:
            request.send_error(503 if fault is Fault.BUSY else 404)
            return
        content = self.files[name]
        if fault is Fault.CORRUPTED:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = (
            int(wanted.removeprefix("bytes=").rstrip("-"))
            if wanted and fault is not Fault.NO_RANGE
            else 0
        )
        if start >= len(content):
            request.send_error(416)
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if fault is not Fault.NO_LENGTH:
            request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        body = content[start:]
        request.wfile.write(body[: len(body) - 60_000] if fault is Fault.TRUNCATED else body)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is on this machine; a proxy of the user's must not come between."""
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def serve() -> Iterator[Callable[..., Mirror]]:
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(files: dict[str, bytes], *faults: Fault) -> Mirror:
        mirror = Mirror(files, list(faults) or [Fault.NONE])

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.reply(self)

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        mirror.base = f"http://127.0.0.1:{server.server_address[1]}"
        return mirror

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def source(**files: bytes) -> Source:
    return Source(
        "http://127.0.0.1:9/",
        "kept",
        {name: f"sha256:{hashlib.sha256(raw).hexdigest()}" for name, raw in files.items()},
    )


ONE = source(file=CONTENT)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    return str(caught.value)


def test_a_file_comes_whole_and_leaves_no_part(
    serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int | None]] = []
    mirror = serve({"file": CONTENT})
    paths = fetch_source(
        ONE, tmp_path, base=mirror.base, progress=lambda *step: seen.append(step), patience=ONCE
    )
    assert paths == [tmp_path / "kept" / "file"]
    assert paths[0].read_bytes() == CONTENT
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["file"]
    assert (seen[0], seen[-1]) == (("file", 0, 100_000), ("file", 100_000, 100_000))


def test_what_is_there_and_right_is_not_fetched_again(
    serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    mirror = serve({"file": CONTENT})
    for _ in range(2):
        fetch_source(ONE, tmp_path, base=mirror.base + "/", patience=ONCE)
    assert mirror.asked == [("file", None)]


def test_a_file_that_is_there_but_wrong_is_replaced(
    serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(CONTENT[:-1])
    fetch_source(ONE, tmp_path, base=serve({"file": CONTENT}).base, patience=ONCE)
    assert (tmp_path / "kept" / "file").read_bytes() == CONTENT


def test_a_truncated_reply_is_said_and_kept_and_the_next_call_goes_on(
    serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    mirror, part = (
        serve({"file": CONTENT}, Fault.TRUNCATED, Fault.NONE),
        tmp_path / "kept" / "file.part",
    )
    said = refusal(lambda: fetch_source(ONE, tmp_path, base=mirror.base, patience=ONCE))
    assert "the reply was cut short, 40000 of 100000 bytes came" in said
    assert f"kept in {part}" in said
    assert part.read_bytes() == CONTENT[:40_000]
    assert not (tmp_path / "kept" / "file").exists()
    fetch_source(ONE, tmp_path, base=mirror.base, patience=ONCE)
    assert (tmp_path / "kept" / "file").read_bytes() == CONTENT
    assert mirror.asked == [("file", None), ("file", "bytes=40000-")]


@pytest.mark.parametrize("fault", [Fault.TRUNCATED, Fault.DROPPED, Fault.BUSY])
def test_a_flaky_server_is_asked_again(
    fault: Fault, serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    mirror = serve({"file": CONTENT}, fault, fault, Fault.NONE)
    fetch_source(ONE, tmp_path, base=mirror.base, patience=EAGER)
    assert (tmp_path / "kept" / "file").read_bytes() == CONTENT
    assert 2 <= len(mirror.asked) <= 3


@pytest.mark.parametrize("fault", [Fault.DROPPED, Fault.BUSY])
def test_patience_ends(fault: Fault, serve: Callable[..., Mirror], tmp_path: Path) -> None:
    mirror = serve({"file": CONTENT}, fault)
    said = refusal(lambda: fetch_source(ONE, tmp_path, base=mirror.base, patience=EAGER))
    assert f"{mirror.base}/file could not be fetched in 4 attempts" in said
    assert len(mirror.asked) == 4


def test_a_corrupted_reply_is_refused_by_name_and_removed(
    serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    mirror = serve({"file": CONTENT}, Fault.CORRUPTED, Fault.NONE)
    said = refusal(lambda: fetch_source(ONE, tmp_path, base=mirror.base, patience=EAGER))
    assert f"{mirror.base}/file is not the file it should be" in said
    assert f"expected {hashlib.sha256(CONTENT).hexdigest()}" in said
    assert list((tmp_path / "kept").iterdir()) == []
    fetch_source(ONE, tmp_path, base=mirror.base, patience=ONCE)


def test_a_part_of_something_else_is_found_out_by_the_checksum(
    serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    part = tmp_path / "kept" / "file.part"
    part.parent.mkdir()
    part.write_bytes(b"x" * 500)
    mirror = serve({"file": CONTENT})
    assert "is not the file it should be" in refusal(
        lambda: fetch_source(ONE, tmp_path, base=mirror.base, patience=ONCE)
    )
    assert not part.exists()


@pytest.mark.parametrize("length", [100_000, 100_500])
def test_a_part_with_nothing_missing_is_judged_by_its_checksum(
    length: int, serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    """Killed between the last byte and the renaming: the server answers 416."""
    part = tmp_path / "kept" / "file.part"
    part.parent.mkdir()
    part.write_bytes((CONTENT + bytes(500))[:length])
    mirror = serve({"file": CONTENT})
    if length == len(CONTENT):
        fetch_source(ONE, tmp_path, base=mirror.base, patience=ONCE)
        assert (tmp_path / "kept" / "file").read_bytes() == CONTENT
    else:
        assert "is not the file it should be" in refusal(
            lambda: fetch_source(ONE, tmp_path, base=mirror.base, patience=ONCE)
        )
    assert not part.exists()


@pytest.mark.parametrize("fault", [Fault.NO_RANGE, Fault.NO_LENGTH])
def test_a_server_without_ranges_or_lengths_will_do(
    fault: Fault, serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    part = tmp_path / "kept" / "file.part"
    part.parent.mkdir()
    part.write_bytes(CONTENT[:30_000])
    fetch_source(ONE, tmp_path, base=serve({"file": CONTENT}, fault).base, patience=ONCE)
    assert (tmp_path / "kept" / "file").read_bytes() == CONTENT


def test_a_file_that_is_not_there_is_named_at_once(
    serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    mirror = serve({}, Fault.GONE)
    said = refusal(lambda: fetch_source(ONE, tmp_path, base=mirror.base, patience=EAGER))
    assert f"{mirror.base}/file cannot be had: the server answered 404" in said
    assert "--url-base" in said
    assert len(mirror.asked) == 1


def test_no_server_at_all_is_said(tmp_path: Path) -> None:
    assert "no connection" in refusal(lambda: fetch_source(ONE, tmp_path, patience=ONCE))


def test_only_web_addresses_are_followed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must start with http:// or https://"):
        fetch("mnist", tmp_path, base="file:///etc/")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file where a folder should be")
    assert f"cannot write to {tmp_path / 'kept'}" in refusal(
        lambda: fetch_source(ONE, tmp_path, patience=ONCE)
    )


def test_an_unknown_set_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    assert "did you mean 'cifar10'?" in refusal(lambda: fetch("cifar-10", tmp_path))


# ------------------------------------------------------------------------------------------------
# archives
BATCHES = {
    name: (bytes([k]) + bytes([k * 20]) * (ROW - 1)) * 2 for k, name in enumerate((*TRAIN, TEST))
}


def tar(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as pack:
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            pack.addfile(entry)
        for name, raw in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(raw)
            pack.addfile(entry, io.BytesIO(raw))
    return file.getvalue()


def cifar_source(archive: bytes) -> Source:
    real = SOURCES["cifar10"]
    return Source(
        real.base,
        real.folder,
        {"cifar-10-binary.tar.gz": f"md5:{hashlib.md5(archive).hexdigest()}"},
        real.members,
    )


def test_cifar_is_unpacked_for_its_reader_and_known_again_without_the_archive(
    serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    archive = tar(
        {f"cifar-10-batches-bin/{name}": raw for name, raw in BATCHES.items()}
        | {"cifar-10-batches-bin/readme.html": b"hello"}
    )
    mirror = serve({"cifar-10-binary.tar.gz": archive})
    first = fetch_source(cifar_source(archive), tmp_path, base=mirror.base, patience=ONCE)
    assert sorted(p.name for p in (tmp_path / "cifar-10-batches-bin").iterdir()) == sorted(
        [*BATCHES, SUMS]
    )
    assert load_dataset("cifar10", tmp_path).train.targets.tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
    ]
    assert fetch_source(cifar_source(archive), tmp_path, base=mirror.base, patience=ONCE) == first
    assert len(mirror.asked) == 1
    first[2].write_bytes(b"damaged")
    fetch_source(cifar_source(archive), tmp_path, base=mirror.base, patience=ONCE)
    assert first[2].read_bytes() == BATCHES[first[2].name]


def test_nothing_but_the_expected_members_leaves_an_archive(
    serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    """Paths that climb, absolute paths and links are passed over, even under an expected name."""
    members = {f"cifar-10-batches-bin/{name}": raw for name, raw in BATCHES.items()}
    evil = {
        "../escaped": b"x",
        str(tmp_path / "absolute"): b"x",
        "cifar-10-batches-bin/../../climbed": b"x",
    }
    archive = tar(
        evil | members,
        links={
            f"cifar-10-batches-bin/{TEST}": str(tmp_path / "target"),
            "cifar-10-batches-bin/link": "/etc",
        },
    )
    folder = tmp_path / "a" / "b"
    fetch_source(
        cifar_source(archive),
        folder,
        base=serve({"cifar-10-binary.tar.gz": archive}).base,
        patience=ONCE,
    )
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == sorted([*BATCHES, SUMS])
    assert not any(p.is_symlink() for p in tmp_path.rglob("*"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    assert (folder / "cifar-10-batches-bin" / TEST).read_bytes() == BATCHES[TEST]


def test_an_archive_without_all_members_is_refused(
    serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    archive = tar(
        {f"cifar-10-batches-bin/{name}": raw for name, raw in BATCHES.items() if name != TEST}
    )
    mirror = serve({"cifar-10-binary.tar.gz": archive})
    said = refusal(
        lambda: fetch_source(cifar_source(archive), tmp_path, base=mirror.base, patience=ONCE)
    )
    assert f"lacks {TEST}" in said
    assert "cifar-10-binary.tar.gz" in said


def test_what_is_no_archive_is_refused(serve: Callable[..., Mirror], tmp_path: Path) -> None:
    mirror = serve({"cifar-10-binary.tar.gz": CONTENT})
    assert "cannot be unpacked" in refusal(
        lambda: fetch_source(cifar_source(CONTENT), tmp_path, base=mirror.base, patience=ONCE)
    )


def idx(values: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, values.ndim))
        + b"".join(n.to_bytes(4, "big") for n in values.shape)
        + values.astype(np.uint8).tobytes()
    )


def test_emnist_comes_as_one_zip_for_all_splits(
    serve: Callable[..., Mirror], tmp_path: Path
) -> None:
    real, file = SOURCES["emnist-letters"], io.BytesIO()
    with zipfile.ZipFile(file, "w") as pack:
        pack.writestr("../climbed", b"x")
        for member in real.members:
            pack.writestr(
                member, gzip.compress(idx(np.ones((2, 3, 3)) if "images" in member else np.ones(2)))
            )
    made = Source(
        real.base,
        real.folder,
        {"gzip.zip": f"md5:{hashlib.md5(file.getvalue()).hexdigest()}"},
        real.members,
    )
    fetch_source(
        made, tmp_path / "here", base=serve({"gzip.zip": file.getvalue()}).base, patience=ONCE
    )
    for name in (name for name in DATASETS if name.startswith("emnist")):
        assert len(load_dataset(name, tmp_path / "here").train) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


# ------------------------------------------------------------------------------------------------
# the real ones
def test_every_set_on_disk_but_parquet_has_a_source_that_its_reader_finds() -> None:
    assert set(SOURCES) == set(DATASETS) - {"digits", "parquet"}
    for name, entry in SOURCES.items():
        assert entry.base.startswith("http"), name
        assert entry.base.endswith("/"), name
        for digest in entry.files.values():
            algorithm, _, value = digest.partition(":")
            assert len(value) == hashlib.new(algorithm).digest_size * 2
            int(value, 16)


# ------------------------------------------------------------------------------------------------
# the command line
@pytest.fixture
def small_mnist(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Twelve pictures under the names of MNIST, and a source that expects them."""
    contents = (np.zeros((12, 4, 4)), np.arange(12) % 10, np.zeros((5, 4, 4)), np.arange(5))
    files = {
        f"{name}.gz": gzip.compress(idx(values))
        for name, values in zip(MNIST_FILES, contents, strict=True)
    }
    digests = {name: f"sha256:{hashlib.sha256(raw).hexdigest()}" for name, raw in files.items()}
    monkeypatch.setitem(
        fetching.SOURCES, "mnist", Source("http://127.0.0.1:9/", "MNIST/raw", digests)
    )
    return files


def test_the_command_fetches_what_the_reader_reads(
    serve: Callable[..., Mirror], small_mnist: dict[str, bytes], tmp_path: Path
) -> None:
    result = CliRunner().invoke(
        app,
        ["data", "fetch", "mnist", "--data", str(tmp_path), "--url-base", serve(small_mnist).base],
    )
    assert result.exit_code == 0, result.output
    assert "mnist is complete: 4 files" in result.stdout
    shown = CliRunner().invoke(app, ["data", "show", "mnist", "--data", str(tmp_path)])
    assert "12 for training, 5 for testing" in shown.stdout


def test_the_command_puts_it_where_the_environment_says(
    serve: Callable[..., Mirror],
    small_mnist: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEDBCD_DATA", str(tmp_path / "here"))
    assert (
        CliRunner()
        .invoke(app, ["data", "fetch", "mnist", "--url-base", serve(small_mnist).base])
        .exit_code
        == 0
    )
    assert len(load_dataset("mnist").train) == 12


def test_the_command_passes_refusals_on(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["data", "fetch", "parquet", "--data", str(tmp_path)])
    assert isinstance(result.exception, DataError)
    assert "no source is known for 'parquet'" in str(result.exception)
