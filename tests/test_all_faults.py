"""All faults of a configuration are told at once: none hides another, and none is told that another one brought about."""

import copy
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.configuring.check import looked_at, servable
from gateway.documents.faults import ConfigFaults
from gateway.documents.reader import Document, read
from tests.mistakes import MISTAKES, of_model, one, onnx, prepare

# Each line that ends in `# !` holds one fault, with two of them two, in their order; so many there are.
MANY = """\
server:
  http_port: 9000
  grpc_port: 9000  # ! another port
  host: localhost:9000  # ! the ports are http_port and grpc_port
  state_dir: code.py/state  # ! /code.py is a file
  drain_timeout_s: -1  # ! expected a number from 0 to 1000000000
  limits: {json_dept: 3, body_bytes: 0}  # ! did you mean `json_depth`? ! expected a whole number of at least 1
ray: {dashbord: true}  # ! did you mean `dashboard`?
modles: []  # ! did you mean `models`?
models:
  - name: iris
    max_rows: 8
    max_rows: 16  # ! set twice, first in line 12
    slo: {p95_ms: 50}  # ! write `p99_ms`
    inputs:
      - {name: input, datatype: FP32, shape: [-1, 3]}  # ! did you mean `x`?
    outputs:
      - {name: y, datatype: float32, shape: [3]}  # ! did you mean `FP32`? ! expected [-1, 3], as in the file
    backends:
      - kind: onnxruntime
        model: linear.onnx
        sesions: many  # ! did you mean `sessions`? ! expected a whole number from 1 to 256
        cuda_graphs: true  # ! false where device is cpu
      - kind: onnxrutime  # ! did you mean `onnxruntime`?
        name: second
        modle: lineer.onnx  # ! did you mean `model`? ! no such file
        threads: two  # ! expected a whole number from 1 to 4096
      - kind: python
        name: second  # ! is the name of another backend too
        model: code.py:Ecko  # ! did you mean `Echo`?
        resources: {num_gpu: 1, cpu: 2}  # ! did you mean `num_gpus`? ! did you mean `num_cpus`?
    routing:
      equivalent: [[onnxruntime, secnd]]  # ! did you mean `second`?
  - name: org/model  # ! for instance org-model
    version: 2  # ! in quotes
    batching: {policy: adaptve, max_delay_ms: soon}  # ! did you mean `adaptive`? ! expected a number from 0 to 60000
    inputs:
      - {name: x, datatype: FP31, shape: [16]}  # ! expected one of BOOL ! listed twice ! write [-1, 16]
      - {name: x, shape: [-1, 3]}  # ! missing, expected text
    ragged:
      pad: {z: 0}  # ! expected an input of the model, one of x
      text: [txt, x]  # ! expected an input of the model, one of x
    backends:
      - kind: python
        model: code.py  # ! add `:Echo`
        autoscaling: {min_replicas: 3, max_replicas: 2}  # ! above max_replicas, 2 ! expected `placement: replicas`
      - kind: triton  # ! add `url: …`
        model: m
  - name: hinted
    routing: {ejection: {pause_s: 10}}  # ! above max_pause_s, 8
    inputs: [{name: x, datatype: FP64, shape: [-1, 5]}]  # ! expected FP32, as in the code ! expected [-1, 4], as in the code
    outputs: [{name: output, datatype: FP32, shape: [-1, 4]}]
    backends:  # ! every backend is a canary or a shadow
      - kind: python
        model: code.py:hinted
        isolation: proces  # ! did you mean `process`?
        canary_share: 0.7
      - kind: synthetic
        output: sum
        canary_share: 0.7  # ! with it all canary shares sum to 1.4
        faults: {hang: never, wait: 1}  # ! expected a number ! unknown key
  - name: echo
    backends:
      - kind: python
        model: code.py:Echo
        class_options: {offsett: 1}  # ! did you mean `offset`? ! missing: Echo needs it
        placement: replica  # ! did you mean `replicas`?
  - name: echo  # ! version 1 of it is listed twice
    backend: []  # ! did you mean `backends`? ! expected a list of at least 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files that the mistakes are made with."""
    made = tmp_path_factory.mktemp("all_faults")
    prepare(made)
    return made


def test_many_faults_of_one_file_are_told_in_the_first_run_each_with_its_line(folder: Path) -> None:
    pytest.importorskip("onnx")
    (folder / "many.yaml").write_text(MANY)
    faults = looked_at(read(folder / "many.yaml")).faults
    wanted = [
        (number, says)
        for number, line in enumerate(MANY.splitlines(), 1)
        for says in line.partition("  # ! ")[2].split(" ! ")
        if says
    ]
    missed = [(line, says) for line, says in wanted if not any(f.line == line and says in str(f) for f in faults)]
    assert not missed, "\n".join(map(str, faults))
    assert len(faults) == len(wanted), "\n".join(map(str, faults))
    assert len(wanted) >= 40


def test_serve_tells_files_beside_the_words_that_are_at_fault(folder: Path) -> None:
    (folder / "serve.yaml").write_text(
        "server: {http_port: 9000, grpc_port: 9000, hots: 0.0.0.0}\n"
        "models:\n"
        "  - name: m\n"
        "    backends: [{kind: onnxruntime, sesions: 2, model: lineer.onnx}]\n"
        "  - name: n\n"
        "    backends: [{kind: python, model: 'code.py:Ecko', sessions: two}]\n"
    )
    with pytest.raises(ConfigFaults) as refused:
        servable(folder / "serve.yaml", here=True)
    assert [fault.path.removeprefix("models") for fault in refused.value.faults] == [
        "server.hots", "server.grpc_port",
        "[0].backends[0].sesions", "[0].backends[0].model",
        "[1].backends[0].sessions", "[1].backends[0].model",
    ]  # fmt: skip


PORTS = "models: [{name: m, backends: [{kind: synthetic}]}]\n"
SCALED = "placement: replicas, autoscaling: {min_replicas: 3, max_replica"
EIGHT = "inputs: [{name: x, datatype: FP32, shape: [8, 3]}]"
PADDED = "ragged: {pad: {x: 0}}"
Y = "{name: y, datatype: FP32, shape: [-1, 3]}"
OUT = f"outputs: [{Y}]"
# What stands at fault. If it were left out or had its default, something else would be at fault.
ALONE = {
    "a port": (PORTS + "server: {http_port: 70000, grpc_port: 8000}", "server.http_port"),
    "a misspelt port": (PORTS + "server: {htp_port: 9000, grpc_port: 8000}", "server.htp_port"),
    "a port elsewhere": (PORTS + "http_port: 9000\nserver: {grpc_port: 8000}", "http_port"),
    "a placement of replicas": (one("placement: replica", "replicas: 2", "autoscaling: {max_replicas: 2}"), "placement"),
    "a bound": (of_model().replace("synthetic", f"synthetic, {SCALED}s: x}}"), "autoscaling.max_replicas"),
    "a misspelt bound": (of_model().replace("synthetic", f"synthetic, {SCALED}: 4}}"), "autoscaling.max_replica"),
    "options": (one("model: code.py:Echo", "class_options: 3", kind="python"), "class_options"),
    "misspelt options": (one("model: code.py:Echo", "class_option: {factor: 1}", kind="python"), "class_option"),
    "a device": (one("model: linear.onnx", "device: gpu", "cuda_graphs: true", kind="onnxruntime"), "device"),
    "a placement": (one("model: artifacts", "placement: replica", kind="neuron"), "placement"),
    "a kind with none near": (one("model: later.onnx", "threads: 0", kind="3"), "kind"),
    "a kind after whose name it is called": (of_model("routing: {equivalent: [[b]]}").replace("synthetic", "3"), "kind"),
    "a name of a backend": (of_model("routing: {equivalent: [[b]]}").replace("tic}", "tic, name: a/b}"), "name"),
    "a misspelt name": (of_model("routing: {equivalent: [[b]]}").replace("tic}", "tic, nmae: b}"), "nmae"),
    "a canary's share": (one("canary_share: x") + "      - {kind: synthetic, name: b, shadow_share: 1}", "canary_share"),
    "rows": (of_model("max_rows: eight", EIGHT), "max_rows"),
    "misspelt rows": (of_model("max_row: 8", EIGHT), "max_row"),
    "rows as Triton calls them": (of_model("max_batch_size: 8", EIGHT), "max_batch_size"),
    "rows as KServe calls them, elsewhere": (of_model(EIGHT).replace("tic}", "tic, maxBatchSize: 8}"), "BatchSize"),
    "rows elsewhere": (of_model(EIGHT).replace("tic}", "tic, max_rows: 8}"), "max_rows"),
    "the name of an input": (of_model(PADDED, f"inputs: [{{name: 3, datatype: FP32, shape: [-1, -1]}}, {Y}]"), "[0].name"),
    "an input": (of_model(PADDED, f"inputs: [x, {Y}]"), "inputs[0]"),
    "a version": (of_model("version: 2") + "  - {name: m, backends: [{kind: synthetic}]}", "version"),
    "inputs of PyTorch": (of_model("inputs: x", OUT).replace("synthetic", "torch, model: code.py:factory"), "inputs"),
    "a name in an ONNX file": (onnx("inputs: [{nam: x, datatype: FP32, shape: [-1, 3]}]"), "nam"),
    "rows of an ONNX file": (onnx("max_rows: one", model="fixed.onnx"), "max_rows"),
}  # fmt: skip


def test_a_shape_that_a_file_denies_is_told_once_behind_a_misspelt_key(folder: Path) -> None:
    pytest.importorskip("onnx")
    text = onnx("input: [{name: x, datatype: FP32, shape: [3]}]")
    faults = looked_at(Document("x", yaml.safe_load(text), folder=folder)).faults
    assert [fault.path for fault in faults] == ["models[0].input", "models[0].input[0].shape"], "\n".join(map(str, faults))


@pytest.mark.parametrize("case", ALONE)
def test_what_depends_on_what_is_at_fault_is_not_told(case: str, folder: Path) -> None:
    text, path = ALONE[case]
    faults = looked_at(Document("x", yaml.safe_load(text), folder=folder)).faults
    assert [fault.path.endswith(path) for fault in faults] == [True], "\n".join(map(str, faults))


# These follow from all of the document, from its text, or from a load.
OF_THE_WHOLE = {"nothing but a canary", "key set twice", "a model that does not load", "no models", "empty list"}
# These are mended by what other documents say.
OF_WHAT_IS_MISSING = {"missing key", "no kind", "tensors stated nowhere", "tensors of the class", "tensors of PyTorch"}


Told = set[tuple[str, ...]]  # path, what was found and expected, and the remedy of each fault
Singles = dict[str, tuple[dict[str, Any], Told]]


def parsed(text: str) -> dict[str, Any]:
    """Empty for what is none."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return document if isinstance(document, dict) and isinstance(document.get("models"), list) else {}


def told(document: dict[str, Any], folder: Path) -> Told:
    faults = looked_at(Document("x", copy.deepcopy(document), folder=folder)).faults
    return {(fault.path, fault.found, fault.expected, fault.remedy) for fault in faults}


@pytest.fixture(scope="module")
def singles(folder: Path) -> Singles:
    """The document of each mistake, and what is told of it alone."""
    documents = {title: parsed(mistake.text) for title, mistake in MISTAKES.items() if title not in OF_THE_WHOLE}
    found = {title: (document, told(document, folder)) for title, document in documents.items() if document}
    assert len(found) >= 50
    return found


@pytest.mark.slow
def test_faults_of_different_models_are_all_told_and_nothing_else(singles: Singles, folder: Path) -> None:
    titles = list(singles)
    chosen: Sequence[str]
    for chosen in (titles, *each_two(titles, lambda one, other: {*singles[one][0]} & {*singles[other][0]} == {"models"})):
        together: dict[str, Any] = {"models": []}
        expected: Told = set()
        for title in chosen:
            document, faults = singles[title]
            if {*document} & {*together} != {"models"}:
                continue  # both speak of the server
            shift = len(together["models"])
            models = [model | {"name": renamed(model["name"], shift)} for model in document["models"]]
            together |= document | {"models": [*together["models"], *models]}
            expected |= {(moved(path, shift), *rest) for path, *rest in faults}
        assert told(together, folder) == expected, chosen


def each_two(titles: Sequence[str], go_together: Callable[[str, str], bool], size: int = 8) -> Iterator[list[str]]:
    """Lists of so many, among which each two that go together are in one at least once."""
    left = dict.fromkeys(pair for pair in itertools.combinations(titles, 2) if go_together(*pair))
    while left:
        chosen = list(next(iter(left)))
        while len(chosen) < size:
            more = [one for one in titles if one not in chosen and all(go_together(one, other) for other in chosen)]
            if not more:
                break
            new = [sum((one, other) in left or (other, one) in left for other in chosen) for one in more]
            chosen.append(more[new.index(max(new))])
        chosen.sort(key=titles.index)
        for pair in itertools.combinations(chosen, 2):
            left.pop(pair, None)
        yield chosen


def renamed(name: Any, number: int) -> Any:
    return f"m{number}" if name == "m" else name


def moved(path: str, by: int) -> str:
    return re.sub(r"models.(\d+)", lambda match: f"models[{int(match[1]) + by}", path)


@pytest.mark.slow
def test_any_two_faults_of_one_model_are_both_told(singles: Singles, folder: Path) -> None:
    pairs = 0
    for (first, (document, told_one)), (second, (other, told_other)) in itertools.combinations(singles.items(), 2):
        joined = in_one_model(document, other, apart=bool({first, second} & OF_WHAT_IS_MISSING))
        if joined is None or {first, second} == {"no kind", "unknown backend"}:  # which may be the name of that one
            continue
        pairs += 1
        both, backend = joined
        expected = told_one | {(path.replace("models[0].backends[0]", backend), *rest) for path, *rest in told_other}
        hidden = {(path, found) for path, found, *_ in expected} - {(path, found) for path, found, *_ in told(both, folder)}
        assert not hidden, (first, second)
    assert pairs >= 800


def in_one_model(document: dict[str, Any], other: dict[str, Any], *, apart: bool) -> tuple[dict[str, Any], str] | None:
    """A document of one model that says what both say, and which of its backends is the other's; None: they say something of
    the same key. apart: whether each keeps its own backend, and neither may say what the tensors are.
    """
    (mine, *more), (theirs, *others) = document["models"], other["models"]
    if more or others or any(not isinstance(model.get("backends"), list) for model in (mine, theirs)):
        return None
    (backend, *more), (another, *others) = mine["backends"], theirs["backends"]
    differ = any(mine.get(key, value) != value for key, value in theirs.items() if key != "backends")
    if more or others or differ or {*document} & {*other} != {"models"} or (apart and {"inputs", "outputs"} & {*mine, *theirs}):
        return None
    if not apart and all(backend.get(key, value) == value for key, value in another.items()):
        backends, place = [{**backend, **another}], "models[0].backends[0]"
    else:
        backends, place = [backend, {**another, "name": "another"}], "models[0].backends[1]"
    return {**document, **other, "models": [{**mine, **theirs, "backends": backends}]}, place


@pytest.mark.slow
def test_whatever_stands_in_a_file_is_looked_at_or_told(folder: Path) -> None:
    junk = [None, True, 0, -1, 1e400, "", "x", "code.py:Echo", [], {}, [[]], [None], {"x": None}, {3: 4}, {"kind": "torhc"}]
    chance = random.Random(0)
    whole = yaml.safe_load(MANY)
    for _ in range(40):
        document = copy.deepcopy(whole)
        for _ in range(chance.randint(1, 6)):
            around: Any = document
            while True:
                key = chance.choice([*(around if isinstance(around, dict) else range(len(around)))])
                if not around[key] or not isinstance(around[key], dict | list) or chance.random() < 0.2:
                    break
                around = around[key]
            if chance.random() < 0.3:
                del around[key]
            else:
                around[key] = chance.choice(junk)
            if not document:
                break
        found = looked_at(Document("x", document, folder=folder))
        assert found.faults
