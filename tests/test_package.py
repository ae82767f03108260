"""`gateway package`: the archive has what the configuration names and nothing else, and is served only as it was packed."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from backends.files_below import files_below
from gateway.cli import _init, main
from gateway.config import load_config
from gateway.configuring.package import packaged
from gateway.deploying.on_machine import moved
from gateway.deploying.packing import Package, packed, secrets_here, write
from gateway.documents.faults import ConfigFaults
from gateway.documents.reader import read
from gateway.documents.sums import SUMS
from gateway.errors import ConfigError
from gateway.from_python.hosted import configuration
from tests.served.gateway_process import served

CODE = """
import json
from pathlib import Path

import numpy as np

from scales import FACTOR
from units.metric import METRE

NAMED = (".secret", "../LICENSE", "absent.txt")

class Scaled:
    inputs = (("x", "FP32", (-1, 2)),)
    outputs = (("y", "FP32", (-1, 2)),)

    def __init__(self, names: str = ""):
        self.weights = np.load(Path(__file__).with_name("weights.npy"))

    def predict(self, inputs):
        return {"y": inputs["x"] * self.weights * FACTOR * METRE}
"""
CONFIG = """
# Says what it is.
server: {drain_timeout_s: 5}
models:
  - name: scaled
    slo: {p99_ms: 1000}
    backends: [{kind: python, model: ../code/scaled.py:Scaled, class_options: {names: ../data/names.txt}}]
"""
CACHING = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
OF_IT = ["gateway.yaml", "code/scaled.py", "code/scales.py", "code/units/__init__.py", "code/units/metric.py",
         "code/weights.npy", "data/names.txt", SUMS]  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A configuration beside the folders that it names, and what is none of its business."""
    root = tmp_path / "project"
    texts = {
        "configs/scaled.yaml": CONFIG, "code/scaled.py": CODE, "code/scales.py": "FACTOR = 2\n", "code/units/__init__.py": "",
        "code/units/metric.py": "METRE = 1\n", "data/names.txt": "a\nb\n", "code/.secret": "", "code/unused.py": "",
        "code/units/__pycache__/metric.pyc": "", "code/notes.md": "", "code/json/mine.py": "", "LICENSE": "",
    }  # fmt: skip
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    np.save(root / "code" / "weights.npy", np.float32([1, 10]))
    return root


def package(project: Path, out: Path, *options: str) -> Path:
    assert main(["package", str(project / "configs" / "scaled.yaml"), "--out", str(out), *options]) == 0
    return out


def unpacked(archive: Path, folder: Path) -> Path:
    shutil.unpack_archive(archive, folder)
    return folder


def names_in(archive: Path) -> list[str]:
    with tarfile.open(archive) as opened:
        return opened.getnames()


def test_it_holds_what_is_named_each_where_it_stood_beside_the_others(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = package(project, tmp_path / "model.tar.gz")
    first, *listed = capsys.readouterr().out.splitlines()
    assert first == f"{archive}: 0.0 MiB, 8 files"
    assert [line.strip() for line in listed] == names_in(archive) == OF_IT
    folder = unpacked(archive, tmp_path / "model")
    backend = {"kind": "python", "model": "code/scaled.py:Scaled", "class_options": {"names": "../data/names.txt"}}
    assert yaml.safe_load((folder / "gateway.yaml").read_text()) == yaml.safe_load(CONFIG) | {
        "models": [{"name": "scaled", "slo": {"p99_ms": 1000}, "backends": [backend]}]
    }
    assert main(["check", "--load", str(folder)]) == 0
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=folder, check=True)


def test_the_same_files_make_the_same_bytes_wherever_they_are_and_whenever_they_were_written(
    project: Path, tmp_path: Path
) -> None:
    one = package(project, tmp_path / "one.tar.gz").read_bytes()
    shutil.copytree(project, tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert package(tmp_path / "elsewhere", tmp_path / "two.tar.gz").read_bytes() == one
    with tarfile.open(tmp_path / "two.tar.gz") as archive:
        assert {(each.uid, each.uname, each.mode) for each in archive} == {(0, "", 0o644)}
    (project / "code" / "scales.py").write_text("FACTOR = 3\n")
    assert package(project, tmp_path / "one.tar.gz").read_bytes() != one


def test_what_python_has_compiled_of_a_package_is_not_taken_for_the_next_ones(project: Path, tmp_path: Path) -> None:
    """A cache is known by time and size, which the code of two packages may have in common."""
    there = tmp_path / "there"
    answers = []
    for factor in (2, 3):
        scales = project / "code" / "scales.py"
        scales.write_text(f"FACTOR = {factor}\n")
        os.utime(scales, (0, 0))
        unpacked(package(project, tmp_path / "out.tar.gz"), there)
        ran = [sys.executable, "-c", "import scales; print(scales.FACTOR)"]
        told = subprocess.run(ran, cwd=there / "code", capture_output=True, text=True, timeout=60, check=True, env=CACHING)
        answers.append(told.stdout.strip())
    assert list((there / "code" / "__pycache__").iterdir())
    assert answers == ["2", "3"]


def test_more_files_and_folders_go_along_and_what_is_hidden_stays(project: Path, tmp_path: Path) -> None:
    archive = package(project, tmp_path / "a.tgz", "--with", str(project / "LICENSE"), "--with", str(project / "code"))
    assert set(names_in(archive)) - set(OF_IT) == {"LICENSE", "code/json/mine.py", "code/unused.py", "code/notes.md"}


def test_all_that_python_would_import_beside_the_code_goes_along(project: Path, tmp_path: Path) -> None:
    code = project / "code"
    code.joinpath("scaled.py").write_text(
        f"import fast, hidden, twice\nimport lone.deep.core\nfrom native.sub import core\nimport absent, empty\n"
        f"from .queue import core\nfrom . import beside\n{CODE}"
    )
    imported = ("queue.py", "beside.py", "lone/deep/core.py", "native/sub/core.abi3.so", "twice/__init__.py", "hidden.pyc",
                "fast.cpython-311-x86_64-linux-gnu.so", "fast.cpython-312-aarch64-linux-gnu.so", "fast.so")  # fmt: skip
    for name in (*imported, "twice.py", "faster.so", "fast.old.py", "empty/notes.md"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text("")
    archive = package(project, tmp_path / "model.tar.gz")
    assert set(names_in(archive)) - set(OF_IT) == {f"code/{name}" for name in imported}


def test_an_onnx_file_brings_its_weights(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [4], np.float32([1, 2, 3, 4]).tobytes(), raw=True)
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 4]) for name in "xy"]
    node = onnx.helper.make_node("Mul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", ends[:1], ends[1:], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    (tmp_path / "models").mkdir()
    onnx.save(
        model, str(tmp_path / "models" / "m.onnx"), save_as_external_data=True, location="m.weights", size_threshold=0,
        convert_attribute=False,
    )  # fmt: skip
    (tmp_path / "configs").mkdir()
    build = "{source: 'gone.py:make'}"
    backend = f"{{kind: onnxruntime, model: models/m.onnx, build: {build}}}"
    (tmp_path / "x.yaml").write_text(f"models: [{{name: m, backends: [{backend}]}}]")
    archive = tmp_path / "model.tar.gz"
    assert main(["package", str(tmp_path / "x.yaml"), "--out", str(archive)]) == 0
    assert names_in(archive) == ["gateway.yaml", "m.onnx", "m.weights", SUMS]
    document = yaml.safe_load((unpacked(archive, tmp_path / "model") / "gateway.yaml").read_text())
    assert document["models"][0]["backends"] == [{"kind": "onnxruntime", "model": "m.onnx"}]


@pytest.mark.parametrize(
    ("code", "beside"),
    [
        ("repository/m/1/model.py:TritonPythonModel", "repository/m/config.pbtxt"),
        ("m/code/inference.py:SageMakerHandlers", "m/species.json"),
    ],
)
def test_a_class_that_is_given_the_folder_above_its_own_brings_it_without_secrets_and_archives(
    tmp_path: Path, code: str, beside: str
) -> None:
    folder = (tmp_path / beside).parent
    secrets = [folder / name for name in ("tls.crt", "tls.key", "keys.yaml")]
    for path in (tmp_path / code.partition(":")[0], tmp_path / beside, *secrets):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    tensors = "inputs: [{name: x, datatype: FP32, shape: [-1]}], outputs: [{name: y, datatype: FP32, shape: [-1]}]"
    model = f"{{name: m, max_rows: 8, {tensors}, backends: [{{kind: python, model: '{code}'}}]}}"
    tls = f"{{certificate: {secrets[0]}, key: {secrets[1]}}}"
    (tmp_path / "x.yaml").write_text(f"{{server: {{tls: {tls}, access: {{keys: {secrets[2]}}}}}, models: [{model}]}}")
    out = folder / "out.tgz"
    held = ["gateway.yaml", *sorted(name.removeprefix("repository/") for name in (code.partition(":")[0], beside)), SUMS]
    for _ in range(2):
        assert main(["package", str(tmp_path / "x.yaml"), "--out", str(out)]) == 0
        assert names_in(out) == held
    there = moved(read(tmp_path / "x.yaml"), "c7i.large")
    assert {*packed(there, apart=secrets_here(read(tmp_path / "x.yaml"))).files} == {*held[1:-1], "m/out.tgz"}


def with_secrets(folder: Path, code: str, **backend: object) -> Path:
    """A configuration whose keys lie beside its code, and some of them by other names too."""
    for name in ("tls.crt", "tls.key", "keys.yaml", "mine.txt", "helpers/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    (folder / "alias.txt").symlink_to("tls.key")
    (folder / "helpers" / "link.yaml").symlink_to("../keys.yaml")
    (folder / "m.py").write_text(code)
    server = {"tls": {"certificate": "tls.crt", "key": "tls.key"}, "access": {"keys": "keys.yaml"}}
    absolute = {section: {key: str(folder / name) for key, name in named.items()} for section, named in server.items()}
    model = {"name": "m", "backends": [{"kind": "python", "model": "m.py:M", **backend}]}
    (folder / "x.yaml").write_text(yaml.safe_dump({"server": absolute, "models": [model]}))
    return folder / "x.yaml"


def test_secrets_that_code_names_stay_and_so_does_what_is_to_be_left_out(tmp_path: Path) -> None:
    code = "import helpers\nREAD = ('tls.crt', 'tls.key', 'keys.yaml', 'alias.txt', 'mine.txt')\n"
    config, out = with_secrets(tmp_path, code), tmp_path / "out.tgz"
    assert main(["package", str(config), "--out", str(out)]) == 0
    held = ["gateway.yaml", "helpers/__init__.py", "m.py", "mine.txt", SUMS]
    assert names_in(out) == held
    assert (
        main(["package", str(config), "--with", str(tmp_path), "--without", str(tmp_path / "mine.txt"), "--out", str(out)]) == 0
    )
    assert sorted(names_in(out)) == sorted(f"{tmp_path.name}/{name}" if name not in ("gateway.yaml", SUMS) else name
                                           for name in (*held, "x.yaml") if name != "mine.txt")  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "options", "says"),
    [
        (
            {"class_options": {"file": "alias.txt"}},
            (),
            "class_options.file: 'alias.txt': {apart}; leave it out, or name another",
        ),
        ({"model": "tls.crt", "kind": "torch"}, (), "models[0].backends[0].model: 'tls.crt': {apart}; name another"),
        ({}, ("--with", "{here}/keys.yaml"), "--with: {here}/keys.yaml: {apart}: leave it out"),
        ({}, ("--without", "{here}/m.py"), "models[0].backends[0].model: 'm.py:M': {apart}; name another"),
        ({}, ("--without", "{here}/none"), "--without: {here}/none: no such file"),
    ],
)
def test_a_secret_that_is_asked_for_by_itself_is_refused(
    tmp_path: Path, backend: dict[str, object], options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = with_secrets(tmp_path, "", **backend), tmp_path / "out.tgz"
    known = {
        "here": tmp_path,
        "apart": "a file that no package holds: one that `server` or --without names, or the archive itself",
    }
    assert main(["package", str(config), "--out", str(out), *(each.format(**known) for each in options)]) == 2
    assert says.format(**known) in capsys.readouterr().err
    assert not out.exists()


def test_what_is_behind_links_goes_along_once_for_each_name_and_what_is_hidden_stays(tmp_path: Path) -> None:
    project, store = tmp_path / "project", tmp_path / "store"
    for name in ("v7/model.py", "v7/.hidden/x", ".git/x", "shared/a/w.txt"):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_text("")
    (project / "m").mkdir(parents=True)
    (project / "m" / "config.pbtxt").write_text("")
    for name, target in {"1": "v7", "2": "v7", ".git": ".git", "all": "shared", "config.txt": ".git/x"}.items():
        (project / "m" / name).symlink_to(store / target)
    (store / "shared" / "a" / "around").symlink_to(project)
    (store / "shared" / "a" / "again").symlink_to("..")
    tensors = "inputs: [{name: x, datatype: FP32, shape: [-1]}], outputs: [{name: y, datatype: FP32, shape: [-1]}]"
    model = f"{{name: m, max_rows: 8, {tensors}, backends: [{{kind: python, model: 'm/1/model.py:TritonPythonModel'}}]}}"
    (project / "x.yaml").write_text(f"models: [{model}]")
    assert main(["package", str(project / "x.yaml"), "--out", str(tmp_path / "m.tgz")]) == 0
    held = ["m/1/model.py", "m/2/model.py", "m/all/a/around/x.yaml", "m/all/a/w.txt", "m/config.pbtxt", "m/config.txt"]
    assert names_in(tmp_path / "m.tgz") == ["gateway.yaml", *held, SUMS]


def test_links_that_lead_to_ever_more_links_are_refused(tmp_path: Path) -> None:
    for one in "abcdefghij":
        (tmp_path / one).mkdir()
        for other in "abcdefghij":
            (tmp_path / one / other).symlink_to(f"../{other}")
    with pytest.raises(OSError, match="behind more than 4 links to folders"):
        list(files_below(tmp_path))


def test_a_file_beside_the_code_that_is_no_python_is_packed_unread(project: Path, tmp_path: Path) -> None:
    code = project / "code"
    for name in ("a", "b", "c", "z"):
        (code / "units" / f"{name}.py").write_text(f"from . import metric\nNAMED = '{name}.txt'\n")
        (code / "units" / f"{name}.txt").write_text("")
    (code / "units" / "old.py").write_text("print 'as Python 2 has it'\n")
    (code / "scaled.py").write_text(f"{CODE}TEMPLATE = 'template.py'\n")
    (code / "template.py").write_text("{{ name }} = \0\n")
    archive = package(project, tmp_path / "model.tar.gz")
    more = [f"units/{name}.{ending}" for name in "abcz" for ending in ("py", "txt")]
    assert set(names_in(archive)) - set(OF_IT) == {f"code/{name}" for name in (*more, "units/old.py", "template.py")}


def test_models_of_another_server_need_no_files(tmp_path: Path) -> None:
    text = "models: [{name: m, backends: [{kind: triton, url: 'triton:8001', model: m}]}]"
    (tmp_path / "x.yaml").write_text(text)
    assert main(["package", str(tmp_path / "x.yaml"), "--out", str(tmp_path / "m.tgz")]) == 0
    assert names_in(tmp_path / "m.tgz") == ["gateway.yaml", SUMS]


SYNTHETIC = "models: [{name: m, backends: [{kind: synthetic}]}]"
ONNX = "models: [{{name: m, backends: [{{kind: onnxruntime, model: {}}}]}}]"
PYTHON = "models: [{{name: m, backends: [{{kind: python, model: {}}}]}}]"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PYTHON.format("package.module:Class"), "'package.module:Class': an installed module, which a package does not hold; "
         "name a file, FILE.py:Class, that has it or imports it"),
        (ONNX.format("absent.onnx"), "'absent.onnx': no such file"),
        (ONNX.format("absent.onnx, build: {source: 'a.py:b'}"), "no such file; `gateway compile {config}` makes it"),
        (ONNX.format("pointer.onnx"), "a pointer of Git LFS, not the file itself; `git lfs pull` brings the file"),
        (PYTHON.format("absent.py:Class"), "no such file"),
        (PYTHON.format("broken.py:Class"), "broken.py:1: not Python: "),
        (PYTHON.format("own.py:Class, class_options: {a: [{b: /bin/sh}]}"), "class_options.a[0].b: an absolute path of this "
         "machine; count it from the code"),
        ("server: {state_dir: learned}\n" + SYNTHETIC, "server.state_dir: 'learned': a path beside the configuration"),
        ("models: [{name: m, backends: [{kind: synthetic, sesions: 2}]}]", "unknown key; did you mean `sessions`?"),
        (PYTHON.format("SHA256SUMS.py:Class"), "the package has a SHA256SUMS of its own: rename this one"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused_by_name_and_nothing_is_written(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "x.yaml"
    config.write_text(text)
    (tmp_path / "pointer.onnx").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "own.py").write_text("class Class: ...\n")
    (tmp_path / "broken.py").write_text("class Class\n")
    (tmp_path / "SHA256SUMS").write_text("")
    (tmp_path / "SHA256SUMS.py").write_text("CHECKED = 'SHA256SUMS'\n")
    out = tmp_path / "out" / "model.tar.gz"
    out.parent.mkdir()
    assert main(["package", str(config), "--out", str(out)]) == 2
    assert says.format(config=config) in capsys.readouterr().err
    assert not [*out.parent.iterdir()]


def test_an_out_that_is_a_folder_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text(SYNTHETIC)
    out = tmp_path / "m.tgz"
    out.mkdir()
    assert main(["package", str(tmp_path / "x.yaml"), "--out", str(out)]) == 2
    assert f"--out: {out}: cannot be written: Is a directory: expected a file" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [out, tmp_path / "x.yaml"]


def test_a_file_that_cannot_be_read_any_more_is_not_taken_for_the_archive(tmp_path: Path) -> None:
    gone = Package({}, {"gone.onnx": tmp_path / "gone.onnx"}, tmp_path)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/gone.onnx: cannot be packed: No such file or directory: expected"):
        write(gone, tmp_path / "m.tgz")
    assert not [*tmp_path.iterdir()]


def test_all_that_cannot_be_packed_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backends = "{kind: onnxruntime, model: absent.onnx}, {kind: python, model: 'a.b:C'}"
    (tmp_path / "x.yaml").write_text(f"server: {{run_dir: run}}\nmodels:\n- {{name: m, backends: [{backends}]}}")
    assert main(["package", str(tmp_path / "x.yaml"), "--out", str(tmp_path / "m.tgz")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_place_of_the_machine_that_serves_it_stays(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a\x3a\x00")  # a version, and a graph
    places = {"a": "/var/lib/gateway/engines", "b": "engines"}
    backends = [f"{{kind: tensorrt, name: {name}, model: m.onnx, engines: {place}}}" for name, place in places.items()]
    text = f"server: {{state_dir: /var/lib/gateway/}}\nmodels: [{{name: m, backends: [{', '.join(backends)}]}}]"
    (tmp_path / "x.yaml").write_text(text)
    assert main(["package", str(tmp_path / "x.yaml"), "--out", str(tmp_path / "m.tgz")]) == 0
    found = yaml.safe_load((unpacked(tmp_path / "m.tgz", tmp_path / "model") / "gateway.yaml").read_text())
    assert found["server"] == {"state_dir": "/var/lib/gateway"}
    assert [backend.get("engines") for backend in found["models"][0]["backends"]] == ["/var/lib/gateway/engines", None]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--out", "gateway.yaml"], "--out: gateway.yaml: expected a name that ends in .tar.gz or .tgz"),
        (["--out", "m.tgz", "--with", "absent"], "--with: absent: no such file, or an empty folder"),
    ],
)
def test_a_faulty_option_is_named(
    more: list[str], says: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    before = sorted(project.rglob("*"))
    assert main(["package", "configs/scaled.yaml", *more]) == 2
    assert says in capsys.readouterr().err
    assert sorted(project.rglob("*")) == before


def cut_short(folder: Path) -> None:
    (folder / "code" / "weights.npy").write_bytes((folder / "code" / "weights.npy").read_bytes()[:-1])


def add_line(folder: Path, text: str) -> None:
    (folder / SUMS).write_text((folder / SUMS).read_text() + text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut_short, "weights.npy: is not as it was packed: SHA-256 is "),
        (lambda folder: (folder / "code" / "scales.py").unlink(), f"scales.py: is missing, though {SUMS} lists it"),
        (lambda folder: (folder / "gateway.yaml").write_text(SYNTHETIC), "gateway.yaml: is not as it was packed"),
        (lambda folder: add_line(folder, "x\n"), f"{SUMS}: no list of SHA-256 sums: line 8 is no sum and name"),
        (lambda folder: add_line(folder, f"{64 * '0'}  ../x\n"), "line 8 names a file outside of the package"),
        (lambda folder: add_line(folder, f"{64 * '0'}  /x\n"), "line 8 names a file outside of the package"),
        (lambda folder: add_line(folder, "#" * (5 << 20)), f"{SUMS}: no list of SHA-256 sums: longer than 4 MiB"),
    ],
)
def test_a_package_that_is_not_as_it_was_packed_is_not_served(
    change: Callable[[Path], object], says: str, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unpacked(package(project, tmp_path / "m.tgz"), tmp_path / "model")
    load_config(folder)
    change(folder)
    for named in (folder, folder / "gateway.yaml"):
        with pytest.raises(ConfigFaults, match=says.replace(".", r"\.")):
            load_config(named)
        assert main(["serve", "--no-ray", "--http-port", "0", "--grpc-port", "0", str(named)]) == 2
        assert says in capsys.readouterr().err


def test_the_archive_itself_is_served_as_its_configuration_says_and_held_to_its_sums(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = package(project, tmp_path / "out.tar.gz")
    (model,) = configuration(str(out), whole=True).models
    assert (model.name, model.slo and model.slo.p99_ms) == ("scaled", 1000)
    assert [each.name for each in packaged(out, {}).models] == ["scaled"]
    assert main(["check", str(out)]) == 0
    with pytest.raises(ConfigError, match="is a configuration already"):
        _init(argparse.Namespace(config=str(out), output=None))
    folder = tmp_path / "changed"
    unpacked(out, folder)
    (folder / "code" / "scales.py").write_text("FACTOR = 3\n")
    with tarfile.open(out, "w:gz") as archive:
        archive.add(folder, ".")
    with pytest.raises(ConfigError, match=r"scales\.py: is not as it was packed"):
        configuration(str(out), whole=True)


def test_sums_of_something_else_beside_a_configuration_are_nobodys_business(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(SYNTHETIC)
    for text in (f"{64 * '0'}  model.bin\n", f"{64 * '0'}  my-gateway.yaml\n", "\xff"):
        (tmp_path / SUMS).write_text(text)
        assert load_config(tmp_path).models[0].name == "m"


@pytest.mark.slow
def test_the_folder_is_served_as_it_was_unpacked_and_read_only(project: Path, tmp_path: Path) -> None:
    folder = unpacked(package(project, tmp_path / "model.tar.gz"), tmp_path / "model")
    shutil.rmtree(project)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
    with (
        served(folder, "--no-ray") as gateway,
        urllib.request.urlopen(f"http://{gateway.http}/v2/models/scaled/infer", json.dumps(body).encode()) as response,
    ):
        assert json.load(response)["outputs"][0]["data"] == [2.0, 40.0]
    assert {path: path.stat().st_mtime_ns for path in before} == before
