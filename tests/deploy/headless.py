"""``vllm serve --headless`` as a module.

The rebuild of vLLM for CPUs has a command ``vllm`` that does not start (it looks its version up under another
package name); what that command would call does.
"""

import sys

if __name__ == "__main__":
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--headless", *sys.argv[1:]])
    args.api_server_count = 0
    run_headless(args)
