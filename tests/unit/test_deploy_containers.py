"""What the files for containers say: options, ports, users, variables and metrics are those of the code."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from services.cases import cases

from shadho_celery.cli.group import commands
from shadho_celery.core import users
from shadho_celery.core.files import read_class_spec
from shadho_celery.core.system import HEARTBEAT_FILE
from shadho_celery.core.units import seconds_of
from shadho_celery.fleet import signing
from shadho_celery.metrics import fleet, run, server, worker
from shadho_celery.node import stay
from shadho_celery.node.shutdown import END_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
MANIFESTS = [document for path in KUBERNETES for document in yaml.safe_load_all(path.read_text())]
#: secrets that are made by the commands in servers.yaml, with their keys
MADE = {
    name: {re.split("[=/]", word)[0] for word in re.findall(r"--from-(?:file|literal)=(\S+)", rest)}
    for name, rest in re.findall(
        r"kubectl create secret generic ([\w-]+)(.*)",
        (DEPLOY / "kubernetes/servers.yaml").read_text().replace("\\\n#", ""),
    )
}
SCALED = [each for each in MANIFESTS if each["kind"] == "ScaledJob"]
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
#: version of Kubernetes with whose schema the manifests are compared
VERSION = "1.33.0"
#: user of the image
USER = 10001


def lines(instruction: str) -> list[str]:
    """Return the arguments of each line of the Dockerfile with this instruction."""
    return re.findall(rf"^{instruction} +(.*)$", DOCKERFILE, re.MULTILINE)


def container(template: dict[str, Any]) -> dict[str, Any]:
    [found] = template["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def templates() -> Iterator[dict[str, Any]]:
    """Yield the templates of pods with our own image."""
    for each in MANIFESTS:
        template = each.get("spec", {}).get("jobTargetRef", each.get("spec", {})).get("template")
        if template and container(template)["image"].startswith("shadho-celery:"):
            yield template


def check_command(words: list[str]) -> click.Context:
    """Check that the words are a command with its options. They are only understood, not run."""
    program, name, *rest = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words]
    assert program == "shadho-celery"
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    return command.make_context(name, rest)


# Compose


def test_without_a_profile_only_broker_and_redis_start() -> None:
    always = {name: service for name, service in SERVICES.items() if "profiles" not in service}
    assert [*always] == ["rabbitmq", "redis"]
    for service in always.values():
        assert service["healthcheck"]["test"][0] == "CMD", "it says itself whether it is healthy"
        assert service["ports"]
    assert {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service} == {
        name: [name] for name in ("postgres", "scheduler", "worker", "dashboard", "exporter", "prometheus", "grafana")
    }
    # Compose replaces the variables of all services, also of those that do not start.
    assert ":?" not in (DEPLOY / "compose.yml").read_text()


@cases("name", SERVICES)
def test_a_service_is_made_of_what_there_is(name: str) -> None:
    service = SERVICES[name]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), "reached from this machine only"
    for source in [volume.split(":")[0] for volume in service.get("volumes", ())]:
        assert source in COMPOSE["volumes"] or source.startswith("${FOLDER") or (DEPLOY / source).exists(), source
    assert {*service.get("depends_on", ())} <= {*SERVICES}
    if service.get("image", "").startswith("shadho-celery:"):
        assert service["build"]["dockerfile"] == "deploy/Dockerfile"
        check_command(service["command"])
        # The image checks the heartbeat file, which only workers touch.
        assert ("healthcheck" in service) is (name != "worker")


def test_the_variables_of_compose_are_those_of_its_example() -> None:
    named = {*re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yml").read_text())}
    assert named == {*re.findall(r"^#?(\w+)=", (DEPLOY / ".env.example").read_text(), re.MULTILINE)}


def test_a_worker_of_compose_has_the_time_for_its_grace() -> None:
    [grace] = [word.partition("=")[2] for word in SERVICES["worker"]["command"] if word.startswith("--grace=")]
    assert seconds_of(SERVICES["worker"]["stop_grace_period"]) > seconds_of(grace) + END_SECONDS


def test_prometheus_asks_the_exporter_which_finds_runs_and_workers() -> None:
    found = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    fleet, each = found["scrape_configs"]
    port = check_command(SERVICES["exporter"]["command"]).params["port"]
    assert fleet["static_configs"] == [{"targets": [f"exporter:{port}"]}]
    assert each["http_sd_configs"][0]["url"] == f"http://exporter:{port}/sd"
    # They announce an address that other containers reach.
    assert check_command(SERVICES["scheduler"]["command"]).params["metrics_host"] == "0.0.0.0"
    assert SERVICES["worker"]["environment"][server.HOST] == "0.0.0.0"
    if promtool := shutil.which("promtool"):
        words = [promtool, "check", "config", str(DEPLOY / "prometheus.yml")]
        done = subprocess.run(words, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout


def test_alerts_say_what_to_do_and_fire_when_they_must(tmp_path: Path) -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    jobs = {job["job_name"] for job in yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]}
    assert {job for rule in rules for job in re.findall(r'job="([^"]+)"', rule["expr"])} == jobs
    assert all(";" in rule["annotations"]["summary"] for rule in rules)
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    series = {
        'shadho_fleet_up{fleet="lab",server="redis"}': "0x60",
        'shadho_fleet_queue_messages{fleet="lab",class="gpu"}': "3x60",
        'shadho_fleet_queue_messages{fleet="lab",class="cpu"}': "3x60",
        'shadho_fleet_slots{fleet="lab",class="cpu"}': "2x60",
        'shadho_fleet_slots{fleet="lab",class="gpu"}': "0x60",
    }
    expected = {"ShadhoServerDown": {"server": "redis"}, "ShadhoQueueWithoutWorkers": {"class": "gpu"}}
    summaries = {rule["alert"]: rule for rule in rules}
    tests = [
        {
            "eval_time": "30m",
            "alertname": name,
            "exp_alerts": [
                {
                    "exp_labels": {"fleet": "lab", "severity": summaries[name]["labels"]["severity"], **labels},
                    "exp_annotations": {
                        "summary": re.sub(
                            r"{{ \$labels.(\w+) }}",
                            lambda found, labels=labels: {"fleet": "lab", **labels}[found[1]],  # type: ignore[misc]
                            summaries[name]["annotations"]["summary"],
                        )
                    },
                }
            ],
        }
        for name, labels in expected.items()
    ]
    told = {"input_series": [{"series": name, "values": values} for name, values in series.items()]}
    (tmp_path / "test.yml").write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(DEPLOY / "alerts.yml")],
                "tests": [{"interval": "1m", **told, "alert_rule_test": tests}],
            }
        )
    )
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_image_is_pinned_by_its_tag() -> None:
    """A tag has at least two numbers; that of our own image is the version of the package."""
    text = "".join(path.read_text() for path in [DEPLOY / "compose.yml", DEPLOY / "Dockerfile", *KUBERNETES])
    images = re.findall(r"(?:image:|^FROM) ([\w/.-]+):(\S+)", text, re.MULTILINE)
    assert {"rabbitmq", "redis", "postgres", "python", "shadho-celery"} <= {name for name, _ in images}
    tags = {name: {tag for found, tag in images if found == name} for name, _ in images}
    assert all(re.match(r"v?\d+\.\d+", tag) for found in tags.values() for tag in found)
    version = importlib.metadata.version("shadho_celery")
    assert {tag.split("-")[0] for tag in tags.pop("shadho-celery")} == {version}
    assert {*re.findall(r"shadho-celery:([\d.]+)", text)} == {version}
    assert max(map(len, tags.values())) == 1


@cases("name", [name for name, each in SERVICES.items() if each.get("image", "").startswith("shadho-celery:")])
def test_a_service_gets_keys_as_secrets_if_there_are_any(name: str) -> None:
    service = SERVICES[name]
    files = {"key": (signing.KEY_FILE, "KEY_FILE"), "admins": (users.ADMINS_FILE, "ADMINS_FILE")}
    # Those that act for a user.
    if name in ("scheduler", "dashboard"):
        files["user_key"] = users.USER_KEY_FILE, "USER_KEY_FILE"
    assert service["secrets"] == [*files]
    for secret, (variable, told) in files.items():
        assert service["environment"][variable] == f"${{{told}:+/run/secrets/{secret}}}"
        assert COMPOSE["secrets"][secret] == {"file": f"${{{told}:-/dev/null}}"}


# Image


def test_the_image_runs_as_a_user_of_its_own_and_knows_its_targets() -> None:
    assert f"useradd --uid {USER} " in DOCKERFILE
    targets = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert targets == [("python:3.12.11-slim-bookworm", "base"), ("base", "cpu"), ("base", "cuda")]
    for stage in DOCKERFILE.split("\nFROM base ")[1:]:
        [user] = re.findall(r"^USER (.*)$", stage, re.MULTILINE)
        assert int(user) == USER


def test_the_image_has_files_and_extras_that_there_are() -> None:
    sources = [word for line in lines("COPY") for word in line.split()[:-1]]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{source}" for source in sources} == {line for line in ignored if line.startswith("!")}
    assert all((DEPLOY.parent / source).exists() for source in sources)
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    extras = re.search(r"\[project\.optional-dependencies\](.*?)\n\[", project, re.DOTALL)
    assert extras is not None
    for named in re.findall(r"/opt/shadho\[([\w,]+)\]", DOCKERFILE):
        assert {*named.split(",")} <= {*re.findall(r"^(\w+) = \[", extras.group(1), re.MULTILINE)}


def test_the_image_is_healthy_by_the_age_of_the_heartbeat_file(tmp_path: Path) -> None:
    """It is far longer than a beat takes whose calls to Redis reach their time limits."""
    [line] = lines("HEALTHCHECK")
    check = json.loads(line.partition(" CMD ")[2])
    path = tmp_path / "alive"
    environment = {HEARTBEAT_FILE: str(path), "PATH": "/usr/bin:/bin"}
    assert f"{HEARTBEAT_FILE}=/run/shadho/alive" in DOCKERFILE

    def status() -> int:
        return subprocess.run(check, env=environment, capture_output=True, check=False).returncode

    assert status() != 0
    path.touch()
    assert status() == 0
    os.utime(path, (0, 0))
    assert status() != 0
    for probe in [container(each["spec"]["jobTargetRef"]["template"])["livenessProbe"] for each in SCALED]:
        assert probe["exec"]["command"] == check


# Kubernetes


@cases("manifest", MANIFESTS)
def test_a_manifest_fits_the_schema_of_kubernetes(manifest: dict[str, Any]) -> None:
    import kubernetes_validate

    if manifest["kind"] == "ScaledJob":
        # KEDA's own kind has a job in it.
        manifest = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": manifest["metadata"],
            "spec": manifest["spec"]["jobTargetRef"],
        }
    kubernetes_validate.validate(manifest, VERSION, strict=True)


@cases("template", templates())
def test_a_pod_runs_a_command_that_there_is_as_the_user_of_the_image(template: dict[str, Any]) -> None:
    spec, found = template["spec"], container(template)
    context = check_command(found["args"])
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == USER
    variables = {each["name"]: each.get("value") for each in found["env"]}
    mounts = {each["name"]: each["mountPath"] for each in found["volumeMounts"]}
    assert variables[signing.KEY_FILE] == f"{mounts['key']}/key"
    if "ports" not in found:
        assert context.command.name == "dashboard", "it listens on 127.0.0.1 only"
        return
    ports = {each["name"]: each["containerPort"] for each in found["ports"]}
    params = context.params
    port, host = params.get("metrics_port", params.get("port")), params.get("metrics_host", params.get("host"))
    assert str(ports["metrics"]) == str(port or variables[server.PORT])
    assert "0.0.0.0" in (host, variables.get(server.HOST))


def test_a_pod_names_secrets_claims_and_labels_that_there_are() -> None:
    names = {(each["kind"], each["metadata"]["name"]) for each in MANIFESTS}
    labels = [each["metadata"]["labels"] for each in templates()]
    labels += [each["spec"]["template"]["metadata"]["labels"] for each in MANIFESTS if each["kind"] == "StatefulSet"]
    for each in MANIFESTS:
        if each["kind"] == "Service":
            assert any(each["spec"]["selector"].items() <= found.items() for found in labels)
    for name, key in re.findall(
        r"secretKeyRef: {name: ([\w-]+), key: ([\w-]+)", "".join(map(Path.read_text, KUBERNETES))
    ):
        assert key in MADE[name]
    for template in templates():
        assert [("Secret", each["secretRef"]["name"]) in names for each in container(template)["envFrom"]] == [True]
        volumes = {each["name"] for each in template["spec"]["volumes"]}
        assert {each["name"] for each in container(template)["volumeMounts"]} == volumes
        for volume in template["spec"]["volumes"]:
            assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in names
            assert "secret" not in volume or volume["secret"]["secretName"] in MADE
            claim = volume.get("persistentVolumeClaim")
            assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in names


@cases("job", SCALED)
def test_keda_starts_as_many_workers_of_a_class_as_its_wanted_slots_need(job: dict[str, Any], tmp_path: Path) -> None:
    """The numbers are those of the class spec, and the worker serves the class that the query names."""
    [classes] = [each["data"]["classes.toml"] for each in MANIFESTS if each["metadata"]["name"] == "shadho-classes"]
    (tmp_path / "classes.toml").write_text(classes)
    specs = read_class_spec(tmp_path / "classes.toml")
    [trigger], template = job["spec"]["triggers"], job["spec"]["jobTargetRef"]["template"]
    named = re.fullmatch(r'sum\(shadho_wanted_slots\{class="(\w+)"\}\)', trigger["metadata"]["query"])
    assert named is not None
    params = check_command(container(template)["args"]).params
    assert (named.group(1), template["metadata"]["labels"]["class"]) == (params["compute_class"],) * 2
    spec = specs[named.group(1)]
    assert (spec.slots, spec.max_workers) == (params["slots"], job["spec"]["maxReplicaCount"])
    assert int(trigger["metadata"]["threshold"]) == spec.slots
    assert float(os.environ.pop(stay.IDLE)) > 0, "an idle worker ends by itself"


@cases("job", SCALED)
def test_a_busy_pod_is_only_ended_with_the_time_for_its_grace(job: dict[str, Any]) -> None:
    spec = job["spec"]["jobTargetRef"]["template"]["spec"]
    variables = {each["name"]: each.get("value") for each in container({"spec": spec})["env"]}
    assert spec["terminationGracePeriodSeconds"] > seconds_of(variables[stay.GRACE]) + END_SECONDS
    # Otherwise a change of the manifest would end the running jobs.
    assert job["spec"]["rollout"] == {"strategy": "gradual"}


# Metrics


METRICS = {name for family in itertools.chain(run.FAMILIES, worker.FAMILIES, fleet.FAMILIES) for name in family.names}


@cases("path", [path for path in sorted(DEPLOY.rglob("*")) if path.suffix in {".json", ".yml", ".yaml"}])
def test_a_metric_that_a_file_names_is_served(path: Path) -> None:
    assert {*re.findall(r"\bshadho_[a-z]\w*", path.read_text())} - {"shadho_celery"} <= METRICS


def test_the_board_of_grafana_has_a_panel_for_each_subject_and_asks_the_source_that_there_is() -> None:
    [source] = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/shadho.yml").read_text())["datasources"]
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels) == 20
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    places = [panel["gridPos"] for panel in panels]
    for one, other in itertools.combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert is_beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert max(place["x"] + place["w"] for place in places) <= 24
