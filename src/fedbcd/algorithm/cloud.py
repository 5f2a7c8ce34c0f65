"""What the cloud computes: eq. (5) for Sync-cloud, eq. (6) for Async-cloud with any doubly
stochastic mixing matrix.

Shapes: V servers, B servers that mix, F values of a model.
"""

from torch import Tensor

from fedbcd.errors import ConfigError


def mix(z_VF: Tensor, weights_VV: Tensor) -> Tensor:
    """Eq. (6a): w_n = sum_m a_nm z_m for all servers, a = `weights_VV` (rows n, columns m)."""
    return weights_VV.to(z_VF.dtype) @ z_VF


def mean(z_BF: Tensor) -> Tensor:
    """Async-cloud (ii): w = sum of the first B servers' models / B."""
    return z_BF.mean(0)


def server_step(mixed: Tensor, mean_personal: Tensor, step: float) -> Tensor:
    """One cloud step, eqs. (5) and (6b), relative form: z <- w - eta_z (w - m).

    w = `mixed`, eta_z = `step`, m = `mean_personal` = sum gamma_i x_i / sum gamma_i.
    """
    return mixed - step * (mixed - mean_personal)


def server_step_absolute(mixed: Tensor, weighted_sum: Tensor, weight: float, step: float) -> Tensor:
    """The same as printed: z <- w - eta_z sum_i gamma_i (w - x_i), with `weighted_sum` = sum
    gamma_i x_i, `weight` = sum gamma_i.
    """
    return mixed - step * (weight * mixed - weighted_sum)


def absorb(total: Tensor, weight: float, after: Tensor, before: Tensor | None) -> None:
    """Count an upload in a server's float64 sum, in place: total += weight (after - before).

    `before` is the device's last contribution, which this one replaces. One upload at a time,
    element by element: the sum has the same bits wherever it is formed, as long as uploads come in
    the same order.
    """
    change = after.double()
    if before is not None:
        change = change.sub_(before) if change is not after else change - before
    total.add_(change, alpha=weight)


def check_doubly_stochastic(weights: Tensor, tolerance: float = 1e-9) -> None:
    """Assumption 3(ii): rows and columns sum to one, no entry is negative."""
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1]:
        raise ConfigError(
            f"the mixing matrix has shape {tuple(weights.shape)}; it must be servers x servers"
        )
    if bool((weights < 0).any()):
        raise ConfigError(
            f"the mixing matrix has a negative entry, {float(weights.min()):g}; entries are 0 or"
            " more"
        )
    for axis, name in ((1, "row"), (0, "column")):
        sums = weights.double().sum(axis)
        worst = int((sums - 1).abs().argmax())
        if not abs(float(sums[worst]) - 1) <= tolerance:  # also if it is not a number
            remedy = "try Metropolis weights"
            if abs(float(sums[worst]) - 1) < 1e-5:
                remedy = "float32 has too few digits for it: use float64"
            raise ConfigError(
                f"{name} {worst} of the mixing matrix sums to {float(sums[worst]):.12g}, not 1; "
                f"Assumption 3(ii) asks for a doubly stochastic matrix ({remedy})"
            )


def check_absolute_step(step: float, penalty: float, members: int) -> None:
    """Assumption 4(ii): eta_z <= 1 / (max gamma_i * max |Q_n|). Taken literally, eta_z = 0.5 with
    ten devices breaks it fivefold.

    Each step multiplies z - m by 1 - eta_z sum gamma_i, m being the devices' mean. Up to the bound
    z stays between w and m, so in X (Fact 1). Beyond it z may pass m, which nothing in the paper
    covers; with gamma_i alike it comes nearer still up to twice the bound.
    """
    bound = 1.0 / (penalty * members)
    if step > bound:
        raise ConfigError(
            f"server_step={step:g} in absolute form exceeds {bound:g} = 1/(gamma_max * |Q_n|_max) ="
            f" 1/({penalty:g} * {members}), the bound of Assumption 4(ii). Theorem 1 promises"
            " nothing: a step may carry z past the mean of its devices' models, and out of X;"
            f" beyond {2 * bound:g}, with penalties alike, it diverges; use server_step <="
            f" {bound:g}, or server_step_form='relative'"
        )
