"""Files that a start leaves for the next one: whole or not there, of this user alone, and the oldest go."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from selective_compile.kernels.native import cache_folder

MOST = 64  # of a kind: of half a megabyte for the captures of 32 layers
CHECKSUM = hashlib.sha256().digest_size  # bytes in front of a file's own
UNFINISHED = "unfinished-"
_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def attempt(to: str) -> Iterator[None]:
    """Where it fails the work is done anew, and that is all."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything on fake tensors
        _logger.info("could not %s: %s: %s", to, type(error).__name__, str(error))


def own_folder() -> Path:
    """Raises ValueError for one that others can write to: what is in it is run."""
    folder = cache_folder() / "captures"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise ValueError(f"a folder of captures must be writable by its user alone, got {folder}")
    return folder


def data_of(file: Path) -> bytes:
    """Raises ValueError for one that is not as it was written."""
    written = file.read_bytes()
    data = written[CHECKSUM:]
    if hashlib.sha256(data).digest() != written[:CHECKSUM]:
        raise ValueError(f"a kept file must be as it was written, got {file}")
    return data


def was_of_use(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.touch()


def write(file: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False, prefix=UNFINISHED, suffix=file.suffix) as written:
        try:
            written.write(hashlib.sha256(data).digest() + data)
            written.close()
            os.replace(written.name, file)
        except BaseException:
            os.unlink(written.name)
            raise
    kept = list(file.parent.glob(f"*{file.suffix}"))
    if len(kept) > MOST:
        for old in sorted(kept, key=lambda path: path.stat().st_mtime)[:-MOST]:
            old.unlink(missing_ok=True)
