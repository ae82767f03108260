"""`minilm` by a plain Ray Serve application, for benchmarks/peers_minilm.py: FastAPI ingress and `@serve.batch`, two replicas.

Prints `ready` and serves until its standard input ends. The model is PEER_MODEL's file, the largest batch PEER_ROWS.
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import HTTPOptions

app = FastAPI()


@serve.deployment(max_ongoing_requests=256, num_replicas=2)
@serve.ingress(app)
class Minilm:
    def __init__(self) -> None:
        from embedder import Embedder  # type: ignore[import-not-found]  # the text of benchmarks/peer_embedders.py, beside it

        self._embedder = Embedder()

    # As Ray's documentation of dynamic batching has it; no wait, which is the best setting for latency here.
    @serve.batch(max_batch_size=int(os.environ.get("PEER_ROWS", "1")), batch_wait_timeout_s=0.0)
    async def predict(self, rows: list[Any]) -> list[Any]:
        return list(self._embedder.run(rows))

    @app.post("/v2/models/minilm/infer")
    async def infer(self, body: dict[str, Any]) -> dict[str, Any]:
        from embedder import row, told

        answer: dict[str, Any] = told(await self.predict(row(body)))
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of embedder.py")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(arguments.folder), os.environ.get("PYTHONPATH"))))
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200 << 20,
    )
    serve.start(
        http_options=HTTPOptions(host="127.0.0.1", port=arguments.http_port), logging_config={"enable_access_log": False}
    )
    serve.run(
        Minilm.bind(),  # type: ignore[attr-defined]  # as the decorators leave it
        name="minilm",
        route_prefix="/",
    )
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()  # type: ignore[no-untyped-call]  # Ray's own
    ray.shutdown()


if __name__ == "__main__":
    main()
