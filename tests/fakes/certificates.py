"""Certificates made on the spot: an authority of the test's own and what it signs, as PEM files."""

from __future__ import annotations

import subprocess
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_IS_AUTHORITY = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=keyCertSign")


class Authority:
    """Its own certificate is `ca.pem` in the folder; each name gets `NAME.pem` and `NAME.key`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._openssl(
            "req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test", *_IS_AUTHORITY
        )

    def issue(self, name: str, alternative_names: str = "IP:127.0.0.1") -> None:
        """Make a certificate, or another one in the place of that of the same name."""
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternative_names}")
        self._openssl("req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        self._openssl(
            "x509", "-req", "-in", f"{name}.csr", *signer, "-out", f"{name}.pem", "-extfile", extensions.name
        )

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)
