"""What numbers: the paper's equations as pure functions. Tensors in, tensors out; no clock, no
chance, no files.

Read `device` (eq. (4)) and `cloud` (eqs. (5)-(6)) beside the paper, then `variants`, which puts
them together. Shape letters: N devices, P parameters, F = P + buffers, V servers, R samples of a
mini-batch.
"""
