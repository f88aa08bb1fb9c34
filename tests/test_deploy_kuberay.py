"""Replicas on KubeRay: fields are valid, and the parts of the file agree.

KubeRay does not run here. Pods and the service are validated by Kubernetes' own schemas, the
RayCluster by KubeRay's.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from lockstep.serve.http.access import OPEN_PATHS
from tests.test_deploy import CONTAINER, FLAGS, PORT

FILE = Path(__file__).parent.parent / "deploy" / "kubernetes" / "kuberay.yaml"
CLUSTER, SERVICE = yaml.safe_load_all(FILE.read_text())
HEAD = CLUSTER["spec"]["headGroupSpec"]["template"]
(WORKERS,) = CLUSTER["spec"]["workerGroupSpecs"]
RAY_HEAD, SERVER = HEAD["spec"]["containers"]
VERSION = "1.30"


def argument(flag: str) -> str:
    value: str = SERVER["args"][SERVER["args"].index(flag) + 1]
    return value


def test_options_exist() -> None:
    flags = [argument for argument in SERVER["args"] if argument.startswith("--")]
    assert flags and not [flag for flag in flags if flag not in FLAGS]


RAY_SPEC = json.loads((Path(__file__).parent / "data" / "raycluster_spec.json").read_text())
"""KubeRay's own schema of a RayCluster at feeaf72f (August 2026), without pods."""


def test_ray_cluster_is_valid() -> None:
    assert CLUSTER["apiVersion"] == "ray.io/v1" and CLUSTER["kind"] == "RayCluster"
    jsonschema.validate(CLUSTER["spec"], RAY_SPEC)
    group = WORKERS | {"maxReplica": 4}
    for wrong in ({"workerGroupSpec": []}, {"workerGroupSpecs": [group]}, {"rayVersion": 2.6}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(CLUSTER["spec"] | wrong, RAY_SPEC)
    kubernetes_validate.validate(SERVICE, VERSION, strict=True)


@pytest.mark.parametrize("template", [HEAD, WORKERS["template"]], ids=["head", "workers"])
def test_ray_pods_are_valid(template: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"} | template["metadata"]}
    kubernetes_validate.validate(pod | {"spec": template["spec"]}, VERSION, strict=True)
    spec = template["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    volumes = {volume["name"] for volume in spec["volumes"]}
    mounted = {mount["name"] for one in spec["containers"] for mount in one["volumeMounts"]}
    assert mounted == volumes
    images = {one["image"] for one in spec["containers"]}
    assert images == {CONTAINER["image"]}


def test_ray_has_a_worker_and_a_gpu_for_each_replica() -> None:
    replicas = int(argument("--replicas"))
    assert WORKERS["replicas"] == WORKERS["minReplicas"] == replicas
    (worker,) = WORKERS["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert CLUSTER["spec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"


def test_the_server_shares_the_session_of_the_head() -> None:
    shared = {mount["mountPath"]: mount["name"] for mount in RAY_HEAD["volumeMounts"]}
    assert {"/tmp/ray", "/dev/shm"} <= set(shared)
    mounts = {mount["mountPath"]: mount["name"] for mount in SERVER["volumeMounts"]}
    assert shared.items() <= mounts.items()


def test_the_server_has_the_token_of_the_cluster() -> None:
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}
    variables = {one["name"]: one for one in SERVER["env"]}
    assert variables["RAY_AUTH_MODE"]["value"] == "token"
    secret = variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": CLUSTER["metadata"]["name"], "key": "auth_token"}


def test_the_service_finds_the_head() -> None:
    assert SERVICE["spec"]["selector"].items() - HEAD["metadata"]["labels"].items() == {
        ("ray.io/node-type", "head")
    }, "KubeRay adds this label"
    (port,) = SERVICE["spec"]["ports"]
    assert {"name": port["targetPort"], "containerPort": PORT} in SERVER["ports"]
    for name in ("startupProbe", "readinessProbe"):
        assert SERVER[name]["httpGet"]["path"] in OPEN_PATHS
