"""Memory that a step frees is there for the next one."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    from fedbcd.compute.allocator import keep_freed_memory
    assert keep_freed_memory()
x = torch.ones(2**24)  # 64 MiB: above 32 MiB the C library never keeps a block by itself
for _ in range(3):
    x + 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    x + 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="a switch of the C library of Linux"
)
def test_kept_memory_is_not_fetched_page_by_page_again() -> None:
    faults = {
        mode: int(
            subprocess.run(
                [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True
            ).stdout
        )
        for mode in ("keep", "return")
    }
    assert faults["keep"] < 100 < faults["return"]
