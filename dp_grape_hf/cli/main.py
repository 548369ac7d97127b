"""The command line, ``dp-grape``: one subcommand per entry of `COMMANDS`."""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version

from dp_grape_hf.cli import options
from dp_grape_hf.errors import PrivacyError

COMMANDS = {
    "convert": "make a training script private by a change of its imports",
    "suggest": "print the hyperparameters that a run would choose",
    "calibrate": "compute the noise multiplier for a privacy budget, and back",
    "memory": "compute the memory of a training step, and the batch that fits a GPU",
    "card": "write the model card of a saved model from its ledger",
    "audit": "attack a training run, and compare with the epsilon it claims",
    "verify": "compare a saved or published model with its privacy ledger",
    "report": "draw epsilon, signal, noise, learning rates and metrics of a run",
    "ledger": "show the entries of a ledger, and the epsilon spent",
}
"""Name -> help text. ``options.add_NAME`` adds the options, and ``run`` of the module runs it.

Only the module of the given command is imported: some need torch, which takes seconds.
"""


def main(argv: list[str] | None = None) -> int:
    """Run ``dp-grape`` and return its exit code: 0, or 2 for a ``PrivacyError``.

    A command returns the text to print, or this text and an exit code.
    """
    parser = argparse.ArgumentParser(
        prog="dp-grape", description="Tools for private training with DP-GRAPE."
    )
    parser.add_argument("--version", action="version", version=f"dp-grape {version('dp_grape_hf')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        getattr(options, f"add_{name}")(subparser)
    args = parser.parse_args(argv)
    try:
        options.refuse_values(args)
        options.refuse_missing(args)
        command = import_module(f"dp_grape_hf.cli.{args.command}")
        run: Callable[[argparse.Namespace], str | tuple[str, int]] = command.run
        result = run(args)
    except PrivacyError as error:
        sys.stderr.write(f"dp-grape {args.command}: {error}\n")
        return 2
    report, code = (result, 0) if isinstance(result, str) else result
    sys.stdout.write(report)
    return code


if __name__ == "__main__":
    sys.exit(main())
