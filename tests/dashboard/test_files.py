"""The files of the live page: which are served, their headers and size, and what they must not contain."""

from __future__ import annotations

import gzip
import json
import re
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

import gpu_worker_pool
from gpu_worker_pool.gpu_server import ServerSettings
from gpu_worker_pool.gpu_server.compression import accepts_gzip
from gpu_worker_pool.gpu_server.dashboard.page import HERE, host_id
from tests.dashboard.looking import take
from tests.server_process import ServerProcess

WEB = HERE / "web"
MODULES = sorted(WEB.glob("*.js"))
SHEETS = sorted(WEB.glob("*.css"))
MOST_BYTES = 200_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("files"), GPU_BACKEND="simulated:64", ACCESS_LOG="false") as started:
        yield started


def policy(header: str | None) -> dict[str, list[str]]:
    assert header is not None
    return {name: sources for name, *sources in (directive.split() for directive in header.split(";"))}


# --- what is served ---


def test_the_page_allows_the_browser_as_little_as_possible(server: ServerProcess) -> None:
    reply = server.get("/dashboard")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert policy(reply.headers["content-security-policy"]) == {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "connect-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "frame-ancestors": ["'none'"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "require-trusted-types-for": ["'script'"],
    }
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("prefix", ["", "/behind/a/proxy"])
def test_only_files_of_this_server_are_named_and_all_are_there(server: ServerProcess, prefix: str) -> None:
    html = server.get("/dashboard").body.decode()
    named = [name for name in re.findall(r'(?:src|href)="([^"#]+)"', html) if not name.startswith("data:")]
    assert len(named) >= 6
    for name in named:
        # A proxy takes its prefix away again before it asks us.
        found = urlsplit(urljoin(f"http://proxy{prefix}/dashboard", name))
        assert found.netloc == "proxy"
        reply = server.get(found.path.removeprefix(prefix))
        assert reply.status == 200, name
        if "/files/" in found.path:
            assert reply.headers["x-content-type-options"] == "nosniff"
            kind = "text/css" if name.endswith(".css") else "text/javascript"
            assert reply.headers["content-type"] == f"{kind}; charset=utf-8"


def test_under_a_prefix_and_with_a_slash(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1", API_PREFIX="/a/b") as server:
        assert server.get("/dashboard").status == 200
        assert server.get("/dashboard/").status == 200, "redirected to the one without"
        assert server.get("/dashboard", method="HEAD").status == 200
        assert server.get("/dashboard/files/main.js").status == 200
        assert "/a/b/dashboard" in server.get("/").json["endpoints"]
        assert f"live page on http://127.0.0.1:{server.port}/a/b/dashboard" in server.log
        server.prefix = ""
        assert server.get("/dashboard").status == 404


@pytest.mark.parametrize(
    "name", ["", "nothing.js", "..%2fpage.py", "%2e%2e/page.py", "LICENSE", "README.md", "page.py"]
)
def test_nothing_else_is_served(server: ServerProcess, name: str) -> None:
    assert server.get(f"/dashboard/files/{name}").status == 404


def test_a_browser_asks_whether_a_file_has_changed(server: ServerProcess) -> None:
    first = server.get("/dashboard/files/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = server.ask("GET", "/dashboard/files/main.js", headers={"If-None-Match": str(first.headers["etag"])})
    assert (again.status, again.body) == (304, b"")
    other = server.ask("GET", "/dashboard/files/main.js", headers={"If-None-Match": 'W/"another"'})
    assert other.status == 200


def test_compressed_for_those_who_can_read_it(server: ServerProcess) -> None:
    for path in ("/dashboard/files/main.js", "/gpu/history"):
        plain = server.get(path)
        packed = server.ask("GET", path, headers={"Accept-Encoding": "gzip, br"})
        assert (plain.headers["content-encoding"], packed.headers["content-encoding"]) == (None, "gzip")
        assert len(packed.body) < len(plain.body) / 2
        assert len(plain.body) == int(str(plain.headers["content-length"]))
        assert "accept-encoding" in str(plain.headers["vary"]).lower()
        unpacked = gzip.decompress(packed.body)
        assert unpacked == plain.body or json.loads(unpacked)["gpus"]


@pytest.mark.parametrize(
    ("header", "is_accepted"),
    [("gzip", True), ("br, GZIP;q=0.5", True), ("gzip;q=0", False), ("gzip; q=0.0", False), ("", False), ("br", False)],
)
def test_who_can_read_it(header: str, is_accepted: bool) -> None:
    assert accepts_gzip(header) is is_accepted


def test_little_is_needed_for_64_gpus(server: ServerProcess) -> None:
    """Files, history, and the stream until everything is there; with a lease on every GPU."""
    for number in range(64):
        take(server, worker_id=f"worker-{number}", label=f"experiment {number}")
    names = ["", *(f"/files/{path.name}" for path in [*MODULES, *SHEETS, *HERE.glob("uplot/uPlot*")])]
    paths = [f"/dashboard{name}" for name in names] + ["/dashboard/host", "/gpu/history?limit=37"]
    loaded = 0
    for path in paths:
        reply = server.ask("GET", path, headers={"Accept-Encoding": "gzip"})
        loaded += len(reply.body) + sum(len(f"{name}: {value}\r\n") for name, value in reply.headers.items())
    request = urllib.request.Request(f"{server.url}/events", headers={"Accept-Encoding": "gzip"})
    unpack, first = zlib.decompressobj(31), b""
    with urllib.request.urlopen(request, timeout=10) as stream:
        while not first.endswith(b"\n\n") or b"event: snapshot" not in first:
            part = stream.read1()
            loaded += len(part)
            first += unpack.decompress(part)
    assert loaded < MOST_BYTES


def test_who_it_is(server: ServerProcess) -> None:
    host = server.get("/dashboard/host").json
    assert (host["peers"], host["refresh_interval"]) == ([], 1.0)
    assert re.fullmatch(r"[0-9a-f]{16}", host["host_id"])
    assert server.get("/dashboard/peers").json == {"peers": []}
    assert server.get("/dashboard/peers/history").json == {"peers": {}}


def test_the_same_host_has_the_same_id_and_another_has_another(tmp_path: Path) -> None:
    """Whatever its processes, ports and titles; but not if they show other GPUs, or keep other leases."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    one, other = map(str, folders)
    id_of = host_id(ServerSettings(gpu_backend="nvml"), one)
    assert host_id(ServerSettings(gpu_backend="nvml", port=9000, title="again"), f"{one}/../one") == id_of
    others = {
        id_of,
        host_id(ServerSettings(gpu_backend="nvml"), other),
        host_id(ServerSettings(gpu_backend="nvml", cuda_visible_devices="0"), one),
        host_id(ServerSettings(gpu_backend="simulated:4"), one),
        # Without a folder, nothing is known that another process would know, too.
        host_id(ServerSettings(gpu_backend="nvml"), None),
        host_id(ServerSettings(gpu_backend="nvml"), None),
    }
    assert len(others) == 6


# --- what no file does ---


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_makes_markup_of_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser|createContextual"
    assert re.findall(forbidden, text) == []
    assert re.findall(r"localStorage|sessionStorage|document\.cookie", text) == []
    assert text.startswith("// "), "it begins with what it is for"
    assert len(text.splitlines()) < 300


@pytest.mark.parametrize("path", [*MODULES, *SHEETS, WEB / "index.html"], ids=lambda path: path.name)
def test_no_file_names_another_server(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]+[^\s]*", text) == []
    assert re.findall(r"url\(|@import", text) == []


def test_nothing_runs_or_is_styled_in_the_markup() -> None:
    html = (WEB / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"\s(?:on\w+|style)=", html) == []
    assert re.findall(r"<script(?![^>]*src=)", html) == []


def test_every_module_is_used() -> None:
    imported = {
        name for path in MODULES for name in re.findall(r'from "\./([\w.]+)"', path.read_text(encoding="utf-8"))
    }
    assert imported | {"main.js"} == {path.name for path in MODULES}


def test_uplot_is_the_release_that_is_named_with_its_licence() -> None:
    folder = HERE / "uplot"
    version = re.search(r"uPlot\S* (\d+\.\d+\.\d+) \(MIT", (folder / "README.md").read_text())
    assert version is not None
    assert f"v{version[1]}" in (folder / "uPlot.iife.min.js").read_text(encoding="utf-8")[:100]
    assert "Permission is hereby granted, free of charge" in (folder / "LICENSE").read_text()


def test_axe_is_for_tests_only_and_has_its_licence() -> None:
    folder = Path(__file__).parent / "axe"
    assert "Mozilla Public License" in (folder / "LICENSE").read_text()
    version = re.search(r"axe-core\S* (\d+\.\d+\.\d+)", (folder / "README.md").read_text())
    assert version is not None
    assert f"axe v{version[1]}" in (folder / "axe.min.js").read_text(encoding="utf-8")[:100]
    package = Path(gpu_worker_pool.__file__).parent
    assert list(package.rglob("*axe*")) == []
