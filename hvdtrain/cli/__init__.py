"""The command line: options only."""

from hvdtrain.cli.program import main as main
