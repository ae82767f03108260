"""`gateway serve` on Ray, in two processes: `serve_on_ray` supervises, and starts this module as the one that runs Ray."""

import logging
import os
import pickle
import re
import sys
from importlib.util import find_spec

from backends.model_folders import own_path, take_path, with_path
from gateway.config import Config
from gateway.errors import ConfigError
from gateway.process.announcement import announcer
from gateway.process.command_line import ended
from gateway.process.console import Speech, set_up, step, words
from gateway.process.ports import check_ports
from gateway.process.prints import apart, flush
from gateway.process.supervisor import Tell, supervise


def serve_on_ray(config: Config, speech: Speech) -> int:
    """Serve until a signal ends it, or the Ray that was started for it is lost. Call on the main thread.

    Returns the exit code; does not return after a second Ctrl-C. Raises: ConfigError, without Ray.
    """
    if find_spec("ray") is None:
        raise ConfigError("Ray is not installed: install `ray[serve]`, or have one plain process with --no-ray")
    _check_address(config)
    # The path is handed on, as whoever started us has it; -P: without the working directory, which may hold anything.
    command = [sys.executable, "-P", "-m", "gateway.commands.on_ray"]
    work = pickle.dumps((os.getpid(), own_path(), config, speech))
    return supervise(command, work, drain_timeout_s=config.server.drain_timeout_s, env=with_path())


def _check_address(config: Config) -> None:
    """What can be told without Ray, whose import takes seconds: its address, and ports that no other gateway may share."""
    wanted = config.ray.address
    key, asked = ("ray.address", wanted) if wanted else ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"))
    if asked == "local":
        check_ports(config.server, owner=None)
    elif asked and asked != "auto" and not re.fullmatch(r"[^/\s]+:\d+", asked):
        raise ConfigError(f"{key}: {asked!r}: expected host:port, auto or local")


def main() -> None:
    """The process that runs Ray; argument and standard input are from `serve_on_ray`."""
    work: tuple[int, tuple[list[str], str | None], Config, Speech]
    work = pickle.load(sys.stdin.buffer)  # noqa: S301  # our parent wrote it
    parent, path, config, speech = work
    take_path(*path)
    tell = Tell(int(sys.argv[1]), parent)
    sys.argv[:] = ["gateway"]  # Ray looks beside it for code
    set_up(speech)
    try:
        code = ended("gateway", lambda: _run(config, speech, tell), failed=1, for_good=True)
    except Exception:  # told here: Ray's hook would first tell its head, which may be gone
        words.error("gateway: the process that runs Ray has failed", exc_info=True)
        code = 1
    flush()
    os._exit(code)  # Ray is ended by our parent; by itself it would take its time


def _run(config: Config, speech: Speech, tell: Tell) -> int:
    # Ray reads these when it is imported. They are about what it copies here from its processes.
    if speech.format == "json":
        os.environ |= {"RAY_DISABLE_WORKER_LOG_PREFIX": "1", "RAY_DEDUP_LOGS": "0"}
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        os.environ["RAY_COLOR_PREFIX"] = "0"
    # That its clusters want a token, docs/deploy.md says.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    with apart() as results:
        with step("importing Ray"):
            from gateway.cluster import run_on_ray  # takes a second, which others need not pay

        return run_on_ray(config, announcer(config, results, quiet=speech.quiet), speech, tell)


if __name__ == "__main__":
    main()
