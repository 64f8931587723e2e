"""docker-compose.yml keeps its promises: what runs by default, with which rights, with which settings."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from server.lifecycle import ABORT_GRACE
from server.options import DEFAULT_DRAIN_SECONDS
from tests.server_process import ROOT

COMPOSE = ROOT / "docker-compose.yml"
EXAMPLE = ROOT / ".env.example"

VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
#: What stands for nothing where the variable is not set.
WHERE_SET = re.compile(r"\$\{(\w+):\+([^}]*)\}")
#: Settings that the example shows at another value than the default, because there is no useful default.
SHOWN_OTHERWISE = {
    *("NWOR_ADMIN_API_KEY_FILE", "VLLM_API_KEY_FILE", "HF_TOKEN_FILE", "GRAFANA_ADMIN_PASSWORD_FILE"),
    *("MODEL", "DRAFT", "MODELS_DIR", "NWOR_GPU_ARGS", "NWOR_CPU_REPLICAS", "GRAFANA_WITHOUT_ADMIN"),
    "NUM_SPECULATIVE_TOKENS",
}
#: Read by compose itself.
OF_COMPOSE = {"COMPOSE_PROFILES"}

TEXT = COMPOSE.read_text(encoding="utf-8")


def compose(**settings: str) -> dict[str, Any]:
    """Return the file with its variables filled in."""
    filled = WHERE_SET.sub(lambda found: found[2] if settings.get(found[1]) else "", TEXT)
    filled = VARIABLE.sub(lambda found: settings.get(found[1]) or found[2], filled)
    loaded: dict[str, Any] = yaml.safe_load(filled)
    return loaded


def services(**settings: str) -> dict[str, dict[str, Any]]:
    return dict(compose(**settings)["services"])


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "m": 60}[unit]


def example() -> dict[str, str]:
    """Return the settings of .env.example, which are commented out."""
    return dict(re.findall(r"^#([A-Z_]+)=(.*)$", EXAMPLE.read_text(encoding="utf-8"), re.MULTILINE))


def test_by_default_the_demo_runs_alone() -> None:
    plain = [name for name, service in services().items() if not service.get("profiles")]
    assert plain == ["nwor"]
    server = services()["nwor"]
    assert server["environment"]["NWOR_ARGS"] == "--demo"
    assert server["build"]["target"] == "cpu"
    assert "devices" not in str(server.get("deploy", ""))


def test_profiles() -> None:
    profiles = {name: service.get("profiles", []) for name, service in services().items()}
    assert profiles == {"nwor": [], "gpu": ["gpu"], "prometheus": ["monitoring"], "grafana": ["monitoring"]}


def test_gpu_serves_model_with_draft() -> None:
    gpu = services(MODEL="/models/a", DRAFT="/models/b", NWOR_GPU_ARGS="--tensor-parallel-size 2")["gpu"]
    words = gpu["environment"]["NWOR_ARGS"].split()
    assert words == ["/models/a", "--draft", "/models/b", "--tensor-parallel-size", "2"]
    fixed = services(MODEL="/models/a", DRAFT="/models/b", NUM_SPECULATIVE_TOKENS="auto:1-6")["gpu"]
    wanted = "/models/a --draft /models/b --num-speculative-tokens auto:1-6"
    assert fixed["environment"]["NWOR_ARGS"].split() == wanted.split()
    assert gpu["build"]["target"] == "cuda"
    device = gpu["deploy"]["resources"]["reservations"]["devices"][0]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert gpu["shm_size"] == "16g"
    assert gpu["ulimits"]["memlock"] == -1
    assert gpu["networks"]["serving"]["aliases"] == ["nwor"], "Prometheus finds it under the demo's name"


@pytest.mark.parametrize("name", ["nwor", "gpu", "prometheus", "grafana"])
def test_every_service_has_no_rights_that_it_does_not_need(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", ["nwor", "gpu", "prometheus", "grafana"])
def test_ports_are_this_machines_only(name: str) -> None:
    for port in services()[name]["ports"]:
        assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", ["nwor", "gpu"])
def test_stopping_leaves_time_to_drain_and_abort(name: str) -> None:
    service = services()[name]
    assert seconds(service["stop_grace_period"]) >= DEFAULT_DRAIN_SECONDS + ABORT_GRACE + 10
    assert "--drain-timeout" not in service["environment"]["NWOR_ARGS"]


def test_keys_are_secrets_and_nothing_else() -> None:
    loaded = compose()
    assert set(services()["nwor"]["secrets"]) == {"nwor_admin_api_key", "vllm_api_key", "hf_token"}
    for secret in loaded["secrets"].values():
        assert set(secret) == {"file"}
        assert (ROOT / secret["file"]).read_text() == "", "the default is a file without a key"
    for name, service in services().items():
        for variable in service.get("environment", {}):
            named = re.search("KEY|TOKEN|PASSWORD|SECRET", variable)
            assert named is None or variable.endswith("_FILE"), f"{name}: {variable}"
        assert set(service.get("secrets", [])) <= set(loaded["secrets"])


def test_what_must_last_lies_in_volumes() -> None:
    loaded = compose()
    mounts = {
        name: dict(reversed(volume.split(":")[:2]) for volume in service["volumes"])
        for name, service in services().items()
    }
    wanted = {
        ("nwor", "/var/cache/nwor"),
        ("gpu", "/var/cache/nwor"),
        ("prometheus", "/prometheus"),
        ("grafana", "/var/lib/grafana"),
    }
    for service, path in wanted:
        assert mounts[service][path] in loaded["volumes"]


def test_mounted_files_are_there() -> None:
    for service in services().values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).is_dir(), source
                assert volume.endswith(":ro"), volume
    assert (ROOT / "deploy/prometheus/prometheus.yml").is_file()
    target = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in target["scrape_configs"]}
    assert jobs["nwor"] == ["nwor:8000"]


def test_grafana_looks_where_dashboards_are_mounted_and_asks_the_prometheus_of_this_file() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    sources = [yaml.safe_load(path.read_text()) for path in sorted(provisioning.glob("datasources/*.y*ml"))]
    folders = [yaml.safe_load(path.read_text()) for path in sorted(provisioning.glob("dashboards/*.y*ml"))]
    assert [one["url"] for source in sources for one in source["datasources"]] == ["http://prometheus:9090"]
    paths = [one["options"]["path"] for folder in folders for one in folder["providers"]]
    mounted = [volume.split(":")[1] for volume in services()["grafana"]["volumes"]]
    assert paths
    assert set(paths) <= set(mounted)


def test_no_image_floats() -> None:
    for name, service in services().items():
        image = service["image"]
        if name in ("nwor", "gpu"):
            assert image.startswith("nwor-server:")
        else:
            assert re.search(r":v?\d+\.\d+\.\d+$", image), image


def test_every_setting_has_a_default_and_is_in_the_example() -> None:
    without = WHERE_SET.sub("", TEXT)
    assert re.findall(r"\$\{?\w+", without) == [f"${{{name}" for name, _ in VARIABLE.findall(TEXT)]
    assert {name for name, _ in WHERE_SET.findall(TEXT)} <= {name for name, _ in VARIABLE.findall(TEXT)}
    assert set(example()) - OF_COMPOSE == {name for name, _ in VARIABLE.findall(TEXT)}


def test_the_example_shows_the_defaults() -> None:
    defaults = dict(VARIABLE.findall(TEXT))
    shown = {name: value for name, value in example().items() if name not in SHOWN_OTHERWISE | OF_COMPOSE}
    assert shown == {name: defaults[name] for name in shown}


def test_one_default_for_each_setting() -> None:
    assert len(set(VARIABLE.findall(TEXT))) == len({name for name, _ in VARIABLE.findall(TEXT)})


def test_local_settings_and_keys_are_not_committed() -> None:
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    assert "/secrets/" in (ROOT / "deploy/compose/.gitignore").read_text().splitlines()
    for name, value in example().items():
        if name.endswith("_FILE"):
            assert value.startswith("./deploy/compose/secrets/")


def test_compose_itself_takes_the_file() -> None:
    if (
        shutil.which("docker")
        and not subprocess.run(["docker", "compose", "version"], check=False).returncode
    ):
        command = ["docker", "compose"]
    elif shutil.which("podman-compose"):
        command = ["podman-compose"]
    else:
        pytest.skip("neither docker compose nor podman-compose is installed")
    command += ["-f", str(COMPOSE), "--profile", "gpu", "--profile", "monitoring", "config"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
