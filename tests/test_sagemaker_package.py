"""`gateway serve` of packages made for SageMaker: a folder, or a model.tar.gz, and what it says of them."""

import base64
import fcntl
import gzip
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gateway
from backends.base import ModelSpec
from backends.sagemaker import tensors
from gateway.cli import main
from gateway.config import ServerSection, parse_config
from gateway.configuring import argument, requirements
from gateway.configuring import guess as guessing
from gateway.configuring.archive import unpacked
from gateway.configuring.check import check
from gateway.configuring.guess import guess, written
from gateway.configuring.requirements import installed
from gateway.errors import ConfigError
from gateway.process import kept_folders
from gateway.process.announcement import ReadyModel, curl_command
from tests.backends import sagemaker_cases as cases

HANDLERS = """
def model_fn(model_dir):
    with open(model_dir + "/factor") as file:
        return int(file.read())

def input_fn(body, content_type):
    if content_type != "text/csv":
        raise ValueError(f"Unsupported content type: {content_type}")
    return [float(number) for number in body.split(",")]

def predict_fn(data, model):
    if data[0] < 0:
        raise RuntimeError("/opt/ml/secret/place is negative")
    return [model * number for number in data]

def output_fn(prediction, accept):
    return ",".join(map(str, prediction)), "text/csv"
"""

AREA = "def predict(width: float, height: float) -> float:\n    return width * height\n"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what is made for packages stays."""
    folder = tmp_path / "kept"
    folder.mkdir()
    for module in (argument, guessing):
        monkeypatch.setattr(module, "kept", lambda: folder)
    return folder


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return a_package(tmp_path / "doubler")


def a_package(folder: Path, code: str = HANDLERS) -> Path:
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "inference.py").write_text(code)
    (folder / "factor").write_text("2")
    return folder


def packed(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, ".")
    return path


def model(what: Path, **environment: str) -> dict[str, Any]:
    (only,) = guess(str(what), environment=environment).document["models"]
    parse_config({"models": [only]}, source="guess")
    return dict(only)


def fault(what: Path, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        guess(str(what), environment=environment)
    return caught.value.message


def text(name: str, shape: int = 1, **more: bool) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [shape], **more}


def test_a_package_is_a_raw_model_named_after_its_folder(package: Path) -> None:
    assert model(package) == {
        "name": "doubler",
        "inputs": [text("body"), text("content_type", optional=True), text("accept", optional=True)],
        "outputs": [text("body"), text("content_type")],
        "max_rows": 0,
        "backends": [{"kind": "python", "model": f"{package}/code/inference.py:SageMakerHandlers"}],
    }


def test_check_finds_no_fault_in_what_is_written_of_it(package: Path, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(written(guess(str(package)), tmp_path))
    assert check(tmp_path / "gateway.yaml").faults == ()


def test_a_package_that_batches_has_rows(tmp_path: Path) -> None:
    found = model(a_package(tmp_path / "many", f"max_batch_size = 16\n{HANDLERS}"))
    assert (found["max_rows"], found["inputs"][0]) == (16, text("body", -1))


def test_the_environment_says_what_it_says_to_the_old_container(package: Path) -> None:
    (package / "code" / "serve_it.py").write_text(HANDLERS)
    (backend,) = model(
        package,
        SAGEMAKER_PROGRAM="serve_it",
        SAGEMAKER_SUBMIT_DIRECTORY=f"file://{package}/code",
        SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT="text/csv",
        SAGEMAKER_MODEL_SERVER_WORKERS="3",
        SAGEMAKER_MODEL_SERVER_TIMEOUT="90",
    )["backends"]
    assert backend == {
        "kind": "python", "model": f"{package}/code/serve_it.py:SageMakerHandlers", "sessions": 3, "isolation": "process",
        "hang_timeout_s": 90, "class_options": {"default_accept": "text/csv"},
    }  # fmt: skip


def test_the_code_may_be_elsewhere(package: Path, tmp_path: Path) -> None:
    (package / "code").rename(tmp_path / "mine")
    (backend,) = model(package, SAGEMAKER_SUBMIT_DIRECTORY=f"{tmp_path}/mine")["backends"]
    assert backend["model"] == f"{tmp_path}/mine/inference.py:SageMakerHandlers"
    assert backend["class_options"] == {"model_dir": str(package)}


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"SAGEMAKER_PROGRAM": "absent.py"}, "SAGEMAKER_PROGRAM: absent.py: no such file in"),
        ({"SAGEMAKER_PROGRAM": "../../etc/passwd"}, "expected a file of"),
        ({"SAGEMAKER_MODEL_SERVER_WORKERS": "many"}, "SAGEMAKER_MODEL_SERVER_WORKERS: 'many': expected a number from 1"),
    ],
)
def test_what_the_environment_says_wrongly_is_named(package: Path, environment: dict[str, str], told: str) -> None:
    assert told in fault(package, **environment)


def test_code_that_would_have_to_be_fetched_is_asked_for(package: Path, tmp_path: Path) -> None:
    (package / "code").rename(tmp_path / "mine")
    assert "s3://mine/code.tar.gz: is not fetched here: put the code into" in fault(
        package, SAGEMAKER_SUBMIT_DIRECTORY="s3://mine/code.tar.gz"
    )


def test_code_without_handlers_is_asked_for_them(package: Path) -> None:
    (package / "code" / "inference.py").unlink()
    (package / "code" / "requirements.txt").write_text("six\n")
    assert "no inference.py: name the file of the handlers by SAGEMAKER_PROGRAM" in fault(package)


# served


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with gateway.TestClient(str(a_package(tmp_path_factory.mktemp("served") / "doubler"))) as made:
        yield made


def ask(client: gateway.TestClient, body: str, content_type: str = "text/csv") -> Any:
    tensors = [{**text("body"), "data": [body]}, {**text("content_type"), "data": [content_type]}]
    return client.post("/v2/models/doubler/infer", json={"inputs": tensors})


def test_it_answers_over_v2_as_any_other_model(client: gateway.TestClient) -> None:
    answer = ask(client, "1,2")
    assert answer.status_code == 200
    assert answer.json()["outputs"] == [{**text("body"), "data": ["2.0,4.0"]}, {**text("content_type"), "data": ["text/csv"]}]


def test_a_type_that_it_does_not_take_is_415_and_costs_it_nothing(client: gateway.TestClient) -> None:
    for _ in range(5):  # as many failures of its own would have it ejected
        answer = ask(client, "1", "image/png")
        assert answer.status_code == 415
        assert answer.json() == {"error": "doubler:1/python: input_fn: ValueError: Unsupported content type: image/png"}
    assert ask(client, "1").status_code == 200


def test_what_it_raises_else_is_500_and_its_traceback_is_in_the_log_alone(
    client: gateway.TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    answer = ask(client, "-1")
    assert answer.status_code == 500
    assert answer.json() == {"error": "doubler:1/python: RuntimeError: place is negative"}
    assert "in predict_fn" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_status_that_a_handler_sets_reaches_the_client(tmp_path: Path, isolation: str) -> None:
    code = """
def model_fn(model_dir):
    return None

def transform_fn(model, body, content_type, accept, context):
    context.set_response_status(int(body), "not today")
    return "never"
"""
    found = model(a_package(tmp_path / "doubler", code))
    found["backends"][0]["isolation"] = isolation
    with gateway.TestClient({"models": [found]}) as client:
        for given, got in {"404": 404, "422": 400, "429": 429, "503": 503, "507": 500}.items():
            answer = ask(client, given)
            assert (answer.status_code, "not today" in answer.json()["error"]) == (got, True), given
            assert ("Retry-After" in answer.headers) == (got in (429, 503))


def test_a_body_that_is_no_text_comes_and_goes_as_binary_tensors(tmp_path: Path) -> None:
    told = {answer["request"]: answer for answer in json.loads(cases.ANSWERS.read_text())}
    request = next(each for each in cases.REQUESTS if each.body == cases.IMAGE and each.accept == "application/x-npy")
    given = {"body": request.body, "content_type": request.content_type.encode(), "accept": request.accept.encode()}
    elements = [struct.pack("<I", len(value)) + value for value in given.values()]
    about = {
        "inputs": [
            {**text(name), "parameters": {"binary_data_size": len(element)}}
            for name, element in zip(given, elements, strict=True)
        ],
        "parameters": {"binary_data_output": True},
    }
    head = json.dumps(about).encode()
    with gateway.TestClient(str(cases.write_package(tmp_path / "own", "own"))) as client:
        answer = client.post(
            "/v2/models/own/infer",
            content=b"".join([head, *elements]),
            headers={"Inference-Header-Content-Length": str(len(head))},
        )
    assert answer.status_code == 200
    binary = answer.content[int(answer.headers["inference-header-content-length"]) :]
    (length,) = struct.unpack_from("<I", binary)
    assert binary[4 : 4 + length] == base64.b64decode(told[request.name]["body"])


def test_requests_share_a_batch_of_a_package_that_says_so(tmp_path: Path) -> None:
    code = """
max_batch_size = 8

def model_fn(model_dir): ...

def input_fn(body, content_type):
    return int(body)

def predict_fn(data, model):
    return [f"{number} of {data}" for number in data]

def output_fn(prediction, accept):
    return prediction
"""
    with gateway.load(guess(str(a_package(tmp_path / "many", code))).document) as model:
        assert model.predict({"body": ["1", "2"]})["body"].tolist() == [b"1 of [1, 2]", b"2 of [1, 2]"]


# model.tar.gz


def test_an_archive_is_unpacked_once_and_served_like_its_folder(package: Path, tmp_path: Path, kept: Path) -> None:
    path = packed(package, tmp_path / "model.tar.gz")
    found = guess(str(path))
    (entry,) = found.document["models"]
    assert entry["name"] == "model"
    (folder,) = kept.iterdir()
    assert entry["backends"][0]["model"] == f"{folder}/code/inference.py:SageMakerHandlers"
    assert found.notes[0] == (
        f"model.tar.gz is unpacked in {folder}, which is removed when it is not used: `gateway init {path} -o FILE` "
        "unpacks it beside FILE, to stay"
    )
    with gateway.TestClient(found.document) as client:
        body = {"inputs": [{**text("body"), "data": ["3"]}, {**text("content_type"), "data": ["text/csv"]}]}
        assert client.post("/v2/models/model/infer", json=body).json()["outputs"][0]["data"] == ["6.0"]
    assert guess(str(path)).document == found.document
    assert [*kept.iterdir()] == [folder]
    (package / "factor").write_text("3")
    assert guess(str(packed(package, path))).document != found.document


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data)
    return info, data


def an_archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


SYM, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([member("/etc/passwd")], "expected a path within the archive"),
        ([member("../out")], "expected a path within the archive"),
        ([member("a/../../out")], "expected a path within the archive"),
        ([member("a", SYM, "/etc")], "a link to '/etc', expected one within the archive"),
        ([member("a/b", SYM, "../../out")], "expected one within the archive"),
        ([member("a", SYM, "d/../x"), member("d", SYM, ".")], "a link to 'd/../x', expected one within"),
        ([member("a", SYM, "b"), member("a/x")], "below a link"),
        ([member("a", SYM, "b"), member("a")], "below a link"),
        ([member("a", HARD, "/etc/passwd")], "expected one to a file of the archive"),
        ([member("a/b", SYM, "../x"), member("c", HARD, "a/b")], "expected one to a file of the archive"),
        ([member("a", tarfile.FIFOTYPE)], "neither a file nor a folder nor a link"),
        ([member("a", tarfile.CHRTYPE)], "neither a file nor a folder nor a link"),
        ([member("/".join("d" * 70))], "expected a path within the archive"),
    ],
)
def test_an_archive_that_leads_out_of_itself_is_refused_and_leaves_nothing(
    tmp_path: Path, kept: Path, members: list[Any], told: str
) -> None:
    assert told in fault(an_archive(tmp_path / "model.tar.gz", *members))
    assert [*kept.iterdir()] == []
    assert not (tmp_path / "out").exists()


def test_links_within_an_archive_are_kept(tmp_path: Path, kept: Path) -> None:
    members = member("a/b", data=b"x"), member("c/s", SYM, "../a/b"), member("h", HARD, "a/b")
    folder = unpacked(an_archive(tmp_path / "model.tar.gz", *members), kept)
    assert [(folder / name).read_bytes() for name in ("a/b", "c/s", "h")] == [b"x"] * 3


@pytest.mark.parametrize(
    ("limits", "told"), [({"most_members": 2}, "more than 2 files"), ({"most_bytes": 5}, "more than 5 bytes when unpacked")]
)
def test_an_archive_has_bounds(tmp_path: Path, kept: Path, limits: dict[str, int], told: str) -> None:
    path = an_archive(tmp_path / "model.tar.gz", *(member(f"f{number}", data=b"xx") for number in range(3)))
    with pytest.raises(ConfigError, match=told):
        unpacked(path, kept, **limits)
    assert [*kept.iterdir()] == []


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08 no more", b"PK\x03\x04"])
def test_an_archive_that_is_none_is_told(tmp_path: Path, kept: Path, content: bytes) -> None:
    (tmp_path / "model.tar.gz").write_bytes(content)
    told = fault(tmp_path / "model.tar.gz")
    assert "model.tar.gz: cannot be unpacked: " in told
    assert told.endswith("; copy or download it again, whole")
    assert [*kept.iterdir()] == []


def test_an_archive_cut_short_is_told(package: Path, tmp_path: Path) -> None:
    (package / "factor").write_bytes(os.urandom(50_000))
    path = packed(package, tmp_path / "model.tar.gz")
    path.write_bytes(path.read_bytes()[:-20_000])
    assert "model.tar.gz: cannot be unpacked" in fault(path)


def bent(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    return path


def test_an_archive_whose_compressed_bytes_were_changed_is_told(package: Path, tmp_path: Path, kept: Path) -> None:
    (package / "factor").write_bytes(os.urandom(500) * 100)
    assert "model.tar.gz: cannot be unpacked" in fault(bent(packed(package, tmp_path / "model.tar.gz")))
    assert [*kept.iterdir()] == []


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_a_header_of_an_archive_is_not_read_whatever_its_length(tmp_path: Path, kept: Path, kind: bytes) -> None:
    """Of zeros a thousandth of it would be in the archive."""
    info = tarfile.TarInfo("h")
    info.type, info.size = kind, 8 << 30
    with gzip.open(tmp_path / "model.tar.gz", "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
    assert "a header of 8589934592 bytes" in fault(tmp_path / "model.tar.gz")
    assert [*kept.iterdir()] == []


def unpacked_elsewhere(path: Path, kept: Path) -> Path:
    """By a process that has ended."""
    code = "import sys; from pathlib import Path; from gateway.configuring.archive import unpacked\n"
    code += "print(unpacked(Path(sys.argv[1]), Path(sys.argv[2])))"
    command = [sys.executable, "-c", code, str(path), str(kept)]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def test_what_an_archive_was_before_is_removed_once_nobody_uses_it(tmp_path: Path, kept: Path) -> None:
    path = an_archive(tmp_path / "model.tar.gz", member("a", data=b"1"))
    other = unpacked_elsewhere(an_archive(tmp_path / "other.tar.gz", member("a", data=b"1")), kept)
    first = unpacked_elsewhere(path, kept)
    used = os.open(first, os.O_RDONLY)
    try:
        fcntl.flock(used, fcntl.LOCK_SH)
        second = unpacked_elsewhere(an_archive(path, member("a", data=b"22")), kept)
        assert {*kept.iterdir()} == {other, first, second}
    finally:
        os.close(used)
    third = unpacked(an_archive(path, member("a", data=b"333")), kept)
    assert {*kept.iterdir()} == {other, third}
    fourth = unpacked_elsewhere(an_archive(path, member("a", data=b"4444")), kept)
    assert {*kept.iterdir()} == {other, third, fourth}  # this process uses the third
    assert unpacked(path, kept) == fourth


def test_what_nobody_uses_is_removed_at_once_where_disk_is_scarce(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archives = [an_archive(tmp_path / f"{name}.tar.gz", member("a", data=b"1")) for name in "abc"]
    unpacked_elsewhere(archives[0], kept)
    used = unpacked(archives[1], kept)
    others = kept / "making-others"
    others.mkdir()
    monkeypatch.setattr(kept_folders, "_SCARCE_BYTES", 1 << 62)
    new = unpacked(archives[2], kept)
    assert {*kept.iterdir()} == {used, others, new}


def test_what_nobody_has_used_for_a_week_is_removed(tmp_path: Path, kept: Path) -> None:
    archives = [an_archive(tmp_path / f"{name}.tar.gz", member("a")) for name in ("old", "used", "new")]
    old, used = (unpacked_elsewhere(path, kept) for path in archives[:2])
    torn = kept / "making-torn"
    torn.mkdir()
    ago_s = time.time() - 8 * 86_400
    for each in (old, used, torn):
        os.utime(each, (ago_s, ago_s))
    assert unpacked_elsewhere(archives[1], kept) == used
    new = unpacked_elsewhere(archives[2], kept)
    assert {*kept.iterdir()} == {used, new}


@pytest.mark.parametrize("backend", [{}, {"isolation": "process"}])
def test_who_serves_a_configuration_that_names_kept_folders_holds_them(
    package: Path, tmp_path: Path, kept: Path, backend: dict[str, str]
) -> None:
    archive = packed(package, tmp_path / "doubler.tar.gz")
    used = unpacked_elsewhere(archive, kept)
    (packages := kept / f"{'0' * 16}-{'1' * 16}").mkdir()
    found = model(used)
    found["backends"] = [{**found["backends"][0], **backend, "class_options": {"packages": str(packages)}}]
    with gateway.TestClient({"models": [{**found, "name": "doubler"}]}) as client:
        ago_s = time.time() - 8 * 86_400
        for each in (used, packages):
            os.utime(each, (ago_s, ago_s))
        os.utime(archive)
        unpacked_elsewhere(archive, kept)
        assert used.is_dir()
        assert packages.is_dir()
        assert ask(client, "1").status_code == 200
    assert not {used, packages} & {*kept_folders._in_use}
    os.utime(archive, (1, 1))
    unpacked_elsewhere(archive, kept)
    assert not used.exists()


def test_a_model_that_is_not_loaded_yet_keeps_its_folders(package: Path, tmp_path: Path, kept: Path) -> None:
    archive = packed(package, tmp_path / "doubler.tar.gz")
    used = unpacked_elsewhere(archive, kept)
    with gateway.TestClient({"models": [{**model(used), "name": "doubler", "load_at_start": False}]}):
        os.utime(archive, (1, 1))
        unpacked_elsewhere(archive, kept)
        assert used.is_dir()


def test_an_archive_of_other_models_is_read_like_a_folder_of_them(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "area.py").write_text(AREA)
    assert model(packed(tmp_path / "folder", tmp_path / "m.tgz"))["name"] == "area"


def test_a_model_of_an_archive_is_called_as_the_archive_is(tmp_path: Path) -> None:
    code = """
def model_fn(model_dir, context):
    return context.model_name

def transform_fn(model, body, content_type, accept):
    return model
"""
    folder = a_package(tmp_path / "named", code)
    assert "class_options" not in model(folder)["backends"][0]
    with gateway.load(guess(str(packed(folder, tmp_path / "archive.tar.gz"))).document) as served:
        assert served.predict({"body": [""]})["body"].tolist() == [b"archive"]


def test_the_command_to_try_it_by_says_a_type_of_content() -> None:
    inputs, outputs = tensors(0)
    ready = ReadyModel("m", "1", ModelSpec("m", inputs, outputs, 0), True)
    command = curl_command("http://localhost:8000", ready, ServerSection())
    assert command is not None
    assert '"data": ["[]"]' in command
    assert '{"name": "content_type", "datatype": "BYTES", "shape": [1], "data": ["application/json"]}' in command


def init(*arguments: Path | str) -> int:
    return main(["init", *map(str, arguments), "--quiet"])


def test_init_unpacks_an_archive_beside_what_it_writes_to_stay(package: Path, tmp_path: Path, kept: Path) -> None:
    archive = packed(package, tmp_path / "model.tar.gz")
    out = tmp_path / "served"
    out.mkdir()
    assert init(archive, "-o", out / "gw.yaml") == 0
    shutil.rmtree(kept)
    assert "# model.tar.gz is unpacked in model, beside this file\n" in (out / "gw.yaml").read_text()
    assert not check(out / "gw.yaml").faults
    assert (out / "model" / "factor").read_text() == "2"
    assert not (out / "model").stat().st_mode & 0o022
    assert (out / "model").stat().st_mode & 0o055 == 0o055
    with gateway.TestClient(str(out / "gw.yaml")) as client:
        assert client.get("/v2/models/model/ready").status_code == 200


def test_init_leaves_a_folder_that_is_there_as_it_is(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = packed(package, tmp_path / "m.tar.gz")
    assert init(archive, "-o", tmp_path / "one.yaml") == 0
    (tmp_path / "m" / "code" / "__pycache__").mkdir()  # by who has served it
    assert init(archive, "-o", tmp_path / "two.yaml") == 0
    (tmp_path / "m" / "factor").write_text("3")
    assert init(archive, "-o", tmp_path / "three.yaml") == 2
    assert f"{tmp_path}/m: is there already, and not as {archive} has it" in capsys.readouterr().err
    assert (tmp_path / "m" / "factor").read_text() == "3"
    assert not (tmp_path / "three.yaml").exists()
    assert init(packed(package, tmp_path / "x.yaml.tar.gz"), "-o", tmp_path / "x.yaml") == 2
    assert "-o: " in capsys.readouterr().err


def test_init_of_an_archive_of_nothing_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = an_archive(tmp_path / "m.tar.gz", member("a", data=b"1"))
    assert init(archive, "-o", tmp_path / "one.yaml") == 2
    assert f"{archive}: no model in this folder" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_an_archive_packed_one_folder_too_high_is_told_how_to_be_packed(package: Path, tmp_path: Path) -> None:
    archive = tmp_path / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(package, "doubler")
    told = fault(archive)
    assert told.startswith(f"{archive}: no model in it")
    assert told.endswith("all of it is in the folder doubler, a package: pack its content: tar czf model.tar.gz -C doubler .")
    assert "kept" not in told


# requirements.txt


WHEEL = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel(folder: Path, name: str, version: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        file.writestr(f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{name}-{version}.dist-info/WHEEL", WHEEL)
        file.writestr(f"{name}-{version}.dist-info/RECORD", "")


@pytest.mark.slow
def test_what_a_package_requires_is_installed_in_a_folder_of_its_own(package: Path, kept: Path) -> None:
    wheel(package / "code", "asked_for_by_a_package", "1.5")
    (package / "code" / "requirements.txt").write_text(
        "--no-index\n--find-links .\nnumpy  # which is here\nasked-for-by-a-package==1.5\n"
    )
    found = guess(str(package))
    (folder,) = kept.iterdir()
    packages = folder / "packages"
    assert found.notes == (
        f"doubler: what code/requirements.txt asks for is installed in {packages}, which is removed after a week without use: "
        "`pip install --target` makes one to stay",
    )
    assert sorted(entry.name for entry in packages.iterdir() if not entry.name.startswith("__")) == [
        "asked_for_by_a_package-1.5.dist-info", "asked_for_by_a_package.py",
    ]  # fmt: skip
    (package / "code" / "inference.py").write_text(
        "import asked_for_by_a_package\n\ndef model_fn(model_dir): ...\n\n"
        "def transform_fn(model, body, content_type, accept):\n    return asked_for_by_a_package.VERSION\n"
    )
    with gateway.load(found.document) as served:
        assert served.predict({"body": [""]})["body"].tolist() == [b"1.5"]
    before = folder.stat()
    assert guess(str(package)).document == found.document
    assert folder.stat() == before  # pip was not asked again


@pytest.mark.parametrize(
    "line",
    [
        "-r more/base.txt",
        "-rmore/base.txt",
        "--requirement=more/base.txt",
        "--constraint more/base.txt  # so",
        "-c more/base.txt",
    ],
)
def test_files_that_requirements_name_are_asked_for_again_when_they_change(
    package: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(requirements, "_install", lambda file, made, longest_s: (made / "packages").mkdir())
    named = package / "code" / "requirements.txt"
    named.write_text(f"a\n  {line}\nb\n-r absent.txt\n-r /dev/zero\n-r https://host/x\n-r ${{NO}}\n")
    (package / "code" / "more").mkdir()
    (package / "code" / "more" / "base.txt").write_text("-r ../requirements.txt\n-r last.txt\n")
    last = package / "code" / "more" / "last.txt"
    last.write_text("c==1\n")
    installed(named, kept)
    (first,) = kept.iterdir()
    installed(named, kept)
    assert [*kept.iterdir()] == [first]
    last.write_text("c==2\n")
    installed(named, kept)
    assert len([*kept.iterdir()]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("--no-index\nno-such-package-anywhere\n", "pip cannot install it: ERROR: Could not find a version"),
        ("--no-index\n--find-links .\nnumpy==0.0.1\n", "other versions than the gateway runs with: numpy 0.0.1 (here it is"),
    ],
)
def test_what_cannot_be_installed_is_refused_in_words_and_leaves_nothing(
    package: Path, kept: Path, asked: str, told: str
) -> None:
    wheel(package / "code", "numpy", "0.0.1")
    (package / "code" / "requirements.txt").write_text(asked)
    assert told in fault(package)
    assert [*kept.iterdir()] == []
    assert np.__version__ != "0.0.1"


def test_nobody_is_asked_for_nothing(package: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "run", lambda *_, **__: pytest.fail("pip was asked"))
    (package / "code" / "requirements.txt").write_text("# nothing\n\n")
    assert guess(str(package)).notes == ()


def test_pip_has_a_limit(package: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "code" / "requirements.txt").write_text("six\n")
    waits = package / "waits"
    waits.write_text(f'#!/bin/sh\n[ "$1" = -m ] && exec sleep 60\nexec {sys.executable} "$@"\n')  # as pip; else it is Python
    waits.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(waits))
    with pytest.raises(ConfigError, match=r"pip has not installed it within 0\.1 s: give pip an index"):
        installed(package / "code" / "requirements.txt", kept, longest_s=0.1)
    assert [*kept.iterdir()] == []


# AWS's Ray container

RAY_CONFIG = """applications:
  - name: iris
    route_prefix: /
    import_path: deployment:app
    deployments:
      - name: IrisClassifier
        num_replicas: 2
        ray_actor_options:
          num_gpus: 1
"""
RAY_CODE = """from ray import serve

@serve.deployment(num_replicas=1)
class IrisClassifier:
    def __init__(self):
        self.path = "/opt/ml/model/iris.pth"

    async def __call__(self, request):
        data = await request.json()
        return {"sum": sum(data["features"])}

app = IrisClassifier.bind()
"""


def test_a_package_of_awss_ray_container_is_told_how_to_move_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(RAY_CONFIG)
    (tmp_path / "deployment.py").write_text(RAY_CODE.replace("\n\n", "\n\f\n"))  # form feeds end no line
    told = fault(tmp_path)
    for line in (
        "config.yaml:2: - name: iris: leave it out: a package is one model, named after its folder",
        "config.yaml:3: route_prefix: /: leave it out: the model is at /invocations",
        "config.yaml:7: num_replicas: 2: SAGEMAKER_MODEL_SERVER_WORKERS",
        "config.yaml:9: num_gpus: 1: leave it out: model_fn puts the model on a GPU",
        "deployment.py:3: @serve.deployment(num_replicas=1): leave it out",
        "deployment.py:5: def __init__(self):: def model_fn(model_dir): loads the model",
        'deployment.py:6: self.path = "/opt/ml/model/iris.pth": model_dir',
        "deployment.py:8: async def __call__(self, request):: def transform_fn(model, body, content_type, accept)",
        "deployment.py:9: data = await request.json(): json.loads(body)",
        "deployment.py:12: app = IrisClassifier.bind(): leave it out",
        "docs/moving.md, From AWS's Ray container",
    ):
        assert line in told, told
    assert len([line for line in told.splitlines() if line.startswith("  config.yaml:")]) == len(RAY_CONFIG.splitlines())


def test_a_configuration_of_another_kind_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("threads: 2\n")
    (tmp_path / "area.py").write_text(AREA)
    assert model(tmp_path)["name"] == "area"
