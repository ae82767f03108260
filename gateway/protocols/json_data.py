"""A tensor's elements as JSON and back, for all that speaks it; and how a message is read that holds them.

msgspec parses a message and only skims over the `data` of a tensor (`msgspec.Raw`); that is parsed later, straight into a list
of its datatype's kind, which is where a wrong element is found, and packed into an array. NaN, Infinity and -Infinity are read
and written as these words, which JSON lacks and every v2 client has.
"""

import base64
import codecs
import contextlib
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from math import isnan
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import orjson

from backends.datatypes import NUMPY
from gateway.errors import InvalidArgument, shortened
from gateway.garbage import collecting_nothing
from gateway.protocols.smallest import WITHOUT_JSON
from gateway.protocols.tensors import ParsesLong, TakesLong, check_count, out_of_range
from gateway.turns import SLICE, pause
from gateway.types import ParameterValue
from gateway.wire.tensors import Buffer, shaped

_Strict = TypeVar("_Strict")
_Loose = TypeVar("_Loose")

_MSGSPEC: Final = re.compile(r"Expected `(.+)`, got `(.+?)`(?: - at `\$(.*)`)?$")
_JSON_WORDS: Final = {
    "str": "text", "bool": "true or false", "int": "a whole number", "float": "a float", "array": "a list",
    "object": "an object",
}  # fmt: skip
_EMPTY_LIST: Final = re.compile(rb"\[[ \t\r\n]+\]")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_UNNAMED: Final = re.compile(r"`\$(?:\.(inputs|outputs)\[(\d+)\])?\.parameters\[\.\.\.\]`$")

NUMBERS_AT_ONCE: Final = 1 << 13  # a millisecond or two at worst
_N: Final = ord("n")
_MANY_TEXTS: Final = 1 << 13  # elements of an answer
_LONG_TEXT: Final = 1 << 20  # bytes, or characters; a text is read and written in pieces of so many
_LONG_B64: Final = 3 << 18  # bytes of it that are encoded at once; a multiple of three, so that no padding is between
_MANY_NESTED: Final = 1 << 16  # numbers of an answer: some milliseconds
_PIECE_BYTES: Final = 128 << 10
_WAY: Final = "ask for it as binary data"
_LONG_WORDS_BYTES: Final = 64 << 10  # of JSON with NaN, or half a character: Python's reader takes up to 25 ms for so many

# datatype -> struct format, and what its JSON elements are
_FORMATS: Final = {
    "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
    "FP32": "f", "FP64": "d", "BOOL": "?",
}  # fmt: skip
_KINDS: Final[dict[str, type]] = {"BOOL": bool, "FP32": float, "FP64": float, "BYTES": str} | dict.fromkeys(
    (name for name in _FORMATS if "INT" in name), int
)
read_float: Final = msgspec.json.Decoder(float).decode
"""As JSON has it. Raises: ValueError, also for a number too large. Takes a quarter of the time of `float` (17 digits)."""
_data_decoders: Final[dict[tuple[type, int], msgspec.json.Decoder[Any]]] = {}


def lists_from_json(
    name: str, datatype: str, data: Any, json_depth: int, check: Callable[[int], object] | None = None, *, halves: bool = False
) -> tuple[list[Any], int]:
    """Read `data`: lists, flat or nested, whose elements are of the datatype's kind, and how deep they are nested, from 1.

    data: `msgspec.Raw`, or already parsed. json_depth: the deepest nesting. check: gets the number of elements before they are
    read, which takes some 30 times their bytes; of text it is not called. halves: whether FP16 and
    BF16 may come, as floats. Raises: InvalidArgument, and what check raises.
    """
    kind = float if halves and datatype in WITHOUT_JSON else _KINDS.get(datatype)
    if kind is None:
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input '{name}'"
        )
    depth = depth_of(data)
    if not 0 < depth <= json_depth:
        what = f"lists nested {depth} deep" if depth else "no list"
        raise InvalidArgument(f"input '{name}': data: got {what}, expected a list, flat or nested, at most {json_depth} deep")
    try:
        if type(data) is msgspec.Raw:
            if check is not None and (count := _elements(bytes(data))) is not None:
                check(count)
            return _decoder(kind, depth).decode(data), depth
        return msgspec.convert(data, _nested(kind, depth)), depth
    except ValueError as exc:
        raise InvalidArgument(f"input '{name}': data: {_odd_element(datatype, exc)}") from exc


def _decoder(kind: type, depth: int) -> msgspec.json.Decoder[Any]:
    decoder = _data_decoders.get((kind, depth))
    if decoder is None:
        decoder = _data_decoders[kind, depth] = msgspec.json.Decoder(_nested(kind, depth))
    return decoder


def tensor_of_elements(name: str, datatype: str, shape: Sequence[int], flat: list[Any]) -> np.ndarray:
    """Shapes: (n,) -> shape. BYTES: strings as UTF-8. Raises: InvalidArgument."""
    count = check_count(name, datatype, shape, len(flat))
    if datatype == "BYTES":
        elements = np.empty(count, NUMPY["BYTES"])
        elements[:] = [text.encode() for text in flat]
        return shaped(name, elements, shape)
    try:
        packed = _packer(datatype, count)(*flat)
    except (struct.error, OverflowError):
        raise out_of_range(name, datatype, flat) from None
    return shaped(name, np.frombuffer(packed, NUMPY[datatype]), shape)


@lru_cache(maxsize=256)  # `struct` keeps as many, by formats that would have to be written first
def _packer(datatype: str, count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}{_FORMATS[datatype]}").pack


def numbers_from_json(datatype: str, count: int) -> tuple[Callable[[bytes], list[Any]], Callable[..., bytes]] | None:
    """What reads a flat list of a datatype's numbers (raises: ValueError), and packs so many; None: it has no such.

    To pack raises struct.error and OverflowError, for what is out of range.
    """
    if datatype not in _FORMATS:
        return None
    return _decoder(_KINDS[datatype], 1).decode, _packer(datatype, count)


def tensor_from_json(
    name: str, datatype: str, shape: Sequence[int], data: Any, json_depth: int, *, long: bool = False
) -> np.ndarray:
    """Shapes: nested or flat `data`, in row-major order -> shape. Raises: InvalidArgument.

    long: the data may be, so elements are counted before they are read, and no garbage is looked for among their lists.
    """
    if long:
        with collecting_nothing:
            flat = _flat(name, datatype, data, json_depth, partial(check_count, name, datatype, shape))
    else:
        flat = _flat(name, datatype, data, json_depth)
    return tensor_of_elements(name, datatype, shape, flat)


def _flat(name: str, datatype: str, data: Any, json_depth: int, check: Callable[[int], object] | None = None) -> list[Any]:
    flat, depth = lists_from_json(name, datatype, data, json_depth, check)
    for _ in range(depth - 1):
        flat = list(chain.from_iterable(flat))
    return flat


def parse(message: Buffer, decoder: msgspec.json.Decoder[_Strict], loose: type[_Loose], *, in_haste: bool) -> _Strict | _Loose:
    """Read JSON. loose: what to read it as if it holds the words that JSON lacks.

    Raises: InvalidArgument; ParsesLong, in haste.
    """
    try:
        return decoder.decode(message)
    except msgspec.ValidationError as exc:
        raise _malformed(exc, partial(msgspec.json.decode, message, type=_Parameters)) from exc
    except RecursionError:
        raise InvalidArgument("malformed inference request: the JSON is nested too deep") from None
    except ValueError as exc:
        text = bytes(message)
        unmarked = text.removeprefix(codecs.BOM_UTF8)  # as some editors write it, and Triton reads it
        if len(unmarked) < len(text) and not unmarked.startswith(codecs.BOM_UTF8):
            return parse(unmarked, decoder, loose, in_haste=in_haste)
        words = b"NaN" in text or b"Infinity" in text
        if in_haste and len(text) > _LONG_WORDS_BYTES and (words or _SURROGATE.search(text)):
            raise ParsesLong from exc
        if not words:
            raise InvalidArgument(f"failed to parse the request JSON: {_half_character(text) or exc}") from exc
    try:
        read = _with_words(text)
        try:
            return msgspec.convert(read, loose)
        except msgspec.ValidationError as exc:
            raise _malformed(exc, partial(msgspec.convert, read, _Parameters)) from exc
    except RecursionError:
        raise InvalidArgument("malformed inference request: the JSON is nested too deep") from None
    except ValueError as exc:
        raise InvalidArgument(f"failed to parse the request JSON: {exc}") from exc


def any_value(text: bytes) -> Any:
    """Read JSON that may hold NaN and Infinity, as requests may. Raises: ValueError, RecursionError."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as exc:
        if b"NaN" not in text and b"Infinity" not in text:
            raise ValueError(_half_character(text) or str(exc)) from exc
        return _with_words(text)


def _with_words(text: bytes) -> Any:
    """Python's reader knows the words that JSON lacks, as Triton's and its clients' do. Raises: ValueError, RecursionError."""
    # Of bytes it would take a BOM, and half a character; and what is too large for a float it would make infinite.
    try:
        read = json.loads(text.decode(), parse_float=read_float)
    except ValueError as exc:
        if type(exc) is ValueError:  # an integer of more digits than Python reads
            raise ValueError("Integer value out of range") from exc  # as msgspec says it
        raise
    if _SURROGATE.search(text) and (half := _half_within(read)):  # this reader lets it pass, the strict one not
        raise ValueError(half)
    return read


class _Parameters(msgspec.Struct, gc=False):
    """Where v2's messages have parameters."""

    parameters: dict[str, Any] | None = None
    inputs: list["_Parameters"] = []
    outputs: list["_Parameters"] | None = None


def _malformed(exc: msgspec.ValidationError, read: Callable[[], _Parameters]) -> InvalidArgument:
    """In msgspec's words, but with the name of a parameter that is at fault, which it leaves out."""
    said = str(exc)
    if (found := _UNNAMED.search(said)) is not None:
        where, index = found.groups()
        with contextlib.suppress(ValueError, RecursionError):  # the message is at fault further on as well
            told = read()
            entries = (getattr(told, where) or [])[int(index) :][:1] if where else [told]
            odd = [
                name
                for entry in entries
                for name, value in (entry.parameters or {}).items()
                if not isinstance(value, ParameterValue)
            ]
            if odd:
                said = said.replace("[...]", f"[{shortened(odd[0])!r}]")
    return InvalidArgument(f"malformed inference request: {said}")


def _half_character(text: bytes) -> str:
    """What is wrong where there is one, which msgspec tells as the end of the text; empty: there is none, or it is no JSON."""
    if _SURROGATE.search(text):
        with contextlib.suppress(ValueError, RecursionError):
            return _half_within(json.loads(text.decode()))
    return ""


def _half_within(read: Any) -> str:
    """As `_half_character`, of what Python's reader has read."""
    try:
        json.dumps(read, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        return f"\\u{ord(exc.object[exc.start]):04x} is half a character, expected its other half beside it"
    return ""


def depth_of(data: Any) -> int:
    """How many lists `data` opens with, one within the other; 0: it is no list."""
    depth = 0
    if type(data) is msgspec.Raw:
        for byte in memoryview(data):
            if byte == 0x5B:
                depth += 1
            elif byte not in b" \t\r\n":
                break
    else:
        while isinstance(data, list):
            depth += 1
            data = data[0] if data else None
    return depth


def even_sizes(name: str, lists: list[Any], depth: int) -> tuple[list[int], list[Any]]:
    """The sizes of nested lists, and their elements in row-major order. Raises: InvalidArgument, if they are not even."""
    sizes = [len(lists)]
    level = lists
    for _ in range(depth - 1):
        if len(level) == 1:  # one row, as mostly
            level = level[0]
            sizes.append(len(level))
            continue
        lengths = set(map(len, level))
        if len(lengths) > 1:
            raise InvalidArgument(
                f"input '{name}': lists of {min(lengths)} and of {max(lengths)} side by side, expected equal ones"
            )
        sizes.append(max(lengths, default=0))
        level = list(chain.from_iterable(level))
    return sizes, level


def _elements(text: bytes) -> int | None:
    """How many elements lists have that hold neither text nor objects; None: they do hold such.

    text: valid JSON. A list has a comma less than elements, but for an empty one, and is itself an element of another.
    """
    if b'"' in text or b"{" in text:
        return None
    return text.count(b",") + 1 - text.count(b"[]") - sum(1 for _ in _EMPTY_LIST.finditer(text))


def _odd_element(datatype: str, exc: ValueError) -> str:
    """What msgspec says of an element, in the client's words: JSON's, and where it stands in `data`."""
    found = _MSGSPEC.match(str(exc))
    if found is None:
        return f"expected {datatype} elements: {exc}"
    wanted, got, place = found.groups()
    expected = "lists of one depth everywhere" if "array" in (wanted, got) else f"{datatype} elements"
    return f"expected {expected}, got {_JSON_WORDS.get(got, got)}" + (f" at data{place}" if place else "")


def lists_of(datatype: str, depth: int) -> Any:
    """The type of so deeply nested lists of a datatype's JSON elements; None: it has none."""
    kind = _KINDS.get(datatype)
    return None if kind is None else _nested(kind, depth)


def _nested(kind: type, depth: int) -> Any:
    nested: Any = kind
    for _ in range(depth):
        nested = list[nested]
    return nested


def to_json(name: str, datatype: str, array: np.ndarray, *, in_haste: bool = False, way: str = _WAY) -> bytes:
    """A flat JSON list, as Triton writes it. Floats: the shortest digits that give the same value of that datatype.

    way: as of `texts_to_json`. Raises: InvalidArgument, for bytes that are no text; TakesLong, for much text, in haste.
    """
    if datatype == "BYTES":
        if in_haste and (array.size > _MANY_TEXTS or sum(map(len, array.flat)) > _LONG_TEXT):
            raise TakesLong
        return b"".join(texts_to_json(name, array, way=way))
    return numbers_to_json(array)


def texts_to_json(name: str, array: np.ndarray, *, way: str = _WAY) -> list[bytes]:
    """The pieces of a JSON list: to join long ones holds the interpreter.

    way: to bytes that are no text, in words. Raises: InvalidArgument, for such.
    """
    flat = array.reshape(-1)
    pieces = [b"["]
    try:
        for at in range(0, flat.size, SLICE):
            pause()
            if at:
                pieces.append(b",")
            texts = flat[at : at + SLICE]
            if sum(map(len, texts)) <= _LONG_TEXT:
                strings = [element if isinstance(element, str) else bytes(element).decode() for element in texts]
                pieces.append(orjson.dumps(strings)[1:-1])
            else:
                for index, element in enumerate(texts):
                    pieces.append(b',"' if index else b'"')
                    pieces += _text_to_json(element)
                    pieces.append(b'"')
    except (UnicodeDecodeError, TypeError) as exc:  # a TypeError of orjson: a str that is no text either
        raise InvalidArgument(f"output '{name}' holds bytes that are no UTF-8 text: {way} ({exc})") from exc
    return [*pieces, b"]"]


def _text_to_json(text: str | Buffer) -> Iterator[bytes]:
    """Without its quotes, in pieces, since each holds the interpreter until it is read and written."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = text if isinstance(text, str) else memoryview(text)
    for at in range(0, len(view), _LONG_TEXT):
        piece = view[at : at + _LONG_TEXT]
        if not isinstance(piece, str):
            piece = decoder.decode(piece, at + _LONG_TEXT >= len(view))
        yield orjson.dumps(piece)[1:-1]
        pause()


def numbers_to_json(array: np.ndarray) -> bytes:
    """A flat JSON list, made in slices: each holds the interpreter until it is written."""
    if array.size <= NUMBERS_AT_ONCE:
        return short_to_json(array.ravel())
    return b"".join(slices_to_json(array))


def slices_to_json(array: np.ndarray) -> Iterator[bytes]:
    """The pieces of a JSON list."""
    flat = np.ascontiguousarray(array).reshape(-1)
    begin = b"["
    for at in range(0, flat.size, NUMBERS_AT_ONCE):
        yield begin + short_to_json(flat[at : at + NUMBERS_AT_ONCE])[1:-1]
        pause()
        begin = b","
    yield b"]" if flat.size else b"[]"


def nested_to_json(name: str, datatype: str, array: np.ndarray, *, in_haste: bool = False) -> list[bytes]:
    """The pieces of nested JSON lists; of a tensor without dimensions, of its element. BYTES is text; of a name that ends in
    `_bytes` it is b64.

    Raises: InvalidArgument, for bytes that are no text; TakesLong, in haste.
    """
    if datatype == "BYTES":
        if in_haste and (array.size > _MANY_TEXTS or sum(map(len, array.flat)) > _LONG_TEXT):
            raise TakesLong
        encoded = name.endswith("_bytes")
        write: Callable[[np.ndarray], bytes] = partial(_texts_to_json, encoded=encoded)
        try:
            if array.size <= SLICE and sum(map(len, array.flat)) <= _LONG_TEXT:
                return [write(array)]
            return gathered(_list(array, write, partial(_long_text_to_json, encoded=encoded)))
        except (UnicodeDecodeError, TypeError) as exc:
            raise InvalidArgument(
                f"output '{name}' holds bytes that are no UTF-8 text: {_WAY}, by a v2 request ({exc})"
            ) from exc
    if in_haste and array.size > _MANY_NESTED:
        raise TakesLong
    if datatype in WITHOUT_JSON:
        array = array.astype(np.float32)
    if not array.ndim:
        return [short_to_json(array.reshape(1))[1:-1]]
    array = np.ascontiguousarray(array)
    return [short_to_json(array)] if array.size <= NUMBERS_AT_ONCE else gathered(_list(array, short_to_json, None))


def gathered(pieces: Iterable[bytes]) -> list[bytes]:
    """Small pieces joined, until they are worth a write of their own. To join all of them would hold the interpreter."""
    out: list[bytes] = []
    small: list[bytes] = []
    small_bytes = 0
    for piece in pieces:
        small.append(piece)
        small_bytes += len(piece)
        if small_bytes >= _PIECE_BYTES:
            out.append(b"".join(small))
            small, small_bytes = [], 0
            pause()
    return [*out, b"".join(small)] if small or not out else out


def _list(
    array: np.ndarray, write: Callable[[np.ndarray], bytes], write_long: Callable[[str | Buffer], Iterator[bytes]] | None
) -> Iterator[bytes]:
    """Nested JSON lists; of a text without dimensions its element. write_long: of text, one element that is long."""
    if array.ndim:
        yield b"["
        yield from _elements_of(array, write, write_long)
        yield b"]"
    elif write_long is not None:
        yield from write_long(array.item())


def _elements_of(
    array: np.ndarray, write: Callable[[np.ndarray], bytes], write_long: Callable[[str | Buffer], Iterator[bytes]] | None
) -> Iterator[bytes]:
    """What is between the brackets."""
    most = NUMBERS_AT_ONCE if write_long is None else SLICE
    if array.size <= most and (write_long is None or sum(map(len, array.flat)) <= _LONG_TEXT):
        yield write(array)[1:-1]
        pause()
    elif len(array) > 1:
        half = len(array) // 2
        yield from _elements_of(array[:half], write, write_long)
        yield b","
        yield from _elements_of(array[half:], write, write_long)
    else:
        yield from _list(array[0, ...], write, write_long)


def _texts_to_json(array: np.ndarray, *, encoded: bool) -> bytes:
    """encoded: as b64. Raises: UnicodeDecodeError, TypeError."""
    written = np.empty(array.size, object)
    if encoded:
        raw = (element.encode() if isinstance(element, str) else bytes(element) for element in array.flat)
        written[:] = [{"b64": base64.b64encode(element).decode()} for element in raw]
    else:
        written[:] = [element if isinstance(element, str) else bytes(element).decode() for element in array.flat]
    return orjson.dumps(written.reshape(array.shape).tolist())


def _long_text_to_json(element: str | Buffer, *, encoded: bool) -> Iterator[bytes]:
    if encoded:
        view = memoryview(element.encode() if isinstance(element, str) else element)
        yield b'{"b64":"'
        for at in range(0, len(view), _LONG_B64):
            yield base64.b64encode(view[at : at + _LONG_B64])
            pause()
        yield b'"}'
    else:
        yield b'"'
        yield from _text_to_json(element)
        yield b'"'


def short_to_json(flat: np.ndarray) -> bytes:
    """A JSON list of at most NUMBERS_AT_ONCE numbers. Shapes: contiguous."""
    text = orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)
    if _N in text:  # of "null", orjson's word for what is not finite
        odd = flat[~np.isfinite(flat)].tolist()
        words = [b"NaN" if isnan(value) else b"Infinity" if value > 0 else b"-Infinity" for value in odd]
        return b"".join(chain.from_iterable(zip(text.split(b"null"), [*words, b""], strict=True)))
    return text
