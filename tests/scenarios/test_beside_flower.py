"""One environment with Flower: its protobuf is older than the newest, and is enough for us.

It fetches packages, so it runs where FEDBCD_NETWORK=1 says that it may: in `make torture`.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import fedbcd as fb

FLOWER = ["flwr==1.41.0", "protobuf==6.33.6"]
SPEAKS = """
import flwr, google.protobuf, fedbcd
from fedbcd.engines.deploy.links import codec, fedbcd_pb2
import fedbcd.cli

frame = fedbcd_pb2.Frame(notice=fedbcd_pb2.Notice(kind="ping", body="{}"))
assert fedbcd_pb2.Frame.FromString(frame.SerializeToString()) == frame
print(google.protobuf.__version__)
"""


@pytest.mark.skipif("FEDBCD_NETWORK" not in os.environ, reason="FEDBCD_NETWORK=1 lets it fetch")
def test_flower_and_fedbcd_are_imported_into_one_process(tmp_path: Path) -> None:
    """What Flower pins comes first; what only we need (torch) is taken from where tests run."""
    venv.create(tmp_path)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    fetched = [*pip, "download", "--no-deps", "-d", tmp_path / "wheels", FLOWER[0]]
    if subprocess.run(fetched, capture_output=True).returncode:
        pytest.skip("no package registry can be reached")
    into = ["--python", tmp_path / "bin/python", "install", "--no-compile"]
    subprocess.run([*pip, *into, *FLOWER], check=True)
    (here,) = (tmp_path / "lib").glob("python*/site-packages")
    ours = [Path(fb.__file__).parents[1], sysconfig.get_paths()["platlib"]]
    (here / "fedbcd.pth").write_text("".join(f"{path}\n" for path in ours))
    found = subprocess.run(
        [tmp_path / "bin/python", "-c", SPEAKS], check=True, capture_output=True, text=True, env={}
    )
    assert found.stdout.strip() == FLOWER[1].split("==")[1]
