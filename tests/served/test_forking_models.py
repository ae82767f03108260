"""A model that begins processes of its own, in the gateway's process: what is said to them is not said to the gateway."""

import signal
from collections.abc import Iterator

import pytest

from tests.served.gateway_process import Served, served
from tests.served.test_own_models import ask

pytestmark = pytest.mark.slow

# Its output: how the processes ended that the input asks for.
MODEL = """
import multiprocessing
import os
import signal
import subprocess
import time

import numpy as np

context = multiprocessing.get_context("fork")


def ended(process):
    process.join(20)
    code = process.exitcode
    process.kill()
    return 0 if code is None else code


class Forking:
    inputs = [("x", "INT64", (1,))]
    outputs = [("codes", "INT64", (-1,))]

    def predict(self, inputs):
        return {"codes": np.array(codes(-inputs["x"][0]))}


def codes(number):
    if number < 0:  # also as it is tried at the start
        with context.Pool(1) as pool:
            return pool.map(abs, [-5, 5])
    if number == 0:
        with subprocess.Popen(["sleep", "60"]) as process:
            process.terminate()
            return [process.wait(20)]
    processes = [context.Process(target=time.sleep, args=[60], daemon=True) for _ in range(10)]
    for process in processes:
        process.start()
        os.kill(process.pid, signal.SIGINT)  # which they ignore
        os.kill(process.pid, number)
    return [ended(process) for process in processes]
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tmp_path_factory.mktemp("model") / "forking.py"
    model.write_text(MODEL)
    with served(model, "--no-ray") as found:
        yield found


def codes(running: Served, what: int) -> list[object]:
    return ask(running.http, "forking", {"name": "x", "datatype": "INT64", "shape": [1], "data": [what]})["codes"]


def test_its_pool_works(running: Served) -> None:
    assert codes(running, 1) == [5, 5]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_its_forks_however_early_it_comes_and_not_the_gateway(running: Served, number: int) -> None:
    assert codes(running, -number) == [-number] * 10
    assert codes(running, 0) == [-signal.SIGTERM]
    assert running.process.poll() is None
