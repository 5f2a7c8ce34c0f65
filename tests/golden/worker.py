"""One of two processes that run cases: `python -m golden.worker before|tree`. Cases come in,
outcomes go out, a line of JSON each.
"""

import contextlib
import importlib
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from golden.outcome import plain


def main(which: str, group: str) -> None:
    """Answer until nothing more comes. What else is printed goes to stderr, so that it does not mix
    with answers.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    adapter = importlib.import_module(f"golden.{which}")
    with adapter.cluster() if group == "cluster" else contextlib.nullcontext():
        print(json.dumps(adapter.about()), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(adapter, json.loads(line))), file=answers, flush=True)


def answer(adapter: Any, question: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a case, or what went wrong. Models go into the folder, for whoever wants to
    know how far apart they are.
    """
    folder, given = Path(question["folder"]), question["given"]
    folder.mkdir(parents=True)
    try:
        found = adapter.perform(question["case"], folder, None if given is None else Path(given))
        torch.save(found["models"], folder / "models.pt")
        return plain(found)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the case came to
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


if __name__ == "__main__":
    main(*sys.argv[1:])
