"""The Serve application: one deployment of ingresses, and one per backend that is placed in replicas."""

import asyncio
import hashlib
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ray
from ray import serve
from ray._raylet import IMPLICIT_RESOURCE_PREFIX  # type: ignore[attr-defined]  # an extension without stubs
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle

from backends.base import ModelSpec
from gateway import __version__
from gateway.clock import LoopClock
from gateway.cluster.account_lines import AccountKeeper
from gateway.cluster.control import ClientsWish, SharedControl, asked_for, control_name
from gateway.cluster.leaving import SILENT_S, Leaving
from gateway.cluster.remote import RemoteRunner
from gateway.cluster.replica import Replica, Terms
from gateway.cluster.run_dirs import run_dir_of
from gateway.config import Autoscaling, Backend, Config, ModelSection, ServerSection
from gateway.configuring.ingresses import decided
from gateway.engine.runner import BatchRunner
from gateway.errors import ConfigError, GatewayError, InternalError
from gateway.garbage import leave_out, take_in
from gateway.process.announcement import ReadyModel
from gateway.process.console import Speech, set_up
from gateway.process.machine import cores
from gateway.process.prints import never_raise
from gateway.process.run_dir import hold_run_dir, make_run_dir
from gateway.process.supervisor import outlive_signals

if TYPE_CHECKING:
    from gateway.ingress import Ingress

INGRESS: Final = "ingress"

# Of every replica's process, set in this one place. Serve reads them when it is imported.
ENVIRONMENT: Final = {
    # One event loop per process: listeners, Serve's gRPC server and calls share it, and a batch crosses no thread between them.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Serve refuses frames of more than 4 MiB otherwise.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str((1 << 31) - 1),
    "RAY_SERVE_LOG_TO_STDERR": "1",  # else what they print and log would end in files of Serve, or nowhere
}
QUIET: Final = {"log_level": "WARNING", "enable_access_log": False}

_HEALTH_CHECK_S: Final = 1.0
_HEALTH_TIMEOUT_S: Final = 5.0  # three in a row, then Serve replaces the replica
# From Serve taking a replica off its lists to the first look whether calls still run there; stale lists are younger than this.
_DRAIN_LOOK_S: Final = 1.0
_INGRESS_LOOK_S: Final = 0.1  # its own listeners answer what is in flight, when it is closed
_SHUTDOWN_MARGIN_S: Final = 10.0
# A replica is ended by nobody attending it (see `_backend`), or by not answering (`leaving`): Serve, which kills by time alone,
# must never come to that.
_NEVER_KILLED_S: Final = 30 * 86400.0
# Ingresses hold their calls back by the slots they know of; `attend` calls count as well. This limit must never be met.
_NEVER_FULL: Final = 100_000

# A key of what Serve calls the ingresses' user_config: that may change without a restart.
_DEPLOYED_BY: Final = "deployed_by"

_RAYS_PARTS: Final = 10_000  # of a resource: it rounds to these (RESOURCE_UNIT_SCALING)

_METRICS_S: Final = 1.0
_LOOK_BACK_S: Final = 3.0

log = logging.getLogger(__name__)


def application(config: Config, speech: Speech | None = None, deployed_by: str | None = None) -> serve.Application:
    """What Serve runs for a configuration. speech: of its processes; None: as usual. Raises: ConfigError.

    deployed_by: what `deployer` finds while this runs; None: nothing.
    """
    speech = speech or Speech()
    config = decided(config, cores())
    server = config.server
    if server.ingresses > 1 and 0 in (server.http_port, server.grpc_port):
        raise ConfigError(f"server.ingress_replicas: {server.ingresses}: they share their ports, which cannot be 0 then")
    names = _deployment_names(config)
    backends = {
        name: _backend(name, model, backend, config, speech)
        for model in config.models
        for backend in model.backends
        if (name := names.get(_key(model, backend))) is not None
    }
    declared = [model.declared() for model in config.models]  # which differ where a default was written out
    content = _digest(f"{config.model_dump_json()}{declared}{speech}")
    resources, surge = _of_embedded(config)
    of_version = f"{IMPLICIT_RESOURCE_PREFIX}{INGRESS}-{__version__}-{content}"
    if server.ingress_replicas_per_node is not None:
        # Each node has one of it. Serve's max_replicas_per_node would count an upgrade's old and new ones together.
        resources[of_version] = _RAYS_PARTS // server.ingress_replicas_per_node / _RAYS_PARTS
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=server.ingresses,
        ray_actor_options=_actor_options(resources),
        graceful_shutdown_timeout_s=_ingress_ends_s(server),
        max_surge_percent=100 if surge else 0,
        graceful_shutdown_wait_loop_s=_INGRESS_LOOK_S,
        user_config=None if deployed_by is None else {_DEPLOYED_BY: deployed_by},
        **_COMMON,
    )(IngressReplica)
    return _versioned(ingress, content).bind(config, backends, speech, of_version)


def deployer(details: Mapping[str, Any]) -> str | None:
    """Who has deployed an application last. details: of the application, as Serve's controller tells them."""
    ingress = details["deployments"].get(INGRESS, {})
    return ((ingress.get("deployment_config") or {}).get("user_config") or {}).get(_DEPLOYED_BY)


def check_room(config: Config, nodes: int) -> None:
    """Whether all ingresses find a place on so many nodes, of which there will be no more. Raises: ConfigError."""
    server = decided(config, cores()).server
    per_node = server.ingress_replicas_per_node
    if per_node is not None and server.ingresses > nodes * per_node:
        expected = f"{nodes * per_node} at most, as server.ingress_replicas_per_node is {per_node} and nodes are {nodes}"
        raise ConfigError(f"server.ingress_replicas: {server.ingresses}: expected {expected}: ray.address joins more")


def waiting(details: Mapping[str, Any]) -> list[str]:
    """What to tell of replicas that wait for a node. details: as in `deployer`."""
    found = []
    for name, each in details["deployments"].items():
        count = sum(replica["state"] == "STARTING" and not replica.get("node_id") for replica in each["replicas"])
        asked = {key: amount for key, amount in each["required_resources"].items() if amount}
        alone = [key for key in asked if key.startswith(IMPLICIT_RESOURCE_PREFIX)]
        room = ", ".join(f"{key} {amount:g}" for key, amount in asked.items() if key not in alone) or "room"
        room += ", and fewer ingresses than server.ingress_replicas_per_node" if alone else ""
        if count:
            found.append(f"{name}: {count} of {each['target_num_replicas']} replicas wait for a node that has {room}")
    return found


class IngressReplica:
    """The class Serve runs for an ingress: listeners in its own process, on its own event loop, past Serve's proxy."""

    _closed = _drained = _ending = _listened = False  # also where __init__ did not get to the end

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, backends: dict[str, DeploymentHandle[Any]], speech: Speech, of_version: str
    ) -> None:
        """backends: by deployment name; not called, but they tell Serve to shut ingresses down before what they use.

        of_version: a resource that is asked for by this version alone, if nodes have so many of each.
        """
        outlive_signals()
        set_up(speech, guest=True)
        never_raise()
        self._config = config
        self._names = _deployment_names(config)
        self._application = serve.get_replica_context().app_name
        self._keeper = AccountKeeper()
        self._leaving = Leaving(self._application, but=INGRESS)
        self._control: SharedControl | None = None
        if config.server.ingresses > 1 or (config.server.model_control and self._names):  # replicas ask it as well
            self._control = SharedControl(control_name(self._application), runtime_env={"env_vars": ENVIRONMENT})
        run_dir = run_dir_of(self._application, config.server.run_dir)
        self._ingress = self._build(run_dir)
        self._held = hold_run_dir(run_dir)
        try:
            if self._control is not None:
                self._begin_with(await self._control.asked())
            self._ports = await self._ingress.start()
            self._listened = True
        except BaseException as exc:
            ended = self._closed  # by `_end`: Serve stops it while it loads, and would print that it failed, with a traceback
            await self.close()
            if ended and isinstance(exc, GatewayError):
                return
            raise
        if self._config.metrics.enabled:
            self._keeper.start()
        if config.server.ingress_replicas_per_node == 1:  # of several, Serve does not tell which are of what version
            me = serve.get_replica_context().replica_id.to_full_id_str()
            self._leaving.succeed(me, of_version, _ingress_ends_s(config.server))
        leave_out()
        if self._control is not None:
            await self._control.follow(self._ingress.repository.apply, {model.name for model in self._config.models})

    def _build(self, run_dir: Path) -> "Ingress":
        from gateway.ingress import Ingress

        # Always on shared ports: during a rolling upgrade the old and the new replica listen side by side.
        worker: Any = ray._private.worker.global_worker
        owner = port_owner(worker.gcs_client.cluster_id.hex(), self._application)
        ingress = Ingress(
            self._config,
            run_dir=run_dir,
            open_remote=self._open_remote,
            control=self._control,
            owner=owner,
            on_leave=take_in,
        )
        ingress.metrics.watch_told(self._keeper)
        return ingress

    def _begin_with(self, asked: dict[str, bool]) -> None:
        """asked: whether models are to be loaded, where clients have asked other ingresses for it."""
        for served in self._ingress.repository.all_models():
            served.wanted = asked.get(served.name, served.wanted)

    def _open_remote(self, model: ModelSection, backend: Backend, declared: ModelSpec) -> BatchRunner:
        return RemoteRunner(
            backend,
            self._names[_key(model, backend)],
            self._application,
            content=_content(model, backend),
            name=f"{model.name}:{model.version}/{backend.label}",
            clock=LoopClock(asyncio.get_running_loop()),
            load=self._control.load_of(model.name) if self._control is not None else 0,
            ending=lambda: self._closed,
            keep_account=self._keeper.keep,
            leaving=self._leaving.add,
        )

    async def reconfigure(self, told: dict[str, str]) -> None:
        """Serve tells who has deployed it: see `deployer`, which is all that asks."""

    async def ports(self) -> tuple[int | None, int | None]:
        """Of HTTP and gRPC."""
        return self._ports.http, self._ports.grpc

    async def ready_models(self) -> tuple[ReadyModel, ...]:
        return self._ingress.ready_models()

    async def check_health(self) -> None:
        """Serve replaces an ingress whose check fails, or does not answer because the loop is stuck.

        A backend elsewhere that is down is no reason: a new ingress would not help, and requests of others would be lost.
        """
        # Serve looks at none that it ends itself. Another has called `close`, which Serve must not cut short; or the shutdown,
        # for which Serve waits as well: until then it takes this one for one that answers. What is stopped while it loads is
        # not to end with a traceback.
        if self._listened if self._ending else self._drained:
            raise InternalError("it has closed")
        if not all(pool.available for pool in self._ingress.pools):
            raise InternalError("an embedded backend has lost all sessions and cannot rebuild them")

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        # Serve awaits what this returns, for graceful_shutdown_timeout_s; then the interpreter calls it as well.
        if self._closed or not hasattr(self, "_ingress"):  # or its directories were refused
            return None
        return self._end()

    async def _end(self) -> None:
        self._ending = True
        await self.close()
        await self._leaving.close()

    async def close(self) -> None:
        """Answer what is in flight and end. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._leaving.succeed_no_more()
        if self._control is not None:
            await self._control.close()
        await self._ingress.drain()  # which publishes last what it was told
        await self._keeper.close()
        self._held.close()
        self._drained = True


def desired_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """The autoscaling policy: enough replicas for what runs and what waits, each at its target of sessions busy at once.

    Every ingress tells its queue to whichever replica it calls, so the longest of the reports counts, not their sum. Before a
    replica has reported, it stays as it was decided. To start a first one is Serve's own decision, when an ingress wishes for
    it (`RemoteRunner.wake`).
    """
    metrics = context.aggregated_metrics or {}
    if "busy" not in metrics:
        return context.target_num_replicas, {}
    busy = sum(metrics["busy"].values())
    queued = max(metrics.get("queued", {}).values(), default=0.0)
    assert context.config is not None
    return (busy + queued) / context.config.target_ongoing_requests, {}


def _ingress_ends_s(server: ServerSection) -> float:
    """Then it is killed."""
    return 2 * server.drain_timeout_s + _SHUTDOWN_MARGIN_S + SILENT_S


def _backend(name: str, model: ModelSection, backend: Backend, config: Config, speech: Speech) -> serve.Application:
    # Serve takes it off its lists and waits for the last call there, and `attend` of an ingress is one: so it ends after those
    # that use it (see RemoteRunner), however long they are without a successor: that may load for long, or fail to.
    content = _content(model, backend)
    terms = Terms(
        usd_per_hour=backend.usd_per_hour,
        slo_p99_ms=model.slo.p99_ms if model.slo is not None else None,
        drain_s=max(2 * config.server.drain_timeout_s, backend.hang_timeout_s) + _SHUTDOWN_MARGIN_S,
    )
    deployment = serve.deployment(
        name=name,
        ray_actor_options=_actor_options(backend.resources),
        graceful_shutdown_timeout_s=_NEVER_KILLED_S,
        max_surge_percent=100 if backend.surge else 0,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_S,
        user_config=terms,
        **_scale(backend),
        **_COMMON,
    )(Replica)
    host = config.ray.channel_host or ""
    metrics_dir = partial(_metrics_dir, config.server.run_dir) if config.metrics.enabled else None
    tracing = config.tracing
    counted = config.server.run_dir if config.metrics.enabled else False
    scales = backend.autoscaling is not None  # Serve's replicas tell what autoscaling needs only if it was there at their start
    told = (host, tracing.model_dump_json() if tracing is not None else None, counted, speech, scales)
    version = f"{content}{_digest(repr(told))}"
    asked = partial(_asked, model.name)
    return _versioned(deployment, version).bind(
        model, backend, model.declared(), content, speech, host, metrics_dir=metrics_dir, tracing=tracing, asked=asked
    )


def _scale(backend: Backend) -> dict[str, Any]:
    wanted = backend.autoscaling
    if wanted is None:
        return {"num_replicas": backend.replicas}
    with warnings.catch_warnings():
        # Serve announces that an environment variable will replace the interval, but its replicas do not read that yet (2.60).
        warnings.simplefilter("ignore", DeprecationWarning)
        return {"autoscaling_config": _autoscaling(wanted, backend.sessions)}


def _autoscaling(wanted: Autoscaling, sessions: int) -> ServeAutoscaling:
    return ServeAutoscaling(
        min_replicas=wanted.min_replicas,
        max_replicas=wanted.max_replicas,
        target_ongoing_requests=sessions * wanted.target_utilisation,
        upscale_delay_s=wanted.upscale_delay_s,
        downscale_delay_s=wanted.downscale_delay_s,
        metrics_interval_s=_METRICS_S,
        look_back_period_s=_LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_function=desired_replicas),  # type: ignore[no-untyped-call]  # ray's
    )


_COMMON: Final[dict[str, Any]] = {
    "max_ongoing_requests": _NEVER_FULL,
    "health_check_period_s": _HEALTH_CHECK_S,
    "health_check_timeout_s": _HEALTH_TIMEOUT_S,
    "logging_config": QUIET,
}


def _actor_options(resources: dict[str, float]) -> dict[str, Any]:
    """resources: as in the configuration. What is not stated is not reserved: neither are processor cores."""
    named: dict[str, Any] = {key: resources[key] for key in ("num_cpus", "num_gpus", "memory") if key in resources}
    custom = {key: value for key, value in resources.items() if key not in named}
    return {"num_cpus": 0, **named, "resources": custom, "runtime_env": {"env_vars": ENVIRONMENT}}


def _of_embedded(config: Config) -> tuple[dict[str, float], bool]:
    """What an ingress replica needs, with its embedded backends, and whether it and they allow a second one beside it."""
    resources = dict(config.server.ingress_resources)
    embedded = [backend for model in config.models for backend in model.backends if backend.placement == "embedded"]
    for backend in embedded:
        for key, value in backend.resources.items():
            resources[key] = resources.get(key, 0.0) + value
    if resources.get("num_gpus", 0.0) > 1:  # of which Ray gives no parts
        resources["num_gpus"] = math.ceil(resources["num_gpus"])
    return resources, config.server.ingress_surge and all(backend.surge for backend in embedded)


def _key(model: ModelSection, backend: Backend) -> tuple[str, str, str]:
    return model.name, model.version, backend.label


def _deployment_names(config: Config) -> dict[tuple[str, str, str], str]:
    """By `_key` of each backend in replicas: unique, and of characters that Serve's names and files may have."""
    backends = ((model, backend) for model in config.models for backend in model.backends)
    keys = [_key(model, backend) for model, backend in backends if backend.placement == "replicas"]
    joined = Counter("-".join(key) for key in keys)
    names = {}
    for key in keys:
        name = "-".join(key)
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        if joined[name] > 1:  # model m of version 1-2 and model m-1 of version 2
            plain = f"{plain}-{_digest(repr(key))}"
        elif plain != name:
            plain = f"{plain}-{_digest(name)}"
        names[key] = plain
    return names


def _versioned(deployment: serve.Deployment, content: str) -> serve.Deployment:
    """Say what the deployment is made of: Serve restarts its replicas when that changes; not told, at every deploy."""
    return deployment.options(version=f"{__version__}-{content}", _internal=True)


def _content(model: ModelSection, backend: Backend) -> str:
    """Digest of all that a backend's answers depend on: `Terms` and numbers of replicas may change beside it."""
    own = backend.model_dump(include={"name", "kind", "sessions", "isolation", "hang_timeout_s"}) | backend.options()
    return _digest(repr((model.name, model.version, model.declared(), sorted(own.items()))))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def port_owner(cluster: str, application: str) -> str:
    """Who shares ports: the ingress replicas of one application of one cluster. cluster: its id, in hexadecimal."""
    return f"{cluster}/{application}"


def _metrics_dir(own: str | None) -> Path:
    """Raises: ConfigError."""
    return make_run_dir(run_dir_of(serve.get_replica_context().app_name, own))


async def _asked(model: str) -> ClientsWish:
    return await asked_for(serve.get_replica_context().app_name, model)
