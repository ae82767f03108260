"""What a gateway says when it is ready: where it listens, what it serves, and a command that asks it something.

The first line is for programs, and stays as it is. The request is the smallest that a model takes, with the content it was
warmed up with: ones, true and "1". So it is answered where probing was.
"""

import json
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TextIO, TypeAlias
from urllib.parse import quote

from backends.base import ONE_AS_TEXT, ModelSpec
from backends.datatypes import NUMPY
from backends.regular_file import file_bytes
from gateway.config import Config, ServerSection
from gateway.process.console import words
from gateway.process.systemd import READY, tell_systemd
from gateway.process.x509 import certificates
from gateway.protocols.smallest import WITHOUT_JSON, needed_inputs, smallest_shape

_NAMED: Final = 20  # models; who does not read the pipe must not stop us
_LONGEST: Final = 16_000  # characters of a command, for the same reason
_WRITTEN: Final = 16  # elements; more of them are left to the shell
_ELEMENTS: Final = 1 << 20  # of a request that is worth printing
_ELEMENT_BYTES: Final = 8  # at most, with what is around them
_ARGUMENT_BYTES: Final = 100_000  # Linux takes 128 KiB in one
_RAW: Final = {"body": '"[]"', "content_type": '"application/json"'}  # of a raw model, which hardly takes a body of no type


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model version that is served. probed: it answered when it was warmed up."""

    name: str
    version: str
    spec: ModelSpec
    probed: bool


Announce: TypeAlias = Callable[[int | None, int | None, Sequence[ReadyModel]], None]
"""Called once, with the ports of HTTP and gRPC and what is served."""


def announcer(config: Config, out: TextIO, *, quiet: bool) -> Announce:
    """Say on standard output that it is ready, and to systemd if that waits. quiet: only to programs."""

    def announce(http: int | None, grpc: int | None, models: Sequence[ReadyModel]) -> None:
        told = ready_line(config.server, http, grpc)
        if not quiet:
            ready = {(model.name, model.version) for model in models}
            left_out = [known for model in config.models if (known := (model.name, model.version)) not in ready]
            told += "\n" + ready_words(config.server, http, models, left_out)
        _print(told, out)
        tell_systemd(READY)

    return announce


def _print(text: str, out: TextIO) -> None:
    """At once and in one piece. Whoever has seen the first line may close the pipe: no reason to end, nor is a full disk."""
    try:
        print(text, file=out, flush=True)
    except OSError as exc:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # else the interpreter would complain at its end
        if not isinstance(exc, BrokenPipeError):
            words.warning("standard output: %s: nothing more is written to it; %s", exc.strerror, text.partition("\n")[0])


def ready_line(server: ServerSection, http: int | None, grpc: int | None) -> str:
    """For programs: "gateway ready http=HOST:PORT grpc=HOST:PORT", of the listeners that there are."""
    parts = [f"{name}={server.host}:{port}" for name, port in (("http", http), ("grpc", grpc)) if port is not None]
    return " ".join(("gateway ready", *parts))


def ready_words(
    server: ServerSection, http: int | None, models: Sequence[ReadyModel], left_out: Sequence[tuple[str, str]]
) -> str:
    """For people: the models, and a request to one of them. left_out: names and versions of models that are not loaded."""
    titles = _titles((model.name, model.version) for model in models)
    absent = _titles(left_out, apart={model.name for model in models})
    lines = [f"models: {named(titles) or 'none'}" + (f"; not loaded: {named(absent)}" if absent else "")]
    if http is not None:
        lines += [_what_goes_on(server, own_url(server, http))] if server.shows_page else []
        url, how = _by_curl(server, http)
        commands = [(not model.probed, len(text), text) for model in models if (text := curl_command(url, model, server, how))]
        untried, length, command = min(commands, default=(False, 0, ""))
        if 0 < length <= _LONGEST:
            own = (["content"] if untried else []) + [what for _, what in _own(server)]
            lines += [f"try it, with {named(own)} of your own:" if own else "try it:", f"  {command}"]
    return "\n".join(lines)


def _titles(models: Iterable[tuple[str, str]], apart: Collection[str] = ()) -> list[str]:
    """What models are called: with their versions, unless 1 is the only one. apart: names that have others elsewhere."""
    versions: dict[str, list[str]] = {}
    for name, version in models:
        versions.setdefault(name, []).append(version)
    return [
        name if known == ["1"] and name not in apart else f"{name} (version {', '.join(known)})"
        for name, known in versions.items()
    ]


def own_url(server: ServerSection, port: int) -> str:
    """Where this machine reaches a server's HTTP; without a slash at the end."""
    scheme = "http" if server.tls is None else "https"
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def named(names: Iterable[str]) -> str:
    """A list for a person, of bounded length."""
    known = list(dict.fromkeys(names))
    return ", ".join(known[:_NAMED]) + (f" and {len(known) - _NAMED} more" if len(known) > _NAMED else "")


def _what_goes_on(server: ServerSection, url: str) -> str:
    """The address of the status page; where that asks for a key, which no browser shows, the command that can show one."""
    if server.access is None or "status" in server.access.open:
        return f"what goes on, in a browser: {url}/"
    trusts = " --ca CA" if server.tls is not None else ""
    shows = " --cert CERTIFICATE --key ITS_KEY" if server.tls is not None and server.tls.client_ca is not None else ""
    return f"what goes on: gateway top {url}{trusts}{shows} --api-key-file KEY_FILE"


def _by_curl(server: ServerSection, port: int) -> tuple[str, str]:
    """The server's URL by a name that its certificate has, and the options that curl needs before it."""
    url, how = own_url(server, port), ""
    if server.tls is not None:
        shown, host = os.path.abspath(server.tls.certificate), url.removeprefix("https://").rpartition(":")[0]
        how += f" --cacert {shlex.quote(shown)}"  # whoever vouches for it: curl trusts what it is given itself
        names = _names_in(shown)
        if names and host.strip("[]") not in names:
            name = names[0].replace("*", "gateway", 1)
            url, how = f"https://{name}:{port}", f"{how} --resolve {shlex.quote(f'{name}:{port}:{host}')}"
    return url, how + "".join(option for option, _ in _own(server))


def _names_in(path: str) -> tuple[str, ...]:
    """Of the first certificate in a file."""
    try:
        return next(certificates(file_bytes(path))).names
    except (OSError, StopIteration):  # it is on other nodes only, or has just changed
        return ()


def _own(server: ServerSection) -> Iterator[tuple[str, str]]:
    """What a command leaves to who types it, beside its content: an option of curl, and what that is of."""
    if server.tls is not None and server.tls.client_ca is not None:
        yield " --cert CERTIFICATE --key ITS_KEY", "a client's certificate"
    if server.access is not None and "infer" not in server.access.open:
        yield " -H 'X-Api-Key: KEY'", "an API key"


def curl_command(url: str, model: ReadyModel, server: ServerSection, how: str = "") -> str | None:
    """A command for bash or zsh that sends a model its smallest request; None: that would be too large.

    url: of the server, without a slash at the end. how: options that this takes, each after a blank.
    """
    spec = model.spec
    given = _RAW if spec.raw else {}
    sent = [tensor for tensor in spec.inputs if tensor.name in given] or needed_inputs(spec)
    inputs = [(tensor, smallest_shape(tensor)) for tensor in sent]
    if sum(prod(shape) for _, shape in inputs) > min(_ELEMENTS, server.limits.body_bytes // _ELEMENT_BYTES):
        return None
    if spec.decoupled:
        return _stream_command(url, model, how)
    body = _Word()
    body.text('{"inputs": [')
    binary_bytes = 0
    for position, (tensor, shape) in enumerate(inputs):
        body.text(", " if position else "")
        head: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": shape}
        if tensor.datatype in WITHOUT_JSON:
            size = prod(shape) * NUMPY[tensor.datatype].itemsize
            body.text(json.dumps(head | {"parameters": {"binary_data_size": size}}))
            binary_bytes += size
        else:
            body.text(json.dumps(head)[:-1] + ', "data": [')
            body.repeat(given.get(tensor.name) or _element(tensor.datatype), prod(shape))
            body.text("]}")
    unreadable = any(tensor.datatype in WITHOUT_JSON for tensor in spec.outputs)
    readable = [{"name": tensor.name} for tensor in spec.outputs if tensor.datatype not in WITHOUT_JSON]
    if unreadable and readable:
        body.text(f'], "outputs": {json.dumps(readable)}}}')
    else:
        body.text('], "parameters": {"binary_data_output": true}}' if unreadable else "]}")
    address = f"{url}/v2/models/{quote(model.name, safe='')}/infer"
    curl = f"curl -sS{how} {shlex.quote(address)}"
    if unreadable and not readable:
        curl += " --output answer.bin"
    if binary_bytes:
        written = f"{{ printf %s {body.word}; head -c {binary_bytes} /dev/zero; }}"
        return f"{written} | {curl} -H 'Inference-Header-Content-Length: {body.bytes}' --data-binary @-"
    return _sent(body, curl)


def _stream_command(url: str, model: ReadyModel, how: str) -> str | None:
    """For a decoupled model: shows each part when it comes; None: the model takes or gives what JSON lacks."""
    spec = model.spec
    if any(tensor.datatype in WITHOUT_JSON for tensor in (*needed_inputs(spec), *spec.outputs)):
        return None
    body = _Word()
    body.text("{")
    for position, tensor in enumerate(needed_inputs(spec)):
        body.text(f"{', ' if position else ''}{json.dumps(tensor.name)}: ")
        count = prod(smallest_shape(tensor))
        if count == 1:
            body.text(_element(tensor.datatype))
        else:
            body.text("[")
            body.repeat(_element(tensor.datatype), count)
            body.text("]")
    body.text("}")
    address = f"{url}/v2/models/{quote(model.name, safe='')}/generate_stream"
    return _sent(body, f"curl -sS -N{how} {shlex.quote(address)}")


def _sent(body: "_Word", curl: str) -> str:
    if body.bytes > _ARGUMENT_BYTES:
        return f"printf %s {body.word} | {curl} --data-binary @-"
    return f"{curl} -d {body.word}"


class _Word:
    """A text as one word of a shell. bytes: of the text; it is ASCII."""

    def __init__(self) -> None:
        self.bytes = 0
        self._parts: list[tuple[str, int]] = []

    def text(self, text: str) -> None:
        self._add(text, 1)

    def repeat(self, element: str, count: int) -> None:
        """So many elements with commas between them; many of them are left to the shell to write."""
        if count > _WRITTEN:
            self._add(f"{element},", count - 1)
            self._add(element, 1)
        else:
            self.text(", ".join([element] * count))

    @property
    def word(self) -> str:
        word, text = "", ""
        for part, count in self._parts:
            if count == 1:
                text += part
            else:
                word += f'{shlex.quote(text)}"$(printf {shlex.quote(part + "%.0s")} $(seq {count}))"'
                text = ""
        return word + shlex.quote(text)

    def _add(self, part: str, count: int) -> None:
        self._parts.append((part, count))
        self.bytes += len(part) * count


def _element(datatype: str) -> str:
    return {"BYTES": json.dumps(ONE_AS_TEXT.decode()), "BOOL": "true"}.get(datatype, "1")
