"""The manifests' promises: objects fit each other, pods are restricted, nothing but the API is outside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.nwor_options import ADMIN_KEY_VARIABLE
from tests.deploy.manifests import (
    KUBERNETES,
    KUSTOMIZATIONS,
    OVERLAYS,
    Object,
    matches,
    of_kind,
    pod_templates,
    port_names,
    read,
    render,
    selected,
)

#: Oldest version with the sleep action of preStop switched on, and the newest that the validator knows.
VERSIONS = ("1.30", "1.37")
BUILT_IN = re.compile(r"v1|(apps|policy)/v1|(networking|rbac\.authorization)\.k8s\.io/v1")
SECRET, SECRET_KEYS = "nwor-keys", {"api-key", "admin-api-key", "hf-token"}
UID = 10001

overlays = pytest.mark.parametrize("overlay", OVERLAYS)


def test_no_file_is_left_out_of_its_kustomization() -> None:
    for folder in KUSTOMIZATIONS:
        (content,) = read(folder / "kustomization.yaml")
        named = {*content.get("resources", []), *content.get("configurations", []), "kustomization.yaml"}
        named |= {patch["path"] for patch in content.get("patches", []) if "path" in patch}
        named |= {file for made in content.get("configMapGenerator", []) for file in made["files"]}
        assert {path.name for path in folder.glob("*.yaml")} == {name for name in named if "/" not in name}
    covered = {path.name for path in KUBERNETES.glob("*/*/*.yaml")} | {
        path.name for path in (KUBERNETES / "base").glob("*.yaml")
    }
    assert {path.name for path in KUBERNETES.rglob("*.yaml")} == covered


def test_each_overlay_stands_in_the_docs() -> None:
    text = (KUBERNETES.parents[1] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    for folder in KUSTOMIZATIONS:
        assert str(folder.relative_to(KUBERNETES)) in text


@overlays
def test_schemas_of_the_built_in_kinds(overlay: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for one in render(overlay):
        if BUILT_IN.fullmatch(one["apiVersion"]):
            for version in VERSIONS:
                validator.validate(one, version, strict=True)
    for name, template in pod_templates(render(overlay)).items():
        wrapped = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "pod"},
            "spec": {"selector": {}, "template": template},
        }
        assert validator.validate(wrapped, VERSIONS[0], strict=True) is not False, name


def test_the_validator_finds_a_fault() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    (deployment,) = of_kind(render("single-node"), "Deployment").values()
    deployment["spec"]["template"]["spec"]["terminationGraceSeconds"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(deployment, VERSIONS[0], strict=True)


@overlays
def test_everything_is_in_one_namespace_and_no_secret_is_here(overlay: str) -> None:
    objects = render(overlay)
    for one in objects:
        assert one["kind"] != "Secret"
        if one["kind"] != "Namespace":
            assert one["metadata"]["namespace"] == "nwor"
    (namespace,) = of_kind(objects, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@overlays
def test_pods_meet_the_restricted_standard_and_more(overlay: str) -> None:
    for name, template in pod_templates(render(overlay)).items():
        spec = template["spec"]
        context = spec["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, UID), name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["enableServiceLinks"] is False
        for volume in spec["volumes"]:
            assert set(volume) - {"name"} <= {"configMap", "emptyDir", "persistentVolumeClaim"}
        for container in spec["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            tag = container["image"].rpartition(":")[2]
            assert tag not in ("", "latest", container["image"])
            assert container["name"] != "vllm", "the router takes that name for an engine with sleep mode"


@overlays
def test_engines_never_get_a_token_of_the_cluster(overlay: str) -> None:
    for name, template in pod_templates(render(overlay)).items():
        if "router" not in name:
            assert template["spec"]["automountServiceAccountToken"] is False


@overlays
def test_what_pods_name_is_there(overlay: str) -> None:
    objects = render(overlay)
    for name, template in pod_templates(objects).items():
        spec = template["spec"]
        assert spec["serviceAccountName"] in of_kind(objects, "ServiceAccount")
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            if "configMap" in volume:
                config = of_kind(objects, "ConfigMap")[volume["configMap"]["name"]]
                assert "server.yaml" in config["data"]
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in of_kind(objects, "PersistentVolumeClaim")
        for container in spec["containers"]:
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounts == set(volumes), name
            for variable in container["env"]:
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference is not None:
                    assert reference["name"] == SECRET
                    assert reference["key"] in SECRET_KEYS
                assert "KEY" not in variable["name"] or reference, "a key in plain text"
            for word in container.get("args", []):
                for used in re.findall(r"\$\((\w+)\)", word):
                    known = {variable["name"] for variable in container["env"]}
                    assert used in known or used.startswith("LWS_")


@overlays
def test_services_and_budgets_select_pods(overlay: str) -> None:
    objects = render(overlay)
    for name, service in of_kind(objects, "Service").items():
        pods = selected({"matchLabels": service["spec"]["selector"]}, objects)
        assert len(pods) == 1, name
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in port_names(*pods.values())
    for budget in of_kind(objects, "PodDisruptionBudget").values():
        assert selected(budget["spec"]["selector"], objects)
        assert "minAvailable" not in budget["spec"]
    replicas = of_kind(objects, "Service")["nwor-replicas"]["spec"]
    assert replicas["clusterIP"] == "None"
    assert replicas["publishNotReadyAddresses"] is True


@overlays
def test_deployments_select_their_own_pods(overlay: str) -> None:
    for deployment in of_kind(render(overlay), "Deployment").values():
        spec = deployment["spec"]
        assert matches(spec["selector"], spec["template"]["metadata"]["labels"])


def peers(objects: list[Object], policies: list[Object], port: str) -> set[str]:
    """Return who reaches a port: names of pod templates, and "namespaces:VALUE" for labelled namespaces."""
    found: set[str] = set()
    for rule in (rule for policy in policies for rule in policy["spec"].get("ingress", [])):
        if "ports" in rule and port not in {entry["port"] for entry in rule["ports"]}:
            continue
        for peer in rule["from"]:
            if "namespaceSelector" in peer:
                (value,) = peer["namespaceSelector"]["matchLabels"].values()
                found.add(f"namespaces:{value}")
            else:
                found |= set(selected(peer["podSelector"], objects))
    return found


GROUP = {"LeaderWorkerSet/nwor/leader", "LeaderWorkerSet/nwor/worker"}
CLIENTS, MONITORING = "namespaces:clients", "namespaces:monitoring"


@overlays
def test_who_reaches_which_port(overlay: str) -> None:
    objects = render(overlay)
    policies = of_kind(objects, "NetworkPolicy")
    assert policies["default-deny"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    reached = {}
    for name, template in pod_templates(objects).items():
        applied = [
            policy
            for policy in policies.values()
            if matches(policy["spec"]["podSelector"], template["metadata"]["labels"])
        ]
        named = {
            entry["port"]
            for policy in applied
            for rule in policy["spec"].get("ingress", [])
            for entry in rule.get("ports", [])
        }
        assert named <= set(port_names(template))
        for port in port_names(template) or {"any": 0}:
            reached[name, port] = peers(objects, applied, port)
    if overlay == "multi-node":
        assert reached == {
            ("LeaderWorkerSet/nwor/leader", "http"): GROUP | {CLIENTS},
            ("LeaderWorkerSet/nwor/leader", "admin"): GROUP | {MONITORING},
            ("LeaderWorkerSet/nwor/worker", "any"): GROUP,
        }
    elif overlay == "production":
        assert reached == {
            ("Deployment/nwor", "http"): {"Deployment/nwor-router"},
            ("Deployment/nwor", "admin"): {"Deployment/nwor", MONITORING},
            ("Deployment/nwor-router", "http"): {CLIENTS, MONITORING},
        }
    else:
        assert reached == {
            ("Deployment/nwor", "http"): {CLIENTS},
            ("Deployment/nwor", "admin"): {"Deployment/nwor", MONITORING},
        }


@overlays
def test_the_admin_api_has_a_port_of_its_own(overlay: str) -> None:
    found = settings(overlay)
    ports = port_names(engine(overlay))
    assert ports == {"http": int(found["port"]), "admin": int(found["admin-port"])}
    services = of_kind(render(overlay), "Service")
    assert [port["targetPort"] for port in services["nwor"]["spec"]["ports"]] == ["http"]
    (inside,) = services["nwor-replicas"]["spec"]["ports"]
    # Addresses of a headless service are those of pods: its port says nothing else than the pods' own.
    assert (inside["targetPort"], inside["port"]) == ("admin", ports["admin"])
    text = (KUBERNETES.parents[1] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f"--resolve nwor-replicas:{ports['admin']}" in text


def engine(overlay: str) -> Object:
    templates = pod_templates(render(overlay))
    return templates.get("Deployment/nwor") or templates["LeaderWorkerSet/nwor/leader"]


def settings(overlay: str) -> dict[str, Any]:
    (config,) = of_kind(render(overlay), "ConfigMap").values()
    found: dict[str, Any] = yaml.safe_load(config["data"]["server.yaml"])
    for word in engine(overlay)["spec"]["containers"][0]["args"]:
        name, _, value = word.removeprefix("--").partition("=")
        found[name] = value
    return found


@overlays
def test_a_pod_is_given_longer_than_the_server_needs_to_drain(overlay: str) -> None:
    lifecycle = pytest.importorskip("server.lifecycle")
    spec = engine(overlay)["spec"]
    wait = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = float(settings(overlay)["drain-timeout"])
    # The engine's processes end after the server: a quarter of a minute for them.
    assert spec["terminationGracePeriodSeconds"] >= wait + drain + lifecycle.ABORT_GRACE + 15
    # Endpoints are taken back while the process still listens.
    assert wait >= 2 * spec["containers"][0]["readinessProbe"]["periodSeconds"]
    if overlay == "multi-node":
        worker = pod_templates(render(overlay))["LeaderWorkerSet/nwor/worker"]["spec"]
        assert worker["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] >= wait + drain
        assert worker["terminationGracePeriodSeconds"] >= spec["terminationGracePeriodSeconds"]


@overlays
def test_probes_ask_for_health_and_leave_time_to_start(overlay: str) -> None:
    container = engine(overlay)["spec"]["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 1800
    liveness = container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
    names = {variable["name"] for variable in container["env"]}
    assert {ADMIN_KEY_VARIABLE, "VLLM_API_KEY"} <= names


@overlays
def test_settings_are_flags_of_the_server(overlay: str) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from server import cli

    known = set(cli.make_parser()._option_string_actions)
    assert {f"--{name}" for name in settings(overlay)} <= known
    if overlay == "multi-node":
        # The workers read the file with vLLM's own parser, and join with flags of its own.
        vllm = set(make_arg_parser(FlexibleArgumentParser())._option_string_actions)
        (config,) = of_kind(render(overlay), "ConfigMap").values()
        worker = pod_templates(render(overlay))["LeaderWorkerSet/nwor/worker"]["spec"]["containers"][0]
        words = [word.partition("=")[0] for word in worker["args"]]
        words += [f"--{name}" for name in yaml.safe_load(config["data"]["server.yaml"])]
        assert set(words) <= vllm
        assert "--headless" in words


def test_the_base_serves_the_demo_model(free_port: int) -> None:
    pytest.importorskip("vllm")
    from server import cli

    args = cli.parse(["--config", str(KUBERNETES / "base" / "server.yaml"), "--port", str(free_port)])
    assert (args.demo, args.drain_timeout) == (True, 60.0)


def test_the_leader_is_the_same_pod_as_a_single_server() -> None:
    """Written twice, since kustomize cannot put one pod into two kinds."""
    single = pod_templates(render("gpu"))["Deployment/nwor"]["spec"]
    leader = pod_templates(render("multi-node"))["LeaderWorkerSet/nwor/leader"]["spec"]
    different = {"containers", "volumes", "tolerations", "topologySpreadConstraints"}
    assert {key: value for key, value in leader.items() if key not in different} == {
        key: value for key, value in single.items() if key not in different
    }
    one, other = single["containers"][0], leader["containers"][0]
    for key in set(one) - {"args", "env", "image", "resources"}:
        assert one[key] == other[key], key
    assert set(one["args"]) < set(other["args"])
    assert all(variable in other["env"] for variable in one["env"])


def test_the_group_finds_itself() -> None:
    objects = render("multi-node")
    words = {
        name: " ".join(template["spec"]["containers"][0]["args"])
        for name, template in pod_templates(objects).items()
    }
    for text in words.values():
        assert "--nnodes=$(LWS_GROUP_SIZE)" in text
        assert "--master-addr=$(LWS_LEADER_ADDRESS)" in text
    assert "--node-rank=0" in words["LeaderWorkerSet/nwor/leader"]
    assert "--node-rank=$(LWS_WORKER_INDEX)" in words["LeaderWorkerSet/nwor/worker"]
    (group,) = of_kind(objects, "LeaderWorkerSet").values()
    template = group["spec"]["leaderWorkerTemplate"]
    gpus = int(template["leaderTemplate"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    parallel = settings("multi-node")
    assert parallel["tensor-parallel-size"] * parallel.get("pipeline-parallel-size", 1) == (
        template["size"] * gpus
    )
    assert not of_kind(objects, "Deployment")


def test_the_router_finds_the_engines_and_keeps_prefixes_together() -> None:
    objects = render("production")
    router = pod_templates(objects)["Deployment/nwor-router"]["spec"]["containers"][0]
    flags = dict(word.removeprefix("--").split("=", 1) for word in router["args"])
    labels = dict(pair.split("=") for pair in flags["k8s-label-selector"].split(","))
    assert set(selected({"matchLabels": labels}, objects)) == {"Deployment/nwor"}
    assert flags["k8s-port"] == str(port_names(engine("production"))["http"])
    assert flags["routing-logic"] == "prefixaware"
    (role,) = of_kind(objects, "Role").values()
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    (binding,) = of_kind(objects, "RoleBinding").values()
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert {subject["name"] for subject in binding["subjects"]} == {"nwor-router"}


def test_the_route_from_outside_lets_the_api_through_and_nothing_else() -> None:
    objects = render("production")
    (route,) = of_kind(objects, "HTTPRoute").values()
    (rule,) = route["spec"]["rules"]
    paths = [match["path"] for match in rule["matches"]]
    assert {path["value"] for path in paths} == {
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
    }
    for closed in (
        "/",
        "/admin/nwor",
        "/metrics",
        "/dashboard",
        "/sleep",
        "/v1/files",
        "/v1/load_lora_adapter",
    ):
        assert not any(closed == path["value"] or closed.startswith(path["value"] + "/") for path in paths)
    (backend,) = rule["backendRefs"]
    service = of_kind(objects, "Service")[backend["name"]]
    assert backend["port"] in {port["port"] for port in service["spec"]["ports"]}
    assert set(selected({"matchLabels": service["spec"]["selector"]}, objects)) == {"Deployment/nwor-router"}


def test_scaling() -> None:
    objects = render("production")
    (scaled,) = of_kind(objects, "ScaledObject").values()
    deployment = of_kind(objects, "Deployment")[scaled["spec"]["scaleTargetRef"]["name"]]
    assert "replicas" not in deployment["spec"], "else every apply would set the number back"
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert any("num_requests_waiting" in query for query in queries)
    loggers = pytest.importorskip("vllm.v1.metrics.loggers")
    source = Path(loggers.__file__).read_text(encoding="utf-8")
    for query in queries:
        (metric,) = re.findall(r"vllm:\w+", query)
        assert f'"{metric}"' in source


def test_prometheus_scrapes_each_engine_once_under_the_rules_job() -> None:
    objects = render("production")
    (monitor,) = of_kind(objects, "ServiceMonitor").values()
    chosen = [
        service
        for service in of_kind(objects, "Service").values()
        if matches(monitor["spec"]["selector"], service["metadata"]["labels"])
    ]
    assert [service["metadata"]["name"] for service in chosen] == ["nwor-replicas"]
    assert chosen[0]["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "nwor"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in chosen[0]["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"


def test_the_rules_are_those_of_prometheus() -> None:
    source = KUBERNETES.parent / "prometheus" / "rules" / "nwor.yml"
    (rule,) = read(KUBERNETES / "components" / "monitoring" / "prometheusrule.yaml")
    assert rule["spec"] == yaml.safe_load(source.read_text(encoding="utf-8")), (
        "run python deploy/kubernetes/generate_rules.py"
    )
    jobs = set(re.findall(r'job="([^"]*)"', str(rule["spec"])))
    assert jobs <= {"nwor"}
