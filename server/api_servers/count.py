"""How many processes serve HTTP, and what none of them can do."""

from __future__ import annotations

import argparse
import sys

from server.errors import UsageError
from server.processor import usable_processors

#: Processes that serve HTTP before one engine on an accelerator, where there are processors for them. With
#: 256 clients of a small model requests wait in one, and first tokens come late (docs/performance.md).
_FRONTS = 2
#: Processors for each worker of the engines, and as many again, from which on there are :data:`_FRONTS`.
_PROCESSORS = 4
#: Flags of what several processes do in part. Of the first six vLLM's log or load figures come from one
#: process' requests, or not at all. The queue's limit holds for each process. The metric of LoRA adapters is
#: added up over processes, though it is a time. Middlewares may keep anything.
_IN_PART = (
    "enable_logging_iteration_details",
    "cudagraph_metrics",
    "enable_mfu_metrics",
    "enable_server_load_tracking",
    "kv_transfer_config",
    "ec_transfer_config",
    "max_num_queued_tokens",
    "enable_lora",
    "middleware",
)


def resolve_processes(args: argparse.Namespace, device_type: str) -> None:
    """Settle ``args.api_server_count``, and refuse what this server is not.

    Unless it is given, there is one for each engine that they share, as with ``vllm serve``: the data
    parallel size, or its local part with hybrid load balancing. One engine on an accelerator has
    :data:`_FRONTS` where the machine has processors to spare. There is one where somebody else's load
    balancer knows every server, with an elastic number of engines, where a process keeps what a client's next
    request needs, and where something is asked for that several do in part.

    Args:
        args: the parsed command line.
        device_type: vLLM's name of the device.

    Raises:
        UsageError: the flags ask for what cannot be served; the message says what to do.

    """
    _refuse_other_launchers(args)
    given, alone = args.api_server_count, _needs_one(args)
    if given is None:
        args.api_server_count = 1 if alone else _default_count(args, device_type)
    elif given < 1:
        raise UsageError(
            f"--api-server-count {given} leaves nobody to serve HTTP: give 1 or more, or start engines alone "
            "with 'vllm serve --headless'"
        )
    elif given > 1 and alone:
        raise UsageError(f"--api-server-count {given} cannot be had with {alone}")


def _needs_one(args: argparse.Namespace) -> str | None:
    """Return what only one process can serve, why, and what to do; None where several can."""
    from vllm import envs

    if args.enable_elastic_ep:
        return "--enable-elastic-ep: vLLM changes the number of engines from one process; drop one of them"
    if envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        return (
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING: an adapter that a client loads would be known to one process "
            "of them; unset it, or name adapters with --lora-modules"
        )
    if envs.VLLM_ENABLE_RESPONSES_API_STORE:
        return (
            "VLLM_ENABLE_RESPONSES_API_STORE: a response would be stored in one process of them, and the "
            "next request may reach another; unset it, or have one process"
        )
    return None


def _prefers_one(args: argparse.Namespace) -> bool:
    """Return whether something is asked for that each of several processes does for its own part alone."""
    from vllm import envs

    # In developers' mode requests are stopped by number, which the process knows that has them.
    if envs.VLLM_SERVER_DEV_MODE or getattr(args.profiler_config, "profiler", None) is not None:
        return True
    return any(getattr(args, name) not in (None, False, []) for name in _IN_PART)


def _default_count(args: argparse.Namespace, device_type: str) -> int:
    if args.data_parallel_external_lb or args.data_parallel_rank is not None:
        return 1
    if args.data_parallel_hybrid_lb or args.data_parallel_start_rank is not None:
        return max(args.data_parallel_size_local or 1, 1)
    engines = max(int(args.data_parallel_size), 1)
    # On a CPU the engine has work for all processors.
    if engines >= _FRONTS or device_type == "cpu" or _prefers_one(args):
        return engines
    workers = args.tensor_parallel_size * args.pipeline_parallel_size
    if usable_processors() < _PROCESSORS * (workers + 1):
        return engines
    # vLLM sets its log up later than this.
    print(
        f"nwor-server: {_FRONTS} processes serve HTTP, since there are processors for them; "
        "--api-server-count 1 has one",
        file=sys.stderr,
        flush=True,
    )
    return _FRONTS


def _refuse_other_launchers(args: argparse.Namespace) -> None:
    if args.shutdown_timeout:
        raise UsageError(
            "--shutdown-timeout is not supported: nwor-server gives running requests --drain-timeout seconds "
            "on SIGTERM; set that instead"
        )
    if args.headless:
        raise UsageError(
            "--headless starts engines without HTTP, which is all that nwor-server is: start them with 'vllm "
            "serve --headless' and the same --additional-config, and nwor-server on the first node"
        )
    if args.grpc:
        raise UsageError("--grpc is not supported: nwor-server serves HTTP; drop it, or use 'vllm serve'")
    if args.data_parallel_multi_port_external_lb:
        raise UsageError(
            "--data-parallel-multi-port-external-lb is not supported: start one nwor-server for each engine "
            "(with --data-parallel-rank for a mixture of experts, else without --data-parallel flags), "
            "or drop it"
        )
