"""round: the recipes' MNIST round, 100 devices under 10 servers, 30 active, 1-5 steps of 32, the
MLP with 109,386 parameters.

usage: python benchmarks/round.py [--json] [--out FILE] [--repeats 5] [--threads 2] Ours, a plain
PyTorch loop and a NumPy floor do the same kind of round in turns, on random images (speed does not
depend on them).
"""

from rounds import main

if __name__ == "__main__":
    main("round", __doc__, devices=100, servers=10, samples=600, active=3, steps=(1, 5), rounds=10)
