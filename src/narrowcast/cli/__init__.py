"""The command line: one file per command."""

from narrowcast.cli.app import main

__all__ = ["main"]
