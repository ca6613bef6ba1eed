"""Checks the URL of the fleet's database, and shows it without what is secret. Needs no database driver."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

#: Where the URL is read from if no option has it. Variables are not shown by `ps`.
VARIABLE: Final = "GPU_POOL_FLEET_DATABASE"
EXAMPLE: Final = "postgresql://pool@db.lab/gpupool"
#: Parameters whose values are secrets.
_SECRETS: Final = frozenset({"password", "sslpassword", "passfile_password", "oauth_client_secret"})
_LONGEST: Final = 2000
_HOST: Final = r"(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+|%2F[A-Za-z0-9._%-]+)?(?::\d{1,5})?"
#: Several hosts, of which one can be written to; none: the host is a parameter, or PGHOST names it.
_HOSTS: Final = re.compile(f"{_HOST}(?:,{_HOST})*", re.IGNORECASE)
_CONTROL: Final = re.compile(r"[\x00-\x20\x7f]")


def check_url(text: str, source: str) -> str:
    """The URL as it is; raises ValueError with a sentence that shows no part of it, as any part may be the password."""
    url = text.strip()
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError(f"{source} must be a URL such as {EXAMPLE}")
    if len(url) > _LONGEST or _CONTROL.search(url):
        raise ValueError(f"{source} is too long, or has spaces or control characters: write %20 for a space")
    try:
        parts = urlsplit(url)
        names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    except ValueError:
        raise ValueError(f"{source} is not a valid URL; it must be one such as {EXAMPLE}") from None
    after_hosts = url.partition("://")[2][len(parts.netloc) :]
    if parts.netloc.count("@") > 1 or "@" in after_hosts or parts.fragment or "#" in after_hosts:
        raise ValueError(
            f"{source}: a character of the user name or password needs escaping: write %40 for @, %2F for /, "
            "%3A for :, %3F for ?, %23 for #, %25 for %"
        )
    hosts = parts.netloc.rpartition("@")[2]
    if not _HOSTS.fullmatch(hosts):
        raise ValueError(f"{source} must name the host of the database, and its port if that is not 5432, as {EXAMPLE}")
    if not unquote(parts.path).strip("/") and "dbname" not in names:
        raise ValueError(f"{source} names no database; it must end with one, as {EXAMPLE} does")
    return url


def holds_password(url: str) -> bool:
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    return ":" in user or any(name.lower() in _SECRETS for name, _ in parse_qsl(parts.query, keep_blank_values=True))


def check_argument(text: str, option: str) -> str:
    """As `check_url`, for the command line: every user of the host sees it there, so it must hold no password."""
    url = check_url(text, option)
    if holds_password(url):
        raise ValueError(
            f"{option} holds a password, which other users of this host can see in the list of processes: "
            f"set {VARIABLE} instead, or store the password in a file and set PGPASSFILE"
        )
    return url


def shown_url(url: str) -> str:
    """For people: user, hosts and database, without a password and without parameters."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    return f"postgresql://{user.partition(':')[0]}{at}{hosts}{parts.path}"
