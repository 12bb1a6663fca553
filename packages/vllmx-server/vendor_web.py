"""Writes src/vllmx_server/web/vendor: modules of two npm packages as they were published.

    python packages/vllmx-server/vendor_web.py

`npm pack` fetches the packages, which must have the digests below. The one thing that is changed is
the name of preact in hooks.js: browsers look a bare name up in an import map, and a page whose
policy forbids inline scripts has none.
"""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGES = {
    "preact": ("11.2.0", "3c4456766bd32b6b534d52bf4e9c2a29b33e7eedf6e96ed479300ba1a7888ebf"),
    "katex": ("0.16.22", "e9e0d167db3175481cbadaff38e8d90b130f6a3ddb451a47e43c577fd511f365"),
    "htm": ("3.1.1", "2425b9bee11409177bcabc7f32e319926fc6690c1701c0b257c88bdff2d5ba90"),
}
FILES = {
    "preact.js": ("preact", "dist/preact.mjs"),
    "hooks.js": ("preact", "hooks/dist/hooks.mjs"),
    "htm.js": ("htm", "dist/htm.mjs"),
    "katex.js": ("katex", "dist/katex.min.js"),
}
FOLDER = Path(__file__).parent / "src" / "vllmx_server" / "web" / "vendor"


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        packages = {name: fetch(name, Path(scratch)) for name in PACKAGES}
        for target, (name, member) in FILES.items():
            text = packages[name][member].decode()
            text = text.replace('from"preact"', 'from"./preact.js"')
            (FOLDER / target).write_text(text.partition("\n//# sourceMappingURL")[0] + "\n")
        mit = packages["preact"]["LICENSE"].decode()
        katex = packages["katex"]["LICENSE"].decode()
        assert "Copyright 2018 Google" in packages["htm"]["LICENSE"].decode()
        (FOLDER / "LICENSES.txt").write_text(
            f"htm.js: htm {PACKAGES['htm'][0]}, Copyright 2018 Google Inc., Apache License 2.0,"
            " whose text\nis the LICENSE of this package.\n\npreact.js, hooks.js: preact"
            f" {PACKAGES['preact'][0]}.\n\n{mit}\nkatex.js: KaTeX"
            f" {PACKAGES['katex'][0]}.\n\n{katex}"
        )


def fetch(name: str, folder: Path) -> dict[str, bytes]:
    """The files of a package by their path in it."""
    version, digest = PACKAGES[name]
    command = ["npm", "pack", "--silent", f"{name}@{version}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)  # noqa: S603
    archive = folder / f"{name}-{version}.tgz"
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != digest:
        raise SystemExit(f"{archive.name} has the digest {found}, not {digest}")
    files = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if (file := tar.extractfile(member)) is not None:
                files[member.name.removeprefix("package/")] = file.read()
    return files


if __name__ == "__main__":
    main()
