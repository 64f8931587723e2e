"""The demo's dtype: what the user says, else bfloat16 where the processor computes in it, else float32."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from server import cli, options, processor
from tests.unit.test_server_options import parse

AVX2 = "flags\t\t: fpu sse4_2 avx2 fma"
AVX512 = AVX2 + " avx512f avx512_vnni"
SAPPHIRE = AVX512 + " avx512_bf16 amx_bf16 amx_tile"
COOPER = AVX512 + " avx512_bf16"
GRAVITON = "Features\t: fp asimd bf16 i8mm"


@pytest.fixture
def processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what the processors can do; not there until a test writes it."""
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    return processor.CPUINFO


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([AVX2], ""),
        ([AVX512], ""),
        ([COOPER], "avx512_bf16"),
        ([SAPPHIRE, SAPPHIRE], "amx_bf16"),
        ([GRAVITON], "bf16"),
        # A thread may run on either.
        ([SAPPHIRE, AVX2], ""),
        (["model name\t: none of this"], None),
    ],
)
def test_instructions(processors: Path, lines: list[str], found: str | None) -> None:
    processors.write_text("".join(f"processor\t: {i}\n{line}\n\n" for i, line in enumerate(lines)))
    assert processor.bf16_instructions() == found


def test_where_nobody_tells_nothing_is_known(processors: Path) -> None:
    assert processor.bf16_instructions() is None
    assert processor.demo_dtype()[0] is None


@pytest.mark.parametrize(
    ("flags", "dtype", "words"),
    [
        (AVX2, "float32", "no instructions for bfloat16"),
        (AVX512, "float32", "no instructions for bfloat16"),
        (COOPER, "auto", "instructions for it (avx512_bf16)"),
        (GRAVITON, "auto", "instructions for it (bf16)"),
    ],
)
def test_the_demo_takes_what_the_processor_is_quick_at(
    processors: Path, capsys: pytest.CaptureFixture[str], flags: str, dtype: str, words: str
) -> None:
    processors.write_text(flags)
    args = parse("--demo", dtype="auto")
    options.apply_device_defaults(args, "cpu", enforce_eager_given=False)
    assert args.dtype == dtype
    said = capsys.readouterr().err
    assert words in said
    assert "--dtype chooses another" in said


def test_what_the_user_says_comes_first(processors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processors.write_text(AVX2)
    for dtype, typed in (("bfloat16", True), ("bfloat16", False), ("auto", True)):
        args = parse("--demo", dtype=dtype)
        options.apply_device_defaults(args, "cpu", enforce_eager_given=False, dtype_given=typed)
        assert args.dtype == dtype
    assert capsys.readouterr().err == ""


def test_gpus_and_other_models_keep_vllms_choice(
    processors: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processors.write_text(AVX2)
    for args, device in ((parse("--demo", dtype="auto"), "cuda"), (parse("model", dtype="auto"), "cpu")):
        options.apply_device_defaults(args, device, enforce_eager_given=False)
        assert args.dtype == "auto"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "dtype"), [([], "float32"), (["--dtype", "auto"], "auto"), (["--dtype=bfloat16"], "bfloat16")]
)
def test_the_command_line_gets_there(processors: Path, free_port: int, words: list[str], dtype: str) -> None:
    processors.write_text(AVX2)
    assert cli.parse(["--demo", "--port", str(free_port), *words]).dtype == dtype


V2, V1 = "0::/a/b", "4:memory:/m\n3:cpu,cpuacct:/a/b\n1:name=systemd:/"


@pytest.mark.parametrize(
    ("groups", "quotas", "share"),
    [
        (V2, {"a/b/cpu.max": "max 100000\n"}, None),
        (V2, {"a/b/cpu.max": "250000 100000\n"}, 2.5),
        # Whatever is around the group holds for it, too.
        (V2, {"a/b/cpu.max": "250000 100000", "a/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 1.5),
        # A container's own root, and one that sees the host's path.
        ("0::/", {"cpu.max": "300000 100000"}, 3),
        (V2, {"cpu.max": "300000 100000"}, 3),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, None),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "150000\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, 1.5),
        (V1, {"cpu/cpu.cfs_quota_us": "450000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.5),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "100000", "cpu/a/b/cpu.cfs_period_us": "0"}, None),
        (V2, {"a/b/cpu.max": ""}, None),
        # Not this process'.
        (V2, {"c/cpu.max": "100000 100000", "m/cpu.max": "100000 100000"}, None),
    ],
)
def test_a_container_has_a_share_of_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, quotas: dict[str, str], share: float | None
) -> None:
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cgroups").write_text(groups + "\n")
    for name, text in quotas.items():
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_text(text)
    assert processor.usable_processors(tmp_path / "cgroups", tmp_path / "files") == (share or 8)


def test_a_share_of_more_than_there_are_gives_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cgroups").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("99999900000 100000")
    assert processor.usable_processors(tmp_path / "cgroups", tmp_path) == 8
    assert processor.usable_processors(tmp_path / "absent", tmp_path) == 8


def test_the_files_are_where_linux_has_them() -> None:
    if not processor.CGROUPS.is_file():
        pytest.skip("no Linux with control groups")
    assert processor.CGROUP_FILES.is_dir()
    assert 0 < processor.usable_processors() <= len(os.sched_getaffinity(0))
