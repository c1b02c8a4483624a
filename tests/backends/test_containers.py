"""Engines in containers: the client's argv compared whole, and the life of one with a stand-in for docker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from backends import container_options, containers
from backends.base import SubprocessBackend
from backends.llama_server import LlamaServer
from backends.vllm import Vllm, VllmCuda, VllmRocm
from orchestrator import container_client, hf_model, home, leftovers, profile
from orchestrator.backend import Binary, Command, Plan, State
from orchestrator.errors import BinaryMissing, ExitedEarly, ProfileError, StartError, StopFailed
from orchestrator.hardware import choose, detect
from orchestrator.profile import ModelSpec, Profile
from orchestrator.profile_schema import Container
from tests import hf_models
from tests.backends.conftest import Recorder, alive
from tests.backends.test_leftovers import OWNER
from tests.backends.test_vllm_command import ALWAYS
from tests.fakes import until
from tests.hardware import captured

DOCKER = Path(__file__).parent.parent / "fakes" / "docker.py"
CARD = "GPU-644950a4e5f60a09"


# -- argv -------------------------------------------------------------------------------------------


class Case:
    """A vLLM in a container, planned for a captured machine."""

    def __init__(self, engine: type[Vllm], root: Path, machine: str, folder: Path | None = None, **keys: Any):
        found = detect(captured.unfold(machine, root / "machine"), captured.Programs(captured.load(machine)))
        self.folder = folder or hf_models.tiny(root / "model")
        settings = {"name": "m", "model": ModelSpec(hf=str(self.folder)), "backend": engine.name, **keys}
        self.profile = Profile(**settings)
        words = containers.command_of(self.profile)
        assert words is not None
        self.engine = engine(
            self.profile, environ={"PATH": "/usr/bin", "ORCHESTRATOR_HOME": str(root / "home")}
        )
        device, gpus = self.profile.device, self.profile.gpus
        self.plan = Plan(
            profile=self.profile,
            backend=engine.name,
            binary=Binary((f"/usr/bin/{words[0]}", *words[1:]), "the profile's `command`"),
            model_path=self.folder,
            model_id="m",
            header=hf_model.read(self.folder),
            context=2048,
            context_source="the profile",
            slots=1,
            device=choose(found, device, gpus, supported=frozenset({engine.kind}), environ={}),
            host=containers.host(words),
        )

    def command(self) -> Command:
        return self.engine.prepared(self.plan, 9001, "0123456789abcdef")

    def options(self) -> list[str]:
        """Return the client's words between ``run`` and the image."""
        argv = list(self.command().argv)
        assert argv[1] == "run"
        return argv[2 : argv.index(self.profile.container.image if self.profile.container else "image")]


def values(argv: list[str] | tuple[str, ...], flag: str) -> list[str]:
    return [argv[at + 1] for at, word in enumerate(argv) if word == flag]


def test_short_form_gives_one_card_the_model_and_loopback_good(tmp_path: Path) -> None:
    case = Case(
        VllmRocm, tmp_path, "rx7800xt-then-9950x", container=Container(image="vllm/vllm-openai-rocm"),
        env={"HF_TOKEN": "hf_secret"},
    )  # fmt: skip
    command = case.command()
    argv = list(command.argv)
    share = values(argv, "--gpu-memory-utilization")[0]
    groups = [container_options.group(name) for name in ("video", "render")]
    assert argv == [
        *("/usr/bin/docker", "run", "--name", "orchestrator-m-0123456789ab"),
        *("--label", "orchestrator.launch=0123456789abcdef"),
        *("--label", f"orchestrator.home={tmp_path / 'home'}"),
        *("--publish", "127.0.0.1:9001:9001", "--rm", "--init", "--log-driver", "none", "--ipc", "host"),
        *("--device", "/dev/kfd", "--device", "/dev/dri/renderD128"),
        *("--group-add", groups[0], "--group-add", groups[1]),
        *("--mount", f"type=bind,source={case.folder},target={case.folder},readonly"),
        *("--env", "DO_NOT_TRACK", "--env", "HF_HUB_OFFLINE", "--env", "HF_TOKEN"),
        *("--env", "HIP_VISIBLE_DEVICES", "--env", "PYTHONUNBUFFERED", "--env", "ROCR_VISIBLE_DEVICES"),
        *("--env", "TRANSFORMERS_OFFLINE", "--env", "VLLM_API_KEY", "--env", "VLLM_NO_USAGE_STATS"),
        *("vllm/vllm-openai-rocm", str(case.folder), "--served-model-name", "m"),
        *("--host", "0.0.0.0", "--port", "9001", "--max-model-len", "2048", "--max-num-seqs", "1"),
        *("--gpu-memory-utilization", share, "--kv-cache-dtype", "auto", "--dtype", "auto"),
        *ALWAYS,
    ]  # fmt: skip
    assert command.env["ROCR_VISIBLE_DEVICES"] == CARD
    assert command.env["HIP_VISIBLE_DEVICES"] == "0"
    assert command.env["HF_TOKEN"] == "hf_secret"
    assert command.stop == ("/usr/bin/docker", "stop", "-t", "10", "orchestrator-m-0123456789ab")
    assert command.clean[-3:] == ("0123456789abcdef", "15.0", "/usr/bin/docker")


GROUP_NUMBERS = [
    word for name in ("video", "render") for word in ("--group-add", container_options.group(name))
]
DEVICES: dict[tuple[str, str, str], list[str]] = {
    ("rx7800xt-then-9950x", "rocm", "docker"): [
        *("--device", "/dev/kfd", "--device", "/dev/dri/renderD128", *GROUP_NUMBERS)
    ],
    ("rx7800xt-then-9950x", "rocm", "podman"): [
        *("--device", "/dev/kfd", "--device", "/dev/dri/renderD128", "--group-add", "keep-groups")
    ],
    ("rx7800xt-then-9950x", "vulkan", "docker"): ["--device", "/dev/dri/renderD128", *GROUP_NUMBERS],
    ("rx7800xt-then-9950x", "vulkan", "podman"): [
        *("--device", "/dev/dri/renderD128", "--group-add", "keep-groups")
    ],
    ("two-rx7900xtx", "rocm", "docker"): [
        *("--device", "/dev/kfd", "--device", "/dev/dri/renderD129", "--device", "/dev/dri/renderD128"),
        *GROUP_NUMBERS,
    ],
    ("two-quadro-rtx4000", "cuda", "docker"): ["--gpus", '"device={0},{1}"'],
    ("two-quadro-rtx4000", "cuda", "podman"): [
        "--device",
        "nvidia.com/gpu={0}",
        "--device",
        "nvidia.com/gpu={1}",
    ],
    ("two-quadro-rtx4000", "cuda", "nerdctl"): ["--gpus", '"device={0},{1}"'],
    ("nothing", "cpu", "docker"): [],
    ("nothing", "cpu", "podman"): [],
}


@pytest.mark.parametrize(("machine", "kind", "runtime"), DEVICES, ids=str)
def test_every_device_is_given_as_its_client_wants_it_good(
    tmp_path: Path, machine: str, kind: str, runtime: str
) -> None:
    found = detect(captured.unfold(machine, tmp_path / "machine"), captured.Programs(captured.load(machine)))
    device = choose(found, kind, supported=frozenset({kind}), environ={})  # type: ignore[arg-type]
    model = hf_models.tiny(tmp_path / "model")
    plan = SimpleNamespace(
        device=device, model_path=model, mmproj_path=None, lora_paths=(), chat_template_path=None
    )
    options = list(container_options.options(plan, Container(image="i", runtime=runtime)))  # type: ignore[arg-type]
    ids = [gpu.id for gpu in device.gpus]
    assert options == [
        *("--rm", "--init"),
        *([] if runtime == "nerdctl" else ["--log-driver", "none"]),
        *("--ipc", "host"),
        *(word.format(*ids) for word in DEVICES[machine, kind, runtime]),
        *("--mount", f"type=bind,source={model},target={model},readonly"),
    ]


def test_podman_shares_memory_of_its_own_and_keeps_the_users_groups_good(tmp_path: Path) -> None:
    wish = Container(image="i", runtime="podman", shm_size="16g", args=("--security-opt=label=disable",))
    case = Case(VllmRocm, tmp_path, "rx7800xt-then-9950x", container=wish)
    options = case.options()
    assert values(options, "--shm-size") == ["16g"]
    assert "--ipc" not in options
    assert values(options, "--group-add") == ["keep-groups"]
    assert options[-1] == "--security-opt=label=disable"


def test_only_the_chosen_card_of_two_is_given_good(tmp_path: Path) -> None:
    case = Case(VllmRocm, tmp_path, "two-rx7900xtx", container=Container(image="i"), gpus=(1,))
    (card,) = case.plan.device.gpus
    assert values(case.options(), "--device") == ["/dev/kfd", f"/dev/dri/{card.render_node}"]
    both = Case(VllmRocm, tmp_path / "both", "two-rx7900xtx", container=Container(image="i"))
    assert len(values(both.options(), "--device")) == 3


def test_a_card_without_an_id_counts_from_nought_inside_good(tmp_path: Path) -> None:
    """It is the only one there, whatever its number is outside."""
    case = Case(VllmRocm, tmp_path, "rx6700xt-without-id", container=Container(image="i"))
    assert case.command().env["HIP_VISIBLE_DEVICES"] == "0"
    chosen = Case(
        VllmRocm, tmp_path / "b", "rx6700xt-without-id", container=Container(image="i"),
        env={"HIP_VISIBLE_DEVICES": "3"},
    )  # fmt: skip
    assert chosen.command().env["HIP_VISIBLE_DEVICES"] == "3"


def test_nvidia_cards_are_given_by_uuid_good(tmp_path: Path) -> None:
    case = Case(VllmCuda, tmp_path, "two-quadro-rtx4000", container=Container(image="i"))
    ids = [gpu.id for gpu in case.plan.device.gpus]
    assert values(case.options(), "--gpus") == [f'"device={",".join(ids)}"']  # the client reads it as CSV
    assert "--device" not in case.options()
    wish = Container(image="i", runtime="podman")
    podman = Case(VllmCuda, tmp_path / "podman", "two-quadro-rtx4000", container=wish)
    assert values(podman.options(), "--device") == [f"nvidia.com/gpu={each}" for each in ids]


def test_files_are_mounted_where_they_are_and_links_lead_on_good(tmp_path: Path) -> None:
    """A snapshot in Hugging Face's cache is a folder of links; a path may hold commas."""
    made = hf_models.tiny(tmp_path / "made")
    snapshot, blobs = tmp_path / "hub, mine" / "snapshots" / "rev", tmp_path / "hub, mine" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(made.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "inside").symlink_to("config.json")
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    case = Case(VllmRocm, tmp_path, "rx7800xt-then-9950x", snapshot, container=Container(image="i"))
    case.plan = replace(case.plan, chat_template_path=template)
    mounted = values(case.options(), "--mount")
    assert mounted[0] == f'type=bind,"source={snapshot}","target={snapshot}",readonly'
    assert f'type=bind,"source={blobs / "0"}","target={blobs / "0"}",readonly' in mounted
    assert mounted[-1] == f"type=bind,source={template},target={template},readonly"
    assert len(mounted) == 2 + len(list(blobs.iterdir()))


def test_own_command_in_the_hosts_network_stays_on_loopback_good(tmp_path: Path) -> None:
    words = ("docker", "run", "--rm", "--network=host", "--device=/dev/kfd", "image")
    case = Case(VllmRocm, tmp_path, "rx7800xt-then-9950x", command=words)
    command = case.command()
    assert values(command.argv, "--host") == ["127.0.0.1"]
    assert "--publish" not in command.argv
    assert case.options()[-3:] == ["--rm", "--network=host", "--device=/dev/kfd"]
    assert values(command.argv, "--env").count("VLLM_API_KEY") == 1
    assert not {"--mount", "--ipc", "--group-add"} & set(case.options())


def test_own_command_may_name_and_publish_itself_good(tmp_path: Path) -> None:
    words = ("docker", "container", "run", "--name", "mine", "-p", "127.0.0.1:{port}:{port}", "image")
    case = Case(VllmRocm, tmp_path, "rx7800xt-then-9950x", command=words, stop_command=("stopper", "{name}"))
    command = case.command()
    assert command.argv[:3] == ("/usr/bin/docker", "container", "run")
    assert values(command.argv, "--name") == ["mine"]
    assert values(command.argv, "-p") == ["127.0.0.1:9001:9001"]
    assert "--publish" not in command.argv
    assert values(command.argv, "--host") == ["0.0.0.0"]
    assert command.stop == ("stopper", "mine")
    assert command.clean[-1] == "/usr/bin/docker"


@pytest.mark.parametrize(
    "words",
    [("/opt/wrapper", "run"), ("docker", "exec", "box", "llama-server"), ("docker", "compose", "run", "x")],
)
def test_what_runs_no_container_is_left_alone_good(words: tuple[str, ...]) -> None:
    assert containers.run_at(words) is None
    assert containers.host(words) == "127.0.0.1"


def test_background_is_refused_bad(fake_profile: Callable[..., Profile]) -> None:
    with pytest.raises(ProfileError, match="-d starts the container in the background"):
        containers.check(fake_profile(command=("docker", "run", "-d", "image")))


def test_profile_names_a_container_good(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        "model: hub/name\nbackend: vllm-rocm\nstop_command: [docker, stop, '{name}']\n"
        "container: {image: i, runtime: podman, args: [--volume=~/x:/x, --cpus, 8]}\n"
    )
    loaded = profile.load(tmp_path / "p.yaml")
    assert loaded.container is not None
    assert loaded.container.args == ("--volume=~/x:/x", "--cpus", "8")
    assert loaded.stop_command == ("docker", "stop", "{name}")


# -- life -------------------------------------------------------------------------------------------


class Docker:
    """The stand-in's daemon, and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "docker.sock"
        self.log = folder / "docker.log"
        self.bin = folder / "bin"
        self.bin.mkdir()
        script = self.bin / "docker"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{DOCKER}" "$@"\n')
        script.chmod(0o755)
        self.environ = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ.get('PATH', os.defpath)}",
            "DOCKER_HOST": f"unix://{self.socket}",
            "FAKE_DOCKER_LOG": str(self.log),
        }
        self.client = container_client.Client((str(script),), self.environ)
        self.daemon = subprocess.Popen([sys.executable, "-S", str(DOCKER), "daemon", str(self.socket)])
        until(self.socket.exists, "the daemon")

    def knobs(self, **knobs: Any) -> None:
        Path(f"{self.socket}.knobs").write_text(json.dumps(knobs))

    def commands(self, verb: str) -> list[list[str]]:
        """Return the command lines of the client that began with `verb`."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [words for words in map(json.loads, lines) if words[0] == verb]

    def containers(self, label: str | None = None) -> list[str]:
        """Return the ids of what there is, ended or not."""
        words = ("--filter", f"label={label}") if label else ()
        return self.client.tell("ps", "--all", "--quiet", *words).text.split()

    def put(self, name: str, *labels: str) -> subprocess.Popen[bytes]:
        """Start a container as somebody else would; returns its client."""
        there = len(self.containers())
        label = [word for each in labels for word in ("--label", each)]
        argv = [*self.client.argv, "run", "--name", name, *label, "fake/engine", "--host", "x", "--port", "0"]
        client = subprocess.Popen(
            argv, env=self.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(lambda: len(self.containers()) > there, "a container")
        return client


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[Docker]:
    folder = tmp_path / "docker"
    folder.mkdir()
    made = Docker(folder)
    yield made
    made.daemon.terminate()
    made.daemon.wait()


@pytest.fixture
def boxed(docker: Docker, fake_profile: Callable[..., Profile]) -> Iterator[Callable[..., LlamaServer]]:
    """Make backends whose engine is a container; each is stopped in the end."""
    made: list[LlamaServer] = []

    def make(knobs: dict[str, Any] | None = None, **keys: Any) -> LlamaServer:
        if "command" not in keys:
            keys = {"container": Container(image="fake/engine"), "command": None, **keys}
        made.append(LlamaServer(fake_profile(knobs, **keys), environ=docker.environ))
        return made[-1]

    yield make
    docker.knobs()
    for backend in made:
        backend.stop(0)


def client_of(backend: SubprocessBackend) -> int:
    """Return the pid of the client."""
    assert backend.life.child is not None
    return backend.life.child.pid


def test_start_and_stop_leave_nothing_good(docker: Docker, boxed: Callable[..., LlamaServer]) -> None:
    backend = boxed()
    endpoint = backend.start(timeout=60)
    (run,) = docker.commands("run")
    port = endpoint.url.rpartition(":")[2]
    assert values(run, "--publish") == [f"127.0.0.1:{port}:{port}"]
    assert len(docker.containers()) == 1
    assert httpx.get(f"{endpoint.url}/v1/models", trust_env=False).status_code == 401
    backend.stop()
    assert [words[:3] for words in docker.commands("stop")] == [["stop", "-t", "5"]]
    assert docker.containers() == []
    assert backend.state is State.STOPPED


def test_the_key_is_on_no_command_line_good(docker: Docker, boxed: Callable[..., LlamaServer]) -> None:
    backend = boxed()
    endpoint = backend.start(timeout=60)
    backend.stop()
    assert endpoint.key
    assert endpoint.key not in docker.log.read_text()
    assert values(docker.commands("run")[0], "--env").count("LLAMA_API_KEY") == 1


def test_client_dies_while_its_container_lives_on_ugly(
    docker: Docker, boxed: Callable[..., LlamaServer]
) -> None:
    """prior failure 7: the engine is started anew, and the first container does not stay."""
    backend = boxed()
    events = Recorder(backend)
    backend.start(timeout=60)
    before = docker.containers()
    os.kill(client_of(backend), signal.SIGKILL)
    events.wait_state(State.READY, 2)
    after = docker.containers()
    assert len(after) == 1
    assert after != before
    first, second = docker.commands("run")
    assert values(first, "--name") != values(second, "--name")


def test_container_that_ignores_its_stop_is_removed_ugly(
    docker: Docker, boxed: Callable[..., LlamaServer]
) -> None:
    """prior failure 8."""
    backend = boxed({"ignore_term": True}, timeouts={"start": 30, "stop": 1, "stall": 30})
    backend.start(timeout=60)
    backend.stop()
    assert docker.containers() == []


def test_stop_that_takes_too_long_is_cut_short_ugly(
    docker: Docker, boxed: Callable[..., LlamaServer]
) -> None:
    backend = boxed(timeouts={"start": 30, "stop": 1, "stall": 30})
    backend.start(timeout=60)
    docker.knobs(slow_stop=300)
    backend.stop()
    assert docker.containers() == []


def test_container_that_can_not_be_removed_is_stuck_until_it_is_gone_bad(
    docker: Docker, boxed: Callable[..., LlamaServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "PATIENCE", 0.1)
    backend = boxed({"ignore_term": True}, timeouts={"start": 30, "stop": 0.1, "stall": 30})
    backend.start(timeout=60)
    docker.knobs(deaf=True)
    with pytest.raises(StopFailed, match=r"container orchestrator-fake-\w+ is still there"):
        backend.stop()
    assert backend.state is State.STUCK
    docker.knobs()
    backend.stop()
    assert backend.state is State.STOPPED
    assert docker.containers() == []


def test_name_of_a_strangers_container_is_not_taken_from_it_bad(
    docker: Docker, boxed: Callable[..., LlamaServer]
) -> None:
    stranger = docker.put("taken")
    backend = boxed(command=("docker", "run", "--name", "taken", "fake/engine"))
    with pytest.raises(StartError, match="a container named taken is there already") as fault:
        backend.start(timeout=60)
    assert "remove it" in (fault.value.advice or "")
    assert len(docker.containers()) == 1
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_leftover_of_a_dead_launch_gives_its_name_up_ugly(
    docker: Docker, boxed: Callable[..., LlamaServer], own_home: Path
) -> None:
    """prior failure 7: whatever became of its record, the label tells whose it was."""
    dead = docker.put("ours", "orchestrator.launch=long-gone", f"orchestrator.home={own_home}")
    stranger = docker.put("theirs", "orchestrator.launch=x", "orchestrator.home=/another/home")
    backend = boxed(command=("docker", "run", "--name", "ours", "fake/engine"))
    backend.start(timeout=60)
    assert docker.containers("orchestrator.launch=long-gone") == []
    assert len(docker.containers()) == 2
    assert stranger.poll() is None
    for client in (dead, stranger):
        client.kill()
        client.wait()


def test_start_spares_the_containers_of_living_launches_good(
    docker: Docker, boxed: Callable[..., LlamaServer]
) -> None:
    first, second = boxed(), boxed()
    url = first.start(timeout=60).url
    second.start(timeout=60)
    assert len(docker.containers()) == 2
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    assert (first.state, first.status()["restarts"]) == (State.READY, 0)


def test_port_of_a_stranger_is_given_up_for_another_good(
    docker: Docker, boxed: Callable[..., LlamaServer]
) -> None:
    backend = boxed()
    events = Recorder(backend)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        backend._lease.port = taken = stranger.getsockname()[1]
        take = type(backend._lease).take
        answers = iter([taken])
        backend._lease.take = lambda: next(answers, None) or take(backend._lease)  # type: ignore[method-assign]
        endpoint = backend.start(timeout=60)
    assert not endpoint.url.endswith(f":{taken}")
    assert events.wait(lambda event: event.name == "port_taken").fields["port"] == taken
    assert len(docker.containers()) == 1


def test_without_its_daemon_nothing_is_started_bad(docker: Docker, boxed: Callable[..., LlamaServer]) -> None:
    docker.daemon.terminate()
    docker.daemon.wait()
    backend = boxed()
    with pytest.raises(StartError, match="docker: Cannot connect to the Docker daemon") as fault:
        backend.start(timeout=60)
    assert "`docker ps` (or podman's) has to work" in (fault.value.advice or "")
    assert docker.commands("run") == []


def test_a_daemon_that_one_may_not_use_is_told_bad(docker: Docker, boxed: Callable[..., LlamaServer]) -> None:
    docker.socket.chmod(0o400)
    backend = boxed()
    with pytest.raises(StartError, match="permission denied while trying to connect") as fault:
        backend.start(timeout=60)
    assert "usermod -aG docker" in (fault.value.advice or "")
    assert docker.commands("run") == []
    assert backend.state is State.FAILED
    docker.socket.chmod(0o600)
    assert backend.start(timeout=60)


def test_a_client_that_is_not_installed_is_told_bad(fake_profile: Callable[..., Profile]) -> None:
    wish = fake_profile(command=None, container=Container(image="i", runtime="nerdctl"))
    with pytest.raises(BinaryMissing, match="nerdctl: not found on PATH") as fault:
        LlamaServer(wish, environ={"PATH": "/nowhere"}).plan()
    assert "install nerdctl" in (fault.value.advice or "")


def test_a_daemon_that_is_started_anew_has_its_engine_back_ugly(
    docker: Docker, boxed: Callable[..., LlamaServer]
) -> None:
    """As an update of docker does it: its containers are gone, and it comes back within seconds."""
    backend = boxed()
    events = Recorder(backend)
    backend.start(timeout=60)
    docker.daemon.terminate()
    docker.daemon.wait()
    docker.socket.unlink()
    docker.daemon = subprocess.Popen([sys.executable, "-S", str(DOCKER), "daemon", str(docker.socket)])
    events.wait_state(State.READY, 2)
    assert len(docker.containers()) == 1


def test_image_that_is_not_there_fails_at_once_bad(docker: Docker, boxed: Callable[..., LlamaServer]) -> None:
    backend = boxed(container=Container(image="fake/missing"))
    with pytest.raises(ExitedEarly) as fault:
        backend.start(timeout=60)
    assert fault.value.code == 125
    assert "no such image" in (fault.value.advice or "")
    assert len(docker.commands("run")) == 1


def test_engine_that_crashes_in_its_container_is_started_anew_ugly(
    docker: Docker, boxed: Callable[..., LlamaServer]
) -> None:
    backend = boxed()
    events = Recorder(backend)
    endpoint = backend.start(timeout=60)
    with httpx.Client(trust_env=False, headers={"authorization": f"Bearer {endpoint.key}"}) as client:
        client.post(f"{endpoint.url}/fake/do", json={"exit": 0})
    events.wait_state(State.READY, 2)
    assert len(docker.containers()) == 1


def test_work_inside_a_container_is_progress_where_it_can_be_seen_good(
    docker: Docker, boxed: Callable[..., LlamaServer], tmp_path: Path
) -> None:
    backend = boxed({"memory": 64 << 20})
    backend.start(timeout=60)
    child = backend.life.child
    assert child is not None
    assert child.container is not None
    (which,) = docker.containers()
    pid = docker.client.tell("inspect", "--format", "{{.State.Pid}}", which).text
    # as in a virtual machine: the number is somebody else's here
    assert child.container.init() is None
    alone = child.look().rss
    (tmp_path / "proc" / pid).mkdir(parents=True)
    (tmp_path / "proc" / pid / "cgroup").write_text(f"0::/system.slice/docker-{which}.scope\n")
    child.inside = child.container.init(tmp_path / "proc")
    assert child.inside == int(pid)
    assert child.look().rss > alone + (64 << 20)
    assert child.inside not in child.tree(), "it gets no signal"


@pytest.fixture
def owner(
    docker: Docker, fake_profile: Callable[..., Profile]
) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Another process that owns a container whose engine ignores TERM."""
    wish = fake_profile(
        {"ignore_term": True}, command=None, container=Container(image="fake/engine"),
        timeouts={"start": 30, "stop": 0.3, "stall": 30},
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, wish.model_dump_json(), ""],
        stdout=subprocess.PIPE, env=docker.environ, text=True,
    )  # fmt: skip
    assert process.stdout
    yield process, json.loads(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.mark.parametrize("slow_stop", [0, 300])
def test_death_of_the_orchestrator_ends_its_container_ugly(
    docker: Docker, owner: Any, slow_stop: float
) -> None:
    """By force when its daemon takes too long over a stop."""
    process, pids = owner
    assert len(docker.containers()) == 1
    docker.knobs(slow_stop=slow_stop)
    process.kill()
    until(lambda: docker.containers() == [], "the guardian's end of the container")
    until(lambda: not alive([pids["guardian"]]), "the guardian's own end")


def test_container_of_a_dead_owner_is_swept_ugly(
    docker: Docker, owner: Any, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prior failure 7: owner and guardian die in the same moment; the record says where to look."""
    process, pids = owner
    os.kill(pids["guardian"], signal.SIGSTOP)
    process.kill()
    process.wait()
    os.kill(pids["guardian"], signal.SIGKILL)
    until(lambda: not alive(pids["engine"]), "the client's end")
    assert len(docker.containers()) == 1
    docker.knobs(deaf=True)
    monkeypatch.setattr(leftovers, "PATIENCE", 0.1)
    assert list(leftovers.sweep(own_home).values()) == [()]  # it resists: its record stays
    docker.knobs()
    assert leftovers.sweep(own_home) == {}
    assert docker.containers() == []
    assert [folder.read() for folder in home.run_folders(own_home)] == []


@pytest.mark.parametrize(
    "told",
    [
        None,
        "x",
        {},
        {"client": ["rm", "-rf"], "environ": {}, "launch": "x"},
        {"client": [], "environ": {}, "launch": "x"},
        {"client": ["docker"], "environ": [], "launch": "x"},
        {"client": ["docker"], "environ": {}, "launch": ""},
    ],
)
def test_record_that_makes_no_sense_names_no_container_bad(told: object) -> None:
    assert container_client.recorded(told, {}) is None


def test_stop_command_takes_the_place_of_term_good(
    engine: Callable[..., LlamaServer], tmp_path: Path
) -> None:
    """For any engine, not only for containers."""
    code = (
        "import json, os, sys, urllib.request as u; open(sys.argv[1], 'w').write(sys.argv[2]);"
        "r = u.Request(f'http://127.0.0.1:{sys.argv[2]}/fake/do', json.dumps({'exit': 0}).encode(),"
        " {'authorization': 'Bearer ' + os.environ['LLAMA_API_KEY']});"
        "u.build_opener(u.ProxyHandler({})).open(r)"
    )
    words = (sys.executable, "-c", code, str(tmp_path / "asked"), "{port}")
    backend = engine({"ignore_term": True}, stop_command=words)
    events = Recorder(backend)
    url = backend.start(timeout=60).url
    backend.stop()
    assert (tmp_path / "asked").read_text() == url.rpartition(":")[2]
    assert not [event for event in events.events if event.name == "swept"], "it ended as it was asked to"


def test_stop_command_that_does_nothing_is_not_waited_for_bad(engine: Callable[..., LlamaServer]) -> None:
    backend = engine(stop_command=(sys.executable, "-c", "import time; time.sleep(600)"),
                     timeouts={"start": 30, "stop": 0.3, "stall": 30})  # fmt: skip
    backend.start(timeout=60)
    pids = backend.status()["engine_pids"]
    backend.stop()
    assert not alive(pids)
