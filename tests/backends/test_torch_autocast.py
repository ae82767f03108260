"""With precision bf16 weights are cast once, and outputs are what autocast gives of fp32 weights, to the bit."""

import copy
from typing import Any

import numpy as np
import pytest

import backends
from backends.base import ModelSpec, TensorSpec

torch = pytest.importorskip("torch", reason="torch is not installed")
nn = torch.nn


def convolutional() -> Any:
    """A factory of convolutions of every kind, with a normalisation."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 6, 3, padding="same"),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 3, stride=2),
        nn.Conv2d(4, 4, 3, groups=2, padding=1, padding_mode="reflect"),
        nn.Flatten(2),
        nn.Conv1d(4, 3, 5, bias=False),
        nn.ConvTranspose1d(3, 2, 5),
        nn.Unflatten(2, (1, 17, 17)),
        nn.Conv3d(2, 2, (1, 3, 3)),
        nn.ConvTranspose3d(2, 1, (1, 3, 3)),
        nn.Flatten(),
        nn.Linear(289, 5),
        nn.LayerNorm(5),
    )


class Attending(nn.Module):
    """What torch.nn has of attention, whose fast path takes the weights of its layers themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layer = copy.deepcopy(layer)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decoder = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        x = x.unflatten(1, (2, 32))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(self.decoder(self.encoder(self.layer(x)), x))


class Tied(nn.Module):
    """A weight that an embedding holds as well, and a bias that two layers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last, self.other = nn.Embedding(9, 64), nn.Linear(64, 9), nn.Linear(64, 9)
        self.rows.weight = self.last.weight
        self.other.bias = self.last.bias

    def forward(self, x: Any) -> Any:
        x = self.rows((x.abs() * 3).long().clamp(max=8)).sum(1)
        return self.last(x) + self.other(x)


class Summed(nn.Linear):
    """A Linear that does otherwise."""

    def forward(self, x: Any) -> Any:
        return x * self.weight.sum()


class Exact(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([nn.Linear(64, 64)])

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.gates[0](x.float())


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        return x * self.scale.weight.diagonal() + self.scale.bias


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        return self.scale(x) + x.to(next(self.parameters()).dtype)


class Several(nn.Module):
    """Layers whose weights are not only for a product in bf16, and one whose are."""

    def __init__(self) -> None:
        super().__init__()
        self.summed, self.exact, self.product, self.typed = Summed(64, 64), Exact(), Product(), Typed()
        self.shared = self.product.scale
        self.longer, self.two = nn.Linear(64, 64).double(), nn.Bilinear(64, 64, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.replaced = nn.Linear(64, 64)
        self.replaced.forward = self.own
        self.plain = nn.Linear(64, 64)

    def own(self, x: Any) -> Any:
        return x * self.replaced.weight.sum()

    def forward(self, x: Any) -> Any:
        x = self.plain(self.shared(self.typed(self.product(self.exact(self.summed(x))))))
        x = self.normed(self.replaced(x))
        return self.two(x.float(), self.longer(x.double()).float())


FACTORIES: dict[Any, set[str]] = {
    convolutional: {
        *(f"{layer}.weight" for layer in (1, 4, 5, 7, 8, 10, 11, 13)), *(f"{layer}.bias" for layer in (1, 4, 5, 8, 10, 11, 13)),
    },
    Attending: {
        *(f"decoder.linear{number}.{name}" for number in (1, 2) for name in ("weight", "bias")), "last.weight", "last.bias",
    },
    Tied: {"other.weight"},
    Several: {"plain.weight", "plain.bias"},
    lambda: nn.Linear(64, 4): {"weight", "bias"},
}  # fmt: skip


@pytest.fixture(params=FACTORIES, ids=lambda factory: factory.__name__)
def factory(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_only_what_autocast_would_cast_in_every_run_is_turned(factory: Any) -> None:
    from backends.torch_autocast import cast_once

    module = factory()
    cast_once(module)
    parameters = module.named_parameters(remove_duplicate=False)
    assert {name for name, tensor in parameters if tensor.dtype == torch.bfloat16} == FACTORIES[factory]


def test_outputs_are_as_of_fp32_weights_to_the_bit(factory: Any) -> None:
    from backends.torch_autocast import cast_once

    torch.manual_seed(1)
    module = factory().eval().requires_grad_(False)
    turned = copy.deepcopy(module)
    if factory is Several:
        turned.replaced.forward = turned.own
    cast_once(turned)
    for rows in (1, 5):
        x = torch.randn(rows, 64)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            before, after = module(x), turned(x)
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert torch.equal(after, before)


def test_a_model_casts_its_weights_at_load() -> None:
    spec = ModelSpec("", (TensorSpec("x", "FP32", (-1, 64)),), (TensorSpec("y", "FP32", (-1, 5)),), 8)
    options = {"model": f"{__file__}:convolutional"}
    full = backends.load("torch", options, spec)
    model = backends.load("torch", options | {"precision": "bf16"}, spec)
    assert 0.4 * full.memory_bytes < model.memory_bytes < 0.6 * full.memory_bytes
    session = model.open_session(0)
    x = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    with torch.profiler.profile(acc_events=True) as profile:
        found = session.run({"x": x}, {})["y"]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = convolutional().eval()(torch.from_numpy(x))
    np.testing.assert_array_equal(found, expected.float().numpy())
    casts = sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")
    assert casts <= 4  # of activations
