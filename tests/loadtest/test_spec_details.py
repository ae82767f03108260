"""What a spec means where it says nothing, what its values may be, and what is made of each of its lines."""

import dataclasses
import platform
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.errors import UsageError
from loadtest.prices.catalogue import Catalogue, load_catalogue
from loadtest.question.candidates import ARCHITECTURES, CandidateSetup, priced
from loadtest.question.spec import SearchSpec, limited, parse_search_spec
from loadtest.question.spec_file import LocalLauncher
from tests.loadtest.examples import changed

BACKEND: dict[str, Any] = {"kind": "synthetic", "fixed_ms": 4, "row_ms": 1}
HERE = ARCHITECTURES[platform.machine()]


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def parsed(catalogue: Catalogue, **keys: Any) -> SearchSpec:
    return parse_search_spec(changed(**keys), catalogue, source="s")


def faults_of(catalogue: Catalogue, **keys: Any) -> list[str]:
    with pytest.raises(UsageError) as raised:
        parsed(catalogue, **keys)
    return str(raised.value).splitlines()


def local(**keys: Any) -> dict[str, Any]:
    return {"kind": "local", "stands_for": {"c7i.large": [0, 1], "c8g.large": [0, 1]}, **keys}


def candidate(**keys: Any) -> dict[str, Any]:
    return {"instances": ["c7i.large"], "backend": BACKEND, **keys}


def only(catalogue: Catalogue, **keys: Any) -> CandidateSetup:
    (found,) = parsed(catalogue, candidates=[candidate(**keys)]).candidates
    return found


@pytest.mark.parametrize(
    ("one", "other", "called"),
    [
        ({"kind": "python", "model": "a/slow.py:M"}, {"model": "good.py:M"}, ["python slow.py:M", "python good.py:M"]),
        ({"kind": "python", "model": "a/m.py:M"}, {"model": "b/m.py:M"}, ["python a/m.py:M", "python b/m.py:M"]),
        ({**BACKEND, "row_ms": 2}, {}, ["synthetic row_ms 2", "synthetic row_ms 1"]),
        ({**BACKEND, "isolation": "process"}, {}, ["synthetic isolation process", "synthetic"]),
        ({**BACKEND, "name": "own"}, {"row_ms": 2}, ["own", "synthetic"]),
        (BACKEND, {"sessions": 2}, ["synthetic", "synthetic"]),
    ],
)
def test_backends_that_compute_differently_share_no_profile_and_no_name(
    one: dict[str, Any],
    other: dict[str, Any],
    called: list[str],
    catalogue: Catalogue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("good.py", "a/slow.py", "a/m.py", "b/m.py"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("class M: ...")
    other = {**(one if one["kind"] == "python" else BACKEND), **other}
    pair = [candidate(backend=one, settings={"max_rows": [8]}), candidate(backend=other, settings={"max_rows": [16]})]
    slo = {"p99_ms": 50, "min_agreement": None}
    found = parsed(catalogue, candidates=pair, slo=slo).candidates
    assert [each.backend for each in found] == called
    assert [each.name for each in found] == [f"c7i.large {called[0]} (max_rows 8)", f"c7i.large {called[1]} (max_rows 16)"]
    assert (found[0].group == found[1].group) == (called[0] == called[1])


def test_what_is_not_said_has_its_documented_value(catalogue: Catalogue) -> None:
    document = changed()
    del document["budget"]
    spec = parse_search_spec(document, catalogue, source="s")
    assert (spec.budget.minutes, spec.budget.usd, spec.seed, spec.target_rps, spec.basis) == (45, None, 0, None, "ec2")
    assert (spec.payload.protocol, spec.payload.rows, spec.payload.length) == ("rest-binary", 1, "16")
    assert (spec.payload.values, spec.payload.files) == ((), ())
    assert isinstance(spec.launcher, LocalLauncher)
    assert (spec.launcher.cpus, spec.launcher.start_timeout_s, spec.launcher.nice) == (None, 90, 10)
    assert (spec.min_agreement, spec.agreement_test, spec.pad) == (0.999, None, ())
    found = only(catalogue)
    assert (found.name, found.settings, found.sessions, found.max_rows) == ("c7i.large synthetic", {}, 1, 8)
    assert (found.url, found.max_count, found.cpus, found.basis, found.backend) == ("", None, (0, 1), "ec2", "synthetic")


@pytest.mark.parametrize(
    ("keys", "good", "bad"),
    [
        (lambda value: {"payload": {"rows": value}}, [1, 2], [0, -1, 10**30]),
        (lambda value: {"seed": value}, [0, 7, 1 << 62], [-1, 10**30]),
        (lambda value: {"budget": {"minutes": value}}, [0.1, 1440], [0, 1441]),
        (lambda value: {"budget": {"usd": value}}, [0, 0.5], [-0.1]),
        (lambda value: {"target_rps": value}, [0.5], [0, -1]),
        (lambda value: {"launcher": local(start_timeout_s=value)}, [0.5, 600], [0, 601]),
        (lambda value: {"launcher": local(nice=value)}, [0, 19], [-1, 20]),
        (lambda value: {"launcher": local(cpus=[value])}, [0, 3], [-1]),
        (lambda value: {"launcher": local(cpus=value)}, [[0], [0, 1]], [[]]),
        (lambda value: {"launcher": local(stands_for={"c7i.large": value, "c8g.large": [0]})}, [[0]], [[]]),
        (lambda value: {"launcher": {"kind": "local", "stands_for": {"c7i.large": [value], "c8g.large": [0]}}}, [0, 1], [-1]),
        (lambda value: {"candidates": [candidate(max_count=value)]}, [1, 7], [0]),
        (lambda value: {"candidates": [candidate(usd_per_hour=value, price_source="me")]}, [0.01], [0, -1, float("inf")]),
    ],
)
def test_a_value_has_its_bounds(catalogue: Catalogue, keys: Any, good: list[float], bad: list[float]) -> None:
    for value in good:
        assert parsed(catalogue, **keys(value)).candidates
    for value in bad:
        (fault,) = faults_of(catalogue, **keys(value))
        assert f"{value}" in fault
        assert "expected" in fault


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({"length": "x"}, "payload.length: 'x': expected a number or a range such as \"1-8\""),
        ({"length": "4-2"}, "payload.length: '4-2': expected at least 1, and the smaller number first"),
        ({"values": ["x"]}, "payload.values: 'x': expected NAME=LOW:HIGH"),
        ({"values": ["x=0:nan"]}, "payload.values: 'x=0:nan': expected finite numbers, and a finite one between them"),
        ({"values": ["y=0:1"]}, "payload.values: 'y=0:1': the model has no input 'y', only x"),
        ({"rows": 10**8}, "payload.rows: 100000000: with a length of 16, a request has 1525 MiB, expected at most 256"),
    ],
)
def test_requests_that_cannot_be_made_are_told_before_anything_is_started(
    catalogue: Catalogue, payload: dict[str, Any], told: str
) -> None:
    assert faults_of(catalogue, payload=payload) == [f"s: {told}"]
    assert parsed(catalogue, payload={"length": "1-8", "values": ["x=0:1"], "rows": 8}).candidates


def test_requests_of_files_are_taken_as_they_are(catalogue: Catalogue, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}')
    why = "requests of payload.files are sent as they are: leave one of them out"
    payload = {"files": [str(path)], "values": ["x=0:1"], "length": "8", "rows": 10**8}
    values, length, rows = faults_of(catalogue, payload=payload)
    assert values.endswith(f"payload.values: ['x=0:1']: {why}"), values
    assert length.endswith(f"payload.length: '8': {why}"), length
    assert rows.endswith("payload.rows: 100000000: joined, a request has 1525 MiB, expected at most 256"), rows
    assert faults_of(catalogue, payload={"files": ["a\0b.json"]})[0].endswith("cannot be read: embedded null byte")


def test_keys_and_values_reach_the_candidates(catalogue: Catalogue) -> None:
    spec = parsed(
        catalogue,
        seed=7,
        target_rps=50,
        budget={"minutes": 3, "usd": 2},
        payload={"protocol": "rest-json", "rows": 2, "length": "8", "values": ["x=1:2"]},
    )
    assert (spec.source, spec.model, spec.seed, spec.target_rps, spec.budget.usd) == ("s", "adder", 7, 50, 2)
    assert (spec.payload.rows, spec.payload.values) == (2, ("x=1:2",))
    found = only(
        catalogue,
        settings={"sessions": [2], "max_rows": [4], "policy": ["greedy"], "max_delay_ms": [3], "row_ms": [2]},
        max_count=5,
    )
    assert found.name == "c7i.large synthetic (sessions 2, max_rows 4, policy greedy, max_delay_ms 3, row_ms 2)"
    (model,) = found.document["models"]
    assert model["batching"] == {"max_rows": 4, "policy": "greedy", "max_delay_ms": 3}
    assert model["backends"] == [{**BACKEND, "row_ms": 2, "sessions": 2, "usd_per_hour": 0.08925}]
    assert model["slo"] == {"p99_ms": 50.0}
    assert (found.sessions, found.max_rows, found.max_count) == (2, 4, 5)


def test_the_most_rows_are_the_batchs_else_the_models_else_one(catalogue: Catalogue) -> None:
    model = changed()["model"]
    assert only(catalogue, settings={"max_rows": [3]}).max_rows == 3
    (found,) = parsed(catalogue, model={**model, "batching": {"max_rows": 5}}, candidates=[candidate()]).candidates
    assert found.max_rows == 5
    unbatched = {**model, "max_rows": 0, "inputs": [{"name": "x", "datatype": "FP32", "shape": [4]}]}
    unbatched["outputs"] = [{"name": "y", "datatype": "FP32", "shape": [4]}]
    (found,) = parsed(catalogue, model=unbatched, candidates=[candidate()]).candidates
    assert found.max_rows == 1


def test_a_profile_is_shared_by_who_differs_in_sessions_and_batching_alone(catalogue: Catalogue) -> None:
    def groups(launcher: dict[str, Any] | None = None, **settings: list[Any]) -> int:
        both = [candidate(instances=["c7i.large", "c8g.large"], settings=settings)]
        return len({c.group for c in parsed(catalogue, candidates=both, launcher=launcher or local()).candidates})

    assert groups() == 2  # the two instance types
    assert groups(sessions=[1, 2], max_rows=[2, 4], policy=["greedy", "adaptive"], max_delay_ms=[1, 2]) == 2
    assert groups(row_ms=[1, 2]) == 4
    named = [candidate(), candidate(backend={**BACKEND, "name": "other"})]
    assert len({c.group for c in parsed(catalogue, candidates=named).candidates}) == 2


def test_cores_are_those_that_stand_for_a_type_or_the_launchers(catalogue: Catalogue) -> None:
    own = {"backend": BACKEND, "usd_per_hour": 1, "price_source": "me"}
    launcher = local(cpus=[3], stands_for={"c7i.large": [0, 1]})
    found = parsed(catalogue, launcher=launcher, candidates=[own, candidate(instances=["ml.c7i.large"])]).candidates
    assert [c.cpus for c in found] == [(3,), (0, 1)]
    assert parsed(catalogue, launcher=local(), candidates=[own]).candidates[0].cpus == ()


def test_a_running_server_is_described_by_its_url_and_what_is_known_of_it(catalogue: Catalogue) -> None:
    keys = {"launcher": {"kind": "url"}, "model": "adder"}
    server = {"url": "http://h:1/", "instances": ["inf2.xlarge"], "max_count": 3}
    (found,) = parsed(catalogue, candidates=[server], **keys).candidates
    assert (found.name, found.group) == ("inf2.xlarge http://h:1", "inf2.xlarge http://h:1")
    assert (found.url, found.numerics, found.backend, found.sessions, found.max_rows) == (
        "http://h:1",
        "http://h:1",
        "running",
        1,
        32,
    )
    assert (found.usd_per_hour, found.basis, found.max_count, found.document, found.settings) == (0.7582, "ec2", 3, {}, {})
    (own,) = parsed(catalogue, candidates=[{"url": "http://h:1", "usd_per_hour": 2, "price_source": "me"}], **keys).candidates
    assert (own.name, own.usd_per_hour, own.basis, own.instance_type) == ("http://h:1", 2, "own", "")
    (modelled,) = parsed(catalogue, candidates=[server], launcher={"kind": "url"}).candidates
    assert modelled.max_rows == 8


def test_a_running_server_has_one_address_with_its_scheme(catalogue: Catalogue) -> None:
    keys: dict[str, Any] = {"launcher": {"kind": "url"}, "model": "adder"}
    bare = faults_of(catalogue, candidates=[{"url": "127.0.0.1:1"}], **keys)
    assert bare == ["s: candidates[0]: url: '127.0.0.1:1': expected an address that begins with http:// or https://"]
    (secret,) = faults_of(catalogue, candidates=[{"url": "http://me:word@h:1"}], **keys)
    assert secret.startswith("s: candidates[0]: url: target: a user and password in a URL are not sent: leave them out")
    twice = faults_of(catalogue, candidates=[{"url": "http://h"}, {"url": "http://h/"}], **keys)
    assert twice == ["s: candidates: listed twice: http://h"]


def test_a_running_servers_price_is_known_with_its_type(catalogue: Catalogue) -> None:
    keys = {"launcher": {"kind": "url"}, "model": "adder", "price": "spot"}
    (unpriced,) = parsed(catalogue, candidates=[{"url": "http://h:1"}], **keys).candidates
    assert (unpriced.price, unpriced.basis) == (None, "spot")
    found = priced(unpriced, "inf2.xlarge", catalogue, "sagemaker")
    assert (found.name, found.instance_type, found.basis, found.usd_per_hour) == (
        "inf2.xlarge http://h:1", "inf2.xlarge", "sagemaker", 0.99,
    )  # fmt: skip


@pytest.mark.parametrize(
    "keys", [{"instances": ["c7i.large", "c8g.large"]}, {"settings": {"sessions": [1]}}, {"backend": "synthetic"}]
)
def test_a_running_server_has_what_it_has(catalogue: Catalogue, keys: dict[str, Any]) -> None:
    servers = [{"url": "http://h:1", **keys}]
    assert faults_of(catalogue, launcher={"kind": "url"}, model="adder", candidates=servers) == [
        "s: candidates[0]: a running server has one instance type, and its backend and settings are its own"
    ]


def test_faults_of_one_server_are_told_together(catalogue: Catalogue) -> None:
    servers = [{"instances": ["c7i.lrge"], "settings": {"sessions": [1]}}]
    told = faults_of(catalogue, launcher={"kind": "url"}, model="adder", candidates=servers)
    assert [line.split(": ", 2)[2][:12] for line in told] == ["url: missing", "a running se", "instances: u"]


def test_a_backend_is_named_as_it_is_in_the_gateways_file(catalogue: Catalogue, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    backends = [{**BACKEND, "name": "one"}, BACKEND]
    path.write_text(yaml.safe_dump({"models": [{**changed()["model"], "backends": backends}]}))

    def named(name: str) -> list[str]:
        return faults_of(catalogue, gateway=str(path), model="adder", candidates=[candidate(backend=name)])

    spec = parsed(
        catalogue, gateway=str(path), model="adder", candidates=[candidate(backend="one"), candidate(backend="synthetic")]
    )
    assert [c.backend for c in spec.candidates] == ["one", "synthetic"]
    assert named("syntetic") == ["s: candidates[0]: backend: the model has no backend 'syntetic'; did you mean 'synthetic'?"]
    assert named("xyz") == ["s: candidates[0]: backend: the model has no backend 'xyz', it has one, synthetic"]
    assert faults_of(catalogue, candidates=[candidate(backend="x")]) == [
        "s: candidates[0]: backend: the model has no backend 'x', it has none"
    ]
    assert faults_of(catalogue, candidates=[{"instances": ["c7i.large"]}]) == [
        "s: candidates[0]: backend: missing, expected a mapping with `kind`"
    ]
    other = faults_of(catalogue, gateway=str(path), model="subtracter", candidates=[candidate(backend="one")])
    assert other == [f"s: model: {path} has no model 'subtracter', it has adder"]
    assert "cannot be read" in faults_of(catalogue, gateway=str(tmp_path / "none"), model="adder")[0]


def test_a_key_that_would_say_nothing_where_it_stands_is_refused(catalogue: Catalogue) -> None:
    settings = {"sessions": [1, 2], "usd_per_hour": [0.01, 0.5], "name": ["p", "q"]}
    own = {"usd_per_hour": 1, "price_source": "mine"}
    odd = candidate(settings=settings, backend={**BACKEND, "usd_per_hour": 0.9}, **own)
    assert faults_of(catalogue, candidates=[odd]) == [
        "s: candidates[0]: settings.usd_per_hour: [0.01, 0.5]: expected beside `settings`: it is the candidate's price",
        "s: candidates[0]: backend.usd_per_hour: 0.9: expected beside `backend`: it is the candidate's price",
        "s: candidates[0]: settings.name: ['p', 'q']: expected one name, in `backend`: another name makes no other candidate",
    ]


def test_where_a_price_comes_from_needs_the_price(catalogue: Catalogue) -> None:
    dated = {"price_source": "ours", "price_date": "2020-01-01"}
    expected = "usd_per_hour: missing, expected the price that is told of by price_source: ours and price_date: 2020-01-01"
    assert faults_of(catalogue, candidates=[candidate(**dated)]) == [f"s: candidates[0]: {expected}"]
    running = {"url": "http://127.0.0.1:1", "instances": ["c7i.large"], **dated}
    found = faults_of(catalogue, launcher={"kind": "url"}, model="adder", candidates=[running])
    assert found == [f"s: candidates[0]: {expected}"]
    (only_fault,) = faults_of(catalogue, candidates=[candidate(**dated, usd_per_hour=-1)])
    assert "-1" in only_fault


@pytest.mark.parametrize(("text", "fault"), [("sever: {}\nmodels: []\n", "sever"), (None, "cannot be read")])
def test_a_gateways_file_is_checked_that_only_locks_the_doors(
    catalogue: Catalogue, tmp_path: Path, text: str | None, fault: str
) -> None:
    path = tmp_path / "gateway.yaml"
    if text is not None:
        path.write_text(text)
    found = faults_of(catalogue, gateway=str(path))
    assert found[0].startswith("s: gateway: ")
    assert fault in found[0]


def test_a_model_as_large_as_the_instances_memory_is_let_pass(catalogue: Catalogue, tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    for size, fits in ((4 << 30, True), ((4 << 30) + 1, False)):
        with model.open("wb") as file:
            file.truncate(size)  # sparse
        huge = candidate(backend={"kind": "onnxruntime", "model": str(model)})
        if fits:
            assert parsed(catalogue, candidates=[huge]).candidates
        else:
            assert "m.onnx has 4.0 GiB, c7i.large only 4 GiB" in faults_of(catalogue, candidates=[huge])[0]
    own = {"backend": {"kind": "onnxruntime", "model": str(model)}, "usd_per_hour": 1, "price_source": "me"}
    assert parsed(catalogue, candidates=[own]).candidates  # of no type nobody knows the memory


def test_a_device_must_be_the_accelerators_maker(catalogue: Catalogue) -> None:
    def told(instance: str, device: str) -> list[str]:
        one = candidate(instances=[instance], backend={"kind": "torch", "model": "m:f", "device": device})
        launcher = {"kind": "local", "stands_for": {instance: [0]}}
        try:
            return [c.name for c in parsed(catalogue, candidates=[one], launcher=launcher).candidates]
        except UsageError as exc:
            return str(exc).splitlines()

    assert told("g6.xlarge", "cuda") == ["g6.xlarge torch"]
    assert told("g6.xlarge", "cpu") == ["g6.xlarge torch"]
    assert told("inf2.xlarge", "cuda")[0].startswith("s: candidates[0]: inf2.xlarge has no device 'cuda': ")
    own = {"backend": {"kind": "torch", "model": "m:f", "device": "cuda"}, "usd_per_hour": 1, "price_source": "me"}
    assert parsed(catalogue, candidates=[own]).candidates  # whatever it is


def test_cores_that_are_fewer_than_a_types_are_told(catalogue: Catalogue) -> None:
    def warnings(**stands_for: list[int]) -> tuple[str, ...]:
        launcher = {"kind": "local", "stands_for": {name.replace("_", "."): cores for name, cores in stands_for.items()}}
        names = [name for name in launcher["stands_for"] if name != "c7i.4xlarge"]
        return parsed(catalogue, launcher=launcher, candidates=[candidate(instances=names)]).odd

    stand = "by `stands_for` of the spec this machine's cores {} stand for it; measure there before you rely on it"
    foreign = f"c7i.large is amd64, this machine is {HERE}: its rates will differ; measure there"
    assert [line for line in warnings(c7i_large=[0, 1]) if line != foreign] == [
        "c7i.large: not measured itself: " + stand.format("0, 1")
    ]
    assert warnings(c7i_large=[1])[1] == (
        "c7i.large has 2 vCPU, 1 core stands for it: name as many in `stands_for`, if this machine has them"
    )
    three = warnings(c7i_large=[0, 1, 2], c7i_4xlarge=[0])  # who is no candidate is not spoken of
    assert three[1].startswith("c7i.large has 2 vCPU, 3 cores stand for it")
    assert not any("4xlarge" in line for line in three)
    arm = [line for line in warnings(c8g_large=[0, 1]) if "arm64" in line]
    assert arm == (
        [] if HERE == "arm64" else [f"c8g.large is arm64, this machine is {HERE}: its rates will differ; measure there"]
    )
    apart = warnings(c7i_large=[0, 1], c7i_xlarge=[0, 1, 2, 3])
    assert [line.partition(":")[0] for line in apart if "not measured itself" in line] == ["c7i.large", "c7i.xlarge"]


@pytest.mark.parametrize(
    ("settings", "crowded"),
    [({"sessions": [1, 2]}, 0), ({"sessions": [2, 3, 4]}, 2), ({"sessions": [1, 2], "threads": [1, 2]}, 1)],
)
def test_more_threads_than_cores_are_told(catalogue: Catalogue, settings: dict[str, list[int]], crowded: int) -> None:
    backend = {"kind": "torch", "model": "m:f"}
    spec = parsed(catalogue, candidates=[candidate(backend=backend, settings=settings)])
    told = [line for line in spec.odd if "threads of work" in line]
    have, they = ("has", "it") if crowded == 1 else ("have", "they")
    assert told == (
        [
            f"{crowded} of {len(spec.candidates)} candidates {have} more threads of work than cores: with fewer `sessions` or "
            f"`threads` {they} may be faster"
        ]
        if crowded
        else []
    )
    unpinned = {"backend": backend, "settings": settings, "usd_per_hour": 1, "price_source": "me"}
    assert not any("threads of work" in line for line in parsed(catalogue, candidates=[unpinned]).odd)


def test_values_of_the_padding_are_told_as_a_run_takes_them(catalogue: Catalogue) -> None:
    model = {**changed()["model"], "ragged": {"pad": {"x": 0.5}}}
    assert parsed(catalogue, model=model).pad == ("x=0.5",)


def test_a_candidate_without_a_price_has_no_cost_yet(catalogue: Catalogue) -> None:
    unpriced = dataclasses.replace(only(catalogue), price=None)
    with pytest.raises(AssertionError):
        _ = unpriced.usd_per_hour


@pytest.mark.parametrize("document", [None, [], "a text", 5])
def test_what_is_no_mapping_is_told_what_was_expected(catalogue: Catalogue, document: object) -> None:
    with pytest.raises(UsageError) as raised:
        parse_search_spec(document, catalogue, source="s")
    assert str(raised.value) == "s: expected a mapping with `model`, `slo`, `launcher` and `candidates`"


def test_the_command_line_goes_before_the_file(catalogue: Catalogue) -> None:
    spec = parsed(catalogue)
    told = limited(spec, minutes=3, usd=1.5, target_rps=70)
    assert (told.budget.minutes, told.budget.usd, told.target_rps) == (3, 1.5, 70)
    assert limited(spec, minutes=None, usd=None, target_rps=None) == spec
    assert limited(spec, minutes=None, usd=0, target_rps=None).budget.usd == 0


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("minutes", 0.0, "--budget-minutes: got 0.0, expected a number greater than 0, at most 1440"),
        ("minutes", 1441.0, "--budget-minutes: got 1441.0, expected a number greater than 0, at most 1440"),
        ("minutes", float("nan"), "--budget-minutes: got nan, expected a finite number greater than 0, at most 1440"),
        ("usd", -1.0, "--max-usd: got -1.0, expected a number of at least 0"),
        ("usd", float("nan"), "--max-usd: got nan, expected a finite number of at least 0"),
        ("usd", float("inf"), "--max-usd: got inf, expected a finite number of at least 0"),
        ("target_rps", 1e300, "--target-rps: got 1e+300, expected a number greater than 0, at most 1000000000"),
        ("target_rps", float("nan"), "--target-rps: got nan, expected a finite number greater than 0, at most 1000000000"),
        ("target_rps", float("inf"), "--target-rps: got inf, expected a finite number greater than 0, at most 1000000000"),
    ],
)
def test_the_command_line_takes_what_the_file_takes(catalogue: Catalogue, option: str, value: float, expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        limited(parsed(catalogue), **{"minutes": None, "usd": None, "target_rps": None, option: value})
    assert str(raised.value) == expected


def test_what_a_fleet_is_made_of_can_be_counted(catalogue: Catalogue) -> None:
    priced = {"backend": {"kind": "synthetic"}, "price_source": "mine"}
    candidates = [{**priced, "usd_per_hour": 1e300}, {**priced, "usd_per_hour": 1, "max_count": 10**400}]
    first, second = faults_of(catalogue, candidates=candidates)
    assert first.endswith("usd_per_hour: 1e+300: expected a number greater than 0, at most 1000000000, or null")
    assert second.endswith("expected a whole number from 1 to 1000000000, or null")


def test_money_and_rates_are_finite(catalogue: Catalogue) -> None:
    told = faults_of(catalogue, budget={"usd": float("inf")}, target_rps=float("inf"))
    assert len(told) == 2
    assert all("expected a finite number" in line for line in told)
