"""Files are replaced at once or not at all."""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
from pathlib import Path

from narrowcast.errors import Origin, RunError, reason_of


def is_there(path: Path) -> bool:
    """Return whether there is such a file; what is in a folder that may not be entered is not."""
    try:
        return path.exists()
    except OSError:
        return False


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader, or a crash, sees the old file or the new one and nothing between."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write bytes in place of a file's content, at once: a reader sees the old content or the new."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        if path.exists():
            Path(temporary).chmod(path.stat().st_mode & 0o7777)
        else:
            mask = os.umask(0)
            os.umask(mask)
            Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def save_result(path: Path, what: str, text: str) -> None:
    """Write what a run has given, compressed if the file's name ends with `.gz`. RunError where the file system does
    not take it, and the file is then as it was.
    """
    content = text.encode()
    try:
        replace_bytes(path, gzip.compress(content, 6, mtime=0) if path.name.endswith(".gz") else content)
    except OSError as error:
        found, where = reason_of(error), (Origin(str(path)),)
        advice = "Give a folder that exists and has room; nothing was written."
        raise RunError(f"saving {what} as {path}", found, where, advice) from error


def set_aside(path: Path) -> str:
    """Give a file that cannot be read another name, so that nothing in it is lost; what became of it, for a reader."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        moved = path.with_name(f"{path.name}.unreadable-{digest}")
        path.rename(moved)
    except OSError as error:
        return f"could not be moved ({type(error).__name__})"
    return f"is now {moved}"


def cache_folder() -> Path:
    """Return the folder of profiles and choices: NARROWCAST_CACHE_DIR, or the user's cache folder."""
    given = os.environ.get("NARROWCAST_CACHE_DIR")
    if given:
        return Path(given)
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("narrowcast"))
