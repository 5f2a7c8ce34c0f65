"""A role as a process: an event loop, timers, links to its peers, health and metrics."""
