"""Networks that come with the package. Any other `nn.Module` will do as well."""

from collections.abc import Callable

from torch import nn

from fedbcd.models.mlp import logistic, mlp

MODELS: dict[str, Callable[..., nn.Module]] = {"logistic": logistic, "mlp": mlp}

__all__ = ["MODELS", "logistic", "mlp"]
