"""Claim: loads follow from their seed, arms have their servers and settings, wrong requests are refused.

Coverage: the pure parts of benchmarks/serving before a run. No server runs here.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.serving import (
    client,
    curves,
    figures,
    models,
    plan,
    rates_plugin,
    servers,
    summary,
    workload,
)
from benchmarks.serving.__main__ import flags, parse
from benchmarks.serving.session import Session
from nwor.config import NworConfig
from nwor.tree_shape import TreeShape

LENGTHS = plan.parse_lengths("64/32", 1024)


def _recipe(salt: str = "", shared: float = 0.0, seed: str = "s") -> workload.Recipe:
    return workload.Recipe(LENGTHS, 5000, seed, salt, shared)


def test_requests_follow_from_the_seed_and_words_from_the_arm() -> None:
    first, again = workload.requests(_recipe("off"), 40), workload.requests(_recipe("off"), 40)
    other = workload.requests(_recipe("stage"), 40)
    assert first == again
    assert [(len(one.prompt), one.answer, one.seed) for one in first] == [
        (len(one.prompt), one.answer, one.seed) for one in other
    ]
    assert all(one.prompt != two.prompt for one, two in zip(first, other, strict=True))
    assert workload.requests(_recipe("off", seed="t"), 40) != first


def test_lengths_stay_in_bounds_and_have_their_median() -> None:
    made = workload.requests(_recipe(), 2000)
    prompts, answers = [len(one.prompt) for one in made], [one.answer for one in made]
    assert min(prompts) >= LENGTHS.least
    assert max(prompts) <= LENGTHS.most_prompt
    assert max(answers) <= LENGTHS.most_answer
    assert summary.quantile(prompts, 0.5) == pytest.approx(64, rel=0.08)
    assert summary.quantile(answers, 0.5) == pytest.approx(32, rel=0.08)
    assert all(8 <= word < 5000 for one in made[:20] for word in one.prompt)


def test_early_requests_get_a_part_of_their_answer() -> None:
    whole, early = workload.requests(_recipe(), 30), workload.requests(_recipe(), 30, early=10)
    assert all(part.answer <= one.answer for part, one in zip(early, whole, strict=True))
    assert early[10:] == whole[10:]
    assert sum(one.answer for one in early[:10]) < sum(one.answer for one in whole[:10])


def test_a_share_of_prompts_begins_alike() -> None:
    made = workload.requests(_recipe(shared=0.5), 400)
    heads = [tuple(one.prompt[:7]) for one in made]
    common = [head for head in heads if heads.count(head) > 1]
    assert len(set(common)) == workload.PREFIXES
    assert len(common) / len(heads) == pytest.approx(0.5, abs=0.1)


def test_prompts_cut_from_texts_are_the_same_in_every_arm() -> None:
    texts = list(range(3000))
    made = [
        workload.requests(workload.Recipe(LENGTHS, 5000, "s", salt, texts=texts), 20)
        for salt in ("off", "stage")
    ]
    assert made[0] == made[1]
    assert all(one.prompt == texts[one.prompt[0] : one.prompt[-1] + 1] for one in made[0])


def test_a_share_of_requests_is_hard() -> None:
    texts = list(range(3000))
    made = [
        workload.requests(workload.Recipe(LENGTHS, 5000, "s", salt, texts=texts, hard=0.25), 400)
        for salt in ("off", "stage")
    ]
    assert made[0] == made[1]
    easy = workload.requests(workload.Recipe(LENGTHS, 5000, "s", texts=texts), 400)
    assert [len(one.prompt) for one in made[0]] == [len(one.prompt) for one in easy]
    hard = [one for one in made[0] if one.hard]
    assert len(hard) / 400 == pytest.approx(0.25, abs=0.06)
    for one in made[0]:
        cut = one.prompt == texts[one.prompt[0] : one.prompt[-1] + 1]
        assert cut != one.hard
        sent = json.loads(workload.body(one, "m", 0.3))
        assert sent["temperature"] == (1.0 if one.hard else 0.3)


def test_arrivals_have_their_rate() -> None:
    times = workload.arrivals("s", 20.0, 4000)
    assert times == workload.arrivals("s", 20.0, 4000)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.1)


@pytest.mark.parametrize(
    ("text", "name", "server"),
    [
        ("stage", "stage", "nwor@4"),
        ("stock@2", "stock@2", "stock@2"),
        ("adaptive@6", "adaptive@6", "nwor@adaptive-6"),
        ("stock-adaptive@6", "stock-adaptive@6", "stock@adaptive-6"),
    ],
)
def test_arms_have_servers(text: str, name: str, server: str) -> None:
    arm = plan.parse_arm(text, 4)
    assert (arm.name, arm.server) == (name, server)


def test_an_arm_with_the_usual_k_has_the_usual_name() -> None:
    assert plan.parse_arm("stock@4", 4) == plan.parse_arm("stock", 4)


@pytest.mark.parametrize(
    "text", ["fast", "stage@0", "stock@x", "", "tree@16", "tree@4x6", "adaptive", "adaptive@0"]
)
def test_other_arms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"arm|stage|depth"):
        plan.parse_arm(text, 4)


def test_adaptive_arms_are_reported_behind_the_others() -> None:
    records = [
        {"arm": arm}
        for arm in ("adaptive@4", "auto-tree@60x8", "fitted", "auto", "stock-adaptive@4", "stock@1")
    ]
    assert figures.arms(records) == [
        "stock@1",
        "auto",
        "fitted",
        "auto-tree@60x8",
        "stock-adaptive@4",
        "adaptive@4",
    ]


@pytest.mark.parametrize(
    "wanted",
    [
        ["--hard", "0.5", "--shape", "demo", "--acceptance", "0.6"],
        ["--hard", "1.5", "--shape", "demo", "--acceptance", "own"],
        ["--hard", "0.5", "--shape", "8b"],
        ["--shared", "0.5", "--shape", "demo", "--acceptance", "own"],
        ["--lengths", "64/32:0.5", "--shape", "demo", "--acceptance", "own"],
    ],
)
def test_what_would_mislabel_a_run_is_refused(wanted: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--out", "x.json", *wanted])


def test_adaptive_arms_ask_vllm_for_it_and_need_a_real_head() -> None:
    for name, mode in (("adaptive@6", "stage"), ("stock-adaptive@6", "stock")):
        arm = plan.parse_arm(name, 4)
        assert arm.mode == mode
        config = models.speculation(Path("head"), "eagle3", arm, "own", 64)
        assert config is not None
        assert config["enable_adaptive_verification"]
        assert config["num_speculative_tokens"] == 6
    with pytest.raises(SystemExit):
        parse(["--out", "x.json", "--shape", "8b", "--arms", "adaptive@6"])


def test_loads_are_read() -> None:
    assert plan.parse_load("c16").clients == 16
    assert plan.parse_load("p12.5").rate == 12.5
    assert plan.parse_load("p80%").share == 0.8
    for text in ("c0", "p0", "x3", "p900%"):
        with pytest.raises(ValueError, match="load"):
            plan.parse_load(text)


def test_every_arm_is_first_equally_often() -> None:
    arms = [plan.parse_arm(name, 4) for name in plan.CORE_ARMS]
    orders = [[arm.name for arm in plan.order(arms, turn)] for turn in range(6)]
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["off", "off", "stage", "stage", "stock", "stock"]
    assert orders[1] == orders[0][::-1]


def test_acceptance_is_unconditional() -> None:
    assert models.rates("heads", 3) == [0.73, 0.52, 0.35]
    assert models.rates("0.9", 2) == [0.9, 0.81]
    assert models.rates("own", 4) is None
    long = models.rates("heads", 8)
    assert long is not None
    assert long == sorted(long, reverse=True)
    with pytest.raises(ValueError, match="acceptance"):
        models.rates("1.2", 4)


def test_commands_differ_in_the_server_alone() -> None:
    stock = servers.command("stock@0", Path("m"), None, ["--x"], ["off", "stage"])
    ours = servers.command("nwor@4", Path("m"), {"a": 1}, ["--x"], ["off", "stage"])
    assert "--speculative-config" not in stock
    assert stock[-1] == "--x"
    assert ours[ours.index("--nwor-modes") + 1] == "off,stage"
    # As many API servers as stock has, be it by default or by the flags of all.
    assert ours[ours.index("--api-server-count") + 1] == "1"
    both = ["--api-server-count=2"]
    assert "--api-server-count" not in servers.command("nwor@4", Path("m"), None, both, ["off"])
    assert servers.environment("stock@4", "", None, Path("p"), False)["NWOR_DISABLE"] == "1"
    assert "NWOR_DISABLE" not in servers.environment("nwor@4", "key", None, Path("p"), False)


def test_acceptance_changes_in_place() -> None:
    rates = torch.tensor([0.5, 0.5])
    worker = SimpleNamespace(model_runner=SimpleNamespace(rejection_sampler=SimpleNamespace()))
    with pytest.raises(RuntimeError, match="no 2 synthetic"):
        rates_plugin.accept(worker, [0.9, 0.45])
    worker.model_runner.rejection_sampler.synthetic_conditional_rates = rates
    rates_plugin.accept(worker, [0.9, 0.45])
    assert rates.tolist() == pytest.approx([0.9, 0.5])
    with pytest.raises(RuntimeError, match="no 1 synthetic"):
        rates_plugin.accept(worker, [0.9])


@pytest.mark.parametrize(("name", "more"), [("auto", {}), ("fitted", {"fit_windows": True})])
def test_the_arms_that_choose_their_draft_tokens(name: str, more: dict[str, bool]) -> None:
    arm = plan.parse_arm(name, 4)
    assert (arm.server, arm.mode, arm.k, arm.chosen) == (f"nwor@{name}", "stage", 8, True)
    config = models.speculation(Path("d"), "eagle", arm, "heads", 128)
    assert config is not None
    assert config["num_speculative_tokens"] == len(config["synthetic_acceptance_rates"]) == 8
    assert config["num_speculative_tokens_per_batch_size"] == [(1, 1, 0), (2, 2, 4)]
    line = servers.command(arm.server, Path("m"), config, [], ["off", "stage"], arm)
    settings = json.loads(line[line.index("--additional-config") + 1])["nwor"]
    assert settings == {"mode": "stage", "modes": ["off", "stage"], "draft_tokens": "auto:0-8", **more}
    assert "--nwor-mode" not in line


@pytest.mark.parametrize("chooses", [False, True])
def test_arms_with_trees(chooses: bool) -> None:
    name = "auto-tree@16x6" if chooses else "tree@16x6"
    arm = plan.parse_arm(name, 4)
    assert (arm.name, arm.server, arm.k, arm.chosen) == (name, f"nwor@{name.replace('@', '-')}", 16, chooses)
    config = models.speculation(Path("d"), "eagle", arm, "own", 128)
    assert config is not None
    assert config["num_speculative_tokens"] == 16
    by_requests = [(1, 1, 0), (2, 2, 4)] if chooses else [(1, 11, 16), (12, 48, 4), (49, 128, 2)]
    assert config["num_speculative_tokens_per_batch_size"] == by_requests
    line = servers.command(arm.server, Path("m"), config, [], ["stage"], arm)
    settings = NworConfig.from_mapping(json.loads(line[line.index("--additional-config") + 1])["nwor"])
    assert settings.tree == TreeShape.of(16, 6)
    assert str(settings.draft_tokens) == ("auto:0-16" if chooses else "None")


def test_measured_acceptance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CURVES", tmp_path / "curves.json")
    monkeypatch.setattr(curves, "CURVES", models.CURVES)
    models.CURVES.write_text("{}")
    for name, counts in (("chain", [80, 60, 45]), ("tree", [90, 80, 70, 60, 50, 0, 0, 0])):
        (tmp_path / name).write_text(json.dumps({"drafts": 100, "per_position": counts}))
    curves.main(["x", "--source", "here", f"chain={tmp_path / 'chain'}", f"16x5={tmp_path / 'tree'}"])
    assert models.rates("x", 5) == [0.8, 0.6, 0.45, 0.3375, 0.2531]
    arm = plan.parse_arm("auto-tree@16x5", 4)
    assert models.tree_rates("x", arm) == [0.9, 0.8, 0.7, 0.6, 0.5]
    assert models.tree_rates("x", plan.parse_arm("stage", 4)) is None
    for unknown in ("heads", "0.9"):
        with pytest.raises(ValueError, match="says nothing of 16x5"):
            models.tree_rates(unknown, arm)
    line = servers.command(arm.server, Path("m"), None, [], ["stage"], arm, models.tree_rates("x", arm))
    settings = NworConfig.from_mapping(json.loads(line[line.index("--additional-config") + 1])["nwor"])
    assert settings.tree_acceptance_rates == ((0.9, 0.8, 0.7, 0.6, 0.5),)
    # Shallower trees that were measured are taken where the server may choose them.
    more = [f"16x5/{drafts}={tmp_path / 'tree'}" for drafts in (14, 15)]
    curves.main(["x", "--source", "here", f"chain={tmp_path / 'chain'}", *more, f"16x5={tmp_path / 'tree'}"])
    each = models.tree_rates("x", arm)
    assert each == [[0.9, 0.8, 0.7], [0.9, 0.8, 0.7, 0.6], [0.9, 0.8, 0.7, 0.6, 0.5]]
    assert models.tree_rates("x", plan.parse_arm("tree@16x5", 4)) == [0.9, 0.8, 0.7, 0.6, 0.5]


def test_lengths_may_have_a_share_of_common_prefixes_of_their_own() -> None:
    args = parse(["--out", "x.json", "--shared", "0.25", "--lengths", "512/256,512/256:0.5,200/600:0"])
    assert [(one.name, one.shared) for one in args.lengths] == [
        ("512/256", 0.25),
        ("512/256", 0.5),
        ("200/600", 0.0),
    ]
    assert "--enable-prefix-caching" in flags(args, "cuda")
    without = parse(["--out", "x.json", "--lengths", "512/256"])
    assert "--no-enable-prefix-caching" in flags(without, "cuda")
    for wrong in ("512/256:1.5", "512/256:", "512/256:x"):
        with pytest.raises(SystemExit):
            parse(["--out", "x.json", "--lengths", wrong])


def test_no_load_finds_prompts_of_another_in_the_prefix_cache() -> None:
    args = parse(["--out", "x.json", "--acceptance", "heads,0.9", "--lengths", "512/256,512/256:0.5"])
    jobs = []
    for acceptance in args.acceptances:
        for lengths in args.lengths:
            for arm in args.arms:
                session = SimpleNamespace(args=args, acceptance=acceptance, _vocabulary=5000, _texts="")
                jobs.append(Session._job(session, SimpleNamespace(port=1), arm, "c2", 0.0, lengths, "0", 1.0))
    assert [job.shared for job in jobs[:6]] == [0.0] * 3 + [0.5] * 3
    assert {job.seed for job in jobs} == {"512/256 c2 0"}
    first = [client.Loader(job).prepare(1, 0)[0] for job in jobs]
    beginnings = {sent.split(b'"prompt":[')[1][:80] for sent in first}
    assert len(beginnings) == len(jobs)


def test_the_command_line_is_checked(tmp_path: Path) -> None:
    args = parse(["--shape", "1b", "--out", str(tmp_path / "x.json"), "--arms", "stock@0,stage"])
    assert [arm.server for arm in args.arms] == ["stock@0", "nwor@4"]
    assert args.scale == 2.0
    for wrong in (["--shape", "9b"], ["--loads", "c500"], ["--arms", "stage,off", "--loads", "p50%"]):
        with pytest.raises(SystemExit):
            parse([*wrong, "--out", "x.json"])
