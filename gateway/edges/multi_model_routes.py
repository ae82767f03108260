"""SageMaker's multi-model API: /models, by which the platform loads and unloads. Source: see `gateway.engine.multi_model`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

import msgspec

from gateway.access.rules import ADMIN
from gateway.edges.control import LaterAnswers, read_json, respond_json
from gateway.edges.rest_inference import AskedModel
from gateway.errors import Code, InvalidArgument, shortened
from gateway.wire.exchange import Exchange

if TYPE_CHECKING:
    from gateway.engine.multi_model import Listed, MultiModel

TARGET_MODEL: Final = b"x-amzn-sagemaker-target-model"

# Of errors, where the contract has another than the rest of REST.
_STATUSES: Final = {Code.ALREADY_EXISTS: 409, Code.OVERLOADED: 507}


class _LoadModel(msgspec.Struct):
    model_name: str
    url: str


class MultiModelRoutes:
    """A part of `ContainerRoutes`, which has the invocations."""

    def __init__(self, models: "MultiModel", later: LaterAnswers) -> None:
        self.models = models
        self._later = later

    def match(self, parts: list[str]) -> tuple[dict[bytes, Callable[[Exchange, AskedModel], None]], str, str, str] | None:
        """As `ContainerRoutes.match`."""
        match parts:
            case ["models"] | ["models", ""]:
                return {b"GET": self._list, b"HEAD": self._list, b"POST": self._load}, "", "", ADMIN
            case ["models", name]:
                return {b"GET": self._get, b"HEAD": self._get, b"DELETE": self._unload}, name, "", ADMIN
        return None

    def _load(self, exchange: Exchange, route: AskedModel) -> None:
        asked = read_json(exchange.body, _LoadModel)
        target = exchange.headers.get(TARGET_MODEL, b"").decode("utf-8", "replace")
        self._later.changed(exchange, self.models.load(asked.model_name, asked.url, target), _STATUSES)

    def _unload(self, exchange: Exchange, route: AskedModel) -> None:
        self._later.changed(exchange, self.models.unload(route.name), _STATUSES)

    def _list(self, exchange: Exchange, route: AskedModel) -> None:
        token = parse_qs(exchange.query.decode("latin-1")).get("next_page_token", [""])[-1]
        try:
            page, more = self.models.page(bytes.fromhex(token).decode())
        except ValueError:
            got = shortened(token)
            raise InvalidArgument(f"next_page_token: got {got!r}, expected a nextPageToken of an answer") from None
        told: dict[str, object] = {"models": [_told(model) for model in page]}
        respond_json(exchange, told | ({"nextPageToken": more.encode().hex()} if more else {}))

    def _get(self, exchange: Exchange, route: AskedModel) -> None:
        respond_json(exchange, _told(self.models.get(route.name)))


def _told(model: "Listed") -> dict[str, str]:
    return {"modelName": model.name, "modelUrl": model.url}
