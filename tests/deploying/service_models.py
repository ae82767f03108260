"""What AWS takes, by botocore's service models: its own validator, and what that leaves out, such as enumerations."""

import functools
import io
import re
from collections.abc import Iterator
from typing import Any

import botocore.session
from botocore import xform_name
from botocore.model import OperationModel, Shape
from botocore.validate import ParamValidator

from gateway.deploying.calls import Call, FromFile


@functools.cache
def operations(service: str) -> dict[str, OperationModel]:
    """By the names of boto3's methods."""
    model = botocore.session.get_session().get_service_model(service)
    return {xform_name(name): model.operation_model(name) for name in model.operation_names}


def faults(call: Call) -> list[str]:
    """What AWS would refuse in a call, as far as its service model tells."""
    shape = operations(call.service)[call.operation].input_shape
    sent = {key: io.BytesIO() if isinstance(value, FromFile) else value for key, value in call.parameters.items()}
    report = ParamValidator().validate(sent, shape)
    found = [report.generate_report()] if report.has_errors() else []
    return [f"{call.named}: {fault}" for fault in (*found, *_unfit(shape, sent, ""))]


def _unfit(shape: Shape, value: Any, at: str) -> Iterator[str]:
    if shape.type_name == "structure":
        for key, part in value.items():
            yield from _unfit(shape.members[key], part, f"{at}.{key}")
    elif shape.type_name == "list":
        if not shape.metadata.get("min", 0) <= len(value) <= shape.metadata.get("max", len(value)):
            yield f"{at}: {len(value)} items"
        for part in value:
            yield from _unfit(shape.member, part, f"{at}[]")
    elif shape.type_name == "map":
        for key, part in value.items():
            yield from _unfit(shape.key, key, at)
            yield from _unfit(shape.value, part, f"{at}.{key}")
    elif shape.type_name == "string":
        if shape.enum and value not in shape.enum:
            yield f"{at}: {value!r} is none of the enumeration"
        if len(value) > shape.metadata.get("max", len(value)):
            yield f"{at}: {value!r} is too long"
        pattern = shape.metadata.get("pattern", ".*")
        in_java = r"\p{" in pattern or r"\u" in pattern  # which Python does not read
        if not in_java and not re.fullmatch(pattern, value, re.DOTALL):
            yield f"{at}: {value!r} does not match {pattern}"
    elif shape.type_name in ("integer", "float", "double", "long") and value > shape.metadata.get("max", value):
        yield f"{at}: {value} is too large"
