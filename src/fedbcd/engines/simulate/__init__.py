"""The simulation: a virtual clock, and devices as rows of stacked tensors that are trained many at
a time.
"""
