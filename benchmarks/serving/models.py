"""Model folders and acceptance: shapes with dummy weights, a word tokenizer, rates by position."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import shapes
from benchmarks.serving.plan import Arm
from nwor.config import DraftBounds
from nwor.tree_shape import schedule

#: Chance that a whole run of drafts up to a position is accepted, as EAGLE-3 on Llama-3.1-8B has it in vLLM's
#: own tests (three positions); the fourth and those behind it go on by the same factor.
HEADS = (0.73, 0.52, 0.35, 0.24)
#: Acceptance that was measured, by name: chains by position, and trees of each shape by depth.
CURVES = Path(__file__).with_name("curves.json")
#: What the model and its head really accept.
OWN = "own"
DEMO = "demo"
#: The demo model at the size of a shape: ``demo-8b``.
ENLARGED = f"{DEMO}-"
#: The demo model's longest sequence.
DEMO_LEN = 2048


def is_demo(shape: str) -> bool:
    """Return whether a shape is the demo model, at its own size or a larger one's."""
    return shape == DEMO or shape.startswith(ENLARGED)


def known_shapes() -> list[str]:
    """Return what ``--shape`` may be. The tiny one has no room for the demo model."""
    return [DEMO, *shapes.SHAPES, *(f"{ENLARGED}{name}" for name in shapes.SHAPES if name != "tiny")]


def _curves() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CURVES.read_text("utf-8"))
    return found


def tree_rates(acceptance: str, arm: Arm) -> list[float] | list[list[float]] | None:
    """Return NWOR's ``tree_acceptance_rates`` of an arm; None for chains and for the model's own.

    Where windows may have fewer nodes, they are known by the tree and their own: ``60x8/15``. Where nobody
    measured shallower trees that an engine may choose, they are taken for the first levels of deeper ones.

    Raises:
        ValueError: if nobody knows how a tree of this shape is accepted.

    """
    if arm.tree is None or acceptance == OWN:
        return None
    shape = arm.name.partition("@")[2]
    known: dict[str, list[float]] = _curves().get(acceptance, {}).get("trees", {})

    def names_of(numbers: Sequence[int]) -> list[str]:
        return [*(f"{shape}/{nodes}" for nodes in numbers[:-1]), shape]

    names = names_of(arm.tree.choices)
    if not arm.chosen or not set(names) <= set(known):
        names = names_of(arm.tree.sizes)
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"--acceptance {acceptance} says nothing of {missing[0]}: measure it (README.md)")
    found = [known[name] for name in names]
    return found if len(found) > 1 else found[0]


def rates(acceptance: str, k: int) -> list[float] | None:
    """Return vLLM's ``synthetic_acceptance_rates`` for k draft tokens.

    vLLM wants them unconditional: entry i is the chance that drafts 0 to i are all accepted. It makes the
    conditional ones itself.

    Args:
        acceptance: ``heads`` for :data:`HEADS`; a name in :data:`CURVES`; a number for the chance of each
            draft whose predecessors were accepted; ``own`` for what the model and its head really do.
        k: draft tokens of a step.

    Returns:
        One rate a position, or None for the model's own.

    Raises:
        ValueError: if ``acceptance`` is none of these.

    """
    if acceptance == OWN:
        return None
    curve = HEADS if acceptance == "heads" else _curves().get(acceptance, {}).get("chain")
    if curve is not None:
        result = list(curve[:k])
        while len(result) < k:
            result.append(round(result[-1] * curve[-1] / curve[-2], 4))
        return result
    try:
        each = float(acceptance)
    except ValueError:
        each = -1.0
    if not 0 <= each <= 1:
        names = ", ".join(["heads", *_curves()])
        raise ValueError(f"{acceptance!r} is no acceptance: use {names}, own, or a number from 0 to 1")
    return [round(each ** (position + 1), 6) for position in range(k)]


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of ``size`` words, w0, w1 and so on, each one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "bos_token": "w0",
        "eos_token": "w1",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write(folder: Path, shape: str, max_len: int) -> tuple[Path, Path, str]:
    """Write a shape's folders; the demo model has its own.

    Returns:
        The target's folder, the draft's, and the speculative method.

    """
    if shape == DEMO:
        from server import demo

        return demo.model_path(), demo.draft_path(), demo.draft_method()
    if shape.startswith(ENLARGED):
        return _enlarge(folder, shape.removeprefix(ENLARGED))
    target, draft = shapes.write(folder, shape, max_len)
    write_tokenizer(target, vocabulary(shape))
    return target, draft, "eagle"


def _enlarge(folder: Path, name: str) -> tuple[Path, Path, str]:
    from benchmarks.serving import enlarged
    from server import demo

    source, shape = demo.model_path(), shapes.SHAPES[name]
    target, draft = folder / name, folder / f"{name}-draft"
    enlarged.write_target(source, target, shape)
    enlarged.write_draft(source, demo.draft_path(), draft, shape)
    for file in source.glob("*token*.json"):
        shutil.copy(file, target)
    return target, draft, demo.draft_method()


def vocabulary(shape: str) -> int:
    """Return the number of words of a shape."""
    if is_demo(shape):
        from server import demo

        config: dict[str, Any] = json.loads((demo.model_path() / "config.json").read_text("utf-8"))
        return int(config["vocab_size"])
    return shapes.SHAPES[shape].vocabulary


def speculation(
    draft: Path, method: str, arm: Arm, acceptance: str, most_requests: int
) -> dict[str, Any] | None:
    """Return vLLM's ``--speculative-config``; None where an arm drafts nothing.

    Args:
        draft: folder of the drafter.
        method: vLLM's name of its kind.
        arm: what is drafted.
        acceptance: as :func:`rates` takes it.
        most_requests: of a step.

    """
    if arm.k == 0:
        return None
    config: dict[str, Any] = {"model": str(draft), "method": method, "num_speculative_tokens": arm.k}
    if arm.chosen:
        config["num_speculative_tokens_per_batch_size"] = DraftBounds(0, arm.k, arm.tree).schedule
    elif arm.tree is not None:
        config["num_speculative_tokens_per_batch_size"] = schedule(arm.tree, None, most_requests)
    if arm.adaptive:
        config["enable_adaptive_verification"] = True
    forced = rates(acceptance, arm.k)
    if forced is not None:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": forced}
    return config
