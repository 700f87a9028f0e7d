"""The scripts for TPU VMs against a stand-in for gcloud that runs what they mean for a machine."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from launch.cli import main
from launch.operate import stop
from launch.operate.place import find
from launch.operate.running import Runner, of_process
from tests.fakes.processes import Pipe
from tests.launch.targets import golden
from tests.structure.source import ROOT

PLAYED = """#!/bin/sh
# The next status of this host, or the last one, once all 16 are there: the first failure ends all.
echo "$@ $RL_JAX_ATTEMPT $RL_JAX_HOSTS" >> "$CLOUD/played"
case "$*" in preflight*) exit 0 ;; *'--host 0') ;; *) exit 0 ;; esac
until [ "$(grep -c "^role.* $RL_JAX_ATTEMPT q" "$CLOUD/played")" -eq 16 ]; do sleep 0.05; done
read -r status < "$CLOUD/statuses"
sed -i '2,$!{1d}' "$CLOUD/statuses"
exit "$status"
"""


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A rendered launch of 16 machines in `tmp_path`/rendered, and the environment of its user."""
    monkeypatch.chdir(ROOT)
    golden.render("qwen3_8b_v6e_64", "tpu-vm", tmp_path / "rendered")
    state, programs = tmp_path / "cloud", tmp_path / "bin"
    state.mkdir()
    programs.mkdir()
    fake = (ROOT / "tests" / "fakes" / "gcloud.sh").read_text()
    for name, text in (("gcloud", fake), ("rl-jax", PLAYED)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CLOUD": str(state),
        "PROJECT": "p",
        "ZONE": "z-1-a",
        "SHARE": "nfs:/rl",
        "RENDERED": str(tmp_path / "on a shared disk"),
        "LOOK_S": "0",
    }


def kept_going(cloud: dict[str, str], *statuses: int) -> tuple[int, list[str]]:
    """Status of babysit.sh where the trainer's host ends with `statuses`; what roles were told."""
    state = Path(cloud["CLOUD"])
    (state / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    script = state.parent / "rendered" / "babysit.sh"
    done = subprocess.run(["bash", script], env=cloud, capture_output=True, text=True, timeout=300)
    played = (state / "played").read_text().splitlines()
    return done.returncode, [line for line in played if line.startswith("role")]


def test_what_was_stopped_goes_on(cloud: dict[str, str]) -> None:
    status, played = kept_going(cloud, 42, 0)
    assert status == 0 and len(played) == 2 * 16
    hosts = [f"qwen3-8b-v6e-64-trainer-{i}" for i in range(8)]
    hosts += [f"qwen3-8b-v6e-64-sampler-{i}-0" for i in range(8)]
    assert f"role --plan plan.json --host 15 1 {','.join(hosts)}" in played
    calls = (Path(cloud["CLOUD"]) / "calls").read_text()
    assert calls.count("instance-groups managed create") == 9, "once, though asked for twice"
    assert "--machine-type=ct6e-standard-4t" in calls and "--accelerator-topology=4x8" in calls
    token = Path(cloud["RENDERED"]) / "token"
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 32
    assert token.read_text() not in calls


def test_a_mistake_is_not_tried_again(cloud: dict[str, str]) -> None:
    status, played = kept_going(cloud, 2, 0)
    assert status == 2 and len(played) == 16


def test_crashes_use_up_the_budget(cloud: dict[str, str]) -> None:
    status, played = kept_going(cloud, 1, 1, 1, 1, 0)
    assert status == 1 and len(played) == 4 * 16, "three restarts"


GOES_ON = """#!/bin/bash
# Host 0's role: tells that it is there, and ends with 42 on TERM.
case "$*" in preflight*) exit 0 ;; *'--host 0') ;; *) exit 0 ;; esac
trap '{told}' TERM
echo >>"$CLOUD/there"
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(("told", "ends"), [("exit 42", 42), ("", 137)])
def test_it_is_ended_with_a_checkpoint(cloud: dict[str, str], told: str, ends: int) -> None:
    """The first notice is TERM to the hosts, the second KILL."""
    state = Path(cloud["CLOUD"])
    there = Pipe(state / "there")
    (state.parent / "bin" / "rl-jax").write_text(GOES_ON.format(told=told))
    script = state.parent / "rendered" / "babysit.sh"
    keeping = subprocess.Popen(
        ["bash", script], env=cloud, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert there.told(120.0)
        told_of = find(script.parent).started  # though it was started by hand
        assert told_of.pop("target") == "tpu-vm"
        assert Runner(**told_of) == of_process(keeping.pid)
        keeping.terminate()
        if not told:
            with pytest.raises(subprocess.TimeoutExpired):
                keeping.wait(timeout=2)
            keeping.terminate()
        said, _ = keeping.communicate(timeout=120)
    finally:
        if keeping.poll() is None:
            os.killpg(keeping.pid, signal.SIGKILL)
    assert keeping.returncode == ends and f"attempt 0 ended with {ends}" in said
    assert "attempt 1" not in said


LATE = """#!/bin/bash
# Host 3 fails at once; host 0 would go on until TERM, which host 1 has had no time to be there for.
case "$*" in preflight*) exit 0 ;; esac
case "$*" in
    *'--host 3') exit 7 ;;
    *'--host 0') trap 'exit 42' TERM; while true; do sleep 0.05; done ;;
esac
"""


def started(cloud: dict[str, str], role: str) -> tuple[int, list[str]]:
    """Status of start.sh, and what it called, with `role` as every host's `rl-jax`."""
    state = Path(cloud["CLOUD"])
    script = state.parent / "rendered" / "start.sh"
    (state.parent / "bin" / "rl-jax").write_text(role)
    subprocess.run(["bash", script.with_name("create.sh")], env=cloud, check=True, timeout=120)
    done = subprocess.run(["bash", script], env=cloud, capture_output=True, text=True, timeout=300)
    return done.returncode, (state / "calls").read_text().splitlines()


def test_the_first_host_to_fail_ends_all(cloud: dict[str, str]) -> None:
    """Though host 0 comes before it in the plan; and no number of a host that has ended is used."""
    status, calls = started(cloud, LATE)
    assert status == 7
    told = [call for call in calls if "host.sh tell TERM" in call]
    assert any(call.endswith("TERM 0") for call in told)
    assert not any(call.endswith("TERM 3") for call in told)


@pytest.mark.parametrize("phase", ["preflight", "role"])
def test_a_host_that_connects_after_a_stop_does_not_begin(cloud: dict[str, str], phase) -> None:
    """The stop comes while host 15 has no number yet, but that of an earlier attempt."""
    state, shared = Path(cloud["CLOUD"]), Path(cloud["RENDERED"])
    shared.mkdir()
    stranger = subprocess.Popen(["sleep", "100"])
    (shared / "host-15.pid").write_text(f"{stranger.pid}\n")
    gcloud = state.parent / "bin" / "gcloud"
    real = gcloud.rename(gcloud.with_name("gcloud-real"))
    # Its connection is made once `stop` is there; only then does anybody else end.
    gcloud.write_text(
        f"""#!/bin/bash
case "$*" in *{phase}*'--host 15')
    kill -TERM "$(cat "$CLOUD/start")"
    for ((i = 0; i < 200; i++)); do [ -e "$RENDERED/stop" ] && break; sleep 0.05; done ;;
esac
exec {real} "$@"
"""
    )
    gcloud.chmod(0o755)
    role = state.parent / "bin" / "rl-jax"
    role.write_text('#!/bin/bash\necho "$@" >>"$CLOUD/played"\n')
    script = state.parent / "rendered" / "start.sh"
    subprocess.run(["bash", script.with_name("create.sh")], env=cloud, check=True, timeout=120)
    own = ["bash", "-c", 'echo "$$" >"$CLOUD/start"; exec bash "$0"', str(script)]
    try:
        assert subprocess.run(own, env=cloud, capture_output=True, timeout=300).returncode == 42
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    played = (state / "played").read_text().splitlines()
    assert not [line for line in played if line.startswith(phase) and line.endswith("--host 15")]


def test_a_container_is_its_command() -> None:
    entry = ROOT / "launch" / "container" / "entrypoint.sh"
    started = subprocess.Popen(
        ["bash", entry, "sh", "-c", 'echo "$$"; exit 42'], stdout=subprocess.PIPE, text=True
    )
    said, _ = started.communicate(timeout=60)
    assert int(said) == started.pid and started.returncode == 42


def babysat(cloud: dict[str, str], *, fault: str, role: str = PLAYED) -> tuple[int, str]:
    """Status of babysit.sh and what it printed, where gcloud has a fault and all hosts end well."""
    state = Path(cloud["CLOUD"])
    (state / "fault").write_text(fault)
    (state / "statuses").write_text("0\n")
    (state.parent / "bin" / "rl-jax").write_text(role)
    script = state.parent / "rendered" / "babysit.sh"
    done = subprocess.run(["bash", script], env=cloud, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("case $all in *preflight*'--host 3') ! once 3 || exit 255 ;; esac",
         "attempt 0 ended with 255"),
        ("case $all in *'/plan.json') ! once 3 || exit 2 ;; esac", "attempt 0 ended with 1"),
        ("case $all in *'create qwen3-8b-v6e-64-sampler-2 '*) ! once 2 || exit 2 ;; esac",
         "attempt 0: create.sh failed with 2"),
        ("case $all in *sampler-2-0*command=sudo*) ! once 2 || exit 255 ;; esac",
         "attempt 0: setup.sh failed with 1"),
    ],
    ids=["preflight", "plan", "create", "setup"],
)  # fmt: skip
def test_a_transient_fault_is_told_and_tried_again(cloud, fault: str, said: str) -> None:
    status, told = babysat(cloud, fault=fault)
    assert status == 0 and told.count(" ended with 0\n") == 1
    assert said in told.splitlines()
    played = (Path(cloud["CLOUD"]) / "played").read_text().splitlines()
    assert sum(line.startswith("role") for line in played) == 16


@pytest.mark.parametrize("command", ["instance-templates create", "command=sudo"])
def test_a_fault_that_stays_uses_up_the_budget(cloud, command: str) -> None:
    status, told = babysat(cloud, fault=f"case $all in *'{command}'*) exit 255 ;; esac")
    assert status == 1
    assert told.count(" failed with ") == 4, "three restarts"
    assert told.endswith("no more restarts (MAX_RESTARTS=3)\n")


TAKEN = """gone=$CLOUD/gone
case $all in
    *trainer-0*command=sudo*)
        for ((i = 0; i < {times}; i++)); do ! once "$i" || {{ touch "$gone"; exit 255; }}; done ;;
    *'list-instances qwen3-8b-v6e-64-trainer '*) [ ! -e "$gone" ] || exit 0 ;;
    *'describe qwen3-8b-v6e-64-trainer '*) [ ! -e "$gone" ] || exit 1 ;;
    *'templates create qwen3-8b-v6e-64-trainer '*)
        [ ! -e "$gone" ] || for i in {refused}; do ! once "$i" || exit 1; done
        rm -f "$gone" ;;
esac"""


@pytest.mark.parametrize(("times", "refused"), [(5, ""), (1, "a b c d e")])
def test_a_slice_that_is_taken_away_does_not_count(cloud, times: int, refused: str) -> None:
    """In setup, five times where the budget is three; or once, and it is refused five times."""
    status, told = babysat(cloud, fault=TAKEN.format(times=times, refused=refused))
    assert status == 0
    assert told.count("setup.sh failed with 1") == times
    assert told.count("create.sh failed with 1") == len(refused.split())


def test_a_mistake_that_a_host_tells_of_in_preflight_is_not_tried_again(cloud) -> None:
    role = "case $* in preflight*'--host 3') exit 2 ;; preflight*) ;; *) exit 9 ;; esac"
    status, told = babysat(cloud, fault="", role=f"#!/bin/bash\n{role}\n")
    assert status == 2 and told.count(" ended with 2\n") == 1


def test_what_is_not_set_is_a_mistake(cloud) -> None:
    del cloud["SHARE"]
    assert babysat(cloud, fault="") == (2, "")
    assert not (Path(cloud["CLOUD"]) / "calls").exists()


LIVES_ON = """#!/bin/bash
# Host 0's first role: told to end, it takes until the next attempt asks for the end, or is deaf.
echo "$1 $RL_JAX_ATTEMPT" >>"$CLOUD/played"
case "$* $RL_JAX_ATTEMPT" in role*'--host 0 0') ;; *) exit 0 ;; esac
trap 'echo "told" >>"$CLOUD/played"; {told}=1' TERM
echo "$$" >"$CLOUD/lives-on"
for ((i = 0; i < 400; i++)); do
    [ -z "${{ends:-}}" ] || ! grep -q 'host.sh clear' "$CLOUD/calls" || break
    sleep 0.05
done
echo "checkpoint" >>"$CLOUD/played"
"""
LOST = """case $all in
    *'rl-jax role'*'--host 0')
        if once lost; then
            setsid bash -c "${all##*--command=}" &
            until [ -s "$CLOUD/lives-on" ]; do sleep 0.05; done
            exit 255
        fi ;;
esac"""


@pytest.mark.parametrize(("told", "grace_s"), [("ends", 60), ("deaf", 0)])
def test_a_role_that_outlives_its_connection_ends_before_the_next_attempt(
    cloud, told: str, grace_s: int
) -> None:
    """It is told once, waited for, and killed after the deadline; a stranger is left alone."""
    state, shared = Path(cloud["CLOUD"]), Path(cloud["RENDERED"])
    shared.mkdir()
    stranger = subprocess.Popen(["sleep", "100"])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    born = of_process(stranger.pid).born
    (shared / "host-9.pid").write_text(f"{stranger.pid} {boot} {born - 1}\n")
    cloud["END_S"] = str(grace_s)
    try:
        status, said = babysat(cloud, fault=LOST, role=LIVES_ON.format(told=told))
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    assert status == 0 and "attempt 0 ended with 255" in said
    played = (state / "played").read_text().splitlines()
    assert played.count("told") == 1
    assert played.count("preflight 1") == 16
    left = int((state / "lives-on").read_text())
    assert of_process(left).born == 0, "it has ended"
    if told == "ends":
        assert played.index("checkpoint") < played.index("preflight 1")
    else:
        assert "checkpoint" not in played


@pytest.mark.parametrize("how", [["--now"], ["--wait", "0.5"], []], ids=["now", "late", "together"])
def test_a_second_notice_kills_at_once(cloud, how: list[str], monkeypatch, capsys) -> None:
    """By `stop`; and where it comes together with the first one, while babysit.sh is held."""
    monkeypatch.setattr(stop, "WAIT_S", 30.0)
    awaited = stop._awaited

    def released(*given) -> bool:
        keeping.send_signal(signal.SIGCONT)
        return awaited(*given)

    monkeypatch.setattr(stop, "_awaited", released)
    state = Path(cloud["CLOUD"])
    there = Pipe(state / "there")
    (state.parent / "bin" / "rl-jax").write_text(GOES_ON.format(told=""))
    script = state.parent / "rendered" / "babysit.sh"
    keeping = subprocess.Popen(
        ["bash", script], env=cloud, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert there.told(120.0)
        keeping.send_signal(signal.SIGSTOP)
        if how:
            capsys.readouterr()
            assert main(["stop", str(script.parent), *how]) == 1
            assert "killed" in capsys.readouterr().out
        else:
            keeping.send_signal(signal.SIGTERM)
            keeping.send_signal(signal.SIGUSR2)
            keeping.send_signal(signal.SIGCONT)
        said, _ = keeping.communicate(timeout=60)
    finally:
        if keeping.poll() is None:
            os.killpg(keeping.pid, signal.SIGKILL)
    assert keeping.returncode == 137 and "attempt 0 ended with 137" in said
