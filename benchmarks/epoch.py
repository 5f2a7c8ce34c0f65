"""epoch: the recipes' MNIST round with 19 steps (one pass over 600 samples) per activation.

usage: python benchmarks/epoch.py [--json] [--out FILE] [--repeats 5] [--threads 2]
"""

from rounds import main

if __name__ == "__main__":
    main("epoch", __doc__, devices=100, servers=10, samples=600, active=3, steps=(19, 19), rounds=3)
