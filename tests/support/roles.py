"""The health ports of a deployment, played by small web servers: what the tests of the dashboard
connect to.
"""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

METRICS = b"""# HELP fedbcd_disagreement ||zbar - z_n|| of the models last heard
# TYPE fedbcd_disagreement gauge
fedbcd_disagreement{server="0"} 0.25
fedbcd_disagreement{server="1"} NaN
fedbcd_staleness_rounds_sum 6.0
fedbcd_staleness_rounds_count 4.0
fedbcd_other 3.0
"""


class Roles:
    """The health ports of a coordinator and two servers, whose statuses the test writes."""

    def __init__(self) -> None:
        self.statuses: dict[str, Any] = {}
        self.servers: dict[str, ThreadingHTTPServer] = {}

    def add(self, actor: str, **status: Any) -> str:
        """A role that says this; its address."""
        self.say(actor, **status)
        statuses = self.statuses

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = METRICS if self.path == "/metrics" else json.dumps(statuses[actor]).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        server = self.servers[actor] = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    def say(self, actor: str, **status: Any) -> None:
        """What it says from now on."""
        totals = {
            "bytes_in": 10.0,
            "bytes_out": 20.0,
            "retries": 1.0,
            "refused": {"too far": 2.0},
            "waiting_s": {"devices": 3.5},
        }
        self.statuses[actor] = {
            "actor": actor,
            "ready": True,
            "waits_for": "devices",
            "peers": 2,
            "totals": totals,
            **status,
        }

    def stop(self, actor: str) -> None:
        """It answers no more."""
        server = self.servers.pop(actor)
        server.shutdown()
        server.server_close()

    def close(self) -> None:
        for actor in list(self.servers):
            self.stop(actor)


def over(run: Path, folder: Path, end: bool) -> Path:
    """A folder as `fedbcd up` leaves it, with the log of this run, whole or without its end, and
    roles that answer no more.
    """
    log = (run / "events.jsonl").read_bytes()
    for place in ("coordinator", "server-0"):
        (folder / "state" / place).mkdir(parents=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            (folder / "state" / place / "health.json").write_text(
                json.dumps({"port": free.getsockname()[1]})
            )
    (folder / "deploy.toml").touch()
    (folder / "events.jsonl").write_bytes(log if end else log[: log.rfind(b"\n", 0, -1) + 1])
    return folder
