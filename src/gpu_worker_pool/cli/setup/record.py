"""The record of what `gpu-pool setup` made, so that `--undo` takes back that and nothing else.

It is beside the state directory, where only root can write: members of the group must not be able to change it.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.cli.exits import CommandError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Record:
    group: str
    #: None: setup made the folder. Else its owner, group and mode before.
    folder_before: list[int] | None = None
    #: Setup changed or made the folder.
    has_folder: bool = False
    has_made_group: bool = False
    members_added: list[str] = field(default_factory=list)
    #: The service's user, if setup made it.
    user_made: str | None = None
    #: Ledgers that setup made: device and inode by name.
    ledgers: dict[str, list[int]] = field(default_factory=dict)
    #: Files outside the folder: a hash of what was written, by path.
    files: dict[str, str] = field(default_factory=dict)
    #: Folders outside it.
    folders: list[str] = field(default_factory=list)
    is_server_only: bool = False


def record_path(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.setup.json")


def load_record(directory: Path) -> Record | None:
    """None where setup has done nothing yet."""
    path = record_path(directory)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, encoding="utf-8") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022 or found.st_nlink != 1:
            raise CommandError(f"{path} is not a record of gpu-pool setup: others can change it; remove it")
        try:
            return _record(json.load(file))
        except (ValueError, TypeError, RecursionError):
            raise CommandError(f"{path} is damaged; remove it, and take back the rest by hand") from None


def _record(found: Any) -> Record:
    known = {each.name for each in fields(Record)}
    return Record(**{name: value for name, value in found.items() if name in known})


def save_record(directory: Path, record: Record) -> None:
    path = record_path(directory)
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(record), file, indent=1)
        file.flush()
        os.fsync(descriptor)
    draft.replace(path)
