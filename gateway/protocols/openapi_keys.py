"""What an OpenAPI document says of keys, where they are asked for."""

from collections.abc import Callable
from typing import Any, Final

_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer KEY"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
# Of `gateway.access.rules`, which are above.
_INFERENCE: Final = "infer"
_ROLES: Final = {"models": _INFERENCE}
_REFUSALS: Final = {
    "401": ("Unauthenticated", "There is no key, or it is unknown, or has expired", "WWW-Authenticate"),
    "403": ("Forbidden", "The key is for another model, or for something else", ""),
    "429": ("Limited", "The key has asked as much as it may", "Retry-After"),
}


def with_keys(document: dict[str, Any], needs: Callable[[str], str]) -> dict[str, Any]:
    """The document of `describe_api`, each operation of which says what key it takes, and how it is refused.

    needs: a path to the scope that a key must have for it; empty where none is asked for.
    """
    paths = {
        path: {method: _asking(operation, method, needs(path)) for method, operation in operations.items()}
        for path, operations in document["paths"].items()
    }
    responses = {name: _refusal(words, header) for name, words, header in _REFUSALS.values()}
    components = document["components"]
    return document | {
        "paths": paths,
        "components": components | {"securitySchemes": _SCHEMES, "responses": components["responses"] | responses},
    }


def _asking(operation: dict[str, Any], method: str, scope: str) -> dict[str, Any]:
    if not scope:
        return operation | {"security": []}
    limited = scope == _INFERENCE and method == "post"  # limits are of inferences
    scope = _ROLES.get(scope, scope)
    statuses = ("401", "403", "429") if limited else ("401", "403")
    refusals = {status: {"$ref": f"#/components/responses/{_REFUSALS[status][0]}"} for status in statuses}
    return operation | {
        "security": [{scheme: [scope]} for scheme in _SCHEMES],
        "responses": operation["responses"] | refusals,
    }


def _refusal(words: str, header: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    told: dict[str, Any] = {"description": words, "content": content}
    return told | ({"headers": {header: {"schema": {"type": "string"}}}} if header else {})
