"""A whole deployment under a simulated network, disk and clock, from one seed; `python -m faultsim
--help`.
"""
