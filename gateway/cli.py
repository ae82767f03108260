"""The command line of `gateway`: alone reads arguments and environment."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final

from gateway.errors import ConfigError
from gateway.garbage import collecting_seldom
from gateway.process.command_line import FAULTY, UNREAD, add_command, add_speech, ended, program, speech
from gateway.process.completion import completed_by_files
from gateway.process.console import set_up, step, words
from gateway.process.interrupts import ENDED_AT_ONCE, ctrl_c_ends_at_once
from gateway.process.prints import apart

if TYPE_CHECKING:
    from gateway.config import Config
    from gateway.configuring.guess import Guess

# Each command, as they are listed, with the module of `gateway.commands` that adds it, unless it is one of this module.
_COMMANDS: Final = {
    "serve": None,
    "sagemaker": "sagemaker",
    "init": None,
    "compile": None,
    "package": "package",
    "deploy": "deploy",
    "status": "status",
    "undeploy": "undeploy",
    "check": "check",
    "predict": "predict",
    "batch": "batch",
    "route": "explain",
    "top": "top",
    "why": "why",
    "key": "key",
    "examples": "examples",
}
_PLUGINS: Final = "PYDANTIC_DISABLE_PLUGINS"

EXIT_CODES: Final = {
    0: "done; a server: ended by a signal, in order",
    1: "it failed: the message says how",
    FAULTY: "the command or the configuration is faulty",
    129: "ended by a terminal that closed; a server: only in its first moment, before it can end in order",
    ENDED_AT_ONCE: "ended at once by Ctrl-C; a server: by the second one",
    UNREAD: "whoever read its output has gone",
    143: "ended by SIGTERM; a server: only in its first moment, before it can end in order",
}


def main(argv: list[str] | None = None) -> int:
    """Gives one of EXIT_CODES."""
    typed = sys.argv[1:] if argv is None else argv
    return ended("gateway", lambda: _run(typed), failed=1, for_good=argv is None)


def _run(typed: list[str]) -> int:
    with ctrl_c_ends_at_once():  # while modules are imported
        arguments = parser(*typed[:1]).parse_args(typed)
    set_up(speech(arguments))
    return int(arguments.run(arguments))


def parser(typed: str = "") -> argparse.ArgumentParser:
    """The whole command line. typed: the first word of one; if it is a command, no other is there, nor what others import."""
    root = program(
        "gateway",
        "A model-serving gateway that batches to an SLO.",
        "gateway examples iris",
        "gateway serve configs/examples/iris.yaml",
        "gateway serve --help",
        exit_codes=EXIT_CODES,
    )
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for name in [typed] if typed in _COMMANDS else _COMMANDS:
        _add(name, commands)
    add_speech(root, quiet="only warnings and errors; serve: and the ready line")
    return root


def _add(name: str, commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    module = _COMMANDS[name]
    if module is None:
        {"serve": _add_serve, "init": _add_init, "compile": _add_compile}[name](commands)
        return
    added = importlib.import_module(f"gateway.commands.{module}").add_parser(commands)
    if name == "sagemaker":
        added.set_defaults(run=_sagemaker)


def _add_compile(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    build = add_command(
        commands,
        "compile",
        "make the artifacts that a configuration's backends say how to build",
        "gateway compile configs/examples/linear.yaml",
        "gateway compile configs/examples/minilm-cpu.yaml minilm-int8",
    )
    _add_config(build)
    build.add_argument("models", metavar="MODEL", nargs="*", help="only these; none: all")
    build.set_defaults(run=_compile)


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = add_command(
        commands,
        "serve",
        "serve a model, or the models of a configuration file",
        "gateway serve models/linear.onnx",
        "gateway serve configs/examples/linear.yaml",
        "gateway serve configs/examples/linear.yaml --http-port 9000 --grpc-port 0",
        "gateway serve configs/examples/minilm.yaml --ray",
        more="In one plain process; on Ray where the configuration needs it (placement: replicas, autoscaling, several "
        "ingresses), or --ray, --ray-address, ray.address or RAY_ADDRESS asks for it. When requests are answered, standard "
        "output gets the line `gateway ready http=HOST:PORT grpc=HOST:PORT`. Ctrl-C drains; a second one ends it at once.",
    )
    _add_model(command)
    ray = command.add_mutually_exclusive_group()
    ray.add_argument("--ray", action="store_true", help="on Ray, also where one process would do")
    ray.add_argument("--no-ray", action="store_true", help="one plain process; refused if the configuration needs Ray")
    command.add_argument("--host", help="address to listen on, instead of server.host")
    command.add_argument("--http-port", type=int, metavar="N", help="instead of server.http_port; 0: any free port")
    command.add_argument("--grpc-port", type=int, metavar="N", help="instead of server.grpc_port; 0: any free port")
    command.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="on this Ray, instead of ray.address; host:port, auto, or local: one of its own",
    )
    command.set_defaults(run=_serve)


def _add_init(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = add_command(
        commands,
        "init",
        "write the configuration with which a model would be served",
        "gateway init models/linear.onnx",
        "gateway init models/linear.onnx -o linear.yaml",
    )
    _add_model(command)
    output = command.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="instead of standard output; paths in it count from there"
    )
    completed_by_files(output)
    command.set_defaults(run=_init)


def _add_config(command: argparse.ArgumentParser) -> None:
    config = command.add_argument(
        "config", metavar="CONFIG", help="a YAML file: `gateway examples` has some, `gateway examples reference` every key"
    )
    completed_by_files(config)


def _add_model(command: argparse.ArgumentParser) -> None:
    model = command.add_argument(
        "config",
        metavar="MODEL|CONFIG",
        help="model.onnx, model.pt2, model.pt (TorchScript), FILE.py:Class, FILE.py:function, a folder of these, a Triton "
        "model repository, a folder with a gateway.yaml, a package as made for SageMaker (a folder or model.tar.gz), or a YAML "
        "file: `gateway examples` has some",
    )
    example = command.add_argument(
        "--example", type=Path, metavar="FILE", help="one request (v2 JSON, or .npz), of a model that does not say its inputs"
    )
    for argument in (model, example):
        completed_by_files(argument)


def _compile(arguments: argparse.Namespace) -> int:
    from gateway.commands.compile import compile_config
    from gateway.config import config_of
    from gateway.configuring.argument import document_of

    with apart() as results:
        report = partial(print, file=results, flush=True)
        compile_config(config_of(document_of(arguments.config)), names=arguments.models, report=report)
    return 0


def _init(arguments: argparse.Namespace) -> int:
    from gateway.configuring.argument import is_configuration, opened
    from gateway.configuring.guess import written
    from gateway.documents.whole_file import asked_by, write_whole

    if is_configuration(opened(arguments.config)):
        raise ConfigError(f"{Path(arguments.config).absolute()}: is a configuration already: expected a model")
    # Before the model's code is imported, which may change the current folder.
    output: Path | None = arguments.output and arguments.output.absolute()
    folder = output.parent if output else Path.cwd()
    if output is not None and output.exists():
        raise ConfigError(f"-o: {output}: exists: name another file, or remove it")
    with apart() as results:
        text = written(_guessed(arguments, beside=output), folder)
        if output is None:
            print(text, end="", file=results)
        else:
            with asked_by("-o"):
                write_whole(output, text)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    given = {key: value for key in ("host", "http_port", "grpc_port") if (value := getattr(arguments, key)) is not None}
    if arguments.no_ray and arguments.ray_address:
        raise ConfigError(f"--ray-address: {arguments.ray_address}: not with --no-ray; leave one of them out")
    cluster = arguments.ray_address or os.environ.get("RAY_ADDRESS")
    asked = arguments.ray or bool(cluster)
    with collecting_seldom(), apart(more=True):
        with ctrl_c_ends_at_once(), _without_plugins():
            from gateway.commands.serve import serve
            from gateway.config import ServerSection, listening
            from gateway.configuring.argument import is_configuration, opened
            from gateway.configuring.check import servable
            from gateway.configuring.ingresses import decided
            from gateway.configuring.need_of_ray import uses_ray
            from gateway.process.machine import cores
            from gateway.process.ports import check_ports
        with step(f"reading {arguments.config}"):
            arguments.config = opened(arguments.config)
        if is_configuration(arguments.config):
            if arguments.example is not None:
                raise ConfigError("--example: only for a model: a configuration states its inputs")
            with step(f"reading {arguments.config}"), _without_plugins():  # a package is compared with its hashes
                config = servable(arguments.config, here=arguments.no_ray or cluster in (None, "", "local"))
        else:
            server = listening(ServerSection(), given, called=_flag)
            if arguments.no_ray or not asked or cluster == "local":  # on a running Ray, an ingress of ours may share them
                check_ports(server, owner=None)  # which takes less time than the model
            config = _told(arguments)
    ray = config.ray.model_copy(update={"address": arguments.ray_address} if arguments.ray_address else {})
    config = config.model_copy(update={"server": listening(config.server, given, called=_flag), "ray": ray})
    config = decided(config, cores())
    return serve(config, on_ray=uses_ray(config, asked=asked, refused=arguments.no_ray), speech=speech(arguments))


def _sagemaker(arguments: argparse.Namespace) -> int:
    from gateway.commands.sagemaker import sagemaker

    return sagemaker(arguments, os.environ)


@contextlib.contextmanager
def _without_plugins() -> Iterator[None]:
    """Within it, pydantic looks for no plugins, for which it would read every installed package.

    To be left before a model's code is imported, which may want some.
    Source: https://docs.pydantic.dev/latest/concepts/plugins/
    """
    if _PLUGINS in os.environ:
        yield
        return
    os.environ[_PLUGINS] = "__all__"
    try:
        yield
    finally:
        del os.environ[_PLUGINS]


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _told(arguments: argparse.Namespace) -> "Config":
    """Of a model, told on standard error as the file that would say the same."""
    from gateway.config import parse_config
    from gateway.configuring.guess import written

    folder = Path.cwd()  # before the model's code is imported, which may change it
    found = _guessed(arguments)
    words.info("# `gateway init %s` writes this configuration:\n%s", quote(arguments.config), written(found, folder))
    with _without_plugins():
        return parse_config(found.document, source=arguments.config)


def _guessed(arguments: argparse.Namespace, *, beside: Path | None = None) -> "Guess":
    from gateway.configuring.guess import guess

    with step(f"reading {arguments.config}"), ctrl_c_ends_at_once():
        return guess(arguments.config, example=arguments.example, environment=os.environ, beside=beside)


if __name__ == "__main__":
    sys.exit(main())
