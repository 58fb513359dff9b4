"""Cache folders for tokenized text."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def find_cache_folders(setting: str | None) -> list[Path]:
    """Return where tokenized text may be kept, best first.  What the user names is the only place."""
    if setting is not None:
        return [Path(setting).expanduser()]
    folders = []
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(base):
        folders.append(Path(base, "meshtrainer"))
    user = os.getuid() if hasattr(os, "getuid") else 0
    shared = Path(tempfile.gettempdir(), f"meshtrainer-{user}")
    if not os.path.lexists(shared) or (shared.lstat().st_uid == user and not shared.is_symlink()):
        folders.append(shared)  # unless another user has put something there
    return folders
