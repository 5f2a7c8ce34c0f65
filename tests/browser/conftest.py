"""A browser for the tests of a file."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.web import start_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = start_browser()
    yield found
    found.quit()
