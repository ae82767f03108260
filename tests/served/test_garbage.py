"""What a gateway has loaded is not searched for garbage again and again, and what it has unloaded is freed."""

import json
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest

from tests.served.gateway_process import served

pytestmark = pytest.mark.slow

MODEL = '''
import gc
import weakref

import numpy as np

known = []


class Cyclic:
    """Tells in how many objects garbage is looked for, in how many not, and how many of its kind there are, after a look."""

    inputs = (("x", "FP32", (-1, 1)),)
    outputs = tuple((name, "FP32", (-1, 1)) for name in ("left_out", "looked_at", "alive"))

    def __init__(self):
        self.me = self
        known.append(weakref.ref(self))

    def predict(self, inputs):
        gc.collect()
        alive = sum(one() is not None for one in known)
        found = {"left_out": gc.get_freeze_count(), "looked_at": len(gc.get_objects()), "alive": alive}
        return {name: np.full_like(inputs["x"], number) for name, number in found.items()}
'''


def told(address: str, model: str) -> dict[str, float]:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0]}]}).encode()
    with urllib.request.urlopen(f"http://{address}/v2/models/{model}/infer", data=body, timeout=20) as response:
        return {output["name"]: output["data"][0] for output in json.load(response)["outputs"]}


def change(address: str, model: str, verb: str) -> None:
    urllib.request.urlopen(f"http://{address}/v2/repository/models/{model}/{verb}", data=b"", timeout=20).close()


def test_what_is_loaded_is_left_out_and_what_is_unloaded_is_freed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODEL)
    backend = f'kind: python, model: "{tmp_path}/own.py:Cyclic"'
    config = tmp_path / "gateway.yaml"
    config.write_text(f"""
server: {{model_control: true}}
models:
  - {{name: here, backends: [{{{backend}}}]}}
  - {{name: other, backends: [{{{backend}}}]}}
  - {{name: apart, backends: [{{{backend}, isolation: process}}]}}
""")
    with served(config, "--no-ray") as gateway:
        before = told(gateway.http, "here")
        assert before["left_out"] > 10_000
        assert told(gateway.http, "apart")["left_out"] > 10_000  # a process of its own
        change(gateway.http, "other", "unload")
        told(gateway.http, "here")  # looks through everything
        after = told(gateway.http, "here")
        # A look itself takes out of account what can be no garbage, such as tuples of numbers, so fewer are left.
        assert after["left_out"] > 0.5 * before["left_out"]
        assert after["looked_at"] < 0.1 * after["left_out"]
        assert after["alive"] == before["alive"] - 1


# in a process of its own, as the tests leave nothing out

PROGRAM = textwrap.dedent("""
    import gc, json, weakref
    from gateway.garbage import leave_out

    class Cyclic:
        def __init__(self):
            self.me = self

    def kept(number):
        made = [Cyclic() for _ in range(number)]
        gc.collect()
        return made

    def looked_through():
        return sum(len(gc.get_objects(generation=generation)) for generation in range(3))

    loaded = kept(20_000)
    leave_out()
    cache = kept(2_000)
    few = looked_through()
    cache += kept(2_000)
    many = looked_through()
    gone = weakref.ref(cache[0])
    cache.clear()
    gc.collect()
    before = gone() is None
    while gone() is not None and len(cache) < 1_000_000:
        cache += kept(4_000)
    print(json.dumps({"few": few, "many": many, "before": before, "after": gone() is None, "kept": len(cache)}))
""")


def test_what_is_made_later_and_stays_is_left_out_and_freed_once_there_is_half_as_much_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=60)
    told = json.loads(done.stdout)
    assert 2_000 <= told["few"] < 3_000
    assert told["many"] < 1_000
    assert (told["before"], told["after"]) == (False, True)
    assert told["kept"] < 100_000
