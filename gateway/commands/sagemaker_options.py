"""The options of `gateway deploy sagemaker`: what they ask for, and all that is missing or does not do, told at once."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.commands.deploy_options import named
from gateway.config import Config
from gateway.deploying.contents import artifact_sizes
from gateway.deploying.needs import Needs, of_ingress
from gateway.deploying.preflight import AMIS, ami_for, bare, of_ami, of_type, registry
from gateway.deploying.report import Measured
from gateway.deploying.sagemaker import Hosting, Instances, RealTime
from gateway.documents.reader import Document
from gateway.errors import ConfigError
from gateway.instances.facts import SAGEMAKER, bundled

PAGE: Final = "docs/deploy-sagemaker.md"
_MOST_TYPES: Final = 5  # InstancePools takes no more
# Of what one instance can do, to scale at. Source: AWS's guide to load testing an autoscaling configuration.
_SAFETY: Final = 0.5
_ROLE: Final = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+", re.ASCII)
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_DATA: Final = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/\S+\.(tar\.gz|tgz)")
_REGION: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_SUBNET: Final = re.compile(r"subnet-[0-9a-f]{8,17}")
_GROUP: Final = re.compile(r"sg-[0-9a-f]{8,17}")
_MEMORY: Final = re.compile(r"[1-9]\d*(Mi|Gi)", re.ASCII)


def add_options(command: argparse.ArgumentParser) -> None:
    """None is required here: `asked` says where to get what is missing."""
    command.add_argument("--name", help="of the endpoint; as the first model is called")
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
    where.add_argument("--subnets", metavar="ID", nargs="+", default=[], help="of your VPC, for the instances")
    where.add_argument("--security-groups", metavar="ID", nargs="+", default=[], help="of your VPC, for the instances")


@dataclass(frozen=True, slots=True)
class Wanted:
    """hosting: its package is "" where it is still to be packed. notes: what is to be known of it."""

    hosting: Hosting
    notes: tuple[str, ...]


def wanted(arguments: argparse.Namespace, document: Document, config: Config, measured: Measured | None) -> Wanted:
    """Raises: ConfigError, with one line for each option that is missing or does not do."""
    looked = _Options(arguments, measured)
    hosting = looked.hosting(document, config)
    if looked.faults:
        raise ConfigError("\n".join(dict.fromkeys(looked.faults)))
    caveats = measured.caveats if measured is not None else ()
    return Wanted(hosting, (*caveats, *looked.notes))


@dataclass(slots=True)
class _Options:
    """As they are looked at. faults: all that is missing or malformed, each with where to get it."""

    given: argparse.Namespace
    measured: Measured | None
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def hosting(self, document: Document, config: Config) -> Hosting:
        image, region = self._image()
        made = f"`aws iam list-roles` shows those there are, {PAGE} one that does"
        role = self._fits("--role-arn", self.given.role_arn, _ROLE, "arn:aws:iam::ACCOUNT:role/ROLE", made)
        subnets, groups = self._network()
        return Hosting(
            name=named(self.given.name, config),
            region=region,
            image=image,
            role_arn=role,
            package=self._package(region),
            way=self._real_time(self._needs(document, config)),
            subnets=subnets,
            security_groups=groups,
            metrics=config.metrics.enabled,
        )

    def _fits(self, flag: str, value: str | None, form: "re.Pattern[str]", expected: str, where: str = "") -> str:
        if value is None or not form.fullmatch(value):
            found = "not given" if value is None else repr(value)
            self.faults.append(": ".join(filter(None, (flag, found, f"expected {expected}", where))))
        return value or ""

    def _image(self) -> tuple[str, str]:
        """It, and the region, which is the image's."""
        image: str | None = self.given.image
        found = registry(image) if image is not None else None
        if found is None:
            told = "not given" if image is None else repr(image)
            expected = "ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG"
            self.faults.append(f"--image: {told}: expected {expected}: build and push it, as {PAGE} shows")
        region: str | None = self.given.region
        if region is None:
            return image or "", found["region"] if found is not None else ""
        self._fits("--region", region, _REGION, "a region of AWS, such as us-east-1")
        if found is not None and found["region"] != region:
            expected = f"one in {region}, as --region says"
            self.faults.append(f"--image: {image}: is in {found['region']}: expected {expected}: push it there too")
        return image or "", region

    def _package(self, region: str) -> str:
        data, bucket = self.given.model_data, self.given.bucket
        if data is None:
            made = f"`aws s3 mb s3://NAME --region {region or 'REGION'}` makes one"
            self._fits("--bucket", bucket, _BUCKET, "the name of a bucket of S3", made)
            return ""
        if bucket is not None:
            self.faults.append(f"--bucket: {bucket}: expected none beside --model-data, which is in S3 already")
        return self._fits("--model-data", data, _DATA, "s3://BUCKET/KEY.tar.gz", "`gateway package` writes what is to be there")

    def _network(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        found = []
        for flag, values, form, expected, ask in (
            ("--subnets", self.given.subnets, _SUBNET, "subnet-ID", "`aws ec2 describe-subnets` shows them"),
            ("--security-groups", self.given.security_groups, _GROUP, "sg-ID", "`aws ec2 describe-security-groups` shows them"),
        ):
            found.append(tuple(self._fits(flag, value, form, expected, ask) for value in values))
            if not values and (self.given.subnets or self.given.security_groups):
                self.faults.append(f"{flag}: not given: expected {expected}, as a VPC takes both: {ask}")
        return found[0], found[1]

    def _needs(self, document: Document, config: Config) -> Needs:
        """Of the container; memory_bytes is 0 where it cannot be told."""
        given: str | None = self.given.memory
        memory_bytes = None
        if given is not None:
            self._fits("--memory", given, _MEMORY, "an amount such as 512Mi or 4Gi")
            memory_bytes = int(given[:-2]) * {"Mi": 1 << 20, "Gi": 1 << 30}[given[-2:]] if _MEMORY.fullmatch(given) else 0
        sizes = artifact_sizes(document)
        known = all(size is not None for each in sizes for size in each)
        return of_ingress(config, sizes, memory_bytes if memory_bytes is not None or known else 0)

    def _real_time(self, needs: Needs) -> RealTime:
        types = self._types(needs)
        per_minute = self._per_minute(types)
        return RealTime(self._instances(types, self._ami(needs), scaled=per_minute is not None), per_minute)

    def _types(self, needs: Needs) -> tuple[str, ...]:
        """By their order, as SageMaker calls them."""
        measured = self.measured.instance_types if self.measured is not None else ()
        types = tuple(dict.fromkeys(f"{SAGEMAKER}{bare(name)}" for name in self.given.instance_types or measured))
        if not types:
            ask = "`loadtest prices list` shows them"
            self.faults.append(f"--instance-type: not given: expected one or more, such as ml.c7i.large: {ask}")
        if len(types) > _MOST_TYPES:
            self.faults.append(f"--instance-type: {len(types)} of them: expected {_MOST_TYPES} at most: leave out the last")
        for name in types:
            self.faults += map(str, of_type(name, bundled(), needs, architecture=self.given.architecture))
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
                self.faults.append(f"--requests-per-second: {rate:g}: expected a rate above 0")
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
