"""The server's own flags, and how they turn into vLLM's."""

from __future__ import annotations

import argparse
import sys

from nwor.config import DEFAULT_DRAFT_TOKENS
from server.drafters import WITHOUT_MODEL
from server.errors import StartupError, UsageError
from server.models import check_model
from server.nwor_options import leaves_nwor_out
from server.processor import demo_dtype
from server.speculation import add_draft_options, use_draft, vllm_speculation

#: Title of our group in ``--help``.
GROUP = "NworServer"

#: Where neither the drafter says a number nor the engine chooses one.
DEFAULT_SPECULATIVE_TOKENS = DEFAULT_DRAFT_TOKENS
DEFAULT_MAX_BODY_BYTES = 32 * 2**20
# Kubernetes kills 30 s after SIGTERM; this leaves the engine time to go down.
DEFAULT_DRAIN_SECONDS = 25.0
# Compiled within a second or two on one core.
DEFAULT_MAX_GRAMMAR = 128 * 1024
GRAMMAR_BACKEND = "xgrammar"
DEMO_NAME = "nwor-demo"
DEMO_KV_CACHE_BYTES = 2**30
# vLLM would take a share of the machine's memory.
CPU_KV_CACHE_BYTES = 4 * 2**30

#: Import path of :func:`server.scheduler.create_scheduler`, which only the engine's process imports.
REPORTING_SCHEDULER = "server.scheduler.create_scheduler"

#: Import path of what mends sampling on a CPU; the engine's workers import it.
CPU_SAMPLING = "server.cpu_sampling.WorkerExtension"

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: str) -> int:
    """Return a number of bytes from ``1000``, ``64K``, ``32M``, ``32Mi`` or ``1G`` (K = 1000, Ki = 1024).

    Raises:
        argparse.ArgumentTypeError: not a size above zero.

    """
    digits = text.strip().rstrip("bB").rstrip("kKmMgGiI")
    unit = text.strip().rstrip("bB")[len(digits) :].lower()
    if not digits.isdecimal() or unit not in _UNITS or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes, such as 4000000, 512K or 32Mi")
    return int(digits) * _UNITS[unit]


def parse_seconds(text: str) -> float:
    """Return a number of seconds, 0 or more.

    Raises:
        argparse.ArgumentTypeError: not such a number.

    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def parse_count(text: str) -> int:
    """Return a whole number above zero.

    Raises:
        argparse.ArgumentTypeError: not such a number.

    """
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add our flags to a parser, in a group of their own."""
    group = parser.add_argument_group(title=GROUP, description="Flags of nwor-server, on top of vLLM's.")
    group.add_argument("--demo", action="store_true", help="Serve the bundled demo model and its EAGLE head.")
    add_draft_options(group, DEFAULT_SPECULATIVE_TOKENS)
    group.add_argument(
        "--drain-timeout",
        type=parse_seconds,
        default=DEFAULT_DRAIN_SECONDS,
        metavar="SECONDS",
        help="On SIGTERM, how long running requests may take to finish before they are aborted.",
    )
    group.add_argument(
        "--max-body-size",
        type=parse_size,
        default=DEFAULT_MAX_BODY_BYTES,
        metavar="BYTES",
        help="Largest request body that is read; a larger one is answered with 413.",
    )
    group.add_argument(
        "--max-grammar-size",
        type=parse_size,
        default=DEFAULT_MAX_GRAMMAR,
        metavar="CHARACTERS",
        help="Largest schema, regex, grammar or list of choices that is compiled for a request.",
    )
    group.add_argument(
        "--no-stream-pacing",
        action="store_true",
        help="Send each piece of a stream for itself, also while the front end is behind the engine.",
    )


def use_one_grammar_backend(args: argparse.Namespace) -> None:
    """Have one backend serve all grammars, unless the user chose one.

    Left to itself, vLLM takes the backend of the first request that has a grammar for all that follow, and
    answers those that were meant for another with 500, or without obeying their schema.
    """
    config = args.structured_outputs_config
    if config is not None and config.backend == "auto" and args.tokenizer_mode != "mistral":
        config.backend = GRAMMAR_BACKEND


def resolve_models(args: argparse.Namespace, default_model: str | None = None, device_type: str = "") -> None:
    """Settle which model, draft and method are served, and check that they fit.

    Sets ``args.model`` and, with a draft, ``args.speculative_config`` (vLLM's form) and ``args.draft_tokens``
    (the bounds within which the engine chooses how many tokens it drafts, or None).

    Args:
        args: the parsed command line: vLLM's attributes and ours.
        default_model: the value of ``--model`` that nobody typed.
        device_type: vLLM's name of the device.

    Raises:
        UsageError: flags that contradict each other, or no model at all.
        StartupError: a model that is not there, or a draft that does not fit.

    """
    named = args.model_tag if args.model_tag is not None else args.model
    given = named if args.model_tag is not None or named != default_model else None
    if args.demo:
        if given is not None:
            raise UsageError(f"--demo serves the bundled model: drop --demo or drop {given!r}")
        _use_demo(args)
    elif given is None:
        raise UsageError("no model given: pass a folder, a Hugging Face id, or --demo")
    else:
        args.model = given
    check_model(args.model, "model")
    use_draft(args, DEFAULT_SPECULATIVE_TOKENS, device_type)


def _use_demo(args: argparse.Namespace) -> None:
    from server import demo

    try:
        args.model, draft = str(demo.model_path()), str(demo.draft_path())
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    # Who names a method that needs no head, or vLLM's flags, is to have that.
    if args.draft is None and args.speculative_method not in WITHOUT_MODEL and not vllm_speculation(args):
        args.draft = draft
    if args.served_model_name is None:
        args.served_model_name = [DEMO_NAME]
    if args.kv_cache_memory_bytes is None:
        args.kv_cache_memory_bytes = DEMO_KV_CACHE_BYTES


def speculates(args: argparse.Namespace) -> bool:
    """Whether the engine will speculate, by our flags or by vLLM's."""
    flags = (args.draft, args.speculative_method, vllm_speculation(args))
    return any(flag is not None for flag in flags)


def use_reporting_scheduler(args: argparse.Namespace) -> None:
    """Have the figures reported of requests that stop strings end.

    Not where the user chose a scheduler, nor where the engine is to have vLLM's own classes.
    """
    if leaves_nwor_out(args):
        return
    if not speculates(args):
        # There are no figures, and vLLM does not start where somebody asks for them.
        args.per_request_spec_decode_metrics = "none"
    elif args.per_request_spec_decode_metrics != "none" and args.scheduler_cls is None:
        args.scheduler_cls = REPORTING_SCHEDULER


def check_device(device_type: str) -> None:
    """Check that there is a device to run on.

    Args:
        device_type: vLLM's name of the device ("cpu", "cuda", ...; empty where there is none).

    Raises:
        StartupError: vLLM finds no device that it was built for.

    """
    if not device_type:
        raise StartupError(
            "no usable device: this vLLM is built for GPUs and finds none; check the driver (nvidia-smi), "
            "or install the CPU build with: pip install 'nwor[cpu]'"
        )


def apply_device_defaults(
    args: argparse.Namespace, device_type: str, enforce_eager_given: bool, dtype_given: bool = False
) -> None:
    """Fill in what suits the device, where the user has not said otherwise.

    Args:
        args: the parsed command line.
        device_type: vLLM's name of the device.
        enforce_eager_given: whether ``--enforce-eager`` or its negation was typed.
        dtype_given: whether ``--dtype`` was typed, be it as ``auto``.

    """
    if device_type != "cpu":
        return
    if args.worker_extension_cls in (None, ""):
        args.worker_extension_cls = CPU_SAMPLING
    if args.kv_cache_memory_bytes is None:
        args.kv_cache_memory_bytes = CPU_KV_CACHE_BYTES
    # Compiling the small model takes longer than it saves before the first answers.
    if args.demo and not enforce_eager_given:
        args.enforce_eager = True
    if args.demo and not dtype_given and args.dtype == "auto":
        dtype, why = demo_dtype()
        args.dtype = dtype or args.dtype
        # vLLM sets its log up later than this.
        print(f"nwor-server: the demo takes {why}; --dtype chooses another", file=sys.stderr, flush=True)
