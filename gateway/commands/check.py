"""`gateway check`: says what is wrong with a configuration, all at once, or what would be served."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from gateway.config import Config
from gateway.configuring.argument import document_of, opened
from gateway.configuring.check import looked_at
from gateway.documents.faults import ConfigFaults, Fault
from gateway.process.command_line import add_command
from gateway.process.console import words
from gateway.process.prints import apart


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `check` to the command line."""
    check = add_command(
        commands,
        "check",
        "tell everything that is wrong with a configuration, without serving it",
        "gateway check configs/examples/linear.yaml",
        "gateway check --load configs/examples/linear.yaml",
    )
    check.add_argument("config", metavar="CONFIG", help="a YAML file; -: standard input")
    check.add_argument("--load", action="store_true", help="also load each model in this process, and run it")
    check.add_argument("--json", action="store_true", help="faults and models as JSON, for programs")
    check.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    """Exit codes: 0, it is valid; 2, it is not."""
    with apart() as results:
        return _told(arguments, results)


def _told(arguments: argparse.Namespace, results: TextIO) -> int:
    config: Config | None = None
    failing: tuple[str, ...] = ()
    try:
        document, config, faults = looked_at(document_of(opened(arguments.config)))
        source = document.source
        if arguments.load and config is not None and not faults:
            from gateway.commands.trial import tried  # which imports all that serves

            faults, failing = asyncio.run(tried(document, config))
    except ConfigFaults as exc:  # no YAML
        faults, source = exc.faults, exc.faults[0].source
    if arguments.json:
        print(json.dumps(as_json(source, config, faults, failing), indent=2), file=results)
    else:
        told = rendered(source, config, faults, failing, loaded=arguments.load)
        if faults:
            words.error("%s", told)
        else:
            print(told, file=results)
    return 2 if faults else 0


def rendered(
    source: str, config: Config | None, faults: Sequence[Fault], failing: Sequence[str] = (), *, loaded: bool = False
) -> str:
    """What the user reads: a line for each fault, or for each model. failing: models that raised when they were run."""
    if faults or config is None:
        return ConfigFaults([*faults]).message + f"\n{source}: {len(faults)} {'fault' if len(faults) == 1 else 'faults'}"
    lines = []
    for model in config.models:
        slo = f"p99 {model.slo.p99_ms:g} ms" if model.slo else "no SLO"
        lanes = ", ".join(f"{b.label} ({b.placement}, {b.sessions} session{'s' * (b.sessions != 1)})" for b in model.backends)
        ran = ", loaded, but it raised when it was run" if model.name in failing else ", loaded and run" if loaded else ""
        lines.append(f"{model.name} version {model.version}: {slo}, policy {model.batching.policy}, on {lanes}{ran}")
    but = ""
    if failing:
        but = f", but {', '.join(failing)} {'fails' if len(failing) == 1 else 'fail'} on made-up input (see the warning above)"
    return "\n".join([*lines, f"{source}: valid{but}"])


def as_json(source: str, config: Config | None, faults: Sequence[Fault], failing: Sequence[str] = ()) -> dict[str, Any]:
    """The same for programs. models: empty, if the file is at fault in itself."""
    models = [
        {"name": model.name, "version": model.version, "backends": [backend.label for backend in model.backends]}
        for model in (config.models if config is not None else ())
    ]
    told = []
    for fault in faults:
        parts = asdict(fault)
        told.append({"file": parts.pop("source"), **parts, "message": str(fault)})
    return {"file": source, "valid": not faults, "failing": list(failing), "models": models, "faults": told}
