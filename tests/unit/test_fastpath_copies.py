"""Fast paths step aside one by one where vLLM's code is not the one that they have copies of."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.scheduler_rig import Setup, make_scheduler
from nwor import doctor
from nwor.engine import plugin
from nwor.engine.fastpath import (
    copies,
    first_pass,
    greedy_sampling,
    h2d_cache,
    kv_cache_manager,
    results,
    scheduler,
    stock,
)
from nwor.engine.plugin import TESTED, vllm_version
from nwor.engine.scheduler import create_scheduler
from nwor.fast_paths import FAST_PATHS

SETUP = Setup(requests=4, blocks=60, block_size=4, length=40, tokens=64, settings={})
TABLES = {
    "TOKENS": (results.TOKENS, {"scheduler", "scheduler_steps"}),
    "BLOCKS": (kv_cache_manager.BLOCKS, {"scheduler", "scheduler_steps"}),
    "RESULTS": (results.RESULTS, {"scheduler_steps"}),
    "STEPS": (scheduler.STEPS, {"scheduler_steps"}),
    "INPUTS": (h2d_cache.INPUTS, {"inputs"}),
    "DRAFTING": (greedy_sampling.DRAFTING, {"drafting"}),
    "VERIFYING": (greedy_sampling.VERIFYING, {"verifying"}),
    "FIRST_PASS": (first_pass.FIRST_PASS, {"first_pass"}),
}


def test_every_fast_path_says_what_it_stands_for() -> None:
    paths = [path for group in FAST_PATHS.values() for path in group]
    assert {*copies.COPIES, "launches"} == set(paths)


def test_no_table_has_more_releases_than_are_known() -> None:
    for table, _ in TABLES.values():
        assert max(len(digests) for digests in table.values()) <= len(TESTED)


@pytest.mark.skipif(plugin.tested(vllm_version() or "") is None, reason="another vLLM")
def test_a_known_release_has_all_of_them() -> None:
    aside = copies.standing_aside()
    if "vllm.v1.worker.cpu.shm" in sys.modules:  # which exchanges a function, and is for CPUs
        aside.pop("inputs")
    assert aside == {}


@pytest.mark.parametrize("name", TABLES)
def test_a_path_steps_aside_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another source of what only it has a copy of."""
    before = copies.standing_aside()
    table, paths = TABLES[name]
    place = next(iter(table))
    found = stock.found_digest

    def other(module: str, path: str) -> str | None:
        return "another" if (module, path) == place else found(module, path)

    monkeypatch.setattr(stock, "found_digest", other)
    aside = copies.standing_aside()
    assert aside.keys() == before.keys() | paths
    for path in paths - before.keys():
        assert aside[path] == f"{place[1]} is not the known one"


@pytest.mark.parametrize("name", ["TOKENS", "BLOCKS", "RESULTS", "STEPS"])
def test_a_scheduler_keeps_vllms_way_and_says_so_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = copies.standing_aside()
    table, paths = TABLES[name]
    place = next(iter(table))
    monkeypatch.setitem(table, place, ("another",))  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "vllm.nwor.scheduler"):
        made: Any = make_scheduler(tmp_path, SETUP, create_scheduler)
        for _ in range(3):
            made.schedule()
    assert not made._fast_steps
    assert made.fast_paths["scheduler_steps"]
    told = [record.getMessage() for record in caplog.records if record.name == "vllm.nwor.scheduler"]
    assert len(told) == 1
    if "scheduler" not in before:
        assert place[1] in told[0]
        assert made._fast is ("scheduler" not in paths)


def test_inputs_are_copied_as_vllm_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.worker.gpu import model_runner

    before = model_runner.async_tensor_h2d
    monkeypatch.setattr(model_runner, "async_tensor_h2d", before)
    monkeypatch.setattr(h2d_cache, "INPUTS", {**h2d_cache.INPUTS, next(iter(h2d_cache.INPUTS)): ("another",)})
    with caplog.at_level(logging.WARNING, h2d_cache.logger.name):
        assert h2d_cache.apply() == "async_tensor_h2d is not the known one"
    assert model_runner.async_tensor_h2d is before
    assert len(caplog.records) == 1


def test_the_doctor_names_what_steps_aside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = doctor.Report()
    monkeypatch.setattr(copies, "standing_aside", lambda: {"inputs": "prepare_inputs is not the known one"})
    doctor._fast_paths(report)
    said = " ".join(capsys.readouterr().out.split())
    assert said == "fast path inputs as vLLM does it: prepare_inputs is not the known one"
    monkeypatch.setattr(copies, "standing_aside", dict)
    doctor._fast_paths(report)
    assert "the known one" in capsys.readouterr().out

    def broken() -> dict[str, str]:
        raise RuntimeError("no such device")

    monkeypatch.setattr(copies, "standing_aside", broken)
    doctor._fast_paths(report)
    assert "RuntimeError: no such device" in capsys.readouterr().out
    assert not report.failed


def test_the_doctor_says_what_was_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for version, said in (
        ("0.32.0", TESTED["0.32.0"]),
        ("0.33.9", "not this version"),
        (None, "not installed"),
    ):
        monkeypatch.setattr(doctor, "vllm_version", lambda version=version: version)
        doctor._versions(doctor.Report())
        assert said in capsys.readouterr().out
