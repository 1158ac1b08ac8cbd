import socketserver
import time
import urllib.request

from prometheus_client import CollectorRegistry

from paceline.telemetry import serve_metrics


def test_a_server_of_metrics_ends_at_once_however_rarely_its_loop_looks_up(monkeypatch) -> None:
    serve = socketserver.BaseServer.serve_forever
    monkeypatch.setattr(socketserver.BaseServer, "serve_forever", lambda server: serve(server, poll_interval=60))
    server = serve_metrics(CollectorRegistry(), "127.0.0.1:0", "trial")
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as page:
        assert b'service="trial"' in page.read()
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 30
