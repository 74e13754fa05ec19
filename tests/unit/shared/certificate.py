"""A certificate for tests of TLS."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed one and its key, as files. Skips where there is no openssl.

    :param name: what it is for, as openssl writes it: `DNS:localhost`, `IP:127.0.0.1`.
    """
    if not shutil.which("openssl"):
        pytest.skip("makes its certificate with the openssl command")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", f"subjectAltName={name}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return cert, key
