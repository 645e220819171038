import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mindrlhf.rewards.judges import accounting, chat_client


class Judge:
    """A local server that answers from a script of ``(status, content)`` and keeps what it was asked.

    The content of a reply is text, to be wrapped as a chat completion; bytes, sent as they are; or a function that
    makes either from the request's body. The last entry of the script is for all further requests.
    """

    def __init__(self):
        self.script: list = []
        self.requests: list = []
        self.lock = threading.Lock()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with judge.lock:
                    judge.requests.append((self.path, dict(self.headers), body))
                    status, content = judge.script.pop(0) if len(judge.script) > 1 else judge.script[0]
                if status == "hang":
                    time.sleep(content)
                    return
                if status == "drip":
                    self.drip(content)
                    return
                if callable(content):
                    content = content(body)
                self.send_response(200 if status == "short" else status)
                if status == 302:
                    self.send_header("Location", judge.url + "/elsewhere")
                if isinstance(content, str):
                    content = chat_reply(content)
                if status == "short":  # promises more than it sends
                    self.send_header("Content-Length", str(len(content) + 100))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def drip(self, pause_s):
                self.send_response(200)
                self.end_headers()
                for _ in range(100):
                    try:
                        self.wfile.write(b" ")
                        self.wfile.flush()
                    except OSError:
                        return
                    time.sleep(pause_s)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def chat_reply(content: str, **more) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}, **more}]}).encode()


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.01)
    accounting.take()
    server = Judge()
    yield server
    server.server.shutdown()
    server.server.server_close()
