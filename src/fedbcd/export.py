"""Models out: one personal or global model of a run as safetensors and ONNX, loaded again and
compared, with a model card beside it.
"""

import hashlib
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbcd.algorithm.params import taken_apart
from fedbcd.algorithm.trees import Tree, leaves, outputs_of, shapes
from fedbcd.config import called
from fedbcd.data.federation import Federation
from fedbcd.data.measure import measure_in, sample_weights
from fedbcd.data.samples import Pool
from fedbcd.engines.result import Run
from fedbcd.errors import ConfigError, NumericalError, RecordError
from fedbcd.experiments.pool import recorded_job
from fedbcd.record.eventlog import LogReader
from fedbcd.record.names import LOG, MODELS
from fedbcd.record.tensorfile import read_tensors, write_tensors, write_whole

FORMATS = ("safetensors", "onnx")
SAMPLES = 64  # on which outputs are compared
TESTED_AT_ONCE = 1_000
TOLERANCE = 1e-4  # of ONNX outputs, relative to the largest output


@dataclass(frozen=True)
class Exported:
    """What was written: the files, and by how much the outputs of each, loaded again, differ from
    the model's at most.
    """

    files: tuple[Path, ...]
    card: Path
    differences: dict[str, float]


@dataclass(frozen=True)
class Choice:
    """Which model: a device's, a server's, or (neither) the mean of the servers'."""

    device: int | None = None
    server: int | None = None

    @property
    def name(self) -> str:
        if self.device is not None:
            return f"device-{self.device}"
        return "global" if self.server is None else f"server-{self.server}"

    @property
    def title(self) -> str:
        if self.device is not None:
            return f"personal model of device {self.device}"
        return (
            "global model (mean of the servers' models)"
            if self.server is None
            else f"global model of server {self.server}"
        )


@called()
def export_run(
    folder: str | Path,
    choice: Choice,
    out: str | Path | None = None,
    formats: Sequence[str] | None = None,
    federation: Federation | None = None,
) -> Exported:
    """Write one model of a run into `out` (default: `export` in its folder), in all formats where
    none are named. Of a run that was made in Python without its federation: its tensors by name.
    """
    folder, out = Path(folder), None if out is None else Path(out)
    if not isinstance(choice, Choice):
        raise ConfigError(
            f"choice = {choice!r:.60} is no Choice; give Choice(device=17), Choice(server=2), or"
            " Choice() for the mean of the global models"
        )
    if federation is None and not LogReader(folder / LOG).header.get("job"):
        return _export_tensors(folder, choice, out or folder / "export", formats)
    table: dict[str, Any] = {}
    if federation is None:
        job = recorded_job(folder / LOG, "")
        federation, table = job.make_federation(), job.to_table()
    run, formats = Run.load(folder, federation), formats or FORMATS
    module, sample = _chosen(run, choice), _sample(federation, run.global_VF.dtype)
    place = out or folder / "export"
    metadata = {"fedbcd_model": choice.name, "run_digest": str(run.summary.get("digest", ""))}
    files, differences = write_model(
        module, lambda: federation.make_model(0), sample, place / choice.name, formats, metadata
    )
    card = place / f"{choice.name}.md"
    write_whole(card, _card(run, table, choice, module, sample, files, differences).encode())
    return Exported(tuple(files), card, differences)


def _export_tensors(
    folder: Path, choice: Choice, place: Path, formats: Sequence[str] | None
) -> Exported:
    """Of a run whose module is in somebody's program."""
    in_python = "fedbcd.export.export_run(folder, choice, federation=...) in Python has the module"
    tensors, metadata = read_tensors(folder / MODELS)
    names = json.loads(metadata.get("names", "{}"))
    if {*(formats or ())} - {"safetensors"}:
        raise ConfigError(f"{folder} names no module, which ONNX files need; {in_python}")
    if not names or names["frozen"]:
        what = "parameters that were not trained" if names else "no names of its tensors"
        raise RecordError(f"{folder} was made in Python and has {what}; {in_python}")
    flat = _flat(choice, tensors["x"], tensors["z"])
    place.mkdir(parents=True, exist_ok=True)
    path, card = place / f"{choice.name}.safetensors", place / f"{choice.name}.md"
    summary = json.loads(metadata["summary"])
    digest = str(summary.get("digest", ""))
    state = taken_apart(flat, names)
    about = {"format": "pt", "fedbcd_model": choice.name, "run_digest": digest}
    write_tensors(path, state, about)
    found = read_tensors(path)[0]
    difference = max(float((found[n] - t).abs().max()) for n, t in state.items() if t.numel())
    rows = [
        f"# Model card: {choice.title}",
        "",
        f"From a run in Python: {summary.get('algorithm')} on the {summary.get('cloud')} cloud,"
        f" seed {summary.get('seed')}. Digest of the run: `{digest[:16]}`.",
        "",
        "| tensor | shape |",
        "|---|---|",
        *(f"| {name} | {tuple(tensor.shape)} |" for name, tensor in state.items()),
        "",
        f"{path.name}: SHA-256 `{_sha256(path)}`",
        "",
        _limits(choice),
        "",
    ]
    write_whole(card, "\n".join(rows).encode())
    return Exported((path,), card, {"safetensors": difference})


def _flat(choice: Choice, x_NF: Tensor, z_VF: Tensor) -> Tensor:
    """One model; it is refused where there is none."""
    _check_choice(choice, len(x_NF), len(z_VF))
    if choice.device is not None:
        return x_NF[choice.device]
    if choice.server is not None:
        return z_VF[choice.server]
    return z_VF.double().mean(0).to(z_VF.dtype)


def write_model(
    module: nn.Module,
    fresh: Callable[[], nn.Module],
    sample: Tree,
    stem: Path,
    formats: Sequence[str] = FORMATS,
    metadata: dict[str, str] | None = None,
) -> tuple[list[Path], dict[str, float]]:
    """Write a module as `stem`.safetensors and `stem`.onnx; load each again, and compare outputs on
    `sample`.

    fresh   makes a module of the same kind, into which the safetensors file is loaded
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ConfigError(
            f"format {', '.join(unknown) or '(none)'} is unknown; known: {', '.join(FORMATS)}"
        )
    if "onnx" in formats:
        _need_onnx()
        if not isinstance(sample, Tensor):
            raise ConfigError(
                "ONNX files are of models with one input, and this one takes"
                f" {shapes(sample)}; use --format safetensors"
            )
    stem.parent.mkdir(parents=True, exist_ok=True)
    module = module.eval()
    with torch.no_grad():
        expected = outputs_of(module, sample)
    files: list[Path] = []
    differences: dict[str, float] = {}
    for name in formats:
        path = stem.parent / f"{stem.name}.{name}"
        if name == "safetensors":
            _write_safetensors(module, path, metadata or {})
            with torch.no_grad():
                found = outputs_of(_load_safetensors(fresh(), path), sample)
        else:
            _write_onnx(module, sample, path)
            found = _run_onnx(path, sample)
        differences[name] = _difference(
            path, found, expected, 0.0 if name == "safetensors" else TOLERANCE
        )
        files.append(path)
    return files, differences


def _chosen(run: Run, choice: Choice) -> nn.Module:
    _check_choice(choice, run.federation.devices, len(run.federation.servers))
    if choice.device is not None:
        return run.personal_model(choice.device)
    return run.global_model if choice.server is None else run.server_model(choice.server)


def _check_choice(choice: Choice, devices: int, servers: int) -> None:
    if choice.device is not None and choice.server is not None:
        raise ConfigError("give a device or a server, not both")
    if choice.device is not None and not 0 <= choice.device < devices:
        raise ConfigError(
            f"device {choice.device} is not in this run, which has devices 0 to {devices - 1}"
        )
    if choice.server is not None and not 0 <= choice.server < servers:
        raise ConfigError(
            f"server {choice.server} is not in this run, which has servers 0 to {servers - 1}"
        )


def _sample(federation: Federation, dtype: torch.dtype) -> Tree:
    pool = federation.pool if federation.test is None else federation.test
    inputs, _ = pool.take(torch.arange(min(SAMPLES, len(pool))))
    return federation.transform(inputs, dtype)


# ------------------------------------------------------------------------------------------------
# files
def _write_safetensors(module: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    write_tensors(path, module.state_dict(), {"format": "pt", **metadata})


def _load_safetensors(module: nn.Module, path: Path) -> nn.Module:
    module.load_state_dict(read_tensors(path)[0])
    return module.eval()


def _write_onnx(module: nn.Module, sample: Tensor, path: Path) -> None:
    """One file, with a batch of any size."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)  # it remarks on packages that are not needed here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about itself
            shapes = ({0: torch.export.Dim("batch", min=1)},)
            names: dict[str, Any] = {"input_names": ["input"], "output_names": ["output"]}
            program = torch.onnx.export(
                module, (sample,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names
            )
    finally:
        log.setLevel(before)
    assert program is not None
    write_whole(path, program.model_proto.SerializeToString())


def _run_onnx(path: Path, sample: Tensor) -> Tensor:
    """The outputs of the file, by onnxruntime where it is installed, otherwise by the reference of
    the onnx package.
    """
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        return torch.as_tensor(
            next(iter(ReferenceEvaluator(str(path)).run(None, {"input": sample.numpy()})))
        )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.as_tensor(session.run(None, {"input": sample.numpy()})[0])


def _difference(path: Path, found: Tensor, expected: Tensor, tolerance: float) -> float:
    """The largest difference of outputs; a file that does not give the model's outputs is
    removed.
    """
    difference = float((found - expected).abs().max())
    bound = tolerance * max(1.0, float(expected.abs().max()))
    if not difference <= bound:
        path.unlink()
        raise NumericalError(
            f"{path.name}, loaded again, differs by {difference:g} from the model, more than"
            f" {bound:g}; it was removed"
        )
    return difference


def _need_onnx() -> None:
    try:
        for package in ("onnx", "onnxscript"):
            importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"ONNX files need {error.name}; pip install 'fedbcd[export]', or use --format"
            " safetensors"
        ) from None


# ------------------------------------------------------------------------------------------------
# card
def _card(
    run: Run,
    job: dict[str, Any],
    choice: Choice,
    module: nn.Module,
    sample: Tree,
    files: Sequence[Path],
    differences: dict[str, float],
) -> str:
    """A short model card: where it comes from, on what it was trained, how good it is, how to use
    it, and for what not.
    """
    summary = run.summary
    rows = [
        f"# Model card: {choice.title}",
        "",
        (
            f"From the run “{job.get('title', '')}”: {summary.get('algorithm')} on the"
            f" {summary.get('cloud')} cloud, seed {summary.get('seed')}, {summary.get('rounds')}"
            f" rounds, clock {summary.get('clock', 0):.4g}. Digest of the run:"
            f" `{str(summary.get('digest'))[:16]}`."
        ),
        "",
        "| | |",
        "|---|---|",
        *_about(job, module),
        *_owned(run, choice),
        *_accuracies(run, choice, module),
        *(
            f"| certificate: {name.replace('_', ' ')} | {value:.4g} |"
            for name, value in summary.get("certificates", {}).items()
        ),
        *map(_taken, leaves(sample)),
        "",
        "## Files",
        "",
        "| file | SHA-256 | largest difference of outputs, loaded again |",
        "|---|---|---|",
        *(f"| {f.name} | `{_sha256(f)}` | {differences[f.suffix[1:]]:.2g} |" for f in files),
        "",
        "## Limits",
        "",
        _limits(choice),
        "",
    ]
    return "\n".join(rows)


def _taken(inputs: Tensor) -> str:
    values = inputs.double()
    return (
        f"| input | {inputs.dtype} of shape (batch, {', '.join(map(str, inputs.shape[1:]))}), after"
        f" the transform of the data set: mean {float(values.mean()):.4g}, from"
        f" {float(values.min()):.4g} to {float(values.max()):.4g} |"
    )


def _about(job: dict[str, Any], module: nn.Module) -> list[str]:
    data, network = job.get("data", {}), job.get("model", {}).get("name", type(module).__name__)
    parameters = sum(p.numel() for p in module.parameters())
    return [
        f"| network | {network}, {parameters:,} parameters |",
        f"| data | {data.get('name', 'unknown')}, {_split(data)} |",
    ]


def _split(data: dict[str, Any]) -> str:
    if data.get("manifest"):
        return f"split by the manifest {data['manifest']}"
    if data.get("partition"):
        return f"split by {data['partition']}"
    return (
        f"diversity {data.get('diversity')}: that many labels and {data.get('samples')} samples per"
        " device"
    )


def _owned(run: Run, choice: Choice) -> list[str]:
    federation = run.federation
    if choice.device is None:
        devices = (
            federation.devices if choice.server is None else len(federation.servers[choice.server])
        )
        return [f"| devices | {devices} |"]
    labels = None if federation.labels is None else federation.labels[choice.device]
    owned = "" if labels is None else f" of labels {', '.join(map(str, labels))}"
    return [f"| trained on | {federation.sizes[choice.device]} samples{owned} |"]


def _accuracies(run: Run, choice: Choice, module: nn.Module) -> list[str]:
    test = run.federation.test
    if test is None:
        return []
    with torch.no_grad():
        scores = torch.cat([_scores(run, module, test, part) for part in _parts(len(test))])
    start, stop = run.federation.common_test or (0, len(test))
    common = scores[start:stop]
    rows = [f"| test score, all labels | {float(common.mean()):.4f} ({len(common)} samples) |"]
    own_tests = run.federation.own_tests or {}
    if choice.device in own_tests:
        own = scores[slice(*own_tests[choice.device])]
        rows.append(f"| test score, its own tests | {float(own.mean()):.4f} ({len(own)} samples) |")
    elif choice.device is not None and run.federation.common_test and run.federation.labels:
        measure, targets = measure_in(run.summary), test.all_targets[start:stop]
        labels, counts = torch.unique(targets, return_counts=True)
        keys = [("label", label) for label in labels.tolist()]
        tested = dict(zip(keys, counts.tolist(), strict=True))
        weights = sample_weights(run.federation, choice.device, measure, tested)
        if weights:
            own = torch.tensor(
                [weights.get(("label", k), 0.0) for k in targets.tolist()], dtype=torch.float64
            )
            counted = "by its shares of them" if measure == "own-shares" else "all alike"
            score = float((own * common).sum() / own.sum())
            rows.append(
                f"| test score, its own labels | {score:.4f} ({int((own > 0).sum())} samples,"
                f" counted {counted}) |"
            )
        if choice.device in run.global_scores:
            rows.append(
                f"| its server's model on those labels | {run.global_scores[choice.device]:.4f} |"
            )
    return rows


def _parts(samples: int) -> Sequence[Tensor]:
    return torch.split(torch.arange(samples), TESTED_AT_ONCE)


def _scores(run: Run, module: nn.Module, test: Pool, positions: Tensor) -> Tensor:
    """Of these test samples, float64."""
    inputs, targets = test.take(positions)
    outputs = outputs_of(module, run.federation.transform(inputs, run.global_VF.dtype))
    return run.federation.measures(outputs, targets)[0].by_sample(outputs, targets)


def _limits(choice: Choice) -> str:
    if choice.device is not None:
        return (
            "This model belongs to one device: it is meant for data like that device's own. Compare"
            " its score on all labels with that on its own before using it for anything else, and"
            " mind that a model can reveal something about the data it was trained on."
        )
    return (
        "This model is a compromise between devices with different data. For one device, its"
        " personal model is usually the better one."
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
