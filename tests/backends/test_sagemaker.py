"""Packages of SageMaker's PyTorch container as models of the python backend; the bytes are those that its own toolkit gives."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backends
from backends.base import ExecutionFailed, InputRefused, LoadFailed, ModelSpec, Session, Tensors
from backends.sagemaker import Context
from gateway.engine.session_process import ProcessModel
from tests.backends.sagemaker_cases import ANSWERS, PACKAGES, REQUESTS, Request, write_package
from tests.npy import npy

pytestmark = pytest.mark.slow

INPUT, MEDIA = "invalid_argument", "unsupported_media_type"
RECORDED = {answer["request"]: answer for answer in json.loads(ANSWERS.read_text())}


def inputs(*requests: tuple[bytes, str, str]) -> Tensors:
    columns = zip(*requests, strict=True)
    arrays = {}
    for name, column in zip(("body", "content_type", "accept"), columns, strict=True):
        arrays[name] = np.array([each if isinstance(each, bytes) else each.encode() for each in column], object)
    return arrays


def spec(max_rows: int = 0) -> ModelSpec:
    return ModelSpec("", (), (), max_rows)


def opened(folder: Path, code: str = "", *, max_rows: int = 0, **options: Any) -> Session:
    """A session of a package that has this code beside what `write_package` makes, if it is not there yet."""
    if code:
        (folder / "code").mkdir(parents=True, exist_ok=True)
        (folder / "code" / "inference.py").write_text(code)
    named = {"model": f"{folder}/code/inference.py:SageMakerHandlers", "class_options": options}
    return backends.load("python", named, spec(max_rows)).open_session(0)


def ask(session: Session, body: bytes, content_type: str = "text/plain", accept: str = "", **headers: str) -> tuple[bytes, str]:
    parameters = {f"x-amzn-sagemaker-{name.replace('_', '-')}": value for name, value in headers.items()}
    outputs = session.run(inputs((body, content_type, accept)), parameters)
    return outputs["body"].item(), outputs["content_type"].item().decode()


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Session]]:
    made = {name: opened(write_package(tmp_path_factory.mktemp(name) / name, name)) for name in PACKAGES}
    yield made
    for session in made.values():
        session.close()


ANSWERED = [each for each in REQUESTS if RECORDED[each.name]["status"] == 200]
FAILED = [each for each in REQUESTS if each not in ANSWERED]


@pytest.mark.parametrize("request_", ANSWERED, ids=lambda each: each.name)
def test_an_answer_has_the_bytes_that_the_toolkit_gives(sessions: dict[str, Session], request_: Request) -> None:
    told = RECORDED[request_.name]
    answer = ask(sessions[request_.package], request_.body, request_.content_type, request_.accept)
    assert answer == (base64.b64decode(told["body"]), told["content_type"])


@pytest.mark.parametrize(
    ("request_", "code"),
    [*zip(FAILED, [MEDIA, MEDIA, INPUT, INPUT, MEDIA, None, MEDIA, MEDIA], strict=True)],
    ids=lambda each: each.name if isinstance(each, Request) else "",
)
def test_what_the_toolkit_fails_on_is_told_by_whose_fault_it_is(
    sessions: dict[str, Session], request_: Request, code: str | None
) -> None:
    """code: of an InputRefused; None: it is the model's fault."""
    with pytest.raises(ExecutionFailed) as caught:
        ask(sessions[request_.package], request_.body, request_.content_type, request_.accept)
    assert getattr(caught.value, "code", None) == code, caught.value


def test_every_request_has_an_answer_of_the_toolkit() -> None:
    assert [each.name for each in REQUESTS] == list(RECORDED)


def test_a_pickle_in_an_array_is_refused_and_not_run(sessions: dict[str, Session]) -> None:
    with pytest.raises(InputRefused, match="cannot be read as application/x-npy"):
        ask(sessions["defaults"], npy(np.array([{"a": 1}], object)), "application/x-npy")


def head_only(text: str) -> bytes:
    text = text + " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"PK\x03\x04 no archive of arrays",
        head_only("{'descr': '<f8', 'fortran_order': False, 'shape': (100000000000,)}"),
        head_only("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000000000000000000,)}"),
        head_only("{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}"),
        head_only("-" * 9000 + "1"),
    ],
    ids=["empty", "archive", "800 GB", "more", "a size that is none", "depth"],
)
def test_an_array_that_is_none_is_the_clients_fault_and_needs_no_memory(sessions: dict[str, Session], body: bytes) -> None:
    with pytest.raises(InputRefused, match="cannot be read as application/x-npy"):
        ask(sessions["defaults"], body, "application/x-npy")


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"1,a,2", "text/csv"),
        (b"1,2\n3,4,5", "text/csv"),
        (b'{"a": 1}', "application/json"),
        (b'["a", "b"]', "application/json"),
        (b"null", "application/json"),
        (b"[[1, 2], [3]]", "application/json"),
        (b"[1%s]" % (b"0" * 400), "application/json"),
        (b"[1", "application/json"),
        (npy(np.array(["a", "b"])), "application/x-npy"),
        (npy(np.array([1], "datetime64[s]")), "application/x-npy"),
    ],
)
def test_a_body_of_no_numbers_is_the_clients_fault(sessions: dict[str, Session], body: bytes, content_type: str) -> None:
    with pytest.raises(InputRefused, match=f"cannot be read as {content_type}: expected numbers: ."):
        ask(sessions["defaults"], body, content_type)


ECHO = """
def model_fn(model_dir):
    return model_dir

def input_fn(body, content_type):
    return body

def predict_fn(data, model):
    return 1

"""


def test_handlers_may_have_a_context_each_by_itself(tmp_path: Path) -> None:
    session = opened(
        tmp_path / "mine",
        """
def model_fn(model_dir, context):
    return context.system_properties["model_dir"] == model_dir

def input_fn(body, content_type, context):
    return [body.decode(), content_type, context.get_request_header(0, "X-Amzn-SageMaker-Custom-Attributes")]

def predict_fn(data, model):
    return [*data, model]

def output_fn(prediction, accept, context):
    asked = context.request_processor[0].get_request_properties()
    return repr([*prediction, accept, asked.get("Content-Type"), context.get_request_id(0)]), "text/plain"
""",
    )
    told = ask(session, b"one", "text/x", "text/y", custom_attributes="trace=7", inference_id="n-1")
    assert told == (b"['one', 'text/x', 'trace=7', True, 'text/y', 'text/x', 'n-1']", "text/plain")
    # Headers are those of the request at hand.
    assert ask(session, b"two", "", "text/y")[0] == b"['two', None, None, True, 'text/y', None, '']"


def test_what_is_called_once_is_called_before_the_first_request(tmp_path: Path) -> None:
    code = """
calls = []

def pre_model_fn(model_dir):
    calls.append("before")

def model_fn(model_dir):
    calls.append("model")
    return calls

def model_warmup_fn(model_dir, model):
    calls.append("warm")

def transform_fn(model, body, content_type, accept):
    return ",".join(model)
"""
    session = opened(tmp_path / "mine", code)
    assert ask(session, b"", "text/plain", "text/csv") == (b"before,model,warm", "text/csv")


@pytest.mark.parametrize(
    ("given", "body"),
    [
        ("b'bytes'", b"bytes"), ("bytearray(b'x')", b"x"), ("'täxt'", "täxt".encode()),
        ("{'a': [1, 2]}", b'{\n  "a": [\n    1,\n    2\n  ]\n}'),
        ("None", b"null"), ("(b'x', 'text/x')", b"x"),
    ],
)  # fmt: skip
def test_an_answer_is_sent_as_torchserve_sends_it(tmp_path: Path, given: str, body: bytes) -> None:
    session = opened(tmp_path / "mine", f"{ECHO}def output_fn(found, accept):\n    return {given}\n")
    assert ask(session, b"", "a/b", "c/d") == (body, "text/x" if "text/x" in given else "c/d")


def test_an_answer_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    code = f"{ECHO}def output_fn(found, accept):\n    return {{1, 2}}\n"
    with pytest.raises(ExecutionFailed, match="got set: expected bytes, text, or what JSON can hold") as caught:
        ask(opened(tmp_path / "mine", code), b"")
    assert not isinstance(caught.value, InputRefused)


RAISES = """
class BaseInferenceToolkitError(Exception):
    def __init__(self, status_code, message, phrase):
        self.status_code, self.message, self.phrase = status_code, message, phrase
        super().__init__(status_code, message, phrase)

class UnsupportedFormatError(Exception):
    pass

def model_fn(model_dir):
    return None

def input_fn(body, content_type):
    exec(body)

def predict_fn(data, model):
    raise ValueError("text/x is not known")

def output_fn(prediction, accept):
    return ""
"""


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("raise ValueError('Unsupported content type: text/x')", MEDIA),
        ("raise Exception('Requested unsupported ContentType in content_type: text/x')", MEDIA),
        ("raise UnsupportedFormatError('no')", MEDIA),
        ("raise BaseInferenceToolkitError(415, 'no', 'no')", MEDIA),
        ("raise BaseInferenceToolkitError(422, 'too young', 'no')", INPUT),
        ("raise BaseInferenceToolkitError(429, 'too much', 'no')", "limited"),
        ("raise BaseInferenceToolkitError(500, 'broken', 'no')", None),
        ("raise ValueError('negative')", None),
        ("pass", None),  # predict_fn raises, which is not about the content's type, whatever it says
    ],
)
def test_who_is_to_blame_for_what_a_handler_raises(tmp_path: Path, raised: str, code: str | None) -> None:
    session = opened(tmp_path / "mine", RAISES)
    with pytest.raises(ExecutionFailed) as caught:
        ask(session, raised.encode(), "text/x", "text/y")
    assert getattr(caught.value, "code", None) == code, caught.value


@pytest.mark.parametrize(
    ("status", "refusal"),
    [(400, INPUT), (404, "not_found"), (415, MEDIA), (422, INPUT), (429, "limited"), (500, None), (503, "backend_unreachable")],
)
def test_a_status_that_a_handler_sets_is_an_error(tmp_path: Path, status: int, refusal: str | None) -> None:
    code = f"""
def model_fn(model_dir):
    return None

def transform_fn(model, body, content_type, accept, context):
    context.set_response_status({status}, "not today")
    return ""
"""
    with pytest.raises(ExecutionFailed, match="not today") as caught:
        ask(opened(tmp_path / "mine", code), b"")
    assert getattr(caught.value, "code", None) == refusal


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def transform_fn(m, b, c, a): ...\ndef input_fn(b, c): ...\n", "transform_fn stands for input_fn"),
        ("def model_fn(): ...\n", "model_fn: takes 0 arguments, expected 1, or `context` behind them"),
        ("def model_fn(model_dir):\n    raise OSError('no file')\n", r"model_fn raised OSError: no file .*inference.py:2"),
        (
            "def model_fn(model_dir):\n    import sys\n    sys.exit('no GPU')\n",
            r"model_fn raised SystemExit: no GPU .*inference.py:3",
        ),
        ("import not_installed_anywhere\n", r"inference\.py'?: cannot be imported: ModuleNotFoundError: .*'not_inst"),
        ("", "expected one .pt or .pth file, got none"),
        ("max_batch_size = 4\n\ndef model_fn(model_dir): ...\n", "max_batch_size: is of a `predict_fn` that takes lists"),
        ("max_batch_size = len('four')\n", "inference.py:1: max_batch_size: expected a number from 1 to"),
        ("def model_fn(:\n", "inference.py:1: not Python: invalid syntax; correct that line"),
    ],
)
def test_a_package_that_cannot_be_served_says_why(tmp_path: Path, code: str, told: str) -> None:
    with pytest.raises(LoadFailed, match=told):
        opened(tmp_path / "mine", code or "# nothing\n")


BATCHES = """
max_batch_size = 3

def model_fn(model_dir):
    return []

def input_fn(body, content_type):
    return int(body)

def predict_fn(data, model):
    model.append(len(data))
    return [(number, model[-1]) for number in data]

def output_fn(prediction, accept):
    return repr(prediction), accept
"""


def test_a_package_that_says_so_predicts_a_batch_at_once(tmp_path: Path) -> None:
    session = opened(tmp_path / "mine", BATCHES, max_rows=3)
    outputs = session.run(inputs((b"1", "a/b", "c/d"), (b"2", "a/b", ""), (b"3", "a/b", "e/f")), {})
    assert outputs["body"].tolist() == [b"(1, 3)", b"(2, 3)", b"(3, 3)"]
    assert outputs["content_type"].tolist() == [b"c/d", b"application/json", b"e/f"]
    assert ask(session, b"7") == (b"(7, 1)", "application/json")


def test_as_many_predictions_are_expected_as_requests(tmp_path: Path) -> None:
    session = opened(tmp_path / "mine", BATCHES.replace("in data]", "in data[1:]]"), max_rows=3)
    with pytest.raises(ExecutionFailed, match="expected a list of 2 predictions, as max_batch_size is set, got 1"):
        session.run(inputs((b"1", "a/b", ""), (b"2", "a/b", "")), {})


GIVES = "def output_fn(prediction, accept):\n    return prediction\n"


def test_options_say_where_the_model_is_and_what_is_answered_by_default(tmp_path: Path) -> None:
    code = ECHO.replace("return 1", "return model") + GIVES
    session = opened(tmp_path / "mine", code, model_dir="/elsewhere", default_accept="text/csv")
    assert ask(session, b"", "a/b", "*/*") == (b"/elsewhere", "text/csv")


def test_the_types_may_be_left_out(tmp_path: Path) -> None:
    code = "def model_fn(m): ...\n\ndef transform_fn(model, body, content_type, accept):\n    return repr(content_type)\n"
    session = opened(tmp_path / "mine", code)
    outputs = session.run({"body": np.array([b"x"], object)}, {})
    assert (outputs["body"].item(), outputs["content_type"].item()) == (b"None", b"application/json")


def test_it_is_a_raw_model(tmp_path: Path) -> None:
    for code, rows in ((BATCHES, 3), (RAISES, 0)):
        (tmp_path / "inference.py").write_text(code)
        model = backends.load("python", {"model": f"{tmp_path}/inference.py:SageMakerHandlers"}, spec(rows))
        assert model.spec.raw


@pytest.mark.parametrize(
    ("raised", "check"),
    [
        ("raise ValueError('Unsupported: text/x')", lambda exc: isinstance(exc, InputRefused) and exc.code == MEDIA),
        ("raise BaseInferenceToolkitError(400, 'no', 'no')", lambda exc: isinstance(exc, InputRefused) and exc.code == INPUT),
        ("raise ValueError('negative')", lambda exc: type(exc) is ExecutionFailed),
    ],
)
def test_whose_fault_it_is_passes_from_a_process_of_its_own(
    in_a_process: Session, raised: str, check: Callable[[Exception], bool]
) -> None:
    with pytest.raises(ExecutionFailed) as caught:
        ask(in_a_process, raised.encode(), "text/x")
    assert check(caught.value)


@pytest.fixture(scope="module")
def in_a_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    file = tmp_path_factory.mktemp("mine") / "code" / "inference.py"
    file.parent.mkdir()
    file.write_text(RAISES)
    model = ProcessModel("python", {"model": f"{file}:SageMakerHandlers"}, spec()).load()
    session = model.open_session(0)
    yield session
    session.close()
    model.close()


def test_metrics_that_handlers_add_are_left_aside(tmp_path: Path) -> None:
    context = Context(str(tmp_path))
    context.metrics.add_counter("requests", 1, idx=0)
    context.metrics.add_metric(name="size", value=3, unit="bytes")
    with pytest.raises(AttributeError, match=r"context\.metrics has no 'get_metric' here"):
        context.metrics.get_metric("requests")
