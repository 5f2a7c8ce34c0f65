"""The three actors of a deployment, without sockets, threads or clocks, and what they keep."""
