"""`gateway serve` in several processes without Ray: one begins them and hears the signals, the others are this module.

For models that are on servers elsewhere: what a process holds is then its listeners and its connections there.
"""

import contextlib
import os
import pickle
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from backends.model_folders import own_path, take_path, with_path
from gateway.commands.one_process import Beside, run
from gateway.config import Config
from gateway.process.announcement import announcer
from gateway.process.command_line import ended
from gateway.process.console import Speech, set_up
from gateway.process.ports import PortClaims
from gateway.process.prints import apart
from gateway.process.siblings import Bound, Siblings, bind, close, sockets_of
from gateway.process.supervisor import ENDING, SERVING, Tell


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What a process is told by its standard input."""

    parent: int
    path: tuple[list[str], str | None]
    config: Config
    speech: Speech
    run_dir: Path
    owner: str
    bound: Mapping[str, Sequence[int]] = field(default_factory=dict)
    first: bool = False


def serve_side_by_side(config: Config, speech: Speech, run_dir: Path) -> int:
    """Serve until a signal ends it. Call on the main thread. Returns the exit code. Raises: OSError, if a port is taken."""
    owner = secrets.token_hex()
    claims = PortClaims(config.server, owner=owner)
    claims.claim()
    reserved = bind(config.server)  # and never listened on: it keeps ports that were chosen for us
    try:
        ports = {f"{protocol}_port": sockets[0].getsockname()[1] for protocol, sockets in reserved.items()}
        config = config.model_copy(update={"server": config.server.model_copy(update=ports)})
        work = _Work(
            parent=os.getpid(),
            path=own_path(),
            config=config,
            speech=speech,
            run_dir=run_dir,
            owner=owner,
        )
        return Siblings(config.server, partial(_begin, work)).run()
    finally:
        close(reserved)
        claims.release()


def _begin(work: _Work, bound: Bound, tell: int, first: bool) -> "subprocess.Popen[bytes]":
    numbers = {protocol: [each.fileno() for each in sockets] for protocol, sockets in bound.items()}
    # The path is handed on, as whoever started us has it; -P: without the working directory, which may hold anything.
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "gateway.commands.side_by_side", str(tell)],
        stdin=subprocess.PIPE,
        stdout=None if first else subprocess.DEVNULL,  # which is for who is told that all is ready
        pass_fds=[tell, *(number for each in numbers.values() for number in each)],
        env=with_path(),
        start_new_session=True,  # Ctrl-C is for who began it
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as stdin:
        stdin.write(pickle.dumps(replace(work, bound=numbers, first=first)))
    return child


def main() -> None:
    """One of the processes."""
    work: _Work = pickle.load(sys.stdin.buffer)  # noqa: S301  # our parent wrote it
    take_path(*work.path)
    tell = Tell(int(sys.argv[1]), work.parent)
    sys.argv[:] = ["gateway"]
    set_up(work.speech)
    sys.exit(ended("gateway", lambda: _serve(work, tell), failed=1, for_good=True))


def _serve(work: _Work, tell: Tell) -> int:
    with apart() as results:
        announce = announcer(work.config, results, quiet=work.speech.quiet)

        def ready(*served: object) -> None:
            if work.first:
                announce(*served)  # type: ignore[arg-type]  # as it was called
            tell(SERVING)

        run(work.config, work.run_dir, ready, beside=Beside(work.owner, sockets_of(work.bound), lambda: tell(ENDING)))
    return 0


if __name__ == "__main__":
    main()
