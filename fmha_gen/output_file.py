"""Files that a user named for a command's output. Standard library only.

A regular file appears whole or not at all, by rename. What is no regular file (a pipe, ``/dev/null``, ``/dev/stdout``)
is written into and stays what it is: a rename would put a file in its place. A link stays one; its target is written.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_output(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill the file `path`. Raises OSError."""
    if _is_special(path):
        whole = io.BytesIO()  # a device does not tell where it stands, as writers of archives ask
        write(whole)
        with open(path, "wb") as file:
            file.write(whole.getbuffer())
        return
    target = Path(os.path.realpath(path))
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as temporary:
        try:
            write(temporary)  # type: ignore[arg-type]
            temporary.close()
            os.chmod(temporary.name, 0o644)
            os.replace(temporary.name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary.name)
            raise


def check_output(path: Path) -> None:
    """Raise OSError, before the work, when `write_output` could not write there."""
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if _is_special(path):
        code = 0 if os.access(path, os.W_OK) else errno.EACCES
    else:
        target = Path(os.path.realpath(path))
        if len(os.fsencode(target.name)) > _NAME_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        code = 0 if target.parent.is_dir() else errno.ENOENT
        if not code and not os.access(target.parent, os.W_OK | os.X_OK):
            code = errno.EACCES
    if code:
        raise OSError(code, os.strerror(code))


_NAME_BYTES = 240  # what a file system's 255 leave beside the temporary name's own characters


def _is_special(path: Path) -> bool:
    """Whether there is something that is neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()
