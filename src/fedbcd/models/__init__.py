"""Networks that come with the package. Any other `nn.Module` will do as well."""

from collections.abc import Callable

from torch import nn

from fedbcd.models.mlp import logistic, mlp
from fedbcd.models.resnet import resnet20

MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "resnet20": resnet20,
}

__all__ = ["MODELS", "logistic", "mlp", "resnet20"]
