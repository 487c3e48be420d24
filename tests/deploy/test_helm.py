"""The Helm chart, linted and rendered by real Helm over a matrix of values.

Each rendering is checked against the schemas of Kubernetes, against what a restricted cluster admits, and
against the gateway itself: the configuration in it must be one that a gateway starts with.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from fakes.helm_chart import CHART, Manifests, lint, notes, render

from gateway.config.config import Config, parse_config

OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.27", "1.37"
OTHERS_KINDS = ("HTTPRoute", "PodMonitor")  # not Kubernetes' own: no schema here, looked at by tests below

EXTERNAL = {"bundled": {"enabled": False}, "external": {"url": "rediss://redis.data:6380/0"}}
VLLM = {"id": "gpu-1", "url": "http://10.0.0.1:8000", "engine": "vllm"}
MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one replica in memory": {"gateway": {"replicas": 1}, "redis": {"bundled": {"enabled": False}}},
    "three replicas, engines elsewhere": {
        "gateway": {"replicas": 3},
        "worker": {"enabled": False},
        "backends": [VLLM, {"url": "https://engine.example.org", "weight": 0.5, "api_key_env": "KEY"}],
        "networkPolicy": {"adminFrom": [{"namespaceSelector": {"matchLabels": {"team": "ops"}}}]},
    },
    "redis with TLS, user and password": {
        "redis": {
            "bundled": {"enabled": False},
            "external": {
                "url": "rediss://redis.data:6380/0",
                "username": "homing",
                "existingSecret": "redis-credentials",
                "tls": {"enabled": True, "caSecret": "redis-ca"},
            },
        },
    },
    "sentinels": {
        "redis": {
            "bundled": {"enabled": False},
            "external": {
                "sentinels": ["s-0.redis:26379", "s-1.redis:26379"],
                "existingSecret": "redis-credentials",
                "sentinelPasswordKey": "sentinel",
            },
        },
    },
    "cluster": {
        "redis": {"bundled": {"enabled": False}, "external": {"clusterNodes": ["r-0:6379", "r-1:6379"]}}
    },
    "discovery": {
        "worker": {"enabled": False},
        "discovery": {
            "kubernetes": [
                {"service": "vllm", "namespace": "models"},
                {"service": "sglang", "engine": "sglang"},
            ],
            "dns": [{"host": "vllm-headless.models.svc", "port": 8000}],
        },
    },
    "GPU workers": {
        "worker": {
            "replicas": 4,
            "gpu": {"enabled": True, "count": 2},
            "model": "/var/lib/homing/llama",
            "persistence": {"size": "200Gi", "storageClassName": "fast"},
            "nodeSelector": {"accelerator": "h100"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
    },
    "everything on": {
        "autoscaling": {"enabled": True, "maxReplicas": 9},
        "ingress": {"enabled": True, "hosts": ["chat.example.org"], "tlsSecret": "chat-tls"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["chat.example.org"]},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "service": {
            "type": "LoadBalancer",
            "annotations": {"example.org/internal": "true"},
            "loadBalancerSourceRanges": ["10.0.0.0/8"],
        },
        "imagePullSecrets": [{"name": "registry"}],
        "image": {"repository": "registry.example.org/homing", "digest": "sha256:" + "0" * 64},
        "secrets": {"existingSecret": "homing-secrets"},
        "gateway": {
            "podAnnotations": {"a": "b"},
            "podLabels": {"team": "llm"},
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "cpu", "operator": "Exists"}],
            "extraEnv": [{"name": "OTHER", "value": "x"}],
            "extraArgs": ["--worker", "0"],
            "priorityClassName": "high",
        },
        "config": {"routing": {"policy": "session_ring"}, "log": {"level": "debug"}},
    },
    "everything off": {
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "worker": {"persistence": {"enabled": False}},
        "serviceAccount": {"create": False, "name": "existing"},
    },
}


@pytest.fixture(params=MATRIX, scope="module")
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MATRIX[request.param]


@pytest.fixture(scope="module")
def manifests(values: dict[str, Any]) -> Manifests:
    return render(values)


def config_of(manifests: Manifests, name: str = "homing") -> Config:
    return parse_config(yaml.safe_load(manifests.get("ConfigMap", name)["data"]["homing.yaml"]))


def test_helm_lint_finds_nothing(values: dict[str, Any]) -> None:
    """Strictly, with the values of each case."""
    assert lint(values) == []


def test_manifests_follow_the_schemas_of_kubernetes(manifests: Manifests) -> None:
    """Of the oldest version that the chart admits, with nothing unknown in them."""
    validate(manifests, OLDEST_KUBERNETES)


def test_manifests_are_still_known_to_the_newest_kubernetes() -> None:
    """Every kind that the chart can make."""
    validate(render(MATRIX["everything on"]), NEWEST_KUBERNETES)


def validate(manifests: Manifests, version: str) -> None:
    for one in manifests:
        if one["kind"] not in OTHERS_KINDS:
            kubernetes_validate.validate(one, version, strict=True)


def test_the_gateway_accepts_its_configuration(manifests: Manifests) -> None:
    """Also: listens for the pod's network, and shares bindings whenever there may be several."""
    config = config_of(manifests)
    assert (config.listen.port, config.admin.port) == (8000, 8001)
    assert config.reload.watch
    deployment = manifests.get("Deployment", "homing")
    if deployment["spec"].get("replicas", 2) > 1:
        assert config.sessions.store == "redis"
    assert config.backends or config.fleet.discovery.kubernetes


def test_pods_fit_a_restricted_cluster(manifests: Manifests) -> None:
    """Pod Security "restricted": no root, no escalation, no capabilities, seccomp; and more: a read-only
    root, a memory limit, no token that is not needed, nothing of the host."""
    specs = manifests.pod_specs()
    assert len(specs) >= 2
    for name, spec in specs.items():
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["runAsUser"] >= 1000, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert not any("hostPath" in volume for volume in spec.get("volumes", ())), name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert not security["allowPrivilegeEscalation"], name
            assert security["readOnlyRootFilesystem"], name
            assert container["resources"]["limits"]["memory"], name
            assert not container["image"].endswith(":latest"), name
    for name, spec in specs.items():
        needs_token = name == "homing" and bool(config_of(manifests).fleet.discovery.kubernetes)
        assert spec["automountServiceAccountToken"] is needs_token, name


def test_selectors_match_their_pods_and_only_theirs(manifests: Manifests) -> None:
    """Services, budgets and policies select what they mean to; no two workloads share labels."""
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in (*manifests.of_kind("Deployment"), *manifests.of_kind("StatefulSet"))
    }

    def selected(labels: dict[str, str]) -> list[str]:
        return [name for name, given in pods.items() if labels.items() <= given.items()]

    for one in manifests.of_kind("Service"):
        name = one["metadata"]["name"].removesuffix("-admin")
        assert selected(one["spec"]["selector"]) == [name]
    for one in (*manifests.of_kind("Deployment"), *manifests.of_kind("StatefulSet")):
        assert selected(one["spec"]["selector"]["matchLabels"]) == [one["metadata"]["name"]]
    for one in manifests.of_kind("PodDisruptionBudget"):
        assert selected(one["spec"]["selector"]["matchLabels"]) == [one["metadata"]["name"]]
    for one in manifests.of_kind("NetworkPolicy"):
        assert selected(one["spec"]["podSelector"]["matchLabels"]) == [one["metadata"]["name"]]


def test_what_is_referred_to_exists(manifests: Manifests, values: dict[str, Any]) -> None:
    """Volumes, secrets and accounts are made by the chart, or named in the values."""
    made = {(one["kind"], one["metadata"]["name"]) for one in manifests}
    given = str(values)
    for name, spec in manifests.pod_specs().items():
        volumes = {volume["name"] for volume in spec.get("volumes", ())} | {"data"}
        for volume in spec.get("volumes", ()):
            if "secret" in volume:
                assert volume["secret"]["secretName"] in given, name
        account = spec.get("serviceAccountName")
        assert account is None or ("ServiceAccount", account) in made or account in given, name
        for container in spec["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes, name
            for variable in container.get("env", ()):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference:
                    assert ("Secret", reference["name"]) in made or reference["name"] in given, name


def test_grace_periods_cover_what_they_must(manifests: Manifests) -> None:
    """B81: grace is longer than hook and drain together; the hook outlasts the readiness checks."""
    spec = manifests.pod_specs()["homing"]
    hook_s = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > hook_s + config_of(manifests).drain_timeout_s
    readiness = spec["containers"][0]["readinessProbe"]
    assert hook_s > readiness["periodSeconds"] * readiness["failureThreshold"]
    if "homing-worker" in manifests.pod_specs():
        worker = manifests.pod_specs()["homing-worker"]
        container = worker["containers"][0]
        wait_s = int(re.search(r"timeout (\d+)", container["lifecycle"]["preStop"]["exec"]["command"][2])[1])  # type: ignore[index]
        drain_s = int(container["args"][container["args"].index("--drain-timeout") + 1])
        assert worker["terminationGracePeriodSeconds"] > wait_s + drain_s


def test_probes_mean_what_they_say(manifests: Manifests) -> None:
    """B81: liveness asks for the process only and is patient; a model may take ten minutes to load."""
    for spec in manifests.pod_specs().values():
        for container in spec["containers"]:
            live, ready = container.get("livenessProbe"), container.get("readinessProbe")
            if container["name"] == "gateway":
                assert live["httpGet"]["path"] == "/livez"
                assert ready["httpGet"]["path"] == "/readyz"
                assert live["periodSeconds"] * live["failureThreshold"] >= 60
            if container["name"] == "worker":
                assert live["httpGet"]["path"] == "/live"
                assert ready["httpGet"]["path"] == "/ready"
                startup = container["startupProbe"]
                assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


# -- single decisions


def test_workers_are_backends_under_their_pods_names() -> None:
    """So a worker keeps its identity over restarts."""
    config = config_of(render({"worker": {"replicas": 3}}))
    assert [(one.id, one.url) for one in config.backends] == [
        (f"homing-worker-{number}", f"http://homing-worker-{number}.homing-worker.llm.svc:8000")
        for number in range(3)
    ]


def test_two_releases_in_one_namespace_do_not_clash() -> None:
    """B79: no object of one has the kind and name of an object of the other; nor do their selectors meet."""
    one, two = (render(MATRIX["everything on"], name=name) for name in ("first", "second"))
    names = [{(it["kind"], it["metadata"]["name"]) for it in release} for release in (one, two)]
    assert not names[0] & names[1]
    selectors = [str(release.of_kind("Service")[0]["spec"]["selector"]) for release in (one, two)]
    assert selectors[0] != selectors[1]


def test_long_names_stay_within_the_limits_of_kubernetes() -> None:
    """A release name of 53 characters, Helm's limit: every name is a DNS label of at most 63."""
    for one in render(MATRIX["everything on"], name="x" * 53):
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", one["metadata"]["name"])


def test_pods_roll_only_for_what_cannot_be_reloaded() -> None:
    """A new backend is taken over by running gateways; another listener or store needs a restart."""

    def checksum(values: dict[str, Any]) -> str:
        template = render(values).get("Deployment", "homing")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    before = checksum({})
    assert checksum({"backends": [VLLM]}) == before
    assert checksum({"worker": {"replicas": 5}}) == before
    assert checksum({"config": {"log": {"level": "debug"}}}) == before
    assert checksum({"config": {"sessions": {"ttl_s": 60}}}) != before
    assert checksum({"redis": EXTERNAL}) != before
    assert checksum({"discovery": {"dns": [{"host": "a"}]}}) != before


def test_rights_are_only_those_that_discovery_needs() -> None:
    """To list endpoint slices, in the namespaces that are named; without discovery, no role at all."""
    assert not render().of_kind("Role")
    roles = render(MATRIX["discovery"]).of_kind("Role")
    assert {role["metadata"]["namespace"] for role in roles} == {"models", "llm"}
    for role in roles:
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}
        ]


def test_routes_let_streams_live() -> None:
    """Buffering off and long timeouts in the Ingress, none in the HTTPRoute."""
    manifests = render(MATRIX["everything on"])
    (ingress,) = manifests.of_kind("Ingress")
    annotations = ingress["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert int(annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 3600
    assert ingress["spec"]["tls"] == [{"secretName": "chat-tls", "hosts": ["chat.example.org"]}]
    (route,) = manifests.of_kind("HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    assert rule["backendRefs"] == [{"name": "homing", "port": 80}]


def test_each_pod_is_scraped_by_itself() -> None:
    """Prometheus finds gateways and workers by the labels that they have, on a port that they name."""
    manifests = render(MATRIX["everything on"])
    monitors = manifests.of_kind("PodMonitor")
    assert len(monitors) == 2
    for monitor in monitors:
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")


def test_gpus_are_requested_and_used() -> None:
    """As a limit, with the CUDA image and device."""
    container = render(MATRIX["GPU workers"]).pod_specs()["homing-worker"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container["image"].endswith("-cuda12")
    assert container["args"][container["args"].index("--device") + 1] == "cuda"


def test_options_of_the_worker_are_ones_it_has() -> None:
    """The arguments are parsed by the worker's own command line."""
    from engine_adapter.server.__main__ import _parser

    for case in MATRIX.values():
        specs = render(case).pod_specs()
        if "homing-worker" in specs:
            options = _parser().parse_args(specs["homing-worker"]["containers"][0]["args"])
            assert isinstance(options, argparse.Namespace)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"worker": {"enabled": False}}, "no engine to send requests to"),
        ({"redis": {"bundled": {"enabled": False}}}, "several gateways need a shared session store"),
        ({"redis": {"external": {"url": "redis://r:6379"}}}, "set redis.bundled.enabled to false"),
        ({"ingress": {"enabled": True}}, r"set ingress\.hosts"),
        ({"httpRoute": {"enabled": True}}, r"set httpRoute\.parentRefs"),
        (
            {
                "gateway": {"replicas": 1},
                "redis": {"bundled": {"enabled": False}, "external": {"existingSecret": "s"}},
            },
            "without a server",
        ),
    ],
)
def test_senseless_values_fail_with_a_message(values: dict[str, Any], message: str) -> None:
    """B79: not at the pod's start, and the message says what to set."""
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)


@pytest.mark.parametrize(
    "values",
    [
        {"replicaCount": 3},
        {"gateway": {"replica": 3}},
        {"gateway": {"replicas": "three"}},
        {"gateway": {"replicas": 0}},
        {"gateway": {"resources": {"limits": {"memory": None}}}},
        {"worker": {"gpu": {"enable": True}}},
        {"redis": {"external": {"url": "redis://user:password@host"}}},
        {"image": {"digest": "abc"}},
        {"backends": [{"adress": "http://a"}]},
        {"backends": [{"url": "http://a", "engine": "vlm"}]},
        {"service": {"port": 70000}},
    ],
)
def test_the_schema_refuses_typos_and_wrong_types(values: dict[str, Any]) -> None:
    """Misspelt keys, too: they would be ignored in silence."""
    with pytest.raises(helm_python.HelmError):
        render(values)


def test_every_value_is_in_the_schema_and_every_schema_key_has_a_default() -> None:
    """`values.yaml` and `values.schema.json` name the same keys."""

    def keys(value: dict[str, Any], prefix: str = "") -> set[str]:
        found = set()
        for name, inner in value.items():
            found.add(prefix + name)
            if isinstance(inner, dict):
                found |= keys(inner, f"{prefix}{name}.")
        return found

    def schema_keys(schema: dict[str, Any], prefix: str = "") -> set[str]:
        found = set()
        for name, inner in schema.get("properties", {}).items():
            found.add(prefix + name)
            found |= schema_keys(inner, f"{prefix}{name}.")
        return found

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    free = re.compile(r"\.(annotations|requests|limits)\.")
    assert {key for key in keys(values) if not free.search(key)} == {
        key for key in schema_keys(schema) if key != "global"
    }


def test_notes_say_how_to_look_at_it() -> None:
    """The names in them are those of the release."""
    assert "helm test homing -n llm" in notes()
    assert "service/homing-admin" in notes()
    assert "GitOps" not in notes({"secrets": {"existingSecret": "s"}})


def test_the_chart_has_the_version_of_the_package() -> None:
    """Images are tagged with it."""
    project = (Path(CHART).parents[2] / "pyproject.toml").read_text()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in project
