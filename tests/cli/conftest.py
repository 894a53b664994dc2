"""The command line, run in this process."""

import pytest

from narrowcast.cli import main


@pytest.fixture
def cli(capsys):
    """Run the command line in this process: exit code, standard output, standard error."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return stopped.value.code, captured.out, captured.err

    return run
