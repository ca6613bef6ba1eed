"""Runs Python blocks of a page, each in a process of its own; a program that `test_client_examples.py` starts.

It supplies what a page leaves to its reader, and nothing else: an event loop, a started `client` where a block uses one
that it does not make, and host names that lead to the test's servers. A client that a block makes and does not start is
tried afterwards.

Reads a job from stdin and writes the outcomes to stdout, both JSON.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Sequence
from types import CodeType
from typing import Any, NotRequired, TypedDict

from gpu_worker_pool import GPUWorkerPoolClient

LONGEST_SECONDS = 20.0


class Job(TypedDict):
    blocks: list[str]
    #: Ports of this machine, by the scheme they speak.
    ports: dict[str, list[int]]
    #: Of the client that is supplied; blocks that ask for none get none.
    client: dict[str, Any]
    #: Run before each block, for pages that leave also this to their readers.
    prelude: NotRequired[str]


class Outcome(TypedDict):
    ok: bool
    #: Everything it wrote, and how it failed.
    output: str


def redirect_names(ports: dict[str, list[int]]) -> None:
    """Every host name leads here: the first one to the first server, the second one to the second…"""
    real = socket.getaddrinfo
    met: dict[object, int] = {}

    def getaddrinfo(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            candidates = ports["https" if port == 443 else "http"]
            place = met.setdefault((host, port), len(met))
            return real("127.0.0.1", candidates[place % len(candidates)], *arguments, **options)
        return real(host, port, *arguments, **options)

    socket.getaddrinfo = getaddrinfo


def is_left_to_the_reader(name: str, text: str) -> bool:
    """Whether a block uses something before it makes it."""
    uses = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name) and node.id == name]
    uses.sort(key=lambda node: (node.lineno, node.col_offset))
    return bool(uses) and isinstance(uses[0].ctx, ast.Load)


def compiled(text: str) -> CodeType:
    code: CodeType
    try:
        code = compile(text, "<block>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        if "'return' outside function" not in str(error):
            raise
        # A piece of a function: it is shown without its first line.
        whole = f"async def block():\n{textwrap.indent(text, '    ')}\nawait block()"
        code = compile(whole, "<block>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return code


async def run_in_a_loop(code: CodeType, names: dict[str, Any], job: Job, needs: Sequence[str]) -> None:
    supplied = GPUWorkerPoolClient(**job["client"]) if needs else None
    if supplied is not None:
        await supplied.start()
        names["client"] = supplied
        if "assignment" in needs:
            names["assignment"] = await supplied.request_gpu()
    result = eval(code, names)  # noqa: S307  # that is what it is for
    if inspect.isawaitable(result):
        await result
    if supplied is not None:
        await supplied.stop()
        if names["client"] is supplied:
            del names["client"]


async def try_out(client: GPUWorkerPoolClient) -> None:
    async with client:
        await client.release_gpu(await client.request_gpu(timeout=45))


def run_as_a_script(text: str) -> None:
    """A program with worker processes: they import it, so that it must be a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(text)
        script.flush()
        subprocess.run([sys.executable, script.name], check=True, timeout=LONGEST_SECONDS)


def run(text: str, job: Job) -> None:
    if "GPUProcessPoolExecutor" in text:
        run_as_a_script(text)
        return
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(job.get("prelude", ""), names)  # noqa: S102
    code = compiled(text)
    is_program = "asyncio.run(" in text
    needs = [] if is_program else [name for name in ("client", "assignment") if is_left_to_the_reader(name, text)]
    if needs or code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(run_in_a_loop(code, names, job, needs))
    else:
        exec(code, names)  # noqa: S102
    made = names.get("client")
    if isinstance(made, GPUWorkerPoolClient) and not made.is_running:
        asyncio.run(try_out(made))


def run_apart(text: str, job: Job) -> Outcome:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            status = 1
            try:
                run(text, job)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        deadline = time.monotonic() + LONGEST_SECONDS
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                deadline += LONGEST_SECONDS
                output.write(b"\nit did not end in time\n")
            time.sleep(0.002)
        output.seek(0)
        return {"ok": status == 0, "output": output.read().decode(errors="replace")}


def main() -> None:
    job: Job = json.load(sys.stdin)
    redirect_names(job["ports"])
    json.dump([run_apart(text, job) for text in job["blocks"]], sys.stdout)


if __name__ == "__main__":
    main()
