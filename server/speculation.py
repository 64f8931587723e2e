"""``--draft`` and ``--speculative-method``: how drafts are made, checked and turned into vLLM's settings."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, get_args

from nwor.config import DraftBounds
from nwor.tree_shape import TreeShape, schedule
from server import draft_tokens
from server.drafters import (
    METHODS,
    WITHIN_TARGET,
    WITHOUT_MODEL,
    Drafter,
    read_drafter,
    within_target,
    without_folder,
)
from server.errors import StartupError, UsageError
from server.models import check_draft, check_model, read_config
from server.nwor_options import tree_of

#: Trees that are there by default. Windows have fewer of their nodes where more requests run.
DEFAULT_TREE_NODES, DEFAULT_TREE_DEPTH = 60, 8
#: More requests than any engine runs at once.
MOST_REQUESTS = 1 << 16
#: Methods for which vLLM looks at the draft's path first, and the words by which it then takes another one.
_OVERRULED = ("draft_model", "pard", "mtp", "medusa")
_PATH_WORDS = ("eagle-", "eagle3", "dflash", "dspark")
#: Methods that one of vLLM's model runners alone has; the others run on both.
_RUNNER_V1 = ("suffix", "medusa", "peagle", "pard")
_RUNNER_V2 = ("dspark",)
#: Methods whose drafts are sampled on CPUs, and those for which vLLM cannot sample them.
_SAMPLED = ("eagle", "eagle3", "draft_model")
_NEVER_SAMPLED = ("medusa", *WITHOUT_MODEL)
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def add_draft_options(group: argparse._ArgumentGroup, default: int | str) -> None:
    """Add the flags that say how to draft.

    Args:
        group: where they stand in ``--help``.
        default: the number of draft tokens where neither the user nor the drafter says one.

    """
    group.add_argument(
        "--draft",
        metavar="DRAFT",
        help="Folder or Hugging Face id of the drafter; turns speculative decoding on. Its files tell how it "
        "drafts: an EAGLE head, Medusa heads, DFlash, DSpark, layers for MTP, or a small language model.",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=draft_tokens.parse,
        metavar="N|auto|auto:LEAST-MOST",
        help="Draft tokens per step: a number, or auto, which has the engine choose it for each step, within "
        f"bounds where they are given. Default: auto on one GPU for EAGLE heads; else {default}, or what the "
        "drafter was made for.",
    )
    group.add_argument(
        "--speculative-method",
        choices=list(METHODS),
        help="How to draft; told from the files of --draft when not given. Without --draft: "
        f"{', '.join(WITHOUT_MODEL)} (from the text so far), {', '.join(WITHIN_TARGET)} (by layers of the "
        "model's own).",
    )
    group.add_argument(
        "--draft-sampling",
        choices=["greedy", "sampled"],
        help="For requests with a temperature: draft the likeliest tokens, or sample them, of which more are "
        "accepted. Greedy requests get the likeliest ones. Default: sampled on CPUs by "
        f"{', '.join(_SAMPLED)}; else greedy.",
    )


def vllm_speculation(args: argparse.Namespace) -> str | None:
    """Return the first of vLLM's own flags for speculation that is set."""
    for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens"):
        if getattr(args, name, None) is not None:
            return "--" + name.replace("_", "-")
    return None


def check_fit(model: str, draft: str, method: str | None) -> None:
    """Check a draft before vLLM is imported, as far as both folders can be read here.

    Args:
        model: the target.
        draft: the drafter.
        method: what the user said it is; None where its files tell.

    Raises:
        StartupError: it does not fit.

    """
    config = read_config(draft)
    if config is not None and method not in WITHOUT_MODEL:
        check_draft(model, draft, read_drafter(Path(draft).expanduser(), config, method).method)


def use_draft(args: argparse.Namespace, default: int | str, device_type: str) -> None:
    """Settle how drafts are made, in ``args.speculative_config`` and ``args.draft_tokens``, and say so.

    Args:
        args: the parsed command line: vLLM's attributes and ours.
        default: the number of draft tokens where neither the user nor the drafter says one.
        device_type: vLLM's name of the device.

    Raises:
        UsageError: flags that contradict each other.
        StartupError: a draft that is not there or does not fit.

    """
    args.draft_tokens = None
    if args.draft is None and args.speculative_method is None:
        for flag in ("num_speculative_tokens", "draft_sampling"):
            if getattr(args, flag) is not None:
                name = flag.replace("_", "-")
                raise UsageError(f"--{name} says how to draft, but there is no draft: add --draft")
        return
    if other := vllm_speculation(args):
        flag = "--draft" if args.draft is not None else "--speculative-method"
        raise UsageError(f"{flag} and {other} both configure speculative decoding: drop one of them")
    drafter = _drafter(args)
    model = args.draft if args.draft is not None else args.model
    _check_path(drafter.method, model)
    _check_runner(drafter.method)
    if drafter.method == "ngram_gpu" and device_type == "cpu":
        raise UsageError(
            "--speculative-method ngram_gpu needs a GPU, and there is none: ngram drafts the same on a CPU"
        )
    _use_tree(args, drafter.method)
    tokens = default if drafter.tokens is None else drafter.tokens
    if drafter.tokens is None and _chooses(args, drafter.method, device_type):
        tokens = "auto"
    args.default_tree = _default_tree(args, drafter, tokens, device_type)
    tree = tree_of(args)
    lengths = draft_tokens.settle(args, drafter.method, tokens, device_type, tree)
    if args.default_tree is not None and args.draft_tokens is None:
        args.default_tree = tree = None
    _check_number(drafter, lengths["num_speculative_tokens"])
    if tree is not None and args.draft_tokens is None:
        most = args.max_num_seqs or MOST_REQUESTS
        by_requests = schedule(tree, args.tree_requests, most)
        lengths["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in by_requests]
    _check_vllm(drafter.method)
    config: dict[str, Any] = dict(METHODS[drafter.method])
    if args.draft is not None:
        config["model"] = args.draft
    if _samples(args.draft_sampling, drafter.method, device_type):
        config["draft_sample_method"] = "probabilistic"
    args.speculative_config = {**config, **lengths}
    _announce(args, drafter, lengths["num_speculative_tokens"])


def _check_vllm(method: str) -> None:
    """Refuse a way to draft that the vLLM that is installed does not have.

    Raises:
        UsageError: it does not, with what to do.

    """
    import vllm
    from vllm.config import speculative

    if METHODS[method]["method"] not in get_args(speculative.SpeculativeMethod):
        raise UsageError(
            f"vLLM {vllm.__version__} does not draft by {method}: use another draft, or a vLLM that does "
            "(docs/drafters.md)"
        )


def _use_tree(args: argparse.Namespace, method: str) -> None:
    """Have as many draft tokens as a tree has nodes, where the flags or NWOR's settings ask for one."""
    tree = tree_of(args)
    if tree is None:
        config = draft_tokens.configured_nwor(args)
        if config is not None and config.tree is not None:
            if args.num_speculative_tokens is None and config.draft_tokens is None:
                args.num_speculative_tokens = config.tree.nodes
            args.draft_sampling = args.draft_sampling or "greedy"
        return
    if method not in draft_tokens.METHODS:
        raise UsageError(f"--tree-nodes is for EAGLE heads, and drafts are by {method}: drop it")
    wanted = args.num_speculative_tokens
    if isinstance(wanted, int):
        raise UsageError(
            "--tree-nodes and --num-speculative-tokens both say how many tokens to draft: drop one of them, "
            "or use --num-speculative-tokens auto"
        )
    if wanted is not None and args.tree_requests is not None:
        raise UsageError(
            "--tree-requests and --num-speculative-tokens auto both say when windows are trees: drop one"
        )
    if args.draft_sampling == "sampled":
        raise UsageError("--tree-nodes drafts the likeliest tokens: drop --draft-sampling sampled")
    if wanted is None:
        args.num_speculative_tokens = tree.nodes
    args.draft_sampling = "greedy"


def _drafter(args: argparse.Namespace) -> Drafter:
    method = args.speculative_method
    if args.draft is None:
        if method in WITHOUT_MODEL:
            return without_folder(method)
        if method not in WITHIN_TARGET:
            raise UsageError(f"--speculative-method {method} needs weights to draft with: add --draft")
        config = read_config(args.model)
        if config is None:  # on the Hugging Face Hub, where vLLM looks
            return Drafter(method, "--speculative-method")
        return within_target(method, config, args.model)
    if method in WITHOUT_MODEL:
        raise UsageError(
            f"--speculative-method {method} drafts from the text so far, without a --draft: drop one of them"
        )
    check_model(args.draft, "draft")
    config = read_config(args.draft)
    if config is None:
        if method is None:
            raise StartupError(
                f"cannot tell which method the draft {args.draft!r} is for, as it is no folder with a "
                f"config.json: add --speculative-method {', '.join(METHODS)}"
            )
        return Drafter(method, "--speculative-method")
    drafter = read_drafter(Path(args.draft).expanduser(), config, method)
    check_draft(args.model, args.draft, drafter.method)
    return drafter


def _chooses(args: argparse.Namespace, method: str, device_type: str) -> bool:
    """Return whether the engine chooses the number of draft tokens where nobody says one.

    It does where that was measured to be no slower than the best fixed number: on one GPU, by EAGLE heads.
    """
    alone = getattr(args, "tensor_parallel_size", 1) == 1
    return device_type == "cuda" and method in draft_tokens.METHODS and alone


def _default_tree(
    args: argparse.Namespace, drafter: Drafter, tokens: int | str, device_type: str
) -> TreeShape | None:
    """Return the trees that the engine may choose where nobody says a number, bounds, or that there are none.

    They are measured where the choice is. The engine drafts chains, and says so, where it cannot have them.
    """
    asked = args.num_speculative_tokens
    free = tokens == "auto" if asked is None else isinstance(asked, DraftBounds) and not asked.given
    if (
        free
        and args.tree_nodes is None
        and _chooses(args, drafter.method, device_type)
        and args.draft_sampling != "sampled"
        and draft_tokens.configured_nwor(args) is None
        # Steps with adapters are not measured, so the number of requests would choose.
        and not getattr(args, "enable_lora", False)
        and draft_tokens.why_not_auto(args, drafter.method, device_type) is None
    ):
        return TreeShape.of(DEFAULT_TREE_NODES, DEFAULT_TREE_DEPTH)
    return None


def _samples(asked: str | None, method: str, device_type: str) -> bool:
    """Return whether drafts are sampled for requests with a temperature; by vLLM's default they are not."""
    if asked == "sampled" and method in _NEVER_SAMPLED:
        raise UsageError(
            f"--draft-sampling sampled: drafts by {method} have no probabilities to sample from: drop it"
        )
    return asked == "sampled" or (asked is None and device_type == "cpu" and method in _SAMPLED)


def _check_path(method: str, model: str) -> None:
    if method not in _OVERRULED:
        return
    word = next((word for word in _PATH_WORDS if word in model.lower()), None)
    if word is not None:
        raise StartupError(
            f"vLLM would not draft by {METHODS[method]['method']} from {model!r}: it takes what has {word!r} "
            "in its path for a drafter of that kind; rename the folder, or give a link with another name"
        )


def _check_runner(method: str) -> None:
    chosen = os.environ.get(_RUNNER)
    needed = {"0": _RUNNER_V2, "1": _RUNNER_V1}.get(chosen or "", ())
    if method in needed:
        raise UsageError(f"vLLM's other model runner alone drafts by {method}: drop {_RUNNER}={chosen}")


def _check_number(drafter: Drafter, tokens: int) -> None:
    if drafter.most is not None and tokens > drafter.most:
        raise UsageError(
            f"the draft has {drafter.most} heads, which draft one token each: give at most "
            f"--num-speculative-tokens {drafter.most}"
        )
    if drafter.layers is not None and tokens > drafter.layers and tokens % drafter.layers:
        raise UsageError(
            f"the draft has {drafter.layers} layers, which vLLM uses equally often: give at most "
            f"--num-speculative-tokens {drafter.layers}, or a multiple of it"
        )


def _announce(args: argparse.Namespace, drafter: Drafter, most: int) -> None:
    if args.draft is not None:
        where = f" from {args.draft}"
    elif drafter.method in WITHIN_TARGET:
        where = " with layers of the model's own"
    else:
        where = " from the text so far"
    number = f"up to {most} tokens" if args.draft_tokens is not None else f"{most} token{'s' * (most != 1)}"
    if args.default_tree is not None:
        number = f"up to {args.default_tree.depth} tokens, or a tree of up to {most}"
    # vLLM sets its log up later than this.
    print(
        f"nwor-server: drafts by {drafter.method}{where}, told by {drafter.source}; {number} a step",
        file=sys.stderr,
        flush=True,
    )
