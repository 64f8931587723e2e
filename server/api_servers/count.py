"""How many processes serve HTTP, and what none of them can do."""

from __future__ import annotations

import argparse

from server.errors import UsageError


def resolve_processes(args: argparse.Namespace) -> None:
    """Settle ``args.api_server_count`` as vLLM does, and refuse what this server is not.

    Unless it is given, there is one for each engine that they share: the data parallel size, or its local
    part with hybrid load balancing. There is one where somebody else's load balancer knows every server,
    with an elastic number of engines, and where clients may load adapters.

    Args:
        args: the parsed command line.

    Raises:
        UsageError: the flags ask for what cannot be served; the message says what to do.

    """
    _refuse_other_launchers(args)
    from vllm import envs

    given = args.api_server_count
    runtime_lora = envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING
    if given is None:
        args.api_server_count = 1 if runtime_lora else _default_count(args)
        return
    if given < 1:
        raise UsageError(
            f"--api-server-count {given} leaves nobody to serve HTTP: give 1 or more, or start engines alone "
            "with 'vllm serve --headless'"
        )
    if given > 1 and args.enable_elastic_ep:
        raise UsageError(
            f"--api-server-count {given} cannot be had with --enable-elastic-ep: vLLM changes the number of "
            "engines from one process; drop one of them"
        )
    if given > 1 and runtime_lora:
        raise UsageError(
            f"--api-server-count {given} cannot be had with VLLM_ALLOW_RUNTIME_LORA_UPDATING: an adapter "
            "that a client loads would be known to one process of them; unset it, or name adapters with "
            "--lora-modules"
        )


def _default_count(args: argparse.Namespace) -> int:
    if args.data_parallel_external_lb or args.data_parallel_rank is not None or args.enable_elastic_ep:
        return 1
    if args.data_parallel_hybrid_lb or args.data_parallel_start_rank is not None:
        return max(args.data_parallel_size_local or 1, 1)
    return max(int(args.data_parallel_size), 1)


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
