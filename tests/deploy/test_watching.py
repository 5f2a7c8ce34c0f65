"""Timeouts, metrics, health, logs and exit codes: what surrounds a role."""

import asyncio
import contextlib
import json
import logging
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from fedbcd import errors
from fedbcd.engines.deploy.processes.exit_codes import ExitCode
from fedbcd.engines.deploy.processes.health import MOST_CLIENTS, Health
from fedbcd.engines.deploy.processes.logs import LOGGER, log_of
from fedbcd.engines.deploy.processes.metrics import Metrics, Mixing, totals
from fedbcd.engines.deploy.processes.timeouts import MULTIPLE, WINDOW, AdaptiveTimeout, Timeouts
from fedbcd.protocol.messages import MixModels
from support.waiting import LIMIT_S

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


# ------------------------------------------------------------------------------------------------
# timeouts
def test_patience_follows_what_was_observed_within_bounds() -> None:
    patience = AdaptiveTimeout(1.0, 60.0)
    assert patience.seconds() == 60.0 / MULTIPLE  # nothing seen: slow rather than hasty
    for _ in range(100):
        patience.observe(2.0)
    assert patience.seconds() == 2.0 * MULTIPLE
    assert patience.seconds(attempt=1) == 2.0 * MULTIPLE * 2
    assert patience.seconds(attempt=50) == 60.0
    for _ in range(WINDOW):
        patience.observe(0.001)
    assert patience.seconds() == 1.0


def test_rare_slow_answers_do_not_set_the_pace() -> None:
    patience = AdaptiveTimeout(0.1, 1000.0)
    for k in range(WINDOW):
        patience.observe(100.0 if k == 5 else 1.0)
    assert patience.seconds() == MULTIPLE


def test_kinds_of_messages_are_timed_apart() -> None:
    timeouts = Timeouts((0.1, 10.0), (1.0, 2.0), (1.0, 2.0))
    timeouts.retry("ask").observe(1.0)
    assert timeouts.retry("ask").seconds() == MULTIPLE
    assert timeouts.retry("upload").seconds() == 10.0 / MULTIPLE


# ------------------------------------------------------------------------------------------------
# metrics
def test_every_role_counts_for_itself() -> None:
    one, other = Metrics("server/0"), Metrics("server/1")
    one.refused.labels(reason="norm").inc()
    assert one.value("fedbcd_refused_inputs_total", reason="norm") == 1.0
    assert other.value("fedbcd_refused_inputs_total", reason="norm") == 0.0
    assert totals(one)["refused"] == {"norm": 1.0}
    assert b'fedbcd_up{role="server"} 1.0' in one.text()


def test_the_coordinator_measures_staleness_and_disagreement() -> None:
    metrics = Metrics("coordinator")
    mixing = Mixing(metrics)
    mixing.heard(0, torch.tensor([3.0, 0.0]))
    mixing.heard(1, torch.tensor([-3.0, 0.0]))
    for round_, servers in ((0, (0, 1)), (1, (0,)), (2, (1, 0))):
        mixing.mixed(
            MixModels(
                round=round_,
                iteration=0,
                servers=servers,
                models=("a",) * len(servers),
                results=("w",) * len(servers),
            )
        )
    assert metrics.value("fedbcd_disagreement", server="0") == 3.0
    assert metrics.value("fedbcd_staleness_rounds_sum") == 1.0  # server 1 missed round 1
    assert metrics.value("fedbcd_staleness_rounds_count") == 5.0


# ------------------------------------------------------------------------------------------------
# health
def _get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_endpoints() -> None:
    async def ask() -> list[tuple[int, str]]:
        ready = False
        metrics = Metrics("device/3")
        health = Health(metrics.text, lambda: {"state": "idle"}, lambda: ready)
        port = await health.start("127.0.0.1", 0)
        answers = [await asyncio.to_thread(_get, port, "/readyz")]
        ready = True
        answers += [
            await asyncio.to_thread(_get, port, path)
            for path in ("/readyz", "/healthz", "/metrics", "/status", "/etc/passwd")
        ]
        answers.append(await asyncio.to_thread(_get, port, "/status", "DELETE"))
        await health.close()
        return answers

    answers = asyncio.run(ask())
    assert [code for code, _ in answers] == [503, 200, 200, 200, 200, 404, 405]
    assert "fedbcd_rounds" in answers[3][1]
    assert json.loads(answers[4][1]) == {"state": "idle"}


def test_a_page_that_calls_itself_by_another_name_sees_nothing() -> None:
    """DNS can make a name of somebody else's point to this machine; a browser then sends that
    name.
    """

    async def ask(*hosts: bytes) -> list[bytes]:
        health = Health(Metrics("coordinator").text, dict, lambda: True)
        port = await health.start("127.0.0.1", 0)
        answers = []
        for host in hosts:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /status HTTP/1.1\r\n" + host + b"\r\n")
            answers.append((await reader.read()).split(b" ")[1])
            writer.close()
        await health.close()
        return answers

    good = [b"", b"Host: localhost\r\n", b"host: 127.0.0.1:80\r\n", b"Host: [::1]:9\r\n"]
    bad = [b"Host: evil.example\r\n", b"Host: localhost.evil.example:80\r\n", b"Host: \r\n"]
    assert asyncio.run(ask(*good, *bad)) == [b"200"] * len(good) + [b"421"] * len(bad)


def test_liveness_is_answered_whoever_holds_connections_open() -> None:
    async def ask() -> tuple[int, str]:
        health = Health(Metrics("coordinator").text, dict, lambda: True)
        port = await health.start("127.0.0.1", 0)
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MOST_CLIENTS)]
        answer = await asyncio.to_thread(_get, port, "/healthz")
        for _, writer in held:
            writer.close()
        await health.close()
        return answer

    assert asyncio.run(ask()) == (200, "ok\n")


def test_a_client_that_sends_too_much_is_cut_off() -> None:
    async def ask() -> bytes:
        health = Health(Metrics("coordinator").text, dict, lambda: True)
        port = await health.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /" + b"a" * 100_000)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = await reader.read()
        writer.close()
        await health.close()
        return answer

    assert asyncio.run(ask()) == b""


# ------------------------------------------------------------------------------------------------
# logs
def forget_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own: nobody has given it any."""
    monkeypatch.setattr(LOGGER, "handlers", LOGGER.handlers[:1])


def test_logs_are_json_lines_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_handlers(monkeypatch)
    log_of("server/0", "error").warning("unseen")
    log = log_of("device/1")
    log.debug("unseen")
    log.info(
        "connected",
        peer="server/0",
        private_key="abc",
        note="x -----BEGIN EC PRIVATE KEY-----\nabc\n-----END EC PRIVATE KEY----- y",
    )
    (line,) = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    assert [*said] == ["time", "level", "actor", "what", "peer", "private_key", "note"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said["time"])
    assert (said["actor"], said["level"], said["what"], said["peer"]) == (
        "device/1",
        "info",
        "connected",
        "server/0",
    )
    assert "abc" not in line


@pytest.mark.parametrize("logger", ["", "fedbcd.deploy"])
def test_handlers_of_the_user_hear_a_role_with_its_fields(
    logger: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_handlers(monkeypatch)
    heard: list[logging.LogRecord] = []

    class Mine(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record)

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.getLogger(logger).addHandler(Mine())
    log_of("device/1").warning("refused", peer="server/0", token="abc")
    (record,) = heard
    assert record.name == "fedbcd.deploy.device.1"
    assert (record.getMessage(), record.actor, record.fields) == (
        "refused",
        "device/1",
        {"peer": "server/0", "token": "***"},
    )
    assert ("refused" in capsys.readouterr().err) == (logger == "")


# ------------------------------------------------------------------------------------------------
# exit codes
def test_exit_codes_of_errors_have_names() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.FedBCDError)
    ]
    for kind in kinds:
        assert kind.exit_code in set(ExitCode), kind


@pytest.mark.skipif(not OPERATIONS.exists(), reason="docs/operations.md")
@pytest.mark.parametrize("code", ExitCode)
def test_every_exit_code_has_a_paragraph(code: ExitCode) -> None:
    assert f"| {code.value} | `{code.name}` |" in OPERATIONS.read_text()
