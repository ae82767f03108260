"""What the runs before traffic tell a model's owner."""

import asyncio
import logging
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gateway.batching.service_curve import ServiceCurve
from gateway.config import ModelSection
from gateway.errors import BackendFailed, Code, GatewayError
from gateway.protocols.tensors import shape_key
from gateway.types import InferRequest, InferResponse
from tests.engine.repositories import repository_of
from tests.engine.test_repository import infer

HEAD = """
import numpy as np

class Model:
    inputs = [("INPUT0", "FP32", (-1, 16))]
    outputs = [("OUTPUT0", "FP32", (-1, 16))]

    def predict(self, inputs):
        x = inputs["INPUT0"]
"""


def models(tmp_path: Path, body: str, isolation: str = "thread") -> str:
    (tmp_path / "model.py").write_text(f"{HEAD}        {body}\n")
    backend = f"{{kind: python, model: '{tmp_path}/model.py:Model', isolation: {isolation}}}"
    return f"models: [{{name: m, max_rows: 8, backends: [{backend}]}}]"


def load(tmp_path: Path, body: str, isolation: str = "thread") -> InferResponse | GatewayError:
    """Load the model and ask it once."""

    async def main() -> InferResponse | GatewayError:
        async with repository_of(models(tmp_path, body, isolation), tmp_path) as repository:
            answer: InferResponse | GatewayError = await asyncio.wait_for(infer(repository, value=3.0), 20)
            return answer

    return asyncio.run(main())


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return {'OUTPUT0': x.astype(int)}", "output 'OUTPUT0': expected FP32, the model gave int64: return it with .astype("),
        ("return {'OUTPUT0': x[:, :3]}", "expected shape [-1, 16] with 1 row, the model gave shape [1, 3]"),
        ("return {'y': x}", "output 'OUTPUT0' is missing, the model gave ['y']"),
        ("return x", "predict: expected a dict of arrays by output name, got ndarray"),
    ],
)
def test_outputs_that_are_not_as_declared_fail_the_load(body: str, words: str, isolation: str, tmp_path: Path) -> None:
    with pytest.raises(BackendFailed) as failed:
        load(tmp_path, body, isolation)
    assert failed.value.message.startswith("failed to load 'm' version 1: m:1/python: every request would fail: ")
    assert words in failed.value.message
    assert "(tried with inputs of ones, INPUT0 [1, 16])" in failed.value.message


def test_outputs_that_are_only_right_for_one_row_fail_the_load_and_name_the_way(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match=r"every batch of 8 rows would fail: .*set max_rows: 1 \(it is 8\), or 0 "):
        load(tmp_path, "return {'OUTPUT0': x[:1]}")


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_what_the_model_raises_is_a_warning_with_its_line(
    isolation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = load(tmp_path, "raise ValueError('no')", isolation)
    assert isinstance(answer, BackendFailed)
    assert answer.words == "m:1/python: ValueError: no"
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.getMessage().startswith("m:1/python: every request will fail: ValueError: no (tried with inputs of ones")
    assert f"{tmp_path}/model.py" in warning.getMessage()


@pytest.mark.slow
def test_a_model_that_takes_far_longer_for_two_rows_than_for_one_runs_more_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    probe = ServiceCurve.probe

    def noted(curve: ServiceCurve, rows: int, times_ns: list[int]) -> None:
        ran.append(rows)
        probe(curve, rows, [10_000_000 * (1 if rows == 1 else 8 if rows <= 4 else 16)] * len(times_ns))

    monkeypatch.setattr(ServiceCurve, "probe", noted)
    load(tmp_path, "return {'OUTPUT0': x}")
    assert ran == [1, 8, 2, 2, 4, 5, 8, 4, 5]


def test_of_a_model_that_runs_few_sizes_each_runs_in_every_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ModelSection.declared
    monkeypatch.setattr(ModelSection, "declared", lambda model: replace(declared(model), row_sizes=(1, 2, 4, 8)))
    ran = tmp_path / "ran"

    async def main() -> None:
        text = models(tmp_path, f"with open('{ran}', 'a') as file: print(len(x), file=file)\n        return {{'OUTPUT0': x}}")
        async with repository_of(text.replace("isolation", "sessions: 2, isolation"), tmp_path):
            pass

    asyncio.run(main())
    sizes = ran.read_text().split()
    assert {size: sizes.count(size) for size in ("1", "8", "2", "4")} == dict.fromkeys("1824", 3)  # both, and one alone
    assert sizes.index("8") < sizes.index("4")


def test_a_model_that_insists_on_its_content_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answer = load(tmp_path, "assert x[0, 0] != 1; return {'OUTPUT0': x}")
    assert isinstance(answer, InferResponse)
    assert "all is well if only such made-up inputs are refused" in caplog.text


def test_a_model_whose_inputs_are_all_optional_is_tried_with_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    optional = "inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 16], optional: true}]"
    outputs = "outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 16]}]"
    text = models(tmp_path, "return {'OUTPUT0': x}").replace("max_rows: 8", f"max_rows: 8, {optional}, {outputs}")

    async def main() -> None:
        async with repository_of(text, tmp_path):
            pass

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


IMAGES = """
import numpy as np
from backends.base import InputRefused

class Model:
    inputs = [("INPUT0", "FP32", (-1, 3, -1, -1))]
    outputs = [("OUTPUT0", "FP32", (-1, 1))]

    def predict(self, inputs):
        x = inputs["INPUT0"]
        if not LEAST <= x.shape[2] <= MOST or x.shape[3] % 8:
            raise ERROR(f"sides: {x.shape}")
        return {"OUTPUT0": np.zeros((len(x), 1), np.float32)}
"""


@pytest.mark.parametrize(
    ("error", "least", "most", "words"),
    [
        ("ValueError", 32, 512, ""),
        ("InputRefused", 4, 64, ""),
        ("InputRefused", 4, 16, ""),
        ("ValueError", 1024, 2048, "not probed: made-up inputs fail: ValueError: sides: (1, 3, 224, 224)"),
        ("InputRefused", 4, 7, "not probed: sides: (1, 3, 224, 224) (tried with inputs of ones, INPUT0 [1, 3, 224, 224])"),
    ],
)
def test_images_of_open_sides_are_tried_as_large_as_they_commonly_are_and_smaller(
    error: str, least: int, most: int, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.py").write_text(IMAGES.replace("ERROR", error).replace("LEAST", str(least)).replace("MOST", str(most)))
    backend = f"{{kind: python, model: '{tmp_path}/model.py:Model'}}"

    async def main() -> None:
        async with repository_of(f"models: [{{name: m, max_rows: 2, backends: [{backend}]}}]", tmp_path):
            pass

    asyncio.run(main())
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == bool(words)
    for line in told:
        assert line.startswith(f"m:1/python: {words}")
        assert "\n" not in line


def test_a_model_that_raises_for_several_rows_is_a_warning_that_names_the_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(load(tmp_path, "return {'OUTPUT0': x.reshape(1, 16)}"), InferResponse)
    assert "every batch of 8 rows will fail: ValueError: cannot reshape" in caplog.text
    assert "where the model takes one row at a time, set max_rows: 1" in caplog.text


def test_numpys_default_datatype_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answer = load(tmp_path, "return {'OUTPUT0': x.astype(float) / 2}")
    assert isinstance(answer, InferResponse)
    assert (answer.outputs["OUTPUT0"].dtype, answer.outputs["OUTPUT0"].max()) == (np.float32, 1.5)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_failed_request_leaves_its_traceback_and_id_in_the_log(
    isolation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> list[GatewayError]:
        text = models(tmp_path, "open('/no/such/folder/file') if x[0, 0] == 3 else 0; return {'OUTPUT0': x}", isolation)
        async with repository_of(text, tmp_path) as repository:
            return [await asyncio.wait_for(infer(repository, value=3.0, request_id=f"no {i}"), 20) for i in range(12)]

    failures = asyncio.run(main())
    assert {failure.code for failure in failures} == {Code.BACKEND_FAILED}
    assert failures[0].words == "m:1/python: FileNotFoundError: [Errno 2] No such file or directory: 'file'"
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 10  # and no more at once, however many fail
    assert told[0].startswith("model m version 1, request id 'no 0': m:1/python: FileNotFoundError: ")
    assert "'/no/such/folder/file'" in told[0]
    assert f'File "{tmp_path}/model.py", line 10, in predict' in told[0]


def test_of_an_id_so_much_stands_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with repository_of(models(tmp_path, "raise ValueError('no')"), tmp_path) as repository:
            await asyncio.wait_for(infer(repository, request_id="i" * 1_000_000), 20)

    asyncio.run(main())
    (told,) = (record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    assert "request id 'iii" in told
    assert len(told) < 3000


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_an_endless_answer_is_probed_by_its_first_part(
    isolation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its later parts are not looked at: this fails in the second that anybody reads on for."""
    body = """
        try:
            for _ in range(1000):
                yield {'OUTPUT0': x}
            raise ValueError('somebody reads on')
        finally:
            with open('LOG', 'a') as log:
                log.write('closed ')""".replace("LOG", str(tmp_path / "log"))

    async def main() -> None:
        async with repository_of(models(tmp_path, body, isolation), tmp_path) as repository:
            (lane,) = repository.model("m").lanes
            assert lane.runner.free_slots == lane.runner.slots
            request = InferRequest("m", "1", "", {"INPUT0": np.zeros((1, 16), np.float32)}, 1, time.monotonic_ns())
            assert lane.forecast(request, request.arrival_ns).known  # it was timed

    asyncio.run(main())
    assert (tmp_path / "log").read_text().split() == ["closed"] * 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("yield {'OUTPUT0': x[:, :3]}", "expected shape [-1, 16], the model gave shape [1, 3]"),
        ("yield x", "predict: expected a dict of arrays by output name, got ndarray"),
        ("yield None", "predict yielded None"),
    ],
)
def test_parts_that_are_not_as_declared_fail_the_load(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BackendFailed) as failed:
        load(tmp_path, body)
    assert words in failed.value.message


@pytest.mark.parametrize(
    ("batching", "rows", "told"),
    [
        ("policy: fixed, max_rows: 4", 8, "batching.max_rows, batching.policy"),
        ("policy: adaptive", 8, ""),
        ("max_queue_rows: 5", 8, ""),
        ("max_rows: 4", 0, "batching.max_rows"),
    ],
)
def test_settings_that_say_nothing_to_a_model_without_batches_are_told(
    batching: str, rows: int, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = f"{'yield' if rows else 'return'} {{'OUTPUT0': x}}"
    text = models(tmp_path, body).replace("max_rows: 8,", f"max_rows: {rows}, batching: {{{batching}}},")

    async def main() -> None:
        async with repository_of(text, tmp_path):
            pass

    asyncio.run(main())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    why = "the model is decoupled" if rows else "the model has no batch dimension"
    expected = f"m:1/python: {why}: it runs one request at a time, and {told} says nothing to it"
    assert warnings == ([expected] if told else [])


def test_a_ragged_decoupled_model_gets_its_inputs_as_they_are_for_it_shares_no_batch(tmp_path: Path) -> None:
    text = f"""
models:
  - name: m
    max_rows: 4
    inputs: [{{name: ids, datatype: INT64, shape: [-1, -1]}}]
    outputs: [{{name: length, datatype: INT64, shape: [-1, -1]}}]
    ragged: {{pad: {{ids: 0}}, buckets: [4, 8]}}
    backends: [{{kind: python, model: "{tmp_path}/model.py:Lengths"}}]
"""
    (tmp_path / "model.py").write_text("""
import numpy as np

class Lengths:
    def predict(self, inputs):
        for number in range(2):
            yield {"length": np.full((1, number + 1), inputs["ids"].shape[1])}
""")

    async def main() -> list[list[int]]:
        async with repository_of(text, tmp_path) as repository:
            served = repository.model("m")
            inputs = {"ids": np.ones((1, 5), np.int64)}
            key = shape_key(served.spec, served.ragged, inputs)
            ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            parts: list[list[int]] = []
            repository.infer(
                served,
                InferRequest("m", "1", "", inputs, 1, time.monotonic_ns(), shape_key=key),
                ended.set_result,
                lambda response: parts.append(response.outputs["length"].tolist()[0]),
            )
            assert await asyncio.wait_for(ended, 20) is None
            return parts

    assert asyncio.run(main()) == [[5], [5, 5]]


@pytest.fixture
def exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take 10 ms a row, as is learned of them: no stall makes two rows look padded to more."""
    probe = ServiceCurve.probe
    monkeypatch.setattr(
        ServiceCurve, "probe", lambda curve, rows, times_ns: probe(curve, rows, [10_000_000 * rows] * len(times_ns))
    )


@pytest.mark.parametrize(
    ("slo", "ragged", "longest", "ran"),
    [
        ("slo: {p99_ms: 50}", "", 128, [(1, 1), (16, 1), (1, 64), (2, 64), (16, 64)]),
        ("slo: {p99_ms: 50}", "", 63, [(1, 1), (16, 1)]),
        ("", "", 128, [(1, 1), (16, 1)]),
        ("slo: {p99_ms: 50}", ", buckets: [4, 32]", 128, [(1, 4), (1, 32), (16, 4), (16, 32)]),
    ],
)
@pytest.mark.usefixtures("exact_times")
def test_what_a_length_costs_is_tried_before_traffic_where_no_buckets_tell_which_ones_come(
    slo: str, ragged: str, longest: int, ran: list[tuple[int, int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"""
models:
  - name: m
    max_rows: 16
    inputs: [{{name: ids, datatype: INT64, shape: [-1, -1]}}]
    outputs: [{{name: sum, datatype: INT64, shape: [-1]}}]
    ragged: {{pad: {{ids: 0}}{ragged}}}
    {slo}
    backends: [{{kind: python, model: "{tmp_path}/model.py:Sums"}}]
"""
    (tmp_path / "model.py").write_text(f"""
class Sums:
    def predict(self, inputs):
        ids = inputs["ids"]
        if ids.shape[1] > {longest}:
            raise ValueError("too long")
        with open("{tmp_path}/ran", "a") as file:
            print(*ids.shape, file=file)
        return {{"sum": ids.sum(1)}}
""")

    async def main() -> None:
        async with repository_of(text, tmp_path):
            pass

    asyncio.run(main())
    shapes = [tuple(map(int, line.split())) for line in (tmp_path / "ran").read_text().splitlines()]
    assert shapes == [shape for shape in ran for _ in range(2)]  # to warm up, and to be timed
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("exact_times")
def test_texts_are_tried_as_long_as_others_would_be(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(f"""
import numpy as np


class Lengths:
    inputs = (("t", "BYTES", (-1, -1)),)
    outputs = (("length", "INT64", (-1,)),)

    def predict(self, inputs):
        texts = inputs["t"]
        with open("{tmp_path}/ran", "a") as file:
            print(*texts.shape, len(texts[0, 0]), texts[0, 0].count(b" "), file=file)
        return {{"length": np.array([len(text) for text in texts[:, 0]])}}
""")
    text = f"""
models:
  - name: m
    max_rows: 16
    slo: {{p99_ms: 50}}
    ragged: {{text: [t]}}
    backends: [{{kind: python, model: "{tmp_path}/model.py:Lengths"}}]
"""

    async def main() -> None:
        async with repository_of(text, tmp_path):
            pass

    asyncio.run(main())
    shapes = [tuple(map(int, line.split())) for line in (tmp_path / "ran").read_text().splitlines()]
    tried = [(1, 1, 1, 0), (16, 1, 1, 0), (1, 1, 64, 14), (2, 1, 64, 14), (16, 1, 64, 14)]
    assert shapes == [shape for shape in tried for _ in range(2)]


FLAT = "expected at least 2 dimensions, of which the second is the length"


@pytest.mark.parametrize(
    ("ragged", "name", "kind", "told"),
    [
        ("text: [x]", "x", '"FP32", (-1, 16)', "text[0]: 'x': the input is FP32, expected an input of BYTES; others: `pad`"),
        ("text: [z]", "x", '"BYTES", (-1, 1)', "text[0]: 'z': expected an input of the model, one of x"),
        ("pad: {z: 0}", "x", '"FP32", (-1, 16)', "pad.z: 0.0: expected an input of the model, one of x"),
        ("pad: {x: 0}, crop: [Y]", "y", '"FP32", (-1, 16)', "crop[0]: 'Y': expected an output of the model, one of y; did you"),
        ("pad: {x: 0}", "x", '"FP32", (-1,)', f"pad.x: 0.0: the input has shape [-1], {FLAT}"),
        ("pad: {x: 0}, crop: [y]", "y", '"FP32", (-1,)', f"crop[0]: 'y': the output has shape [-1], {FLAT}"),
        ("pad: {x: 0}", "x", '"BYTES", (-1, 1)', "pad.x: 0.0: the input is BYTES, expected an input of numbers; those of"),
        (
            "pad: {x: 256}",
            "x",
            '"UINT8", (-1, 16)',
            "pad.x: 256.0: expected a whole number from 0 to 255, as the input is UINT8",
        ),
        (
            "pad: {x: .nan}",
            "x",
            '"INT8", (-1, 16)',
            "pad.x: .nan: expected a whole number from -128 to 127, as the input is IN",
        ),
        ("pad: {x: 0.5}", "x", '"BOOL", (-1, 16)', "pad.x: 0.5: expected a whole number from 0 to 1, as the input is BOOL"),
    ],
)
def test_lengths_of_what_a_model_does_not_take_fail_its_load(
    ragged: str, name: str, kind: str, told: str, tmp_path: Path
) -> None:
    text = models(tmp_path, "return {'y': x}")
    text = text.replace("backends: [", f"ragged: {{{ragged}}}, batching: {{probe_s: 0}}, backends: [")
    model = tmp_path / "model.py"
    code = model.read_text().replace("INPUT0", "x").replace("OUTPUT0", "y")
    model.write_text(re.sub(rf'"{name}", .*\)\]', f'"{name}", {kind})]', code))

    async def main() -> None:
        async with repository_of(text, tmp_path):
            pass

    with pytest.raises(GatewayError, match=re.escape(f"ragged.{told}")):
        asyncio.run(main())


def test_backends_of_which_only_one_answers_in_parts_are_no_model(tmp_path: Path) -> None:
    text = models(tmp_path, "yield {'OUTPUT0': x}").replace("backends: [", "backends: [{kind: synthetic, name: whole}, ")
    tensors = "[{name: INPUT0, datatype: FP32, shape: [-1, 16]}]"
    text = text.replace("max_rows", f"inputs: {tensors}, outputs: {tensors.replace('IN', 'OUT')}, max_rows")

    async def main() -> None:
        async with repository_of(text, tmp_path):
            pass

    with pytest.raises(GatewayError, match=r"backend python is decoupled \(it answers in parts\), and m:1/whole is not"):
        asyncio.run(main())


ORDERS = """
class One:
    inputs = [("A", "FP32", (-1, 1)), ("B", "FP32", (-1, 1))]
    outputs = [("SUM", "FP32", (-1, 1)), ("LESS", "FP32", (-1, 1))]

    def predict(self, inputs):
        RETURN {"SUM": inputs["A"] + inputs["B"], "LESS": inputs["A"] - inputs["B"]}


class Other(One):
    inputs, outputs = One.inputs[::-1], One.outputs[::-1]
"""


@pytest.mark.parametrize("way", ["return", "yield"])
def test_backends_that_have_the_same_tensors_in_another_order_answer_in_that_of_the_first(way: str, tmp_path: Path) -> None:
    text = models(tmp_path, "")
    (tmp_path / "model.py").write_text(ORDERS.replace("RETURN", way))
    kinds = ", ".join(f'{{kind: python, name: {name}, model: "{tmp_path}/model.py:{name}"}}' for name in ("One", "Other"))
    text = re.sub(r"backends: \[.*?\]", f"backends: [{kinds}], routing: {{policy: round_robin}}", text)

    async def main() -> None:
        async with repository_of(text, tmp_path) as repository:
            served = repository.model("m")
            for _ in range(4):
                parts: list[InferResponse] = []
                done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
                inputs = {"A": np.full((1, 1), 5, np.float32), "B": np.full((1, 1), 3, np.float32)}
                request = InferRequest("m", "1", "", inputs, 1, time.monotonic_ns())
                repository.infer(served, request, done.set_result, parts.append)
                answer = await done
                (response,) = parts or [answer]
                assert isinstance(response, InferResponse)
                assert [(name, array.item()) for name, array in response.outputs.items()] == [("SUM", 8), ("LESS", 2)]

    asyncio.run(main())
