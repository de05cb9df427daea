"""deploy/helm and deploy/kubernetes: rendered by Helm, valid for Kubernetes, with commands that exist.

Helm and the schemas of Kubernetes are large packages; without them the rendered files are tested alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from kvrouter.bus import accounts
from kvrouter.bus.embedded import server_binary
from kvrouter.frontend.run import running_frontend
from kvrouter.frontend.settings import parse_options
from kvrouter.lab.mocker.app import MockService
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.server import running_mocker
from kvrouter.settings.commands import command_named
from kvrouter.settings.read import load
from kvrouter.worker.agent import serve
from scripts.kit.manifests import CHART, MANIFESTS, examples, render, values_of, written
from tests.e2e.fleet import frontend_flags, until

MONITORS = json.loads(Path(__file__).with_name("monitors.schema.json").read_text())
EXAMPLES = examples()
FRONTEND = "kvrouter-frontend"


def helm() -> None:
    """Skips the test without Helm."""
    pytest.importorskip("helm_python", reason="Helm is not installed: pip install helm-python-sdk")


def documents(name: str) -> list[dict[str, Any]]:
    """The manifests of an example."""
    return [one for one in yaml.safe_load_all((MANIFESTS / name).read_text()) if one]


def of_kind(name: str, *kinds: str) -> list[dict[str, Any]]:
    return [one for one in documents(name) if one["kind"] in kinds]


def pods(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Each pod template, with the name of its Deployment or StatefulSet."""
    owners = of_kind(name, "Deployment", "StatefulSet")
    return [(one["metadata"]["name"], one["spec"]["template"]) for one in owners]


def containers(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Each container, with the name of its Deployment or StatefulSet."""
    return [(owner, container) for owner, pod in pods(name) for container in pod["spec"]["containers"]]


@pytest.mark.parametrize("name", EXAMPLES)
def test_manifests_are_those_of_the_chart(name: str) -> None:
    """deploy/kubernetes was written after the last change of the chart."""
    helm()

    assert written(name) == (MANIFESTS / name).read_text(), "run python -m scripts.kit.manifests"


@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        (("usersSecret",), "usersSecret"),
        (("workers", 0, "model"), "model"),
        (("workers", 0, "replicas"), "replicas"),
    ],
)
def test_required_values(taken: tuple[Any, ...], reason: str) -> None:
    """Without a required value nothing is rendered, and the message names it."""
    helm()
    values = values_of("one-host.yaml")
    at: Any = values
    for key in taken[:-1]:
        at = at[key]
    del at[taken[-1]]

    with pytest.raises(Exception, match=reason):
        render(values)


def test_other_refusals() -> None:
    """A misspelt value and a missing URL of NATS are found."""
    helm()
    values = values_of("one-host.yaml")

    with pytest.raises(Exception, match="replica"):
        render(values | {"frontend": {"image": "i", "replicas": 1, "replica": 2}})
    with pytest.raises(Exception, match=r"nats\.url"):
        render(values | {"nats": {"enabled": False}})
    assert "--nats=nats://n:4222" in render(values | {"nats": {"enabled": False, "url": "nats://n:4222"}})


# What GPU clusters ask for, in all places where it may stand.
PODS: dict[str, Any] = {
    "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "INFO"}],
    "envFrom": [{"configMapRef": {"name": "proxy"}}],
    "labels": {"team": "llm"},
    "annotations": {"example.com/reviewed": "yes"},
    "nodeSelector": {"nvidia.com/gpu.product": "H100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "serving",
    "runtimeClassName": "nvidia",
    "serviceAccountName": "llm",
    "imagePullSecrets": ["registry"],
    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
}
FORTY: dict[str, Any] = {
    "usersSecret": "users",
    "fullnameOverride": "llm",
    "huggingFaceSecret": "hf",
    "frontend": PODS
    | {
        "replicas": 4,
        "cacheClaim": "tokenizers",
        "trustedProxies": ["10.0.0.0/8", "fd00::1"],
        "ingress": {"host": "llm.example.com", "className": "nginx", "tlsSecret": "tls"},
        "httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]},
    },
    "agent": {"env": PODS["env"], "envFrom": PODS["envFrom"]},
    "workers": [
        PODS
        | {"name": f"zone-{zone}", "model": "meta-llama/Llama-3.3-70B-Instruct", "replicas": 20, "gpus": 8}
        | {"zone": zone, "memory": "512Gi", "requests": {"cpu": "16"}, "cacheClaim": "models"}
        | {"args": ["--tensor-parallel-size=8"], "maxUnavailable": "10%"}
        for zone in ("a", "b")
    ],
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
}


def test_a_fleet_of_forty() -> None:
    """What clusters with GPUs ask of pods reaches each of them, and Kubernetes accepts it."""
    helm()
    found = [one for one in yaml.safe_load_all(render(FORTY)) if one]

    validate(found)
    owners = {one["metadata"]["name"]: one for one in found if one["kind"] in {"Deployment", "StatefulSet"}}
    assert {"llm-frontend", "llm-zone-a", "llm-zone-b", "llm-nats"} == owners.keys()
    for name in ("llm-frontend", "llm-zone-a", "llm-zone-b"):
        template = owners[name]["spec"]["template"]
        pod, about = template["spec"], template["metadata"]
        assert "llm" == about["labels"]["team"]
        assert PODS["annotations"] == about["annotations"]
        assert PODS["nodeSelector"].items() <= pod["nodeSelector"].items()
        for field in (
            "tolerations",
            "affinity",
            "priorityClassName",
            "runtimeClassName",
            "serviceAccountName",
        ):
            assert PODS[field] == pod[field], field
        assert [{"name": "registry"}] == pod["imagePullSecrets"]
        assert PODS["extraVolumes"][0] in pod["volumes"]
        container = pod["containers"][0]
        assert PODS["extraVolumeMounts"][0] in container["volumeMounts"]
        assert PODS["envFrom"] == container["envFrom"]
        token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
        assert token in container["env"]
        assert PODS["env"][0] in container["env"]
    zone = owners["llm-zone-b"]["spec"]["template"]["spec"]["nodeSelector"]
    assert "b" == zone["topology.kubernetes.io/zone"]
    (frontend,) = owners["llm-frontend"]["spec"]["template"]["spec"]["containers"]
    assert {"--trusted-proxies=10.0.0.0/8", "--trusted-proxies=fd00::1"} <= set(frontend["args"])
    kinds = [one["kind"] for one in found]
    assert {"Ingress", "HTTPRoute", "PodMonitor"} <= set(kinds)
    assert 4 == kinds.count("PodDisruptionBudget")


def validate(found: list[dict[str, Any]]) -> None:
    """Strictly, for the oldest and the newest Kubernetes; custom resources by schemas of the tests."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    import jsonschema
    from kubernetes_validate.utils import all_versions

    minors = {int(version.split(".")[1]) for version in all_versions()}
    for version in (f"1.{minor}" for minor in (min(minors), max(minors))):
        for one in found:
            if one["kind"] in {"ServiceMonitor", "PodMonitor"}:
                jsonschema.validate(one, MONITORS)
            elif one["kind"] not in {"PrometheusRule", "HTTPRoute"}:
                validator.validate(one, version, strict=True)


async def test_an_engine_that_names_no_endpoints(
    nats_url: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM without /kv_event_sources behind the chart's own flags of agents: its events are read."""

    async def missing(*_: object) -> web.Response:
        raise web.HTTPNotFound

    monkeypatch.setattr(MockService, "kv_event_sources", missing)
    (words,) = [one["args"] for _, one in containers("one-host.yaml") if one["name"] == "agent"]
    config = MockerConfig(model_name="tiny", model_path=tiny)
    async with running_mocker(config) as mocker, contextlib.AsyncExitStack() as stack:
        there = {
            "http://127.0.0.1:8000": mocker.url,
            "tcp://127.0.0.1:5557": mocker.kv_events,
            "tcp://127.0.0.1:5657": mocker.kv_replay,
        }
        flags = [word.partition("=") for word in words]
        flags = [(flag, "=", there.pop(value, "")) for flag, _, value in flags]
        assert not there, "the chart gives the agent all three"
        told = ["".join(one) for one in flags if one[2]]
        namespace = uuid.uuid4().hex
        settings = load(
            command_named("worker"), [*told, f"--nats={nats_url}", f"--namespace={namespace}"], {}
        ).settings
        stop = asyncio.Event()
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(serve(settings.agent(), stop))
        stack.callback(stop.set)
        frontend = await stack.enter_async_context(
            running_frontend(parse_options(frontend_flags(nats_url, namespace, tiny)))
        )
        await until(lambda: bool(frontend.replica.routers))
        (router,) = frontend.replica.routers.values()
        http = await stack.enter_async_context(aiohttp.ClientSession())
        body = {"model": "tiny", "prompt": "the same words " * 40, "max_tokens": 1}
        async with http.post(f"{frontend.url}/v1/completions", json=body) as answer:
            assert 200 == answer.status, await answer.text()
        await until(lambda: len(router.pool.index) > 0)
        async with http.post(f"{frontend.url}/v1/completions", json=body) as answer:
            assert int(answer.headers["x-kvrouter-overlap-blocks"]) > 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_kubernetes_accepts(name: str) -> None:
    """Strictly valid for the oldest and the newest Kubernetes; a planted key is found."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    validate(documents(name))
    (deployment,) = of_kind(name, "Deployment")
    deployment["spec"]["replica"] = 1
    with pytest.raises(validator.ValidationError):
        validate([deployment])


@pytest.mark.parametrize("name", EXAMPLES)
def test_commands(name: str, tmp_path: Path) -> None:
    """Frontends and agents accept their flags."""
    assert 0 == accounts.main([str(tmp_path), "--tool", "any"])
    seed = tmp_path / "any.nk"
    seen = set()
    for _, container in containers(name):
        command = {"frontend": "frontend", "agent": "worker"}.get(container["name"])
        if command is None:
            continue
        text = "\n".join(container["args"]).replace("$(POD_IP)", "10.0.0.1").replace("$(POD_NAME)", "w-0")
        words = text.split("\n")
        words = [f"--nats-nkey={seed}" if word.startswith("--nats-nkey=") else word for word in words]
        assert load(command_named(command), words, {}).settings
        seen.add(command)

    assert {"frontend", "worker"} == seen


@pytest.mark.parametrize("name", EXAMPLES)
def test_nats_accepts(name: str, tmp_path: Path) -> None:
    """nats-server accepts the ConfigMap next to accounts.conf."""
    (config,) = of_kind(name, "ConfigMap")
    assert 0 == accounts.main([str(tmp_path), "--agent", "kvrouter-vllm=kvrouter-vllm.*"])
    (file := tmp_path / "nats.conf").write_text(config["data"]["nats.conf"])
    command = [str(server_binary()), "-t", "--config", str(file)]
    ended = subprocess.run(command, env={"POD_NAME": "n-0"}, capture_output=True, text=True, check=False)

    assert 0 == ended.returncode, ended.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_selectors(name: str) -> None:
    """Each Service, budget and policy selects pods that exist; ours run without rights."""
    labelled = [pod["metadata"]["labels"] for _, pod in pods(name)]
    for one in of_kind(name, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec = one["spec"]
        wanted = spec.get("podSelector", spec.get("selector", {}))
        wanted = wanted.get("matchLabels", wanted)
        assert any(wanted.items() <= labels.items() for labels in labelled), one["metadata"]["name"]
    for owner, container in containers(name):
        if container["name"] != "engine":
            assert container["securityContext"]["readOnlyRootFilesystem"], owner
            assert ["ALL"] == container["securityContext"]["capabilities"]["drop"], owner


@pytest.mark.parametrize("name", EXAMPLES)
def test_monitors(name: str) -> None:
    """Each ServiceMonitor selects a Service that has its port, and the pods behind it open that port."""
    for one in of_kind(name, "ServiceMonitor"):
        wanted = one["spec"]["selector"]["matchLabels"].items()
        (service,) = [
            each for each in of_kind(name, "Service") if wanted <= each["metadata"]["labels"].items()
        ]
        (endpoint,) = one["spec"]["endpoints"]
        (port,) = [each for each in service["spec"]["ports"] if each["name"] == endpoint["port"]]
        selected = service["spec"]["selector"].items()
        opened = [
            {each["name"] for container in pod["spec"]["containers"] for each in container.get("ports", ())}
            for _, pod in pods(name)
            if selected <= pod["metadata"]["labels"].items()
        ]
        assert opened
        assert all(port["targetPort"] in each for each in opened)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_agent_sees_its_own_seed(name: str) -> None:
    """Its container mounts one file, not the secret: that of its group's user; its id is in that group."""
    for owner, container in containers(name):
        if container["name"] == "agent":
            (mount,) = [one for one in container["volumeMounts"] if one["name"] == "users"]
            assert f"{owner}.nk" == mount["subPathExpr"]
            assert f"--worker-id={owner}.$(POD_NAME)" in container["args"]


def test_a_user_for_each_pod() -> None:
    """By default an agent's user is that of its pod, as in secrets made for earlier versions."""
    helm()
    values = values_of("16-gpus.yaml")
    del values["agent"]["natsUser"]

    rendered = render(values)
    assert "subPathExpr: $(POD_NAME).nk" in rendered
    assert "--worker-id=$(POD_NAME)\n" in rendered


def test_defaults_have_a_schema() -> None:
    """Every top-level value is described."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    assert set(yaml.safe_load((CHART / "values.yaml").read_text())) == set(schema["properties"]) - {"global"}


def test_operators_key() -> None:
    """The key of a secret opens the admin listener, and its port, to other addresses."""
    helm()
    values = values_of("one-host.yaml")
    secrets = {"adminKeySecret": "operators", "keysSecret": "clients"}
    keyed = render(values | {"frontend": {**values.get("frontend", {}), **secrets}})
    found = {one["kind"]: one for one in yaml.safe_load_all(keyed) if one["metadata"]["name"] == FRONTEND}

    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"--admin-key-file=/admin/key", "--keys-file=/keys/keys.toml"} <= {*container["args"]}
    mounted = {one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    assert ("operators", "clients") == (mounted["admin"], mounted["keys"])
    assert {"admin", "keys"} <= {one["name"] for one in container["volumeMounts"]}
    rules = found["NetworkPolicy"]["spec"]["ingress"]
    (admin,) = [one for one in rules if one["ports"][0]["port"] == "admin"]
    assert "from" not in admin
    assert "--admin-key-file=/admin/key" not in render(values)


@pytest.mark.parametrize(
    ("args", "at"),
    [
        ([], {"port": "http"}),
        (["--tls-cert=/tls/tls.crt"], {"port": "http", "scheme": "HTTPS"}),
        (["--tls-cert=/tls/tls.crt", "--tls-client-ca=/ca"], {"port": "admin", "scheme": "HTTPS"}),
    ],
)
def test_probes_show_no_certificate(args: list[str], at: dict[str, str]) -> None:
    """With TLS they use it, and where clients need certificates they go to the admin listener."""
    helm()
    values = values_of("one-host.yaml")
    rendered = render(values | {"frontend": {**values.get("frontend", {}), "args": args}})
    found = {one["kind"]: one for one in yaml.safe_load_all(rendered) if one["metadata"]["name"] == FRONTEND}

    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    for name, path in (("startup", "/live"), ("liveness", "/live"), ("readiness", "/ready")):
        assert {"path": path, **at} == container[f"{name}Probe"]["httpGet"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_clients_see_no_metrics(name: str) -> None:
    """They are on a port of their own, whose Service is not the clients'."""
    for owner, container in containers(name):
        if container["name"] == "frontend":
            assert {"--expose=none", "--metrics-port=9100"} <= set(container["args"]), owner
    (monitored,) = [
        one for one in of_kind(name, "Service") if one["metadata"]["name"] == f"{FRONTEND}-metrics"
    ]
    assert [9100] == [port["port"] for port in monitored["spec"]["ports"]]
