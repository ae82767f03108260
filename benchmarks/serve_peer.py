"""The peer of benchmarks/overhead.py: a plain Ray Serve application that does the gateway's work on `linear`.

FastAPI ingress with the v2 JSON in and out and `@serve.batch`, on Serve's own HTTP proxy; the same model behind Serve's own
gRPC proxy with the same protobuf service. Prints `ready` and serves until its standard input ends.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

app = FastAPI()
SERVICER = "tritonclient.grpc.service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server"


class Linear:
    def __init__(self, model: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    # As Ray's documentation of dynamic batching has it; no wait, which is the best setting for latency here.
    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.0)
    async def predict(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        outputs = self._session.run(None, {"INPUT0": np.concatenate(rows)})[0]
        return [outputs[index : index + 1] for index in range(len(rows))]


@serve.deployment(max_ongoing_requests=256)
@serve.ingress(app)
class Rest(Linear):
    @app.post("/v2/models/linear/infer")
    async def infer(self, body: dict[str, Any]) -> dict[str, Any]:
        (tensor,) = body["inputs"]
        row = np.asarray(tensor["data"], np.float32).reshape(tensor["shape"])
        output = await self.predict(row)
        data = {"name": "OUTPUT0", "datatype": "FP32", "shape": list(output.shape), "data": output.ravel().tolist()}
        return {"model_name": "linear", "model_version": "1", "outputs": [data]}


@serve.deployment(max_ongoing_requests=256)
class Grpc(Linear):
    async def ModelInfer(self, request: Any) -> Any:
        from tritonclient.grpc import service_pb2 as pb  # protobuf's classes cannot travel in the deployment's pickle

        row = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(tuple(request.inputs[0].shape))
        output = await self.predict(row)
        response = pb.ModelInferResponse(model_name="linear", model_version="1", raw_output_contents=[output.tobytes()])
        response.outputs.add(name="OUTPUT0", datatype="FP32", shape=output.shape)
        return response


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--model", default="models/linear.onnx")
    arguments = parser.parse_args()
    model = str(Path(arguments.model).resolve())
    # Serve's proxy pickles requests, and tritonclient's messages say they are of a module that only exists under another name.
    shim = tempfile.mkdtemp()
    Path(shim, "grpc_service_pb2.py").write_text("from tritonclient.grpc.service_pb2 import *\n")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (shim, os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, shim)
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 << 20,
    )
    serve.start(
        http_options=HTTPOptions(host="127.0.0.1", port=arguments.http_port),
        grpc_options=gRPCOptions(port=arguments.grpc_port, grpc_servicer_functions=[SERVICER]),
        logging_config={"enable_access_log": False},
    )
    serve.run(Rest.bind(model), name="rest", route_prefix="/")
    serve.run(Grpc.bind(model), name="grpc", route_prefix="/grpc")
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
