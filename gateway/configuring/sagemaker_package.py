"""A package as SageMaker's containers get it: of the PyTorch container an entry of a configuration, of Ray's what to change.

The PyTorch container's has `code/inference.py`, or what SAGEMAKER_PROGRAM names in `code`, and what its handlers load beside
that folder. Source: sagemaker-inference 1.10 (environment, parameters) of PyPI; aws/deep-learning-containers, docs/ray.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from backends.base import LoadFailed
from backends.regular_file import special
from backends.sagemaker import CLASS, batch_size, tensors
from gateway.configuring.requirements import installed
from gateway.configuring.triton_repository import plain
from gateway.errors import ConfigError

_CODE: Final = "code"
_PROGRAM: Final = "SAGEMAKER_PROGRAM"
_DIRECTORY: Final = "SAGEMAKER_SUBMIT_DIRECTORY"
_ACCEPT: Final = "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"
_WORKERS: Final = "SAGEMAKER_MODEL_SERVER_WORKERS"
_TIMEOUT: Final = "SAGEMAKER_MODEL_SERVER_TIMEOUT"
_USUAL: Final = "inference.py"
_MOST_SESSIONS: Final = 256
_MOST_CONFIG_BYTES: Final = 1 << 20
_UNUSED: Final = "after a week without use: `pip install --target` makes one to stay"


def is_package(folder: Path, environment: Mapping[str, str]) -> bool:
    """Whether a folder is a package of the PyTorch container. Raises: ConfigError, if it is one without what is named in it."""
    code, program = _place(folder, environment)
    if (code / program).is_file() or special(code / program):
        return True
    if _PROGRAM in environment and code.is_dir():
        raise ConfigError(f"{_PROGRAM}: {program}: no such file in {code}")
    if code.is_dir() and (code / "requirements.txt").is_file() and not is_ray_package(folder):
        raise ConfigError(f"{code}: no {_USUAL}: name the file of the handlers by {_PROGRAM}, or remove that folder")
    return False


def _place(folder: Path, environment: Mapping[str, str]) -> tuple[Path, str]:
    """The folder of the code, and the file in it. Raises: ConfigError."""
    program = environment.get(_PROGRAM, "") or _USUAL
    program = program if program.endswith(".py") else f"{program}.py"
    given = urlsplit(environment.get(_DIRECTORY, ""))
    code = folder / _CODE
    local = given.scheme in ("", "file")
    if local and given.path and Path(given.path).is_dir() and not (code / program).is_file():
        code = Path(given.path)
    elif not local and not code.is_dir():
        raise ConfigError(f"{_DIRECTORY}: {given.geturl()}: is not fetched here: put the code into {code}, in the archive")
    if Path(program).is_absolute() or ".." in Path(program).parts:
        raise ConfigError(f"{_PROGRAM}: {program}: expected a file of {code}, such as {_USUAL}")
    return code, program


def read_package(
    folder: Path, *, name: str, environment: Mapping[str, str], kept: Callable[[], Path]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """An entry of `models`, and what was done for it, one sentence each.

    kept: makes the folder in which what it requires is installed. Raises: ConfigError.
    """
    code, program = _place(folder, environment)
    file = code / program
    try:
        rows = batch_size(file)
    except LoadFailed as exc:
        raise ConfigError(str(exc)) from exc
    options: dict[str, Any] = {}
    if file.parent.parent != folder:
        options["model_dir"] = str(folder)
    if name != folder.name:  # of an archive, which is unpacked in a folder of any name
        options["model_name"] = name
    if accept := environment.get(_ACCEPT):
        options["default_accept"] = accept
    notes = []
    requirements = code / "requirements.txt"
    if requirements.exists() and (packages := installed(requirements, kept())) is not None:
        options["packages"] = str(packages)
        notes.append(f"what {_CODE}/{requirements.name} asks for is installed in {packages}, which is removed {_UNUSED}")
    backend: dict[str, Any] = {"kind": "python", "model": f"{file}{CLASS}"}
    if (workers := min(_number(environment, _WORKERS), _MOST_SESSIONS)) > 1:
        backend |= {"sessions": workers, "isolation": "process"}
    if timeout_s := _number(environment, _TIMEOUT):
        backend["hang_timeout_s"] = timeout_s
    if options:
        backend["class_options"] = options
    inputs, outputs = tensors(rows)
    return {
        "name": name, "inputs": [plain(each) for each in inputs], "outputs": [plain(each) for each in outputs],
        "max_rows": rows, "backends": [backend],
    }, tuple(notes)  # fmt: skip


def _number(environment: Mapping[str, str], key: str) -> int:
    """0: nothing is said. Raises: ConfigError."""
    text = environment.get(key, "").strip()
    if not text:
        return 0
    if not text.isdecimal() or not 1 <= len(text) <= 6 or not int(text):
        raise ConfigError(f"{key}: {text!r}: expected a number from 1")
    return int(text)


# AWS's Ray container


def is_ray_package(folder: Path) -> bool:
    """Whether a folder is a package of AWS's Ray container: its config.yaml is one of Ray Serve."""
    path = folder / "config.yaml"
    try:
        if not path.is_file() or path.stat().st_size > _MOST_CONFIG_BYTES:
            return False
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False
    return isinstance(document, dict) and "applications" in document


def ray_package_refused(folder: Path) -> ConfigError:
    """What to change in such a package, a line for each of its lines that is to be another one."""
    config = folder / "config.yaml"
    found = _advice(config, _OF_CONFIG)
    module = re.search(r"^\s*-?\s*import_path:\s*['\"]?([\w.]+):", config.read_text(encoding="utf-8"), re.MULTILINE)
    code = folder.joinpath(*(module[1] if module else "deployment").split(".")).with_suffix(".py")
    for place in (code, folder / _CODE / code.name):
        if place.is_file():
            found += _advice(place, _OF_CODE)
            break
    return ConfigError(
        "\n".join(
            [
                f"{folder}: a package of AWS's Ray container, which runs Ray Serve's applications; here its model is served by "
                "the functions of code/inference.py, in a package like that of the PyTorch container:",
                *(f"  {line}" for line in found),
                "  code/requirements.txt: stays as it is",
                "an example: docs/moving.md, From AWS's Ray container",
            ]
        )
    )


_Advice = tuple[tuple[re.Pattern[str], str], ...]


def _advice(path: Path, table: _Advice) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a form feed ends none
    except (OSError, UnicodeDecodeError) as exc:
        return [f"{path.name}: cannot be read: {exc}"]
    return [
        f"{path.name}:{number}: {line.strip()[:80]}: {advice}"
        for number, line in enumerate(lines, 1)
        for advice in [next((advice for pattern, advice in table if pattern.search(line)), "")]
        if advice
    ]


def _table(rows: Mapping[str, str]) -> _Advice:
    return tuple((re.compile(pattern), advice) for pattern, advice in rows.items())


_OF_CONFIG: Final = _table(
    {
        r"^\s*(-\s*)?(applications|deployments|name):": "leave it out: a package is one model, named after its folder",
        r"^\s*(-\s*)?route_prefix:": "leave it out: the model is at /invocations, and at /v2/models/NAME",
        r"^\s*(-\s*)?import_path:": "leave it out: code/inference.py is found by its name, another by SAGEMAKER_PROGRAM",
        r"^\s*(-\s*)?(num_replicas|autoscaling_config):": "SAGEMAKER_MODEL_SERVER_WORKERS, or `sessions` in a configuration",
        r"^\s*(-\s*)?(max_ongoing_requests|max_concurrent_queries):": "leave it out: a session has one request at a time",
        r"^\s*(-\s*)?max_queued_requests:": "`batching.max_queue_rows` in a configuration",
        r"^\s*(-\s*)?num_gpus:": "leave it out: model_fn puts the model on a GPU where torch.cuda.is_available()",
        r"^\s*(-\s*)?(num_cpus|memory|resources|ray_actor_options):": "leave it out: the whole instance is the model's",
        r"^\s*(-\s*)?(pip|runtime_env|uv|conda):": "write what is to be installed to code/requirements.txt",
        r"^\s*(-\s*)?(env_vars):": "set them for the endpoint's container",
        r"^\s*(-\s*)?(user_config|args):": "read them in model_fn, from a file of the package or the environment",
        r"^\s*(-\s*)?(http_options|proxy_location|grpc_options|logging_\w+):": "leave it out: see `server` of a configuration",
    }
)
_OF_CODE: Final = _table(
    {
        r"@serve\.multiplexed": "a model for each: no equivalent in one package",
        r"@serve\.batch": "max_batch_size = N at the top, and predict_fn takes and returns lists",
        r"@serve\.deployment": "leave it out; its num_replicas are SAGEMAKER_MODEL_SERVER_WORKERS",
        r"@serve\.ingress|FastAPI\(": "leave it out: no application of one's own; one function answers",
        r"^\s*def __init__\(": "def model_fn(model_dir): loads the model, and returns it (or an object that has it)",
        r"^\s*(async )?def __call__\(": "def transform_fn(model, body, content_type, accept): not async",
        r"await \w+\.json\(\)": "json.loads(body)",
        r"await \w+\.body\(\)": "body",
        r"await \w+\.form\(\)": "parse body, by content_type",
        r"\w+\.headers": "content_type and accept; others by `context`, as the last argument",
        r"StreamingResponse": "no equivalent in a package: a `predict` that yields",
        r"(JSON|PlainText)?Response\(": "return the bytes or the text; with a content type of its own a tuple of both",
        r"\.remote\(": "call it: another deployment becomes a plain object",
        r"/opt/ml/model": "model_dir",
        r"\.bind\(": "leave it out",
        r"^\s*return \{": "json.dumps of it, in a tuple with its content type",
        r"^\s*(from ray import serve|import ray|from ray\b)": "leave it out",
    }
)
