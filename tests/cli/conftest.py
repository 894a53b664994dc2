"""The command line, run in this process."""

import pytest

from narrowcast.cli import main


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run the command line in this process: exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "250")  # paths of temporary folders are long, and not shortened

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return stopped.value.code, captured.out, captured.err

    return run
