"""Run a target's Dockerfile steps as written in clean roots, without a Docker engine, and check the result.

    python tests/docker/run_steps.py [--target cpu] [--keep] [--build-arg NAME=VALUE]

Each stage starts from a fresh Debian made by debootstrap and is entered with chroot, so root and debootstrap are
needed; without them this says so and exits with status 77, which test runners read as "skipped". pip inside the roots
gets this machine's pip configuration (index, certificates, local folders), because the steps must reach the same
packages that this machine can reach; nothing of that stays in the roots.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import dockerfile
from host import INSIDE, Host, StepError, bare_root, cache_folder, remove, say, why_not

ROOT = Path(__file__).resolve().parent.parent.parent
SKIPPED = 77
STEP_LIMIT_S = 900
ALLREDUCE = """
import numpy, hvdtrain
world = hvdtrain.init("torch")
total = float(world.allreduce(numpy.ones(1, numpy.float32))[0])
print(f"rank {world.rank} of {world.size} sums {total:g}", flush=True)
raise SystemExit(total != 2.0)
"""


@dataclass
class Image:
    """A stage that was run: its root, and the settings that its instructions left."""

    root: Path
    environment: dict[str, str]
    user: str = "root"
    folder: str = "/"


class Runner:
    """Runs stages in roots under `work`."""

    def __init__(self, work: Path, host: Host, build_arguments: dict[str, str]) -> None:
        self.work = work
        self.host = host
        self.build_arguments = build_arguments
        self.context = work / "context"
        self.images: dict[str, Image] = {}

    def run_stage(self, stage: dockerfile.Stage) -> Image:
        """Run all steps of a stage in a root of its own."""
        say(f"stage {stage.name} from {stage.base}")
        root = self.work / stage.name
        if stage.base in self.images:
            subprocess.run(["cp", "-ax", str(self.images[stage.base].root), str(root)], check=True)
        else:
            bare_root(stage.base, root)
        image = Image(root, {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
        self.images[stage.name] = image
        self.mount(root)
        arguments: dict[str, str] = {}
        for step in stage.steps:
            shown = " ".join(step.text.split())
            say(f"  {step.keyword} {shown[:100]}{'...' if len(shown) > 100 else ''}")
            if step.keyword == "ARG":
                arguments |= dockerfile.assignments(step.text)
                arguments |= {name: self.build_arguments[name] for name in arguments if name in self.build_arguments}
            elif step.keyword == "ENV":
                image.environment |= dockerfile.assignments(step.text)
            elif step.keyword == "USER":
                image.user = step.text
            elif step.keyword == "WORKDIR":
                image.folder = step.text
                (root / step.text.strip("/")).mkdir(parents=True, exist_ok=True)
            elif step.keyword == "COPY":
                self.copy(image, step)
            else:
                self.mount_caches(image, step)
                self.inside(image, ["/bin/sh", "-c", step.text], variables=arguments, network=True)
        return image

    def mount(self, root: Path) -> None:
        """Give the root what a container has too: /proc, /dev, names to resolve; and the host's pip folders."""
        for kind in ("proc", "dev", "sys"):
            (root / kind).mkdir(exist_ok=True)
            subprocess.run(["mount", "--rbind", f"/{kind}", str(root / kind)], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(root / "dev/shm")], check=True)
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        shutil.copy("/etc/hosts", root / "etc/hosts")
        (root / "run").mkdir(exist_ok=True)
        if self.host.certificate:
            shutil.copy(self.host.certificate, root / "run/host-certificates.crt")
        for path in dict.fromkeys(self.host.read_only):
            place = root / path.relative_to("/")
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--bind", "-o", "ro", str(path), str(place)], check=True)

    def mount_caches(self, image: Image, step: dockerfile.Instruction) -> None:
        """Bind what RUN --mount=type=cache asks for to a folder that outlives this run."""
        for option in step.options:
            settings = dict(part.partition("=")[::2] for part in option.removeprefix("--mount=").split(","))
            if settings.get("type") != "cache" or set(settings) != {"type", "target"}:
                raise StepError(f"line {step.line}: only --mount=type=cache,target=... is known. Received: {option}")
            kept = cache_folder() / settings["target"].strip("/").replace("/", "-")
            kept.mkdir(exist_ok=True)
            place = image.root / settings["target"].strip("/")
            place.mkdir(parents=True, exist_ok=True)
            if not os.path.ismount(place):
                subprocess.run(["mount", "--bind", str(kept), str(place)], check=True)

    def copy(self, image: Image, step: dockerfile.Instruction) -> None:
        """Copy from the build context, or from another stage."""
        source_root = self.context
        for option in step.options:
            if not option.startswith("--from="):
                raise StepError(f"line {step.line}: only --from is known. Received: {option}")
            source_root = self.images[option.removeprefix("--from=")].root
        *sources, target = shlex.split(step.text)
        place = image.root / Path(image.folder.strip("/"), target).as_posix().strip("/")
        if target.startswith("/"):
            place = image.root / target.strip("/")
        for name in sources:
            source = source_root / name.strip("/")
            if not source.exists():
                raise StepError(f"line {step.line}: COPY {name}: not in the build context (see .dockerignore)")
            if source.is_dir():
                place.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", f"{source}/.", str(place)], check=True)
            else:
                into_folder = target.endswith("/") or len(sources) > 1
                (place if into_folder else place.parent).mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", str(source), str(place)], check=True)
        # Docker gives copied files to root, whoever owned them.
        subprocess.run(["chown", "-R", "0:0", str(place)], check=True)

    def inside(
        self,
        image: Image,
        command: Sequence[str],
        *,
        variables: dict[str, str] | None = None,
        network: bool = False,
        user: str | None = None,
    ) -> str:
        """Run a command in the image as its user, and return what it printed.

        Raises:
            StepError: it failed or took too long; the message ends with its last lines.
        """
        accounts = [line.split(":") for line in (image.root / "etc/passwd").read_text().splitlines()]
        account = next((entry for entry in accounts if entry[0] == (user or image.user)), None)
        if account is None:
            raise StepError(f"USER {user or image.user} has no line in /etc/passwd")
        environment = {**image.environment, "HOME": account[5], **(variables or {})}
        if network:
            environment |= self.host.variables
        line = f"cd {shlex.quote(image.folder)} && exec {shlex.join(command)}"
        entered = ["chroot", f"--userspec={account[2]}:{account[3]}", str(image.root)]
        entered += ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in environment.items())]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [*entered, "/bin/sh", "-c", line],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                status: int | str = process.wait(timeout=STEP_LIMIT_S)
            except subprocess.TimeoutExpired:
                status = f"no end within {STEP_LIMIT_S} s"
            finally:
                # Nothing may go on writing into a root that is about to be removed.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(0)
            output = log.read().decode(errors="replace")
        if status != 0:
            tail = "\n".join(output.splitlines()[-40:])
            raise StepError(f"failed ({status}): {shlex.join(command)}\n{tail}")
        return output


def make_context(target: Path) -> None:
    """Copy what .dockerignore lets into the build context: it excludes all, then names what comes in."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    allowed = [line.removeprefix("!") for line in lines if line.startswith("!")]
    ignored = [line.removeprefix("**/") for line in lines[1:] if not line.startswith("!")]
    if lines[0] != "*":
        raise StepError(".dockerignore must start with a line *, and then name what comes in")
    target.mkdir()
    for name in allowed:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns(*ignored))
        elif source.exists() and not any(fnmatch.fnmatch(name, pattern) for pattern in ignored):
            shutil.copy2(source, target / name)


def check_result(runner: Runner, image: Image, stage: dockerfile.Stage) -> None:
    """Check what the image promises: no build tools, no root, a passing health check, two ranks that sum."""
    tools = "g++ c++ gcc cc make cmake ninja ld"
    found = runner.inside(image, ["/bin/sh", "-c", f"for tool in {tools}; do command -v $tool || true; done"])
    if found.strip():
        raise StepError(f"build tools in the runtime image: {found.split()}")
    say("  no build tools in the image")
    who = runner.inside(image, ["id", "-u"]).strip()
    if who == "0":
        raise StepError("the image's user is root")
    say(f"  the user is not root: uid {who}")
    writable = runner.inside(image, ["/bin/sh", "-c", "test ! -w /opt/hvdtrain && test -w . && echo right"]).strip()
    if writable != "right":
        raise StepError("the user must be able to write to its folder, and not to the environment")
    runner.inside(image, ["python", "-c", "import hvdtrain; assert hvdtrain.__file__.startswith('/opt/hvdtrain')"])
    health = stage.settings["HEALTHCHECK"].text.removeprefix("CMD").strip()
    output = runner.inside(image, dockerfile.words(health))
    say("  health check passes: " + output.strip().splitlines()[-1])
    (image.root / "tmp/allreduce.py").write_text(ALLREDUCE)
    for option in ([], ["--gloo"]):
        command = ["horovodrun", "-np", "2", *option, "python", "/tmp/allreduce.py"]
        output = runner.inside(image, command)
        if "rank 0 of 2 sums 2" not in output or "rank 1 of 2 sums 2" not in output:
            raise StepError(f"{shlex.join(command)} printed:\n{output}")
        say(f"  {shlex.join(command)}: both ranks sum 2")
    check_ssh(runner, image)
    mounted = [f"--exclude={image.root / path.relative_to('/')}" for path in runner.host.read_only]
    command = ["du", "-smx", *mounted, str(image.root)]
    size = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    say(f"  the image holds {size} MB")


def check_ssh(runner: Runner, image: Image) -> None:
    """Start the image's ssh daemon as its user, log in with a key, and find the environment there."""
    script = """
        set -e
        mkdir -p ~/.ssh && chmod 700 ~/.ssh
        ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519
        cp ~/.ssh/id_ed25519.pub ~/.ssh/authorized_keys
        HVDTRAIN_SSH_PORT=22022 hvdtrain-sshd & daemon=$!
        trap 'kill $daemon' EXIT
        for attempt in 1 2 3 4 5 6 7 8 9 10; do
            sleep 0.5
            if ssh -p 22022 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o BatchMode=yes \\
                localhost 'command -v python && command -v orted'; then exit 0; fi
        done
        exit 1
    """
    output = runner.inside(image, ["/bin/sh", "-c", script])
    if "/opt/hvdtrain/bin/python" not in output or "orted" not in output:
        raise StepError(f"over ssh, python or Open MPI's orted is not on PATH:\n{output}")
    say("  ssh reaches the environment as the image's user")


def main(arguments: Sequence[str]) -> int:
    """Run the steps and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="cpu", help="stage to build [cpu]")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--keep", action="store_true", help="keep the roots")
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(f"SKIPPED: the Dockerfile's steps were not run: {reason}")
        return SKIPPED
    if INSIDE not in os.environ:
        # In a mount namespace of its own, whatever was mounted goes when the process goes.
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, __file__, *arguments]
        sys.stdout.flush()
        os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the roots are removed then too
    parsed = dockerfile.read(ROOT / "Dockerfile")
    build_arguments = dict(pair.partition("=")[::2] for pair in options.build_arg)
    work = Path(tempfile.mkdtemp(prefix="hvdtrain-docker-steps-"))
    runner = Runner(work, Host.look(), build_arguments)
    try:
        make_context(runner.context)
        for stage in parsed.needed_for(options.target):
            image = runner.run_stage(stage)
        say(f"checking {options.target}")
        check_result(runner, image, parsed.stages[options.target])
    except (StepError, ValueError, subprocess.CalledProcessError) as problem:
        print(f"FAILED: {problem}")
        return 1
    finally:
        if options.keep:
            print(f"the roots are in {work}")
        else:
            remove(work)
    say(f"the steps of {options.target} do what they say")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
