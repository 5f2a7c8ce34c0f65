"""The report: what a run did, as one HTML page. It reads event logs, histories and the heads of
model files, and nothing depends on it.

`follow` reads a log that may still grow into a `Timeline`, `runs` finds run folders and what lies
in them, `view` makes plain data of it, `advice` says what to try next, `page` puts it all into one
file. The dashboard shows the same views live.
"""
