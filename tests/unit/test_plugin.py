"""The gate, the choice of worker and the ledger of patches."""

from __future__ import annotations

import ast
import importlib
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from nwor.engine import ledger, patches, plugin
from nwor.errors import ConfigError


def _config(worker: str, additional: object) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config=additional,
        parallel_config=SimpleNamespace(worker_cls=worker),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
    )


def test_gate_is_open_for_the_installed_version():
    assert plugin.why_not() is None


def test_gate_names_its_reason(monkeypatch):
    monkeypatch.setenv(plugin.DISABLE_VARIABLE, "1")
    assert plugin.DISABLE_VARIABLE in (plugin.why_not() or "")
    monkeypatch.delenv(plugin.DISABLE_VARIABLE)
    for version in ("0.31.0", "0.34.0", "1.32.0", "0.320.0", "nightly"):
        monkeypatch.setattr(plugin, "vllm_version", lambda version=version: version)
        assert (plugin.why_not() or "").startswith(f"vLLM {version} is installed")
    monkeypatch.setattr(plugin, "vllm_version", lambda: None)
    assert "not installed" in (plugin.why_not() or "")


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.32.0", True), ("0.33.0+cu130", True), ("0.32.1", False), ("0.33.2rc1", False), ("0.33", False)],
)
def test_gate_is_open_for_a_range_and_says_what_was_not_tested(version, known, monkeypatch, caplog):
    applied = []
    monkeypatch.setattr(patches, "apply_config_patch", lambda: applied.append(version))
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    with caplog.at_level(logging.WARNING, plugin.logger.name):
        plugin.register()
    assert applied == [version]
    assert (plugin.tested(version) is not None) is known
    assert [version in record.getMessage() for record in caplog.records] == [True] * (not known)


def test_gate_imports_nothing_heavy():
    code = "import sys, nwor.engine.plugin; sys.exit(any(m in sys.modules for m in ('torch', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("stock", sorted(patches.WORKERS))
def test_worker_is_exchanged_only_where_asked_for(stock):
    for additional in (None, {}, {"other": 1}):
        config = _config(stock, additional)
        patches.choose_worker(config)
        assert config.parallel_config.worker_cls == stock
        assert config.scheduler_config.scheduler_cls is None
    config = _config(stock, {"nwor": {"mode": "off"}})
    patches.choose_worker(config)
    assert config.parallel_config.worker_cls == patches.WORKERS[stock]
    assert config.scheduler_config.scheduler_cls == patches.SCHEDULER


def test_a_scheduler_of_somebody_else_is_left_alone():
    config = _config(next(iter(patches.WORKERS)), {"nwor": {}})
    config.scheduler_config.scheduler_cls = "elsewhere.Scheduler"
    patches.choose_worker(config)
    assert config.scheduler_config.scheduler_cls == "elsewhere.Scheduler"


def test_a_worker_of_somebody_else_is_left_alone():
    config = _config("elsewhere.Worker", {"nwor": {}})
    patches.choose_worker(config)
    assert config.parallel_config.worker_cls == "elsewhere.Worker"


def test_wrong_settings_stop_the_start():
    with pytest.raises(ConfigError, match="off, stage, cow"):
        patches.choose_worker(_config(next(iter(patches.WORKERS)), {"nwor": {"mode": "warp"}}))


def _resolve(path: str) -> object:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            target: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            target = getattr(target, part)
        return target
    raise AssertionError(path)


PATCHES = (
    ledger.LEDGER
    + ledger.OBJECT_LEDGER
    + ledger.FAST_PATH_LEDGER
    + ledger.FAULT_LEDGER
    + ledger.MENDS_LEDGER
    + ledger.SERVER_FAULT_LEDGER
    + ledger.SERVER_LEDGER
)


def test_ledger_names_what_exists_and_why():
    for entry in PATCHES:
        assert _resolve(entry.target) is not None
        assert entry.why
        assert entry.how
        assert entry.removal


def _changes(source: str) -> list[str]:
    """Return what a source assigns to attributes of vLLM's, or of objects that become another class.

    Whose an attribute is, a source need not tell. So a function or class that becomes an attribute of
    anything but ``self`` counts as well. What a loop over names sets counts once for each name.
    """
    tree = ast.parse(source)
    own = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    stock = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("vllm", "triton")
        for alias in node.names
    }
    replaced = {entry.target.rpartition(".")[2] for entry in PATCHES}
    # Of what the runner holds the ledger names the class.
    replaced |= {"__class__", "__code__", "run", "rejection_sampler", "grammar_bitmask"}
    found = []
    names = _names_in_loops(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Delete):
            continue
        value = getattr(node, "value", None)
        made = value.id if isinstance(value, ast.Name) else ""
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if not isinstance(target, ast.Attribute | ast.Subscript):
                continue
            root: ast.AST = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            name = root.id if isinstance(root, ast.Name) else ""
            exchanged = isinstance(target, ast.Attribute) and (target.attr in replaced or made in own)
            if name in stock or (exchanged and name != "self"):
                found.append(ast.unparse(target))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            found += [ast.unparse(node)] * names.get(node, 1)
    return found


def _names_in_loops(tree: ast.AST) -> dict[ast.AST, int]:
    """Return the calls within a loop over names that are written there, each with their number."""
    found = {}
    for loop in ast.walk(tree):
        if not (isinstance(loop, ast.For) and isinstance(loop.iter, ast.Tuple | ast.List)):
            continue
        for node in ast.walk(loop):
            if isinstance(node, ast.Call) and ast.unparse(loop.target) in map(ast.unparse, node.args[1:2]):
                found[node] = len(loop.iter.elts)
    return found


def test_ledger_names_every_module_that_changes_what_is_vllms():
    root = Path(patches.__file__).parents[2]
    # Figures' own fields are set by name, and so is what a step carries (in the ledger as one entry).
    own = {
        "nwor.counts.formulas": "setattr(self, name",
        "nwor.counts.records": "setattr(total, name",
        "nwor.engine.stats.step_messages": "setattr(scheduler_output, FAST_PATHS",
        "server.api.output_processor": "setattr(finished, name",
    }
    changing = {}
    for path in [*(root / "nwor").rglob("*.py"), *(root / "server").rglob("*.py")]:
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        changes = [text for text in _changes(path.read_text()) if not text.startswith(own.get(module, "-"))]
        if changes:
            changing[module] = changes
    assert changing.keys() == {entry.where for entry in PATCHES}, changing
    # As many as the ledger has: a second one in a module that has one already needs a line of its own. Marks
    # that a change was made are one more each, and one function exchanges the streams of two classes.
    listed = Counter(entry.where for entry in PATCHES)
    listed.update(
        {"nwor.engine.patches": 1, "nwor.engine.workarounds.cpu_generators": 1, "server.api.acceptance": -1}
        | {"nwor.engine.workarounds.sampled_drafts": 2}
    )
    # What is put back counts again; an entry of a serving object stands for all of its wrapped methods.
    listed.update(
        {
            # Workers that start have the class of their runner exchanged.
            "nwor.engine.patches": 2,
            "nwor.engine.request_isolation.common": 1,
            # A step's output brings a record, or what has changed where there is none.
            "nwor.engine.model_runner.common": 1,
            "server.api.beam_search": 1,
            "server.api.mended_answers": 2,
        }
    )
    assert {module: len(changes) for module, changes in changing.items()} == listed


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def mine(): ...\ndef wrap(serving):\n    serving.anything = mine", ["serving.anything"]),
        ("class Mine: ...\nfor entry in app.stack:\n    entry.kind = Mine", ["entry.kind"]),
        ("from vllm import envs\nenvs.NAME = 3", ["envs.NAME"]),
        (
            "def wrap(serving, name, mine):\n    setattr(serving, name, mine)",
            ["setattr(serving, name, mine)"],
        ),
        (
            "def wrap(serving, mine):\n    for name in ('a', 'b'):\n        setattr(serving, name, mine)",
            ["setattr(serving, name, mine)"] * 2,
        ),
        ("def take(answer):\n    answer.metrics = make()\n    del answer.other", []),
        ("class A:\n    def f(self):\n        def g(): ...\n        self.g = g", []),
    ],
)
def test_what_counts_as_a_change(source: str, found: list[str]) -> None:
    """Also where the ledger does not know its name yet."""
    assert _changes(source) == found


def test_config_patch_is_applied_once_and_calls_the_original():
    from vllm.platforms import current_platform

    platform = type(current_platform)
    before = platform.__dict__.get("check_and_update_config")
    try:
        patches.apply_config_patch()
        once = platform.check_and_update_config
        patches.apply_config_patch()
        assert platform.check_and_update_config.__func__ is once.__func__
        assert once.__func__.__wrapped__ is not None
    finally:
        platform.check_and_update_config = before


@pytest.mark.parametrize(
    ("ahead", "name"), [(False, "DiffusionScheduler"), (True, "DiffusionAsyncScheduler")]
)
def test_a_model_that_needs_a_scheduler_of_its_own_gets_it(ahead, name, monkeypatch):
    from vllm.v1.core.sched import diffusion_scheduler

    import nwor.engine.scheduler
    import server.scheduler

    monkeypatch.setattr(diffusion_scheduler, name, lambda *args, **kwargs: name)
    config = SimpleNamespace(
        diffusion_config=object(),
        additional_config={},
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
    )
    for module in (nwor.engine.scheduler, server.scheduler):
        assert module.create_scheduler(config) == name
        assert module.create_scheduler(vllm_config=config) == name
