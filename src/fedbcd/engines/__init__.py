"""Engines join the two pure halves, and own all clocks, threads, files and randomness."""
