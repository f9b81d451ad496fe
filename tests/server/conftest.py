"""A server that speaks as much of vLLM's HTTP interface as hitproof uses, and fails on demand."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

BLOCK = 4


class FakeServer:
    """Caches every whole block of every prompt for good; ``fail`` names what goes wrong."""

    def __init__(self):
        self.version = "0.32.0"
        self.max_model_len = 256
        self.labels = {
            "block_size": str(BLOCK),
            "num_gpu_blocks": "100",
            "enable_prefix_caching": "True",
            "prefix_cache_retention_interval": "None",
            "engine": "0",
            "odd": 'a"b\\c',
        }
        self.engines = 1
        self.scheduler = None
        self.resettable = True
        self.hides = False
        self.forgets = False
        self.running = 0
        self.late = 0
        self.stranger = 0
        self.miscounts = 0
        self.fail = {}
        self.cached = set()
        self.queries = self.hits = 0
        self.bodies = []

    def complete(self, body):
        """The cached tokens of one request."""
        self.bodies.append(body)
        ids, salt = body["prompt"], body.get("cache_salt")
        hit = 0
        while hit + BLOCK < len(ids) and (salt, tuple(ids[: hit + BLOCK])) in self.cached:
            hit += BLOCK
        if not self.forgets:
            self.cached |= {(salt, tuple(ids[:end])) for end in range(BLOCK, len(ids) + 1, BLOCK)}
        self.queries += len(ids) + self.stranger
        self.hits += hit + self.miscounts
        self.stale = self.late
        return hit

    def metrics(self):
        """The text of /metrics; the counters of the last request show after ``late`` looks."""
        if getattr(self, "stale", 0) > 0:
            self.stale -= 1
            queries, hits = self.shown
        else:
            queries, hits = self.shown = self.queries, self.hits
        lines = ["# HELP vllm:cache_config_info x"]
        for engine in range(self.engines):
            labels = self.labels | {"engine": str(engine)}
            text = ",".join(
                '{}="{}"'.format(k, v.replace("\\", "\\\\").replace('"', '\\"')) for k, v in labels.items()
            )
            lines.append(f"vllm:cache_config_info{{{text}}} 1.0")
        lines += [
            f'vllm:prefix_cache_queries_total{{engine="0"}} {queries}.0',
            f'vllm:prefix_cache_hits_total{{engine="0"}} {hits:e}',
            f'vllm:num_requests_running{{engine="0"}} {self.running}.0',
            'vllm:num_requests_waiting{engine="0"} 0.0',
        ]
        return "\n".join(lines) + "\n"


def handler_of(fake):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def send(self, status, body, kind="application/json"):
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def failed(self):
            path = self.path.partition("?")[0]
            how = fake.fail.get(path)
            if how is None:
                return False
            if how == "hang":
                time.sleep(1.5)
            if how in ("hang", "die"):
                self.close_connection = True
                self.connection.close()
            elif isinstance(how, str):
                self.send(200, how)
            else:
                self.send(how, {"error": {"message": "it went wrong"}})
            return True

        def do_GET(self):
            if self.failed():
                return
            path = self.path.partition("?")[0]
            if path == "/version":
                self.send(200, {"version": fake.version})
            elif path == "/v1/models":
                self.send(200, {"data": [{"id": "tiny", "max_model_len": fake.max_model_len}]})
            elif path == "/metrics":
                self.send(200, fake.metrics(), "text/plain")
            elif path == "/server_info" and fake.scheduler is not None:
                self.send(200, {"vllm_config": {"scheduler_config": fake.scheduler}})
            else:
                self.send(404, {"detail": "Not Found"})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            if self.failed():
                return
            if self.path == "/reset_prefix_cache":
                if fake.resettable:
                    fake.cached.clear()
                self.send(200 if fake.resettable else 404, {"success": True})
                return
            hit = fake.complete(body)
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            if not fake.hides:
                usage["prompt_tokens_details"] = {"cached_tokens": hit}
            only = body.get("allowed_token_ids", [9])
            choice = {"text": "", "token_ids": only * body["max_tokens"]}
            if not body.get("stream"):
                self.send(200, {"choices": [choice], "usage": usage})
                return
            events = [{"choices": [choice], "usage": None}, {"choices": [], "usage": usage}]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self.send(200, "".join([*lines, "data: [DONE]\n\n"]), "text/event-stream")

    return Handler


@pytest.fixture
def fake():
    """A fake server that runs; ``url`` is where."""
    server = FakeServer()
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(server))
    listening.daemon_threads = True
    server.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    listening.shutdown()
    listening.server_close()
