"""A file is named for what it is by its bytes, and a pickle is never run to find out."""

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from backends.artifacts import EXPORTED, TORCHSCRIPT, identify


class Trap:
    """What a pickle may do to who loads it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (open, ("trapped", "w"))


def archive(*names: str, **contents: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in names:
            file.writestr(name, contents.get(name.rpartition("/")[2].partition(".")[0], b""))
    return buffer.getvalue()


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=np.zeros(3))
    return buffer.getvalue()


def damaged() -> bytes:
    """An archive whose pickle cannot be decompressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("m/data.pkl", b"x" * 1000)
    content = bytearray(buffer.getvalue())
    begins = 30 + len("m/data.pkl")  # behind the header of the file
    content[begins] = 0xFF  # of a block of no type that there is
    return bytes(content)


WEIGHTS = b"\x80\x02ccollections\nOrderedDict\nctorch._utils\n_rebuild_tensor_v2\nctorch\nFloatStorage\n."
CHECKPOINT = pickle.dumps({"epoch": 3, "model_state_dict": {"w": 1}}, 2)
LIGHTNING = pickle.dumps({"pytorch-lightning_version": "2.5", "state_dict": {"w": 1}, "hyper_parameters": Path()}, 2)
MODULE = b"\x80\x02c__main__\nNet\nctorch._utils\n_rebuild_tensor_v2\n."

FILES = [
    ("m.onnx", b"\x08\x0a\x12\x07pytorch", "an ONNX model"),
    ("m", b"\x08\x0a\x12\x07pytorch", "an ONNX model"),
    ("m.pt", archive("m/data.pkl", "m/constants.pkl", "m/code/__torch__.py", "m/version"), "a TorchScript archive"),
    ("m.pt2", archive("m/archive_format", "m/models/model.json", "m/version"), "a program of torch.export"),
    ("m.pt2", archive("serialized_exported_program.json", "version"), "a program of torch.export"),
    ("m.pt2", archive("m/archive_format", "m/data/aotinductor/model/x.so"), "an AOTInductor package"),
    ("m.pt", archive("m/data.pkl", "m/data/0", "m/version", data=WEIGHTS), "a state_dict: weights without the code of a model"),
    ("m.pt", archive("m/data.pkl", data=CHECKPOINT), "a checkpoint, whose weights are its 'model_state_dict'"),
    ("m.ckpt", archive("m/data.pkl", data=LIGHTNING), "a checkpoint of Lightning, whose weights are its 'state_dict'"),
    ("m.pth", archive("m/data.pkl", "m/version", data=MODULE), "a pickled module (__main__.Net)"),
    ("m.pt", archive("m/data.pkl", data=pickle.dumps(Trap(), 4)), "a pickled module (io.open)"),
    ("m.pt", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "a file of torch.save as before PyTorch 1.6"),
    ("m.pkl", pickle.dumps(Trap()), "a pickle"),
    ("m.joblib", b"\x78\x9ccompressed", "a pickle"),
    ("m.safetensors", b"\x10\0\0\0\0\0\0\0{}", "weights (safetensors) without the code of a model"),
    ("m.onnx", b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "a pointer of Git LFS, not the file itself"),
    ("m.onnx", b"<!DOCTYPE html><html>", "an HTML page"),
    ("m.onnx", b"", "an empty file"),
    ("m.mar", archive("MAR-INF/MANIFEST.json", "model.pt"), "a TorchServe archive"),
    ("m.npz", npz(), "arrays of numpy, no model"),
    ("m.keras", archive("config.json", "metadata.json", "model.weights.h5"), "a Keras model"),
    ("m.h5", b"\x89HDF\r\n", "a Keras model"),
    ("m.zip", archive("a.txt"), "a zip archive without a model that the gateway knows"),
    ("m.pt", archive("a.txt")[:-1], "a damaged archive: its end is missing"),
    ("m.pt", damaged(), "a damaged archive (Error -3 while decompressing data: invalid block type)"),
    ("m.bin", b"\x80", "no model that the gateway knows"),
    ("m.tar.gz", b"\x1f\x8b\x08", "an archive"),
    ("m.plan", b"ftrt", "a TensorRT engine"),
    ("m.gguf", b"GGUF\x03", "a GGUF language model"),
    ("m.ort", b"\x18\0\0\0ORTM", "a model in ONNX Runtime's own format"),
    ("m.bin", b"what is this", "no model that the gateway knows"),
]


@pytest.mark.parametrize(("name", "content", "what"), FILES, ids=[f"{name}-{what}" for name, _, what in FILES])
def test_a_file_is_named_for_what_it_is_with_the_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    found = identify(tmp_path / name)
    assert found.what == what
    assert bool(found.way) != bool(found.kind)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.slow
def test_what_torch_saves_is_told_apart(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).eval()
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    torch.save({"model": module.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pt")
    torch.save(module, tmp_path / "module.pt")
    torch.save(module, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.jit.trace(module, torch.ones(1, 2)).save(str(tmp_path / "script.pt"))
    torch.export.save(torch.export.export(module, (torch.ones(1, 2),)), tmp_path / "program.pt2")
    assert [identify(tmp_path / name) for name in ("script.pt", "program.pt2")] == [TORCHSCRIPT, EXPORTED]
    assert identify(tmp_path / "weights.pt").what.startswith("a state_dict")
    assert identify(tmp_path / "checkpoint.pt").what.startswith("a state_dict")
    assert identify(tmp_path / "module.pt").what == "a pickled module (torch.nn.modules.container.Sequential)"
    assert identify(tmp_path / "old.pt").what.startswith("a file of torch.save")
