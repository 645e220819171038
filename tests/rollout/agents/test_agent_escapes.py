"""Agents that are processes, and go after what is another's or is not to be trained: real ones, in their own spaces."""

import json

import pytest
from agent_fakes import CHAT, END, TOKENIZER, Engine, decoded, prompt

from mindrlhf.config.reward import ToolSection
from mindrlhf.rollout.agents import source as source_module
from mindrlhf.rollout.agents.source import AgentEpisodes
from mindrlhf.rollout.types import SamplingParams
from mindrlhf.sandbox.server import active_layers

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif("namespaces" not in active_layers(), reason="this system allows no namespaces"),
]
SECRET = "told to the victim alone"
KEYS = [f"key-{number}-{'x' * 37}" for number in range(3)]
# Each attack returns what it has found; it is looked through for the victim's key and secret.
AGENT = r"""
import ctypes, glob, json, os, re, signal, socket, subprocess, sys, time, urllib.error, urllib.request

def ask(url, key, text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as response:
            return json.loads(response.read())["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code

def read(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode(errors="replace")
    except OSError as error:
        return type(error).__name__

def memory(pid):
    found = []
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
            for line in maps.read().splitlines():
                span, rights, *_ = line.split()
                if rights.startswith("rw") and "[v" not in line:
                    first, last = (int(part, 16) for part in span.split("-"))
                    try:
                        mem.seek(first)
                        found += re.findall(rb"key-\d-x{37}|told to the [v]ictim alone", mem.read(last - first))
                    except OSError:
                        pass
    except OSError as error:
        return type(error).__name__
    return sorted({one.decode() for one in found})

def sockets():
    found = [os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.islink(path)]
    return [one for one in found if one.startswith("socket")] + read("/proc/net/unix").splitlines()[1:]

def ports(own):
    found = []
    for line in read("/proc/net/tcp").splitlines()[1:]:
        port = int(line.split()[1].split(":")[1], 16)
        found += [] if port == own else [port]
    return found

def lie_in_wait(url, key):
    if os.fork() == 0:
        os.setsid()
        while os.getppid() != 1:
            time.sleep(0.001)
        for _ in range(1000):
            ask(url, key, "left behind")
        os._exit(0)
    return []

def links():
    return [read(f"/proc/1/{name}/{os.getcwd()}/../{one}/record.json") for name in ("root", "cwd") for one in
            os.listdir("..")]

def libc(name, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    return "opened" if getattr(library, name)(*arguments) >= 0 else os.strerror(ctypes.get_errno())

def opened(path, flags):
    try:
        os.close(os.open(path, flags))
    except OSError as error:
        return error.strerror
    return f"opened {path}"

def vector(address):
    return ctypes.byref((ctypes.c_size_t * 2)(address, 64))

def handles():
    handle, mount = ctypes.create_string_buffer(b"\x80\0\0\0" + bytes(132)), ctypes.c_int()
    found = libc("name_to_handle_at", -100, b"/tmp", handle, ctypes.byref(mount), 0).replace("opened", "named")
    return [found, libc("open_by_handle_at", os.open("/", os.O_RDONLY), handle, os.O_RDONLY)]

def mounts():
    parent = os.path.dirname(os.getcwd()).encode()
    unshared = libc("unshare", 0x10020000).replace("opened", "has spaces")  # of users and mounts
    return [unshared, libc("umount2", parent, 2), libc("mount", b"/tmp", os.getcwd().encode(), None, 4096, None)]

def kill_all():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for pid, number in ((-1, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGKILL), (1, signal.SIGSTOP)):
        try:
            os.kill(pid, number)
        except OSError:
            pass
    return []

def links_of_its_own():
    for number, target in enumerate(("..", "/proc/1/root", "/proc/1/cwd", *glob.glob("/tmp/*"))):
        os.symlink(target, f"link{number}")
    found = {(read(f"{one}/record.json"), opened(f"{one}/new", os.O_CREAT | os.O_WRONLY)) for one in glob.glob("link*")}
    return sorted(found)  # a machine may have thousands of files in /tmp

ATTACKS = {
    "ptrace": lambda r, u, k: [libc("ptrace", 16, pid, 0, 0) for pid in (1, os.getppid())],
    "memory of the first process by an address of its own": lambda r, u, k: [
        libc("process_vm_readv", 1, vector(id(bytearray(64))), 1, vector(id(json)), 1, 0)],
    "descriptors of the first process": lambda r, u, k: [
        libc("syscall", 438, os.pidfd_open(1), fd, 0) for fd in range(64)],
    "spaces of the first process": lambda r, u, k: [
        opened(f"/proc/1/ns/{one}", os.O_RDONLY) for one in ("mnt", "net", "user", "pid")],
    "mounts in spaces of its own": lambda r, u, k: [mounts(), *glob.glob("../*/*")],
    "files by their handles": lambda r, u, k: handles(),
    "devices of disks and memory": lambda r, u, k: [
        opened(one, os.O_RDONLY) for one in glob.glob("/dev/**", recursive=True) if not os.path.isdir(one)
        and os.path.realpath(one) not in [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
        and not os.path.realpath(one).startswith("/proc")],
    "the kernel's settings": lambda r, u, k: [
        opened(f"/proc/{one}", os.O_WRONLY) for one in ("sysrq-trigger", "sys/kernel/core_pattern", "1/mem")],
    "signals to all": lambda r, u, k: kill_all(),
    "links in its directory": lambda r, u, k: links_of_its_own(),
    "memory of its own, and so of its starter": lambda r, u, k: memory("self"),
    "memory of the first process": lambda r, u, k: memory(1),
    "memory and words of all processes": lambda r, u, k: [
        (memory(pid), read(f"/proc/{pid}/environ"), read(f"/proc/{pid}/cmdline"))
        for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()],
    "environment": lambda r, u, k: [*os.environ.values()],
    "directories beside its own": lambda r, u, k: [os.listdir(".."), *map(read, glob.glob("../*/*"))],
    "directories by links of processes": lambda r, u, k: links(),
    "sockets that are open": lambda r, u, k: sockets(),
    "other ports": lambda r, u, k: ports(int(u.split(":")[2].split("/")[0])),
    "its record": lambda r, u, k: [r, glob.glob("*"), sys.stdin.read()],
    "the key of the victim": lambda r, u, k: [ask(u, other, "forged") for other in r["keys"] if other != k],
    "the key of an episode that has ended": lambda r, u, k: [ask(u, r["keys"][0], "forged")] * 1,
    "a process that it leaves behind": lambda r, u, k: lie_in_wait(u, k),
}

def agent(record, url, key):
    if record["question"] == "first":
        return 1
    if record["question"] == "attack":
        found = ATTACKS[record["name"]](record, url, key)
        ask(url, key, "finished")
        return {"reward": 1.0, "text": json.dumps(found)}
    assert ask(url, key, "victim") == "ok"
    while ask(url, key, "again") != "over":
        time.sleep(0.01)
    return 1.0
"""
ATTACKS = [line.split('"')[1] for line in AGENT.splitlines() if line.startswith('    "') and "lambda r, u, k" in line]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_agent_gets_nothing_of_another_and_forges_nothing(name, tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(AGENT)
    keys = iter(KEYS)
    monkeypatch.setattr(source_module.secrets, "token_urlsafe", lambda size: next(keys))
    said = []

    def reply(text):
        said.append(text)
        is_again = "again" in text
        return "over" if is_again and any("finished" in one for one in said) else "ok"

    tools = ToolSection(agent=f"{tmp_path / 'agent.py'}:agent", agent_gather_s=0.02, agent_timeout_s=60, max_turns=5000)
    requests = [prompt("first", 0), prompt("victim", 1), prompt("attack", 2)]
    for request in requests:
        request.extra["name"] = name if request.request_id == 2 else SECRET
        request.extra["keys"] = KEYS if "key of" in name else []
    with AgentEpisodes(Engine(reply), TOKENIZER, CHAT, tools, 1000) as source:
        sampling = SamplingParams(4000, stop_token_ids=(END,))
        list(source.generate(requests[:1], sampling))
        found = {one.request_id: one for one in source.generate(requests[1:], sampling)}
    victim, own = found[1], found[2]
    assert victim.agent.failure == own.agent.failure == "" and own.episode_return == 1.0
    prompts = {decoded(one.prompt_ids).split("<|im_start|>user\n")[1].split("<")[0] for one in victim.agent.sequences}
    assert prompts == {"victim", "again"}, "the victim's calls are its own"
    assert [decoded(one.token_ids) for one in own.agent.sequences] == ["ok<|im_end|>"]
    text = own.agent.text
    assert not any(one in text for one in (SECRET, "answer", "opened", *KEYS[:2])), text
    statuses = {"the key of the victim": [401, 403], "the key of an episode that has ended": [401]}.get(name, [])
    assert (KEYS[2] in text) == (name == "environment" or name.startswith("memory of its own"))  # it looks in earnest
    assert own.agent.num_refused == len(statuses) and (json.loads(text) == statuses or not statuses)
    assert not any("forged" in one or "left behind" in one for one in said)
