"""What containers are asked beside v2: SageMaker's /ping and /invocations, and the v1 of TF Serving and KServe."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from gateway.access.rules import INFER, MODELS, OPEN
from gateway.edges.control import respond_json
from gateway.edges.invocations import BinaryInvocation, Invocation, Prediction, RawInvocation
from gateway.edges.multi_model_routes import TARGET_MODEL, MultiModelRoutes
from gateway.edges.rest_inference import AskedModel
from gateway.engine.inference import Endpoints
from gateway.engine.repository import Repository
from gateway.errors import GatewayError, InvalidArgument, NotFound, NotReady, Unsupported, UnsupportedMediaType
from gateway.protocols.invocations import FormCodec
from gateway.protocols.media import GIVEN, TAKEN, Form, answer_of, attributes_of, form_of
from gateway.protocols.raw_body import RawCodec
from gateway.protocols.rest import RestCodec
from gateway.wire.exchange import Exchange
from gateway.wire.http_errors import error_body
from gateway.wire.request_ids import NAME as REQUEST_ID

Action = Callable[[Exchange, AskedModel], None]

_ATTRIBUTES: Final = b"x-amzn-sagemaker-custom-attributes"
_INFERENCE_ID: Final = b"x-amzn-sagemaker-inference-id"
_TRACEPARENT: Final = b"traceparent"
_SESSION: Final = b"x-amzn-sagemaker-session-id"
_ARCHIVE: Final = ".tar.gz"  # a target model is named as its package is
_JSON_BYTES: Final = b"inference-header-content-length"
_AS_V2: Final = frozenset(("", "json", "raw"))  # answers of a binary request that are one, too
_PREDICT: Final = ":predict"
_OTHER_VERBS: Final = (":explain", ":classify", ":regress")
_OF_CURL: Final = b"application/x-www-form-urlencoded"  # what its -d says where it is not told otherwise
# Batch transform would send one request at a time if it were told nothing. Records are not put together by it, whatever their
# form, but in batches here. The product may be 100 MB at most.
_TRANSFORM: Final = {"MaxConcurrentTransforms": 16, "BatchStrategy": "SINGLE_RECORD", "MaxPayloadInMB": 6}
_STATES: Final = {"READY": "AVAILABLE", "LOADING": "LOADING", "UNLOADING": "UNLOADING"}


class Asked(msgspec.Struct, frozen=True):
    """A model. version: empty: the highest that is ready."""

    name: str
    version: str = ""


class ContainerRoutes:
    """A part of `RestRoutes`."""

    def __init__(
        self, repository: Repository, v2: Endpoints[RestCodec], json_depth: int, multi_model: MultiModelRoutes | None = None
    ) -> None:
        """v2: the models, as that protocol speaks of them. multi_model: by which SageMaker loads them; None: it does not."""
        self._repository = repository
        self._multi_model = multi_model
        self._v2 = v2
        self._endpoints = Endpoints(
            repository,
            "rest",
            lambda served: FormCodec(served.name, served.version, served.spec, served.ragged, json_depth, in_haste=True),
            v2.doors,
        )
        self._raw_endpoints = Endpoints(
            repository, "rest", lambda served: RawCodec(served.name, served.version, served.spec), v2.doors
        )
        self._generation = -1
        self._names: list[str] = []  # of the models that are wanted, in this generation
        self._only: Asked | None = None  # the one of them, if it was looked for
        self._raw: dict[Asked, bool] = {}  # likewise

    def match(self, parts: list[str]) -> tuple[dict[bytes, Action], str, str, str] | None:
        """What a path means, as `MatchedPath` holds it. parts: unquoted. None: nothing."""
        match parts:
            case ["ping"]:
                return {b"GET": self._ping, b"HEAD": self._ping, b"POST": self._ping}, "", "", OPEN
            case ["invocations"]:
                return {b"POST": self._invoke}, "", "", INFER
            case ["execution-parameters"]:
                return {b"GET": self._transform, b"HEAD": self._transform}, "", "", OPEN
            case ["v1", "models"] | ["v1", "models", ""]:
                return {b"GET": self._models, b"HEAD": self._models}, "", "", MODELS
            case ["v1", "models", name] if name:
                return self._of_model(name, "")
            case ["v1", "models", name, "versions", version] if name and version:
                version, predict, rest = version.partition(_PREDICT)
                return None if rest else self._of_model(name + predict, version)
            case ["models", name, "invoke"] if name and self._multi_model is not None:
                return {b"POST": self._invoke}, name, "", INFER
        return None if self._multi_model is None else self._multi_model.match(parts)

    def _of_model(self, name: str, version: str) -> tuple[dict[bytes, Action], str, str, str]:
        if name.endswith(_PREDICT):
            return {b"POST": self._predict}, name.removesuffix(_PREDICT), version, INFER
        methods: dict[bytes, Action] = {b"GET": self._model, b"HEAD": self._model}
        if (version or name).endswith(_OTHER_VERBS):
            methods[b"POST"] = self._other_verb
        return methods, name, version, INFER

    def _other_verb(self, exchange: Exchange, route: AskedModel) -> None:
        verb = (route.version or route.name).rpartition(":")[2]
        raise Unsupported(f"':{verb}' is not supported, expected '{_PREDICT}'")

    def _ping(self, exchange: Exchange, route: AskedModel) -> None:
        # Where models come and go one of them says nothing of the container, which would be replaced.
        well = self._multi_model is not None or self._repository.ready()
        exchange.respond(200 if well else 503)

    # SageMaker

    def _invoke(self, exchange: Exchange, route: AskedModel) -> None:
        """At /invocations, or at the path of a model."""
        try:
            asked = self._asked(exchange, route.name)
            raw = self._is_raw(asked)
            if not raw and _SESSION in exchange.headers:
                raise InvalidArgument(
                    "X-Amzn-SageMaker-Session-Id: sessions are not kept here: leave it out; every request stands for itself"
                )
        except GatewayError as exc:  # no inference begins, which would count it
            self._v2.refused(exc, exchange, exchange.arrival_ns)
            raise
        if raw:
            inference = RawInvocation(self._raw_endpoints, exchange, asked)
            exchange.on_disconnect = inference.cancel
            inference.start()
        else:
            self._start(exchange, asked, Invocation)

    def _transform(self, exchange: Exchange, route: AskedModel) -> None:
        respond_json(exchange, _TRANSFORM)

    def _is_raw(self, asked: Asked) -> bool:
        """Whether it is there, and is a raw model."""
        self._look_anew()
        raw = self._raw.get(asked)
        if raw is None:
            try:
                raw = self._raw[asked] = self._repository.model(asked.name, asked.version).spec.raw
            except GatewayError:  # which the inference will meet as well
                return False
        return raw

    def _look_anew(self) -> None:
        """Forget what was found of the models, if they have changed."""
        if self._repository.generation != self._generation:
            self._generation = self._repository.generation
            self._names.clear()
            self._only = None
            self._raw.clear()

    def _asked(self, exchange: Exchange, name: str) -> Asked:
        """The model: by its own header, by Custom-Attributes, or the only one. Tells in the answer what comes back there.

        name: as the path has it; empty: it has none. Raises: InvalidArgument, NotFound.
        """
        headers = exchange.headers
        if _INFERENCE_ID in headers:
            exchange.headers = headers = {REQUEST_ID: headers[_INFERENCE_ID], **headers}
            exchange.tell(b"X-Amzn-SageMaker-Inference-Id", headers[_INFERENCE_ID])
        version = attributed = ""
        if _ATTRIBUTES in headers:
            told = attributes_of(headers[_ATTRIBUTES])
            attributed, version = told.get("model", ""), told.get("version", "")
            if "traceparent" in told:
                exchange.headers = headers = {_TRACEPARENT: told["traceparent"].encode(), **headers}
            if "request_id" in told:
                exchange.headers = headers = {REQUEST_ID: told["request_id"].encode(), **headers}
            exchange.tell(b"X-Amzn-SageMaker-Custom-Attributes", headers[_ATTRIBUTES])
        if not name and TARGET_MODEL in headers and (target := headers[TARGET_MODEL].decode("utf-8", "replace")):
            name = self._multi_model.models.named(target) if self._multi_model is not None else target
            name = name.removesuffix(_ARCHIVE)
        if name or attributed or version:
            return Asked(name or attributed or self._the_only_model().name, version)
        return self._the_only_model()

    def _the_only_model(self) -> Asked:
        """Raises: InvalidArgument, if there are several; NotFound, if there is none."""
        self._look_anew()
        if self._only is not None:
            return self._only
        if not self._names:
            known = self._repository.all_models()
            wanted = [served for served in known if served.wanted] or known
            self._names = list(dict.fromkeys(served.name for served in wanted))
        names = self._names
        if len(names) == 1:
            self._only = Asked(names[0])
            return self._only
        if not names:
            raise NotFound("no model is loaded")
        # Which there are is not for every key.
        listed = "" if self._v2.doors is not None else " ({})".format(", ".join(map(repr, names[:10])))
        raise InvalidArgument(
            f"which of {len(names)} models{listed}? Name one in the header X-Amzn-SageMaker-Target-Model, or in "
            "X-Amzn-SageMaker-Custom-Attributes: model=NAME"
        )

    # TF Serving and KServe v1

    def _models(self, exchange: Exchange, route: AskedModel) -> None:
        respond_json(exchange, {"models": [model["name"] for model in self._repository.models()]})

    def _model(self, exchange: Exchange, route: AskedModel) -> None:
        repository, name, version = self._repository, route.name, route.version
        rows = [row for row in repository.index() if row["name"] == name and version in ("", row["version"])]
        if not rows:
            repository.model(name, version)  # which is not found
        told: list[dict[str, Any]] = [
            {
                "version": row["version"],
                "state": _STATES.get(row["state"], "END"),
                "status": {"error_code": "OK", "error_message": row.get("reason", "")},
            }
            for row in rows
        ]
        ready = repository.model_ready(name, version)
        respond_json(exchange, {"name": name, "ready": ready, "model_version_status": told})

    def _predict(self, exchange: Exchange, route: AskedModel) -> None:
        self._start(exchange, route, Prediction)

    # inference

    def _start(self, exchange: Exchange, asked: AskedModel, kind: type[Invocation]) -> None:
        headers = exchange.headers
        told = headers.get(b"content-type", b"")
        if kind is Prediction and told.partition(b";")[0].strip().lower() == _OF_CURL:
            told = b""  # TF Serving, which reads no types, has its users send JSON so
        form = form_of(told)
        if form is None:
            if self._multi_model is not None:
                try:  # 404 goes before: the platform then loads it anew
                    self._endpoints.find(asked.name, asked.version, exchange)
                except (NotFound, NotReady) as exc:  # what the doors raise is counted where it ends
                    self._v2.refused(exc, exchange, exchange.arrival_ns)
                    raise
            got = told.decode("latin-1")
            taken = ", ".join((*TAKEN, "image/*, audio/* and video/*"))
            self._turn_away(exchange, 415, f"Content-Type: {got[:100]!r} is not taken; expected one of {taken}")
            return
        answer = answer_of(headers.get(b"accept", b""))
        if answer is None:
            got, given = headers[b"accept"].decode("latin-1"), ", ".join(GIVEN)
            self._turn_away(exchange, 406, f"Accept: {got[:100]!r}: nothing of it is given; expected one of {given}")
            return
        json_bytes = form.header or headers.get(_JSON_BYTES)
        if json_bytes is not None and answer in _AS_V2:
            exchange.headers = {**headers, _JSON_BYTES: json_bytes}
            binary = BinaryInvocation(self._v2, exchange, asked)
            exchange.on_disconnect = binary.cancel
            binary.start()
            return
        if json_bytes is not None:
            form = Form("v2", json_bytes)
        elif kind is Prediction and form.kind == "json":
            form = Form("v1")
        inference = kind(self._endpoints, exchange, asked, form, answer)
        exchange.on_disconnect = inference.cancel
        exchange.on_drained = inference.drained
        inference.start()

    def _turn_away(self, exchange: Exchange, status: int, message: str) -> None:
        """Answer a form that is not known, or cannot be given."""
        exchange.respond(status, error_body(message))
        self._v2.refused(UnsupportedMediaType(message), exchange, exchange.arrival_ns)
