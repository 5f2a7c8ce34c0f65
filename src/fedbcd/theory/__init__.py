"""The paper's convergence theory as functions: certificates, constants, bounds, and the assumptions
behind them. Pure.

certificates   the three quantities of Theorem 1, in closed form
bounds         every constant of the consensus lemma, the accumulation lemma and Theorem 1, as the
derivation has them (docs/errata.md)
mixing         mixing matrices, how fast their products forget, connectivity over q rounds,
activation within p rounds
curvature      largest and smallest Hessian eigenvalue by Hessian-vector products
assumptions    verdicts on Assumptions 1 to 5, with the nearest values that would pass
"""
