"""States on the hub: the real client against a local stand-in of the service."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import fata
from fata.testing.cases import images, network

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")

BATCHES = images(24, seed=1).split(8)


def adapted(spec="sar+fata"):
    return fata.adapt(network("resnet_gn"), spec, lr=0.05)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as an upload and a download of a small file need."""

    files: dict[str, bytes]
    repos: set[str]

    def log_message(self, *_):
        pass

    def reply(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self):
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):  # chunked
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_POST(self):
        body = self.body()
        if self.path.endswith("/repos/create"):
            asked = json.loads(body)
            assert asked.get("private") or asked.get("visibility") == "private"
            self.repos.add(asked["name"])
            self.reply({"url": f"http://{self.headers['Host']}/someone/{asked['name']}"})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            self.reply(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for f in asked
                    ]
                }
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.files[line["value"]["path"]] = content
            url = f"http://{self.headers['Host']}/someone/states/commit/{'0' * 40}"
            self.reply({"success": True, "commitOid": "0" * 40, "commitUrl": url})
        else:
            self.reply({}, 404)

    def do_GET(self):
        name = self.path.partition("/resolve/")[2].partition("/")[2].partition("?")[0]
        if name not in self.files:
            self.reply({}, 404, **{"X-Error-Code": "EntryNotFound"})
            return
        content = self.files[name]
        tag = hashlib.sha1(content).hexdigest()
        self.reply(content, ETag=f'"{tag}"', **{"X-Repo-Commit": "0" * 40})

    def do_HEAD(self):
        self.do_GET()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The client of the hub talks to a server of this process."""
    import huggingface_hub
    from huggingface_hub import constants

    handler = type("Own", (Hub,), {"files": {}, "repos": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    download = huggingface_hub.hf_hub_download
    api = huggingface_hub.HfApi
    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda *a, **k: download(*a, **k, cache_dir=tmp_path / "cache", endpoint=url),
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **k: api(endpoint=url, **k))
    try:
        yield handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_state_goes_up_and_down(hub):
    ours = adapted()
    for batch in BATCHES[:2]:
        ours(batch)
    commit = ours.push_to_hub("someone/states", "camera-7.safetensors", token="hf_x")
    assert commit.endswith("0" * 40)
    assert hub.repos == {"states"}
    theirs = adapted()
    theirs.from_hub("someone/states", "camera-7.safetensors", token="hf_x")
    assert torch.equal(theirs(BATCHES[2]), ours(BATCHES[2]))
    assert theirs.counts == ours.counts


def test_a_file_says_whose_it_is_and_another_adapter_does_not_take_it(hub):
    ours = adapted()
    ours(BATCHES[0])
    ours.push_to_hub("someone/states", token="hf_x")
    content = hub.files["state.safetensors"]
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    meta = json.loads(header["__metadata__"]["meta"])
    assert meta["method"]["name"] == "sar"
    assert meta["source"]
    assert meta["format"]
    other = adapted("tent")
    with pytest.raises(fata.StateError, match="sar"):
        other.from_hub("someone/states", token="hf_x")
    assert other.counts["seen"] == 0
