"""The pods of the Kubernetes examples in a tree like theirs: their commands, their user, and the modes of their files.

A pod's user is not root and has the group `fsGroup`. Files of a Secret are root's, of that group, with `defaultMode`;
the kubelet gives the volume of the job to the group, too. Only root can become another user; where Python lies in a
folder that others may not enter, as below /root, it is mounted over in a namespace of the process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.catalogs import open_catalog
from tests.support.deadlines import LONG_S
from tests.support.files import make_text_file, random_texts
from tests.support.fleets import hello_of
from tests.support.ports import free_port
from tests.support.processes import COMMAND_LINE, ROOT, wait_until
from torchmix.cli.main import main
from torchmix.recipe.load import load_recipe
from torchmix.service.client import LoaderLinks
from torchmix.service.keys import client_keys, write_keys
from torchmix.service.messages import LoaderPing, LoaderRefusal, LoaderWelcome
from torchmix.service.served import transforms_digest
from torchmix.service.server import new_pair

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("setpriv", "unshare", "mount"))),
        reason="only root can become the user of a pod, with setpriv, unshare and mount",
    ),
]
EXAMPLES = ROOT / "examples" / "kubernetes"


def pod_of(name: str) -> dict[str, Any]:
    """The pod that a file describes."""
    documents = yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8"))
    [pod] = [one["spec"]["template"]["spec"] for one in documents if one["kind"] in ("Job", "Deployment")]
    return dict(pod)


class Pod:
    """A pod of a file: its volumes below a folder, and its containers as processes of its user."""

    def __init__(self, name: str, root: Path, stack: ExitStack) -> None:
        self.pod, self._root, self._stack = pod_of(name), root, stack
        context = self.pod["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] > 0
        self.user, self.group, self.fs_group = context["runAsUser"], context["runAsGroup"], context["fsGroup"]
        [self._mode] = [one["secret"]["defaultMode"] for one in self.pod["volumes"] if "secret" in one]

    def mount_secret(self, keys: Path, mount: str) -> None:
        """Lay a secret down as the kubelet does: behind links, so that it changes at once."""
        place = self._root / mount.lstrip("/")
        version = Path(tempfile.mkdtemp(dir=place, prefix="..")) if place.exists() else place / "..0"
        version.mkdir(parents=True, exist_ok=True)
        version.chmod(0o755)
        place.chmod(0o777)
        for source in sorted(keys.iterdir()):
            path = version / source.name
            shutil.copy(source, path)
            os.chown(path, 0, self.fs_group)
            path.chmod(self._mode)
            if not (place / source.name).is_symlink():
                (place / source.name).symlink_to(Path("..data") / source.name)
        (place / "..next").symlink_to(version.name)
        (place / "..next").replace(place / "..data")
        for link in place.iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()

    def mount_job(self, job: Path) -> None:
        """Give a volume to the pod's group."""
        for path in (job, *job.rglob("*")):
            os.chown(path, 0, self.fs_group)
            path.chmod(path.stat().st_mode | (0o2070 if path.is_dir() else 0o060))

    def start(self, container: dict[str, Any], *words: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Run a container's command, with the paths of its mounts in this tree; its output is in a file."""
        command = [*container["command"], *container["args"]]
        mounts = sorted((one["mountPath"] for one in container["volumeMounts"]), key=len, reverse=True)
        command = [self._here(word.replace("$(POD_IP)", "127.0.0.1"), mounts) for word in command]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": "/"}
        if command[0] == "torchmix":
            command = [*COMMAND_LINE, *command[1:]]
        else:  # one rank of the job, in the place of torchrun
            assert command[0] == "torchrun"
            begin = next(i for i, word in enumerate(command) if word.endswith(".py"))
            command = command[begin:]
            environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        log = self._root / f"{container['name']}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*self._as_user(), sys.executable, *command, *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=environment,
                start_new_session=True,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process, log

    def _as_user(self) -> list[str]:
        """The words that run a command as the pod's user."""
        words = ["setpriv", f"--reuid={self.user}", f"--regid={self.group}", f"--groups={self.fs_group}", "--"]
        base = Path(sys.base_prefix).resolve()
        closed = next((folder for folder in reversed(base.parents) if not folder.stat().st_mode & 0o001), None)
        if closed is None:
            return words
        held = self._root / "python"
        held.mkdir(exist_ok=True)
        mounts = (
            'mount --bind "$1" "$2" && mount -t tmpfs -o mode=755 tmpfs "$3" && mkdir -p "$1" && '
            'mount --bind "$2" "$1" && shift 3 && exec "$@"'
        )
        return ["unshare", "--mount", "sh", "-c", mounts, "sh", str(base), str(held), str(closed), *words]

    def _here(self, word: str, mounts: list[str]) -> str:
        """A word with the tree's paths in the place of those in the pod and its image."""
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if value.startswith("/torchmix/"):  # the image's
            value = str(ROOT / value.removeprefix("/torchmix/"))
        elif any(value == mount or value.startswith(f"{mount}/") for mount in mounts):
            value = str(self._root / value.lstrip("/"))
        return f"{option}{equals}{value}"


@pytest.fixture
def tree() -> Iterator[tuple[Path, Path, ExitStack]]:
    """A folder that every user may enter, with the volume of a job; and the keys."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pod-", ignore_cleanup_errors=True)))
        folder.chmod(0o755)
        job = folder / "root" / "job"
        job.mkdir(parents=True)
        make_text_file(job / "prose.parquet", random_texts(1, 300))
        (job / "recipe.yaml").write_text(
            "{version: 1, seed: 1, batch: {samples: 8, length: 64}, mixture: {prose: 100%}, "
            "sources: {prose: {path: prose.parquet, text: text, tokenizer: bytes}}}",
            encoding="utf-8",
        )
        assert main(["index", str(job / "recipe.yaml"), "--quiet"]) == 0
        write_keys(folder / "keys", new_pair, num_clients=2)
        with ExitStack() as processes:
            yield folder / "root", folder / "keys", processes


def said(process: subprocess.Popen[bytes], log: Path, text: str) -> None:
    """Wait until a process has printed a text."""

    def has() -> bool:
        content = log.read_text(errors="replace")
        assert text in content or process.poll() is None, content
        return text in content

    wait_until(has, deadline_s=LONG_S, what=lambda: f"{text!r} in\n{log.read_text(errors='replace')}")


def test_the_job_trains_from_the_loaders_of_its_sidecars(tree: tuple[Path, Path, ExitStack]) -> None:
    root, keys, stack = tree
    pod = Pod("job.yaml", root, stack)
    pod.mount_secret(keys, "/keys")
    pod.mount_job(root / "job")
    [sidecar], [train] = pod.pod["initContainers"], pod.pod["containers"]
    first = free_port()
    serve, log = pod.start(sidecar, f"--bind=tcp://127.0.0.1:{first}", "--processes=1")
    said(serve, log, "1 loaders listen at")
    trained, printed = pod.start(train, "--steps=2")
    assert trained.wait(LONG_S) == 0, printed.read_text(errors="replace")
    lines = printed.read_text(errors="replace")
    assert "step 0 loss" in lines and "step 1 loss" in lines
    assert "no loader answers" not in lines, "then it would have read the files itself"
    serve.terminate()
    assert serve.wait(LONG_S) == 0, log.read_text(errors="replace")
    assert not list((root / "job" / "endpoints").glob("*.loader"))


def test_the_deployment_serves_a_client_until_its_key_is_taken_from_the_secret(
    tree: tuple[Path, Path, ExitStack],
) -> None:
    root, keys, stack = tree
    pod = Pod("loaders.yaml", root, stack)
    pod.mount_secret(keys, "/keys")
    pod.mount_job(root / "job")
    [container] = pod.pod["containers"]
    ports = (f"--bind=tcp://127.0.0.1:{free_port()}", "--processes=1", "--metrics=0")
    serve, log = pod.start(container, *ports)
    said(serve, log, "1 loaders listen at")
    endpoint = log.read_text().partition("listen at ")[2].split()[0]
    recipe = load_recipe(root / "job" / "recipe.yaml")
    catalog = open_catalog(recipe, root / "job")
    links = LoaderLinks(client_keys(keys / "client-1.secret"))
    stack.callback(links.close)
    links.open(endpoint)
    heard: list[Any] = []

    def hears(kind: type) -> bool:
        for one in links.wait(0.1):
            if one.news == "connected":
                links.send(endpoint, hello_of(catalog, transforms=transforms_digest(catalog, recipe.seed)))
            heard.append(one.message)
        return any(isinstance(message, kind) for message in heard)

    def is_turned_away() -> bool:
        links.send(endpoint, LoaderPing(number=0))
        return hears(LoaderRefusal)

    wait_until(lambda: hears(LoaderWelcome), deadline_s=LONG_S, what=lambda: f"a welcome: {heard}")
    (keys / "client-1.public").unlink()
    pod.mount_secret(keys, "/keys")
    wait_until(is_turned_away, deadline_s=LONG_S, what=lambda: f"a refusal: {heard}")
    [refusal] = [message for message in heard if isinstance(message, LoaderRefusal)]
    assert "was removed" in refusal.reason and not refusal.is_unknown
    serve.terminate()
    assert serve.wait(LONG_S) == 0, log.read_text(errors="replace")


@pytest.mark.parametrize(("mode", "group"), [(0o444, 10001), (0o460, 10001), (0o440, 10002)], ids=oct)
def test_a_secret_that_others_reach_is_refused_by_name(
    tree: tuple[Path, Path, ExitStack], mode: int, group: int
) -> None:
    root, keys, stack = tree
    pod = Pod("loaders.yaml", root, stack)
    pod.mount_secret(keys, "/keys")
    pod.mount_job(root / "job")
    secret = (root / "keys" / "server.secret").resolve()
    os.chown(secret, 0, group)
    secret.chmod(mode)
    serve, log = pod.start(pod.pod["containers"][0], f"--bind=tcp://127.0.0.1:{free_port()}")
    assert serve.wait(LONG_S) == 2
    content = log.read_text(errors="replace")
    assert "server.secret" in content
    assert "no key can be read" in content if (mode, group) == (0o440, 10002) else "fsGroup" in content
