"""How hypothesis chooses examples: the same in every run of `make test`; new ones in `make
torture`, which sets FEDBCD_EXPLORE to a seed.

What fails there is printed with its reproduction, kept in the folder `found`, and tried first from
then on.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

SEED = os.environ.get("FEDBCD_EXPLORE")
FOUND = Path("found").absolute()
Test = TypeVar("Test", bound=Callable[..., Any])
TIMES = 20  # as many examples as in `make test`

settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.register_profile(
    "new",
    derandomize=False,
    database=DirectoryBasedExampleDatabase(FOUND),
    deadline=None,
    print_blob=True,
)
settings.load_profile("new" if SEED else "same")


def examples(count: int, **more: Any) -> Callable[[Test], Test]:
    """For a test that takes this many examples in `make test`."""
    chosen = settings(max_examples=count * (TIMES if SEED else 1), **more)
    # A seed for all of hypothesis would turn its database off; one for a test does so too, until it
    # gets its settings.
    return lambda test: chosen(hypothesis.seed(int(SEED))(test) if SEED else test)


def pytest_report_header() -> str | None:
    """How to choose the same examples again."""
    return (
        f"new examples of hypothesis, again with FEDBCD_EXPLORE={SEED}; failing ones are kept in"
        f" {FOUND}"
        if SEED
        else None
    )
