"""Reads the Kubernetes manifests: files as they are, and overlays as kustomize renders them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server_process import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
KUSTOMIZATIONS = sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml"))

Object = dict[str, Any]
Labels = dict[str, str]


def _command() -> list[str]:
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    pytest.skip("needs kustomize or kubectl to render overlays")


@functools.cache
def _text(overlay: str) -> str:
    line = [*_command(), str(KUBERNETES / "overlays" / overlay)]
    ended = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr, ended.stderr
    return ended.stdout


def render(overlay: str) -> list[Object]:
    """Return an overlay's objects; skips the test where there is no kustomize."""
    return list(yaml.safe_load_all(_text(overlay)))


def read(path: Path) -> list[Object]:
    """Return the objects in a file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    """Return the objects of a kind by their names."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def pod_templates(objects: list[Object]) -> dict[str, Object]:
    """Return every pod template: {"Deployment/nwor": {"metadata": ..., "spec": ...}, ...}."""
    found = {}
    for name, one in of_kind(objects, "Deployment").items():
        found[f"Deployment/{name}"] = one["spec"]["template"]
    for name, one in of_kind(objects, "LeaderWorkerSet").items():
        for role in ("leader", "worker"):
            found[f"LeaderWorkerSet/{name}/{role}"] = one["spec"]["leaderWorkerTemplate"][f"{role}Template"]
    return found


def matches(selector: Object, labels: Labels) -> bool:
    """Tell whether a label selector, written with matchLabels alone, matches; an empty one matches all."""
    assert set(selector) <= {"matchLabels"}, "another form of selector"
    return selector.get("matchLabels", {}).items() <= labels.items()


def selected(selector: Object, objects: list[Object]) -> dict[str, Object]:
    """Return the pod templates that a label selector matches."""
    return {
        name: template
        for name, template in pod_templates(objects).items()
        if matches(selector, template["metadata"]["labels"])
    }


def port_names(template: Object) -> dict[str, int]:
    """Return the named ports of a pod template's containers."""
    return {
        port["name"]: port["containerPort"]
        for container in template["spec"]["containers"]
        for port in container.get("ports", [])
    }


def engine_labels() -> Labels:
    """Return the labels by which services and the router find servers."""
    return dict(of_kind(render("production"), "Deployment")["nwor"]["spec"]["selector"]["matchLabels"])
