"""The flags of NWOR and of the admin API, and how they turn into the engine's ``additional_config``."""

from __future__ import annotations

import argparse
import os
import sys

from nwor.config import CONFIG_KEY, NworConfig
from nwor.draft_vocabulary import METHODS
from nwor.engine import plugin
from nwor.errors import ConfigError
from nwor.modes import Mode
from nwor.tree_shape import DEFAULT_DEPTH, DEFAULT_WIDTH, ROWS_FOR_TREES, TreeKind, TreeShape
from server.errors import UsageError

#: Where the admin key is read from when no flag names one.
ADMIN_KEY_VARIABLE = "NWOR_ADMIN_API_KEY"
#: Where ``--admin-port`` listens when no flag says otherwise: not where strangers are.
DEFAULT_ADMIN_HOST = "127.0.0.1"

_SETTINGS = {
    "nwor_mode": "mode",
    "nwor_modes": "modes",
    "nwor_self_check_interval": "self_check_interval",
    "nwor_mixed_graph_rows": "mixed_graph_rows",
    "nwor_attention_backends": "attention_backends",
    "no_fast_host": "fast_host",
    "no_fast_sampling": "fast_sampling",
    "no_fast_drafting": "fast_drafting",
    "max_grammar_seconds": "grammar_seconds",
    "draft_vocabulary": "draft_vocabulary",
    "fit_windows": "fit_windows",
}


class Secret(str):
    """Text that does not show in logs of the command line."""

    def __repr__(self) -> str:
        """Return a placeholder."""
        return "'***'"


def add_nwor_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser, in a group of their own."""
    group = parser.add_argument_group(
        title="Nwor", description="Flags of no-write-on-reject and its admin API."
    )
    modes = [mode.value for mode in Mode]
    group.add_argument("--nwor-mode", choices=modes, help="Mode after the start. Default: stage.")
    group.add_argument(
        "--nwor-modes",
        metavar="MODE,MODE",
        help="Modes that may be switched to while the server runs. Default: all.",
    )
    group.add_argument(
        "--nwor-self-check-interval",
        type=int,
        metavar="N",
        help="Check the cache after every N-th verify step; 0, the default, never does.",
    )
    group.add_argument(
        "--nwor-mixed-graph-rows",
        type=int,
        metavar="ROWS",
        help="Largest step that runs in one CUDA graph though prompts stand beside verification; 0 has none. "
        "Default: 2048, more where a small model leaves the GPU waiting for the host.",
    )
    group.add_argument(
        "--nwor-attention-backends",
        metavar="NAME,NAME",
        help="vLLM's attention backends on a GPU with which windows stay out of the cache: auto, by the GPU; "
        "flash; triton, flashinfer and rocm, which are experimental. Default: "
        f"{','.join(NworConfig().attention_backends)}.",
    )
    # None and not true where they are absent, as the other settings are.
    group.add_argument(
        "--no-fast-host",
        action="store_const",
        const=False,
        help="In every mode: schedule steps, send inputs and launch kernels as vLLM does.",
    )
    group.add_argument(
        "--no-fast-sampling",
        action="store_const",
        const=False,
        help="In every mode: find the most likely tokens with vLLM's own kernels.",
    )
    group.add_argument(
        "--no-fast-drafting",
        action="store_const",
        const=False,
        help="In every mode: run the drafter's first pass for all rows of a step, as vLLM does.",
    )
    group.add_argument(
        "--max-grammar-seconds",
        type=int,
        metavar="SECONDS",
        help="What compiling one grammar may take, in a process of its own; a longer one gets 400. "
        f"0 has no limit. Default: {NworConfig().grammar_seconds}.",
    )
    group.add_argument(
        "--draft-vocabulary",
        metavar="FILE|N|FILE:N",
        help="Tokens that an EAGLE head drafts of, so that it reads a part of its output layer: a table that "
        "`nwor-server count-tokens` wrote, its first N, or the tokenizer's first N. Answers stay the same.",
    )
    group.add_argument(
        "--fit-windows",
        action="store_const",
        const=True,
        help="With draft tokens that the server chooses: requests that are harder to draft for than others "
        "have fewer of them where that serves more. Experimental.",
    )
    group.add_argument(
        "--tree-nodes",
        type=int,
        metavar="N",
        help="Draft trees: N draft tokens a step, the likeliest of what an EAGLE head proposes, runners-up "
        "among them. For few requests at a time. In the place of --num-speculative-tokens.",
    )
    group.add_argument(
        "--tree-depth",
        type=int,
        metavar="D",
        help=f"Passes of the drafter, and so the most draft tokens that a step can accept. Default: "
        f"{DEFAULT_DEPTH}, or N where that is less.",
    )
    group.add_argument(
        "--tree-width",
        type=int,
        metavar="W",
        help="Continuations of a node, and in a grown tree nodes that a pass expands. Default: "
        f"{DEFAULT_WIDTH}, more for large trees.",
    )
    group.add_argument(
        "--tree-kind",
        choices=[str(kind) for kind in TreeKind],
        help="grown, the default: each pass expands the likeliest nodes of the last. comb: runners-up of a "
        "chain, for which the drafter's passes are those of a chain.",
    )
    group.add_argument(
        "--tree-requests",
        type=int,
        metavar="R",
        help="Most requests that have trees; where more run, windows are chains. Default: as many as have "
        f"{ROWS_FOR_TREES} rows together.",
    )
    group.add_argument("--no-nwor", action="store_true", help="Leave NWOR out of the engine: stock vLLM.")
    group.add_argument(
        "--admin-api-key",
        type=Secret,
        metavar="KEY",
        help=f"Key of /admin, apart from --api-key; also read from {ADMIN_KEY_VARIABLE}. Without one, "
        "/admin answers 403.",
    )
    group.add_argument(
        "--admin-port",
        type=int,
        metavar="PORT",
        help="Serve /admin and /dashboard on this port, and no longer on --port.",
    )
    group.add_argument(
        "--admin-host", metavar="HOST", help=f"Where --admin-port listens. Default: {DEFAULT_ADMIN_HOST}."
    )
    group.add_argument(
        "--admin-uds",
        metavar="PATH",
        help="Serve /admin and /dashboard on this Unix socket, and no longer on --port.",
    )


def resolve_nwor(args: argparse.Namespace, speculates: bool, device_type: str = "") -> None:
    """Settle whether the engine has NWOR, and with which settings, in ``args.additional_config``.

    Args:
        args: the parsed command line.
        speculates: whether the engine speculates; without, there is nothing to reject.
        device_type: vLLM's name of the device.

    Raises:
        UsageError: flags that contradict each other or are not valid.

    """
    _resolve_admin_key(args)
    _check_admin_address(args)
    given = {key: getattr(args, name) for name, key in _SETTINGS.items() if getattr(args, name) is not None}
    tree = tree_of(args)
    if tree is not None:
        given["tree"] = tree.to_mapping()
        if args.tree_nodes is None:
            given["tree_required"] = False
    names = (*_SETTINGS, "tree_nodes")
    first = next((f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None), None)
    additional = dict(args.additional_config or {})
    configured = CONFIG_KEY in additional
    if first is not None and configured:
        raise UsageError(f"{first} and --additional-config both set NWOR: drop one of them")
    if args.no_nwor and (first is not None or configured):
        raise UsageError(
            f"--no-nwor leaves NWOR out, {first or '--additional-config'} sets it: drop one of them"
        )
    unavailable = plugin.why_not()
    if unavailable is not None and not args.no_nwor and (first is not None or configured):
        raise UsageError(f"NWOR is asked for and not available: {unavailable}")
    if first is not None and not speculates:
        raise UsageError(f"{first} needs speculative decoding: add --draft, or drop {first}")
    try:
        if configured:
            settings = NworConfig.from_additional_config(additional)
            if settings is not None and settings.tree is not None and settings.tree_required:
                _check_tree_runner("'tree' of --additional-config", device_type)
        elif speculates and not args.no_nwor and unavailable is None:
            for name in ("modes", "attention_backends"):
                if name in given:
                    given[name] = [word for word in given[name].split(",") if word.strip()]
            if (chosen := getattr(args, "draft_tokens", None)) is not None:
                given["draft_tokens"] = chosen
            config = NworConfig.from_mapping(given)
            if config.tree is not None and Mode.STAGE not in config.modes:
                raise UsageError(
                    "--tree-nodes needs mode stage, the only one that holds trees: add stage to --nwor-modes"
                )
            if config.tree is not None and config.tree_required:
                _check_tree_runner("--tree-nodes", device_type)
            _check_draft_vocabulary(config, args)
            additional[CONFIG_KEY] = config.to_mapping()
        elif speculates and not args.no_nwor:
            print(f"nwor-server: warning: serving without NWOR: {unavailable}", file=sys.stderr, flush=True)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    args.additional_config = additional
    if not args.no_nwor:
        # Where the package is installed vLLM does this by itself.
        plugin.register()


def tree_of(args: argparse.Namespace) -> TreeShape | None:
    """Return the tree that the flags ask for, or else the one by default; None where there is none.

    Raises:
        UsageError: flags that are not valid, or no number of nodes.

    """
    nodes, depth, width, kind = args.tree_nodes, args.tree_depth, args.tree_width, args.tree_kind
    if nodes is None:
        for name in ("tree_depth", "tree_width", "tree_kind", "tree_requests"):
            if getattr(args, name) is not None:
                name = "--" + name.replace("_", "-")
                raise UsageError(
                    f"{name} says what trees are like that --tree-nodes asks for: add --tree-nodes"
                )
        default: TreeShape | None = getattr(args, "default_tree", None)
        return default
    if args.tree_requests is not None and args.tree_requests < 1:
        raise UsageError(f"--tree-requests {args.tree_requests}: give 1 or more, or drop --tree-nodes")
    try:
        return TreeShape.of(nodes, depth, width, kind)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _check_tree_runner(setting: str, device_type: str) -> None:
    """Refuse trees where vLLM would take model runner V1, or V2 would not run.

    Raises:
        UsageError: with what to do.

    """
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    if device_type == "cpu" and not HAS_TRITON:
        raise UsageError(
            f"{setting} needs vLLM's model runner V2, and that a Triton for CPUs, which is not installed: "
            f"serve on a GPU, or drop {setting}"
        )
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise UsageError(
            f"{setting} needs vLLM's model runner V2: drop VLLM_USE_V2_MODEL_RUNNER=0, or drop {setting}"
        )


def _check_draft_vocabulary(config: NworConfig, args: argparse.Namespace) -> None:
    choice = config.draft_vocabulary
    if choice is None:
        return
    method = args.speculative_config.get("method")
    if method is not None and method not in METHODS:
        raise UsageError(f"--draft-vocabulary is for EAGLE heads, and drafts are by {method}: drop it")
    if choice.path is not None:
        choice.ids(sys.maxsize)  # whether it can be read


def leaves_nwor_out(args: argparse.Namespace) -> bool:
    """Whether the engine is to have vLLM's own classes throughout, by ``--no-nwor`` or the environment."""
    return bool(args.no_nwor) or plugin.is_disabled()


def _resolve_admin_key(args: argparse.Namespace) -> None:
    if args.admin_api_key is None and os.environ.get(ADMIN_KEY_VARIABLE):
        args.admin_api_key = Secret(os.environ[ADMIN_KEY_VARIABLE])
    if args.admin_api_key is None:
        return
    if not args.admin_api_key.strip():
        raise UsageError("--admin-api-key is empty: give a key, or leave the flag out")
    users = args.api_key or []
    users = [users] if isinstance(users, str) else users
    if args.admin_api_key in [*users, os.environ.get("VLLM_API_KEY")]:
        raise UsageError(
            "the admin key is also a user's API key: users could switch modes; give it one of its own"
        )


def admin_is_separate(args: argparse.Namespace) -> bool:
    """Whether the admin API has a listener of its own."""
    return args.admin_port is not None or args.admin_uds is not None


def _check_admin_address(args: argparse.Namespace) -> None:
    if args.admin_port is not None and args.admin_uds is not None:
        raise UsageError("--admin-port and --admin-uds both say where the admin API is: drop one of them")
    if args.admin_host is not None and args.admin_port is None:
        raise UsageError("--admin-host says where --admin-port listens, and there is none: add it")
    if args.admin_port is not None and args.admin_port == args.port and not args.uds:
        raise UsageError(
            f"--admin-port {args.admin_port} is the server's own --port: choose another, or drop it"
        )
    if args.admin_uds is not None and args.admin_uds == args.uds:
        raise UsageError("--admin-uds is the server's own --uds: choose another, or drop it")
    if admin_is_separate(args) and args.admin_api_key is None:
        flag = "--admin-port" if args.admin_port is not None else "--admin-uds"
        raise UsageError(f"{flag} opens the admin API, which needs a key: set {ADMIN_KEY_VARIABLE}")
