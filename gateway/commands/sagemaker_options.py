"""The options of `gateway deploy sagemaker`: what they ask for, and all that is missing or does not do, told at once."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.commands.deploy_options import GROUP, REGION, SUBNET, Options, named
from gateway.config import Config
from gateway.deploying.contents import artifact_sizes
from gateway.deploying.ec2 import partition
from gateway.deploying.needs import GIB, Needs, of_all
from gateway.deploying.preflight import AMIS, BUCKET, ami_for, bare, of_ami, of_job, of_type, registry, serverless
from gateway.deploying.report import Measured
from gateway.deploying.sagemaker import PREFIX, Hosting
from gateway.deploying.sagemaker_ways import (
    CONTENT_TYPES,
    Asynchronous,
    BatchTransform,
    Instances,
    RealTime,
    Serverless,
    Way,
)
from gateway.documents.reader import Document
from gateway.instances.facts import SAGEMAKER, bundled

PAGE: Final = "docs/deploy-sagemaker.md"
_MOST_BAKE_MINUTES: Final = 60
VARIANTS: Final = ("real-time", "asynchronous", "serverless", "batch-transform")
_MOST_CONCURRENT: Final = {"asynchronous": 1000, "serverless": 200}
_SERVERLESS_CONCURRENT: Final = 20
_SERVERLESS_GIB: Final = range(1, 7)
_ONLY_OF: Final = {
    "instance_types": ("real-time", "asynchronous", "batch-transform"),
    "instances": ("real-time", "asynchronous", "batch-transform"),
    "max_instances": ("real-time", "asynchronous"),
    "requests_per_second": ("real-time", "asynchronous"),
    "ami": ("real-time", "asynchronous"),
    "subnets": ("real-time", "asynchronous", "batch-transform"),
    "security_groups": ("real-time", "asynchronous", "batch-transform"),
    "max_concurrency": ("asynchronous", "serverless"),
    "output": ("asynchronous", "batch-transform"),
    "input": ("batch-transform",),
    "content_type": ("batch-transform",),
}
"""Options that mean something of some variants only."""

_MOST_TYPES: Final = 5  # InstancePools takes no more
# Of what one instance can do, to scale at. Source: AWS's guide to load testing an autoscaling configuration.
_SAFETY: Final = 0.5
_ROLE: Final = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+", re.ASCII)
_DATA: Final = re.compile(rf"s3://{BUCKET}/\S+\.(tar\.gz|tgz)")
_PREFIX_OF_S3: Final = re.compile(rf"s3://{BUCKET}(/\S*)?")


def add_options(command: argparse.ArgumentParser) -> None:
    """None is required here: `asked` says where to get what is missing."""
    command.add_argument("--name", help="of the endpoint; as the first model is called")
    command.add_argument("--variant", choices=VARIANTS, default=VARIANTS[0], help="how SageMaker runs it (real-time)")
    command.add_argument("--update", action="store_true", help="of an endpoint that stands: a new fleet beside the old one")
    bake = "--update: how long the new fleet is watched, before the old one goes (5)"
    command.add_argument("--bake-minutes", type=int, metavar="N", help=bake)
    what = command.add_argument_group("what runs")
    what.add_argument("--image", help="of docker/Dockerfile, in your registry (Amazon ECR), with its tag")
    what.add_argument("--architecture", choices=("amd64", "arm64"), default="amd64", help="of the image (amd64)")
    what.add_argument("--role-arn", metavar="ARN", help="of the role that SageMaker takes, to read the bucket and the image")
    what.add_argument("--bucket", help="of S3, where the package is put")
    what.add_argument("--model-data", metavar="S3URI", help="a package that is there already, instead of --bucket")
    what.add_argument("--memory", help="that the container takes, such as 4Gi (as the files of its models need)")
    where = command.add_argument_group("where it runs")
    where.add_argument("--region", help="of AWS; as the image's")
    where.add_argument(
        "--instance-type",
        dest="instance_types",
        metavar="TYPE",
        action="append",
        default=[],
        help="such as ml.c7i.xlarge; as REPORT says. Up to five: the next is taken where the one before cannot be had",
    )
    where.add_argument("--ami", choices=tuple(AMIS), metavar="AMI", help="InferenceAmiVersion, of GPU types: the driver there")
    where.add_argument("--instances", type=int, metavar="N", help="at least so many (1, or REPORT's fleet)")
    where.add_argument("--max-instances", type=int, metavar="N", help="to scale to (twice that, where a rate is known)")
    rate = "that one instance serves within the SLO, to scale by it (as REPORT says)"
    where.add_argument("--requests-per-second", type=float, metavar="RATE", help=rate)
    concurrent = "asynchronous: requests that an instance is given at once (two batches of each session); serverless: that "
    concurrent += f"are answered at once ({_SERVERLESS_CONCURRENT})"
    where.add_argument("--max-concurrency", type=int, metavar="N", help=concurrent)
    where.add_argument("--subnets", metavar="ID", nargs="+", default=[], help="of your VPC, for the instances")
    where.add_argument("--security-groups", metavar="ID", nargs="+", default=[], help="of your VPC, for the instances")
    files = command.add_argument_group("files in S3")
    files.add_argument("--input", metavar="S3URI", help="batch-transform: a prefix, all files under it")
    files.add_argument("--output", metavar="S3URI", help="where answers go; asynchronous: a folder of --bucket, unless named")
    files.add_argument("--content-type", choices=CONTENT_TYPES, help="batch-transform: of the files (text/csv)")


@dataclass(frozen=True, slots=True)
class WantedHosting:
    """hosting: its package is "" where it is still to be packed. notes: what is to be known of it."""

    hosting: Hosting
    notes: tuple[str, ...]


def wanted(
    arguments: argparse.Namespace, document: Document, config: Config, measured: Measured | None, *, begun: str
) -> WantedHosting:
    """begun: as of BatchTransform. Raises: ConfigError, with one line for each option that is missing or does not do."""
    looked = _Options(arguments, measured, begun)
    hosting = looked.hosting(document, config)
    looked.check()
    caveats = measured.caveats if measured is not None else ()
    return WantedHosting(hosting, (*caveats, *looked.notes))


@dataclass(slots=True)
class _Options(Options):
    measured: Measured | None
    begun: str

    def hosting(self, document: Document, config: Config) -> Hosting:
        image, region = self._image()
        made = f"`aws iam list-roles` shows those there are, {PAGE} one that does"
        role = self.fits("--role-arn", self.given.role_arn, _ROLE, "arn:aws:iam::ACCOUNT:role/ROLE", made)
        if region and _ROLE.fullmatch(role) and role.split(":")[1] != partition(region):
            self.faults.append(f"--role-arn: {role}: expected a role of {partition(region)}, which has {region}: {made}")
        subnets, groups = self._network()
        return Hosting(
            name=named(self.given.name, config),
            region=region,
            image=image,
            role_arn=role,
            package=self._package(region),
            way=self._way(document, config),
            subnets=subnets,
            security_groups=groups,
            metrics=config.metrics.enabled,
            limit_ms=_limit_ms(config),
            count_asked=self.given.instances is not None,
        )

    def _image(self) -> tuple[str, str]:
        """It, and the region, which is the image's."""
        image: str | None = self.given.image
        found = registry(image) if image is not None else None
        if found is None:
            expected = "ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG"
            self.refuse("--image", image, expected, f"build and push it, as {PAGE} shows")
        region: str | None = self.given.region
        if region is None:
            return image or "", found["region"] if found is not None else ""
        self.fits("--region", region, *REGION)
        if found is not None and found["region"] != region:
            expected = f"one in {region}, as --region says"
            self.faults.append(f"--image: {image}: is in {found['region']}: expected {expected}: push it there too")
        return image or "", region

    def _package(self, region: str) -> str:
        data, bucket = self.given.model_data, self.given.bucket
        if data is None:
            self.bucket(region)
            return ""
        if bucket is not None:
            self.faults.append(f"--bucket: {bucket}: expected none beside --model-data, which is in S3 already")
        return self.fits("--model-data", data, _DATA, "s3://BUCKET/KEY.tar.gz", "`gateway package` writes what is to be there")

    def _network(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        found = []
        for flag, values, (form, expected, ask) in (
            ("--subnets", self.given.subnets, SUBNET),
            ("--security-groups", self.given.security_groups, GROUP),
        ):
            found.append(tuple(self.fits(flag, value, form, expected, ask) for value in values))
            if not values and (self.given.subnets or self.given.security_groups):
                self.refuse(flag, None, f"{expected}, as a VPC takes both", ask)
        return found[0], found[1]

    def _needs(self, document: Document, config: Config) -> Needs:
        """Of the container; memory_bytes is 0 where it cannot be told."""
        memory_bytes = self.memory_bytes()
        sizes = artifact_sizes(document)
        known = all(size is not None for each in sizes for size in each)
        return of_all(config, sizes, memory_bytes if memory_bytes is not None or known else 0)

    def _way(self, document: Document, config: Config) -> Way:
        wanted: str = self.given.variant
        bake: int | None = self.given.bake_minutes
        if bake is not None and (not self.given.update or not 0 <= bake <= _MOST_BAKE_MINUTES):
            expected = f"0 to {_MOST_BAKE_MINUTES}" if self.given.update else "none without --update"
            self.faults.append(f"--bake-minutes: {bake}: expected {expected}")
        if self.given.update and wanted == "batch-transform":
            self.faults.append("--update: expected none with --variant batch-transform: each job is a new one")
        for key, variants in _ONLY_OF.items():
            if wanted not in variants and (value := getattr(self.given, key)) not in (None, []):
                flag = {"instance_types": "--instance-type"}.get(key, f"--{key.replace('_', '-')}")
                told = " ".join(map(str, value)) if isinstance(value, list) else value
                self.faults.append(f"{flag}: {told}: expected none with --variant {wanted}: leave it out")
        needs = self._needs(document, config)
        if wanted == "serverless":
            return self._serverless(needs)
        types = self._types(needs)
        if wanted == "batch-transform":
            return self._transform(types)
        per_minute = self._per_minute(types)
        instances = self._instances(types, self._ami(needs), scaled=per_minute is not None)
        if wanted == "real-time":
            return RealTime(instances, per_minute)
        concurrent = self._concurrent(_two_batches(config))
        return Asynchronous(instances, self._output(config), concurrent, per_minute)

    def _serverless(self, needs: Needs) -> Serverless:
        self.faults += map(str, serverless(needs, self.given.architecture))
        gib = -(-needs.memory_bytes // GIB)
        expected = f"{_SERVERLESS_GIB[0]}Gi to {_SERVERLESS_GIB[-1]}Gi"
        if not gib and self.given.memory is None:
            self.refuse("--memory", None, expected, "what the models take cannot be told here")
        elif gib > _SERVERLESS_GIB[-1]:
            remedy = "name another variant, or fewer `sessions`"
            self.faults.append(f"--memory: {gib}Gi is what it takes: expected {expected}: {remedy}")
        return Serverless(gib * 1024, self._concurrent(_SERVERLESS_CONCURRENT))

    def _transform(self, types: tuple[str, ...]) -> BatchTransform:
        if len(types) > 1:
            self.faults.append(f"--instance-type: {len(types)} of them: expected one: a job takes no others instead")
        for name in types:
            self.faults += map(str, of_job(name, bundled()))
        asked = "a prefix of S3, such as s3://BUCKET/FOLDER/"
        count = 1 if self.given.instances is None else self.given.instances
        if count < 1:
            self.faults.append(f"--instances: {count}: expected 1 or more")
        return BatchTransform(
            Instances(types, count, count),
            self.fits("--input", self.given.input, _PREFIX_OF_S3, asked, "`aws s3 ls` shows what there is"),
            self.fits("--output", self.given.output, _PREFIX_OF_S3, asked).rstrip("/"),
            self.given.content_type or CONTENT_TYPES[0],
            self.begun,
        )

    def _concurrent(self, usual: int) -> int:
        given: int | None = self.given.max_concurrency
        most = _MOST_CONCURRENT[self.given.variant]
        if given is not None and not 1 <= given <= most:
            self.faults.append(f"--max-concurrency: {given}: expected 1 to {most}")
        return min(usual, most) if given is None else given

    def _output(self, config: Config) -> str:
        """Where an asynchronous endpoint puts its answers: nothing there is removed with it."""
        output: str | None = self.given.output
        if output is None and self.given.bucket is not None:
            return f"s3://{self.given.bucket}/{PREFIX}-answers/{named(self.given.name, config)}"
        return self.fits("--output", output, _PREFIX_OF_S3, "a prefix of S3, such as s3://BUCKET/FOLDER").rstrip("/")

    def _types(self, needs: Needs) -> tuple[str, ...]:
        """By their order, as SageMaker calls them."""
        measured = self.measured.instance_types if self.measured is not None else ()
        types = tuple(dict.fromkeys(f"{SAGEMAKER}{bare(name)}" for name in self.given.instance_types or measured))
        if not types:
            self.refuse("--instance-type", None, "one or more, such as ml.c7i.large", "`loadtest prices list` shows them")
        if len(types) > _MOST_TYPES:
            self.faults.append(f"--instance-type: {len(types)} of them: expected {_MOST_TYPES} at most: leave out the last")
        for name in types:
            there = bundled().instances.get(bare(name))
            if there is not None and there.vcpu < needs.cores:
                self.notes.append(f"{name} has {there.vcpu} cores, and the sessions keep {needs.cores} busy")
            given, memory_given = self.given, self.given.memory is not None
            self.faults += map(str, of_type(name, bundled(), needs, architecture=given.architecture, memory_given=memory_given))
        return types

    def _ami(self, needs: Needs) -> str:
        ami = self.given.ami or ami_for(needs)
        self.faults += map(str, of_ami(ami, needs))
        return ami

    def _per_minute(self, types: Sequence[str]) -> float | None:
        """Requests that one instance is to have at most, before others are added; None: nobody measured that."""
        rate: float | None = self.given.requests_per_second
        if rate is not None:
            if not 0.001 <= rate <= 1e6:
                self.faults.append(f"--requests-per-second: {rate:g}: expected 0.001 to 1000000")
            return rate * 60 * _SAFETY
        if self.measured is None or not types:
            return None
        was = self.measured.instance_types[0] if self.measured.instance_types else "another machine"
        if bare(was) != bare(types[0]):
            self.notes.append(f"{self.measured.source} measured {was}, and not {types[0]}: it is not scaled by that rate")
            return None
        if len(types) > 1:
            self.notes.append(f"the rate to scale at is {types[0]}'s: others may serve less")
        return self.measured.invocations_per_minute

    def _instances(self, types: tuple[str, ...], ami: str, *, scaled: bool) -> Instances:
        least, most = self.given.instances, self.given.max_instances
        if least is None:
            least = (self.measured.count if self.measured is not None else None) or 1
        if least < 1:
            self.faults.append(f"--instances: {least}: expected 1 or more")
        if most is not None and most < least:
            self.faults.append(f"--max-instances: {most}: expected {least} or more, which is --instances")
        elif most is not None and most > least and not scaled:
            ask = "name --requests-per-second, which `loadtest` finds"
            self.faults.append(f"--max-instances: {most}: expected a rate to scale at: {ask}")
        return Instances(types, least, (2 * least if scaled else least) if most is None else most, ami)


def _two_batches(config: Config) -> int:
    """Requests that keep all sessions busy: one batch that runs and one that is formed, of each."""
    return max(1, sum(2 * max(1, model.max_rows) * backend.sessions for model in config.models for backend in model.backends))


def _limit_ms(config: Config) -> float | None:
    limits = [model.slo.p99_ms for model in config.models if model.slo is not None]
    return max(limits) if limits and len(limits) == len(config.models) else None
