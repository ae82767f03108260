"""Bodies of SageMaker's /invocations and of KServe v1's :predict, pure: each form of request and answer, for one model version.

JSON is v2 or v1 by what is in it, and is answered likewise. What else can be sent is answered with `predictions`. Accept asks
for another form.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from backends.base import ModelSpec, Tensors
from gateway.errors import InvalidArgument
from gateway.protocols import v1
from gateway.protocols.media import TRITON, Form
from gateway.protocols.plain_forms import from_csv, from_npy, from_raw, to_csv, to_npy, to_raw
from gateway.protocols.rest import RestCodec, header_length
from gateway.protocols.tensors import LONG_JSON_BYTES, ReadRegion, TakesLong, WriteRegion, count_rows, shape_key
from gateway.types import InferRequest, InferResponse
from gateway.wire.tensors import Buffer

if TYPE_CHECKING:
    from gateway.config import Ragged

_JSON: Final = b"application/json"
_LONG_CSV_BYTES: Final = 64 << 10  # 4 ms
_JSONS: Final = frozenset(("json", "v1"))
_BY_ITSELF: Final = frozenset(("", "json", "events"))  # answers that are as the request was


class FormReply(msgspec.Struct, frozen=True):
    """An answer. headers: more of them, as lines."""

    parts: list[Buffer]
    content_type: bytes
    headers: bytes = b""


def binary_headers(json_bytes: int) -> tuple[bytes, bytes]:
    """Content-Type and headers of a v2 answer with tensors behind its JSON."""
    return b"%b;json-header-size=%d" % (TRITON.encode(), json_bytes), b"Inference-Header-Content-Length: %d\r\n" % json_bytes


class FormCodec:
    """Reads requests of any form for one model version and writes their answers, or the parts of one."""

    def __init__(
        self, model: str, version: str, spec: ModelSpec, ragged: "Ragged | None", json_depth: int, *, in_haste: bool = False
    ) -> None:
        """json_depth: the deepest nesting of lists. in_haste: what takes long is to be refused: `TakesLong`, `ParsesLong`."""
        self._in_haste = in_haste
        self._v2 = RestCodec(model, version, spec, ragged, json_depth, in_haste=in_haste)
        self.model = model
        self.version = version
        self.spec = spec
        self.ragged = ragged
        self.json_depth = json_depth
        self._rows = v1.RowsReader(spec, model, json_depth, in_haste=in_haste)

    def at_leisure(self) -> "FormCodec":
        """The same, not in haste."""
        other = copy.copy(self)
        other._in_haste = False
        other._v2 = self._v2.at_leisure()
        other._rows = v1.RowsReader(self.spec, self.model, self.json_depth, in_haste=False)
        return other

    def parses_long(self, body: Buffer, form: Form) -> bool:
        """Whether a parser would hold the interpreter for long."""
        if form.kind in ("npy", "raw", "text"):
            return False
        return len(body) > (_LONG_CSV_BYTES if form.kind == "csv" else LONG_JSON_BYTES)

    def decode(self, body: Buffer, form: Form, answer: str, arrival_ns: int, read_region: ReadRegion) -> InferRequest:
        """Read and validate one request. answer: the form that is asked for, of `media.GIVEN`, or "".

        Raises: InvalidArgument, NotFound (a region); TakesLong and ParsesLong, in haste.
        """
        spec, model, kind = self.spec, self.model, form.kind
        written = "rows"
        rows = self._rows.try_read(body) if kind in _JSONS else None
        match kind:
            case _ if rows is not None:
                inputs = rows
            case "csv":
                inputs = from_csv(spec, model, body, titled=form.titled)
            case "npy":
                inputs = from_npy(spec, model, body, in_haste=self._in_haste)
            case "raw" | "text":
                inputs = from_raw(spec, model, body, text=kind == "text", in_haste=self._in_haste)
            case _:
                told = kind == "v1" or (kind == "json" and len(body))
                message = v1.peek(body, in_haste=self._in_haste) if told else None
                if message is None or (kind == "json" and v1.is_v2(message)):
                    return self._decode_v2(body, form, answer, arrival_ns, read_region)
                inputs, written = v1.read(message, spec, model, self.json_depth, in_haste=self._in_haste)
        return InferRequest(
            model, self.version, "", inputs, count_rows(spec, model, inputs, v1.SMALLEST[written]), arrival_ns,
            shape_key=shape_key(spec, self.ragged, inputs), form=written if answer in _BY_ITSELF else answer,
        )  # fmt: skip

    def _decode_v2(self, body: Buffer, form: Form, answer: str, arrival_ns: int, read_region: ReadRegion) -> InferRequest:
        request = self._v2.decode(body, header_length(form.header, len(body)), arrival_ns, read_region)
        if answer not in _BY_ITSELF:
            request.form = answer
        return request

    def encode(self, request: InferRequest, response: InferResponse, write_region: WriteRegion) -> FormReply:
        """Write an answer, or a part of one. Raises: InvalidArgument, for outputs without that form; TakesLong, in haste."""
        if request.form:
            return _ENCODE[request.form](self.spec, response.outputs, self._in_haste)
        parts, json_bytes = self._v2.encode(request, response, write_region)
        if not isinstance(parts, list):
            if self._in_haste:
                raise TakesLong
            parts = list(parts)
        return FormReply(parts, _JSON) if json_bytes is None else FormReply(parts, *binary_headers(json_bytes))


def check_event(reply: FormReply) -> None:
    """Raises: InvalidArgument, if it is no JSON, which is what events hold."""
    if reply.content_type != _JSON:
        raise InvalidArgument("text/event-stream: events hold JSON: ask for no binary outputs")


def _rows(spec: ModelSpec, outputs: Tensors, in_haste: bool) -> FormReply:
    return FormReply(v1.written(spec, outputs, by_row=True, in_haste=in_haste), _JSON)


def _columns(spec: ModelSpec, outputs: Tensors, in_haste: bool) -> FormReply:
    return FormReply(v1.written(spec, outputs, by_row=False, in_haste=in_haste), _JSON)


def _csv(spec: ModelSpec, outputs: Tensors, in_haste: bool) -> FormReply:
    return FormReply([*to_csv(spec, outputs, quoted=True, in_haste=in_haste)], b"text/csv; charset=utf-8")


def _text(spec: ModelSpec, outputs: Tensors, in_haste: bool) -> FormReply:
    return FormReply([*to_csv(spec, outputs, quoted=False, in_haste=in_haste)], b"text/plain; charset=utf-8")


def _npy(spec: ModelSpec, outputs: Tensors, in_haste: bool) -> FormReply:
    return FormReply(to_npy(outputs, in_haste=in_haste), b"application/x-npy")


def _raw(spec: ModelSpec, outputs: Tensors, in_haste: bool) -> FormReply:
    return FormReply(to_raw(outputs, in_haste=in_haste), b"application/octet-stream")


_ENCODE: Final[dict[str, Callable[[ModelSpec, Tensors, bool], FormReply]]] = {
    "rows": _rows,
    "columns": _columns,
    "csv": _csv,
    "npy": _npy,
    "raw": _raw,
    "text": _text,
}
