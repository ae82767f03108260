"""`gateway top`: what goes on in running gateways, in a terminal, each second anew.

A thread for each gateway looks at its status, so that one that hangs holds up neither the keys nor the others. All else happens
on the main thread, which alone writes to the terminal and puts it back as it was.
"""

import argparse
import json
import os
import queue
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from gateway.commands.rates import Figures, Statuses, Told
from gateway.errors import BackendUnreachable, ConfigError
from gateway.process.command_line import add_command
from gateway.process.credentials import NOTHING_SHOWN, Credentials, add_credentials, credentials, told, unanswered

if TYPE_CHECKING:
    from gateway.commands.top_screen import Shown

_DEFAULT: Final = "http://127.0.0.1:8000"
_PATH: Final = "/v2/status"
_EVERY_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
_KEYS_S: Final = 0.1  # between looks at the keyboard, what has come, and the size of the terminal
_WINDOWS_S: Final = (10.0, 60.0)
_LEAST_SECONDS: Final = 0.2
_MOST_SECONDS: Final = 60.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `top` to the command line."""
    top = add_command(
        commands,
        "top",
        "what goes on in running gateways: rates, latency, queues, backends, cost; each second anew",
        "gateway top",
        "gateway top 127.0.0.1:8000 --once",
    )
    top.add_argument(
        "urls", metavar="URL", nargs="*", default=[_DEFAULT], help=f"http://host:port or host:port of a gateway ({_DEFAULT})"
    )
    top.add_argument("--once", action="store_true", help="look for --seconds, print one plain table, and end")
    top.add_argument("--json", action="store_true", help="the same for programs")
    top.add_argument("--seconds", type=float, default=2.0, metavar="N", help="how long --once and --json look (2)")
    add_credentials(top)
    top.set_defaults(run=_top)


def _top(arguments: argparse.Namespace) -> int:
    if not _LEAST_SECONDS <= arguments.seconds <= _MOST_SECONDS:
        raise ConfigError(f"--seconds: {arguments.seconds:g}: expected {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}")
    shown = credentials(arguments)
    watched = [Watched(StatusClient(url, shown)) for url in dict.fromkeys(arguments.urls)]
    if arguments.once or arguments.json or not _redrawn():
        return _once(watched, arguments.seconds, as_json=arguments.json)
    return _live(watched)


def _redrawn() -> bool:
    """Whether standard output is a terminal whose screen can be drawn anew."""
    from rich.console import Console

    return sys.stdout.isatty() and not Console().is_dumb_terminal


class StatusClient:
    """Asks one gateway for its status, on one connection as long as that lasts: so it is one process that answers."""

    def __init__(self, url: str, shown: Credentials = NOTHING_SHOWN) -> None:
        """Raises: ConfigError, for what is no address."""
        self.url = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{url}: expected the address of a gateway's HTTP port, such as {_DEFAULT}")
        if "://" not in url and port is None:
            raise ConfigError(f"{url}: no port: write {url}:8000, if that is the gateway's HTTP port")
        self.url = self.url.rstrip("/")
        self._path = parts.path.rstrip("/") + _PATH
        self._shown = shown
        self._connection: HTTPConnection
        if parts.scheme == "https":
            self._connection = HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=shown.context())
        else:
            shown.check_plain(f"http://{parts.netloc}")
            self._connection = HTTPConnection(host, port, timeout=_TIMEOUT_S)

    def look(self) -> dict[str, Any]:
        """One status. Raises: BackendUnreachable, with what to do."""
        for again in (True, False):
            kept = self._connection.sock is not None
            try:
                self._connection.request("GET", self._path, headers={"Accept": "application/json", **self._shown.headers})
                answer = self._connection.getresponse()
                body = answer.read()
                break
            except (ConnectionResetError, BrokenPipeError) as exc:
                self._connection.close()
                if not (kept and again):  # else it had only ended what was idle
                    raise self._unreachable(exc) from exc
            except (OSError, HTTPException) as exc:
                self._connection.close()
                raise self._unreachable(exc) from exc
        if answer.status in (401, 403, 429):
            raise BackendUnreachable(self._shown.refused(self.url, answer.status, body.decode(errors="replace")).message)
        if answer.status == 400 and (words := told(body.decode(errors="replace"))):  # it speaks TLS, say
            raise BackendUnreachable(f"{self.url}: {words}")
        try:
            if answer.status != 200:
                raise ValueError
            status: dict[str, Any] = json.loads(body)
            status["models"], status["time_s"], status["processes"], status["counted"]  # what else speaks HTTP has none
        except (ValueError, KeyError, TypeError):
            raise BackendUnreachable(
                f"{self.url}: answers {answer.status} at {_PATH}, and no status: expected the HTTP port of a "
                "gateway (8000 unless set; 8001 is gRPC), of this version or a younger one"
            ) from None
        return status

    def close(self) -> None:
        self._connection.close()

    def _unreachable(self, exc: Exception) -> BackendUnreachable:
        if isinstance(exc, OSError) and (words := self._shown.failed(exc, self.url)):
            return BackendUnreachable(words)
        return unanswered(exc, self.url, _TIMEOUT_S)


@dataclass(slots=True)
class Watched:
    """One gateway, as far as it is known. heard_s, silent_s: when it answered last, and since when it does not (monotonic)."""

    client: StatusClient
    statuses: Statuses = field(default_factory=Statuses)
    heard_s: float | None = None
    silent_s: float | None = None
    error: str = ""

    def take(self, found: Told | BackendUnreachable, now_s: float) -> None:
        if isinstance(found, BackendUnreachable):
            self.error = found.message
            self.silent_s = self.silent_s if self.silent_s is not None else now_s
        else:
            self.statuses.add(found)
            self.heard_s, self.silent_s, self.error = now_s, None, ""

    def seen(self, span_s: float, now_s: float) -> "Shown":
        from gateway.commands.top_screen import Shown

        status = self.statuses.last if self.heard_s is not None else None
        models = [(model, self.statuses.figures(model, span_s)) for model in status["models"]] if status is not None else []
        silent_s = now_s - self.silent_s if self.silent_s is not None else 0.0
        return Shown(self.client.url, status, models, self.error, silent_s)


def _once(watched: Sequence[Watched], seconds: float, *, as_json: bool) -> int:
    with ThreadPoolExecutor(len(watched)) as threads:
        for look, wait_s in ((_looked, seconds), (_looked_anew, 0.0)):
            for each, found in zip(watched, threads.map(look, watched), strict=True):
                each.take(found, time.monotonic())
            time.sleep(wait_s)
    for each in watched:
        each.client.close()
    if as_json:
        print(json.dumps({"gateways": [_document(each, seconds) for each in watched]}, indent=2))
    else:
        from gateway.commands.top_screen import table

        reached = [each for each in watched if not each.error]
        print("\n\n".join(table(each.seen(seconds, time.monotonic())) for each in reached), end="\n" if reached else "")
    failed = [each.error for each in watched if each.error]
    if failed and not as_json:
        raise BackendUnreachable("\n".join(failed))
    return 1 if failed else 0


def _looked(watched: Watched) -> Told | BackendUnreachable:
    try:
        return watched.client.look()
    except BackendUnreachable as exc:
        return exc


def _looked_anew(watched: Watched) -> Told | BackendUnreachable:
    """As `_looked`, but another status than the last, which a gateway keeps for half a second."""
    until_s = time.monotonic() + _EVERY_S
    while True:
        found = _looked(watched)
        if isinstance(found, BackendUnreachable) or watched.heard_s is None or time.monotonic() >= until_s:
            return found
        if found["time_s"] != watched.statuses.last["time_s"]:
            return found
        time.sleep(_KEYS_S)


def _document(watched: Watched, seconds: float) -> dict[str, Any]:
    """For programs. What is not known is null; a percentile above the histogram's last bound too, which stands beside it."""
    if watched.error:
        return {"url": watched.client.url, "error": watched.error}
    status = watched.statuses.last
    head = {key: status[key] for key in ("version", "host", "process", "processes", "ready")}
    models = [_model_document(model, watched.statuses.figures(model, seconds)) for model in status["models"]]
    return {"url": watched.client.url, "error": None, **head, "models": models}


def _model_document(model: Told, figures: Figures | None) -> dict[str, Any]:
    told: dict[str, Any] = {key: model[key] for key in ("name", "version", "state", "slo_ms", "usd_per_hour")}
    of_backends: dict[str, dict[str, Any]] = {}
    if figures is not None:
        for key in ("span_s", "requests_per_s", "failed_per_s", "in_time", "rows_per_batch", "padding", "usd_per_million"):
            told[key] = getattr(figures, key)
        for key, value in (("p50_ms", figures.p50_ms), ("p99_ms", figures.p99_ms)):
            above = value == float("inf")
            told[key] = None if above else value
            if above:
                told[f"{key}_above"] = model["latency"]["bounds_ms"][-1]
        of_backends = {
            each.name: {"share": each.share, "rows_per_batch": each.rows_per_batch, "batch_ms": each.batch_ms}
            for each in figures.backends
        }
    kept = ("name", "state", "detail", "role", "sessions", "busy", "queue_requests", "queue_rows", "usd_per_hour")
    told["backends"] = [
        {key: backend[key] for key in kept} | of_backends.get(backend["name"], {}) for backend in model["backends"]
    ]
    return told


def _live(watched: Sequence[Watched]) -> int:
    """Until q or Ctrl-C. The terminal is left as it was, also when SIGTERM or SIGHUP ends it or Ctrl-Z stops it."""
    from rich.console import Console
    from rich.live import Live

    from gateway.commands.top_screen import screen

    console = Console(highlight=False)
    told: queue.SimpleQueue[tuple[Watched, Told | BackendUnreachable]] = queue.SimpleQueue()
    for each in watched:
        threading.Thread(target=_keep_looking, args=(each, told), daemon=True).start()
    window = 0

    def kept_drawn(live: Live, pressed: Callable[[float], str], come: set[int]) -> bool:
        """Until a signal has come, or q, which is the end: that gives False."""
        nonlocal window
        drawn = None
        while not come:
            key = pressed(_KEYS_S)
            if key in ("q", "Q"):
                return False
            window = (window + (key == "w")) % len(_WINDOWS_S)
            if _take_all(told) or drawn != (window, console.size):
                drawn = window, console.size
                now_s = time.monotonic()
                seen = [each.seen(_WINDOWS_S[window], now_s) for each in watched]
                live.update(screen(seen, _WINDOWS_S[window], *console.size), refresh=True)
        return True

    try:
        with _ended_by_signals(), _stops() as come:
            while True:
                with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
                    if not kept_drawn(live, pressed, come):
                        return 0
                if signal.SIGTSTP in come:
                    _stop()
                come.clear()
    except KeyboardInterrupt:
        return 0


def _keep_looking(watched: Watched, told: "queue.SimpleQueue[tuple[Watched, Told | BackendUnreachable]]") -> None:
    while True:
        begun_s = time.monotonic()
        told.put((watched, _looked(watched)))
        time.sleep(max(0.0, begun_s + _EVERY_S - time.monotonic()))


def _take_all(told: "queue.SimpleQueue[tuple[Watched, Told | BackendUnreachable]]") -> bool:
    """Take in what has come; gives whether anything has."""
    come = False
    while not told.empty():
        watched, found = told.get()
        watched.take(found, time.monotonic())
        come = True
    return come


def _no_key(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Gives what waits so many seconds for a key; empty: none was pressed. Without a terminal there are none."""
    if sys.stdin is None or not sys.stdin.isatty():  # None: it is closed
        yield _no_key
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(wait_s: float) -> str:
        if not select.select([terminal], [], [], wait_s)[0]:
            return ""
        typed = os.read(terminal, 64).decode(errors="replace")
        if not typed:  # it was closed
            time.sleep(wait_s)
        return re.sub("\x1b.*", "", typed, flags=re.DOTALL)[:1]  # arrows and the like are no letters

    tty.setcbreak(terminal, termios.TCSANOW)
    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    def ended(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, ended) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _stops() -> Iterator[set[int]]:
    """Gives the signals that have come: SIGTSTP (Ctrl-Z), before which the screen is to be left, and SIGCONT, after which it is
    to be taken again: what somebody stopped by SIGSTOP had no time to leave it, and shells leave the terminal as they like it.
    """
    come: set[int] = set()

    def has_come(number: int, frame: object) -> None:
        come.add(number)

    before = {number: signal.signal(number, has_come) for number in (signal.SIGTSTP, signal.SIGCONT)}
    signal.siginterrupt(signal.SIGCONT, False)  # else who sets up the terminal after `bg` and `fg` gets an error
    try:
        yield come
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop() -> None:
    """As SIGTSTP does by itself; returns when it goes on."""
    ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, ours)
