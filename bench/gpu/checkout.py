"""Makes this checkout's plugins visible without installing anything.

    python bench/gpu/checkout.py SITE [--wheels FOLDER]

SITE, put on PYTHONPATH, gets the metadata that entry points are read from, one folder for each
package, and the contents of the wheels that are given.
"""

import argparse
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write_metadata(site: Path) -> int:
    """Number of packages."""
    projects = sorted((ROOT / "packages").glob("*/pyproject.toml"))
    for path in projects:
        project = tomllib.loads(path.read_text())["project"]
        name, version = project["name"], project["version"]
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        header = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(header)
        lines = []
        for group, entries in project.get("entry-points", {}).items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return len(projects)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("--wheels", type=Path)
    chosen = parser.parse_args()
    count = write_metadata(chosen.site)
    wheels = sorted(chosen.wheels.glob("*.whl")) if chosen.wheels else []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(chosen.site)
    print(f"{count} packages of the checkout, {len(wheels)} wheels")


if __name__ == "__main__":
    main()
