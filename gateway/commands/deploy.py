"""`gateway deploy`: what a platform needs to run a configuration. `kubernetes` prints it, and asks nobody."""

import argparse
import re
from pathlib import Path
from typing import Final

from gateway.commands import deploy_ec2, deploy_sagemaker
from gateway.commands.deploy_options import MEMORY, fits, memory_bytes, named
from gateway.config import Config
from gateway.configuring.need_of_ray import need_of_ray
from gateway.deploying.contents import MODELS, Contents, contents
from gateway.deploying.kubernetes import deployment, files, kserve, stream
from gateway.deploying.pod import Manifest, Models, Rollout
from gateway.deploying.preflight import BUCKET
from gateway.deploying.ray_groups import without_surge
from gateway.deploying.rayservice import rayservice
from gateway.deploying.report import document_of
from gateway.documents.whole_file import asked_by, write_whole
from gateway.errors import ConfigError
from gateway.process.command_line import add_command
from gateway.process.completion import completed_by_files
from gateway.process.console import words

_IMAGE: Final = re.compile(r"[a-z0-9][\w.:/@-]*", re.ASCII)
_CLAIM: Final = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # a label of RFC 1123: no dots
_URI: Final = re.compile(r"[a-z][a-z0-9+-]*://\S+")
_CPU: Final = re.compile(r"(?=.*[1-9])(\d+(\.\d{1,3})?|\d+m)", re.ASCII)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `deploy` to the command line, with a command for each place."""
    command = add_command(
        commands,
        "deploy",
        "put a configuration onto a platform",
        "gateway deploy kubernetes configs/examples/iris.yaml --no-ray --image REGISTRY/gateway:cpu --models pvc:models "
        "--memory 2Gi",
        "gateway deploy sagemaker configs/examples/iris.yaml --help",
    )
    places = command.add_subparsers(required=True, metavar="COMMAND")
    _add_kubernetes(places)
    deploy_sagemaker.add_parser(places)
    deploy_ec2.add_parser(places)


def _add_kubernetes(places: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = add_command(
        places,
        "kubernetes",
        "print the manifests of a gateway on Kubernetes",
        "gateway deploy kubernetes configs/examples/linear.yaml --no-ray --image REGISTRY/gateway:cpu --models image:/models",
        "gateway deploy kubernetes configs/examples/iris.yaml --image REGISTRY/gateway:cpu --models pvc:models/iris "
        "--memory 2Gi --output manifests",
        "gateway deploy kubernetes configs/examples/iris.yaml --kserve --image REGISTRY/gateway:cpu "
        "--models s3://BUCKET/iris --memory 2Gi",
        more="A RayService of KubeRay; with --no-ray a plain Deployment, with --kserve a ServingRuntime and an "
        "InferenceService. Beside it: the configuration, Service, PodDisruptionBudget, PodMonitor, and for Deployments a "
        "HorizontalPodAutoscaler. No cluster is asked. Secrets are named, never written: docs/kubernetes.md says which.",
    )
    config = command.add_argument(
        "config",
        metavar="CONFIG|REPORT",
        help="a YAML file (`gateway examples` has some), or the report.json of `loadtest recommend`",
    )
    completed_by_files(config)
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--no-ray", action="store_true", help="a Deployment of plain processes; refused if that needs Ray")
    kind.add_argument("--kserve", action="store_true", help="a runtime of KServe, and an InferenceService that uses it")
    command.add_argument("--image", required=True, help="of docker/Dockerfile, as the cluster pulls it")
    command.add_argument(
        "--models",
        required=True,
        metavar="WHERE",
        help=f"how models get into a pod: image:FOLDER (they are in the image), pvc:CLAIM[/FOLDER] (mounted at {MODELS}), or "
        "s3://BUCKET/FOLDER (copied there before it starts); with --kserve any URI that KServe copies",
    )
    command.add_argument("--fetcher", metavar="IMAGE", help="with s3:// on a Deployment or on Ray: an image that has `aws`")
    command.add_argument("--name", help="of what is made; as the first model is called")
    command.add_argument("--namespace", default="", metavar="NAME", help="where it is made; as kubectl is set")
    command.add_argument("--replicas", type=int, metavar="N", help="pods that listen, at least (2, or server.ingress_replicas)")
    command.add_argument("--max-replicas", type=int, metavar="N", help="to scale to; not on Ray (twice --replicas)")
    command.add_argument(
        "--requests-per-second",
        type=float,
        metavar="RATE",
        help="that one pod is to serve, as `loadtest recommend` found, to scale by that (by the busy share of sessions)",
    )
    command.add_argument("--cpu", help="cores of a pod that listens, such as 4 or 500m (as the sessions need)")
    command.add_argument("--memory", help="of a pod, such as 4Gi (as the files of its models need, where that can be told)")
    command.add_argument("--service-account", default="", metavar="NAME", help="of the pods, for who may read the bucket")
    command.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write a file for each, and kustomization.yaml; what stands there is replaced",
    )
    command.set_defaults(run=_kubernetes)


def _kubernetes(arguments: argparse.Namespace) -> int:
    models = _models(arguments)
    document, _ = document_of(arguments.config)  # manifests name no instance type, and no rate
    held = contents(document, models.place if models.kind == "image" else MODELS)
    rollout = _rollout(arguments, models, held.config)
    manifests = _manifests(arguments, held, rollout)
    output: Path | None = arguments.output
    told = {} if output is None else files(manifests, rollout)
    package = held.package if output is None else held.package.without(output / name for name in told)
    if package.files:
        where = models.place if models.kind == "image" else MODELS
        words.info("%s is to hold, as in %s:\n  %s", where, package.root, "\n  ".join(package.files))
    on_ray = not arguments.no_ray and not arguments.kserve
    if on_ray and (note := without_surge(held.config, rollout.replicas)):
        words.info("%s", note)
    if output is None:
        print(stream(manifests, rollout), end="")
        return 0
    with asked_by("--output", folder=True):
        output.mkdir(parents=True, exist_ok=True)
        for name, text in told.items():
            write_whole(output / name, text)
    for name in told:
        print(output / name)
    return 0


def _manifests(arguments: argparse.Namespace, held: Contents, rollout: Rollout) -> list[Manifest]:
    if not arguments.no_ray and not arguments.kserve:
        return rayservice(held, rollout)
    need, remedy = need_of_ray(held.config)
    if need:
        flag = "--no-ray" if arguments.no_ray else "--kserve"
        raise ConfigError(f"{flag}: {need}, which needs Ray: leave {flag} out, or {remedy}")
    return deployment(held, rollout) if arguments.no_ray else kserve(held, rollout)


def _models(arguments: argparse.Namespace) -> Models:
    where, fetcher = arguments.models, arguments.fetcher
    kind, _, place = where.partition(":")
    copied = kind == "s3" and not arguments.kserve
    if fetcher is not None and not copied:
        raise ConfigError(f"--fetcher: {fetcher}: expected none: only models at s3:// are copied by it, and not for KServe")
    if arguments.kserve:
        return Models("kserve", fits("--models", where, _URI, "a URI that KServe copies, such as s3://BUCKET/FOLDER"))
    if kind == "image":
        return Models(kind, fits("--models", place, re.compile(r"/\S*[^\s/]"), "image:FOLDER, an absolute path"))
    if kind == "pvc":
        claim, _, folder = place.partition("/")
        fits("--models", claim, _CLAIM, "pvc:CLAIM, or pvc:CLAIM/FOLDER")
        if ".." in folder.split("/"):
            raise ConfigError(f"--models: {where}: expected a folder of the claim")
        return Models(kind, claim, folder.strip("/"))
    if not copied:
        raise ConfigError(f"--models: {where}: expected image:FOLDER, pvc:CLAIM[/FOLDER] or s3://BUCKET/FOLDER")
    fits("--models", where, re.compile(rf"s3://{BUCKET}(/\S*)?"), "s3://BUCKET/FOLDER")
    if fetcher is None:
        raise ConfigError("--fetcher: not given: expected an image that has `aws`, which copies the models from s3://")
    return Models(kind, where, fetcher=fits("--fetcher", fetcher, _IMAGE, "an image"))


def _rollout(arguments: argparse.Namespace, models: Models, config: Config) -> Rollout:
    name = named(arguments.name, config)
    if arguments.namespace:
        fits("--namespace", arguments.namespace, _NAMESPACE, "1 to 63 of a-z, 0-9 and -, no - at either end")
    if arguments.service_account:
        fits("--service-account", arguments.service_account, _CLAIM, "a name of Kubernetes")
    rate, memory = arguments.requests_per_second, arguments.memory
    if rate is not None and not 0.001 <= rate <= 1e9:
        raise ConfigError(f"--requests-per-second: {rate:g}: expected 0.001 to 1000000000")
    if arguments.cpu is not None:
        fits("--cpu", arguments.cpu, _CPU, "cores, such as 4, 0.5 or 500m")
    if memory is not None:
        fits("--memory", memory, *MEMORY)
    return Rollout(
        name,
        fits("--image", arguments.image, _IMAGE, "an image, such as registry.example.com/gateway:cpu"),
        models,
        *_replicas(arguments, config),
        requests_per_second=rate,
        memory_bytes=None if memory is None else memory_bytes(memory),
        cpu=arguments.cpu,
        namespace=arguments.namespace,
        service_account=arguments.service_account,
    )


def _replicas(arguments: argparse.Namespace, config: Config) -> tuple[int, int]:
    """At least, and at most."""
    least, most = arguments.replicas, arguments.max_replicas
    if least is None:
        least = max(2, config.server.ingresses)
    if least < 1:
        raise ConfigError(f"--replicas: {least}: expected 1 or more")
    for flag, given in (("--max-replicas", most), ("--requests-per-second", arguments.requests_per_second)):
        if given is not None and not (arguments.no_ray or arguments.kserve):
            remedy = "a RayService is scaled by `autoscaling` of its backends"
            raise ConfigError(f"{flag}: {given}: expected none without --no-ray or --kserve: {remedy}")
    if most is not None and most < least:
        raise ConfigError(f"--max-replicas: {most}: expected {least} or more, which is --replicas")
    return least, 2 * least if most is None else most
