"""Every reason why a candidate cannot work on a machine of EC2, and that one which can has none."""

from dataclasses import replace
from typing import Any

import pytest

from loadtest.prices.catalogue import Catalogue, Price, load_catalogue
from loadtest.question.candidates import CandidateSetup
from loadtest.question.machine_preflight import Machines, machine_reasons, vcpu_quotas
from tests.loadtest.test_preflight import GIB, candidate

HASH = "--hash=sha256:00"
LOCKS = {
    "cpu": f"onnxruntime==1.26 {HASH}\n",
    "cuda": f"onnxruntime-gpu==1.26 {HASH}\ntorch==2.13 {HASH}\n",
    "neuron": "\n",
    "aws": "",
}
STANDARD = "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"
QUOTAS = {
    STANDARD: 32.0,
    "Running On-Demand G and VT instances": 4.0,
    "Running On-Demand P instances": 0.0,
    "Running On-Demand Inf instances": 4.0,
    "All P4, P3 and P2 Spot Instance Requests": 96.0,
    "All P5 Spot Instance Requests": 0.0,
    "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests": 2.0,
    "Number of EIPs - VPC EIPs": 5.0,
}


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def on_ec2(catalogue: Catalogue, instance: str = "c7i.xlarge", **backend: Any) -> CandidateSetup:
    found = candidate(catalogue, instance, **backend)
    return replace(found, price=catalogue.instance(instance).prices.get("ec2"), basis="ec2")


def told_of(catalogue: Catalogue, found: CandidateSetup, **place: Any) -> list[str]:
    known = {"region": "us-east-1", "locks": LOCKS, "generator": "c7i.xlarge", "generator_usd_per_hour": 0.1785}
    return [str(each) for each in machine_reasons(found, catalogue, Machines(**(known | place)))]


@pytest.mark.parametrize(
    ("instance", "backend"),
    [
        ("c8i.xlarge", {}),  # which is on EC2 only
        ("c7g.xlarge", {"kind": "onnxruntime", "model": "m.onnx", "sessions": 2}),
        ("g6.xlarge", {"kind": "onnxruntime", "model": "m.onnx", "device": "cuda"}),
        ("inf2.xlarge", {"kind": "neuron", "model": "m", "sessions": 2}),
    ],
)
def test_what_can_work_is_refused_for_nothing(catalogue: Catalogue, instance: str, backend: dict[str, Any]) -> None:
    found = on_ec2(catalogue, instance, known_bytes=100 << 20, **backend)
    place = {"zone": "us-east-1a", "offered": frozenset({instance}), "quotas": vcpu_quotas(QUOTAS, spot=False)}
    assert told_of(catalogue, found, **place, least_s=600, max_usd=5) == []


def test_quotas_are_read_by_families_and_generations() -> None:
    on_demand, spot = vcpu_quotas(QUOTAS, spot=False), vcpu_quotas(QUOTAS, spot=True)
    assert [each.vcpus for each in on_demand if each.holds("c7i-flex.large")] == [32]
    assert [each.vcpus for each in on_demand if each.holds("g5g.xlarge")] == [4]
    assert [each.vcpus for each in on_demand if each.holds("inf2.xlarge")] == [4]
    assert [each.vcpus for each in spot if each.holds("p4d.24xlarge")] == [96]
    assert [each.vcpus for each in spot if each.holds("p5en.48xlarge")] == [0]
    assert len(on_demand) == 4
    assert len(spot) == 3


def test_a_quota_without_room_for_both_machines_refuses(catalogue: Catalogue) -> None:
    small = vcpu_quotas({STANDARD: 8.0}, spot=False)
    assert told_of(catalogue, on_ec2(catalogue), quotas=small) == []
    large = told_of(catalogue, on_ec2(catalogue, "c7i.2xlarge"), quotas=small)
    assert large == [
        "quota: 8 vCPUs, expected room for the 8 vCPUs of c7i.2xlarge, and 4 of the load generator: "
        f"ask for more: Service Quotas, EC2, {STANDARD}"
    ]
    # The generator is on demand: it takes nothing of spot's.
    spot = vcpu_quotas(QUOTAS, spot=True)
    (told,) = told_of(catalogue, on_ec2(catalogue), quotas=spot, spot=True)
    assert told.startswith("quota: 2 vCPUs, expected room for the 4 vCPUs of c7i.xlarge: ask for more: ")
    gpu = on_ec2(catalogue, "g6.2xlarge", kind="onnxruntime", model="m", device="cuda")
    (told,) = told_of(catalogue, gpu, quotas=vcpu_quotas(QUOTAS, spot=False))
    assert told.startswith("quota: 4 vCPUs, expected room for the 8 vCPUs of g6.2xlarge: ")


def test_a_type_that_the_zone_has_not_refuses(catalogue: Catalogue) -> None:
    (told,) = told_of(catalogue, on_ec2(catalogue), zone="us-east-1e", offered=frozenset({"c5.large"}))
    assert told == (
        "instances: c7i.xlarge is not offered in us-east-1e, where launcher.subnet is, expected a type that is: "
        "another subnet, or another type"
    )


@pytest.mark.parametrize(
    ("instance", "backend", "reason"),
    [
        ("c7i.xlarge", {"kind": "tensorrt", "model": "m.onnx"}, "accelerator: c7i.xlarge has none, expected an NVIDIA GPU"),
        ("inf1.xlarge", {"kind": "neuron", "model": "m"}, "accelerator: inf1.xlarge has 1 × inferentia, expected"),
        (
            "c7i.xlarge",
            {"kind": "torch", "model": "m.pt2"},
            "launcher.locks: requirements-cpu.lock installs no torch, ",
        ),
        (
            "c7i.xlarge",
            {"placement": "replicas"},
            "placement: replicas, which needs Ray, expected embedded, as a machine",
        ),
        (
            "c7i.xlarge",
            {"kind": "triton", "url": "h:1", "model": "m"},
            "kind: triton, a server beside it, expected a backend",
        ),
    ],
)
def test_what_does_not_fit_the_machine_refuses(
    catalogue: Catalogue, instance: str, backend: dict[str, Any], reason: str
) -> None:
    told = told_of(catalogue, on_ec2(catalogue, instance, **backend))
    assert any(line.startswith(reason) for line in told), told


def test_a_gpu_that_the_images_driver_does_not_run_refuses(catalogue: Catalogue) -> None:
    newer = catalogue.instance("g4dn.xlarge")
    assert newer.accelerator is not None
    older = newer.model_copy(update={"accelerator": newer.accelerator.model_copy(update={"name": "v100"})})
    own = catalogue.model_copy(update={"instances": {**catalogue.instances, "p3.2xlarge": older}})
    gpu = {"kind": "torch", "model": "m", "device": "cuda"}
    assert told_of(own, on_ec2(own, "g4dn.xlarge", **gpu)) == []
    (told,) = told_of(own, on_ec2(own, "p3.2xlarge", **gpu))
    assert told.startswith("driver: p3.2xlarge has v100, which the open driver of the image does not run, expected Turing")


def test_a_lock_that_is_not_there_refuses(catalogue: Catalogue) -> None:
    gpu = on_ec2(catalogue, "g6.xlarge", kind="onnxruntime", model="m", device="cuda")
    (told,) = told_of(catalogue, gpu, locks={"cpu": ""})
    assert told == (
        "launcher.locks: no requirements-cuda.lock, expected it, of what is installed for cuda: the gateway's source has it"
    )


def test_memory_price_and_region_refuse_as_on_sagemaker(catalogue: Catalogue) -> None:
    large = on_ec2(catalogue, known_bytes=2 * GIB, kind="onnxruntime", model="m.onnx", sessions=2)
    (told,) = told_of(catalogue, large)
    assert told.startswith("memory: c7i.xlarge has 8 GiB, expected 9 GiB")
    dear = replace(on_ec2(catalogue), price=Price(usd_per_hour=6, source="-", date=None))
    # 10 minutes at 6 and 0.1785 $/h are 1.03 $
    (told,) = told_of(catalogue, dear, least_s=600, max_usd=1.0)
    assert told.startswith("price: $1.03 for a start and one short run (10 min at $6.18/h), expected at most --max-usd 1")
    (told,) = told_of(catalogue, on_ec2(catalogue), region="eu-west-1")
    assert told.startswith("region: eu-west-1, expected us-east-1, of which the prices are")
