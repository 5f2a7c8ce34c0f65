"""Logs that were recorded with 0.1.0, most of them by its deployment under faults; both fedbcds
replay them.
"""

import json
import tarfile
from pathlib import Path

from golden.cases import PLAIN, Case

LOGS = Path(__file__).parent / "recorded.tar.xz"


def recorded_cases(folder: Path) -> list[Case]:
    """A case for each log, which is put into the folder."""
    folder.mkdir()
    with tarfile.open(LOGS) as logs:
        for member in logs:
            content = logs.extractfile(member)
            assert content is not None
            (folder / member.name).write_bytes(content.read())
    about = json.loads((folder / "about.json").read_text())
    return [
        PLAIN
        | {
            "name": f"log: {name}",
            "kind": "replay",
            "path": str(folder / f"{more['file']}.jsonl"),
            **more,
        }
        for name, more in about.items()
    ]
