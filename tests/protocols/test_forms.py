"""Forms of bodies, and the headers that name them, without a socket."""

import base64
import json
import random
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from backends.base import ModelSpec, TensorSpec
from gateway.batching.checkpoint import freeze, thaw
from gateway.errors import InvalidArgument
from gateway.protocols.invocations import FormCodec
from gateway.protocols.media import Form, answer_of, attributes_of, form_of
from gateway.protocols.tensors import ParsesLong, TakesLong
from gateway.protocols.v1 import RowsReader
from gateway.types import InferRequest, InferResponse
from tests.npy import npy

FLOATS = ModelSpec("", (TensorSpec("x", "FP32", (-1, 3)),), (TensorSpec("y", "FP32", (-1, 3)),), 64)
MIXED = ModelSpec(
    "",
    (TensorSpec("t", "BYTES", (-1, 1)), TensorSpec("n", "INT64", (-1,))),
    (TensorSpec("s", "BYTES", (-1, 1)), TensorSpec("m", "INT64", (-1,))),
    64,
)


@pytest.mark.parametrize(
    ("content_type", "form"),
    [
        (b"", Form("json")),
        (b"application/json", Form("json")),
        (b"Application/JSON; charset=utf-8", Form("json")),
        (b"text/csv;header=present", Form("csv", titled=True)),
        (b"text/csv; header = absent", Form("csv")),
        (b"image/jpeg", Form("raw")),
        (b"application/vnd.sagemaker-triton.binary+json;json-header-size=12", Form("v2", b"12")),
        (b"application/vnd.sagemaker-triton.binary+json", Form("v2")),
        (b"application/json;json-header-size=12", Form("json")),
        (b"application/x-www-form-urlencoded", None),
        (b"\xff", None),
    ],
)
def test_a_content_type_names_a_form(content_type: bytes, form: Form | None) -> None:
    assert form_of(content_type) == form


@pytest.mark.parametrize(
    ("accept", "answer"),
    [
        (b"", ""),
        (b"*/*", ""),
        (b"application/json", "json"),
        (b"text/csv;q=0.5, application/x-npy;q=0.9", "npy"),
        (b"text/html, */*;q=0.1", ""),
        (b"text/csv, application/json", "csv"),
        (b"text/event-stream", "events"),
        (b"text/csv;q=0", None),
        (b"text/csv;q=much", None),
        (b"text/html", None),
        (b"text/csv," * 113, "csv"),
        (b"text/csv," * 114, ""),  # to read one of 30 kB takes as long as hundreds of requests
    ],
)
def test_the_answer_is_what_the_client_likes_most(accept: bytes, answer: str | None) -> None:
    assert answer_of(accept) == answer


def test_custom_attributes_are_pairs_of_which_ours_are_taken() -> None:
    assert attributes_of(b"c000b4f9-df62") == {}
    assert attributes_of(b"Model=a=b; other=1,version = 2") == {"model": "a=b", "version": "2"}
    assert attributes_of(b"model=a".ljust(1024)) == {"model": "a"}
    with pytest.raises(InvalidArgument, match="Custom-Attributes has 1025 bytes: expected at most 1024"):
        attributes_of(b"model=a".ljust(1025))


SENT = [
    (FLOATS, "json", json.dumps({"instances": [[1, 2, 3], [4, 5, 6]]}).encode()),
    (FLOATS, "json", json.dumps({"inputs": {"x": [[1, 2, 3]]}}).encode()),
    (FLOATS, "csv", b"1,2,3\n4,5,6\n"),
    (FLOATS, "npy", npy(np.ones((2, 3), np.float32))),
    (FLOATS, "raw", bytes(24)),
    (MIXED, "v1", json.dumps({"instances": [{"t": {"b64": "aGk="}, "n": 1}, {"t": "b", "n": 2}]}).encode()),
    (MIXED, "csv", b'"a,b",1\nc,2\n'),
]


@pytest.mark.parametrize("answer", ["", "csv", "npy", "raw", "text"])
@pytest.mark.parametrize(("spec", "kind", "body"), SENT)
def test_a_body_with_odd_bytes_is_read_or_refused(spec: ModelSpec, kind: str, body: bytes, answer: str) -> None:
    codec = FormCodec("m", "1", spec, None, 8)
    names = dict(zip((tensor.name for tensor in spec.inputs), (tensor.name for tensor in spec.outputs), strict=True))
    draw = random.Random(f"{kind} {answer}")
    read = 0
    for trial in range(120):
        odd = bytearray(body)
        for _ in range(draw.randrange(4) if trial else 0):
            at = draw.randrange(len(odd))
            match draw.randrange(3):
                case 0:
                    odd[at] = draw.randrange(256)
                case 1:
                    del odd[at : at + draw.randrange(1, 4)]
                case _:
                    odd[at:at] = draw.choice((b"[", b"}", b'"', b"1e999", b"NaN", b"-", b"\x00", b"\n", b","))
            if not odd:
                break
        try:
            request = codec.decode(bytes(odd), Form(kind), answer, 0, lambda ref, asked_ns: b"")
            assert isinstance(request, InferRequest)
            read += 1
            outputs = {names[name]: array for name, array in request.inputs.items()}
            codec.encode(request, InferResponse("m", "1", "", outputs), lambda ref, data, asked_ns: None)
        except InvalidArgument:
            assert trial or answer in ("npy", "raw")  # which not every model has an answer for
    assert read


@pytest.mark.parametrize("answer", ["", "csv"])
@pytest.mark.parametrize(("spec", "kind", "body"), SENT)
def test_a_request_of_any_form_can_stand_in_a_recording(spec: ModelSpec, kind: str, body: bytes, answer: str) -> None:
    request = FormCodec("m", "1", spec, None, 8).decode(body, Form(kind), answer, 7, lambda ref, asked_ns: b"")
    kept, _ = thaw(freeze([request]))
    assert (kept[0].rows, kept[0].arrival_ns) == (request.rows, 7)


ROWS = {
    "FP32": "[[1, 2.5, -3e2]]",
    "INT64": "[[1, 2, 3]]",
    "BOOL": "[[true, false, true]]",
    "BYTES": '[["a", "", "c"]]',
    "FP16": "[[1, 2, 3]]",
}


@pytest.mark.parametrize("max_rows", [64, 0])
@pytest.mark.parametrize("datatype", ROWS)
def test_rows_read_at_once_are_those_read_part_by_part(datatype: str, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = TensorSpec("x", datatype, (-1, 3) if max_rows else (3,))
    spec = ModelSpec("", (tensor, TensorSpec("o", "FP32", (-1,), optional=True)), (tensor,), max_rows)
    codec = FormCodec("m", "1", spec, None, 8)

    def read(body: bytes) -> str:
        try:
            request = codec.decode(body, Form("json"), "", 0, lambda ref, asked_ns: b"")
        except InvalidArgument as exc:
            return exc.message
        (array,) = request.inputs.values()
        return repr((request.form, request.rows, array.dtype, array.shape, array.tolist()))  # in which nan is nan

    draw = random.Random(datatype)
    whole = f'{{"instances": {ROWS[datatype]}}}'.encode()
    bodies = [
        whole,
        whole[:-1] + b', "inputs": [[1, 2, 3]]}',
        whole[:-1] + b', "instances": [[1, 2]]}',
        whole.replace(b"1", b"NaN"),
        whole[:-2] + b"," + whole[14:],  # two rows
    ]
    for _ in range(300):
        odd = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(odd))
            odd[at : at + draw.randrange(3)] = draw.choice(
                (b"", b"[", b"]", b"[]", b" ", b",", b"1e999", b"NaN", b'"', b"\xff", b"{}", b"1")
            )
        bodies.append(bytes(odd))
    at_once = [read(body) for body in bodies]
    assert at_once[0].startswith("('rows'")
    monkeypatch.setattr(RowsReader, "try_read", lambda self, body: None)
    assert at_once == [read(body) for body in bodies]


def test_what_takes_long_is_not_done_in_haste() -> None:
    image = ModelSpec("", (TensorSpec("x", "BYTES", (1,)),), (TensorSpec("y", "BYTES", (1,)),), 0)
    raw = FormCodec("m", "1", image, None, 8, in_haste=True)
    with pytest.raises(TakesLong):
        raw.decode(bytes(5_000_000), Form("raw"), "raw", 0, lambda ref, asked_ns: b"")
    asked = raw.at_leisure().decode(bytes(5_000_000), Form("raw"), "raw", 0, lambda ref, asked_ns: b"")
    with pytest.raises(TakesLong):
        raw.encode(asked, InferResponse("m", "1", "", {"y": asked.inputs["x"]}), lambda ref, data, asked_ns: None)

    codec = FormCodec("m", "1", FLOATS, None, 8, in_haste=True)
    words = b'{"instances": [%b]}' % b",".join([b"[NaN, 1, 2]"] * 10_000)
    with pytest.raises(ParsesLong):
        codec.decode(words, Form("json"), "", 0, lambda ref, asked_ns: b"")
    assert codec.at_leisure().decode(words, Form("json"), "", 0, lambda ref, asked_ns: b"").rows == 10_000
    array = np.ones((1 << 19, 3))
    with pytest.raises(TakesLong):
        codec.decode(npy(array), Form("npy"), "", 0, lambda ref, asked_ns: b"")
    at_leisure = codec.at_leisure()
    request = at_leisure.decode(npy(array), Form("npy"), "", 0, lambda ref, asked_ns: b"")
    response = InferResponse("m", "1", "", {"y": request.inputs["x"]})
    with pytest.raises(TakesLong):
        codec.encode(request, response, lambda ref, data, asked_ns: None)
    assert sum(map(len, at_leisure.encode(request, response, lambda ref, data, asked_ns: None).parts)) > 6 << 20
    assert codec.parses_long(b"1" * (1 << 17), Form("csv"))
    assert not codec.parses_long(b"1" * (1 << 17), Form("json"))
    assert not codec.parses_long(b"1" * (1 << 24), Form("raw"))


def npy_of(descr: str, shape: str, content: bytes, more: str = "") -> bytes:
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, {more}}}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + len(head).to_bytes(2, "little") + head + content


TEXT = ModelSpec("", (TensorSpec("x", "BYTES", (-1, 1)),), (), 64)
ANY = ModelSpec("", (TensorSpec("x", "FP32", (-1, -1)),), (), 64)


@pytest.mark.parametrize(
    ("spec", "body", "told"),
    [
        (TEXT, npy_of("'<U1'", "(1, 1)", (0xD800).to_bytes(4, "little")), "a number that is no character"),
        (TEXT, npy_of("'>U1'", "(1, 1)", (0xD800).to_bytes(4)), "a number that is no character"),
        (TEXT, npy_of("'<U1'", "(1, 1)", (0x110000).to_bytes(4, "little")), "a number that is no character"),
        (ANY, npy_of("'<f4'", "(0, 1" + "0" * 30 + ")", b""), "larger than a tensor can be"),
        (ANY, npy_of("'<f4'", "(-1, -1)", bytes(4)), r"got FP32 \[-1, -1\]"),
        (ANY, npy_of("f('<f4')", "(1, 1)", bytes(4)), "1024 bytes: expected a dict of descr, fortran_order and shape$"),
        (ANY, npy_of("(((", "(1, 1)", bytes(4)), "1024 bytes: expected a dict of descr, fortran_order and shape$"),
        (ANY, npy_of("'<q4'", "(1, 1)", bytes(4)), "1024 bytes: descr is not a valid dtype descriptor: '<q4'$"),
        (ANY, npy_of("'|O'", "(1, 1)", b"\x80\4."), "an array of object"),
        (ANY, npy_of("[('a', '<f4')]", "(1, 1)", bytes(4)), "expected numbers, bool, or text"),
        (ANY, npy_of("'<f4'", "(1, 1)", bytes(4), "'x': " + "-" * 9000 + "1"), "a head of at most 1024 bytes"),
    ],
)
def test_an_npy_that_is_none_is_refused(spec: ModelSpec, body: bytes, told: str) -> None:
    codec = FormCodec("m", "1", spec, None, 32)
    with pytest.raises(InvalidArgument, match=told):
        codec.decode(body, Form("npy"), "", 0, lambda ref, asked_ns: b"")


def test_an_npy_is_read_in_any_order_of_bytes_and_axes() -> None:
    codec = FormCodec("m", "1", ANY, None, 32)
    array = np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3))
    for body in (npy(array), npy_of("'<f4'", "(True, 1)", bytes(4))):
        read = codec.decode(body, Form("npy"), "", 0, lambda ref, asked_ns: b"").inputs["x"]
        assert read.tolist() in (array.tolist(), [[0.0]])


@pytest.mark.parametrize("field", [b"9007199254740993.0", b"1_0", b"1e300", b"inf", b"\xc2\xb2"])
def test_csv_of_whole_numbers_is_not_rounded(field: bytes) -> None:
    codec = FormCodec("m", "1", ModelSpec("", (TensorSpec("x", "INT64", (-1, 1)),), (), 64), None, 32)
    with pytest.raises(InvalidArgument, match=r"line 2, column 1: got .*, expected INT64"):
        codec.decode(b"1.0\n" + field, Form("csv"), "", 0, lambda ref, asked_ns: b"")


def texts(count: int, length: int) -> np.ndarray:
    made = np.empty((count, 1), object)
    made[:, 0] = [b"%0*d" % (length, index) for index in range(count)]
    return made


NUMBERS = np.arange(300_000, dtype=np.float32).reshape(-1, 3)
LINE = np.arange(300_000, dtype=np.float32).reshape(1, -1)
MOST_BYTES = 2 << 20  # of one piece: to make it holds the interpreter


def pieces(outputs: dict[str, np.ndarray], answer: str) -> list[bytes]:
    """Of the answer to a request that asks for it so."""
    specs = [
        TensorSpec(name, "BYTES" if array.dtype.hasobject else "FP32", (-1,) * array.ndim) for name, array in outputs.items()
    ]
    codec = FormCodec("m", "1", ModelSpec("", FLOATS.inputs, tuple(specs), 64), None, 8)
    request = codec.decode(b'{"instances": [[1, 2, 3]]}', Form("json"), answer, 0, lambda ref, asked_ns: b"")
    return [
        bytes(part)
        for part in codec.encode(request, InferResponse("m", "1", "", outputs), lambda ref, data, asked_ns: None).parts
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"y": NUMBERS}, NUMBERS.tolist()),
        ({"y": LINE}, LINE.tolist()),
        ({"y": NUMBERS.reshape(-1, 5, 3)}, NUMBERS.reshape(-1, 5, 3).tolist()),
        ({"y": np.empty((0, 3), np.float32)}, []),
        ({"y": np.empty((2, 0), np.float32)}, [[], []]),
        ({"y": texts(20_000, 300)}, [[f"{index:0300d}"] for index in range(20_000)]),
        ({"y": texts(3, 3_000_000)}, [[f"{index:03000000d}"] for index in range(3)]),
        ({"y_bytes": texts(20_000, 300)}, [[{"b64": base64.b64encode(b"%0300d" % index).decode()}] for index in range(20_000)]),
        ({"y_bytes": texts(3, 3_000_001)}, [[{"b64": base64.b64encode(b"%03000001d" % index).decode()}] for index in range(3)]),
        (
            {"y": NUMBERS, "s": texts(100_000, 30)},
            [{"y": row, "s": [f"{index:030d}"]} for index, row in enumerate(NUMBERS.tolist())],
        ),
        ({"y": LINE, "s": texts(1, 3_000_000)}, [{"y": LINE[0].tolist(), "s": ["0" * 3_000_000]}]),
    ],
    ids=range(11),
)
def test_a_long_answer_in_json_is_made_in_pieces(outputs: dict[str, np.ndarray], expected: list[object]) -> None:
    made = pieces(outputs, "json")
    assert max(map(len, made)) < MOST_BYTES
    assert json.loads(b"".join(made)) == {"predictions": expected}


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [{"y": NUMBERS}, {"y": LINE}, {"y": NUMBERS, "s": texts(100_000, 30), "z": NUMBERS[:, :1]}])
def test_a_long_table_is_made_in_pieces(outputs: dict[str, np.ndarray]) -> None:
    made = pieces(outputs, "csv")
    assert max(map(len, made)) < MOST_BYTES
    rows = zip(*(array.tolist() for array in outputs.values()), strict=True)
    expected = [",".join(cell.decode() if isinstance(cell, bytes) else str(cell) for cell in chain(*row)) for row in rows]
    assert b"".join(made).decode().splitlines() == expected


def test_a_field_of_csv_may_be_as_long_as_a_body() -> None:
    words = "a,b " * 100_000
    codec = FormCodec("m", "1", TEXT, None, 32)
    read = codec.decode(f'"{words}"\nc'.encode(), Form("csv"), "", 0, lambda ref, asked_ns: b"").inputs["x"]
    assert read.tolist() == [[words.encode()], [b"c"]]
    codec = FormCodec("m", "1", ANY, None, 32)
    read = codec.decode(b"0." + b"25" * 100_000, Form("csv"), "", 0, lambda ref, asked_ns: b"").inputs["x"]
    assert read.tolist() == [[np.float32("0.252525252525")]]
    with pytest.raises(InvalidArgument, match=r"line 1, column 2: got '9{40}', expected FP32"):
        codec.decode(b"1," + b"9" * 200_000, Form("csv"), "", 0, lambda ref, asked_ns: b"")


@pytest.mark.parametrize("words", ["", ', "x": NaN'])
@pytest.mark.parametrize("tensor", ['"instances": [[1, 2, 3]]', '"inputs": {"x": [[1, 2, 3]]}'])
def test_a_parameter_of_v1_that_the_model_has_a_value_of_its_own_for_is_refused(tensor: str, words: str) -> None:
    def decode(own: tuple[str, ...], more: str) -> InferRequest:
        codec = FormCodec("m", "1", replace(FLOATS, own_arguments=own), None, 8)
        return codec.decode(f"{{{tensor}{more}{words}}}".encode(), Form("v1"), "", 0, lambda *_: pytest.fail("not asked"))

    with pytest.raises(InvalidArgument, match="request: parameter 'n': the model has a value of its own for it"):
        decode(("k", "n"), ', "parameters": {"n": 5}')
    for own, more in (((), ', "parameters": {"n": 5}'), (("n",), ', "parameters": {"m": 5}'), (("n",), ', "parameters": [1]')):
        assert decode(own, more).inputs["x"].tolist() == [[1, 2, 3]]
