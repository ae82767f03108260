"""What Kubernetes would say of a manifest, by the schemas that are published: an unknown field is an error."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import yaml

CRDS = Path(os.environ.get("KUBERNETES_CRDS", "none"))
"""A folder with definitions of custom resources as their operators publish them, any *.yaml."""

_FOLDER: Final = Path(__file__).parent / "schemas"
_KUBERNETES: Final = {
    "ConfigMap": "core.v1.ConfigMap",
    "Service": "core.v1.Service",
    "Deployment": "apps.v1.Deployment",
    "NetworkPolicy": "networking.v1.NetworkPolicy",
    "PodDisruptionBudget": "policy.v1.PodDisruptionBudget",
    "HorizontalPodAutoscaler": "autoscaling.v2.HorizontalPodAutoscaler",
}
_PARTS: Final = {
    "container": "core.v1.Container",
    "container-security": "core.v1.SecurityContext",
    "pod": "core.v1.PodTemplateSpec",
    "pod-security": "core.v1.PodSecurityContext",
    "resources": "core.v1.ResourceRequirements",
    "secret-key": "core.v1.SecretKeySelector",
    "service": "core.v1.Service",
    "spread": "core.v1.TopologySpreadConstraint",
    "toleration": "core.v1.Toleration",
    "volume": "core.v1.Volume",
}
_TEXTS: Final = {"type": "object", "additionalProperties": {"type": "string"}}


def faults(manifest: dict[str, Any]) -> list[str]:
    """Where it does not fit, and why; none: it is well-formed."""
    found = jsonschema.Draft202012Validator(_schema(manifest["kind"])).iter_errors(manifest)
    return [f"{manifest['kind']}: {error.json_path}: {error.message[:200]}" for error in found]


def faults_by_its_operator(manifest: dict[str, Any]) -> list[str]:
    """The same, by the definition in CRDS. Raises: KeyError, where there is none."""
    found = jsonschema.Draft202012Validator(_published()[manifest["apiVersion"], manifest["kind"]]).iter_errors(manifest)
    return [f"{manifest['kind']}: {error.json_path}: {error.message[:200]}" for error in found]


@cache
def _published() -> dict[tuple[str, str], dict[str, Any]]:
    definitions = [yaml.safe_load(path.read_text())["spec"] for path in CRDS.glob("*.yaml")]
    return {
        (f"{definition['group']}/{version['name']}", definition["names"]["kind"]): _strict(version["schema"]["openAPIV3Schema"])
        for definition in definitions
        for version in definition["versions"]
    }


def _strict(schema: Any) -> Any:
    """As the API server takes it where it is asked to be strict."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    parts = {
        key: _strict(part) for key, part in schema.items() if key not in ("properties", "format", "default", "description")
    }
    if "properties" in schema:
        parts["properties"] = {key: _strict(part) for key, part in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            parts.setdefault("additionalProperties", False)
    return parts


@cache
def _schema(kind: str) -> dict[str, Any]:
    definitions = json.loads((_FOLDER / "kubernetes.json").read_text())
    if kind in _KUBERNETES:
        return definitions | {"$ref": f"#/$defs/io.k8s.api.{_KUBERNETES[kind]}", "required": ["apiVersion", "kind", "metadata"]}
    return definitions | _written(yaml.safe_load((_FOLDER / "resources.yaml").read_text())[kind])


def _written(form: Any) -> dict[str, Any]:
    if isinstance(form, list):
        return {"type": "array", "items": _written(form[0])}
    if isinstance(form, dict):
        if "enum" in form:
            return form
        return {
            "type": "object",
            "properties": {key.rstrip("!"): _written(part) for key, part in form.items()},
            "required": [key.rstrip("!") for key in form if key.endswith("!")],
            "additionalProperties": False,
        }
    if form.startswith("k8s:"):
        part = form.removeprefix("k8s:")
        name = f"api.{_PARTS[part]}" if part in _PARTS else f"apimachinery.pkg.apis.meta.v1.{_META[part]}"
        return {"$ref": f"#/$defs/io.k8s.{name}"}
    return _TEXTS if form == "texts" else {"type": form}


_META: Final = {"meta": "ObjectMeta", "selector": "LabelSelector"}
