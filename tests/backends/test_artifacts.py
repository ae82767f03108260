"""A file is named for what it is by its bytes, and a pickle is never run to find out."""

import io
import json
import pickle
import random
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import backends
from backends.artifact_digests import artifact_digest
from backends.artifacts import EXPORTED, ONNX, TORCHSCRIPT, identify, torn
from backends.file_tensors import exported_tensors
from backends.onnx_file import has_fp16
from backends.script_arguments import stated_arguments
from backends.torch import load_callable
from gateway.configuring.guess import guess
from gateway.errors import ConfigError
from tests.varint import varint


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


def of_two_disks() -> bytes:
    content = archive("a.txt")
    at = len(content) - 22  # the end of the directory, which a locator of 64 bits stands before
    return content[:at] + struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 2) + content[at:]


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
    ("m.pt", archive("m/data.pkl", data=pickle.dumps(Trap(), 4)), f"a pickled module ({open.__module__}.open)"),
    ("m.pt", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "a file of torch.save as before PyTorch 1.6"),
    ("m.pkl", pickle.dumps(Trap()), "a pickle"),
    ("m.joblib", b"\x78\x9ccompressed", "a pickle"),
    ("m.safetensors", b"\x10\0\0\0\0\0\0\0{}", "weights (safetensors) without the code of a model"),
    ("m.onnx", b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "a pointer of Git LFS, not the file itself"),
    ("m.onnx", b"<!DOCTYPE html><html>", "an HTML page"),
    ("m.onnx", b"", "an empty file"),
    ("m.onnx", b'{"message": "Not Found"}\n', "a text, no model"),
    ("m.pt2", b"see README\n", "a text, no model"),
    ("m.conf", b"models: []", "no model that the gateway knows"),
    ("m.onnx", bytes(1000), "nothing but zero bytes where a model begins"),
    ("m.pt", bytes(1000), "nothing but zero bytes where a model begins"),
    ("m.onnx", random.Random(0).randbytes(1000), "no ONNX file, or a damaged one"),
    ("m.pt2", random.Random(0).randbytes(1000), "no file of PyTorch, or a damaged one"),
    # A graph of 16 bytes, of which it has 2.
    ("m.onnx", b"\x08\x0a\x12\x07pytorch\x3a\x10\x0a\x04", "the beginning of an ONNX file: 15 bytes of 29 or more"),
    ("m", b"\x08\x0a\x12\x07pytorch\x3a\x10\x0a\x04", "no model that the gateway knows"),
    ("m.mar", archive("MAR-INF/MANIFEST.json", "model.pt"), "a TorchServe archive"),
    ("m.npz", npz(), "arrays of numpy, no model"),
    ("m.keras", archive("config.json", "metadata.json", "model.weights.h5"), "a Keras model"),
    ("m.h5", b"\x89HDF\r\n", "a Keras model"),
    ("m.zip", archive("a.txt"), "a zip archive without a model that the gateway knows"),
    ("m.pt", archive("a.txt")[:-1], "a damaged archive: its end is missing"),
    ("m.pt", damaged(), "a damaged archive (Error -3 while decompressing data: invalid block type)"),
    (
        "m.pt2",
        archive("m/é").replace("é".encode(), b"\xff\xff"),
        "a damaged archive ('utf-8' codec can't decode byte 0xff in position 2: invalid start byte)",
    ),
    ("m.pt2", of_two_disks(), "a damaged archive (zipfiles that span multiple disks are not supported)"),
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


@pytest.mark.parametrize("fault", ["deflated and damaged", "of members before its beginning", "of another schema"])
def test_an_exported_program_that_cannot_be_read_tells_no_tensors(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    spec = {"user_input": {"arg": {"as_tensor": {"name": "x"}}}}
    graph = {"tensor_values": {"x": {"dtype": 7, "sizes": [3]}}}  # they are mappings in the schema that is known
    program = {"graph_module": {"graph": graph, "signature": {"input_specs": [spec], "output_specs": []}}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/archive_format", "pt2")
        archive.writestr("m/models/model.json", json.dumps(program))
        start = archive.getinfo("m/models/model.json").header_offset + 30 + len("m/models/model.json")
    if fault == "deflated and damaged":
        content = path.read_bytes()
        path.write_bytes(content[:start] + b"\xff" * 8 + content[start + 8 :])
    elif fault == "of members before its beginning":
        content = path.read_bytes()
        path.write_bytes(content[:-6] + b"\xff\xff\0\0" + content[-2:])  # where its directory is said to begin
        assert torn(path)
        assert stated_arguments(path) == []
    assert identify(path) == EXPORTED
    assert exported_tensors(path) is None


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """y = x @ a + b, its weights of 4096 and 64 bytes one after the other in m.onnx.data."""
    onnx = pytest.importorskip("onnx")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "a"], ["t"]), helper.make_node("Add", ["t", "b"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", floats, ["n", 64])],
        [helper.make_tensor_value_info("y", floats, ["n", 16])],
        [
            onnx.numpy_helper.from_array(np.ones((64, 16), np.float32), "a"),
            onnx.numpy_helper.from_array(np.ones(16, np.float32), "b"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    weights = {"save_as_external_data": True, "location": "m.onnx.data", "size_threshold": 0}
    onnx.save(model, str(tmp_path / "m.onnx"), **weights)
    return tmp_path / "m.onnx"


def test_weights_that_are_lost_or_cut_off_are_named(external: Path) -> None:
    weights = external.with_name("m.onnx.data")
    content = weights.read_bytes()
    assert identify(external) == ONNX
    weights.write_bytes(content[:-1])
    assert identify(external).what == (
        f"an ONNX file whose weights, 'm.onnx.data', are {len(content) - 1} bytes where it needs {len(content)}"
    )
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1")
    assert identify(external).what == "an ONNX file whose weights, 'm.onnx.data', are a pointer of Git LFS"
    weights.unlink()
    assert identify(external).what == "an ONNX file without its weights, 'm.onnx.data'"
    assert identify(external).way == f"put that file, which the export wrote too, beside the model, in {external.parent}"


def field(number: int, content: bytes) -> bytes:
    """Of a protobuf message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


APART = field(13, field(1, b"location") + field(2, b"weights"))  # a tensor whose numbers are in the file `weights`


@pytest.mark.parametrize(
    "attribute", [field(5, APART), field(6, field(5, APART)), field(6, field(1, field(5, field(5, APART))))],
    ids=["of Constant", "of If", "of Constant in If"],
)  # fmt: skip
def test_weights_that_a_node_keeps_apart_are_the_models_too(tmp_path: Path, attribute: bytes) -> None:
    path, weights = tmp_path / "m.onnx", tmp_path / "weights"
    path.write_bytes(b"\x08\x0a" + field(7, field(1, field(5, attribute))))
    assert identify(path).what == "an ONNX file without its weights, 'weights'"
    digests = set()
    for content in (b"some", b"more"):
        weights.write_bytes(content)
        assert identify(path) == ONNX
        digests.add(artifact_digest(path))
    assert len(digests) == 2


def test_graphs_within_graphs_without_end_are_a_damaged_file(tmp_path: Path) -> None:
    graph = b""
    for _ in range(1000):
        graph = field(1, field(5, field(6, graph)))
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a" + field(7, graph))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's, which PyTorch's compiler raises
    try:
        assert identify(tmp_path / "m.onnx").what == "no ONNX file, or a damaged one"
        assert not has_fp16(tmp_path / "m.onnx")
    finally:
        sys.setrecursionlimit(limit)


def test_what_onnx_runtime_cannot_load_is_told_by_what_the_file_is(external: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(external.parent)
    newer = onnx.load("m.onnx")
    newer.ir_version = 99
    onnx.save(newer, "newer.onnx")
    Path("newer").write_bytes(newer.SerializeToString())
    external.with_name("m.onnx.data").unlink()
    for name, says in (
        (
            "m.onnx",
            "an ONNX file without its weights, 'm.onnx.data': put that file, which the export wrote too, beside the model, in",
        ),
        ("newer.onnx", r"ONNX Runtime [\d.]+ cannot load it: Unsupported model IR version: 99, max .*; install a newer"),
        ("newer", r"ONNX Runtime [\d.]+ cannot load it: Unsupported model IR version: 99, max .*; install a newer"),
    ):
        with pytest.raises(backends.LoadFailed, match=f"^{external.parent}/{name}: {says}") as raised:
            backends.load("onnxruntime", {"model": name})
        assert "ONNXRuntimeError" not in str(raised.value)
        assert ".cc:" not in str(raised.value)


@pytest.mark.slow
def test_a_damaged_file_of_pytorch_is_told_with_its_path_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    module = torch.nn.Linear(64, 64).eval()
    torch.jit.trace(module, torch.ones(1, 64)).save("script.pt")
    torch.export.save(torch.export.export(module, (torch.ones(2, 64),)), "program.pt2")
    for name, what in (("script.pt", "a TorchScript archive"), ("program.pt2", "a program of torch.export")):
        whole = (tmp_path / name).read_bytes()
        for damaged, says in (
            (whole[: len(whole) // 2], "a damaged archive: its end is missing.*: copy or download it again"),
            (whole.replace(b"torch", b"crash"), f"{what} that is damaged, in .*: copy or download it again"),
            (
                without_weights(whole),
                rf"{what} that PyTorch {torch.__version__.partition('+')[0]}.* cannot load: copy it again.*\(\S+",
            ),
        ):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(backends.LoadFailed, match=f"^{tmp_path}/{name}: {says}"):
                load_callable(torch, name, {}, torch.device("cpu"), "fp32")
            with pytest.raises(ConfigError, match=f"^{tmp_path}/{name}: {says}"):
                guess(name)


def without_weights(content: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as whole, zipfile.ZipFile(target, "w") as less:
        for name in whole.namelist():
            if not name.endswith(("data/0", "weight_0", "weights_config.json")):
                less.writestr(name, whole.read(name))
    return target.getvalue()
