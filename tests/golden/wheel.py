"""The wheel, unpacked and with its C compiled as `pyproject.toml` has it compiled."""

import shlex
import subprocess
import sysconfig
import zipfile
from pathlib import Path

WHEEL = Path(__file__).parent / "fedbcd-0.1.0-py3-none-any.whl"
BUILDS = {
    "_chain_avx512": "-mavx512f -mavx512vl -mfma",
    "_chain_avx2": "-mavx2 -mfma",
    "_chain": "",
}
FLAGS = "-O3 -fno-math-errno"


def unpack(folder: Path) -> Path:
    """What belongs in front of PYTHONPATH. Without a compiler the chains stay uncompiled, as they
    do in an installation.
    """
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    source = folder / "fedbcd" / "algorithm" / "fused" / "chain.c"
    compiler, flags, shared = (
        shlex.split(sysconfig.get_config_var(name) or "") for name in ("CC", "CFLAGS", "CCSHARED")
    )
    for build, extra in BUILDS.items():
        command = [
            *compiler,
            *flags,
            *shared,
            *FLAGS.split(),
            *extra.split(),
            "-shared",
            str(source),
            "-o",
            str(source.parent / f"{build}.so"),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
    return folder
