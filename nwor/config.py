"""Settings of NWOR, as they stand in the engine's ``additional_config`` under the key ``nwor``.

They travel inside the engine's own configuration, so they reach every worker of every executor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nwor.draft_vocabulary import VocabularyChoice
from nwor.errors import ConfigError
from nwor.modes import Mode
from nwor.tree_shape import TreeShape

#: The key in vLLM's ``additional_config`` that holds the settings below.
CONFIG_KEY = "nwor"

#: Settings that are whole numbers from 0.
_COUNTS = ("self_check_interval", "grammar_seconds")

#: vLLM's attention backends on GPUs that NWOR extends, and the choice among them by the GPU.
ATTENTION_BACKENDS = ("auto", "flash", "triton", "flashinfer", "rocm")
#: Longest window that the verify kernels take, in tokens.
MAX_WINDOW = 64
#: Draft tokens of a step where their number is fixed and nobody gives one.
DEFAULT_DRAFT_TOKENS = 4
#: Most draft tokens that ``auto`` chooses where no bounds are given and windows are chains.
MOST_AUTO_DRAFT_TOKENS = 8
#: Numbers of draft tokens that are worth a choice; graphs of the drafter are captured for each.
CANDIDATES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)


@dataclass(frozen=True)
class DraftBounds:
    """Between which numbers of draft tokens the engine chooses, step by step.

    Attributes:
        least: 0 allows steps without drafts.
        most: vLLM's ``num_speculative_tokens`` is at least this.
        tree: what windows of ``most`` draft tokens are; None where all windows are chains.
        given: whether somebody has named the bounds.

    """

    least: int = 0
    most: int = MOST_AUTO_DRAFT_TOKENS
    tree: TreeShape | None = field(default=None, compare=False)
    given: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ConfigError: if they are not in order, or the longest window has no room for them.

        """
        if not 0 <= self.least <= self.most or not 1 <= self.most < MAX_WINDOW:
            raise ConfigError(
                f"draft tokens {self.least} to {self.most} are no bounds: give LEAST-MOST with LEAST 0 or "
                f"more and MOST from 1 to {MAX_WINDOW - 1}, as auto:1-8"
            )
        if self.tree is not None and self.tree.nodes != self.most:
            raise ConfigError(
                f"draft tokens {self} end at {self.most}, and the tree has {self.tree.nodes} nodes: use "
                f"auto, or auto:{min(self.least, self.tree.nodes)}-{self.tree.nodes}"
            )

    @classmethod
    def parse(cls, text: str, or_number: bool = False) -> DraftBounds:
        """Return the bounds of ``auto`` or ``auto:LEAST-MOST``.

        Args:
            text: either of them.
            or_number: whether the caller takes a number as well, for the message.

        Raises:
            ConfigError: if it is of another form.

        """
        match = re.fullmatch(r"auto(?::(\d+)-(\d+))?", text.strip())
        if match is None:
            forms = "auto, bounds as auto:1-8, or a number" if or_number else "auto, or bounds as auto:1-8"
            raise ConfigError(f"{text!r} is no choice of draft tokens: use {forms}")
        return cls(int(match[1]), int(match[2]), given=True) if match[1] else cls()

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads."""
        return f"auto:{self.least}-{self.most}"

    def with_tree(self, tree: TreeShape) -> DraftBounds:
        """Return these bounds where the longest windows are trees.

        Raises:
            ConfigError: if bounds that were given do not end at the tree's nodes.

        """
        most = self.most if self.given else tree.nodes
        return replace(self, most=most, tree=tree)

    @property
    def candidates(self) -> tuple[int, ...]:
        """Numbers of draft tokens to choose among, ascending, both bounds included.

        Chains beside a tree are at most as long as it is deep, since passes of the drafter are made for that.
        """
        inside = {drafts for drafts in CANDIDATES if self.least <= drafts <= self.most} | {self.least}
        if self.tree is not None:
            inside = {drafts for drafts in inside | {self.tree.depth} if drafts <= self.tree.depth}
            inside = {drafts for drafts in inside | {*self.tree.choices} if self.least <= drafts < self.most}
        return tuple(sorted(inside | {self.most}))

    @property
    def fixed(self) -> int:
        """Draft tokens of each step while nothing is chosen: those of a chain where one is a candidate."""
        wanted = max(self.least, min(DEFAULT_DRAFT_TOKENS, self.most))
        return min(self.candidates, key=lambda drafts: (abs(drafts - wanted), drafts))

    @property
    def schedule(self) -> list[tuple[int, int, int]]:
        """What vLLM's ``num_speculative_tokens_per_batch_size`` is set to: it captures graphs by it.

        Graphs for windows of other lengths are NWOR's own.
        """
        return [(1, 1, 0), (2, 2, self.fixed)]


@dataclass(frozen=True)
class NworConfig:
    """Validated settings of one engine.

    Attributes:
        mode: the mode in force after start-up.
        modes: the modes that may be switched to while the engine runs; graphs are captured for each of them.
        self_check_interval: verify the cache invariants on every N-th verify step; 0 turns the check off.
        mixed_graph_rows: rows of the largest step that runs in one CUDA graph though prompts stand beside its
            windows; 0 leaves such steps to vLLM's graphs of pieces, None lets the model decide.
        fast_host: spare the host work of vLLM's own whose outcome is known beforehand, in every mode.
        fast_sampling: find the most likely tokens with NWOR's own kernels, on model runner V2 on CUDA, in
            every mode.
        fast_drafting: run what an EAGLE drafter needs of each request's last row alone for no other row, on
            model runner V2, in every mode.
        grammar_seconds: what compiling one grammar may take; 0 has no limit, and vLLM's own compiler.
        draft_tokens: the engine chooses each step's number of draft tokens within these bounds; None where
            vLLM's own settings fix it.
        fit_windows: where the engine chooses numbers of draft tokens, requests may have fewer than others.
        draft_vocabulary: the tokens that an EAGLE head drafts of; None where it may draft any.
        tree: how large the trees of draft tokens are; None where windows are chains.
        tree_required: the engine does not start where it cannot have trees. Where false, its windows are then
            chains, and the log says why.
        tree_acceptance_rates: for benchmarks under vLLM's synthetic rejection, whose own rates are those of
            chains: chance that a step accepts the first node of a tree, the first two, and so on; for each of
            its sizes, or the same for all.
        attention_backends: those of :data:`ATTENTION_BACKENDS` with which windows are staged; of no matter on
            a CPU. "auto" is flash, and flashinfer where vLLM prefers it and it pays; others are experimental.

    """

    mode: Mode = Mode.STAGE
    modes: tuple[Mode, ...] = (Mode.OFF, Mode.STAGE, Mode.COW)
    self_check_interval: int = 0
    mixed_graph_rows: int | None = None
    fast_host: bool = True
    fast_sampling: bool = True
    fast_drafting: bool = True
    grammar_seconds: int = 20
    draft_tokens: DraftBounds | None = None
    fit_windows: bool = False
    draft_vocabulary: VocabularyChoice | None = None
    tree: TreeShape | None = None
    tree_required: bool = True
    tree_acceptance_rates: tuple[tuple[float, ...], ...] = ()
    attention_backends: tuple[str, ...] = ("auto",)

    def __post_init__(self) -> None:
        """Check that the settings fit together.

        Raises:
            ConfigError: if the initial mode is not among the enabled ones, a count is negative, or a setting
                needs another.

        """
        if self.mode not in self.modes:
            enabled = ", ".join(self.modes)
            raise ConfigError(f"NWOR mode {self.mode.value!r} is not among the enabled modes ({enabled})")
        if self.fit_windows and self.draft_tokens is None:
            raise ConfigError(
                "windows fit requests where the engine chooses the number of draft tokens: add "
                "--num-speculative-tokens auto or the setting draft_tokens, or drop --fit-windows "
                "(fit_windows)"
            )
        for name in (*_COUNTS, "mixed_graph_rows"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"NWOR setting {name!r} must be 0 or more, not {value}")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> NworConfig:
        """Build the settings from plain JSON values.

        Args:
            settings: what stands under ``additional_config["nwor"]``.

        Raises:
            ConfigError: for an unknown key, a value of the wrong type or an unknown mode.

        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(
                f"unknown NWOR setting {unknown[0]!r}: the settings are {', '.join(sorted(known))}"
            )
        values: dict[str, Any] = {}
        if "mode" in settings:
            values["mode"] = Mode.parse(settings["mode"])
        if "modes" in settings:
            values["modes"] = _parse_modes(settings["modes"])
        elif "mode" in values:
            values["modes"] = tuple(Mode)
        if "attention_backends" in settings:
            values["attention_backends"] = _parse_backends(settings["attention_backends"])
        for name in _COUNTS:
            if name in settings:
                values[name] = _parse_int(name, settings[name])
        if settings.get("mixed_graph_rows") is not None:
            values["mixed_graph_rows"] = _parse_int("mixed_graph_rows", settings["mixed_graph_rows"])
        for name in ("fast_host", "fast_sampling", "fast_drafting", "fit_windows", "tree_required"):
            if name in settings:
                values[name] = _parse_bool(name, settings[name])
        if settings.get("draft_tokens") is not None:
            if not isinstance(settings["draft_tokens"], str):
                raise ConfigError(
                    f"NWOR setting 'draft_tokens' must be auto or auto:LEAST-MOST, not "
                    f"{settings['draft_tokens']!r}: a fixed number is vLLM's own num_speculative_tokens"
                )
            values["draft_tokens"] = DraftBounds.parse(settings["draft_tokens"])
        if settings.get("draft_vocabulary") is not None:
            values["draft_vocabulary"] = _parse_vocabulary(settings["draft_vocabulary"])
        if settings.get("tree") is not None:
            values["tree"] = TreeShape.from_mapping(settings["tree"])
            if "draft_tokens" in values:
                values["draft_tokens"] = values["draft_tokens"].with_tree(values["tree"])
        if settings.get("tree_acceptance_rates"):
            values["tree_acceptance_rates"] = _parse_rates(
                settings["tree_acceptance_rates"], values.get("tree")
            )
        return cls(**values)

    @classmethod
    def from_additional_config(cls, additional_config: Mapping[str, Any] | None) -> NworConfig | None:
        """Return the settings, or None where the engine was not asked for NWOR.

        Raises:
            ConfigError: if the key is there but its value is no object, or the object is not valid.

        """
        if not isinstance(additional_config, Mapping) or CONFIG_KEY not in additional_config:
            return None
        settings = additional_config[CONFIG_KEY]
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"additional_config[{CONFIG_KEY!r}] must be an object such as {{'mode': 'stage'}}, "
                f"not {type(settings).__name__}"
            )
        return cls.from_mapping(settings)

    def to_mapping(self) -> dict[str, Any]:
        """Return plain JSON values from which :meth:`from_mapping` builds the same settings."""
        return {
            "mode": self.mode.value,
            "modes": [mode.value for mode in self.modes],
            "self_check_interval": self.self_check_interval,
            "mixed_graph_rows": self.mixed_graph_rows,
            "fast_host": self.fast_host,
            "fast_sampling": self.fast_sampling,
            "fast_drafting": self.fast_drafting,
            "grammar_seconds": self.grammar_seconds,
            "draft_tokens": None if self.draft_tokens is None else str(self.draft_tokens),
            "fit_windows": self.fit_windows,
            "draft_vocabulary": None if self.draft_vocabulary is None else str(self.draft_vocabulary),
            "tree": None if self.tree is None else self.tree.to_mapping(),
            "tree_required": self.tree_required,
            "tree_acceptance_rates": [list(rates) for rates in self.tree_acceptance_rates],
            "attention_backends": list(self.attention_backends),
        }


def _parse_rates(value: object, tree: TreeShape | None) -> tuple[tuple[float, ...], ...]:
    wanted = "NWOR setting 'tree_acceptance_rates' must be a list of falling numbers from 0 to 1"
    lists = value if isinstance(value, (list, tuple)) and isinstance(value[0], (list, tuple)) else [value]
    found = []
    for rates in lists:
        if not isinstance(rates, (list, tuple)) or not all(
            isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 <= rate <= 1 for rate in rates
        ):
            raise ConfigError(f"{wanted}, not {rates!r}")
        found.append(tuple(map(float, rates)))
    if tree is None:
        raise ConfigError(f"{wanted}, one for each level of the tree, and there is none")
    if len(found) not in (1, len(tree.sizes), len(tree.choices)):
        raise ConfigError(
            f"{wanted}, or one such list for each of {tree.sizes} or {tree.choices} nodes, not {value!r}"
        )
    each = tree.choices if len(found) == len(tree.choices) else [tree.nodes] * len(found)
    for drafts, one in zip(each, found, strict=True):
        if len(one) != tree.depth_of(drafts) or list(one) != sorted(one, reverse=True):
            raise ConfigError(f"{wanted}, one for each level of the tree, not {list(one)!r}")
    return tuple(found)


def _parse_modes(value: object) -> tuple[Mode, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ConfigError(f"NWOR setting 'modes' must be a list of modes, not {value!r}")
    modes = tuple(dict.fromkeys(Mode.parse(item) for item in value))
    if not modes:
        raise ConfigError("NWOR setting 'modes' must name at least one mode")
    return modes


def _parse_backends(value: object) -> tuple[str, ...]:
    known = ", ".join(ATTENTION_BACKENDS)
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ConfigError(f"NWOR setting 'attention_backends' must be a list of {known}, not {value!r}")
    names = tuple(dict.fromkeys(str(name).strip().lower() for name in value))
    for name in names:
        if name not in ATTENTION_BACKENDS:
            raise ConfigError(f"NWOR setting 'attention_backends' knows {known}, not {name!r}")
    if not names:
        raise ConfigError(f"NWOR setting 'attention_backends' must name at least one of {known}")
    return names


def _parse_int(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"NWOR setting {name!r} must be a whole number, not {value!r}")
    return value


def _parse_vocabulary(value: object) -> VocabularyChoice:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"NWOR setting 'draft_vocabulary' must be a number or a file, not {value!r}")
    return VocabularyChoice.parse(str(value))


def _parse_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"NWOR setting {name!r} must be true or false, not {value!r}")
    return value
