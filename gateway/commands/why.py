"""`gateway why`: what made requests late, as a running gateway has recorded it, and what would have served them."""

import argparse
import json
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from gateway.batching.recorded_file import ModelRecording, joined, unpacked
from gateway.documents.whole_file import asked_by, write_whole
from gateway.errors import BackendUnreachable, ConfigError, GatewayError, NotFound
from gateway.process.command_line import add_command, url_of
from gateway.process.console import printable_lines, step
from gateway.process.credentials import NOTHING_SHOWN, Credentials, add_credentials, credentials
from gateway.why.report import answer, as_json, life_told, of_request, told

_TIMEOUT_S: Final = 30.0
_HERE: Final = "http://127.0.0.1:8000"
_TRIES: Final = 12  # connections for each ingress process, as the kernel picks one by chance


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `why` to the command line."""
    why = add_command(
        commands,
        "why",
        "what made requests late, and what would have served them",
        "gateway why",
        "gateway why http://127.0.0.1:8000 --model minilm",
        "gateway why --request my-id",
        "gateway why --save late.msgpack",
        "gateway why late.msgpack --json",
        more="A gateway keeps its last decisions in memory. They are replayed here, bit for bit; each request that was refused "
        "or late gets one cause: queue, batch, padding, stall, cold start or cut-off (docs/why.md). What one more session, "
        "another cap or another backend would have served is simulated.",
    )
    why.add_argument(
        "where", metavar="FILE|URL", nargs="?", default=_HERE, help=f"of a gateway, or what --save wrote ({_HERE})"
    )
    why.add_argument("--model", default="", metavar="MODEL", help="only this one (all)")
    why.add_argument("--request", default="", metavar="ID", help="only the request that its client called so")
    why.add_argument("--save", type=Path, metavar="FILE", help="write the recording, to be asked later")
    why.add_argument("--json", action="store_true", help="all that is known, for programs")
    add_credentials(why)
    why.set_defaults(run=_why)


def _why(arguments: argparse.Namespace) -> int:
    where: str = arguments.where
    if url := url_of(where):
        where, data = url, asked(url, arguments.model, credentials(arguments))
    else:
        try:
            data = Path(where).read_bytes()
        except OSError as exc:
            raise ConfigError(
                f"{where}: {exc.strerror}: expected a file that --save wrote, or http://host:port of a gateway"
            ) from exc
    recordings = unpacked(data, where)
    chosen = [each for each in recordings if arguments.model in ("", each.model)]
    if not chosen:
        known = ", ".join(dict.fromkeys(each.model for each in recordings)) or "none"
        raise NotFound(f"{where}: nothing is recorded of model '{arguments.model}'; models there: {known}")
    if arguments.save is not None:
        if len(chosen) < len(recordings):
            data = joined([data], arguments.model)
        with asked_by("--save"):
            write_whole(arguments.save, data)
        print(f"{arguments.save}: {len(data)} bytes; ask it by: gateway why {arguments.save}")
        return 0
    return _tell(chosen, where, arguments.request, as_objects=arguments.json)


def _tell(recordings: list[ModelRecording], where: str, own_id: str, *, as_objects: bool) -> int:
    answers = []
    for each in recordings:
        with step(f"replaying {each.model}"):
            answers.append(answer(each, where))
    if own_id:
        lives = of_request(answers, own_id)
        if not lives:
            count = sum(len(lane.diagnosis.history.requests) for each in answers for lane in each.lanes)
            count += sum(len(each.unserved) for each in answers)
            raise NotFound(
                f"{where}: no request '{own_id}' is among the {count} that are recorded: it came before them, or its client "
                "gave it no `id`"
            )
        said = "\n\n".join(life_told(life) for life in lives)
        print(json.dumps(lives, indent=2) if as_objects else printable_lines(said))
    else:
        print(json.dumps(as_json(answers), indent=2) if as_objects else printable_lines(told(answers)))
    return 0


def asked(url: str, model: str, shown: Credentials = NOTHING_SHOWN) -> bytes:
    """The recordings of every ready model version that records, or of those of one model, from every process behind an address.

    Raises: NotFound; BackendUnreachable, if no gateway answers there; GatewayError, with its words.
    """
    ready = _ready(url, shown)
    paths = [f"{_path(name)}/versions/{version}" for name, version in ready if model in ("", name)]
    files: list[bytes] = []
    refused: GatewayError | None = None
    for path in paths or ([_path(model)] if model else []):  # of what is not ready: which says why
        seen: set[str] = set()
        wanted = tries = 1
        while tries <= _TRIES * wanted and len(seen) < wanted:
            tries += 1
            try:
                data = shown.asked(f"{url}{path}/why", timeout_s=_TIMEOUT_S)
            except BackendUnreachable:
                raise
            except GatewayError as exc:
                refused = exc
                break
            (recording,) = unpacked(data, url)
            wanted = recording.processes
            if recording.process not in seen:
                seen.add(recording.process)
                files.append(data)
    if not files:
        raise refused or NotFound(f"{url}: no model is ready")
    return joined(files)


def _path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}"


def _ready(url: str, shown: Credentials) -> list[tuple[str, str]]:
    """Name and version of each model that is ready. By the status: a key for `why` is one for that."""
    address = f"{url}/v2/status"
    try:
        status: Any = json.loads(shown.asked(address, timeout_s=_TIMEOUT_S))
        return [(model["name"], model["version"]) for model in status["models"] if model["state"] == "READY"]
    except (ValueError, KeyError, TypeError) as exc:
        raise BackendUnreachable(f"what answers at {address} is no gateway of this kind") from exc
