"""Parses the text of a policy file, TOML, into a `Policy`. Each mistake becomes a sentence with its line."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpu_worker_pool.core.policy import IdleRule, Limits, Policy, Webhook
from gpu_worker_pool.durations import parse_seconds
from gpu_worker_pool.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

MOST_ENTRIES: Final = 10_000
MOST_WEBHOOKS: Final = 8
LONGEST_TEMPLATE: Final = 4096
EVERYONE: Final = "*"
WEBHOOK_EVENTS: Final = ("granted", "ended", "lost", "idle")

_TOP: Final = (EVERYONE, "account", "group", "idle", "webhook", "metrics")
_LIMITS: Final = ("most_gpus", "most_waiting", "highest_priority", "longest_time", "idle_may_be_asked")
_DURATION: Final = 'a time such as "90s", "30m", "8h" or "2d"'
_URL: Final = re.compile(r"https?://[^\s/@?#]+(?:/[^\s#]*)?")
#: The position in an error of `tomllib`.
_PLACE: Final = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)")
#: A value with more lines is not examined: finding its end takes quadratic time.
_MOST_LINES: Final = 500
_NUMBER: Final = re.compile("[0-9A-Za-z_]+")
#: Line breaks, as TOML defines them.
_NEW_LINE: Final = re.compile(r"\r?\n")

_Path = tuple[str, ...]


@dataclass(frozen=True)
class NamedPolicy:
    """A policy as it is written: accounts have the names that people know, not those of `core/accounts.py`."""

    everyone: Limits
    accounts: Mapping[str, Limits]
    groups: Mapping[str, Limits]
    #: By group, the names of keys.
    keys: Mapping[str, tuple[str, ...]]
    idle: IdleRule
    webhooks: tuple[Webhook, ...]
    names_in_metrics: bool

    def policy(self, accounts_named: Callable[[str], Iterable[str]]) -> Policy:
        """`accounts_named`: the accounts that a name in the file means."""
        by_account = {account: each for name, each in self.accounts.items() for account in accounts_named(name)}
        key_groups: dict[str, tuple[str, ...]] = {}
        for group, names in self.keys.items():
            for name in names:
                key_groups[f"key:{name}"] = (*key_groups.get(f"key:{name}", ()), group)
        return Policy(
            self.everyone, by_account, self.groups, key_groups, self.idle, self.webhooks, self.names_in_metrics
        )


def parse_policy(text: str, name: str = "policy") -> NamedPolicy:
    """`name`: of the file, for the sentences. Raises a `PolicyError`."""
    return _Reader(text, name).read()


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._text = text
        try:
            self._document: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            match = _PLACE.search(str(error))
            last = len(_NEW_LINE.split(text.rstrip("\r\n")))
            line = int(match[1]) if match is not None and match[1] else last
            raise self._wrong(line, f"this is not TOML: {_PLACE.sub('', str(error))}") from None
        except RecursionError:
            raise self._wrong(1, "this is not a policy: it is nested too deeply") from None
        except ValueError as error:  # a number with thousands of digits
            what = str(error).partition(";")[0]
            raise self._wrong(_line_of_longest_number(text), f"this is not TOML: {what}") from None
        self._lines_known: dict[_Path, int] | None = None

    def read(self) -> NamedPolicy:
        document = self._document
        self._known((), document, _TOP, "a table of a policy")
        everyone = self._limits((EVERYONE,), document.get(EVERYONE, {}))
        accounts = {name: self._limits(("account", name), entry) for name, entry in self._entries("account", document)}
        groups, keys = {}, {}
        for group, entry in self._entries("group", document):
            path = ("group", group)
            groups[group] = self._limits(path, entry, "keys")
            if "keys" in entry:
                keys[group] = self._names((*path, "keys"), entry["keys"])
        return NamedPolicy(everyone, accounts, groups, keys, self._idle(), self._webhooks(), self._metrics())

    # --- tables ---

    def _entries(self, kind: str, document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        tables = self._table((kind,), document.get(kind, {}))
        if len(tables) > MOST_ENTRIES:
            raise self._at((kind,), f"more than {MOST_ENTRIES} tables")
        return [(name, self._table((kind, name), entry)) for name, entry in tables.items()]

    def _limits(self, path: _Path, entry: Any, *others: str) -> Limits:
        table = self._table(path, entry)
        self._known(path, table, (*_LIMITS, *others), "a limit")
        return Limits(
            most_gpus=self._integer(path, table, "most_gpus"),
            most_waiting=self._integer(path, table, "most_waiting", least=1),
            highest_priority=self._integer(path, table, "highest_priority", least=None),
            longest_seconds=self._seconds(path, table, "longest_time"),
            idle_may_be_asked=self._flag(path, table, "idle_may_be_asked"),
        )

    def _idle(self) -> IdleRule:
        table = self._table(("idle",), self._document.get("idle", {}))
        self._known(("idle",), table, ("after", "grace"), "a setting of idle")
        after, grace = self._seconds(("idle",), table, "after"), self._seconds(("idle",), table, "grace", may_be_0=True)
        usual = IdleRule()
        return IdleRule(
            usual.after_seconds if after is None else after, usual.grace_seconds if grace is None else grace
        )

    def _metrics(self) -> bool:
        table = self._table(("metrics",), self._document.get("metrics", {}))
        self._known(("metrics",), table, ("account_names",), "a setting of metrics")
        return bool(self._flag(("metrics",), table, "account_names"))

    def _webhooks(self) -> tuple[Webhook, ...]:
        found = self._document.get("webhook", [])
        if isinstance(found, dict):
            raise self._at(("webhook",), "write [[webhook]] with two brackets: there may be several")
        if not isinstance(found, list):
            raise self._at(("webhook",), f"webhook must be a table, not {_shown(found)}")
        if len(found) > MOST_WEBHOOKS:
            raise self._at(("webhook",), f"more than {MOST_WEBHOOKS} webhooks")
        return tuple(self._webhook(("webhook", str(number)), each) for number, each in enumerate(found))

    def _webhook(self, path: _Path, entry: Any) -> Webhook:
        table = self._table(path, entry)
        self._known(path, table, ("url", "events", "template", "secret_file"), "a setting of a webhook")
        if "url" not in table:
            raise self._at(path, 'this webhook has no url: write url = "https://…"')
        url = self._text_of(path, table, "url")
        if url is None or not _URL.fullmatch(url) or not _can_be_sent_to(url):
            raise self._at((*path, "url"), f"url must be an address such as https://chat.example.org/hook, not {url!r}")
        events = self._names((*path, "events"), table.get("events", list(WEBHOOK_EVENTS)))
        for event in events:
            if event not in WEBHOOK_EVENTS:
                raise self._at((*path, "events"), f"{event!r} is not an event; there are {', '.join(WEBHOOK_EVENTS)}")
        template, secret_file = self._text_of(path, table, "template"), self._text_of(path, table, "secret_file")
        if template is not None and len(template) > LONGEST_TEMPLATE:
            raise self._at((*path, "template"), f"template must have at most {LONGEST_TEMPLATE} characters")
        if secret_file is not None and (not secret_file.startswith("/") or "\0" in secret_file):
            raise self._at((*path, "secret_file"), f"secret_file must be an absolute path, not {secret_file!r}")
        return Webhook(url, events, template, secret_file)

    # --- values ---

    def _table(self, path: _Path, found: Any) -> dict[str, Any]:
        if not isinstance(found, dict):
            raise self._at(path, f"{'.'.join(path)} must be a table, not {_shown(found)}")
        return found

    def _known(self, path: _Path, table: dict[str, Any], known: tuple[str, ...], what: str) -> None:
        for key in table:
            if key not in known:
                from difflib import get_close_matches

                close = get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                raise self._at((*path, key), f"{key!r} is not {what}; {hint}")

    def _integer(self, path: _Path, table: dict[str, Any], key: str, *, least: int | None = 0) -> int | None:
        if key not in table:
            return None
        found = table[key]
        is_integer = isinstance(found, int) and not isinstance(found, bool) and abs(found) <= 10**9
        if not is_integer or (least is not None and found < least):
            what = "a whole number" + ("" if least is None else f" of at least {least}")
            raise self._at((*path, key), f"{key} must be {what}, not {_shown(found)}")
        return int(found)

    def _seconds(self, path: _Path, table: dict[str, Any], key: str, *, may_be_0: bool = False) -> float | None:
        if key not in table:
            return None
        found = table[key]
        seconds = parse_seconds(found) if isinstance(found, str) else None
        if seconds is None or seconds > 1e9 or (seconds == 0 and not may_be_0):
            raise self._at((*path, key), f"{key} must be {_DURATION}, not {_shown(found)}")
        return seconds

    def _flag(self, path: _Path, table: dict[str, Any], key: str) -> bool | None:
        found = table.get(key)
        if key in table and not isinstance(found, bool):
            raise self._at((*path, key), f"{key} must be true or false, not {_shown(found)}")
        return found

    def _text_of(self, path: _Path, table: dict[str, Any], key: str) -> str | None:
        found = table.get(key)
        if key in table and not (isinstance(found, str) and found.strip()):
            raise self._at((*path, key), f"{key} must be a text, not {_shown(found)}")
        return found

    def _names(self, path: _Path, found: Any) -> tuple[str, ...]:
        if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
            raise self._at(path, f'{path[-1]} must be a list of texts such as ["a", "b"], not {_shown(found)}')
        return tuple(dict.fromkeys(found))

    # --- sentences ---

    def _at(self, path: _Path, what: str) -> PolicyError:
        """The error with the line of this path, or of the table around it."""
        if self._lines_known is None:
            self._lines_known = _lines_of(self._text)
        while path and path not in self._lines_known:
            path = path[:-1]
        return self._wrong(self._lines_known.get(path, 1), what)

    def _wrong(self, line: int, what: str) -> PolicyError:
        return PolicyError(f"{self._name}, line {line}: {what}", line=line)


def _shown(found: Any) -> str:
    text = str(found).lower() if isinstance(found, bool) else repr(found)
    return text if len(text) <= 60 else f"{text[:57]}…"


# --- lines, which `tomllib` does not report ---


def _line_of_longest_number(text: str) -> int:
    lines = _NEW_LINE.split(text)
    return 1 + max(range(len(lines)), key=lambda place: max(map(len, _NUMBER.findall(lines[place])), default=0))


def _lines_of(text: str) -> dict[_Path, int]:
    """The line of each table and key of a valid document; elements of a list of tables have numbers."""
    found: dict[_Path, int] = {}
    tables: dict[_Path, int] = {}
    around: _Path = ()
    for line, statement in _statements(text):
        content = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            path, is_list = _path_of_header(content)
            if is_list:
                tables[path] = tables.get(path, -1) + 1
                found.setdefault(path, line)
            around = _numbered(path, tables)
            for length in range(1, len(around) + 1):
                found.setdefault(around[:length], line)
        else:
            for path in _paths_in(content):
                found.setdefault((*around, *path), line)
    return found


def _can_be_sent_to(url: str) -> bool:
    """As the library says that sends: an address or a port that cannot exist would be noticed only there."""
    from yarl import URL  # few policies have webhooks

    try:
        return bool(URL(url).origin().host) and URL(url).port != 0
    except ValueError:
        return False


def _statements(text: str) -> list[tuple[int, str]]:
    """Each header and each `key = value`, which may have several lines, with the number of its first line."""
    statements, begun_at, lines = [], 0, list[str]()
    for number, line in enumerate(_NEW_LINE.split(text), 1):
        if not lines:
            begun_at = number
        lines.append(line)
        statement = "\n".join(lines)
        try:
            content = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            if len(lines) > _MOST_LINES:
                break
            continue
        lines = []
        if content:
            statements.append((begun_at, statement))
    return statements


def _path_of_header(content: Any) -> tuple[_Path, bool]:
    path: list[str] = []
    while isinstance(content, dict) and content:
        ((key, content),) = content.items()
        path.append(key)
    return tuple(path), isinstance(content, list)


def _numbered(path: _Path, tables: Mapping[_Path, int]) -> _Path:
    """The path with element numbers: a header inside a list of tables means its last element."""
    found: list[str] = []
    for position, key in enumerate(path, 1):
        found.append(key)
        if path[:position] in tables:
            found.append(str(tables[path[:position]]))
    return tuple(found)


def _paths_in(content: Any, around: _Path = ()) -> list[_Path]:
    if not isinstance(content, dict):
        return []
    return [path for key, value in content.items() for path in ((*around, key), *_paths_in(value, (*around, key)))]
