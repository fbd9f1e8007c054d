"""A Compute Engine for tests: Ray's own provider talks to it over httplib2, and what Google would
refuse it refuses, too.

What an instance may say is taken from Google's own description of its API, which comes with
google-api-python-client; the rules that are not in there (what goes with spot machines and GPUs,
names, zones) are written down here, from Google's documentation.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import urllib.parse
from pathlib import Path
from typing import Any

import googleapiclient
import httplib2
import jsonschema
import pytest

PROJECT = "my-project"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL, VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")


@functools.cache
def description() -> dict[str, Any]:
    """Return Google's description of the API of Compute Engine."""
    folder = Path(googleapiclient.__file__).parent / "discovery_cache" / "documents"
    return json.loads((folder / "compute.v1.json").read_text())


@functools.cache
def instance_schema() -> jsonschema.Draft202012Validator:
    """Return a schema that refuses what Google does not know."""
    definitions = {name: _strict(schema) for name, schema in description()["schemas"].items()}
    return jsonschema.Draft202012Validator({"$defs": definitions, "$ref": "#/$defs/Instance"})


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return {"$ref": f"#/$defs/{schema['$ref']}"}
    match schema.get("type"):
        case "object" if "properties" in schema:
            properties = {name: _strict(each) for name, each in schema["properties"].items()}
            return {"type": "object", "properties": properties, "additionalProperties": False}
        case "object":
            return {
                "type": "object",
                "additionalProperties": _strict(schema.get("additionalProperties", {})),
            }
        case "array":
            return {"type": "array", "items": _strict(schema["items"])}
        case "string" if schema.get("format") in ("int64", "uint64"):
            return {"type": ["string", "integer"]}  # JSON has no such numbers; Google takes both
        case "string" if "enum" in schema:
            return {"enum": schema["enum"]}
        case "string" | "integer" | "number" | "boolean" as kind:
            return {"type": kind}
    return {}


class FakeGce:
    """A project, with its machines, its keys and its accounts."""

    def __init__(self) -> None:
        self.instances: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.metadata: dict[str, Any] = {"fingerprint": "x", "items": []}
        self.policy: dict[str, Any] = {"bindings": [], "etag": "x"}
        self.accounts: dict[str, Any] = {}
        self._numbers = itertools.count(1)

    @property
    def gpus(self) -> int:
        return sum(
            each["acceleratorCount"]
            for instance in self.instances.values()
            for each in instance.get("guestAccelerators", [])
        )

    def machine_types(self) -> list[str]:
        return sorted(
            instance["machineType"].rpartition("/")[2] for instance in self.instances.values()
        )

    def preempt(self, name: str) -> None:
        """Take a spot machine back, as it asked for."""
        assert self.instances[name]["scheduling"]["provisioningModel"] == "SPOT"
        assert self.instances[name]["scheduling"]["instanceTerminationAction"] == "DELETE"
        del self.instances[name]

    def request(
        self, uri: str, method: str = "GET", body: Any = None
    ) -> tuple[httplib2.Response, bytes]:
        url = urllib.parse.urlparse(uri)
        self.requests.append(f"{method} {url.netloc}{url.path}")
        try:
            status, answer = (
                200,
                self._answer(
                    method, url.netloc, url.path, dict(urllib.parse.parse_qsl(url.query)), body
                ),
            )
        except Refused as error:
            status, answer = error.status, {"error": {"code": error.status, "message": str(error)}}
        return (
            httplib2.Response({"status": str(status), "content-type": "application/json"}),
            json.dumps(answer).encode(),
        )

    def _answer(self, method: str, host: str, path: str, query: dict[str, str], body: Any) -> Any:
        if host == "oauth2.googleapis.com":
            return {"access_token": "x", "expires_in": 3600, "token_type": "Bearer"}
        content = json.loads(body) if body else {}
        if host == "cloudresourcemanager.googleapis.com":
            return self._resource_manager(path, content)
        if host == "iam.googleapis.com":
            return self._accounts(method, path, content)
        assert host == "compute.googleapis.com", host
        return self._compute(method, path, query, content)

    def _resource_manager(self, path: str, content: Any) -> Any:
        if path.endswith(":getIamPolicy"):
            return self.policy
        if path.endswith(":setIamPolicy"):
            self.policy = content["policy"]
            return self.policy
        if path != f"/v1/projects/{PROJECT}":
            raise Refused(403, f"no such project: {path}")
        return {"projectId": PROJECT, "lifecycleState": "ACTIVE"}

    def _accounts(self, method: str, path: str, content: Any) -> Any:
        if method == "POST":
            email = f"{content['accountId']}@{PROJECT}.iam.gserviceaccount.com"
            self.accounts[email] = {"email": email, "projectId": PROJECT}
            return self.accounts[email]
        email = path.rpartition("/")[2]
        if email not in self.accounts:
            raise Refused(404, "no such account")
        return self.accounts[email]

    def _compute(self, method: str, path: str, query: dict[str, str], content: Any) -> Any:
        place = path.removeprefix(f"/compute/v1/projects/{PROJECT}")
        if place == path:
            raise Refused(403, f"no such project: {path}")
        match place.split("/")[1:]:
            case []:
                return {"name": PROJECT, "commonInstanceMetadata": self.metadata}
            case ["setCommonInstanceMetadata"]:
                self.metadata = content
                return self._done()
            case ["regions", region, "subnetworks"]:
                return {
                    "items": [
                        {"selfLink": f"projects/{PROJECT}/regions/{region}/subnetworks/default"}
                    ]
                }
            case ["zones", _, "operations", _] | ["global", "operations", _]:
                return self._done()
            case ["zones", zone, "instances", *rest]:
                return self._instances(method, zone, rest, query, content)
        raise Refused(404, f"{method} {path}")

    def _instances(
        self, method: str, zone: str, rest: list[str], query: dict[str, str], content: Any
    ) -> Any:
        match method, rest:
            case "GET", []:
                there = [each for each in self.instances.values() if each["zone"] == zone]
                return {
                    "items": [each for each in there if _matches(each, query.get("filter", ""))]
                }
            case "POST", []:
                return self._insert(zone, content)
        name, *action = rest
        if name not in self.instances:
            raise Refused(404, f"no instance {name}")
        match method, action:
            case "GET", []:
                return self.instances[name]
            case "DELETE", []:
                del self.instances[name]
            case "POST", ["setLabels"]:
                _check_labels(content["labels"])
                self.instances[name]["labels"] = content["labels"]
            case _:
                raise Refused(404, f"{method} {rest}")
        return self._done()

    def _insert(self, zone: str, content: dict[str, Any]) -> Any:
        errors = sorted(
            instance_schema().iter_errors(content), key=lambda error: list(map(str, error.path))
        )
        if errors:
            raise Refused(
                400,
                "; ".join(
                    f"{'.'.join(map(str, error.path))}: {error.message[:200]}" for error in errors
                ),
            )
        _check_instance(zone, content)
        number = next(self._numbers)
        network = content["networkInterfaces"][0]
        network["networkIP"] = f"10.0.0.{number}"
        for access in network.get("accessConfigs", []):
            access["natIP"] = f"192.0.2.{number}"
        made = {"status": "RUNNING", "labelFingerprint": "x", "id": str(number), "zone": zone}
        self.instances[content["name"]] = {**content, **made}
        return self._done()

    def _done(self) -> dict[str, Any]:
        return {"name": f"operation-{next(self._numbers)}", "status": "DONE"}


class Refused(Exception):
    """Google's answer is an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _matches(instance: dict[str, Any], expression: str) -> bool:
    """Say whether an instance is one that Ray asks for: its labels and its status."""
    labels = re.findall(r"\(labels\.([\w-]+) = ([^)]+)\)", expression)
    statuses = re.findall(r"\(status = (\w+)\)", expression)
    return (
        all(instance["labels"].get(name) == value for name, value in labels)
        and instance["status"] in statuses
    )


def _check_instance(zone: str, instance: dict[str, Any]) -> None:
    """Refuse what Google refuses of an instance that is well-formed."""
    if not NAME.fullmatch(instance["name"]):
        raise Refused(400, f"Invalid value for field 'resource.name': {instance['name']!r}")
    _check_labels(instance["labels"])
    if not re.fullmatch(rf"zones/{zone}/machineTypes/[a-z][a-z0-9-]+", instance["machineType"]):
        raise Refused(
            400, f"Invalid value for field 'resource.machineType': {instance['machineType']!r}"
        )
    for accelerator in instance.get("guestAccelerators", []):
        if not re.fullmatch(
            rf"projects/{PROJECT}/zones/{zone}/acceleratorTypes/nvidia-[a-z0-9-]+",
            accelerator["acceleratorType"],
        ):
            raise Refused(404, f"The resource {accelerator['acceleratorType']!r} was not found")
    _check_disks(zone, instance)
    _check_scheduling(instance)


def _check_labels(labels: dict[str, str]) -> None:
    for name, value in labels.items():
        if not LABEL.fullmatch(name) or not VALUE.fullmatch(value):
            raise Refused(400, f"Invalid value for field 'resource.labels': {name}={value}")


def _check_disks(zone: str, instance: dict[str, Any]) -> None:
    disks = instance.get("disks", [])
    if not disks or disks[0].get("boot") is not True:
        raise Refused(
            400, "Invalid value for field 'resource.disks': the first must be a boot disk"
        )
    for disk in disks:
        parameters = disk["initializeParams"]
        if not parameters.get("sourceImage", "").startswith("projects/"):
            raise Refused(
                400, "Invalid value for field 'resource.disks[0].initializeParams.sourceImage'"
            )
        if not re.fullmatch(
            rf"zones/{zone}/diskTypes/(pd|hyperdisk)-[a-z]+", parameters["diskType"]
        ):
            raise Refused(
                400,
                "Invalid value for field 'resource.disks[0].initializeParams.diskType':"
                f" {parameters['diskType']!r}",
            )


def _check_scheduling(instance: dict[str, Any]) -> None:
    scheduling = instance.get("scheduling", {})
    is_spot = scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible") is True
    has_gpus = bool(instance.get("guestAccelerators")) or instance["machineType"].rpartition("/")[
        2
    ].startswith(("a2-", "a3-", "g2-"))
    if has_gpus and scheduling.get("onHostMaintenance") != "TERMINATE":
        raise Refused(400, "Instances with guest accelerators do not support live migration.")
    if is_spot and scheduling.get("onHostMaintenance", "TERMINATE") != "TERMINATE":
        raise Refused(
            400, "Scheduling must have preemptible be false when onHostMaintenance isn't TERMINATE."
        )
    if is_spot and scheduling.get("automaticRestart", True) is not False:
        raise Refused(
            400, "Scheduling must have preemptible be false when AutomaticRestart is true."
        )
    if "instanceTerminationAction" in scheduling and not is_spot:
        raise Refused(
            400,
            "You cannot specify a termination action for a VM instance that has the standard"
            " provisioning model.",
        )


def install(monkeypatch: pytest.MonkeyPatch, home: Path) -> FakeGce:
    """Have everything that would go to Google go to a new fake; credentials are read from a file,
    as a user's are.
    """
    gce = FakeGce()

    def request(
        self: object, uri: str, method: str = "GET", body: Any = None, *_: Any, **__: Any
    ) -> Any:
        return gce.request(uri, method, body)

    monkeypatch.setattr(httplib2.Http, "request", request)
    key = {
        "type": "authorized_user",
        "client_id": "x",
        "client_secret": "x",
        "refresh_token": "x",
        "quota_project_id": PROJECT,
    }
    (home / "key.json").write_text(json.dumps(key))
    for name, value in (
        ("HOME", str(home)),
        ("GOOGLE_APPLICATION_CREDENTIALS", str(home / "key.json")),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", PROJECT)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    return gce
