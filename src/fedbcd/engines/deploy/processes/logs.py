"""Structured logs through `logging`: one JSON object per line on stderr, and never a secret.

Every role has a logger of its own, such as `fedbcd.deploy.device.7`. Handlers of a program hear it,
with the fields as `record.fields`; one at `fedbcd.deploy` hears it instead of stderr.
"""

import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import MutableMapping
from typing import Any

from fedbcd.protocol.messages import Actor

LEVELS = ("debug", "info", "warning", "error")
SECRET = re.compile(r"(?i)token|secret|password|private|(^|_)key($|_)")
PEM = re.compile(r"-----BEGIN [^-]+-----.*?(-----END [^-]+-----|$)", re.DOTALL)
OTHERS = ("grpc", "asyncio")  # what would write its own lines to stderr
LOGGER = logging.getLogger("fedbcd.deploy")
LOGGER.addHandler(logging.NullHandler())  # who uses links alone hears what they configure


class RoleLog(logging.LoggerAdapter[logging.Logger]):
    """What a role has to say: `log.info("phase_opened", phase=3)`."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(LOGGER.getChild(actor.replace("/", ".")), {"actor": actor})

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """All keywords are fields; secrets are taken out before any handler sees them."""
        fields = {name: _clean(name, value) for name, value in kwargs.items()}
        return msg, {"extra": {**(self.extra or {}), "fields": fields}}


class JsonFormatter(logging.Formatter):
    """A record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{now}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname.lower(),
            "actor": getattr(record, "actor", ""),
            "what": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        return json.dumps(line, default=str)


class StderrHandler(logging.Handler):
    """To what is stderr by then. A full disk that logs lie on is no concern of the role."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def log_of(actor: Actor, level: str = "info") -> RoleLog:
    log = RoleLog(actor)
    log.setLevel(level.upper())
    if len(LOGGER.handlers) == 1:
        handler = StderrHandler()
        handler.setFormatter(JsonFormatter())
        LOGGER.addHandler(handler)
        for other in map(logging.getLogger, OTHERS):
            if not any(isinstance(there, StderrHandler) for there in other.handlers):
                other.addHandler(handler)
    return log


def _clean(name: str, value: Any) -> Any:
    """A value that may be written down: not a key, not a token, not a PEM block."""
    if SECRET.search(name):
        return "***"
    return PEM.sub("***", value) if isinstance(value, str) else value
