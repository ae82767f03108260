"""`gateway serve | check | compile | route`: the only reader of arguments and environment."""

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

from gateway.check import servable
from gateway.check_command import add_parser as add_check_parser
from gateway.config import Config, load_config
from gateway.errors import ConfigError, GatewayError
from gateway.predict import add_parser as add_predict_parser
from gateway.routing.explain import add_parser as add_route_parser
from gateway.run_dir import fresh_run_dir, make_run_dir


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0, 1 (the gateway failed), 2 (usage or configuration)."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        code: int = arguments.run(arguments)
        return code
    except ConfigError as exc:
        print(exc.message, file=sys.stderr)
        return 2
    except GatewayError as exc:
        print(f"gateway: {exc.message}", file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"gateway: {exc}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gateway", description="A model-serving gateway that batches to an SLO.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve the models of a configuration file")
    serve.add_argument("config", metavar="CONFIG", help="a YAML file, see configs/gateway.yaml")
    serve.add_argument("--no-ray", action="store_true", help="one plain process, without Ray")
    serve.add_argument("--host", help="address to listen on, instead of server.host")
    serve.add_argument("--http-port", type=int, metavar="N", help="instead of server.http_port; 0: any free port")
    serve.add_argument("--grpc-port", type=int, metavar="N", help="instead of server.grpc_port; 0: any free port")
    serve.add_argument("--ray-address", metavar="ADDRESS", help="instead of ray.address; local: a cluster of its own")
    serve.set_defaults(run=_serve)
    add_check_parser(commands)
    build = commands.add_parser("compile", help="make the artifacts that a configuration's backends say how to build")
    build.add_argument("config", metavar="CONFIG")
    build.add_argument("models", metavar="MODEL", nargs="*", help="only these; none: all")
    build.set_defaults(run=_compile)
    add_predict_parser(commands)
    add_route_parser(commands)
    return parser


def _compile(arguments: argparse.Namespace) -> int:
    from gateway.compile import compile_config

    compile_config(load_config(arguments.config), names=arguments.models)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    cluster = arguments.ray_address or os.environ.get("RAY_ADDRESS")
    config = servable(arguments.config, here=arguments.no_ray or cluster in (None, "", "local"))
    given = {"host": arguments.host, "http_port": arguments.http_port, "grpc_port": arguments.grpc_port}
    server = config.server.model_copy(update={key: value for key, value in given.items() if value is not None})
    for key in ("http_port", "grpc_port"):
        port = getattr(server, key)
        if port is not None and not 0 <= port <= 65535:
            raise ConfigError(f"--{key.replace('_', '-')}: {port}: expected 0 to 65535")
    ray = config.ray.model_copy(update={"address": arguments.ray_address} if arguments.ray_address else {})
    config = config.model_copy(update={"server": server, "ray": ray})
    if arguments.no_ray:
        return _serve_plain(config)
    from gateway.cluster import run_on_ray  # Ray takes a second to import, which `check` and `--no-ray` need not pay

    return run_on_ray(config, announce)


def _serve_plain(config: Config) -> int:
    for model in config.models:
        for backend in model.backends:
            if backend.placement != "embedded":
                raise ConfigError(
                    f"model '{model.name}': backend {backend.label} has placement {backend.placement}, which needs Ray: "
                    "start without --no-ray, or set placement: embedded"
                )
    own = config.server.run_dir
    with contextlib.nullcontext(own) if own else fresh_run_dir() as directory:
        run_dir = Path(directory)
        use_run_dir(run_dir)
        shutil.rmtree(run_dir / "regions", ignore_errors=True)  # registered with a server that is gone
        import uvloop

        uvloop.run(_serve_until_signal(config, run_dir))
    return 0


def use_run_dir(run_dir: Path) -> None:
    """Make the node's directory and point prometheus_client at it. Before gateway.metrics is imported: see there.

    Raises: ConfigError.
    """
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(make_run_dir(run_dir))


async def _serve_until_signal(config: Config, run_dir: Path) -> None:
    from gateway.ingress import Ingress

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    ingress = Ingress(config, run_dir=run_dir)
    started = asyncio.ensure_future(ingress.start())
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
    if started.done():
        try:
            announce(config, *started.result())
            await stopped
        finally:
            stopped.cancel()
            await ingress.drain()
    else:
        started.cancel()
        await asyncio.gather(started, return_exceptions=True)
        await ingress.drain()


def announce(config: Config, http: int | None, grpc: int | None) -> None:
    """Tell on standard output, in one line a program can read, that requests are answered and where."""
    parts = [f"{name}={config.server.host}:{port}" for name, port in (("http", http), ("grpc", grpc)) if port is not None]
    print("gateway ready", *parts, flush=True)


if __name__ == "__main__":
    sys.exit(main())
