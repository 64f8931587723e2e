"""The training corpus: Python source that the machine has, of permissive licences, held-out modules left out.

The corpus is the standard library plus the installed distributions whose metadata names a permissive licence.
Held-out modules of the standard library are chosen by a fixed rule (a hash of the name) and kept out by file
name everywhere, so that a vendored or back-ported copy stays out too; a file that shares much of its text
with a held-out one stays out as well.
"""

import ast
import hashlib
import re
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

HELD_OUT_COUNT = 40
_PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|MIT-CMU|0BSD|Unlicense|Zlib)\b", re.IGNORECASE
)
_RESTRICTIVE = re.compile(
    r"\b(L?GPL|AGPL|GNU|MPL|Mozilla|Proprietary|NVIDIA|EULA|Other/Proprietary|SSPL|CC-BY)", re.IGNORECASE
)
# Machine-made tables and the like teach a code model nothing.
_MAX_FILE, _MIN_FILE, _MAX_LINE = 400_000, 200, 600


@dataclass(frozen=True)
class Source:
    """One file of the corpus. ``package`` is ``"cpython"`` or a distribution's name."""

    package: str
    path: str
    text: str


@dataclass
class Package:
    """What the model card says of one package."""

    name: str
    version: str
    licence: str
    files: int = 0
    characters: int = 0
    tokens: int = 0


def stdlib_folder() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_modules(folder: Path) -> list[str]:
    """Forty single-file modules of the standard library, the first by SHA-256 of their name.

    Only modules of 4,000 to 120,000 bytes whose names have no leading underscore take part.
    """
    names = [
        p.stem
        for p in folder.glob("*.py")
        if not p.stem.startswith("_") and 4_000 <= p.stat().st_size <= 120_000
    ]
    return sorted(sorted(names, key=lambda n: hashlib.sha256(n.encode()).hexdigest())[:HELD_OUT_COUNT])


def _field(meta: metadata.PackageMetadata, name: str) -> str | None:
    return str(meta[name]) if name in meta else None


def licence_of(dist: metadata.Distribution) -> str:
    """The licence that a distribution's metadata states, in one line; empty where it states none."""
    meta = dist.metadata
    expression = _field(meta, "License-Expression")
    if expression:
        return expression
    classifiers = [
        c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License")
    ]
    named = [c for c in classifiers if c != "OSI Approved"]
    if named:
        return "; ".join(named)
    first = (_field(meta, "License") or "").strip().splitlines()
    return first[0][:80] if first else ""


def is_permissive(licence: str) -> bool:
    """True where the text names a permissive licence and none that is not."""
    return bool(_PERMISSIVE.search(licence)) and not _RESTRICTIVE.search(licence)


def _long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= 40}


def _usable(text: str) -> bool:
    if not _MIN_FILE <= len(text) <= _MAX_FILE:
        return False
    return max(map(len, text.splitlines()), default=0) <= _MAX_LINE


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").replace("\r\n", "\n").expandtabs(4)
    except (UnicodeDecodeError, OSError):
        return None


class Corpus:
    """Collects files, drops duplicates and whatever is held out, and counts per package.

    Args:
        held_out: names of the modules to keep out.
        folder: the standard library, to read their text from.
    """

    def __init__(self, held_out: list[str], folder: Path) -> None:
        self.sources: list[Source] = []
        self.packages: dict[str, Package] = {}
        self.kept_out = 0
        self._names = set(held_out) | {f"test_{name}" for name in held_out}
        self._seen: set[bytes] = set()
        self._lines: set[str] = set()
        for name in held_out:
            self._lines |= _long_lines(_read(folder / f"{name}.py") or "")

    def add(self, package: Package, path: Path, label: str) -> int:
        """Take one file, or leave it. Returns the characters taken."""
        if self._names & {path.stem, *path.parts[-4:-1]}:
            self.kept_out += 1
            return 0
        text = _read(path)
        if text is None or not _usable(text):
            return 0
        digest = hashlib.sha256(re.sub(r"\s+", " ", text).encode()).digest()
        if digest in self._seen:
            return 0
        self._seen.add(digest)
        lines = _long_lines(text)
        if lines and len(lines & self._lines) > 0.2 * len(lines):
            self.kept_out += 1
            return 0
        self.sources.append(Source(package.name, label, text))
        package.files += 1
        package.characters += len(text)
        self.packages[package.name] = package
        return len(text)


def _order(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


def collect(cap_characters: int, total_characters: int) -> tuple[Corpus, list[str]]:
    """The whole corpus of this machine.

    Args:
        cap_characters: most that is taken of one installed distribution; files come in the order of a hash of
            their path, so that a cap leaves a fair sample. The standard library is taken whole.
        total_characters: where to stop.

    Returns:
        The corpus, and the names of the held-out modules.
    """
    folder = stdlib_folder()
    held_out = held_out_modules(folder)
    corpus = Corpus(held_out, folder)
    python = Package("cpython", ".".join(map(str, sys.version_info[:3])), "PSF-2.0")
    total = 0
    for path in sorted(folder.rglob("*.py")):
        label = path.relative_to(folder).as_posix()
        if not label.startswith(("site-packages/", "dist-packages/", "lib2to3/tests/data")):
            total += corpus.add(python, path, label)
    for dist in sorted(metadata.distributions(), key=lambda d: str(d.metadata["Name"]).lower()):
        licence = licence_of(dist)
        if not is_permissive(licence):
            continue
        package = Package(str(dist.metadata["Name"]), dist.version, licence)
        taken = 0
        files = [f for f in dist.files or [] if f.suffix == ".py" and ".." not in f.parts]
        for file in sorted(files, key=lambda f: _order(f.as_posix())):
            if taken >= cap_characters or total >= total_characters:
                break
            size = corpus.add(package, Path(str(file.locate())), file.as_posix())
            taken += size
            total += size
    return corpus, held_out


def _signature(node: ast.FunctionDef) -> str:
    return f"{node.name}({ast.unparse(node.args)})"


def functions(text: str) -> list[tuple[ast.FunctionDef, str]]:
    """Top-level functions and methods of a module, with their dedented source; none where parsing fails."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = text.splitlines(keepends=True)
    found = []
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for item in inner:
            if isinstance(item, ast.FunctionDef) and item.end_lineno is not None:
                indent = item.col_offset
                body = [
                    (line[indent:] if line[:indent].isspace() else line) if line.strip() else "\n"
                    for line in lines[item.lineno - 1 : item.end_lineno]
                ]
                if not indent:
                    body = lines[item.lineno - 1 : item.end_lineno]
                found.append((item, "".join(body)))
    return found


def chat_pairs(text: str) -> list[tuple[str, str]]:
    """Instruction and answer, made of a function's docstring and its code."""
    pairs = []
    for node, code in functions(text):
        doc = ast.get_docstring(node)
        if not doc or not 120 <= len(code) <= 1500:
            continue
        first = " ".join(doc.split("\n\n")[0].split())
        if not 20 <= len(first) <= 300:
            continue
        ask = f"Write a Python function `{_signature(node)}`. {first}"
        pairs.append((ask, f"```python\n{code.rstrip()}\n```"))
    return pairs
