"""What the listener makes of bytes that no gRPC client sends."""

import pytest

from tests.grpc_server.odd_bytes import OTHERWISE, outcomes
from tests.grpc_server.serving import on_loop, serving

pytestmark = pytest.mark.slow


@on_loop
async def test_odd_bytes_get_a_clear_answer_or_end_what_they_concern() -> None:
    expected = {name: answer for answer, names in OTHERWISE.items() for name in names}
    async with serving() as served:
        told = await outcomes(served.url)
        assert served.repository.pending == 0
    assert {name: answer.partition(":")[0] for name, answer in told.items()} == {
        name: expected.get(name, "OK") for name in told
    }
    assert not expected.keys() - told.keys()
