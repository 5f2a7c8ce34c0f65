"""scale: 10,000 devices of 60 samples under 10 servers, 1,000 active, 1-5 steps of 32, the MLP.

usage: python benchmarks/scale.py [--json] [--out FILE] [--repeats 5] [--threads 2] [--algorithm
fedbcd --only ours] FedBCD keeps two copies of every personal model (x and x_prev): 10,000 x 2 x 4 x
109,386 bytes = 8.2 GiB, so run it alone.
"""

from rounds import main

if __name__ == "__main__":
    main(
        "scale",
        __doc__,
        devices=10_000,
        servers=10,
        samples=60,
        active=100,
        steps=(1, 5),
        rounds=1,
        algorithms=("fedprox", "fedbcd"),
        default=("fedprox",),
    )
