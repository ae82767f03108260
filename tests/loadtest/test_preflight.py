"""Every reason of a refusal, and that a candidate which can work has none."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from loadtest.commands.plan import plan_of
from loadtest.errors import UsageError
from loadtest.lab.launchers.url import Url
from loadtest.lab.recommender import question_of
from loadtest.prices.catalogue import Catalogue, Price, load_catalogue
from loadtest.question.candidates import CandidateSetup
from loadtest.question.preflight import AMIS, Account, Image, Place, Reason, check_time, reasons
from loadtest.question.spec import without
from loadtest.reports.forms import junit, markdown, render, table
from tests.loadtest.examples import NOW, example_outcome, example_spec, told

REGISTRY = "123456789012.dkr.ecr.us-east-1.amazonaws.com/gateway"
CPU, ARM = Image(f"{REGISTRY}:cpu"), Image(f"{REGISTRY}:cpu-arm64", "arm64")
CUDA, NEURON = Image(f"{REGISTRY}:cuda", device="cuda", cuda="13.0"), Image(f"{REGISTRY}:neuron", device="neuron")
IMAGES = (CPU, ARM, CUDA, NEURON)
NEWEST = list(AMIS)[-1]
GIB = 1 << 30


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def candidate(
    catalogue: Catalogue, instance: str = "c7i.xlarge", *, known_bytes: int | None = None, **backend: Any
) -> CandidateSetup:
    """As the spec makes it, but of any type, whatever it has."""
    made = example_spec(
        catalogue,
        launcher={"kind": "local"},
        candidates=[{"backend": {"kind": "synthetic"}, "usd_per_hour": 1, "price_source": "-"}],
    )
    document = {"models": [{**made.candidates[0].document["models"][0], "backends": [{"kind": "synthetic", **backend}]}]}
    price = catalogue.instance(instance).prices.get("sagemaker")
    return replace(
        made.candidates[0],
        name=instance,
        instance_type=instance,
        price=price,
        basis="sagemaker",
        document=document,
        artifact_bytes=known_bytes,
    )


def told_of(
    catalogue: Catalogue,
    candidate: CandidateSetup,
    *,
    images: Sequence[Image] = IMAGES,
    account: Account | None = None,
    **place: Any,
) -> list[str]:
    return [str(each) for each in reasons(candidate, catalogue, Place(account or Account("us-east-1"), images, **place))]


@pytest.mark.parametrize(
    ("instance", "backend"),
    [
        ("c7i.xlarge", {}),
        ("c7g.xlarge", {"kind": "onnxruntime", "model": "m.onnx", "sessions": 2}),
        ("g5.xlarge", {"kind": "onnxruntime", "model": "m.onnx", "device": "cuda"}),
        ("inf2.xlarge", {"kind": "neuron", "model": "m", "sessions": 2}),
    ],
)
def test_what_can_work_is_refused_for_nothing(catalogue: Catalogue, instance: str, backend: dict[str, Any]) -> None:
    account = Account("us-east-1", quotas={f"ml.{instance}": 1}, used={}, hosted=frozenset({f"ml.{instance}"}))
    found = candidate(catalogue, instance, known_bytes=100 << 20, **backend)
    assert told_of(catalogue, found, account=account, ami=NEWEST, least_s=600, max_usd=5) == []


def test_an_image_is_chosen_by_architecture_and_device(catalogue: Catalogue) -> None:
    arm = candidate(catalogue, "c7g.xlarge")
    assert told_of(catalogue, arm, images=(CPU, CUDA)) == [
        "architecture: arm64, and amd64 is all there is of images for cpu, expected an image for cpu on arm64: "
        "build it (docs/deploy.md) and name it under launcher.images"
    ]
    gpu = candidate(catalogue, "g5.xlarge", kind="torch", model="m.pt2", device="cuda")
    (reason,) = told_of(catalogue, gpu, images=(CPU, ARM))
    assert reason.startswith("launcher.images: cpu on amd64, cpu on arm64, expected an image for cuda on amd64: ")


@pytest.mark.parametrize(
    ("instance", "backend", "reason"),
    [
        (
            "c7i.xlarge",
            {"kind": "tensorrt", "model": "m.onnx"},
            "accelerator: c7i.xlarge has none, expected an NVIDIA GPU, for CUDA",
        ),
        (
            "inf2.xlarge",
            {"kind": "torch", "model": "m", "device": "cuda"},
            "has 1 × inferentia2, expected an NVIDIA GPU, for CUDA",
        ),
        ("g5.xlarge", {"kind": "neuron", "model": "m"}, "has 1 × a10g, expected Inferentia2 or Trainium, for Neuron"),
        (
            "inf1.xlarge",
            {"kind": "neuron", "model": "m"},
            "has 1 × inferentia, expected Inferentia2 or Trainium, which PyTorch",
        ),
        (
            "g5.xlarge",
            {"kind": "torch", "model": "m", "device": "cuda:1"},
            "has 1 × a10g, expected 2 GPUs: choose another `device`",
        ),
        (
            "inf2.xlarge",
            {"kind": "neuron", "model": "m", "sessions": 3},
            "with 2 NeuronCores, expected 3 NeuronCores, one for each",
        ),
    ],
)
def test_the_accelerator_is_the_one_that_the_backend_computes_on(
    catalogue: Catalogue, instance: str, backend: dict[str, Any], reason: str
) -> None:
    (found,) = told_of(catalogue, candidate(catalogue, instance, **backend), ami=NEWEST)
    assert reason in found


def test_a_driver_older_than_the_images_cuda_is_refused_with_the_ami_that_has_a_newer_one(catalogue: Catalogue) -> None:
    gpu = candidate(catalogue, "g5.xlarge", kind="onnxruntime", model="m.onnx", device="cuda")
    assert told_of(catalogue, gpu) == [
        "driver: g5.xlarge runs CUDA 11.4 by itself, expected one for CUDA 13.0, which is in "
        f"{CUDA.uri}: launcher.ami: {NEWEST}"
    ]
    (named,) = told_of(catalogue, gpu, ami="al2-ami-sagemaker-inference-gpu-3-1")
    assert "driver: al2-ami-sagemaker-inference-gpu-3-1 runs CUDA 12.4, expected one for CUDA 13.0" in named
    (newer,) = told_of(catalogue, gpu, images=(replace(CUDA, cuda="14.1"),), ami=NEWEST)
    assert newer.endswith(": build the image with an older CUDA")
    assert told_of(catalogue, gpu, images=(replace(CUDA, cuda="11.4"),)) == []


def test_a_model_that_does_not_fit_is_refused_by_the_memory_of_the_machine_and_of_its_gpu(catalogue: Catalogue) -> None:
    # 1 GiB for the process and twice 2 × 2 GiB: 9 GiB; c7i.xlarge has 8
    large = candidate(catalogue, "c7i.xlarge", known_bytes=2 * GIB, kind="onnxruntime", model="m.onnx", sessions=2)
    assert told_of(catalogue, large) == [
        "memory: c7i.xlarge has 8 GiB, expected 9 GiB: the processes, and twice 2 × the model's 2 GiB: "
        "fewer `sessions`, or a larger type"
    ]
    # 12 GiB twice on a GPU of 22.4; the machine has 16, and 1 + 2 · 24 are wanted
    wide = candidate(catalogue, "g5.xlarge", known_bytes=12 * GIB, kind="onnxruntime", model="m", device="cuda", sessions=2)
    machine, gpu = told_of(catalogue, wide, ami=NEWEST)
    assert machine.startswith("memory: g5.xlarge has 16 GiB, expected 49 GiB: ")
    assert gpu == "memory: a GPU of g5.xlarge has 22.4 GiB, expected 24 GiB: 2 × the model's 12 GiB: fewer `sessions`"
    assert told_of(catalogue, replace(large, artifact_bytes=None)) == []  # it shows when it is loaded


@pytest.mark.parametrize(
    ("quotas", "used", "reason"),
    [
        (
            {"ml.c7i.xlarge": 0},
            {},
            "quota: 0 instances of ml.c7i.xlarge, expected room for 1: ask for more: Service Quotas, SageMaker, ",
        ),
        (
            {"ml.c7i.xlarge": 2},
            {"ml.c7i.xlarge": 2},
            "quota: 2 instances of ml.c7i.xlarge, of which 2 are used, expected room for 1",
        ),
        ({"ml.m5.large": 2}, {}, "region: us-east-1 has no quota for ml.c7i.xlarge, expected a type that is offered there"),
    ],
)
def test_a_quota_without_room_refuses(catalogue: Catalogue, quotas: dict[str, int], used: dict[str, int], reason: str) -> None:
    (found,) = told_of(catalogue, candidate(catalogue), account=Account("us-east-1", quotas, used))
    assert found.startswith(reason)


def test_a_price_that_is_missing_or_too_high_for_one_short_run_refuses(catalogue: Catalogue) -> None:
    found = candidate(catalogue)
    dear = replace(found, price=Price(usd_per_hour=6, source="-", date=None))
    # 10 minutes at 6 $/h are 1 $
    assert told_of(catalogue, dear, least_s=600, max_usd=0.5) == [
        "price: $1.00 for a start and one short run (10 min at $6.00/h), expected at most --max-usd 0.5: "
        "raise it, or choose a cheaper type"
    ]
    assert told_of(catalogue, dear, least_s=600, max_usd=1.0) == told_of(catalogue, dear, least_s=600) == []
    (missing,) = told_of(catalogue, replace(found, price=None))
    assert missing == "price: none is known (sagemaker), expected a price of c7i.xlarge: set `usd_per_hour` and `price_source`"


def test_the_image_is_in_the_registry_of_the_endpoints_region(catalogue: Catalogue) -> None:
    (local,) = told_of(catalogue, candidate(catalogue), images=(Image("gateway:cpu"),))
    assert local.startswith("image: gateway:cpu, expected an image in Amazon ECR, such as 123456789012.dkr.ecr.")
    there = Image("123456789012.dkr.ecr.eu-west-1.amazonaws.com/gateway@sha256:" + 64 * "a")
    (elsewhere,) = told_of(catalogue, candidate(catalogue), images=(there,))
    assert f"image: {there.uri} is in eu-west-1, expected one in us-east-1, where the endpoint is" in elsewhere


def test_a_region_whose_prices_are_not_known_refuses(catalogue: Catalogue) -> None:
    images = (Image("123456789012.dkr.ecr.eu-west-1.amazonaws.com/gateway:cpu"),)
    (found,) = told_of(catalogue, candidate(catalogue), images=images, account=Account("eu-west-1"))
    assert found.startswith("region: eu-west-1, expected us-east-1, of which the prices are")


def test_a_type_that_is_on_ec2_only_refuses_by_the_catalogue_or_by_what_the_api_knows(catalogue: Catalogue) -> None:
    found = told_of(catalogue, candidate(catalogue, "c8i.xlarge"))
    assert any("instances: c8i.xlarge, which is on EC2 only, expected a type that SageMaker hosts" in line for line in found)
    (unknown,) = told_of(catalogue, candidate(catalogue), account=Account("us-east-1", hosted=frozenset({"ml.m5.large"})))
    assert unknown.startswith("instances: c7i.xlarge, which is on EC2 only")


def test_what_a_container_of_one_process_cannot_do_refuses(catalogue: Catalogue) -> None:
    (apart,) = told_of(catalogue, candidate(catalogue, placement="replicas"))
    assert apart.startswith("placement: replicas, which needs Ray, expected embedded")
    (beside,) = told_of(catalogue, candidate(catalogue, kind="triton", url="h:1", model="m"))
    assert beside.startswith("kind: triton, a server beside it, expected a backend in the container's own process")


def test_every_reason_names_field_value_and_what_was_expected(catalogue: Catalogue) -> None:
    poor = candidate(
        catalogue, "c8i.xlarge", known_bytes=99 * GIB, kind="tensorrt", model="m", placement="replicas", sessions=9
    )
    account = Account("eu-west-1", quotas={"ml.c8i.xlarge": 0})
    found = reasons(poor, catalogue, Place(account, (CPU,)))
    # region, placement, hosting, accelerator, images, quota, price
    assert len(found) == 7
    assert all(each.field and each.value and each.expected and each.remedy for each in found)


# What becomes of a refusal.


def refused_spec(catalogue: Catalogue) -> Any:
    spec = example_spec(catalogue)
    return without(spec, {spec.candidates[1].name: (Reason("quota", "0", "room for 1"), Reason("price", "none", "one"))})


def test_the_rest_go_on_and_the_report_says_in_every_form_why_not(catalogue: Catalogue) -> None:
    spec = refused_spec(catalogue)
    name = "c7i.large synthetic (sessions 2)"
    assert name not in {candidate.name for candidate in spec.candidates}
    assert len(spec.candidates) == 3
    found = told(spec, example_outcome(spec))
    assert found.winner is not None
    line = f"refused before it was paid for: {name}: quota: 0, expected room for 1"
    for form in ("text", "md", "html"):
        assert line in " ".join(render(found, form).split()).replace("\\_", "_")
    rows = list(csv.DictReader(io.StringIO(table(found))))
    assert [(row["status"], row["out"]) for row in rows if row["candidate"] == name] == [
        ("refused", "quota: 0, expected room for 1; price: none, expected one")
    ]
    suite = ElementTree.fromstring(junit(found))
    assert suite.attrib["tests"] == str(len(suite)) == "5"
    assert markdown(found).count("refused before") == 2


def test_a_plan_tells_who_is_refused(catalogue: Catalogue) -> None:
    spec = refused_spec(catalogue)
    plan = plan_of(spec, question_of(spec, paid=False), Url(), NOW.date())
    assert [each.name for each in plan.refused] == ["c7i.large synthetic (sessions 2)"]
    assert len(plan.candidates) == 3


def test_where_nobody_is_left_every_reason_is_told(catalogue: Catalogue) -> None:
    spec = example_spec(catalogue)
    with pytest.raises(UsageError) as raised:
        without(spec, {each.name: (Reason("quota", "0", "room for 1"),) for each in spec.candidates})
    assert str(raised.value).count("quota: 0, expected room for 1") == 4
    assert "none can work where it is to be launched" in str(raised.value)


def test_a_budget_that_no_start_fits_into_is_refused_with_what_it_takes() -> None:
    check_time(8, 424.0)
    with pytest.raises(UsageError, match=r"budget\.minutes: 5: expected at least 8, .* take about 7"):
        check_time(5, 424.0)
