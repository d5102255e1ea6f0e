"""Files that no other user of the machine may read or change: stores, and the user's own secret.

A group on one machine needs no configured secret. Its workers share one in a file of the user: any
process that can read it could take over their processes anyway.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile

from telegrad.errors import TelegradError

__all__ = ["claim_store_file", "user_secret"]


def claim_store_file(path: str) -> None:
    """Creates the file of a `file://` store with mode 0600, or checks an existing one.

    Raises:
        TelegradError: other users can read or change it, or put another file in its place.
    """
    _check_directory(os.path.dirname(os.path.abspath(path)))
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except FileExistsError:
        _check_file(path)
    except OSError as error:
        raise TelegradError(
            f"the store file {path!r} cannot be created: {error.strerror}. Check that this process "
            "may write to its directory"
        ) from None


def user_secret() -> bytes:
    """The secret that all groups of this user on this machine share; made at first use.

    Raises:
        TelegradError: its directory or file belongs to, or is open to, another user.
    """
    directory = os.path.join(tempfile.gettempdir(), f"telegrad-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    _check_directory(directory, is_ours=True)
    path = os.path.join(directory, "secret")
    if not os.path.lexists(path):
        # Written under another name first: other workers see the whole file or none.
        descriptor, draft = tempfile.mkstemp(dir=directory)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another worker was faster
                os.link(draft, path)
        finally:
            os.unlink(draft)
    _check_file(path)
    with open(path, "rb") as file:
        return file.read()


def _check_directory(directory: str, *, is_ours: bool = False) -> None:
    """Checks that no other user can replace files in a directory. In one with a sticky bit, like
    /tmp, only the owner of a file can."""
    try:
        found = os.lstat(directory) if is_ours else os.stat(directory)
    except OSError as error:
        raise TelegradError(f"{directory!r} cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise TelegradError(f"{directory!r} is not a directory: remove it")
    owners = {os.geteuid()} if is_ours else {os.geteuid(), 0}
    if found.st_uid not in owners:
        raise TelegradError(
            f"{directory!r} belongs to user {found.st_uid}, who could exchange the files in it; "
            f"this process runs as user {os.geteuid()}. Use a directory of your own"
        )
    forbidden = 0o077 if is_ours else 0o022
    if found.st_mode & forbidden and not (found.st_mode & stat.S_ISVTX and not is_ours):
        raise TelegradError(
            f"{directory!r} has mode {stat.S_IMODE(found.st_mode):04o}, so other users could "
            f"exchange the files in it: chmod {'700' if is_ours else 'go-w'} {directory}"
        )


def _check_file(path: str) -> None:
    try:
        found = os.lstat(path)
    except OSError as error:
        raise TelegradError(f"{path!r} cannot be used: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise TelegradError(f"{path!r} is not a regular file: remove it, or choose another path")
    if found.st_uid != os.geteuid():
        raise TelegradError(
            f"{path!r} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}: that user could join the group. Choose another path, and start all "
            "workers as one user"
        )
    if found.st_mode & 0o077:
        raise TelegradError(
            f"{path!r} has mode {stat.S_IMODE(found.st_mode):04o}: other users of this machine "
            f"could read or change what workers tell each other there. Remove it, or chmod 600 it"
        )
