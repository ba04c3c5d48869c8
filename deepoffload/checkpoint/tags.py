"""The checkpoints in a directory: one folder per tag, the file ``latest``, and how a new one takes its place."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import stat
import tempfile
from functools import partial

from deepoffload.checkpoint.block_writer import write_small_file
from deepoffload.checkpoint.directory import STAGING_PREFIX, sync_directory
from deepoffload.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from deepoffload.checkpoint.safetensors_file import failure
from deepoffload.errors import DeepOffloadError, IoFailure, UnsupportedError, UsageError

log = logging.getLogger("deepoffload")

LATEST_NAME = "latest"

_PATH_BYTES_MAX = 3500
"""Linux takes 4095, and the names of files of a checkpoint come behind it."""

_TAG_BYTES_MAX = 200
_LATEST_BYTES_MAX = 1024
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def checked_tag(tag: object) -> str:
    """A tag as text.

    Raises:
        UsageError: it cannot be the name of a folder.
    """
    if isinstance(tag, bool) or not isinstance(tag, (str, int)):
        kind = type(tag).__name__
        raise UsageError(f"{tag!r} cannot be a tag: it is of type {kind}; a tag is text or a whole number")
    text = str.__str__(tag) if isinstance(tag, str) else str(int(tag))
    problem = _problem_of_tag(text)
    if problem is not None:
        shown = repr(text) if len(text) <= 80 else repr(text[:77] + "...")
        raise UsageError(f"{shown} cannot be a tag, which names a folder: it {problem}; write step-100, for example")
    return text


def _problem_of_tag(text: str) -> str | None:
    if not text:
        return "is empty"
    if text in (LATEST_NAME, MANIFEST_NAME):
        return "is the name of a file of a checkpoint"
    if "/" in text:
        return "has a '/'"
    if text.startswith("."):
        return "begins with '.'"
    if text != text.strip():
        return "begins or ends with a blank"
    if not text.isprintable():
        return "has characters that cannot be printed"
    length_bytes = len(os.fsencode(text))
    return f"takes {length_bytes} bytes, and {_TAG_BYTES_MAX} are possible" if length_bytes > _TAG_BYTES_MAX else None


def checked_directory(directory: object) -> str:
    """The directory of checkpoints as an absolute path.

    Raises:
        UsageError: it is no path, or an empty one, which would be the working directory.
    """
    if not isinstance(directory, (str, bytes, os.PathLike)):
        raise UsageError(f"{directory!r} is no directory: give a path, as text or as pathlib.Path")
    path = os.fsdecode(directory)
    if not path or "\0" in path:
        raise UsageError(f"{path!r} is no directory: give a path ('.' is the working directory)")
    length_bytes = len(os.fsencode(os.path.abspath(path)))
    if length_bytes > _PATH_BYTES_MAX:
        raise UsageError(f"{path[:80]!r}... takes {length_bytes} bytes, and {_PATH_BYTES_MAX} are possible")
    return os.path.abspath(path)


def latest_tag(directory: str) -> str | None:
    """What the file ``latest`` names; None where there is none.

    Raises:
        UsageError: the file is damaged, or cannot be opened. IoFailure: its disk fails.
    """
    path = os.path.join(directory, LATEST_NAME)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); name the tag to load") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{path} is no file; name the tag to load")
    with open(descriptor, "rb") as file:
        try:
            text = file.read(_LATEST_BYTES_MAX).decode(errors="replace").strip()
        except OSError as error:
            raise IoFailure("reading", error.errno or 0, path, 0, _LATEST_BYTES_MAX, "Name the tag to load") from error
    try:
        return checked_tag(text)
    except UsageError as error:
        raise UsageError(f"{path} is damaged ({error}); name the tag to load") from None


def folder_to_load(directory: str, tag: object) -> str | None:
    """Where the checkpoint of a tag is; None where no tag is said and there is no ``latest``.

    Raises:
        UsageError: as :func:`latest_tag`, :func:`checked_tag` and :func:`folder_of`.
    """
    if tag is not None:
        return folder_of(directory, checked_tag(tag))
    newest = latest_tag(directory)
    if newest is None:
        if os.path.lexists(os.path.join(directory, MANIFEST_NAME)):
            above, own = os.path.split(directory)
            raise UsageError(
                f"{directory} is itself a checkpoint: give {above} as the directory, and {own!r} as the tag"
            )
        return None
    if not os.path.lexists(os.path.join(directory, newest)):
        raise UsageError(
            f"{os.path.join(directory, LATEST_NAME)} names {newest!r}, which is not there; name the tag to load "
            f"({_known(directory)})"
        )
    return folder_of(directory, newest)


def lacking_in(directory: str) -> str:
    """Why there is nothing to load where no tag is said."""
    return "it has no file 'latest'; name a tag" if os.path.isdir(directory) else "that is no directory"


def folder_of(directory: str, tag: str) -> str:
    """Where the checkpoint of a tag is.

    Raises:
        UsageError: there is none, or its place is taken by a link or a file.
    """
    path = os.path.join(directory, tag)
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"there is no checkpoint {tag!r} in {directory} ({_known(directory)})") from None
    if not stat.S_ISDIR(mode):
        what = "a link; give the directory that it leads to" if stat.S_ISLNK(mode) else "no directory"
        raise UsageError(f"{path} is {what}")
    return path


def _known(directory: str) -> str:
    if not os.path.isdir(directory):
        return "that is no directory"
    return f"there are: {', '.join(known_tags(directory)) or 'none'}"


def known_tags(directory: str) -> list[str]:
    """Folders with a manifest."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return [name for name in names if os.path.isfile(os.path.join(directory, name, MANIFEST_NAME))]


def check_place(directory: str, tag: str) -> None:
    """Check that a save of ``tag`` replaces nothing but a checkpoint of ours.

    Raises:
        UsageError: the place is taken by a file, a link, or a folder that holds something else. Somebody's own files,
            or a checkpoint of another library, would be lost.
    """
    latest = os.path.join(directory, LATEST_NAME)
    if os.path.isdir(latest) and not os.path.islink(latest):
        raise UsageError(f"{latest} is a directory, where the name of the newest checkpoint belongs: move it away")
    path = os.path.join(directory, tag)
    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        what = "a link" if os.path.islink(path) else "no directory"
        raise UsageError(f"{path} is {what}, and no checkpoint of deepoffload: move it away, or save with another tag")
    names = set(os.listdir(path))
    manifest = _manifest_if_ours(path)
    if manifest is not None:
        names -= {*manifest.files, MANIFEST_NAME}
    elif MANIFEST_NAME in names:  # a damaged one
        names = {name for name in names if not name.endswith((".json", ".safetensors"))}
    if names:
        raise UsageError(
            f"{path} holds {_few(sorted(names))}, which no checkpoint of deepoffload put there and which saving with "
            f"the tag {tag!r} would remove: move it away, or save with another tag or to another directory"
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def publish_tag(staged: str, directory: str, tag: str, *, update_latest: bool) -> str:
    """Move a complete checkpoint to its place, and name it in ``latest``. One of the same tag that is there already is
    left in ``staged``, a folder of a staging directory. At every moment the tag is the old one or the new one.

    Raises:
        IoFailure: a file could not be moved. UnsupportedError: the file system cannot exchange two directories.
        UsageError: see :func:`check_place`; something may have come since the save began.
    """
    path = os.path.join(directory, tag)
    check_place(directory, tag)
    try:
        sync_directory(staged)
        if os.path.lexists(path):
            _exchange(staged, path, tag)
            undo = partial(_exchange, staged, path, tag)
        else:
            os.rename(staged, path)
            undo = partial(os.rename, path, staged)
        try:
            sync_directory(directory)
        except OSError:
            undo()  # what was there before has been on the disk, and this may never be
            raise
    except DeepOffloadError:
        raise
    except OSError as error:
        raise failure("moving the checkpoint into place", error, path, 0) from error
    if update_latest:
        _write_latest(directory, os.path.dirname(staged), tag)
    return path


def _exchange(one: str, other: str, tag: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        code = errno.ENOSYS
    elif libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    else:
        code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise UnsupportedError(
            f"{other} is there already, and this file system cannot exchange two directories in one step "
            f"({errno.errorcode.get(code, code)}), so a kill in between would lose both: save with another tag than "
            f"{tag!r}, or remove it first"
        )
    raise OSError(code, os.strerror(code), other)


def _write_latest(directory: str, staging: str, tag: str) -> None:
    path, final = os.path.join(staging, LATEST_NAME), os.path.join(directory, LATEST_NAME)
    try:
        write_small_file(path, tag.encode())
        os.replace(path, final)
        sync_directory(directory)
    except OSError as error:  # also an IoFailure, which speaks of a save that left nothing
        remedy = f"The checkpoint is complete in {os.path.join(directory, tag)}; load it by its tag"
        raise IoFailure("naming the newest checkpoint", error.errno or errno.EIO, final, 0, len(tag), remedy) from error


def prune(directory: str, keep_last: int, newest: str) -> None:
    """Remove complete checkpoints of ours beyond the ``keep_last`` newest. ``newest`` was just saved and stays; what
    else is in the directory is left alone. What cannot be removed is logged."""
    found: list[tuple[int, str]] = []
    for tag in known_tags(directory):
        manifest = _manifest_if_ours(os.path.join(directory, tag))
        if manifest is not None and tag != newest:
            found.append((manifest.saved_ns, tag))
    for _, tag in sorted(found, reverse=True)[max(0, keep_last - 1) :]:
        path = os.path.join(directory, tag)
        try:
            hidden = tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=directory)
            os.rename(path, os.path.join(hidden, "removed"))  # from here on it is no checkpoint any more
            sync_directory(directory)
            shutil.rmtree(hidden)
            log.info("removed the older checkpoint %s", path)
        except OSError as error:
            log.warning("%s, an older checkpoint, could not be removed: %s", path, error)


def _manifest_if_ours(path: str) -> Manifest | None:
    if os.path.islink(path):
        return None
    try:
        return read_manifest(path)
    except DeepOffloadError:
        return None
