"""Compare the gateway with a real Triton server, case by case and client by client.

    python -m benchmarks.parity [--only TEXT] [--write FILE]

Starts both servers with the same models (tests/parity/models.py) and runs tests/parity/cases.py with tritonclient's http,
grpc, http.aio and grpc.aio clients. Prints one line per case and client; with --write a Markdown table of what differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.parity.cases import CASES, Case, alike, observe
from tests.parity.servers import CLIENTS, Client, both_servers


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the gateway with a real Triton server.")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", type=Path, help="where to put the table of differences")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in case.name]
    if not cases:
        parser.error(f"--only: got {arguments.only!r}, expected a part of a case's name, such as {CASES[0].name!r}")
    with tempfile.TemporaryDirectory(prefix="parity-") as directory, both_servers(Path(directory)) as servers:
        clients = {kind: {name: Client(kind, server) for name, server in servers.items()} for kind in CLIENTS}
        equal, deliberate, unexplained = 0, [], 0
        for case in cases:
            for kind in case.clients:
                found = {name: observe(case, client) for name, client in clients[kind].items()}
                same = alike(found["gateway"], found["triton"])
                equal += same
                if case.differs and not same:
                    deliberate.append((case, kind, found))
                elif not same:
                    unexplained += 1
                verdict = "same" if same else f"differs: {case.differs or 'UNEXPLAINED'}"
                print(f"{kind:8} {case.name:55} {verdict}", flush=True)
                if not same:
                    for name, value in found.items():
                        print(f"         {name:8} {value!r:.600}")
        for pair in clients.values():
            for client in pair.values():
                client.close()
    print(f"{equal} the same, {len(deliberate)} different on purpose, {unexplained} different without a reason")
    if arguments.write is not None:
        arguments.write.write_text(_table(deliberate))
    return 1 if unexplained else 0


def _table(deliberate: list[tuple[Case, str, dict[str, Any]]]) -> str:
    """Markdown, one row per reason and pair of answers."""
    rows: dict[tuple[str, str, str], dict[str, None]] = {}
    for case, _, found in deliberate:
        row = (case.differs, _short(found["triton"]), _short(found["gateway"]))
        rows.setdefault(row, {})[case.name] = None
    lines = [
        "# Where the gateway differs from Triton on purpose",
        "",
        "Written by `python -m benchmarks.parity --write docs/parity.md`; the cases are in `tests/parity/cases.py`.",
        "",
        "| why | Triton 2.51 | gateway | cases |",
        "|---|---|---|---|",
    ]
    lines += [f"| {why} | {theirs} | {ours} | {', '.join(names)} |" for (why, theirs, ours), names in rows.items()]
    return "\n".join(lines) + "\n"


def _short(found: Any) -> str:
    if isinstance(found, dict) and "error" in found:
        return str(found["error"]).removeprefix("StatusCode.")
    if isinstance(found, tuple) and found and isinstance(found[0], int):
        return str(found[0])
    return str(found).lower() if isinstance(found, bool) else "answered"


if __name__ == "__main__":
    sys.exit(main())
