"""The gateway beside a real Triton server: same status, same keys, same bytes, or a reason why not."""

from collections.abc import Iterator

import pytest

from tests.parity.cases import CASES, Case, alike, observe
from tests.parity.generate import GENERATE_CASES, GenerateCase, generate
from tests.parity.servers import CLIENTS, Client, Server, both_servers
from tests.triton_server import require_triton

pytestmark = [pytest.mark.slow, pytest.mark.triton]

Clients = dict[str, dict[str, Client]]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The gateway and Triton."""
    require_triton()
    with both_servers(tmp_path_factory.mktemp("parity")) as started:
        yield started


@pytest.fixture(scope="module")
def clients(servers: dict[str, Server]) -> Iterator[Clients]:
    """Every client, of both."""
    made = {kind: {name: Client(kind, server) for name, server in servers.items()} for kind in CLIENTS}
    try:
        yield made
    finally:
        for pair in made.values():
            for client in pair.values():
                client.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_gateway_answers_as_triton_does(case: Case, clients: Clients) -> None:
    different = {}
    for kind in case.clients:
        found = {name: observe(case, client) for name, client in clients[kind].items()}
        if not alike(found["gateway"], found["triton"]):
            different[kind] = found
    if case.differs:
        assert different, f"there is no difference any more, but a reason for one: {case.differs}"
    else:
        assert not different


@pytest.mark.parametrize("case", GENERATE_CASES, ids=lambda case: case.name)
def test_the_gateway_generates_as_triton_does(case: GenerateCase, servers: dict[str, Server]) -> None:
    found = {name: generate(case, server.http) for name, server in servers.items()}
    assert (found["gateway"] != found["triton"]) is bool(case.differs), found


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
