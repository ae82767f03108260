"""Whether `gateway serve` takes Ray, one process, or several without Ray, and how many."""

import os
from typing import Any

import pytest

from backends.neuron import NUM_CORES, VISIBLE_CORES
from gateway.commands.serve import take_neuron_cores
from gateway.config import Config, parse_config
from gateway.configuring.ingresses import decided, side_by_side
from gateway.configuring.need_of_ray import need_of_ray, uses_ray
from gateway.errors import ConfigError


def config(backend: dict[str, Any] | None = None, **parts: Any) -> Config:
    models = [{"name": "m", "backends": [{"kind": "synthetic", **(backend or {})}]}]
    return parse_config({"models": models, **parts}, source="test")


NEEDS = {
    "replicas": (config({"placement": "replicas"}), "backend synthetic has placement replicas"),
    "autoscaling": (
        config({"placement": "replicas", "autoscaling": {"max_replicas": 2}}),
        "backend synthetic has placement replicas",
    ),
    "ingresses": (config(server={"ingress_replicas": 2}), "server.ingress_replicas is 2"),
}


@pytest.mark.parametrize("need", NEEDS)
def test_a_configuration_that_only_ray_can_serve_is_served_on_ray_or_refused_with_what_to_do(need: str) -> None:
    wanted, why = NEEDS[need]
    assert uses_ray(wanted, asked=False, refused=False)
    with pytest.raises(ConfigError, match=rf"{why}, which needs Ray: start without --no-ray, or "):
        uses_ray(wanted, asked=True, refused=True)


def test_one_process_serves_everything_else_unless_ray_is_asked_for() -> None:
    plain = config(ray={"application": "other"})
    assert need_of_ray(plain) == ("", "")
    assert not uses_ray(plain, asked=False, refused=False)
    assert uses_ray(plain, asked=True, refused=False)
    assert uses_ray(config(ray={"address": "local"}), asked=False, refused=False)
    assert not uses_ray(config(ray={"address": "local"}), asked=True, refused=True)


ELSEWHERE = {"kind": "triton", "url": "h:1", "model": "m"}


@pytest.mark.parametrize("backend", [{"kind": "synthetic"}, {"kind": "synthetic", "placement": "replicas"}, ELSEWHERE])
@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (96, 16)])
def test_auto_is_a_process_for_two_cores_unless_each_would_hold_the_models(
    backend: dict[str, Any], cores: int, processes: int
) -> None:
    here = backend == {"kind": "synthetic"}
    undecided = config(backend, server={"ingress_replicas": "auto"})
    assert undecided.server.ingresses == 1
    assert decided(undecided, cores).server.ingress_replicas == (1 if here else processes)
    assert decided(config(backend, server={"ingress_replicas": 3}), cores).server.ingress_replicas == 3


def test_several_processes_need_no_ray_where_all_models_are_elsewhere() -> None:
    several = {"ingress_replicas": 3}
    assert side_by_side(config(ELSEWHERE, server=several))
    assert need_of_ray(config(ELSEWHERE, server=several)) == ("", "")
    assert not side_by_side(config(ELSEWHERE))
    for other in (config(server=several), config(ELSEWHERE, server=several | {"model_control": True})):
        assert not side_by_side(other)
        assert uses_ray(other, asked=False, refused=False)


def test_a_process_without_ray_takes_a_neuron_core_for_each_session_unless_it_was_given_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    neuron = {"kind": "neuron", "model": "m"}
    for given, backend, cores in (
        ({VISIBLE_CORES: "4,5"}, neuron, "4,5"),
        ({NUM_CORES: "2"}, neuron, None),
        ({}, {}, None),
        ({}, neuron, "0"),
        ({}, neuron | {"sessions": 2}, "0-1"),
    ):
        for name in (VISIBLE_CORES, NUM_CORES):
            monkeypatch.setenv(name, "")  # so that what is set meanwhile goes with it
            monkeypatch.delenv(name)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        take_neuron_cores(config(backend).models[0].backends)
        assert os.environ.get(VISIBLE_CORES) == cores
