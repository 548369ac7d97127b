"""A Hub in memory: what huggingface_hub's client needs to publish a model and to read it back.

It stands in the place of the client's network. Requests are kept as they came, so that a test can
look for what should not have been sent. A file is large, and goes by the LFS protocol, as on the
Hub: if its name says that it holds weights.
"""

import base64
import hashlib
import json
import re
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import huggingface_hub
import yaml
from huggingface_hub import constants
from huggingface_hub.utils import _http

HTTP = sys.modules[type(_http.default_client_factory()).__module__.partition(".")[0]]
"""The HTTP library of the client: httpx, or its successor."""
TOKEN, USER = "hf_of_the_tests", "tester"
_LARGE = re.compile(r"\.(safetensors|bin|pt|pth|model|h5)$")
_API = r"/api/models/(?P<repo>[^/]+/[^/]+)"


@dataclass
class Request:
    path: str
    headers: str
    body: bytes


@dataclass
class Commit:
    """A commit: its message and all files of the repository after it."""

    message: str
    files: dict[str, bytes]

    @property
    def oid(self):
        content = repr(sorted(self.files.items())) + self.message
        return hashlib.sha1(content.encode()).hexdigest()


@dataclass
class Repo:
    """A repository: the commits of each branch, and whether it is private."""

    private: bool
    branches: dict[str, list[Commit]]


@dataclass
class Fault:
    """Fails the next ``times`` requests whose method and path match.

    ``status`` is answered instead of doing what was asked. Without one the connection is cut:
    before it is done, or ``after``.
    """

    method: str
    pattern: str
    status: int | None = None
    times: int = 1
    after: bool = False

    def meets(self, method, path):
        return self.times > 0 and method == self.method and bool(re.search(self.pattern, path))


@dataclass
class Hub:
    """The state of the server, which tests read and set."""

    repos: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # by SHA-256
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)  # commits wait while it is clear

    def __post_init__(self):
        self.hold.set()

    def add(self, repo, files, branch="main"):
        made = self.repos.setdefault(repo, Repo(False, {}))
        before = made.branches.setdefault(branch, [Commit("initial commit", {})])
        before.append(Commit("by hand", before[-1].files | files))

    def files(self, repo, branch="main"):
        return self.repos[repo].branches[branch][-1].files

    def messages(self, repo, branch="main"):
        return [commit.message for commit in self.repos[repo].branches[branch][1:]]

    def sent(self):
        """Returns all that the client has sent, uploads in JSON decoded."""
        parts = []
        for request in self.requests:
            parts += [request.path.encode(), request.headers.encode(), request.body]
            parts += map(base64.b64decode, re.findall(rb'"content": "([\w+/=]+)"', request.body))
            parts += map(base64.b64decode, re.findall(rb'"sample":\s*"([\w+/=]+)"', request.body))
        return b"\n".join(parts)


@contextmanager
def serve_as_the_hub(monkeypatch):
    """Gives huggingface_hub's client a Hub for the real one; it never waits to retry."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http, "time", _NoWaiting())
    hub = Hub()
    huggingface_hub.set_client_factory(partial(_client, hub))
    yield hub
    hub.hold.set()
    huggingface_hub.set_client_factory(_http.default_client_factory)


def _client(hub):
    usual, transport = _http.default_client_factory(), HTTP.MockTransport(_Handler(hub))
    return HTTP.Client(
        transport=transport, event_hooks=usual.event_hooks, follow_redirects=usual.follow_redirects
    )


class _NoWaiting:
    sleep = staticmethod(lambda seconds: None)
    time, monotonic, perf_counter = time.time, time.monotonic, time.perf_counter


class _Refused(Exception):
    def __init__(self, status, code, message, **headers):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


class _Handler:
    """One request: looks for a fault, then for the route, then answers."""

    def __init__(self, hub):
        self.hub = hub

    def __call__(self, request):
        path, body = request.url.raw_path.decode(), request.content
        self.hub.requests.append(Request(path, str(dict(request.headers)), body))
        fault = next((f for f in self.hub.faults if f.meets(request.method, path)), None)
        if fault is not None:
            fault.times -= 1
            if fault.status is not None:
                return HTTP.Response(fault.status, json={"error": "out of order"})
            if not fault.after:
                raise HTTP.RemoteProtocolError("Server disconnected")
        try:
            token = request.headers.get("Authorization")
            status, content, headers = self._route(request.method, path, token, body)
        except _Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
            headers |= refused.headers
            status, content = refused.status, {"error": str(refused)}
        if fault is not None:
            raise HTTP.RemoteProtocolError("Server disconnected")
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Length": str(len(data))} | headers
        sent = b"" if request.method == "HEAD" else data
        return HTTP.Response(status, headers=headers, content=sent)

    def _route(self, asked, path, token, body):
        path = path.partition("?")[0]
        if match := re.fullmatch(r"/large/(?P<oid>\w{64})", path):  # signed elsewhere, no token
            if hashlib.sha256(body).hexdigest() != match["oid"]:
                raise _Refused(400, "BadDigest", "not the content that was announced")
            self.hub.large[match["oid"]] = body
            return 200, {}, {}
        if token != f"Bearer {TOKEN}":
            raise _Refused(401, "", "Invalid username or password.")
        routes = {
            ("POST", "/api/repos/create"): self._create,
            ("POST", "/api/validate-yaml"): self._validate,
            ("POST", rf"{_API}/preupload/(?P<branch>.+)"): self._preupload,
            ("POST", r"/(?P<repo>.+)\.git/info/lfs/objects/batch"): self._batch,
            ("POST", rf"{_API}/commit/(?P<branch>.+)"): self._commit,
            ("GET", rf"{_API}/tree/(?P<branch>[^/]+)"): self._tree,
            ("GET", rf"{_API}(/revision/(?P<branch>.+))?"): self._info,
            ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<branch>[^/]+)/(?P<name>.+)"): self._file,
            ("HEAD", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<branch>[^/]+)/(?P<name>.+)"): self._file,
        }
        for (method, pattern), answer in routes.items():
            match = re.fullmatch(pattern, path)
            if match and method == asked:
                return answer(body, **match.groupdict())
        raise _Refused(404, "", f"{asked} {path} is not known here")

    def _head(self, repo, branch):
        if repo not in self.hub.repos:
            raise _Refused(404, "RepoNotFound", f"{repo} does not exist")
        commits = self.hub.repos[repo].branches
        for branch_commits in commits.values():
            for i, commit in enumerate(branch_commits):
                if commit.oid == branch:
                    return branch_commits[: i + 1]
        if (branch or "main") not in commits:
            raise _Refused(404, "RevisionNotFound", f"{branch} does not exist")
        return commits[branch or "main"]

    def _create(self, body):
        asked = json.loads(body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        url = {"url": f"{constants.ENDPOINT}/{name}", "name": name, "id": name}
        if name in self.hub.repos:
            return 409, url | {"error": "You already created this model repo"}, {}
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        first = Commit("initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.hub.repos[name] = Repo(private, {"main": [first]})
        return 200, url, {}

    def _validate(self, body):
        content = json.loads(body)["content"]
        errors = metadata_errors(content)
        wrong = [{"message": error} for error in errors]
        return (400 if errors else 200), {"errors": wrong, "warnings": []}, {}

    def _preupload(self, body, repo, branch):
        there = self._head(repo, branch)[-1].files
        files = []
        for asked in json.loads(body)["files"]:
            name, old = asked["path"], there.get(asked["path"])
            mode = "lfs" if _LARGE.search(name) else "regular"
            oid = None if old is None else _oid(old, mode)
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {"files": files}, {}

    def _batch(self, body, repo):
        self._head(repo, None)
        objects = []
        for asked in json.loads(body)["objects"]:
            actions = {"upload": {"href": f"{constants.ENDPOINT}/large/{asked['oid']}"}}
            known = {} if asked["oid"] in self.hub.large else {"actions": actions}
            objects.append(asked | known)
        return 200, {"transfer": "basic", "objects": objects}, {}

    def _commit(self, body, repo, branch):
        self.hub.hold.wait(30)
        commits = self._head(repo, branch)
        files, message = dict(commits[-1].files), ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.large:
                    raise _Refused(400, "", f"{value['path']} was never uploaded")
                files[value["path"]] = self.hub.large[value["oid"]]
            else:
                raise _Refused(400, "", f"{line['key']} is not done here")
        commits.append(Commit(message, files))
        oid = commits[-1].oid
        url = f"{constants.ENDPOINT}/{repo}/commit/{oid}"
        return 200, {"commitUrl": url, "commitOid": oid, "pullRequestUrl": None}, {}

    def _tree(self, body, repo, branch):
        files = self._head(repo, branch)[-1].files
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": _oid(data, "regular")}
            for name, data in sorted(files.items())
        ]
        return 200, entries, {}

    def _info(self, body, repo, branch):
        head = self._head(repo, branch)[-1]
        siblings = [{"rfilename": name} for name in sorted(head.files)]
        return 200, {"id": repo, "sha": head.oid, "siblings": siblings, "tags": []}, {}

    def _file(self, body, repo, branch, name):
        head = self._head(repo, branch)[-1]
        headers = {"X-Repo-Commit": head.oid}
        if name not in head.files:
            raise _Refused(404, "EntryNotFound", f"{name} does not exist", **headers)
        data = head.files[name]
        return 200, data, headers | {"ETag": f'"{_oid(data, "regular")}"'}


def _oid(data, mode):
    if mode == "lfs":
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def metadata_errors(card):
    """Says what the Hub would refuse in the metadata of a card, as far as that is documented."""
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    if match is None:
        return ["no metadata"]
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return [f"no YAML: {error}"]
    name = r"[\w.-]+(/[\w.-]+)?"
    texts = {
        **{"library_name": r"[a-z_-]+", "license": r"[a-z0-9.-]+", "pipeline_tag": r"[a-z0-9-]+"},
        "base_model_relation": r"adapter|finetune|merge|quantized",
    }
    lists = {"tags": r".+", "base_model": name, "datasets": name}
    lists["language"] = r"[a-z]{2,3}|multilingual|code"
    nested = {"differential_privacy": dict, "model-index": list}

    def is_valid(key, value):
        if key in nested:
            return isinstance(value, nested[key])
        values = value if isinstance(value, list) and key in lists else [value]
        return all(isinstance(v, str) and re.fullmatch((texts | lists)[key], v) for v in values)

    known = texts.keys() | lists.keys() | nested.keys()
    errors = [f"{key} is unknown" for key in data.keys() - known]
    wrong = (key for key in data.keys() & known if not is_valid(key, data[key]))
    return errors + [f"{key}: {data[key]!r} is not valid" for key in wrong]
