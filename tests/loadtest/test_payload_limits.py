"""What payloads are refused, how many are made, and with which header each kind is sent."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.errors import UsageError
from loadtest.load.payloads import from_files, synthetic
from loadtest.load.target import Address
from loadtest.results import LoadSpec
from tests.loadtest.test_payloads import INPUTS, SPEC, body


def sent(spec: LoadSpec, *paths: Path) -> list[bytes]:
    spec = replace(spec, payloads=tuple(map(str, paths)))
    return from_files(spec, Address.of(spec), "m")


def saved(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "asked", "kind"),
    [("a.json", "", "application/json"), ("a.bin", "", "application/octet-stream"), ("a.bin", "text/csv", "text/csv")],
)
def test_invocations_get_a_file_as_it_is_with_its_kind(tmp_path: Path, name: str, asked: str, kind: str) -> None:
    spec = replace(SPEC, protocol="invocations", content_type=asked)
    (request,) = sent(spec, saved(tmp_path, name, b"1,2\n"))
    assert f"\r\nContent-Type: {kind}\r\n".encode() in request
    assert b"\r\nContent-Length: 4\r\n" in request
    assert body(request) == b"1,2\n"


def test_a_raw_file_is_the_binary_request_of_one_input(tmp_path: Path) -> None:
    (request,) = sent(replace(SPEC, protocol="rest-binary"), saved(tmp_path, "a.bin", b"\0\1"))
    assert b"\r\nInference-Header-Content-Length: 0\r\n" in request
    assert body(request) == b"\0\1"


def test_a_folder_is_sent_in_the_order_of_names_without_its_folders(tmp_path: Path) -> None:
    for name in ("b.bin", "a.bin", "c.bin"):
        saved(tmp_path, name, name.encode())
    (tmp_path / "inner").mkdir()
    assert [body(one) for one in sent(replace(SPEC, protocol="rest-binary"), tmp_path)] == [b"a.bin", b"b.bin", b"c.bin"]


def test_files_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json: cannot be read"):
        sent(SPEC, tmp_path / "nowhere.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="the folder has no files"):
        sent(SPEC, tmp_path / "empty")


def test_texts_of_a_request_may_be_nested(tmp_path: Path) -> None:
    text = b'{"inputs": [{"name": "t", "datatype": "BYTES", "shape": [2, 2], "data": [["a", "b"], ["c", "d"]]}]}'
    (request,) = sent(replace(SPEC, protocol="rest-binary"), saved(tmp_path, "a.json", text))
    assert body(request).endswith(b"".join(b"\x01\0\0\0" + letter for letter in (b"a", b"b", b"c", b"d")))


def test_sixty_four_requests_are_made_and_fewer_where_they_are_large() -> None:
    assert len(synthetic(SPEC, INPUTS)) == 64
    large: list[dict[str, Any]] = [{"name": "x", "datatype": "FP64", "shape": [-1, 1 << 20]}]  # 8 MiB each
    assert len(synthetic(SPEC, large)) == 9  # the one that passes 64 MiB is the last


def test_numbers_fill_their_range_up_to_both_ends() -> None:
    made = [arrays for arrays, _ in synthetic(replace(SPEC, values=("input_ids=5:7",), rows="2", length="3-4"), INPUTS)]
    assert {int(value) for arrays in made for value in arrays["input_ids"].reshape(-1)} == {5, 6, 7}
    assert {bool(value) for arrays in made for value in arrays["flag"].reshape(-1)} == {True, False}
    assert {arrays["input_ids"].shape for arrays in made} == {(2, 3), (2, 4)}
    usual = np.concatenate([arrays["input_ids"].reshape(-1) for arrays, _ in synthetic(replace(SPEC, length="99"), INPUTS)])
    assert (usual.min(), usual.max()) == (1, 99)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": "x"}, "--rows 'x': expected a number or a range"),
        ({"rows": "0"}, "--rows '0': expected at least 1"),
        ({"length": "5-4"}, "--length '5-4': expected at least 1, and the smaller number first"),
        ({"length": "1-x"}, "--length '1-x': expected a number"),
        ({"values": ("image=a:b",)}, "'image=a:b': expected NAME=LOW:HIGH"),
        ({"values": ("image=1",)}, "'image=1': expected NAME=LOW:HIGH"),
        ({"values": ("picture=1:2",)}, "the model has no input 'picture', only attention_mask, flag"),
        ({"values": ("image=2:1",)}, "'image=2:1': LOW is above HIGH"),
        ({"values": ("image=nan:1",)}, "--values 'image=nan:1': expected finite numbers"),
        ({"values": ("image=-inf:inf",)}, "--values 'image=-inf:inf': expected finite numbers"),
        ({"values": ("image=-1e308:1e308",)}, "--values 'image=-1e308:1e308': expected finite numbers"),
        (
            {"values": (f"image=-1e-{'9' * 20}:1",)},
            f"--values 'image=-1e-{'9' * 20}:1': expected exponents of at most 18 digits",
        ),
        ({"values": ("input_ids=0:1e19",)}, "--values 'input_ids=0:1e19': expected -9223372036854775808 to"),
        ({"rows": str(10**21)}, f"--rows '{10**21}': expected at most 268435456"),
        ({"rows": "1-100000000"}, "--rows 100000000: with a length of 16, a request has "),
        ({"length": str(10**21)}, f"--length '{10**21}': expected at most 268435456"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        synthetic(replace(SPEC, **change), INPUTS)
    assert message in str(refused.value)


def test_values_are_of_the_inputs_datatype() -> None:
    of_bytes: list[dict[str, Any]] = [{"name": "x", "datatype": "UINT8", "shape": [-1, 4]}]
    assert len(synthetic(replace(SPEC, values=("x=0:255",)), of_bytes)) == 64
    with pytest.raises(UsageError, match=r"--values 'x=0:256': expected 0 to 255, as it is of UINT8"):
        synthetic(replace(SPEC, values=("x=0:256",)), of_bytes)
    halves = [{"name": "x", "datatype": "FP16", "shape": [-1, 4]}]
    assert np.isfinite(synthetic(replace(SPEC, values=("x=-65504:65504",)), halves)[0][0]["x"]).all()
    with pytest.raises(UsageError, match=r"--values 'x=0:1e5': expected -65504 to 65504, as it is of FP16"):
        synthetic(replace(SPEC, values=("x=0:1e5",)), halves)


@pytest.mark.parametrize("rows", [10**9, 100_000_000])
def test_requests_of_files_are_joined_to_no_more_than_can_be_sent(tmp_path: Path, rows: int) -> None:
    text = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
    with pytest.raises(UsageError, match=rf"--rows '?{rows}'?: .*expected at most (256|268435456)$"):
        sent(replace(SPEC, rows=str(rows)), saved(tmp_path, "a.json", text))


def test_a_model_whose_inputs_are_unknown_needs_payload_files() -> None:
    with pytest.raises(UsageError, match=r"'m' states no inputs .*--payload"):
        synthetic(SPEC, [])
    with pytest.raises(UsageError, match="input 'x': the server's metadata has the unknown datatype 'FP13'"):
        synthetic(SPEC, [{"name": "x", "datatype": "FP13", "shape": [1]}])


@pytest.mark.parametrize("number", ["9007199254740993", "9223372036854775807", "-9223372036854775808"])
def test_a_whole_number_is_sent_as_it_was_written(number: str) -> None:
    of_int64 = [{"name": "x", "datatype": "INT64", "shape": [-1, 4]}]
    sent = synthetic(replace(SPEC, values=(f"x={number}:{number}",)), of_int64)[0][0]["x"]
    assert set(sent.ravel().tolist()) == {int(number)}
    assert len(synthetic(replace(SPEC, values=("x=0:9223372036854775807",)), of_int64)) == 64


def test_values_of_64_bits_without_a_sign_reach_their_end() -> None:
    of_uint64 = [{"name": "x", "datatype": "UINT64", "shape": [-1, 4]}]
    most = 2**64 - 1
    sent = synthetic(replace(SPEC, values=(f"x={most - 1}:{most}",)), of_uint64)
    assert {value for arrays, _ in sent for value in arrays["x"].ravel().tolist()} == {most - 1, most}
    # As ever, where it need not reach so far.
    signed = [{"name": "x", "datatype": "INT64", "shape": [-1, 4]}]
    asked = replace(SPEC, values=("x=0:9223372036854775807",))
    assert np.array_equal(synthetic(asked, of_uint64)[0][0]["x"], synthetic(asked, signed)[0][0]["x"])


@pytest.mark.parametrize(
    ("datatype", "asked", "message"),
    [
        ("INT32", "x=0.5:0.9", "expected whole numbers, as it is of INT32"),
        ("UINT8", "x=0:1e-400", "expected whole numbers, as it is of UINT8"),
        ("INT64", "x=0:9223372036854775808", "expected -9223372036854775808 to 9223372036854775807, as it is of INT64"),
        ("UINT64", "x=0:18446744073709551616", "expected 0 to 18446744073709551615, as it is of UINT64"),
        ("FP32", "x=0:3.4028236e38", "expected -3.40282e+38 to 3.40282e+38, as it is of FP32"),
        ("BOOL", "x=5:9", "expected 0 to 1, as it is of BOOL"),
        ("BYTES", "x=1:3", "expected no range, as it is of BYTES"),
    ],
)
def test_values_that_the_datatype_does_not_have_are_refused_as_they_were_written(
    datatype: str, asked: str, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        synthetic(replace(SPEC, values=(asked,)), [{"name": "x", "datatype": datatype, "shape": [-1, 4]}])
    assert str(refused.value) == f"--values {asked!r}: {message}"


@pytest.mark.parametrize(
    ("datatype", "asked"),
    [
        ("BOOL", "x=1:1"),
        ("INT32", "x=1e3:1000.0"),
        ("BF16", "x=-3e38:3e38"),
        ("FP32", "x=3.4028235e38:3.4028235e38"),  # the largest, as numpy prints it
    ],
)
def test_values_that_the_datatype_has_are_taken(datatype: str, asked: str) -> None:
    low, high = map(float, asked.removeprefix("x=").split(":"))
    sent = synthetic(replace(SPEC, values=(asked,)), [{"name": "x", "datatype": datatype, "shape": [-1, 4]}])[0][0]["x"]
    assert np.isfinite(sent.astype(float)).all()
    assert sent.dtype.type(low) <= sent.min() <= sent.max() <= sent.dtype.type(high)
