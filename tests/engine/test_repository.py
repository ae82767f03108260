"""Models come and go under traffic, and what the protocol edges are told of them."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.batching.recorded_file import unpacked
from gateway.engine.repository import Repository
from gateway.errors import BackendFailed, Code, ConfigError, GatewayError, InvalidArgument, NotFound, NotReady, Unsupported
from gateway.protocols.tensors import shape_key
from gateway.types import InferRequest, InferResponse
from gateway.why.report import answer, as_json, told
from tests.engine.repositories import repository_of

MODELS = """
models:
  - {name: m, version: "1", slo: {p99_ms: 500}, backends: [{kind: synthetic, fixed_ms: 1, load_ms: 30}]}
  - {name: m, version: "10", backends: [{kind: synthetic, fixed_ms: 1}]}
  - {name: later, load_at_start: false, max_rows: 0, backends: [{kind: synthetic}]}
  - {name: broken, load_at_start: false, backends: [{kind: synthetic, fail_opens: 1000}]}
"""
TWO_VERSIONS = f"server: {{model_control: true}}\n{MODELS}"


def with_repository(tmp_path: Path, main: Callable[[Repository], Coroutine[Any, Any, None]], text: str = TWO_VERSIONS) -> None:
    async def run() -> None:
        async with repository_of(text, tmp_path) as repository:
            await main(repository)

    asyncio.run(run())


def infer(
    repository: Repository, name: str = "m", version: str = "1", value: float = 1.0, request_id: str = ""
) -> "asyncio.Future[Any]":
    future: asyncio.Future[InferResponse | GatewayError] = asyncio.get_running_loop().create_future()
    inputs = {"INPUT0": np.full((1, 16), value, np.float32)}
    repository.infer(
        repository.model(name, version),
        InferRequest(name, version, request_id, inputs, 1, time.monotonic_ns()),
        future.set_result,
    )
    return future


def test_an_empty_version_is_the_highest_by_number(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        assert repository.model("m").version == "10"
        assert repository.model("m", "1").version == "1"
        assert repository.model_metadata("m")["versions"] == ["1", "10"]
        assert repository.model_metadata("m", "1")["versions"] == ["1"]

    with_repository(tmp_path, main)


def test_unknown_names_and_versions_are_told_in_tritons_words(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        with pytest.raises(NotFound, match="Request for unknown model: 'x' is not found"):
            repository.model("x")
        with pytest.raises(NotFound, match="Request for unknown model: 'm' version 7 is not found"):
            repository.model("m", "7")
        with pytest.raises(NotReady, match="'later' has no available versions"):
            repository.model("later")

    with_repository(tmp_path, main)


def test_a_version_that_is_not_loaded_is_named_beside_those_that_are_ready(tmp_path: Path) -> None:
    text = """models:
  - {name: a, backends: [{kind: synthetic}]}
  - {name: a, version: "2", load_at_start: false, backends: [{kind: synthetic}]}
"""

    async def main(repository: Repository) -> None:
        with pytest.raises(NotReady) as caught:
            repository.model("a", "2")
        assert caught.value.message == (
            "Request for unknown model: 'a' version 2 is not at ready state (unavailable); versions ready: '1'"
        )

    with_repository(tmp_path, main, text)


def test_a_model_that_fails_to_load_at_start_stops_the_start_with_its_words(tmp_path: Path) -> None:
    text = "models: [{name: broken, backends: [{kind: synthetic, fail_opens: 1}]}]"

    async def main(repository: Repository) -> None:
        raise AssertionError("started")

    with pytest.raises(BackendFailed, match=r"failed to load 'broken' version 1: .*fail_opens"):
        with_repository(tmp_path, main, text)


def test_every_model_that_fails_to_load_at_start_is_named(tmp_path: Path) -> None:
    broken = "backends: [{kind: synthetic, fail_opens: 1}]"
    text = f"""models:
  - {{name: a, {broken}}}
  - {{name: well, backends: [{{kind: synthetic}}]}}
  - {{name: b, {broken}}}
  - {{name: b, version: "2", {broken}}}"""

    async def main(repository: Repository) -> None:
        raise AssertionError("started")

    with pytest.raises(BackendFailed) as failed:
        with_repository(tmp_path, main, text)
    named = [line.partition(": ")[0] for line in failed.value.message.splitlines()]
    assert named == [f"failed to load {name} version {version}" for name, version in (("'a'", 1), ("'b'", 1), ("'b'", 2))]


def test_every_version_that_a_client_cannot_load_is_named(tmp_path: Path) -> None:
    text = """server: {model_control: true}
models:
  - {name: b, load_at_start: false, backends: [{kind: synthetic, fail_opens: 1}]}
  - {name: b, version: "2", load_at_start: false, backends: [{kind: synthetic, fail_opens: 1}]}"""

    async def main(repository: Repository) -> None:
        with pytest.raises(BackendFailed, match=r"'b' version 1: .*\n.*'b' version 2: "):
            await repository.load("b", {})

    with_repository(tmp_path, main, text)


def test_load_and_unload_change_what_is_ready(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        assert repository.ready()
        assert not repository.model_ready("later")
        generation = repository.generation
        await repository.load("later", {})
        assert repository.model_ready("later")
        assert repository.generation > generation
        await repository.unload("later")
        assert not repository.model_ready("later")
        assert {"name": "later", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"} in repository.index()
        assert [row["name"] for row in repository.index(ready_only=True)] == ["m", "m"]
        assert repository.ready()

    with_repository(tmp_path, main)


def test_a_model_is_brought_back_to_its_state_at_start_without_a_load(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        generation = repository.model("m").generation
        with pytest.raises(BackendFailed):
            await repository.load("broken", {})
        await repository.load("later", {})
        for name in ("m", "later", "broken"):
            await repository.apply(name, None)
        assert [row["name"] for row in repository.index(ready_only=True)] == ["m", "m"]
        assert repository.model("m").generation == generation
        assert repository.ready()

    with_repository(tmp_path, main)


def test_a_failed_load_is_told_and_makes_the_server_not_ready(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        with pytest.raises(BackendFailed, match="failed to load 'broken'"):
            await repository.load("broken", {})
        assert not repository.ready()

    with_repository(tmp_path, main)


def test_a_backend_that_is_recorded_no_more_is_told_beside_those_that_are(tmp_path: Path) -> None:
    two = """
models:
  - name: m
    backends: [{kind: synthetic, name: a}, {kind: synthetic, name: b}]
"""

    async def main(repository: Repository) -> None:
        _, lane = repository.model("m").lanes
        lane.batcher._give_up(ValueError("too much"))  # type: ignore[attr-defined]  # what a state without room comes to
        (recording,) = unpacked(repository.why("m"), "here")
        assert recording.unrecorded == {"b": "ValueError: too much"}
        found = [answer(recording, "here")]
        until = "its decisions are no longer recorded, until the model is loaded anew: ValueError: too much"
        assert told(found) == f"m version 1 on b: {until}"
        await infer(repository)
        repository.model("m").dispatcher.router._give_up(ValueError("too much"))  # type: ignore[union-attr]
        (recording,) = unpacked(repository.why("m"), "here")
        found = [answer(recording, "here")]
        assert told(found).endswith(f"m version 1 on b: {until}\n\nm version 1, routing: {until}")
        assert [each["unrecorded"].keys() for each in as_json(found)] == [{"b", ""}]

    with_repository(tmp_path, main, two)


def test_load_takes_only_configured_names_and_no_parameters(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        with pytest.raises(InvalidArgument, match="failed to load 'x'"):
            await repository.load("x", {})
        with pytest.raises(Unsupported):
            await repository.load("m", {"config": "{}"})

    with_repository(tmp_path, main)


def test_a_reload_under_traffic_loses_no_request(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        futures = []
        reloading = asyncio.ensure_future(repository.load("m", {}))
        while not reloading.done():
            futures.append(infer(repository))
            await asyncio.sleep(0.001)
        await reloading
        outcomes = await asyncio.gather(*futures)
        assert len(outcomes) > 3
        assert all(isinstance(outcome, InferResponse) for outcome in outcomes)

    with_repository(tmp_path, main, TWO_VERSIONS.replace("p99_ms: 500", "p99_ms: 60000"))  # which a busy machine holds, too


def test_close_answers_what_is_in_flight_and_refuses_the_rest(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        futures = [infer(repository, value=index) for index in range(20)]
        await repository.close()
        assert all(isinstance(future.result(), InferResponse) for future in futures)
        with pytest.raises(NotReady):
            infer(repository)
        assert not repository.ready()

    with_repository(tmp_path, main)


def test_statistics_count_what_was_done(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        await asyncio.gather(*(infer(repository) for _ in range(3)))
        endpoint = repository.metrics.endpoint("m", "1", "rest")
        for _ in range(3):
            endpoint.done(0, 1000, 5000, 7000)
        (stats,) = repository.statistics("m", "1")["model_stats"]
        assert stats["inference_count"] == 3
        assert stats["execution_count"] == sum(batch["compute_infer"]["count"] for batch in stats["batch_stats"])
        assert stats["inference_stats"]["success"] == {"count": 3, "ns": 21000}
        assert stats["inference_stats"]["compute_infer"]["count"] == 3
        assert stats["inference_stats"]["compute_infer"]["ns"] >= 1_000_000
        for batch in stats["batch_stats"]:
            for part in ("compute_input", "compute_infer", "compute_output"):
                assert batch[part]["count"] == batch["compute_infer"]["count"] > 0
                assert batch[part]["ns"] > 0
        (response,) = stats["response_stats"].values()
        assert response["success"] == {"count": 3, "ns": response["compute_infer"]["ns"] + response["compute_output"]["ns"]}
        assert response["compute_output"] == {"count": 3, "ns": 6000}
        assert response["fail"] == response["cancel"] == response["empty_response"] == {"count": 0, "ns": 0}

    with_repository(tmp_path, main)


def test_statistics_tell_cancelled_responses_from_failed_ones(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        endpoint = repository.metrics.endpoint("m", "1", "grpc")
        endpoint.failed(Code.OVERLOADED, 0, 1000)
        endpoint.failed(Code.CANCELLED, 0, 2000)
        endpoint.failed(Code.CANCELLED, 0, 2000)
        (stats,) = repository.statistics("m", "1")["model_stats"]
        assert stats["inference_stats"]["fail"] == {"count": 3, "ns": 5000}
        assert stats["response_stats"]["0"]["fail"]["count"] == 1
        assert stats["response_stats"]["0"]["cancel"]["count"] == 2

    with_repository(tmp_path, main)


def test_the_configuration_names_tritons_keys(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        config = repository.model_config("m", "1")
        assert config["max_batch_size"] == 32
        assert config["input"] == [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [16]}]
        assert config["backend"] == "synthetic"

    with_repository(tmp_path, main)


def test_requests_with_unlike_parameters_do_not_share_a_batch(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        left = 4

        def done(outcome: InferResponse | GatewayError) -> None:
            nonlocal left
            left -= 1
            if not left:
                future.set_result(None)

        before = repository.statistics("m", "1")["model_stats"][0]["execution_count"]
        for beam in (0, 1, 2, 1):  # the first runs at once; the two equal ones share the second or third batch
            inputs = {"INPUT0": np.ones((1, 16), np.float32)}
            parameters: dict[str, Any] = {"beam": beam}
            served, now_ns = repository.model("m", "1"), time.monotonic_ns()
            key = shape_key(served.spec, None, inputs, parameters)
            request = InferRequest("m", "1", "", inputs, 1, now_ns, parameters=parameters, shape_key=key)
            repository.infer(served, request, done)
        await future
        assert repository.statistics("m", "1")["model_stats"][0]["execution_count"] - before == 3

    # greedy: else what was learned of two rows, on a busy machine, may say that they are better apart
    with_repository(tmp_path, main, TWO_VERSIONS.replace("slo: {p99_ms: 500}", "batching: {policy: greedy}"))


def test_what_was_learned_of_a_backend_is_there_at_the_next_start(tmp_path: Path) -> None:
    config = f"server: {{state_dir: {tmp_path}/state}}\n{MODELS}"

    async def first(repository: Repository) -> None:
        await asyncio.gather(*(infer(repository) for _ in range(3)))

    async def second(repository: Repository) -> None:
        service = repository.model("m", "1").lanes[0].batcher.service
        assert not service.curves  # nothing was run yet
        assert service.curve(None).expected_ns(1) >= 1_000_000

    with_repository(tmp_path, first, config)
    with_repository(tmp_path, second, config.replace("slo:", "batching: {probe_s: 0}, slo:"))


def test_what_was_kept_and_is_broken_is_left_aside(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "m%3A1%2Fsynthetic.json").write_text("[")

    async def main(repository: Repository) -> None:
        assert isinstance(await infer(repository), InferResponse)

    with_repository(tmp_path, main, f"server: {{state_dir: {state}}}\n{MODELS}")


@pytest.mark.parametrize(("state", "reason"), [("file", "File exists"), ("file/below", "Not a directory")])
def test_a_state_dir_that_cannot_be_is_told_at_start(tmp_path: Path, state: str, reason: str) -> None:
    (tmp_path / "file").write_text("")

    async def main(repository: Repository) -> None:
        raise AssertionError("started")

    with pytest.raises(
        ConfigError, match=f"^server.state_dir: '{tmp_path / state}': {reason}: expected a directory to write in"
    ):
        with_repository(tmp_path, main, f"server: {{state_dir: {tmp_path / state}}}\n{MODELS}")


def test_what_was_learned_is_kept_for_the_longest_names(tmp_path: Path) -> None:
    model, backend = "模" * 128, "型" * 48
    config = f"server: {{state_dir: {tmp_path}/state}}\n" + MODELS.replace("name: m,", f"name: {model},").replace(
        "{kind: synthetic", f"{{kind: synthetic, name: {backend}"
    )

    async def second(repository: Repository) -> None:
        assert repository.model(model, "1").lanes[0].batcher.service.curve(None).expected_ns(1) >= 1_000_000

    async def first(repository: Repository) -> None:
        pass

    with_repository(tmp_path, first, config)
    assert all(len(path.name.encode()) <= 255 for path in (tmp_path / "state").iterdir())
    with_repository(tmp_path, second, config.replace("slo:", "batching: {probe_s: 0}, slo:"))


def test_a_backend_is_probed_when_it_loads(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        service = repository.model("m", "1").lanes[0].batcher.service
        (curve,) = service.curves.values()
        assert curve.expected_ns(1) >= 1_000_000

    with_repository(tmp_path, main)


def test_the_instance_type_is_told_where_it_is_stated(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        assert repository.server_metadata()["instance_type"] == "c7i.xlarge"

    with_repository(tmp_path, main, f"server: {{instance_type: c7i.xlarge}}\n{MODELS}")
