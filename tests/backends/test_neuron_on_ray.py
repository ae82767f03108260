"""Ray hands NeuronCores out, one owner each; the backend keeps to them. On fake cores and the double of torch_neuronx."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backends
from backends.base import LoadFailed
from tests.backends.contract import LINEAR, SPEC, expected

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own resource warnings

ROOT = Path(__file__).parent.parent.parent


class Replica:
    """What a backend replica does: load, open a session on the core it was given, run."""

    def __init__(self, model: str) -> None:
        self.model = backends.load("neuron", {"model": model}, SPEC)
        until = time.monotonic() + 20
        while True:  # Ray hands a core on when it knows its owner dead, which may be before the runtime does
            try:
                self.session = self.model.open_session(0)
                return
            except LoadFailed as exc:
                if "another process owns it" not in str(exc) or time.monotonic() > until:
                    raise
            time.sleep(0.1)

    def core(self) -> str:
        return os.environ["NEURON_RT_VISIBLE_CORES"]

    def run(self, x: np.ndarray) -> np.ndarray:
        return self.session.run({"INPUT0": x}, {})["OUTPUT0"]


@pytest.fixture(scope="module")
def artifact(neuron_double: Path) -> str:
    path = neuron_double / "on-ray"
    backends.build("neuron", path, SPEC, source=LINEAR, options={}, row_sizes=(4,), target="inf2")
    return str(path)


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The actor class, on a Ray of its own with four neuron_cores that do not exist."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "neuron_double")]),
        # Cores of their own: the process of the tests holds two of the double's for as long as it lives.
        "NEURON_DOUBLE_DIR": str(tmp_path_factory.mktemp("cores")),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NEURON_RT_VISIBLE_CORES")  # or Ray would count the test's own two as the node's
        ray.init(
            address="local", num_cpus=4, resources={"neuron_cores": 4}, include_dashboard=False,
            runtime_env={"env_vars": environment}, log_to_driver=False,
        )  # fmt: skip
        try:
            yield ray.remote(Replica)
        finally:
            ray.shutdown()


def test_four_replicas_get_a_core_each_and_a_fifth_waits(artifact: str, replica: Any) -> None:
    replicas = [replica.options(num_cpus=0, resources={"neuron_cores": 1}).remote(artifact) for _ in range(4)]
    assert sorted(ray.get([each.core.remote() for each in replicas], timeout=120)) == ["0", "1", "2", "3"]
    x = np.random.default_rng(0).random((4, 16), np.float32)
    for outputs in ray.get([each.run.remote(x) for each in replicas], timeout=60):
        np.testing.assert_allclose(outputs, expected(x), rtol=1e-5, atol=1e-5)

    fifth = replica.options(num_cpus=0, resources={"neuron_cores": 1}).remote(artifact)
    ready, _ = ray.wait([fifth.core.remote()], timeout=1)
    assert ready == []
    ray.kill(replicas[2])
    freed = {"0", "1", "2", "3"} - set(ray.get([replicas[i].core.remote() for i in (0, 1, 3)], timeout=60))
    assert ray.get(fifth.core.remote(), timeout=180) in freed


def test_a_replica_without_cores_refuses_to_load(artifact: str, replica: Any) -> None:
    with pytest.raises(ray.exceptions.RayActorError, match=r"resources: \{neuron_cores: 1\}"):
        ray.get(replica.options(num_cpus=0).remote(artifact).core.remote(), timeout=60)
