"""``--num-speculative-tokens``: a fixed number, or ``auto``, and where the engine can choose for itself."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from nwor.config import DEFAULT_DRAFT_TOKENS, DraftBounds, NworConfig
from nwor.engine import plugin
from nwor.errors import ConfigError
from nwor.modes import Mode
from nwor.tree_shape import TreeShape
from server.errors import UsageError

#: Draft methods whose drafter vLLM lets make fewer tokens in one step than in another.
METHODS = ("eagle", "eagle3")


def parse(text: str) -> int | DraftBounds:
    """Return a number of draft tokens above 0, or the bounds of ``auto``.

    Raises:
        argparse.ArgumentTypeError: neither.

    """
    word = text.strip()
    if word.isdecimal() and int(word) > 0:
        return int(word)
    if not word.startswith("auto"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0, auto or auto:LEAST-MOST")
    try:
        return DraftBounds.parse(word)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def settle(
    args: argparse.Namespace, method: str, default: int | str, device_type: str, tree: TreeShape | None = None
) -> dict[str, Any]:
    """Return vLLM's settings of the number of drafts, and put the bounds of ``auto`` into ``args``.

    Sets ``args.draft_tokens``, which ``resolve_nwor`` hands to the engine: the bounds as text, or None.

    Args:
        args: the parsed command line: vLLM's attributes and ours.
        method: the draft method.
        default: what holds where nobody says anything: a number, or ``auto`` with or without bounds.
        device_type: vLLM's name of the device.
        tree: what windows may be besides chains, by the flags.

    Raises:
        UsageError: ``auto`` is asked for where it cannot be, or asked for twice, or for other trees.

    """
    wanted, asked = args.num_speculative_tokens, args.num_speculative_tokens is not None
    config = configured_nwor(args)
    configured = None if config is None else config.draft_tokens
    if configured is not None:
        if asked:
            raise UsageError(
                "--num-speculative-tokens and draft_tokens of --additional-config both say how many tokens "
                "to draft: drop one of them"
            )
        wanted, asked = configured, True
    elif not asked:
        wanted = parse(str(default))
    args.draft_tokens = None
    if isinstance(wanted, int):
        return {"num_speculative_tokens": wanted}
    if tree is not None:
        try:
            wanted = wanted.with_tree(tree)
        except ConfigError as error:
            raise UsageError(f"--num-speculative-tokens: {error}") from error
    problem = why_not_auto(args, method, device_type)
    if problem is None and configured is None and config is not None:
        problem = (
            "--additional-config sets NWOR, which flags then leave alone: add "
            f'"draft_tokens": "{wanted}" there, or give a number'
        )
    if problem is None:
        if configured is None:
            args.draft_tokens = str(wanted)
        return {
            "num_speculative_tokens": wanted.most,
            "num_speculative_tokens_per_batch_size": [list(entry) for entry in wanted.schedule],
        }
    if asked:
        raise UsageError(f"draft tokens cannot be chosen by the engine (auto): {problem}")
    print(
        f"nwor-server: {DEFAULT_DRAFT_TOKENS} draft tokens in each step, not auto: {problem}",
        file=sys.stderr,
        flush=True,
    )
    return {"num_speculative_tokens": DEFAULT_DRAFT_TOKENS}


def why_not_auto(args: argparse.Namespace, method: str, device_type: str) -> str | None:
    """Return why the engine cannot choose the number of drafts, and what to do; None where it can.

    Args:
        args: the parsed command line.
        method: the draft method.
        device_type: vLLM's name of the device.

    """
    from vllm import envs

    if args.no_nwor:
        return "--no-nwor leaves NWOR out, which chooses: drop it, or give a number"
    if (unavailable := plugin.why_not()) is not None:
        return f"NWOR is not available ({unavailable}): give a number"
    if method not in METHODS:
        return f"with draft method {method!r} every step has as many drafts: give a number"
    if args.data_parallel_size > 1:
        return "engines of data parallelism step together and need one number: give one"
    if args.pipeline_parallel_size > 1:
        return "pipeline stages need one number: give one"
    if device_type == "cuda" and envs.VLLM_USE_V2_MODEL_RUNNER is False:
        return (
            "model runner V1 has CUDA graphs for one number only: drop VLLM_USE_V2_MODEL_RUNNER=0, or give "
            "a number"
        )
    if args.scheduler_cls is not None:
        return "--scheduler-cls names a scheduler that does not choose: drop it, or give a number"
    config, flag = configured_nwor(args), args.nwor_modes
    named = config.modes if config is not None else (flag or Mode.STAGE).split(",")
    if Mode.STAGE not in {word.strip().lower() for word in named}:
        return "only mode stage has graphs for other numbers: add stage to --nwor-modes, or give a number"
    return None


def configured_nwor(args: argparse.Namespace) -> NworConfig | None:
    """Return NWOR's settings that stand in ``--additional-config``; None where there are none.

    Raises:
        UsageError: NWOR's settings there are not valid.

    """
    try:
        return NworConfig.from_additional_config(args.additional_config)
    except ConfigError as error:
        raise UsageError(str(error)) from error
