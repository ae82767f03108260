"""The generate extension on both servers, asked by plain HTTP: tritonclient does not know it."""

import http.client
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GenerateCase:
    """body: as JSON, or as it is. differs: why the gateway answers otherwise on purpose."""

    name: str
    model: str
    body: Any
    differs: str = ""
    verb: str = "generate"


GENERATE_CASES = (
    GenerateCase("an_element", "repeats", {"text": "a", "n": 1}),
    GenerateCase("lists_of_one", "repeats", {"text": ["a"], "n": [1]}),
    GenerateCase("within_parameters", "repeats", {"text": "a", "parameters": {"n": 1}}),
    GenerateCase("unknown_keys", "repeats", {"text": "a", "n": 1, "temperature": 0.5, "parameters": {"stream": False}}),
    GenerateCase("an_id", "repeats", {"text": "a", "n": 1, "id": "seven"}),
    GenerateCase("an_id_that_is_none", "repeats", {"text": "a", "n": 1, "id": 7}, "Triton says 500"),
    GenerateCase("two_rows", "add_sub", {"INPUT0": [1, 2, 3, 4, 5, 6, 7, 8], "INPUT1": [1, 2, 3, 4, 5, 6, 7, 8]}),
    GenerateCase("an_open_size", "identity_int32", {"INPUT0": [1, 2, 3]}),
    GenerateCase("text", "identity_bytes", {"INPUT0": ["é", 'a\n"b"']}),
    GenerateCase("open_sizes", "whole", {"INPUT0": [1, 2, 3]}),
    GenerateCase("a_size_that_does_not_fit", "add_sub", {"INPUT0": [1, 2, 3], "INPUT1": [1, 2, 3]}),
    GenerateCase("nested_lists", "whole", {"INPUT0": [[1, 2], [3, 4]]}, "Triton reads flat lists only"),
    GenerateCase("an_input_is_missing", "repeats", {"text": "a"}),
    GenerateCase("a_list_as_parameter", "repeats", {"text": "a", "n": 1, "stop": ["a"]}),
    GenerateCase("a_word_for_a_number", "repeats", {"text": "a", "n": "one"}, "Triton says 500"),
    GenerateCase("no_json", "repeats", b"{", "Triton says 500"),
    GenerateCase("no_such_model", "absent", {"text": "a"}),
    GenerateCase("no_such_version", "repeats/versions/7", {"text": "a", "n": 1}),
    GenerateCase("a_version", "repeats/versions/1", {"text": "a", "n": 1}),
    GenerateCase("no_part", "repeats", {"text": "a", "n": 0}, "Triton gives the error with status 200"),
    GenerateCase("two_parts", "repeats", {"text": "a", "n": 2}, "Triton gives the error with status 200"),
    GenerateCase("it_fails", "repeats", {"text": "a", "n": 0, "fail": True}, "Triton says 400"),
    GenerateCase("stream_of_three", "repeats", {"text": "a", "n": 3}, verb="generate_stream"),
    GenerateCase("stream_with_an_id", "repeats", {"text": "a", "n": 2, "id": "seven"}, verb="generate_stream"),
    GenerateCase("stream_of_none", "repeats", {"text": "a", "n": 0}, verb="generate_stream"),
    GenerateCase("stream_of_one_whole", "identity_int32", {"INPUT0": [1, 2, 3]}, verb="generate_stream"),
    GenerateCase("stream_that_fails", "repeats", {"text": "a", "n": 2, "fail": True}, verb="generate_stream"),
    GenerateCase(
        "stream_that_fails_at_once", "repeats", {"text": "a", "n": 0, "fail": True}, "Triton gives an event", "generate_stream"
    ),
    GenerateCase("stream_of_a_wrong_request", "repeats", {"text": "a"}, verb="generate_stream"),
)


def generate(case: GenerateCase, url: str) -> dict[str, Any]:
    """What a server answers: status, kind and objects; of an error only that it is one."""
    connection = http.client.HTTPConnection(url, timeout=20)
    try:
        body = case.body if isinstance(case.body, bytes) else json.dumps(case.body)
        connection.request("POST", f"/v2/models/{case.model}/{case.verb}", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    kind = response.getheader("Content-Type", "")
    if kind.startswith("text/event-stream"):
        assert content.endswith(b"\n\n") or not content
        objects = [json.loads(event.removeprefix(b"data: ")) for event in content.split(b"\n\n")[:-1]]
    else:
        objects = [json.loads(content)]
    return {"status": response.status, "kind": kind, "objects": [{"error": "…"} if "error" in one else one for one in objects]}
