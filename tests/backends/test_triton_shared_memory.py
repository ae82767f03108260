"""The region that a session shares with Triton: where memory is short, and whose it is."""

import os
import secrets
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from backends import triton_region_locks as locks
from tests.served.small_disk import small_disk

ROOT = Path(__file__).parent.parent.parent
PROGRAM = textwrap.dedent("""
    import numpy as np
    from tritonclient.grpc import service_pb2

    from backends.base import ExecutionFailed
    from backends.triton_shared_memory import AbandonedRegions, SessionRegion

    class Connection:
        url = "h:8001"
        def register(self, name, byte_size): ...
        def unregister(self, name): ...
        def regions(self): return []

    def fill(size):
        region.reserve([size])
        tensor = service_pb2.ModelInferRequest.InferInputTensor()
        region.take(tensor, (size,), np.uint8)[...] = 7

    region = SessionRegion(Connection(), AbandonedRegions())
    fill(1 << 20)
    try:
        fill(4 << 20)
    except ExecutionFailed as exc:
        print(exc)
    fill(1 << 20)
""")


@pytest.mark.slow
def test_a_region_for_which_there_is_no_memory_fails_that_run_and_not_the_process() -> None:
    command = [*small_disk(Path("/dev/shm")), sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "shared memory of 4194304 bytes in /dev/shm: No space left on device\n")


def test_a_region_is_left_when_its_process_is_gone_though_a_fork_of_that_lives_on() -> None:
    region = f"gateway-1-{secrets.token_hex(6)}"
    locks.hold(region, "h:8001")
    ours, its = socket.socketpair()
    fork = os.fork()
    if not fork:
        ours.close()
        its.send(b".")
        its.recv(1)
        os._exit(0)
    try:
        its.close()
        ours.recv(1)
        assert region not in locks.left()
        locks.leave(region)
        assert locks.left()[region] == "h:8001"
    finally:
        ours.close()
        os.waitpid(fork, 0)
        locks.remove(region)
    assert region not in locks.left()
