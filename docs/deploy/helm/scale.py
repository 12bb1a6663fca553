"""Tells Kubernetes how many pods of replicas the server wants.

The server writes a 1 or a 0 for each replica into a file. A StatefulSet ends its highest pods
first, so it needs pods up to the last 1.
"""

import json
import os
import ssl
import sys
import time
import urllib.request
from pathlib import Path

ACCOUNT = Path(os.environ.get("ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
API = os.environ.get("API", "https://kubernetes.default.svc")
SECONDS = float(os.environ.get("SECONDS", "2"))


def scale(url: str, count: int) -> None:
    request = urllib.request.Request(
        url,
        method="PATCH",
        data=json.dumps({"spec": {"replicas": count}}).encode(),
        headers={
            # Kubernetes replaces the token's file before the token expires.
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
            "Content-Type": "application/merge-patch+json",
        },
    )
    context = ssl.create_default_context(cafile=ACCOUNT / "ca.crt") if "https:" in url else None
    with urllib.request.urlopen(request, timeout=10, context=context):
        print(f"{count} pods of replicas", flush=True)


def main(wanted: Path, path: str) -> None:
    asked = None
    while True:
        try:
            count = wanted.read_text().rfind("1") + 1
            if count not in (asked, 0):
                scale(API + path, count)
                asked = count
        except FileNotFoundError:
            pass  # the server has not started yet
        except OSError as error:
            print(f"{path}: {error}; tries again", file=sys.stderr, flush=True)
        time.sleep(SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
