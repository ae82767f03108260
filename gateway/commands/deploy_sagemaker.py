"""`gateway deploy sagemaker`: an endpoint of a configuration, or of what `loadtest recommend` found. Dry, until --yes."""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from gateway.commands.deploy_on_aws import archive, now, of_ours
from gateway.commands.sagemaker_options import PAGE, add_options, wanted
from gateway.config import Config, config_of
from gateway.configuring.need_of_ray import need_of_ray
from gateway.deploying.calls import as_text
from gateway.deploying.contents import in_scratch
from gateway.deploying.price import monthly
from gateway.deploying.report import document_of
from gateway.deploying.sagemaker import Hosting, PackedModel, creation, scaling
from gateway.deploying.sagemaker_standing import StandingScale, told
from gateway.deploying.sagemaker_update import kept_scale, update
from gateway.deploying.sagemaker_ways import Asynchronous, BatchTransform, RealTime, instances_of
from gateway.documents.faults import ConfigFaults
from gateway.documents.reader import Document
from gateway.errors import ConfigError, PlatformRefused
from gateway.instances.facts import bundled
from gateway.process.command_line import add_command
from gateway.process.completion import completed_by_files
from gateway.process.console import words
from gateway.process.interrupts import ending_in_order

_BAKE_S: Final = 300


def add_parser(places: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `deploy sagemaker` to the command line."""
    named = "--image ACCOUNT.dkr.ecr.REGION.amazonaws.com/gateway:cpu --role-arn arn:aws:iam::ACCOUNT:role/ROLE --bucket BUCKET"
    command = add_command(
        places,
        "sagemaker",
        "make an endpoint of SageMaker",
        f"gateway deploy sagemaker configs/examples/iris.yaml --instance-type ml.c7i.large {named}",
        f"gateway deploy sagemaker loadtest-results/minilm-local/report.json {named} --yes",
        more="Prints every call that it would make, in their order, and what the endpoint would cost; nobody is asked. With "
        f"--yes it makes them, and waits until the endpoint is in service. {PAGE} says who builds the image, and what the "
        "role may do.",
    )
    config = command.add_argument(
        "config", metavar="CONFIG|REPORT", help="a configuration, or the report.json of `loadtest recommend`, or its folder"
    )
    completed_by_files(config)
    command.add_argument("--yes", action="store_true", help="make the calls; without it they are printed")
    add_options(command)
    command.set_defaults(run=_sagemaker)


@ending_in_order()
def _sagemaker(arguments: argparse.Namespace) -> int:
    document, measured = document_of(arguments.config)
    asked = wanted(arguments, document, _servable(document), measured, begun=now().isoformat())
    with tempfile.TemporaryDirectory(prefix="gateway-deploy-") as folder:
        hosting = asked.hosting
        if not hosting.package:
            remedy = "`gateway package` writes it: upload it yourself, and name it with --model-data"
            if server := document.value.get("server"):
                document = replace(document, value=document.value | {"server": in_scratch(server)})
            sent = archive(document, Path(folder) / "model.tar.gz", remedy)
            hosting = replace(hosting, package=PackedModel(sent.path, sent.bytes, sent.sha256, arguments.bucket))
        for note in asked.notes:
            words.info("Note: %s.", note)
        if not arguments.yes:
            print(as_text(update(hosting, bake_s=_bake_s(arguments)) if arguments.update else creation(hosting)))
            print("\n".join(f"# {line}" for line in _price(hosting)))
            words.info("Nothing was called: --yes makes these calls.")
        elif arguments.update:
            _update(hosting, _bake_s(arguments))
        else:
            _create(hosting)
    return 0


def _bake_s(arguments: argparse.Namespace) -> int:
    return _BAKE_S if arguments.bake_minutes is None else 60 * int(arguments.bake_minutes)


def _create(hosting: Hosting) -> None:
    """Raises: ConfigError, if something of this name stands there already; PlatformRefused."""
    from gateway.aws.client import Aws
    from gateway.aws.deployment import Deploying
    from gateway.aws.standing import check_bucket, standing

    platform = Aws(hosting.region)
    if isinstance(hosting.package, PackedModel):
        check_bucket(platform, hosting.package.bucket)
    remove = _removing(hosting)
    found = of_ours(standing(platform, hosting.name))
    if not found.nothing and not isinstance(hosting.way, BatchTransform):  # a job stands beside what else there is
        stands = "\n  ".join(told(found, bundled(), now()))
        remedy = f"{remove} removes it, --update gives it this configuration, or choose another"
        raise ConfigError(f"--name: {hosting.name}: stands already: {remedy}\n  {stands}")
    for line in _price(hosting):
        words.info("%s", line)
    of_left = _stopping(hosting) if isinstance(hosting.way, BatchTransform) else ""
    Deploying(platform).carry_out(creation(hosting), remedy=remove, of_left=of_left)
    if isinstance(hosting.way, BatchTransform):
        print(f"{hosting.state}: done; the answers are under {hosting.way.output}")
        return
    print("\n".join(told(standing(platform, hosting.name), bundled(), now())))
    words.info("%s removes it.", remove)


def _update(hosting: Hosting, bake_s: int) -> None:
    """Raises: ConfigError, if there is no endpoint that could be given another configuration; PlatformRefused."""
    from gateway.aws.client import Aws
    from gateway.aws.deployment import Deploying
    from gateway.aws.standing import check_bucket, standing

    platform = Aws(hosting.region)
    if isinstance(hosting.package, PackedModel):
        check_bucket(platform, hosting.package.bucket)
    found = of_ours(standing(platform, hosting.name))
    if found.unseen_scaling:  # it could not be put back
        raise PlatformRefused("\n".join(found.unseen_scaling), "AccessDenied")
    if found.endpoint is None:
        raise ConfigError(f"--update: there is no endpoint {hosting.name} in {hosting.region}: leave --update out")
    if not (calls := update(hosting, found, bake_s=bake_s)):
        remedy = ". It is not scaled: --requests-per-second with --max-instances scales it"
        scaled = found.scale is not None and (found.scale.policies or found.scale.scheduled)
        unscaled = remedy if not scaled and isinstance(hosting.way, RealTime | Asynchronous) else ""
        has = f"{hosting.name} has this configuration, {hosting.state}"
        raise ConfigError(f"--update: {has}: there is nothing to change{unscaled}")
    if found.endpoint.status != "InService":
        remedy = f"wait, or remove it with {_removing(hosting)}"
        raise ConfigError(f"--update: {hosting.name} is {found.endpoint.status}: expected InService: {remedy}")
    scale = kept_scale(hosting, found)
    for line in _price(hosting, scale):
        words.info("%s", line)
    shifted = found.endpoint.configuration != hosting.state
    if shifted:
        words.info("While the traffic is shifted both fleets cost.")
        watching = [call.parameters.get("AlarmName") for call in calls]
        for alarm in (alarm for alarm in found.alarms if alarm.rings and alarm.name in watching):
            remedy = f"{PAGE} says how to mend such an endpoint"
            words.warning("The alarm %s is in ALARM, by what runs now: SageMaker may roll this back: %s.", alarm.name, remedy)
    again = "If it was scaled, the same --update scales it again."
    if scale is not None:
        if scale.least < scale.most:
            words.info("Note: it stays scaled %s: --requests-per-second names another rate.", scale)
        else:
            remedy = "--requests-per-second with --max-instances scales it"
            words.info("Note: it is scaled %s, and will not be any more: it has %d then: %s.", found.scale, scale.least, remedy)
        again = f"It was scaled {found.scale}: --update with --requests-per-second and --max-instances scales it again."
    elif found.scale is not None and not scaling(hosting):
        words.info("Note: it is scaled %s, and will not be any more.", found.scale)
        again = ""
    look = f"`gateway status {hosting.name} --region {hosting.region} --on sagemaker` tells what runs"
    of_left = f"{look}; what does not costs next to nothing, and goes with the endpoint. "
    Deploying(platform).carry_out(calls, remedy=_removing(hosting), of_left=f"{of_left}{again}".rstrip())
    print("\n".join(told(standing(platform, hosting.name), bundled(), now())))
    if shifted:
        words.info("Its former configuration, %s, is kept, to go back to.", found.endpoint.configuration)


def _removing(hosting: Hosting) -> str:
    bucket = f" --bucket {hosting.package.bucket}" if isinstance(hosting.package, PackedModel) else ""
    return f"`gateway undeploy {hosting.name} --region {hosting.region} --on sagemaker{bucket} --yes`"


def _stopping(job: Hosting) -> str:
    """What removes a job alone: `undeploy` takes all that has its deployment's name, also an endpoint that serves."""
    place = f"--region {job.region}"
    stop = f"`aws sagemaker stop-transform-job {place} --transform-job-name {job.state}` stops the job"
    removed = [f"`aws sagemaker delete-model {place} --model-name {job.state}`"]
    if isinstance(job.package, PackedModel):
        removed.append(f"`aws s3 rm {job.model_data} {place}`")
    return f"{stop}; once it has ended, {' and '.join(removed)} remove what it needed."


def _servable(document: Document) -> Config:
    """Raises: ConfigError, if no container of SageMaker can serve it."""
    config = config_of(document)
    need, remedy = need_of_ray(config)
    if need:
        raise ConfigError(f"{document.source}: {need}, which needs Ray, but a container is one process: {remedy}")
    faults = []
    if config.server.tls is not None:
        found = "SageMaker speaks HTTP to the container, and TLS to its clients"
        faults.append(document.fault(("server", "tls"), found, remedy="leave it out", value=False))
    if config.server.access is not None:
        found = "SageMaker shows no key to the container: IAM says who may invoke the endpoint"
        faults.append(document.fault(("server", "access"), found, remedy="leave it out", value=False))
    if faults:
        raise ConfigFaults(faults)
    return config


def _price(hosting: Hosting, kept: StandingScale | None = None) -> list[str]:
    """kept: what goes on scaling it, whatever it asks for."""
    on_top = "S3, CloudWatch and what is sent over the network come on top."
    instances = instances_of(hosting.way)
    if instances is None:
        return ["Price: by request and by the time that it takes, nothing while nobody asks; not known here.", on_top]
    bounds = instances if kept is None else kept
    lines = monthly(
        instances.types,
        bounds.least,
        bounds.most,
        bundled(),
        region=hosting.region,
        today=now().date(),
        for_ever=not isinstance(hosting.way, BatchTransform),
    )
    return [*lines, on_top]
