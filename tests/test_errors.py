"""What clients are told of an error, and what stays in the log."""

import pytest

from gateway.errors import BackendFailed, BackendUnreachable, InvalidArgument, NotReady, instead, without_folders


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("m:1/python: OSError: no file '/srv/models/a.onnx'", "m:1/python: OSError: no file 'a.onnx'"),
        ("raised ValueError: no (/home/me/app/model.py:12)", "raised ValueError: no (model.py:12)"),
        ('"/a/b/c" and /d/e, [/f/g] x=/h/i:3', '"c" and e, [g] x=i:3'),
        ("m:1/python: from http://host:80/a/b to models/x.onnx at 1/2", None),
        ("input 'x': expected FP32 [-1, 16]", None),
    ],
)
def test_what_is_told_names_no_folder_of_the_server(text: str, told: str | None) -> None:
    assert without_folders(text) == (told or text)
    assert BackendFailed(text).words == NotReady(text).words == (told or text)


def test_what_is_told_of_a_failure_is_one_short_line() -> None:
    assert BackendFailed("one\n  two\n").words == "one two"
    words = BackendFailed("x" * 3000).words
    assert len(words) < 600
    assert words.endswith("… (cut: the server's log has all of it)")


def test_a_clients_own_mistake_is_told_as_it_is() -> None:
    assert InvalidArgument("region '/a/b/c'\n").words == "region '/a/b/c'\n"


def test_what_exists_is_named_as_far_as_it_fits() -> None:
    assert instead("lineaer", ["linear", "minilm"], "models here") == "; did you mean 'linear'? models here: 'linear', 'minilm'"
    assert instead("zzz", [], "models here") == "; models here: none"
    many = [f"{i}{'n' * 200}" for i in range(1000)]
    words = instead("n" * 100_000, many, "models here")
    assert words.endswith("…' and 990 more")
    assert len(words) < 2000


def test_what_has_begun_to_run_is_told_so_by_an_error_that_is_the_same_otherwise() -> None:
    for error in BackendUnreachable("gone", 2.0), NotReady("not loaded", 3.0, ("m", "1")):
        told = error.after_run()
        assert type(told) is type(error)
        assert told.message == f"{error.message}; the request may have run"
        assert vars(told) == {**vars(error), "message": told.message}
