"""Boxes of arrays over TCP, for the processes of one run: read-only HTTP, alive while a restore goes on.

`GET /TOKEN?leaf=PATH&box=0:4,8:16` answers with the box's bytes, row-major, and their crc32 in a header. The token is random for
each server and goes to the other processes through jax.distributed alone: whoever does not know it gets 404 for everything.
"""

import contextlib
import hmac
import http.client
import http.server
import secrets
import socket
import socketserver
import threading
import urllib.parse
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from jaxmem.checkpoint.nearby_boxes import Box, shape_of

ReadBox = Callable[[str, Box], np.ndarray]  # (leaf's path, box) -> array; LookupError when it is not there
CHECKSUM = "X-Crc32"


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 1024  # all others connect at the same moment; past the default of 5 each waits a second or more
    daemon_threads = True

    def __init__(self, host: str, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), handler)

    def server_bind(self) -> None:
        """Without asking a name server for this machine's name, which can take long and is not needed."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


@contextlib.contextmanager
def serving(read: ReadBox, host: str) -> Iterator[str]:
    """Serve what `read` answers at the address `host` of this machine; yields `HOST:PORT/TOKEN`."""
    token = secrets.token_urlsafe(24)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            if not hmac.compare_digest(url.path.encode(), f"/{token}".encode()):
                self.send_error(404)
                return
            try:
                query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True, strict_parsing=True))
                raw = np.ascontiguousarray(read(query["leaf"], parse_box(query["box"]))).reshape(-1).view(np.uint8)
            except (ValueError, LookupError):
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(raw.size))
            self.send_header(CHECKSUM, f"{zlib.crc32(raw):08x}")
            self.end_headers()
            self.wfile.write(raw.data)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the address holds the token."""

    server = Server(host, Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="nearby-server", daemon=True)
    thread.start()
    try:
        yield f"{f'[{host}]' if ':' in host else host}:{server.server_port}/{token}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def fetch(address: str, path: str, box: Box, dtype: np.dtype, timeout_s: float = 120) -> np.ndarray:
    """The box from the process that serves at `address`. Raises OSError: unreachable, not there, or damaged on the way."""
    where, _, token = address.partition("/")
    query = urllib.parse.urlencode({"leaf": path, "box": text_of(box)})
    connection = http.client.HTTPConnection(where, timeout=timeout_s)  # no proxy is asked, whatever the environment says
    try:
        connection.request("GET", f"/{token}?{query}")
        answer = connection.getresponse()
        out = np.empty(shape_of(box), dtype)
        raw = out.reshape(-1).view(np.uint8)
        if answer.status != 200 or answer.length != raw.size:
            raise OSError(f"{where} answered {answer.status} with {answer.length} bytes for {raw.size} of {path}")
        got = 0
        while got < raw.size and (count := answer.readinto(raw[got:].data)):
            got += count
        if got != raw.size or f"{zlib.crc32(raw):08x}" != answer.headers[CHECKSUM]:
            raise OSError(f"{path} from {where} was damaged on the way: {got} of {raw.size} bytes, or another checksum")
        return out
    except http.client.HTTPException as error:
        raise OSError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def text_of(box: Box) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in box)


def parse_box(text: str) -> Box:
    bounds = [item.split(":") for item in text.split(",") if item]
    return tuple((int(start), int(stop)) for start, stop in bounds)
