"""A configuration's faults are named with file, key path, value, what was expected, and the nearest key."""

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main
from gateway.config import Config, Python, load_config, parse_config
from gateway.documents.faults import shown
from gateway.errors import ConfigError
from gateway.wire.frames import spec_from_plain, spec_to_plain

BACKEND = "backends: [{kind: synthetic}]"
FLAT = "expected at least 2 dimensions, of which the second is the length"


def tensor(name: str, shape: str, datatype: str = "FP32") -> str:
    return f"{{name: {name}, datatype: {datatype}, shape: [{shape}]}}"


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(yaml.safe_load(text), source="x.yaml")
    return caught.value.message.split("\n")


def test_the_least_configuration_has_defaults_for_the_rest() -> None:
    config = parse_config(yaml.safe_load("models: [{name: a, backends: [{kind: synthetic}]}]"), source="x.yaml")
    assert config.server.host == "127.0.0.1"
    assert config.models[0].version == "1"
    assert config.models[0].backends[0].label == "synthetic"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "models: [{name: a, backends: [{kind: onnxruntime, modle: x, model: y}]}]",
            "x.yaml: models[0].backends[0].modle: 'x': unknown key; did you mean `model`?",
        ),
        (
            "models: [{name: a, backends: [{kind: onnxruntime}]}]",
            "x.yaml: models[0].backends[0].model: missing, expected text; add `model: …`",
        ),
        (
            f"models: [{{name: a, slo: {{p99ms: 3, p99_ms: 3}}, {BACKEND}}}]",
            "x.yaml: models[0].slo.p99ms: 3: unknown key; did you mean `p99_ms`?",
        ),
        (
            f"server: {{http_port: 70000}}\nmodels: [{{name: a, {BACKEND}}}]",
            "x.yaml: server.http_port: 70000: expected a whole number from 0 to 65535, or null; left out, it is 8000",
        ),
        (
            f"server: {{http_port: null, grpc_port: null}}\nmodels: [{{name: a, {BACKEND}}}]",
            "x.yaml: server.http_port: null: grpc_port is null too, and nobody could ask, expected a port in one of them; left "
            "out, it is 8000",
        ),
        (
            f"models: [{{name: a, max_rows: -2, {BACKEND}}}]",
            "x.yaml: models[0].max_rows: -2: expected a whole number from 0 to 1048576; left out, it is 32",
        ),
        (
            "models: []",
            "x.yaml: models: []: expected a list of at least 1, each item a mapping with `name`, `backends`, …; add one",
        ),
        (
            "models: [{name: a, backends: [{kind: synthetic}, {kind: synthetic}]}]",
            "x.yaml: models[0].backends[1].name: 'synthetic' is the name of another backend too; give each a `name` of its own",
        ),
        (
            f"models: [{{name: a, {BACKEND}}}, {{name: a, {BACKEND}}}]",
            "x.yaml: models[1].name: 'a': version 1 of it is listed twice; choose another, or give each a `version` of its own",
        ),
        (
            f"models: [{{name: a, ragged: {{pad: {{x: 0}}, buckets: [4, 2]}}, {BACKEND}}}]",
            "x.yaml: models[0].ragged.buckets: [4, 2]: expected ascending lengths without repetition; write [2, 4]",
        ),
        (
            f"models: [{{name: a, ragged: {{crop: []}}, {BACKEND}}}]",
            "x.yaml: models[0].ragged: no input is named, expected `pad` (inputs to be padded) or `text` (inputs of BYTES); "
            "write `pad: {input_ids: 0}` or `text: [text]`",
        ),
        (
            f"models: [{{name: a, ragged: {{text: [x], buckets: [4]}}, {BACKEND}}}]",
            "x.yaml: models[0].ragged.buckets: [4]: texts are not padded, expected inputs to be padded beside it; remove it",
        ),
        (
            "models: [{name: a, ragged: {pad: {x: 0}}, backends: [{kind: onnxruntime, model: a.onnx, device: cuda, "
            "cuda_graphs: true}]}]",
            "x.yaml: models[0].backends[0].cuda_graphs: true: each length would be recorded for itself, and most batches run "
            "unrecorded, expected ragged.buckets, the lengths to record, beside it; write `buckets: [16, 32, 64, 128]`, up to "
            "the longest that the model takes",
        ),
        (
            f"models: [{{name: a, inputs: [{tensor('x', '-1')}], ragged: {{pad: {{x: 0}}}}, {BACKEND}}}]",
            f"x.yaml: models[0].ragged.pad.x: 0: the input has shape [-1], {FLAT}",
        ),
        (
            f"models: [{{name: a, outputs: [{tensor('y', '-1')}], ragged: {{pad: {{x: 0}}, crop: [y]}}, {BACKEND}}}]",
            f"x.yaml: models[0].ragged.crop[0]: 'y': the output has shape [-1], {FLAT}",
        ),
        (
            f"models: [{{name: a, inputs: [{tensor('x', '-1, 3')}], ragged: {{text: [x]}}, {BACKEND}}}]",
            "x.yaml: models[0].ragged.text[0]: 'x': the input is FP32, expected an input of BYTES; others: `pad`",
        ),
        (
            f"models: [{{name: a, inputs: [{tensor('x', '-1, 3', 'BYTES')}], ragged: {{pad: {{x: 0}}}}, {BACKEND}}}]",
            "x.yaml: models[0].ragged.pad.x: 0: the input is BYTES, expected an input of numbers; those of BYTES: `text`",
        ),
        (
            f"models: [{{name: a, inputs: [{tensor('x', '-1, 3', 'INT8')}], ragged: {{pad: {{x: 128}}}}, {BACKEND}}}]",
            "x.yaml: models[0].ragged.pad.x: 128: expected a whole number from -128 to 127, as the input is INT8",
        ),
        (
            "models: [{name: a, backends: [{kind: torch, model: m.pt2, build: {source: 'm:make'}, output_indices: [1]}]}]",
            "x.yaml: models[0].backends[0].output_indices: [1]: what is built has the outputs as they are listed; list "
            "`outputs` in the order of the module's results, and remove this",
        ),
        (
            "models: [{name: a, backends: [{kind: torch, model: m.pt, device: 'cuda:1', placement: replicas, resources: "
            "{num_gpus: 1}}]}]",
            "x.yaml: models[0].backends[0].device: 'cuda:1': Ray gives each replica 1 of `num_gpus`, which count from 0 in it; "
            "name the first, or raise num_gpus",
        ),
        (
            "models: [{name: a, backends: [{kind: neuron, model: m, isolation: process}]}]",
            "x.yaml: models[0].backends[0].isolation: 'process': a NeuronCore has one owner, and each session's process would "
            "take those of all, expected thread; `placement: replicas` gives each its own",
        ),
        (
            "models: [{name: a, backends: [{kind: synthetic, placement: replicas, resources: {neuron_cores: 1.5}}]}]",
            "x.yaml: models[0].backends[0].resources.neuron_cores: 1.5: a NeuronCore has one owner, expected a whole number",
        ),
        (
            "models: [{name: a, backends: [{kind: neuron, model: m, placement: replicas, resources: {neuron_cores: 0}}]}]",
            "x.yaml: models[0].backends[0].resources.neuron_cores: 0: each replica computes on one, expected 1, or more",
        ),
        (
            "models: [{name: a, backends: [{kind: synthetic, placement: replicas, resources: {num_gpus: 1.5}}]}]",
            "x.yaml: models[0].backends[0].resources.num_gpus: 1.5: Ray gives parts of one GPU alone, expected a whole number, "
            "or less than 1",
        ),
        (
            f"server: {{ingress_resources: {{neuron_cores: 0.5}}}}\nmodels: [{{name: a, {BACKEND}}}]",
            "x.yaml: server.ingress_resources.neuron_cores: 0.5: a NeuronCore has one owner, expected a whole number",
        ),
        (  # and nothing is concluded from what is at fault
            f"models: [{{name: a, inputs: [{tensor('x', 'any')}], ragged: {{pad: {{x: 0}}}}, {BACKEND}}}]",
            "x.yaml: models[0].inputs[0].shape[0]: 'any': expected a whole number from -1 to 2147483647",
        ),
    ],
)
def test_a_fault_is_one_line_that_says_where_and_what(text: str, expected: str) -> None:
    assert faults(text) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"server: {{limits: {{header_bytes: {1 << 32}}}}}", "expected a whole number from 256 to 4294967295"),
        ("server: {drain_timeout_s: 1.0e+308}", "expected a number from 0 to 1000000000"),
        ('server: {run_dir: "\\0"}', "expected a path, in which there is no NUL character"),
        ('server: {state_dir: "a\\0"}', "expected a path, in which there is no NUL character"),
        ('server: {tls: {certificate: a, key: "\\0"}}', "expected a path, in which there is no NUL character"),
        ('server: {access: {keys: "\\0"}}', "expected a path, in which there is no NUL character"),
        ("server: {allowed_hosts: ['a.b:8443']}", "or a name; leave the port out: it is allowed at any"),
        ("server: {allowed_hosts: [bücher.example]}", "expected a name as clients send it; write xn--bcher-kva.example"),
        ("server: {host: a..b}", "expected an address such as 127.0.0.1, or a name"),
        ("backend: {resources: {memory: 1.0e+15}}", "expected a number from 0 to 100000000000000"),
        ("backend: {hang_timeout_s: 1.0e+308}", "expected a number greater than 0, at most 1000000000"),
        ("backend: {cold_start_s: 1.0e+308}", "expected a number greater than 0, at most 1000000000, or null"),
        ("backend: {load_ms: 1.0e+308}", "expected a number from 0 to 3600000"),
        ("backend: {kind: onnxruntime, model: m.onnx, threads: 2147483648}", "expected a whole number from 1 to 4096"),
        (f"inputs: [{tensor('x', '-1, 1' + 30 * '0')}]", "expected a whole number from -1 to 2147483647"),
    ],
)
def test_what_no_server_could_work_with_is_told(text: str, expected: str) -> None:
    section = yaml.safe_load(text)
    model = {
        "name": "a",
        "inputs": section.pop("inputs", None),
        "backends": [{"kind": "synthetic"} | section.pop("backend", {})],
    }
    (fault,) = faults(yaml.safe_dump({"models": [model], **section}))
    assert expected in fault


def test_every_time_has_a_bound() -> None:
    sections = Config.model_json_schema()["$defs"]
    times = {
        f"{section}.{key}": json.dumps(field)
        for section, described in sections.items()
        for key, field in described.get("properties", {}).items()
        if key.endswith(("_s", "_ms"))
    }
    assert len(times) > 15
    assert [key for key, field in times.items() if "maximum" not in field.lower()] == []


NAME = "expected 1 to {} characters, none of them '/' or a control character"


@pytest.mark.parametrize("name", ["a/b", "/", "", "a\nb", "a\x7fb", "a\x85b", "a\ud800b", "x" * 129, "a\u2028b"])
def test_a_model_name_that_no_path_label_or_file_can_hold_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"models": [{"name": name, "backends": [{"kind": "synthetic"}]}]}, source="x.yaml")
    remedy = "for instance a-b" if name == "a/b" else "choose another"
    assert caught.value.message == f"x.yaml: models[0].name: {shown(name)}: {NAME.format(128)}; {remedy}"
    caught.value.message.encode()  # so that it can be printed


@pytest.mark.parametrize("name", [".", "..", "stats"])
def test_a_model_name_that_a_path_takes_for_something_else_is_refused(name: str) -> None:
    (fault,) = faults(f"models: [{{name: {name}, {BACKEND}}}]")
    assert fault == f"x.yaml: models[0].name: {name!r}: means something else in a path, expected another name"


@pytest.mark.parametrize("name", ["cpu/int8", "/", "", "a\tb", "x" * 49])
def test_a_backend_name_that_no_lane_or_file_can_hold_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"models": [{"name": "a", "backends": [{"kind": "synthetic", "name": name}]}]}, source="x.yaml")
    remedy = "for instance cpu-int8" if name == "cpu/int8" else "choose another"
    assert caught.value.message == f"x.yaml: models[0].backends[0].name: {name!r}: {NAME.format(48)}; {remedy}"


@pytest.mark.parametrize("version", [2, "", "-1", "1.0", "one", "1" * 19, "1\n", "١"])
def test_a_version_is_a_number(version: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"models": [{"name": "a", "version": version, "backends": [{"kind": "synthetic"}]}]}, source="x.yaml")
    hint = '; write "2"' if version == 2 else ""
    expected = "expected a number of 1 to 18 digits, in quotes"
    assert caught.value.message == f"x.yaml: models[0].version: {version!r}: {expected}{hint}"


def test_names_may_have_spaces_dots_colons_and_letters_of_any_script() -> None:
    for name in ("a+b cé", "org.model:v1", "模型", "...", "x" * 128):
        backend = {"kind": "synthetic", "name": name[:48]}
        parse_config({"models": [{"name": name, "backends": [backend]}]}, source="x.yaml")


def test_rows_are_stated_by_max_rows_and_by_padding_and_not_by_the_default() -> None:
    ragged = "ragged: {pad: {x: 0}}"
    batching = "batching: {max_rows: 4}"
    cases = (
        ("", False, 0),
        ("max_rows: 32,", True, 32),
        (f"{ragged},", True, 0),
        (f"{batching},", False, 0),
        (f"max_rows: 32, {batching},", True, 4),
    )
    for keys, stated, wanted in cases:
        config = parse_config(yaml.safe_load(f"models: [{{name: a, {keys} {BACKEND}}}]"), source="x.yaml")
        declared = copy.deepcopy(config).models[0].declared()
        assert (declared.max_rows, declared.rows_stated, declared.rows_wanted) == (32, stated, wanted)
        assert spec_from_plain(spec_to_plain(declared)) == declared


def test_an_unknown_kind_names_the_known_ones() -> None:
    (fault,) = faults("models: [{name: a, backends: [{kind: onnxrutime, model: m.onnx}]}]")
    assert fault.startswith("x.yaml: models[0].backends[0].kind: 'onnxrutime': expected one of synthetic, torch, ")
    assert fault.endswith("; did you mean `onnxruntime`?")


@pytest.mark.parametrize(
    ("text", "path", "write"),
    [
        ("max_batch_size: 8", "max_batch_size", "`max_rows`"),
        ("batching: {max_queue_delay_microseconds: 100}", "batching.max_queue_delay_microseconds", "`slo: {p99_ms: …}`"),
        ("dynamic_batching: {}", "dynamic_batching", "`slo: {p99_ms: …}`"),
        ("instance_group: [{count: 2}]", "instance_group", "`sessions`"),
        ("workers_per_device: 2", "workers_per_device", "`sessions`"),
        ("minReplicas: 1", "minReplicas", "`placement: replicas`"),
        ("storageUri: 's3://m'", "storageUri", "`model`"),
        ("platform: onnxruntime_onnx", "platform", "`kind`"),
        ("accelerator: gpu", "accelerator", "`device`"),
        ("inputs: [{name: x, data_type: TYPE_FP32, dims: [-1, 3]}]", "inputs[0].data_type", "`datatype`"),
    ],
)
def test_what_other_servers_call_a_key_is_told_as_it_is_called_here(text: str, path: str, write: str) -> None:
    first, *more = faults(f"models: [{{name: a, {text}, {BACKEND}}}]")
    assert first.startswith(f"x.yaml: models[0].{path}: ")
    assert "unknown key; " in first
    assert write in first
    assert not any("missing" in line for line in more)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (f"batching: {{policy: fixed, max_delay: 5}}, {BACKEND}", "max_delay_ms"),
        ("backends: [{kind: triton, url: 'h:8001', model: m, timeout: 5}]", "timeout_s"),
    ],
)
def test_a_key_without_its_unit_is_ours_whatever_others_call_so(text: str, meant: str) -> None:
    (fault,) = faults(f"models: [{{name: a, {text}}}]")
    assert fault.endswith(f": 5: unknown key; did you mean `{meant}`?")


def test_faults_of_a_document_made_in_python_are_told_beside_what_no_copy_is_made_of() -> None:
    options = {"lock": threading.Lock()}
    backend: dict[str, Any] = {"kind": "python", "model": "m:M", "sesions": 0, "class_options": options}
    model = {"name": "a", "backends": (backend,)}
    with pytest.raises(ConfigError) as caught:
        parse_config({"models": (model,)}, source="x")
    assert len(caught.value.message.splitlines()) == 2
    del backend["sesions"]
    (read,) = parse_config({"models": (model,)}, source="x").models[0].backends
    assert isinstance(read, Python)
    assert read.class_options["lock"] is options["lock"]


def test_every_fault_is_told_at_once() -> None:
    assert len(faults("server: {http_port: x}\nmodels: [{name: a, slo: {p99_ms: 0}, backends: [{kind: torch}]}]")) == 3


def test_a_file_that_is_none_or_no_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read"):
        load_config(tmp_path / "missing.yaml")
    (tmp_path / "bad.yaml").write_text("models: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml:1:\d+: 'models: \[': not YAML: a bracket or brace is not closed"):
        load_config(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match=r"list\.yaml:1: got a list, expected a mapping with `models`"):
        load_config(tmp_path / "list.yaml")


def test_paths_count_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    path = tmp_path / "configs" / "x.yaml"
    path.write_text("""
server: {run_dir: run, state_dir: /state}
models:
  - name: a
    backends:
      - {kind: onnxruntime, model: ../models/a.onnx, build: {source: "code/a.py:factory"}}
      - {kind: torch, model: "package.module:factory"}
      - {kind: python, model: "./a.py:Model", class_options: {model: theirs.onnx}}
      - {kind: tensorrt, model: /elsewhere/a.onnx, engines: built}
      - {kind: triton, url: "host:8001", model: a}
""")
    config = load_config(path)
    assert (config.server.run_dir, config.server.state_dir) == (str(tmp_path / "configs" / "run"), "/state")
    onnx, torch, python, tensorrt, triton = (backend.options() for backend in config.models[0].backends)
    assert onnx["model"] == str(tmp_path / "models" / "a.onnx")
    assert config.models[0].backends[0].build.source == str(tmp_path / "configs" / "code" / "a.py:factory")  # type: ignore[union-attr]
    assert torch["model"] == "package.module:factory"
    assert (python["model"], python["class_options"]) == (str(tmp_path / "configs" / "a.py:Model"), {"model": "theirs.onnx"})
    assert (tensorrt["model"], tensorrt["engines"]) == ("/elsewhere/a.onnx", str(tmp_path / "configs" / "built"))
    assert triton["model"] == "a"


def test_what_is_at_fault_is_still_told_where_paths_are_counted(tmp_path: Path) -> None:
    for text in (
        "[]",
        "models: 1",
        "models: [1]",
        "models: [{backends: [1]}]",
        "server: 1",
        "models: [{backends: [{build: 1}]}]",
    ):
        path = tmp_path / "x.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"x\.yaml:"):
            load_config(path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--http-port", "70000"), "--http-port: 70000: expected a whole number from 0 to 65535"),
        (("--http-port", "9000", "--grpc-port", "9000"), "--grpc-port: 9000: http_port has it too, expected another port"),
        (("--grpc-port", "8123"), "--grpc-port: 8123: http_port has it too, expected another port"),
        (("--host", "localhost:9000"), "--host: 'localhost:9000': expected an address such as 127.0.0.1, or a name"),
    ],
)
def test_what_the_command_line_gives_in_place_of_a_key_is_checked_as_the_key_is(
    options: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text(f"server: {{http_port: 8123}}\nmodels: [{{name: a, {BACKEND}}}]")
    assert main(["serve", str(tmp_path / "x.yaml"), *options]) == 2
    assert capsys.readouterr().err == told + "\n"


@pytest.mark.parametrize(
    ("backend", "buckets"),
    [
        ("kind: onnxruntime, model: x.onnx", ()),
        ("kind: torch, model: x.pt2", ()),
        ("kind: onnxruntime, model: x.onnx, device: cuda", (16, 32)),
        ("kind: torch, model: x.pt2, device: cuda", (16, 32)),
        ("kind: torch, model: 'x.py:f', compile: true", (16, 32)),
        ("kind: tensorrt, model: x.onnx", (16, 32)),
        ("kind: neuron, model: x", (16, 32)),
        ("kind: python, model: 'x.py:X'", (16, 32)),
    ],
)
def test_lengths_are_padded_to_buckets_but_where_the_backend_surely_runs_any_as_well(
    backend: str, buckets: tuple[int, ...]
) -> None:
    ragged = "ragged: {pad: {x: 0}, buckets: [16, 32], crop: [y]}"
    text = f"models: [{{name: a, {ragged}, backends: [{{{backend}}}]}}]"
    (model,) = parse_config(yaml.safe_load(text), source="x.yaml").models
    assert model.ragged is not None
    assert model.ragged.on(model.backends[0]) == model.ragged.model_copy(update={"buckets": buckets})


@pytest.mark.parametrize("name", ["", "../q", "a/b", "x y", "-a", "ä", "a\n", 101 * "a"])
def test_an_application_whose_name_no_file_may_have_is_refused(name: str) -> None:
    models = [{"name": "m", "backends": [{"kind": "synthetic"}]}]
    with pytest.raises(
        ConfigError, match=r"x\.yaml: ray\.application: '.*: expected 1 to 100 letters, digits, '\.', '_' or '-',"
    ):
        parse_config({"ray": {"application": name}, "models": models}, source="x.yaml")
    told = parse_config({"ray": {"application": "eu-1.b_2"}, "models": models}, source="x.yaml")
    assert told.ray.application == "eu-1.b_2"
