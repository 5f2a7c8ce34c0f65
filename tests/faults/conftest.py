"""Programs of `faultsim` run as processes of their own; they find it where pytest does."""

import os
from pathlib import Path

here = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
