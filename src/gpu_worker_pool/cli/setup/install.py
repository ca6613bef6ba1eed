"""The steps of `gpu-pool setup`: group, folder, users, ledger, service, and a trial as each user."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

from gpu_worker_pool import state_directory
from gpu_worker_pool.cli.exits import CommandError, Status
from gpu_worker_pool.cli.setup import service
from gpu_worker_pool.cli.setup.accounts import (
    add_to_group,
    check_name,
    gid_of,
    group_name,
    make_group,
    make_service_user,
    members_of,
    person,
    user_exists,
)
from gpu_worker_pool.cli.setup.folder import make_folder, open_folder
from gpu_worker_pool.cli.setup.record import Record, load_record, save_record
from gpu_worker_pool.cli.setup.trial import make_ledger, nobody_in, root, try_ledgers
from gpu_worker_pool.ledger.host import ledger_path

if TYPE_CHECKING:
    from gpu_worker_pool.cli.setup import Options, Places, Steps
    from gpu_worker_pool.cli.setup.folder import Folder

DEFAULT_GROUP: Final = "gpu-pool"
#: A larger group is tried only as the users that are added now.
MOST_TRIED: Final = 50
SHARED_MODE: Final = 0o2770
SERVER_MODE: Final = 0o700


def install(options: Options, places: Places, steps: Steps) -> None:
    """Raises a `CommandError` that says what to do; then everything before it stays, and another call goes on."""
    Installation(options, places, steps).run()


class Installation:
    def __init__(self, options: Options, places: Places, steps: Steps) -> None:
        self._options = options
        self._places = places
        self._steps = steps
        self._directory = options.directory
        self._unit = places.units / service.UNIT
        #: Users who were added now, and must log in again.
        self._new_members: list[str] = []

    def run(self) -> None:
        known = load_record(self._directory)
        with open_folder(self._directory) as folder:
            group = self._chosen_group(folder, known)
            self._check(folder, known, group)
            found = None if folder is None else folder.found
        self._record = known or Record(group)
        self._record.group = group
        self._record.is_server_only = self._options.is_server_only
        self._make_group(group)
        if self._options.with_service:
            self._make_service_user(group)
        before = None if found is None else [found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)]
        self._make_folder(group, before)
        self._add_users(group)
        self._make_ledger()
        if self._options.with_service:
            self._write_service(group)
        if self._steps.is_dry:
            self._steps.say("this was a dry run: nothing was changed")
            return
        self._try(group)
        if self._options.with_service:
            self._start_service()
        self._say_what_is_left(group)

    # --- before anything is changed ---

    def _chosen_group(self, folder: Folder | None, known: Record | None) -> str:
        if self._options.group is not None:
            return check_name(self._options.group, "group")
        if known is not None:
            return known.group
        if folder is not None and folder.found.st_gid != 0 and folder.found.st_mode & stat.S_IWGRP:
            return group_name(folder.found.st_gid)  # others may be in it already
        return DEFAULT_GROUP

    def _check(self, folder: Folder | None, known: Record | None, group: str) -> None:
        for name in self._options.add:
            person(name)
        if known is not None and known.group != group:
            raise CommandError(
                f"{self._directory} was set up for group {known.group}: take that back first with --undo", Status.USAGE
            )
        if known is not None and known.is_server_only and not self._options.is_server_only:
            raise CommandError(
                f"{self._directory} was set up with --server-only, and this would open it to group {group}: add "
                "--server-only, or take it back first with --undo",
                Status.USAGE,
            )
        is_ours = known is not None or self._directory == state_directory.SHARED_DIRECTORY
        if folder is not None and not is_ours and (others := folder.others()):
            raise CommandError(
                f"{self._directory} has other files ({', '.join(others[:3])}{', …' if len(others) > 3 else ''}): "
                "choose a folder for gpu-pool alone"
            )
        if self._options.with_service:
            self._check_service(known)

    def _check_service(self, known: Record | None) -> None:
        files = {} if known is None else known.files
        if os.path.lexists(self._unit) and str(self._unit) not in files:
            raise CommandError(f"{self._unit} was not made by gpu-pool setup: remove it first (systemctl disable it)")
        if (path := service.unreadable_code()) is not None:
            raise CommandError(
                f"user {self._places.service_user} could not run this installation, since others may not read {path}: "
                "install gpu-worker-pool where all can read it, such as a virtual environment in /opt/gpu-pool, and "
                "run its gpu-pool setup"
            )

    # --- steps ---

    def _make_group(self, group: str) -> None:
        if gid_of(group) is None:
            self._record.has_made_group = True
            self._steps.do("make", f"group {group}", lambda: make_group(group))
            self._save()

    def _make_service_user(self, group: str) -> None:
        name = self._places.service_user
        if not user_exists(name):
            self._record.user_made = name
            self._steps.do("make", f"user {name}, for the service", lambda: make_service_user(name, group))
            self._save()
        elif name not in members_of(group):
            self._record.members_added.append(name)
            self._steps.do("add", f"{name} to group {group}", lambda: add_to_group(name, group))
            self._save()

    def _make_folder(self, group: str, before: list[int] | None) -> None:
        if not self._record.has_folder:
            self._record.folder_before = before
            self._record.has_folder = True
        mode = SERVER_MODE if self._options.is_server_only else SHARED_MODE
        if before is None:
            owner = self._places.service_user if self._options.is_server_only else "root"
            what = f"folder {self._directory} ({mode:04o} {owner}:{group})"
            self._save()  # first: what is made and not recorded could not be taken back
            self._steps.do("make", what, lambda: make_folder(self._directory))
        if self._steps.is_dry and (before is None or gid_of(group) is None):
            return
        with open_folder(self._directory) as folder:
            assert folder is not None
            steps = self._steps if before is not None else self._silent()
            gid = gid_of(group)
            assert gid is not None
            folder.fit(steps, uid=self._owner(), gid=gid, mode=mode)
        self._save()

    def _owner(self) -> int:
        return person(self._places.service_user).uid if self._options.is_server_only else 0

    def _add_users(self, group: str) -> None:
        if self._options.is_server_only:
            return
        for name in self._options.add:
            if name == "root" or name in members_of(group):
                continue
            self._steps.do("add", f"{name} to group {group}", lambda name=name: add_to_group(name, group))  # type: ignore[misc]
            self._new_members.append(name)
            self._record.members_added.append(name)
            self._save()

    def _make_ledger(self) -> None:
        path = ledger_path(self._directory, "auto")
        if os.path.lexists(path):
            return
        self._steps.do("make", f"ledger {path.name}", lambda: make_ledger(path))
        if not self._steps.is_dry:
            with open_folder(self._directory) as folder:
                assert folder is not None
                self._record.ledgers[path.name] = folder.identity(path.name)
        self._save()

    def _write_service(self, group: str) -> None:
        places = self._places
        self._write(self._unit, service.unit_text(self._options, places, group), 0o644)
        if not os.path.lexists(places.environment):
            self._write(places.environment, service.ENVIRONMENT, 0o600)
        elif not places.environment.is_symlink() and places.environment.stat().st_mode & 0o077:
            what = f"{places.environment} to 0600: keys belong there"
            self._steps.do("change", what, lambda: places.environment.chmod(0o600))

    def _write(self, path: os.PathLike[str], text: str, mode: int) -> None:
        from pathlib import Path

        path = Path(path)
        if path.is_file() and path.read_text(errors="replace") == text:
            return
        self._record.files[str(path)] = service.hash_of(text)
        self._save()
        self._steps.do("write", f"{path} ({mode:04o})", lambda: service.write_root_file(path, text, mode))

    def _start_service(self) -> None:
        places = self._places
        if places.systemd.exists():
            self._steps.do("start", f"service {service.UNIT}", service.start_service)
            return
        if self._options.is_server_only and not places.runtime.exists():
            self._record.folders.append(str(places.runtime))
            self._save()
            self._steps.do("make", f"folder {places.runtime}", self._make_runtime)
        by_hand = service.command_by_hand(self._options, places)
        self._steps.say(f"no systemd runs this host, so nothing was started; as root, run: {by_hand}")

    def _make_runtime(self) -> None:
        owner = person(self._places.service_user)
        make_folder(self._places.runtime)
        os.chown(self._places.runtime, owner.uid, owner.gid)
        self._places.runtime.chmod(0o755)

    # --- the trial ---

    def _try(self, group: str) -> None:
        gid = gid_of(group)
        assert gid is not None
        if self._options.is_server_only:
            names = [self._places.service_user]
        else:
            members = [name for name in members_of(group) if user_exists(name)]
            names = [*self._options.add, *(members if len(members) <= MOST_TRIED else ())]
        people = {name: person(name) for name in names if name != "root"}
        tried = [*people.values()] or [nobody_in(gid)]
        with open_folder(self._directory) as folder:
            assert folder is not None
            ledgers = [self._directory / name for name in folder.ledgers()]
        outcomes = try_ledgers(self._directory, ledgers, [*tried, root()])
        failures = [f"as {name}: {why}" for name, why in outcomes.items() if why is not None]
        if failures:
            raise CommandError(f"the ledger cannot be used: {'; '.join(failures)}")
        shown = ", ".join(people) or f"a user of group {group}"
        self._steps.say(f"tried as {shown}, and as root at the same time: the ledger opens and can be written")

    def _say_what_is_left(self, group: str) -> None:
        say = self._steps.say
        for name in self._new_members:
            say(f"{name} must log in again (or type: newgrp {group})")
        with open_folder(self._directory) as folder:
            former = [] if folder is None else [name for name in folder.users() if name not in members_of(group)]
        if former and not self._options.is_server_only:
            added = [word for name in former for word in ("--add", name)]
            command = state_directory.setup_command(*added)
            say(f"{', '.join(former)} used it before and are not in group {group}: {command}")
        if self._directory != state_directory.SHARED_DIRECTORY:
            say(f"every user must set {state_directory.VARIABLE}={self._directory}, for example in /etc/environment")
        if self._options.is_server_only:
            say("users need no group: gpu-pool reaches the service through its socket")
        elif not any(name != self._places.service_user for name in members_of(group)):
            say(f"group {group} has no members yet: {state_directory.setup_command('--add', 'USER')}")
        if self._steps.count == 0:
            say(f"nothing to do: {self._directory} is set up already")

    def _save(self) -> None:
        if not self._steps.is_dry:
            save_record(self._directory, self._record)

    def _silent(self) -> Steps:
        return type(self._steps)(lambda _: None, is_dry=self._steps.is_dry)
