"""A small model hub on this machine: what huggingface_hub asks of the real one, for directories of files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_of(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `root/owner/name/…`: the address, and a list that fills with the requests."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            seen.append(f"{self.command} {path}")
            words = path.strip("/").split("/")
            if words[:2] == ["api", "models"] and (root / words[2] / words[3]).is_dir():
                self._answer(json.dumps(self._about(root / words[2] / words[3], words)).encode(), "application/json")
            elif words[2:3] == ["resolve"] and (file := root.joinpath(*words[:2], *words[4:])).is_file():
                self._answer(file.read_bytes(), "application/octet-stream")
            else:
                known = (root / "/".join(words[:2])).is_dir()
                code = "EntryNotFound" if known else "RepoNotFound"
                self._answer(b"{}", "application/json", 404, {"X-Error-Code": code})

        def _about(self, directory: Path, words: list[str]) -> object:
            files = sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())
            if "tree" in words:
                return [
                    {"type": "file", "path": name, "size": (directory / name).stat().st_size, "oid": "0" * 40}
                    for name in files
                ]
            name = f"{directory.parent.name}/{directory.name}"
            return {"id": name, "modelId": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}

        def _answer(self, body: bytes, kind: str, code: int = 200, more: dict[str, str] | None = None) -> None:
            self.send_response(code)
            headers = {"Content-Type": kind, "Content-Length": str(len(body)), "X-Repo-Commit": COMMIT}
            headers |= {"ETag": f'"{hashlib.sha1(body, usedforsecurity=False).hexdigest()}"', **(more or {})}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
