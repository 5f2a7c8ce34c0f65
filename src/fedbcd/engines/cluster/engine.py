"""The numbers of a run on a cluster: the driver plays the schedule and steps the servers, actors
hold and train the devices.

Per round the driver puts each z_n that is asked for into the object store once, and gets back sums:
one vector from each of A actors on Sync-cloud, which steps one z towards all devices together;
otherwise V + A - 1 vectors at most, for V servers. Personal models cross the network only when
somebody asks for them: certificates, checkpoints, the end. While actors work, the driver plays on
to where their sums are needed. An actor that dies is made anew from the last checkpoint, and what
it had been asked since is asked again: the same bits.

Shapes: V servers, N devices, F values of a model, U values of an upload.
"""

import math
import os
import secrets
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbcd.algorithm.method import Bound
from fedbcd.compute.contributions import UPLOAD, ServerSums
from fedbcd.compute.devices import Wait
from fedbcd.compute.evaluate import Tested
from fedbcd.compute.numbers import Numbers
from fedbcd.compute.rows import ManyModels, Rows, SomeRows, load_tables, state_of_tables
from fedbcd.compute.store import StoredRows
from fedbcd.compute.workers import Workers
from fedbcd.data.federation import Federation
from fedbcd.engines.cluster.actors import Array, Done, Shard, packed, part_of, unpacked
from fedbcd.engines.cluster.options import expected_work, import_ray, shards_of
from fedbcd.engines.setup import make_numbers_of, make_trainer
from fedbcd.errors import ConfigError, RecordError
from fedbcd.own import modules_of
from fedbcd.protocol.messages import ModelRef
from fedbcd.record.tensorfile import opened
from fedbcd.schedule.work import Count, Sessions
from fedbcd.spec import Cluster, RunSpec

OBJECT_STORE_BYTES = 150 * 2**20  # bytes, of a Ray that is started for one run
OWN_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # 15, its default, has actors wait for everything else on the machine
    "RAY_worker_niceness": "0",
    # all its ports on loopback (on Windows and macOS the default, because of their firewalls)
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # and nobody on this machine joins without the token
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
LARGEST_ARGUMENT_BYTES = (
    2**16
)  # bytes of a model; Ray sends arguments up to 100 KB without its object store
ATTEMPTS = 5  # to bring a shard back
_idle: dict[tuple[float, float], list[Any]] | None = (
    None  # actors by what they hold of a machine, within `actors_kept`
)


@contextmanager
def actors_kept() -> Iterator[None]:
    """Runs in here, within one Ray, use each other's actors: many short runs then start at once."""
    global _idle
    before, _idle = _idle, {}
    try:
        yield
    finally:
        ray = import_ray()
        for actors in _idle.values():
            for actor in actors:
                ray.kill(actor)
        _idle = before


@dataclass
class Traffic:
    """Bytes that the driver has moved in rounds of training: models out, work out, sums in; and all
    other rows.
    """

    models: int = 0
    work: int = 0
    sums: int = 0
    rows: int = 0
    rebuilt: int = 0  # actors


@dataclass
class _ShardState:
    """The driver's view of one actor."""

    devices: list[int]
    actor: Any = None
    seconds: float = 0.0
    journal: list[tuple[str, tuple[Any, ...]]] = field(
        default_factory=list
    )  # what has changed it since the last checkpoint


class ShardActors:
    """All actors of a run."""

    def __init__(
        self,
        ray: Any,
        federation: Federation,
        spec: RunSpec,
        options: Cluster,
        state: Path | None,
    ) -> None:
        self.ray = ray
        self.federation, self.spec, self.options, self.state = (
            federation,
            spec,
            options,
            state,
        )
        self.traffic = Traffic()
        self.shards = [
            _ShardState(devices)
            for devices in shards_of(federation, spec, _number_of_actors(ray, options))
        ]
        self.of_device = np.zeros(federation.devices, dtype=np.int64)
        for number, shard in enumerate(self.shards):
            self.of_device[shard.devices] = number
        self.tables: Collection[str] = ()  # what devices keep, by name
        self._checkpoint: Path | None = None
        self._keeps_journal = False
        self._under_way = False
        self._kind = ray.remote(
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )(Shard)
        self._pool = None if _idle is None else _idle.setdefault((options.cpus, options.gpus), [])
        for number, ref in enumerate([self._start(shard) for shard in self.shards]):
            self._answer(number, ref)

    def _start(self, shard: _ShardState) -> Any:
        """An actor with a shard's data and its models at x(0)."""
        shard.actor = self._pool.pop() if self._pool else self._kind.remote()
        part = part_of(self.federation, shard.devices)
        where, state = (
            "cuda" if self.options.gpus else "cpu",
            None if self.state is None else str(self.state),
        )
        return shard.actor.hold.remote(part, self.spec, shard.devices, where, state)

    def close(self) -> None:
        for shard in self.shards:
            if self._pool is None:
                self.ray.kill(shard.actor)
            else:
                self._pool.append(shard.actor)

    def keep_journal(self) -> None:
        """From now on an actor that dies can be brought back."""
        self._keeps_journal = True

    def saved(self, checkpoint: Path) -> None:
        """All rows are in this file now."""
        self._checkpoint = checkpoint
        for shard in self.shards:
            shard.journal.clear()

    def ask(
        self, method: str, calls: dict[int, tuple[Any, ...]], changes: bool = False
    ) -> dict[int, Any]:
        """Call several shards at once; those that die meanwhile are brought back and asked
        again.
        """
        return self.begin(method, calls, changes)()

    def begin(
        self, method: str, calls: dict[int, tuple[Any, ...]], changes: bool = False
    ) -> Callable[[], dict[int, Any]]:
        """As `ask`, without waiting: what is returned waits for the answers. Nothing else is asked
        before that.
        """
        assert not self._under_way, "answers are to be fetched before something else is asked"
        self._under_way = True
        refs = {
            number: self._call(number, method, arguments) for number, arguments in calls.items()
        }

        def answers() -> dict[int, Any]:
            self._under_way = False
            found = {}
            for number, ref in refs.items():
                found[number] = self._answer(number, ref, method, calls[number])
                if changes and self._keeps_journal:
                    self.shards[number].journal.append((method, calls[number]))
            return found

        return answers

    def _call(self, number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self.shards[number].actor, method).remote(*arguments)

    def _answer(
        self, number: int, ref: Any, method: str = "", arguments: tuple[Any, ...] = ()
    ) -> Any:
        errors = self.ray.exceptions
        for _ in range(ATTEMPTS):
            try:
                return self.ray.get(ref)
            except errors.RayTaskError as error:
                raise error.cause from None
            except (errors.RayActorError, errors.ObjectLostError) as error:
                if method and not self._keeps_journal:
                    raise self._lost(number, error) from None
                again = self._bring_back(number)
                ref = self._call(number, method, arguments) if method else again
        raise RecordError(
            f"shard {number} died {ATTEMPTS} times in one call; look at the memory of its machine,"
            " or use more actors"
        )

    def _lost(self, number: int, error: Exception) -> RecordError:
        reason = str(error).strip().partition("\n")[0]
        return RecordError(
            f"the actor of shard {number} died ({reason}); give `out` a folder, so that it can be"
            " brought back"
        )

    def _bring_back(self, number: int) -> Any:
        """A new actor with the rows of the last checkpoint; then everything again that has changed
        it since.
        """
        shard = self.shards[number]
        self.traffic.rebuilt += 1
        self.ray.kill(shard.actor)
        refs = [self._start(shard)]
        if self._checkpoint is not None:
            refs += [
                shard.actor.set_rows.remote(*saved)
                for saved in rows_in(self._checkpoint, self.tables, shard.devices)
            ]
            uploads = self.waiting_in(uploads_in(self._checkpoint))[number]
            refs += [shard.actor.wait.remote(uploads)] if uploads else []
        refs += [
            getattr(shard.actor, method).remote(*arguments) for method, arguments in shard.journal
        ]
        return refs[0]  # if it dies again, the call that follows notices

    def waiting_in(self, state: Mapping[str, Tensor]) -> list[dict[str, tuple[Array, str]]]:
        """The uploads of a checkpoint that are not counted yet, for each shard."""
        found: list[dict[str, tuple[Array, str]]] = [{} for _ in self.shards]
        for name in state:
            if name.startswith(UPLOAD):
                device = int(name.removeprefix(UPLOAD).partition(":")[0])
                found[self.of_device[device]][name] = packed(state[name])
        return found

    def by_shard(self, devices: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for device in devices:
            found[int(self.of_device[device])].append(device)
        return found

    def report(self) -> dict[str, Any]:
        work = expected_work(self.federation, self.spec)
        total = float(work.sum())
        nodes = self.ask("node", dict.fromkeys(range(len(self.shards)), ()))
        shards = [
            {
                "node": nodes[number][:8],
                "devices": len(shard.devices),
                "expected_share": round(float(work[shard.devices].sum()) / total, 4),
                "seconds": round(shard.seconds, 3),
            }
            for number, shard in enumerate(self.shards)
        ]
        moved = self.traffic
        bytes_ = {
            "models": moved.models,
            "work": moved.work,
            "sums": moved.sums,
            "rows": moved.rows,
        }
        return {"actors": len(shards), "shards": shards, "bytes": bytes_, "rebuilt": moved.rebuilt}


def rows_in(
    checkpoint: Path, tables: Iterable[str], devices: Collection[int]
) -> Iterator[tuple[str, list[int], tuple[Array, str]]]:
    """The rows of some devices in a checkpoint: (which, devices, models)."""
    with opened(checkpoint) as file:
        for which in tables:
            rows = file.get_slice(which)
            named = f"{which}:rows" in file.keys()  # noqa: SIM118
            numbers = (
                file.get_tensor(f"{which}:rows").tolist() if named else range(rows.get_shape()[0])
            )
            place = {device: k for k, device in enumerate(numbers)}
            mine = [device for device in devices if device in place]
            if mine:
                yield which, mine, packed(torch.stack([rows[place[device]] for device in mine]))


def uploads_in(checkpoint: Path) -> dict[str, Tensor]:
    """Those that wait in a checkpoint."""
    with opened(checkpoint) as file:
        names = [name for name in file.keys() if name.startswith(UPLOAD)]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}


def _number_of_actors(ray: Any, options: Cluster) -> int:
    """As asked for, or as many as the cluster has room for; refused where they would wait for
    ever.
    """
    there = ray.cluster_resources()
    wanted = {kind: each for kind, each in (("GPU", options.gpus), ("CPU", options.cpus)) if each}
    fit = min(int(there.get(kind, 0) / each + 1e-9) for kind, each in wanted.items())
    actors = options.actors or max(1, fit)
    for kind, each in wanted.items():
        if actors * each > there.get(kind, 0) + 1e-9:
            raise ConfigError(
                f"the cluster has {there.get(kind, 0):g} {kind}, but {actors}"
                f" {'actor asks' if actors == 1 else 'actors ask'} for {each:g} each and would wait"
                " for ever; use fewer actors, ask for less, or add machines first"
            )
    return actors


class RemoteRows(Rows):
    """Rows that live in the actors."""

    def __init__(self, shards: ShardActors, which: str, rows: int, start: Tensor) -> None:
        self.shape = (rows, len(start))
        self.dtype, self.device = start.dtype, start.device
        self._shards, self._which = shards, which

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        assert dim == 0
        wanted = index.tolist()
        found = torch.empty(len(wanted), self.shape[1], dtype=self.dtype)
        of_shard = self._shards.by_shard(wanted)
        answers = self._shards.ask(
            "rows", {number: (self._which, devices) for number, devices in of_shard.items()}
        )
        order = torch.from_numpy(self._shards.of_device)[index.cpu()]
        for number, answer in answers.items():
            self._shards.traffic.rows += answer[0].nbytes
            found[(order == number).nonzero()[:, 0]] = unpacked(answer)
        return found.to(self.device)

    def index_copy_(self, dim: int, index: Tensor, source: Tensor, /) -> None:
        assert dim == 0
        order = torch.from_numpy(self._shards.of_device)[index.cpu()]
        calls = {}
        for number in sorted(set(order.tolist())):
            there = (order == number).nonzero()[:, 0]
            calls[number] = (
                self._which,
                index[there].tolist(),
                packed(source[there].to(self.dtype)),
            )
        self._shards.traffic.rows += sum(models[0].nbytes for _, _, models in calls.values())
        self._shards.ask("set_rows", calls, changes=True)

    def total_distance(self, z_VF: Tensor, members: Sequence[tuple[int, int]]) -> float:
        calls: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for device, server in members:
            calls[int(self._shards.of_device[device])].append((device, server))
        found = self._shards.ask(
            "distance",
            {number: (self._which, some, *packed(z_VF)) for number, some in calls.items()},
        )
        return float(sum(found.values()))

    def tested(self, devices: Sequence[int]) -> dict[int, Tested]:
        of_shard = self._shards.by_shard(devices)
        calls = {number: (self._which, some) for number, some in of_shard.items()}
        found = self._shards.ask("tested", calls)
        tested = {
            device: values
            for number, some in of_shard.items()
            for device, values in zip(some, found[number], strict=True)
        }
        return {device: tested[device] for device in devices}

    def kept(self) -> ManyModels:
        """All rows, on this machine: in memory, or where the run keeps its state."""
        if self._shards.state is None:
            return torch.cat(list(self.blocks())).to(self._shards.spec.dtype)
        kept = StoredRows(
            self._shards.state, self.shape[0], torch.zeros(self.shape[1], dtype=self.dtype)
        )
        first = 0
        for block in self.blocks():
            kept.index_copy_(0, torch.arange(first, first + len(block)), block)
            kept.release()
            first += len(block)
        return kept


class RemoteContributions:
    """What devices contribute is in the actors."""

    def __init__(self, shards: ShardActors, upload_size: int) -> None:
        self._shards, self._upload_size = shards, upload_size

    def sum_of(self, devices: Sequence[int]) -> Tensor:
        calls = {shard: (some,) for shard, some in self._shards.by_shard(devices).items()}
        sums = self._shards.ask("sum_of", calls)
        start = torch.zeros(self._upload_size, dtype=torch.float64)
        return sum((unpacked(sums[shard]) for shard in sorted(sums)), start)

    def last_counted(self, device: int) -> Tensor:
        shard = int(self._shards.of_device[device])
        return unpacked(self._shards.ask("last_counted", {shard: (device,)}, changes=True)[shard])

    def forget_upload(self, device: int, unless: ModelRef | None = None) -> None:
        """An upload that waits will not be counted. None comes back here after a loss of memory."""
        assert unless is None
        shard = int(self._shards.of_device[device])
        self._shards.ask("forget_upload", {shard: (device,)}, changes=True)

    def start_over(self, device: int, model: Tensor) -> Tensor:
        """Everything that it keeps begins anew, at z = `model`; what it contributes then."""
        shard = int(self._shards.of_device[device])
        call = {shard: (device, packed(model))}
        return unpacked(self._shards.ask("start_over", call, changes=True)[shard])

    def remember(self, devices: Iterable[int]) -> None:
        """Nobody loses a memory here: an actor that dies is brought back."""

    def accept(self, device: int) -> None:
        """As `remember`."""

    def restore(self, device: int) -> None:
        raise AssertionError(f"device {device} cannot have lost its memory")

    def recall(self, device: int) -> None:
        raise AssertionError(f"the server of device {device} cannot have lost its memory")


class RemoteDevices:
    """Personal models, training and sums over devices are in the actors."""

    engine = "cluster"

    def __init__(
        self, shards: ShardActors, spec: RunSpec, bound: Bound, start: Tensor, rows: int
    ) -> None:
        self.shards = shards
        self.one_sum = spec.cloud.sync
        self.storage = start.dtype
        self.tables: dict[str, ManyModels] = {
            name: RemoteRows(shards, name, rows, first)
            for name, first in bound.tables(start).items()
        }
        shards.tables = self.tables.keys()
        self.contributions = RemoteContributions(shards, bound.upload.size)
        # uploads, from one round to another
        self._may_wait = bound.method.at_once is not None or spec.deadline is not None
        self._refs: dict[ModelRef, Any] = {}  # models as actors get them: stored, or as they are

    def advance(
        self, work: Sequence[Sessions | Count], models: Mapping[ModelRef, Tensor], into: ServerSums
    ) -> Wait:
        """Each shard's part in one call; the sums come when somebody waits for them."""
        batches = [part.sessions for part in work if isinstance(part, Sessions)]
        sessions = [(k, session) for k, batch in enumerate(batches) for session in batch]
        uploads = [each for part in work if isinstance(part, Count) for each in part.uploads]
        handles = sorted({s.model for _, s in sessions if s.model is not None})
        self._put(handles, models)
        number: dict[ModelRef | None, int] = {None: -1}
        number |= {handle: k for k, handle in enumerate(handles)}
        plain = [
            (k, s.device, s.session, s.steps, number[s.model], s.activation) for k, s in sessions
        ]
        sessions_N6 = np.array(plain, dtype=np.int64).reshape(-1, 6)
        counted = [(0 if self.one_sum else server, *each) for server, *each in uploads]
        uploads_N3 = np.array(counted, dtype=np.int64).reshape(-1, 3)
        calls = self._calls(sessions_N6, uploads_N3, handles)
        answers = self.shards.begin("work", calls, changes=True)

        def wait() -> None:
            for shard, done in answers().items():
                self._add(shard, done, into)

        return wait

    def _calls(
        self, sessions_N6: Array, uploads_N3: Array, handles: Sequence[ModelRef]
    ) -> dict[int, tuple[Any, ...]]:
        shard_N, shard_of_upload = (
            self.shards.of_device[devices] for devices in (sessions_N6[:, 1], uploads_N3[:, 1])
        )
        return {
            shard: self._call_for(
                sessions_N6[shard_N == shard], uploads_N3[shard_of_upload == shard], handles
            )
            for shard in np.union1d(shard_N, shard_of_upload).tolist()
        }

    def _call_for(
        self, sessions_N6: Array, uploads_N3: Array, handles: Sequence[ModelRef]
    ) -> tuple[Any, ...]:
        """What one shard is asked, with the models that its sessions need and no other."""
        model_N = sessions_N6[:, 4]
        needed = np.unique(model_N[model_N >= 0])
        sessions_N6[:, 4] = np.where(model_N < 0, -1, np.searchsorted(needed, model_N))
        names = [handles[k] for k in needed.tolist()]
        models = [self._refs[name] for name in names]
        traffic = self.shards.traffic
        traffic.work += sessions_N6.nbytes + uploads_N3.nbytes
        traffic.models += sum(model[0].nbytes for model in models if isinstance(model, tuple))
        return (sessions_N6, uploads_N3, names, *models)

    def _put(self, handles: Sequence[ModelRef], models: Mapping[ModelRef, Tensor]) -> None:
        """Each model once into the object store, from where every node takes it once; a small one
        goes with the calls.
        """
        for handle in handles:
            if handle not in self._refs:
                model = packed(models[handle])
                small = model[0].nbytes <= LARGEST_ARGUMENT_BYTES
                self._refs[handle] = model if small else self.shards.ray.put(model)
                self.shards.traffic.models += 0 if small else model[0].nbytes
        self._refs = {handle: ref for handle, ref in self._refs.items() if handle in models}

    def _add(self, shard: int, done: Done, into: ServerSums) -> None:
        self.shards.shards[shard].seconds += done.seconds
        self.shards.traffic.sums += done.sums.nbytes
        total_VU = into.total_VU.numpy()
        for k, server in enumerate(done.servers):
            total_VU[server] += done.sums[k]
            into.weight_V[server] += done.weights[k]
            into.count_V[server] += done.counts[k]

    def state(self) -> dict[str, Tensor | SomeRows]:
        everyone = dict.fromkeys(range(len(self.shards.shards)), ())
        found = self.shards.ask("waiting", everyone) if self._may_wait else {}
        waiting = {name: unpacked(each) for some in found.values() for name, each in some.items()}
        return state_of_tables(self.tables) | waiting

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        load_tables(self.tables, state)
        for shard, uploads in enumerate(self.shards.waiting_in(state)):
            if uploads:
                self.shards.ask("wait", {shard: (uploads,)}, changes=True)

    def use(self, workers: Workers) -> None:
        """Nothing is computed here."""

    def will_need(self, devices: Collection[int]) -> None:
        """The models of these devices will be read in the next round; nobody waits for it."""
        if self.shards.state is not None:
            for shard, some in self.shards.by_shard(devices).items():
                self.shards.shards[shard].actor.will_need.remote(some)

    def why_not_ahead(self) -> str | None:
        return "personal models are kept in files (`state`) or on a cluster"

    def saved_in(self, checkpoint: Path | None) -> None:
        """Actors that die are brought back from here on."""
        if checkpoint is None:
            self.shards.keep_journal()
        else:
            self.shards.saved(checkpoint)

    def report(self) -> dict[str, Any]:
        return self.shards.report()


@contextmanager
def ray_for(options: Cluster) -> Iterator[Any]:
    """Ray, joined or started for a while; one that runs in this process already is used and left
    running.
    """
    own = OWN_RAY_ENVIRONMENT if options.address is None else {}
    told = {name: value for name, value in own.items() if name not in os.environ}
    os.environ.update(told)  # before Ray is loaded, which reads some of it
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if options.address is None:
            cpus = (
                None if options.actors is None else max(1, math.ceil(options.actors * options.cpus))
            )
            ray.init(
                address="local",
                num_cpus=cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                **quiet,
            )
        else:
            ray.init(address=options.address, **quiet)
    except (ConnectionError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"no Ray cluster at address={options.address!r} ({reason}); start one with 'ray start"
            " --head'"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()
        for name in told:
            os.environ.pop(name, None)


@contextmanager
def _by_value(ray: Any, modules: Iterable[str]) -> Iterator[None]:
    """What these modules define travels to the actors, which need not find the modules."""
    there = [sys.modules[name] for name in modules if name != "__main__"]
    for module in there:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in there:
            ray.cloudpickle.unregister_pickle_by_value(module)


@contextmanager
def cluster_numbers(
    spec: RunSpec, federation: Federation, options: Cluster, state: Path | None
) -> Iterator[Numbers]:
    """Numbers whose devices are in actors, which go when the run is over."""
    with ray_for(options) as ray, _by_value(ray, modules_of(spec)):
        shards = ShardActors(ray, federation, spec, options, state)
        try:
            trainer, start = make_trainer(spec, federation, torch.device("cpu"))
            kept = start.to(spec.kept_as)
            devices = RemoteDevices(shards, spec, trainer.bound, kept, federation.devices)
            yield make_numbers_of(spec, federation, trainer, start, devices)
        finally:
            shards.close()
