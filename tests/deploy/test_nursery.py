"""Children of one parent: started, started again when they crash, stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from fedbcd.engines.deploy.nursery import Nursery
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
    while not stopped:
        time.sleep(0.01)
    print('goodbye')
    return 0
nursery = Nursery(play, folder / 'logs')
nursery.start(['device/0', 'device/1', 'device/2'])
deadline = time.monotonic() + 20
while time.monotonic() < deadline and not (nursery.children['device/2'].restarts == 2 and nursery.children['device/1'].code == 21):
    nursery.look()
    time.sleep(0.02)
time.sleep(0.3)
assert len(nursery.running) == 2, nursery.children
assert nursery.restarts == 2
assert nursery.memory_bytes() > 0
print(nursery.stop(['device/0', 'device/2']))
"""


def test_crashed_children_start_again_and_refused_ones_do_not(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'device/0': 0, 'device/2': 0}"
    assert len((tmp_path / "device-2").read_text().split()) == 3
    assert "goodbye" in (tmp_path / "logs" / "device-0.log").read_text()


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    script = SCRIPT.partition("deadline =")[0] + "time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "device-0").exists() or not (tmp_path / "device-0").read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child = int((tmp_path / "device-0").read_text())
        time.sleep(0.2)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
    assert os.getpid()  # and we are still here
