"""Find out whether users other than this one and the system can change a file or a folder."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def who_can_change(path: Path, *, ours: bool = True, sticky: bool = True, found: os.stat_result | None = None) -> str:
    """Return which users can change `path`, other than the system and, with `ours`, this user; "" if none."""
    # `sticky` accepts a folder such as /tmp, where nobody can replace another's files; `found` is an open file's stat.
    found = os.stat(path) if found is None else found
    if not is_ours(found.st_uid) or (not ours and found.st_uid not in _system()):
        return f"{path} belongs to user {user(found.st_uid)}"
    mode = stat.S_IMODE(found.st_mode)
    if sticky and stat.S_ISDIR(found.st_mode) and mode & stat.S_ISVTX:
        return ""
    if mode & stat.S_IWOTH:
        return f"every user can write to {path}"
    group = _shared_group(found.st_gid) if mode & stat.S_IWGRP else ""
    return f"group {group} can write to {path}" if group else ""


def is_systems(folder: str) -> bool:
    """Return whether only the system can change a folder and those above it, so that no user can add a library."""
    # If it does not exist, the existing folders above it decide: if only the system can change those, only the system
    # can make it.
    parents = {each for path in (folder, os.path.realpath(folder)) for each in (Path(path), *Path(path).parents)}
    return not any(who_can_change(each, ours=False, sticky=False) for each in parents if os.path.exists(each))


@contextmanager
def alone() -> Iterator[None]:
    """Make new files and folders writable by this user only, whatever the umask is."""
    before = os.umask(0)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


def is_ours(number: int) -> bool:
    """Return whether a user is this one, or the system."""
    return number == os.geteuid() or number in _system()


def user(number: int) -> str:
    """Return a user's name, or its number where it has none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _system() -> set[int]:
    # In a user namespace without root, the system's files appear to belong to another user, who also owns /.
    return {0, os.stat("/").st_uid}


def _shared_group(number: int) -> str:
    """Return a group's name, "" if its only members are root and this user: many users have a group of their own."""
    mine = {0, os.geteuid()}
    try:
        group = grp.getgrgid(number)
        members = {pwd.getpwnam(name).pw_uid for name in group.gr_mem}
    except KeyError:  # a group or a member without a name
        return str(number)
    return group.gr_name if (members | {each.pw_uid for each in pwd.getpwall() if each.pw_gid == number}) - mine else ""
