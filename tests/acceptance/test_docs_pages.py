"""/docs and /redoc: they need nothing from elsewhere, and show every operation.

Rendered in Debian's chromium where that is installed, and in jsdom where npm can fetch it; read as text everywhere.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp
import pytest
from tests.server_process import ServerProcess
from tests.waiting import eventually

from gpu_worker_pool.gpu_server.api_docs import VENDORED

PAGES = ("/docs", "/redoc")
ROUTES = ("/gpu/stats", "/gpu/count", "/gpu/summary", "/gpu/history", "/health", "/config", "/metrics", "/events")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("pages"), GPU_BACKEND="simulated:2", ACCESS_LOG="false") as started:
        yield started


class References(HTMLParser):
    """What a page makes a browser fetch, and what its own script names."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002  # its signature
        self.found += [value for name, value in attrs if name in ("src", "href", "spec-url") and value]

    def handle_data(self, data: str) -> None:
        self.found += re.findall(r"""\burl: ["']([^"']+)""", data)


def content_policy(server: ServerProcess, page: str) -> dict[str, list[str]]:
    header = server.get(page).headers["content-security-policy"]
    assert header is not None
    directives = [directive.split() for directive in header.split(";")]
    return {name: sources for name, *sources in directives}


# --- what the pages say ---


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("prefix", ["", "/behind/a/proxy"])
def test_only_files_of_this_server_are_named_and_all_are_there(server: ServerProcess, page: str, prefix: str) -> None:
    reply = server.get(page)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    references = [reference for reference in References(reply.body.decode()).found if reference != "data:,"]
    assert len(references) >= 2
    for reference in references:
        # A proxy takes its prefix away again before it asks us: so whatever is named must lie below it.
        path = urlsplit(urljoin(f"http://proxy{prefix}{page}", reference))
        assert path.netloc == "proxy"
        assert path.path.startswith(f"{prefix}/")
        asset = server.get(path.path.removeprefix(prefix))
        assert asset.status == 200, reference
        assert len(asset.body) > 1000, reference


@pytest.mark.parametrize("page", PAGES)
def test_the_browser_is_told_to_fetch_nothing_from_elsewhere(server: ServerProcess, page: str) -> None:
    policy = content_policy(server, page)
    assert policy["default-src"] == ["'self'"]
    allowed = {"'self'", "'unsafe-inline'", "data:", "blob:"}
    for name in ("frame-ancestors", "base-uri", "form-action"):  # not for fetching
        assert policy.pop(name) == ["'none'"]
    assert {source for sources in policy.values() for source in sources} <= allowed
    # What has no line of its own goes by default-src: fetches, fonts and frames.
    assert policy.keys().isdisjoint({"connect-src", "font-src", "frame-src"})


def test_pages_of_other_names(tmp_path: Path) -> None:
    own = {"DOCS_URL": "/help/try", "REDOC_URL": "/read", "API_PREFIX": "/host1", "TITLE": "<b>GPUs</b> & {more}"}
    with ServerProcess(tmp_path, GPU_BACKEND="simulated:1", **own) as server:
        root = server.url.removesuffix("/host1")
        server.prefix = ""
        for page in ("/help/try", "/read"):
            html = server.get(page).body.decode()
            assert "<title>&lt;b&gt;GPUs&lt;/b&gt; &amp; {more}</title>" in html
            for reference in References(html).found:
                if reference != "data:,":
                    assert server.get(urljoin(root + page, reference).removeprefix(root)).status == 200, reference
        assert [server.get(page).status for page in PAGES] == [404, 404]


# --- what is shipped ---


def test_every_vendored_project_has_its_licence() -> None:
    folders = {path.name for path in VENDORED.iterdir() if path.is_dir()}
    rows = re.findall(r"^\| `(\S+)/` \| (\S+) \| (\S+) \| (\S+) \|$", (VENDORED / "README.md").read_text(), re.M)
    assert {folder for folder, *_ in rows} == folders == {"swagger-ui", "redoc"}
    words = {"Apache-2.0": "Apache License", "MIT": "Permission is hereby granted, free of charge"}
    for folder, _, _, licence in rows:
        assert words[licence] in (VENDORED / folder / "LICENSE").read_text()
        for script in (VENDORED / folder).glob("*.js"):
            # The bundles hold other projects' code, and name its licences in a file beside them.
            notice = script.with_name(f"{script.name}.LICENSE.txt")
            assert "icense" in notice.read_text(encoding="utf-8"), notice
            assert notice.name in script.read_text(encoding="utf-8")[:500]


def test_versions_are_those_that_are_named() -> None:
    versions = dict(re.findall(r"^\| `(\S+)/` \| \S+ \| (\S+) \|", (VENDORED / "README.md").read_text(), re.M))
    for folder, script in (("swagger-ui", "swagger-ui-bundle.js"), ("redoc", "redoc.standalone.js")):
        assert versions[folder] in (VENDORED / folder / script).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", ["/docs/assets/", "/docs/assets/%2e%2e/app.py", "/docs/assets/..%2fapp.py", "/docs/assets/nothing.js"]
)
def test_nothing_else_is_served(server: ServerProcess, path: str) -> None:
    assert server.get(path).status == 404


# --- what is rendered: by jsdom ---

_RENDER = r"""
const { JSDOM, ResourceLoader, VirtualConsole } = require("jsdom");
const [page, wanted] = [process.argv[2], JSON.parse(process.argv[3])];
const fetched = [];
class Loader extends ResourceLoader {
  fetch(url, options) { fetched.push(url); return super.fetch(url, options); }
}
function prepare(window) {
  window.fetch = (what, options) => {
    const url = new URL(what.url ?? what, window.location.href).href;
    fetched.push(url);
    return fetch(url, options && { method: options.method });
  };
  // What a browser has and jsdom has not.
  Object.assign(window, { Request, Response, Headers, TextEncoder, TextDecoder });
  window.matchMedia = () => ({ matches: false, addListener() {}, addEventListener() {} });
  window.IntersectionObserver = class { observe() {} unobserve() {} disconnect() {} };
  window.URL.createObjectURL = () => "blob:worker";
  window.Worker = class { addEventListener() {} postMessage() {} terminate() {} };
}
const options = { runScripts: "dangerously", resources: new Loader(), pretendToBeVisual: true,
                  virtualConsole: new VirtualConsole(), beforeParse: prepare };
JSDOM.fromURL(page, options).then(async ({ window }) => {
  const text = () => window.document.body.textContent;
  for (let turn = 0; turn < 200 && !wanted.every((route) => text().includes(route)); turn++) {
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  const images = [...window.document.querySelectorAll("img")].map((image) => image.src);
  console.log(JSON.stringify({ fetched, images, missing: wanted.filter((route) => !text().includes(route)) }));
  process.exit(0);
});
"""


@pytest.fixture(scope="session")
def jsdom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("jsdom")
    command = [npm, "install", "--no-audit", "--no-fund", "--no-save", "--ignore-scripts", "jsdom@24"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not install jsdom within 90 s")
    if done.returncode != 0:
        pytest.skip(f"npm could not install jsdom: {done.stderr.strip()[-200:]}")
    (folder / "render.js").write_text(_RENDER)
    return folder


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", PAGES)
def test_rendered_by_jsdom(server: ServerProcess, jsdom: Path, page: str) -> None:
    node = shutil.which("node")
    assert node is not None
    command = [node, jsdom / "render.js", server.url + page, json.dumps(ROUTES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rendered = json.loads(done.stdout)
    assert rendered["missing"] == []
    assert f"{server.url}/openapi.json" in rendered["fetched"]
    assert {urlsplit(url).netloc for url in rendered["fetched"]} == {f"127.0.0.1:{server.port}"}
    # jsdom loads no images and heeds no policy; a browser does both.
    if any(not url.startswith(("data:", server.url)) for url in rendered["images"]):
        assert content_policy(server, page)["img-src"] == ["'self'", "data:"]


# --- what is rendered: by a browser ---

CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", PAGES)
async def test_rendered_by_chromium(server: ServerProcess, tmp_path: Path, page: str) -> None:
    assert CHROMIUM is not None
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "about:blank"]
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        f"--user-data-dir={tmp_path}",
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(90), aiohttp.ClientSession() as session:
            port_file = tmp_path / "DevToolsActivePort"
            await asyncio.to_thread(eventually, lambda: "\n" in port_file.read_text(), 30)
            port = port_file.read_text().split("\n")[0]
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                (tab,) = [entry for entry in await reply.json() if entry["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as devtools:
                requested, text = await _visit(devtools, server.url + page)
    finally:
        with suppress(ProcessLookupError):
            browser.kill()
        await browser.wait()
    assert [route for route in ROUTES if route not in text] == []
    assert f"{server.url}/openapi.json" in requested
    own = f"127.0.0.1:{server.port}"
    assert [url for url in requested if url.startswith("http") and urlsplit(url).netloc != own] == []


async def _visit(devtools: aiohttp.ClientWebSocketResponse, url: str) -> tuple[list[str], str]:
    """What the page asked the network for, but for what its own policy forbade, and the text it showed in the end."""
    requests: dict[str, str] = {}
    number = 0

    async def call(method: str, **parameters: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        await devtools.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await devtools.receive_json()
            if message.get("method") == "Network.requestWillBeSent":
                requests[message["params"]["requestId"]] = message["params"]["request"]["url"]
            elif message.get("method") == "Network.loadingFailed" and message["params"].get("blockedReason"):
                requests.pop(message["params"]["requestId"], None)
            elif message.get("id") == number:
                result: dict[str, Any] = message["result"]
                return result

    await call("Network.enable")
    await call("Page.navigate", url=url)
    text = ""
    for _ in range(200):
        await asyncio.sleep(0.1)
        shown = await call("Runtime.evaluate", expression="document.body ? document.body.innerText : ''")
        text = shown["result"].get("value", "")
        if all(route in text for route in ROUTES):
            break
    # An image at the foot of the page may be asked for only now.
    await asyncio.sleep(1)
    await call("Runtime.evaluate", expression="0")
    return list(requests.values()), text
