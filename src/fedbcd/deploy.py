"""Devices inside your own program: a few lines around your own model and data, which never leave
the device.

    from fedbcd.deploy import device
    device("job.toml", 7, data=my_dataset, loss=nn.functional.cross_entropy)

The job file is the one that coordinator and servers were started with; see examples/own_device.py
and docs/deployment.md.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedbcd.algorithm.augment import Augment
from fedbcd.algorithm.objective import Loss
from fedbcd.data.federation import DeviceData, Federation, Transform, as_dtype, as_samples
from fedbcd.engines.deploy.processes.assemble import make_module
from fedbcd.engines.deploy.processes.base import run_process
from fedbcd.engines.deploy.processes.exit_codes import ExitCode
from fedbcd.engines.deploy.roles.blueprint import OwnData
from fedbcd.errors import ConfigError
from fedbcd.experiments.deployed import deployment_of, read_job
from fedbcd.protocol.messages import device_actor

__all__ = ["device", "personal_model"]


def device(
    job: str | Path,
    number: int,
    *,
    data: DeviceData,
    model: Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
    transform: Transform = as_dtype,
    augment: Augment | None = None,
    available: Callable[[], bool] | None = None,
    log_level: str = "info",
    **options: Any,
) -> ExitCode:
    """Be device `number` of a deployment until SIGTERM or Ctrl-C; returns how it ended.

    Training that was under way then ends in its own thread, for which the interpreter waits; its
    result is not used.

    job        the job file of the deployment, with deploy.samples
    data       (inputs, targets), or a torch Dataset of such pairs; as many samples as
    deploy.samples says
    model      makes the module; by default what model.name of the job file names
    loss       loss(outputs, targets) -> scalar, the mean over the batch; by default what
    model.loss of the job file names
    available  asked before the device takes part: is it idle, charged, connected?
    options    go before what [deploy] says: folder, certificates, health, servers, ...
    """
    parsed, settled = read_job(Path(job), options)
    if settled.samples is None:
        raise ConfigError(
            f"{job} has no deploy.samples, so its devices train on the job's own data; start them"
            " with 'fedbcd device'"
        )
    plan = deployment_of(parsed, settled, model=model)
    own_data = as_samples("the data of this device", data)
    loss = loss or parsed.loss(own_data.take(torch.tensor([0]))[1])
    federation = Federation(
        model or parsed.model_factory(), loss, [own_data], 1, transform=transform, augment=augment
    )
    own = OwnData.of(federation, 0, parsed.spec.seed)
    plan = replace(plan, own=lambda _: own, log_level=log_level)
    return run_process(lambda: plan.process(device_actor(number), available))


def personal_model(
    job: str | Path, number: int, *, model: Callable[[], nn.Module] | None = None, **options: Any
) -> nn.Module:
    """The personal model x_i of a device as a module, from its store; the device may be running."""
    from fedbcd.algorithm.params import Layout
    from fedbcd.engines.deploy.roles.filestore import FileStore

    parsed, settled = read_job(Path(job), options)
    module = make_module(model or parsed.model_factory(), parsed.spec.seed)
    store = FileStore(settled.folder_of(device_actor(number)), read_only=True)
    try:
        layout = Layout(module)
        x = (
            store.tensor("x")
            if "x" in store.names()
            else layout.flatten(module, next(module.parameters()).dtype)
        )
        return layout.load(module, x).eval()
    finally:
        store.close()
