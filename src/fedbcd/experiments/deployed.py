"""A job file as a deployment: the job of `fedbcd run`, one of it, and the options in its `[deploy]`
section.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedbcd.data.federation import Federation
from fedbcd.engines.deploy.processes.options import Deploy, merge_options
from fedbcd.errors import ConfigError
from fedbcd.experiments.job import Job, parse, read_job_file
from fedbcd.spec import Place, RunSpec, default_of

if TYPE_CHECKING:
    from fedbcd.engines.deploy.processes.assemble import Deployment


def read_job(file: Path, flags: Mapping[str, Any]) -> tuple[Job, Deploy]:
    """The one job of a file, and the options of its deployment: flags before environment before
    file.
    """
    table = read_job_file(file)
    return one_job(table), merge_options(table.get("deploy", {}), os.environ, flags)


def one_job(table: Mapping[str, Any], recorded: bool = False) -> Job:
    """The job of a table that has one. Devices train one at a time, so that a replay, also one at a
    time, gives the same bits.
    """
    jobs = parse(table, recorded)
    if len(jobs) != 1:
        names = ", ".join(repr(job.name) for job in jobs)
        raise ConfigError(
            f"a deployment runs one job, but the file has {len(jobs)} runs ({names}); keep one of"
            " them"
        )
    place = {f.name: default_of(f) for f in fields(Place)}
    return replace(jobs[0], spec=replace(jobs[0].spec, **place | {"max_batch": 1, "threads": 1}))


def spec_of(job: Job, options: Deploy) -> RunSpec:
    """What a simulation of this deployment would be set to: devices that are admitted late join in
    some round, the log says when.
    """
    devices, late = job.devices, {*options.late}
    for device in options.late:
        if not 0 <= device < devices:
            raise ConfigError(
                f"deploy.late names device {device}; the devices of this job are 0 to {devices - 1}"
            )
    for n, members in enumerate(job.federation.groups):
        if late.issuperset(members):
            raise ConfigError(
                f"deploy.late names every device of server {n}; keep at least one that is a member"
                " from the beginning"
            )
    if job.spec.joins or job.spec.leaves or job.spec.churn:
        raise ConfigError(
            "run.joins, run.leaves and run.churn are for a simulation; name those that join in"
            " deploy.late, and use 'fedbcd admit' and 'fedbcd dismiss'"
        )
    if job.spec.stop is not None:
        raise ConfigError(
            "run.stop is for a simulation: a deployment does not measure while it runs; give"
            " run.rounds, and stop it when you like"
        )
    return replace(job.spec, joins=dict.fromkeys(options.late, 1))


def deployment_of(
    job: Job,
    options: Deploy,
    rounds: int | None = None,
    model: Callable[[], nn.Module] | None = None,
    federation: Federation | None = None,
) -> "Deployment":
    """What every role is made from. With `deploy.samples` nobody loads data, and the model is one
    of your own.
    """
    from fedbcd.engines.deploy.processes.assemble import Deployment  # needs the deploy extra

    torch.set_num_threads(1)
    if options.samples is None:
        return Deployment.of(
            federation or job.make_federation(), spec_of(job, options), options, rounds
        )
    servers = job.federation.groups
    return Deployment.private(
        spec_of(job, options), servers, model or job.model_factory(), options, rounds
    )
