"""Counts visits in files, as a script of an afternoon does: it reads, thinks for a moment, and writes."""

import argparse
import pathlib
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--listen", default="127.0.0.1:9001")
parser.add_argument("--folder", default=".", type=pathlib.Path)
args = parser.parse_args()


class Counter(BaseHTTPRequestHandler):
    def do_POST(self):
        name = self.path[len("/counter/") :]
        if not name.isalnum():
            return self.send_error(404)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        file = args.folder / name
        count = int(file.read_text() or 0) if file.exists() else 0
        time.sleep(0.002)
        file.write_text(str(count + 1))
        body = f'{{"count": {count + 1}}}\n'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128


host, port = args.listen.rsplit(":", 1)
server = Server((host, int(port)), Counter)
print(f"listening on http://{host}:{server.server_port}", flush=True)
server.serve_forever()
