"""Check of the folders above a cache, in which another user must not be able to rename."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat

_MOST_LINKS = 40  # as many as Linux follows
_WHOLE_NAMESPACE = ["0", "0", "4294967295"]


def _trusted_owners() -> set[int]:
    """Returns this user, root, and the number of users outside of a user namespace.

    The host's root has that number, too, in a container without privileges.
    """
    owners = {os.geteuid(), 0}
    with contextlib.suppress(OSError, ValueError), open("/proc/self/uid_map") as file:
        if file.read().split() != _WHOLE_NAMESPACE:
            with open("/proc/sys/fs/overflowuid") as number:
                owners.add(int(number.read()))
    return owners


def _is_own_group(gid: int) -> bool:
    """Returns True if a group is this user's alone, as most distributions make one per user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _has_acl(path: str) -> bool:
    """Returns True if a folder has an access list, whose members its mode does not tell."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access", follow_symlinks=False))
    except OSError:
        return False


def _problem(path: str, owners: set[int]) -> str:
    """Returns the reason why another user could rename what is in a folder, "" if none could."""
    status = os.lstat(path)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in owners:
        return f"{path} belongs to user {status.st_uid}, who could exchange what is in it"
    if not stat.S_ISDIR(status.st_mode) or mode & stat.S_ISVTX:
        return ""
    if mode & 0o002:
        return f"{path} is writable by all and not sticky (chmod +t {path})"
    if mode & 0o020 and (_has_acl(path) or not _is_own_group(status.st_gid)):
        return f"{path} is writable by group {status.st_gid} and not sticky (chmod g-w {path})"
    return ""


def parent_problem(path: str) -> str:
    """Returns the reason why another user could exchange a folder above ``path``, "" if none could.

    Folders behind links count. ``path`` itself is not checked, nor are missing folders.
    """
    owners, folder, links = _trusted_owners(), "/", 0
    rest = [name for name in reversed(path.split("/")) if name not in ("", ".")]
    try:
        while rest:
            if problem := _problem(folder, owners):
                return problem
            name = rest.pop()
            inside = os.path.dirname(folder) if name == ".." else os.path.join(folder, name)
            if not rest:
                break
            if not os.path.islink(inside):
                folder = inside
                continue
            if problem := _problem(inside, owners):
                return problem
            links += 1
            if links > _MOST_LINKS:
                return f"{path} has more than {_MOST_LINKS} links"
            target = os.readlink(inside)
            folder = "/" if target.startswith("/") else folder
            rest += [part for part in reversed(target.split("/")) if part not in ("", ".")]
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    return ""
