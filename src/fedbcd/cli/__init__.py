"""The command line: one module for each group of commands."""

from fedbcd.cli.run import app, main

__all__ = ["app", "main"]
