"""Runs of an earlier state and of this one, compared bit for bit: see README.md."""
