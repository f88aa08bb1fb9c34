"""Tests of the files for llm-d's router: patches apply, fields are valid, both sides agree.

No cluster, kustomize or Helm runs here. The patches of the overlay are applied by the rules of
JSON Patch, and the result is validated by Kubernetes' own schemas.
"""

import copy
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lockstep.cache.events_config import KVEventsConfig
from tests.test_deploy import CONTAINER, FLAGS, OBJECTS, PORT

DEPLOY = Path(__file__).parent.parent / "deploy"
LLM_D = DEPLOY / "kustomize" / "llm-d"
PAGE = 64
VERSION = "1.30"


def apply_patch(target: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an object after a JSON patch (RFC 6902) of add, replace and remove."""
    result = copy.deepcopy(target)
    for operation in operations:
        parts = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        parent: Any = result
        for part in parts[:-1]:
            parent = parent[int(part)] if isinstance(parent, list) else parent[part]
        last = parts[-1]
        if operation["op"] == "remove":
            del parent[int(last) if isinstance(parent, list) else last]
        elif isinstance(parent, list) and operation["op"] == "add":
            parent.insert(len(parent) if last == "-" else int(last), operation["value"])
        else:
            assert operation["op"] == "add" or last in parent, f"nothing to replace at {parts}"
            parent[last] = operation["value"]
    return result


def overlay() -> dict[str, Any]:
    """Return the objects of the overlay by kind."""
    kustomization = yaml.safe_load((LLM_D / "kustomization.yaml").read_text())
    (base,) = kustomization["resources"]
    listed = yaml.safe_load((LLM_D / base / "kustomization.yaml").read_text())["resources"]
    objects = {
        one["kind"]: one
        for name in listed
        for one in yaml.safe_load_all((LLM_D / base / name).read_text())
    }
    for patch in kustomization["patches"]:
        kind = patch["target"]["kind"]
        assert objects[kind]["metadata"]["name"] == patch["target"]["name"]
        objects[kind] = apply_patch(objects[kind], yaml.safe_load(patch["patch"]))
    return objects


PATCHED = overlay()
POD = PATCHED["Deployment"]["spec"]["template"]["spec"]
VALUES = yaml.safe_load((LLM_D / "router-values.yaml").read_text())["router"]
PICKER = yaml.safe_load(VALUES["epp"]["pluginsCustomConfig"]["lockstep.yaml"])
PLUGINS = {plugin["type"]: plugin.get("parameters", {}) for plugin in PICKER["plugins"]}


def argument(container: dict[str, Any], flag: str) -> str:
    arguments = container["args"]
    value: str = arguments[arguments.index(flag) + 1]
    return value


def events() -> KVEventsConfig:
    """Return the events of a server of the overlay, with the address that Kubernetes fills in."""
    text = argument(POD["containers"][0], "--kv-events-config")
    return KVEventsConfig(**json.loads(text.replace("$(POD_IP)", "10.0.0.7")))


@pytest.mark.parametrize("kind", PATCHED)
def test_patched_objects_are_valid(kind: str) -> None:
    kubernetes_validate.validate(PATCHED[kind], VERSION, strict=True)
    assert kind in OBJECTS


def test_a_wrong_patch_is_detected() -> None:
    wrong = [{"op": "replace", "path": "/spec/replica", "value": 4}]
    with pytest.raises(AssertionError, match="nothing to replace"):
        apply_patch(OBJECTS["Deployment"], wrong)


def test_only_the_keys_went() -> None:
    """The removed volume and mount are those of the API keys, by position as patches name them."""
    mounts = {mount["name"] for mount in POD["containers"][0]["volumeMounts"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} - mounts == {"keys"}
    assert {volume["name"] for volume in POD["volumes"]} == mounts
    assert "--api-key-file" not in POD["containers"][0]["args"]


def test_options_exist() -> None:
    arguments = POD["containers"][0]["args"]
    flags = [argument for argument in arguments if argument.startswith("--")]
    assert flags and not [flag for flag in flags if flag not in FLAGS]


def test_events_reach_the_router() -> None:
    """The router subscribes to the port, the topic and the block size that the servers have."""
    config = events()
    ports = {port["name"]: port["containerPort"] for port in POD["containers"][0]["ports"]}
    parameters = PLUGINS["precise-prefix-cache-producer"]
    reader = parameters["kvEventsConfig"]
    discovery = reader["podDiscoveryConfig"]
    assert config.is_on
    assert config.endpoint == f"tcp://*:{ports['kv-events']}"
    assert ports["kv-events"] == discovery["socketPort"]
    assert config.replay_endpoint == f"tcp://*:{ports['kv-replay']}"
    assert ports["kv-replay"] == discovery["replaySocketPort"]
    assert parameters["tokenProcessorConfig"]["blockSize"] == PAGE
    prefix, address, model = config.topic.split("@")
    assert config.topic.startswith(reader["topicFilter"]) and prefix == "kv"
    assert address == f"10.0.0.7:{PORT}"
    assert model == argument(POD["containers"][0], "--served-model-name")
    assert PLUGINS["token-producer"]["modelName"] == model
    label, _, value = discovery["podLabelSelector"].partition("=")
    assert PATCHED["Deployment"]["spec"]["template"]["metadata"]["labels"][label] == value


def test_router_selects_the_servers() -> None:
    labels = PATCHED["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert VALUES["modelServers"]["matchLabels"].items() <= labels.items()
    assert VALUES["modelServers"]["targetPorts"] == [{"number": PORT}]
    service = PATCHED["Service"]
    host = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert PLUGINS["token-producer"]["vllm"]["url"] == host
    assert service["spec"]["selector"].items() <= labels.items()
    for profile in PICKER["schedulingProfiles"]:
        assert {one["pluginRef"] for one in profile["plugins"]} <= set(PLUGINS)
    assert argument(POD["containers"][0], "--metrics-names") == "vllm"


def test_only_the_namespace_reaches_servers_without_keys() -> None:
    policy = PATCHED["NetworkPolicy"]["spec"]
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {}}]
    ports = {port["name"] for port in POD["containers"][0]["ports"]}
    assert {port["port"] for port in rule["ports"]} == ports
