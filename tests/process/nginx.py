"""Real nginx in front of a server, with the configuration that `warmserve nginx` prints."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from benchmarks.service import Server, eventually, warmserve

MAIN = """
daemon off;
pid {directory}/pid;
error_log {directory}/error.log warn;
worker_processes 1;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    include {directory}/site.conf;
}}
"""


class Nginx:
    """nginx on a port of its own; ends with the block."""

    def __init__(self, directory: Path, server: Server, *, keepalive: bool = False) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.binary = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")
        assert self.binary, "nginx is not installed; `make test` installs it"
        text = site(server, self.port)
        if keepalive:  # as an operator may have it: nginx offers to keep its connections upstream
            text = text.replace("max_fails=0;", "max_fails=0; keepalive 16;")
            text = text.replace("Connection close;", 'Connection "";')
        (directory / "site.conf").write_text(text)
        (directory / "nginx.conf").write_text(MAIN.format(directory=directory))
        self.arguments = [
            self.binary,
            "-p",
            str(directory),
            "-c",
            str(directory / "nginx.conf"),
            "-e",
            "stderr",
        ]

    def check(self) -> subprocess.CompletedProcess[str]:
        """Run ``nginx -t`` on the configuration."""
        return subprocess.run(
            [*self.arguments, "-t"], capture_output=True, text=True, timeout=30, check=False
        )

    def __enter__(self) -> Nginx:
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen(self.arguments, stdout=log, stderr=log)
        eventually(self._listens, within_s=20, what="nginx to listen")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)

    def _listens(self) -> bool:
        assert self.process.poll() is None, (self.directory / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def site(server: Server, port: int) -> str:
    """Return what `warmserve nginx` prints for *server*."""

    printed = warmserve(server, "nginx", "--listen", f"127.0.0.1:{port}")
    assert printed.returncode == 0, printed.stderr
    return printed.stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
