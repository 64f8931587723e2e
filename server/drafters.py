"""Which way of drafting a drafter's folder is for, told from its files. Needs neither torch nor vLLM."""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nwor.config import DEFAULT_DRAFT_TOKENS
from server.errors import StartupError

#: What may be named, and vLLM's settings for it beside the model's name and the number of tokens.
METHODS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "draft_model": {"method": "draft_model"},
    "pard": {"method": "draft_model", "parallel_drafting": True},
    "mtp": {"method": "mtp"},
    "medusa": {"method": "medusa"},
    "dflash": {"method": "dflash"},
    "dspark": {"method": "dspark"},
    "ngram": {"method": "ngram"},
    "ngram_gpu": {"method": "ngram_gpu"},
    "suffix": {"method": "suffix"},
}
#: Methods that draft from the text so far.
WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")
#: Methods whose weights may be part of the target's own.
WITHIN_TARGET = ("mtp", "dspark")

#: Models that carry layers for drafting: of such a folder vLLM takes these layers alone.
# fmt: off
MTP_MODEL_TYPES = frozenset({
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "glm5_next", "dots3_note",
    "pangu_ultra_moe", "kimi_k3", "ernie4_5_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "qwen3_5",
    "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "intern_s2_preview", "interns2_mobius",
    "bailing_hybrid", "exaone_moe", "exaone4_5", "longcat_flash", "step3p5", "step3p7", "hy_v3", "hy_v4",
    "step5", "step5_vl", "step5_mtp",
    "inkling_model", "inkling_mm_model", "gemma4_assistant", "gemma4_unified_assistant", "minimax_m3_vl",
    "mtp", "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp",
    "glm4_moe_lite_mtp", "glm_ocr_mtp", "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp", "qwen3_next_mtp",
    "qwen4_exp_mtp", "qwen3_5_mtp", "longcat_flash_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp",
    "bailing_hybrid_mtp", "kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "hy_v3_mtp", "hy_v4_mtp",
    "gemma4_mtp", "inkling_mtp", "glm5_next_mtp",
})
# fmt: on
# fmt: off
MTP_ARCHITECTURES = frozenset({
    "MiMoForCausalLM", "MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM", "MiMoV2FlashForCausalLM",
    "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GlmOcrForConditionalGeneration",
    "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration", "Step3p5ForCausalLM",
    "Step3p7ForConditionalGeneration", "Step5ForCausalLM", "Step5ForConditionalGeneration",
})
# fmt: on
#: Wrappers whose language model carries the layers, if any does.
_NEMOTRON_OMNI = ("NemotronH_Super_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3")
#: Targets whose checkpoints may carry a DSpark drafter.
_DSPARK_TARGETS = ("deepseek_v4", "deepseek_v41")
#: Keys that name the token standing for those to be drafted at once.
_MASK_TOKENS = ("pard_token", "ptd_token_id")
#: Keys that say after how many layers for drafting a model ends.
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "n_predict")
#: Drafters of DFlash's whose architecture does not say so.
_DFLASH = ("LiLiCorrDraftModel", "MuseGlimmerAssistantModel")
#: The projection of an EAGLE head. Layers of language models have such names too, behind a layer's number.
_HEAD_WEIGHT = "fc.weight"
_HEAD_WEIGHT_NAME = re.compile(r"([A-Za-z_]+\.)*fc\.weight")


@dataclass(frozen=True)
class Drafter:
    """How a folder drafts.

    Attributes:
        method: a key of :data:`METHODS`.
        source: what told, as part of a sentence.
        tokens: draft tokens in a step that suit it; None where its files do not say.
        most: the most that it can draft in a step; None where there is no such limit.
        layers: as many draft tokens as this or fewer, or a multiple of it; None where any number goes.

    """

    method: str
    source: str
    tokens: int | None = None
    most: int | None = None
    layers: int | None = None


def read_drafter(folder: Path, config: dict[str, Any], method: str | None = None) -> Drafter:
    """Tell from a drafter's folder how it drafts, and how many tokens by default.

    Args:
        folder: where its weights are, whose names are read where the configuration leaves it open.
        config: its ``config.json``.
        method: what the user said it is; None to tell it from the folder.

    Raises:
        StartupError: vLLM has nothing that could run this drafter.

    """
    if method is None:
        method, source = _tell(folder, config)
    else:
        source = "--speculative-method"
        _check_given(folder, config, method)
    if method == "medusa":
        # Each head drafts one token. The checkpoints without a count have five, as vLLM takes it.
        most = _count(config, "num_heads", "medusa_num_heads") or 5
        return Drafter(method, source, min(DEFAULT_DRAFT_TOKENS, most), most=most)
    if method == "mtp":
        layers = _mtp_layers(config) or 1
        fits = layers >= DEFAULT_DRAFT_TOKENS or DEFAULT_DRAFT_TOKENS % layers == 0
        return Drafter(method, source, None if fits else layers, layers=layers)
    return Drafter(method, source, _block(method, config))


def without_folder(method: str) -> Drafter:
    """Return how drafts are made where no folder is given.

    Raises:
        StartupError: a package is missing that the method needs.

    """
    if method == "suffix" and find_spec("arctic_inference") is None:
        raise StartupError(
            "--speculative-method suffix needs the package arctic-inference, which is not installed: "
            "pip install arctic-inference==0.1.1, or draft by ngram"
        )
    return Drafter(method, "--speculative-method")


def within_target(method: str, config: dict[str, Any], model: str) -> Drafter:
    """Return how a model drafts with layers of its own.

    Args:
        method: one of :data:`WITHIN_TARGET`.
        config: its ``config.json``.
        model: its name, for the message.

    Raises:
        StartupError: it has no such layers.

    """
    if method == "mtp":
        has = _is_mtp(config) and _mtp_layers(config) != 0
    else:
        has = config.get("model_type") in _DSPARK_TARGETS
    if not has:
        raise StartupError(
            f"the model {model!r} has no layers for drafting by {method} that vLLM knows: add --draft, or "
            "draft by another --speculative-method"
        )
    return read_drafter(Path(model).expanduser(), config, method)


def _check_given(folder: Path, config: dict[str, Any], method: str) -> None:
    """Check a method that the user named, where vLLM would take another one without a word, or none."""
    if method in ("draft_model", "pard") and _is_mtp(config):
        raise StartupError(
            f"vLLM takes of {str(folder)!r} its layers for drafting alone, so it cannot draft by {method}: "
            "drop --speculative-method, or give mtp"
        )
    if method == "mtp" and not _is_mtp(config):
        raise StartupError(f"the draft {str(folder)!r} has no layers for drafting by mtp that vLLM knows")


def _tell(folder: Path, config: dict[str, Any]) -> tuple[str, str]:
    """Return the method and what told it."""
    packed = config.get("speculators_model_type")
    if packed is not None:
        name = {"dflash2": "dflash"}.get(str(packed), str(packed))
        if name not in ("eagle3", "peagle", "dflash", "dspark"):
            raise StartupError(
                f"the draft {str(folder)!r} is of the type {packed!r} of speculators, which vLLM cannot load"
            )
        return name, f"speculators_model_type {packed!r}"
    kind = str(config.get("model_type", ""))
    architectures = [str(name) for name in config.get("architectures") or ()]
    for name in architectures:
        method = _of_architecture(name)
        if method == "peagle":
            raise StartupError(
                f"the draft {str(folder)!r} has the architecture {name!r}, which vLLM takes in the format of "
                "speculators alone: name it 'LlamaForCausalLMEagle3' in its config.json"
            )
        if method == "eagle3" and any(key in config for key in _MASK_TOKENS):
            method = "peagle"
        if method is not None:
            return method, f"architecture {name!r}"
    if kind == "mlp_speculator" or any(name.startswith("MLPSpeculator") for name in architectures):
        raise StartupError(
            f"the draft {str(folder)!r} is an MLP speculator, for which vLLM has no drafter any more: pass "
            "another drafter"
        )
    if kind == "medusa" or "medusa_num_heads" in config:
        return "medusa", f"model_type {kind!r}" if kind == "medusa" else "key 'medusa_num_heads'"
    for key, method in (("dflash_config", "dflash"), ("eagle_aux_hidden_state_layer_ids", "eagle3")):
        if key in config:
            return method, f"key {key!r}"
    if _is_mtp(config):
        return "mtp", f"model_type {kind!r}" if kind else f"architecture {architectures[0]!r}"
    if kind == "deepseek_v41":
        return "dspark", f"model_type {kind!r}"
    for key in _MASK_TOKENS:
        if key in config:
            return "pard", f"key {key!r}"
    return _head_or_model(folder, config)


def _of_architecture(name: str) -> str | None:
    low = name.lower()
    if "peagle" in low:
        return "peagle"
    if "eagle3" in low:
        return "eagle3"
    if "dspark" in low:
        return "dspark"
    if "dflash" in low or name in _DFLASH:
        return "dflash"
    # Some EAGLE heads are named after the layer for MTP that they are made of.
    if "eagle" in low or name == "MistralLarge3ForCausalLM":
        return "eagle"
    if "medusa" in low:
        return "medusa"
    return None


def _is_mtp(config: dict[str, Any]) -> bool:
    kind = str(config.get("model_type", ""))
    names = [str(name) for name in config.get("architectures") or ()]
    text = config.get("text_config")
    if names[:1] and names[0] in _NEMOTRON_OMNI and isinstance(text, dict):
        kind = str(text.get("model_type", ""))
    if kind in ("nemotron_h", "nemotron_h_puzzle"):
        return bool(_count(config, "num_nextn_predict_layers"))
    return kind in MTP_MODEL_TYPES or "exaone4_5" in kind or not MTP_ARCHITECTURES.isdisjoint(names[:1])


def _head_or_model(folder: Path, config: dict[str, Any]) -> tuple[str, str]:
    """Tell an EAGLE-1 head from a language model: both may be named like the target."""
    names = set(_weight_names(folder))
    if names:
        head = any(_HEAD_WEIGHT_NAME.fullmatch(name) for name in names)
        return ("eagle", f"weight {_HEAD_WEIGHT!r}") if head else ("draft_model", "weights of a whole model")
    layers = _count(config, "num_hidden_layers") or 1
    return "eagle" if layers == 1 else "draft_model", f"num_hidden_layers {layers}"


def _weight_names(folder: Path) -> Iterator[str]:
    """Yield the names of a checkpoint's weights as far as they can be read without loading any."""
    for path in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size < path.stat().st_size else None
            yield from header if isinstance(header, dict) else ()
    for path in sorted(folder.glob("*model*.bin")):
        # torch.save writes a ZIP, in which names stand as they are in the pickle: no need to run that.
        with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                if entry.endswith("data.pkl"):
                    yield entry  # there are weights, whatever their names
                    for name in re.findall(rb"[\w.]*fc\.weight", archive.read(entry)):
                        yield name.decode()


def _count(config: dict[str, Any], *names: str) -> int | None:
    """Return the first of these keys that is a whole number from 0 up, in the model or its language model."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in names:
            value = part.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
    return None


def _mtp_layers(config: dict[str, Any]) -> int | None:
    names = [str(name) for name in config.get("architectures") or ()]
    if str(config.get("model_type", "")).startswith("gemma4"):
        return 1  # all its layers make one token
    if names[:1] and names[0].startswith("MiMoV2"):
        return 1  # vLLM has the first one only
    return _count(config, *_MTP_LAYERS)


def _block(method: str, config: dict[str, Any]) -> int | None:
    """Return how many tokens a parallel drafter was trained to draft at once; None where it does not say."""
    if method not in ("dflash", "dspark", "peagle"):
        return None
    packed = config.get("speculators_config")
    with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):
        tokens = _count(packed["proposal_methods"][0], "speculative_tokens")  # type: ignore[index]
        if tokens:
            return tokens
    own = config.get("dflash_config")
    own = own if isinstance(own, dict) else {}
    size = _count(own, "block_size") or _count(config, "block_size", "dspark_block_size")
    if size is None or method == "peagle":
        return None
    # A block's first place is the last token that is known, unless the drafter drafts from there as well.
    if method == "dflash":
        anchored = not own.get("sample_from_anchor", config.get("sample_from_anchor", False))
    else:
        packed_default = config.get("speculators_model_type") is None
        anchored = not config.get("sample_from_anchor", packed_default) or bool(
            config.get("dspark_bonus_anchor")
        )
    return max(1, size - anchored)
