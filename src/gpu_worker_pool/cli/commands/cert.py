"""`gpu-pool cert` makes a certificate for a server, so that keys need not travel in the clear."""

from __future__ import annotations

from pathlib import Path

import click

from gpu_worker_pool.cli.exits import CommandError


@click.command(
    epilog="""\
\b
Examples:
  gpu-pool cert                             makes gpu-pool.crt and gpu-pool.key for this host
  gpu-pool cert --name gpu1.lab.example --directory /etc/gpu-pool
  gpu-pool cert --fingerprint gpu-pool.crt  shows what clients put into GPU_POOL_TLS_FINGERPRINT
"""
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(),
    metavar="FOLDER",
    help="Where to put the two files.  [default: the current folder]",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="A name or address of the server; may be repeated.  [default: those of this host]",
)
@click.option(
    "--days", type=click.IntRange(1, 36_500), default=3650, metavar="N", help="How long it is valid.  [default: 3650]"
)
@click.option(
    "--fingerprint",
    "shown_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Make nothing: show the fingerprint of this certificate.",
)
def cert(*, directory: Path, names: tuple[str, ...], days: int, shown_file: Path | None) -> None:
    """Make a certificate for a server of a lab that has no certificate authority.

    Clients trust it by its SHA-256 fingerprint, which is not secret. The key is secret, and only you can read it.
    """
    from gpu_worker_pool.api.fingerprints import fingerprint_of, shown

    def fingerprint(path: Path) -> str:
        try:
            return shown(fingerprint_of(path.read_text(encoding="ascii")))
        except (OSError, ValueError) as error:
            raise CommandError(f"{path} cannot be read as a certificate: {error}") from None

    if shown_file is not None:
        click.echo(fingerprint(shown_file))
        return
    certificate, key = directory / "gpu-pool.crt", directory / "gpu-pool.key"
    names = names or _names_of_this_host()
    _make(certificate, key, names, days)
    click.echo(f"""\
made {certificate} and {key}, valid for {days} days
on this host:   gpu-pool serve --tls-cert {certificate} --tls-key {key}
on the others:  export GPU_POOL_TLS_FINGERPRINT={fingerprint(certificate)}
                export GPU_SERVICE_ENDPOINT=https://{f"[{names[0]}]" if ":" in names[0] else names[0]}:8000""")


def _names_of_this_host() -> tuple[str, ...]:
    import socket

    return tuple(dict.fromkeys((socket.gethostname(), socket.getfqdn(), "localhost")))


def _make(certificate: Path, key: Path, names: tuple[str, ...], days: int) -> None:
    import ipaddress
    import re
    import shutil
    import subprocess
    import tempfile

    for path in (certificate, key):
        if path.exists():
            raise CommandError(f"{path} exists and is kept: remove it first, or choose another --directory")
    tool = shutil.which("openssl")
    if tool is None:
        raise CommandError("openssl is needed to make a certificate: install it (on Debian: apt install openssl)")

    def alternative(name: str) -> str:
        try:
            return f"IP:{ipaddress.ip_address(name)}"
        except ValueError:
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", name):
                raise click.UsageError(f"{name!r} is not a host name or address (--name).") from None
            return f"DNS:{name}"

    subject = f"subjectAltName={','.join(map(alternative, names))}"
    # Both appear together, or neither; the folder is ours alone, and so is what openssl makes in it.
    with tempfile.TemporaryDirectory(dir=certificate.parent) as folder:
        new_key, new_certificate = Path(folder) / "key", Path(folder) / "certificate"
        words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-sha256"]
        words += ["-days", str(days), "-subj", f"/CN={names[0][:64]}", "-addext", subject]
        done = subprocess.run(  # noqa: S603  # every name was checked
            [tool, *words, "-keyout", str(new_key), "-out", str(new_certificate)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CommandError(f"openssl failed: {done.stderr.strip() or done.returncode}")
        new_key.chmod(0o600)
        new_certificate.chmod(0o644)
        new_key.rename(key)
        new_certificate.rename(certificate)
