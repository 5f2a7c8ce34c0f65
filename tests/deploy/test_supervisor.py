"""Children of one parent: started, started again when they crash, stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedbcd.engines.deploy.local import supervisor
from support.waiting import LIMIT_S, wait_for

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from fedbcd.engines.deploy.local.supervisor import Supervisor
folder = Path(sys.argv[1])
def play(actor):
    with open(folder / actor.replace('/', '-'), 'a') as file:
        file.write(f'{os.getpid()}\\n')
    if actor == 'device/1':
        return 21
    if actor == 'device/2' and len((folder / 'device-2').read_text().split()) < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    (folder / actor.replace('/', '-ready-')).touch()
    while not stopped:
        time.sleep(0.01)
    print('goodbye')
    return 0
supervisor = Supervisor(play, folder / 'logs')
supervisor.start(['device/0', 'device/1', 'device/2'])
while supervisor.children['device/1'].code != 21 or len(list(folder.glob('*-ready-*'))) < 2:
    supervisor.look()
    time.sleep(0.02)
assert len(supervisor.running) == 2, supervisor.children
assert supervisor.restarts == 2
assert supervisor.memory_bytes() > 0
print(supervisor.stop(['device/0', 'device/2']))
"""


def state_of(pid: int) -> str:
    """Empty when it has gone, Z when only its exit code is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_crashed_children_start_again_and_refused_ones_do_not(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'device/0': 0, 'device/2': 0}"
    assert len((tmp_path / "device-2").read_text().split()) == 3
    assert "goodbye" in (tmp_path / "logs" / "device-0.log").read_text()


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    script = SCRIPT.partition("while supervisor.children")[0] + "time.sleep(10_000)"
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    try:
        wait_for((tmp_path / "device-ready-0").exists)
        child = int((tmp_path / "device-0").read_text())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_for(lambda: state_of(child) in ("", "Z"), "the child has not ended")
    finally:
        parent.kill()
        parent.wait()
    assert os.getpid()  # and we are still here


def test_logs_of_children_do_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is long is kept once beside the log, which a child goes on writing to."""
    monkeypatch.setattr(supervisor, "LOG_BYTES", 100)
    monkeypatch.setattr(supervisor, "ROTATE_EVERY_S", 0.0)
    parent = supervisor.Supervisor(lambda _: 0, tmp_path)
    log = tmp_path / "device-0.log"
    with log.open("ab") as child:
        for k in range(3):
            child.write(b"%d" % k * 101)
            child.flush()
            parent.look()
            assert log.stat().st_size == 0
        child.write(b"short")
    parent.look()
    assert log.read_bytes() == b"short"
    assert (tmp_path / "device-0.log.1").read_bytes() == b"2" * 101
