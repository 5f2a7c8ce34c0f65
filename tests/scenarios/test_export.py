"""Models out: files that, loaded by others, give the model's own outputs, and a card that tells
what they are.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.fused.chain import LinearLayer
from fedbcd.errors import NumericalError
from fedbcd.experiments.job import parse
from fedbcd.export import Choice, export_run, write_model
from fedbcd.models import MODELS, logistic
from support.rounding import exact_outputs
from support.runs import fedbcd, job_table, outputs, write_job

onnx = pytest.importorskip("onnx", reason="ONNX files are tested with the extra 'export'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("export")
    job = write_job(
        base / "job.toml", **{"cloud.name": "async", "cloud.first": 2, "title": "A <small> run"}
    )
    assert fedbcd("run", job, "--out", base / "run").code == 0
    return base / "run"


def _run(folder: Path) -> fb.Run:
    return fb.Run.load(folder, parse(job_table())[0].make_federation())


def test_a_device_model_is_the_same_in_both_formats(folder: Path, tmp_path: Path) -> None:
    """Read by safetensors alone, by onnxruntime and by the reference of the onnx package, on inputs
    and a batch size not seen before.
    """
    answer = fedbcd("export", folder, "--device", "7", "--out", tmp_path, "--json")
    assert answer.code == 0, answer.err
    run = _run(folder)
    assert run.federation.test is not None
    inputs = run.federation.transform(run.federation.test.inputs[100:123], torch.float32)
    expected = outputs(run.personal_model(7), inputs)
    plain = logistic(64, 10)
    plain.load_state_dict(load_file(tmp_path / "device-7.safetensors"))
    assert torch.equal(outputs(plain, inputs), expected)
    onnx.checker.check_model(onnx.load(tmp_path / "device-7.onnx"), full_check=True)
    exact, bound = exact_outputs((LinearLayer(64, 10, 0, 640, False),), run.personal_NF[7], inputs)
    for found in (
        expected.numpy(),
        *(read(tmp_path / "device-7.onnx", inputs) for read in (_by_onnxruntime, _by_reference)),
    ):
        assert bool(((torch.from_numpy(found) - exact).norm(dim=1) <= bound).all())
    assert answer.summary["differences"]["safetensors"] == 0.0


def _by_onnxruntime(path: Path, inputs: torch.Tensor) -> np.ndarray:
    session = pytest.importorskip("onnxruntime").InferenceSession(
        str(path), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"input": inputs.numpy()})[0])


def _by_reference(path: Path, inputs: torch.Tensor) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    return np.asarray(ReferenceEvaluator(str(path)).run(None, {"input": inputs.numpy()})[0])


@pytest.mark.parametrize("choice", [Choice(), Choice(server=2)])
def test_global_models_come_out(choice: Choice, folder: Path, tmp_path: Path) -> None:
    export_run(folder, choice, tmp_path, ["safetensors"])
    run = _run(folder)
    module = run.global_model if choice.server is None else run.server_model(2)
    found = load_file(tmp_path / f"{choice.name}.safetensors")
    assert all(torch.equal(found[name], value) for name, value in module.state_dict().items())


def test_the_card_tells_data_accuracy_and_certificate(folder: Path, tmp_path: Path) -> None:
    export_run(folder, Choice(device=7), tmp_path, ["safetensors"])
    card, run = (tmp_path / "device-7.md").read_text(), _run(folder)
    labels = run.federation.labels
    assert labels is not None
    for words in (
        "personal model of device 7",
        "A <small> run",
        "digits, diversity 3",
        f"20 samples of labels {', '.join(map(str, labels[7]))}",
        f"{run.personal_scores[7]:.4f}",
        f"{run.global_scores[7]:.4f}",
        "certificate: pull",
        "650 parameters",
        "(batch, 8, 8)" if "(batch, 8, 8)" in card else "(batch, 1, 8, 8)",
    ):
        assert words in card, words
    assert "pulled" not in card  # nobody pulls a model that FedAvg tunes, or one that is alone


class Frozen(nn.Module):
    """With batch norm, whose counter is no weight, and maybe a layer that is not trained."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.layer.bias.requires_grad = not frozen

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(inputs))  # type: ignore[no-any-return]


def test_a_run_in_python_is_exported_by_the_names_of_its_tensors(tmp_path: Path) -> None:
    """Without its federation there is no module, so no ONNX file; with it there is."""
    inputs = torch.randn(4, 30, 4, generator=torch.Generator().manual_seed(0))
    data = [(x, (x[:, 0] > 0).long()) for x in inputs]
    federation = fb.Federation(Frozen, nn.functional.cross_entropy, data, 2)
    run = fb.train(federation, fb.FedBCD(batch=8), active=1, rounds=2, out=tmp_path)
    answer = fedbcd("export", tmp_path, "--device", "3", "--json")
    assert answer.code == 0, answer
    found = load_file(tmp_path / "export" / "device-3.safetensors")
    again = Frozen()
    again.load_state_dict(found)
    expected = run.personal_model(3).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert run.digest[:16] in (tmp_path / "export" / "device-3.md").read_text()
    assert fedbcd("export", tmp_path, "--global").code == 0
    mean = load_file(tmp_path / "export" / "global.safetensors")
    assert torch.equal(mean["layer.weight"], run.global_model.state_dict()["layer.weight"])
    refused = fedbcd("export", tmp_path, "--global", "--format", "onnx")
    assert "federation=...) in Python has the module" in " ".join(refused.err.split())
    assert "has devices 0 to 3" in " ".join(fedbcd("export", tmp_path, "--device", "9").err.split())
    whole = export_run(tmp_path, Choice(device=3), tmp_path / "whole", federation=federation)
    assert [path.suffix for path in whole.files] == [".safetensors", ".onnx"]
    frozen = fb.Federation(lambda: Frozen(True), federation.loss, data, 2)
    fb.train(frozen, fb.FedBCD(batch=8), active=1, rounds=1, out=tmp_path / "frozen")
    refused = fedbcd("export", tmp_path / "frozen", "--global")
    assert "parameters that were not trained" in " ".join(refused.err.split())


def test_a_resnet_with_buffers_survives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = MODELS["resnet20"](classes=10)
    with torch.no_grad():
        module.train()(
            torch.randn(8, 3, 32, 32)
        )  # so that running statistics are not the initial ones
    _, differences = write_model(
        module, lambda: MODELS["resnet20"](classes=10), torch.randn(4, 3, 32, 32), tmp_path / "net"
    )
    assert differences["safetensors"] == 0.0
    assert differences["onnx"] < 1e-3


def test_a_file_that_gives_other_outputs_is_removed(tmp_path: Path) -> None:
    class Moody(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Moody.calls += 1
            return super().forward(x) + Moody.calls

    with pytest.raises(NumericalError, match=r"net.safetensors, loaded again, differs by"):
        write_model(
            Moody(3, 2), lambda: Moody(3, 2), torch.randn(2, 3), tmp_path / "net", ["safetensors"]
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --device I"),
        (["--device", "1", "--global"], "give --device I"),
        (["--device", "1", "--server", "1"], "give --device I"),
        (["--device", "99"], "device 99 is not in this run, which has devices 0 to 15"),
        (["--global", "--server", "9"], "server 9 is not in this run, which has servers 0 to 3"),
        (["--global", "--format", "pickle"], "format pickle is unknown; known: safetensors, onnx"),
    ],
)
def test_impossible_wishes_are_sentences(
    arguments: list[str], words: str, folder: Path, tmp_path: Path
) -> None:
    answer = fedbcd("export", folder, *arguments, "--out", tmp_path)
    assert answer.code == 2
    assert words in answer.err
    assert not list(tmp_path.iterdir())
