"""Where role groups stand on a Ray cluster with made-up TPUs, and what is refused."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from launch.cli import main
from launch.engine.keeper import LEASE_S
from launch.ray.cluster import connected as connected_driver
from launch.ray.slices import POD, SLICE, TOPOLOGY, WORKER, bundle, whole_slices
from launch.spec import RunSpec, make_plan
from launch.supervisor import RoleFailed, Supervisor
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.replay.log import write_format
from tests.fakes.ray import AUTH, cluster, connected
from tests.fakes.role import group, process
from tests.fakes.runs import Quiet


def host(name: str, topology: str, worker: int, pod: str) -> dict[str, Any]:
    """One host of a slice, as Ray describes it: four chips; the slice's head on the first."""
    head = {f"TPU-{pod}-head": 1} if worker == 0 else {}
    labels = {SLICE: name, TOPOLOGY: topology, WORKER: str(worker), POD: pod}
    return {"num_cpus": 1, "resources": {"TPU": 4, **head}, "labels": labels}


HOSTS = [
    {**host("one", "2x2", 0, "v6e-4"), "num_cpus": 2, "num_gpus": 2},
    host("north", "2x4", 1, "v6e-8"),
    host("south", "2x4", 0, "v6e-8"),
    host("north", "2x4", 0, "v6e-8"),
    host("two", "2x2", 0, "v6e-4"),
]
"""Two slices of one host, one of two, and half of another; two GPUs, besides."""
CONFIG = {
    "name": "x",
    "mesh": {"trainer": {"data": 8}, "sampler": {"data": 4}},
    "processes": {"trainers": 2, "samplers": 2},
    "launch": {
        "chip": "v6e",
        "trainer": {"count": 2, "devices": 4, "topology": "2x4"},
        "sampler": {"count": 2, "devices": 4, "topology": "2x2"},
    },
}
LONG = 60.0


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """This process is the driver of a cluster with those hosts."""
    folder = tmp_path_factory.mktemp("ray")
    with cluster(folder, *HOSTS) as made, connected(made):
        yield made


def planned(**changes: Any) -> Any:
    config = RunConfig.model_validate({**CONFIG, **changes})
    return make_plan(RunSpec(config, "run"))


def test_a_slice_is_whole_or_none_and_in_its_own_order() -> None:
    def node(number: int, given: dict[str, Any]) -> dict[str, Any]:
        labels, resources = dict(given["labels"]), given["resources"]
        return {"NodeID": str(number), "Labels": labels, "Resources": resources}

    others = [
        host("old", "2x4", 0, "v5p-8"),
        host("old", "2x4", 1, "v5p-8"),
        host("large", "4x4", 0, "v6e-16"),
        {"labels": {}, "resources": {"CPU": 8}},
    ]
    nodes = [node(i, given) for i, given in enumerate([*HOSTS, *others])]
    plan = planned()
    found = whole_slices(nodes, "v6e", "2x4", plan.group("trainer"))
    assert [[host["NodeID"] for host in own] for own in found] == [["3", "1"]]
    found = whole_slices(nodes, "v6e", "2x2", plan.group("sampler-0"))
    assert [[host["NodeID"] for host in own] for own in found] == [["0"], ["4"]]
    del nodes[4]["Labels"][SLICE], nodes[0]["Labels"][SLICE]
    assert whole_slices(nodes, "v6e", "2x2", plan.group("sampler-0")) == found
    assert bundle(nodes[1]) == {"CPU": 1.0, "TPU": 4}
    assert bundle(nodes[3]) == {"CPU": 1.0, "TPU": 4, "TPU-v6e-8-head": 1.0}


@pytest.mark.ray
def test_a_group_has_a_slice_whole_and_its_own(pods: Any, tmp_path: Path) -> None:
    from launch.engine.ray import RayEngine, living_nodes
    from launch.ray.placement import Placement, as_placed

    async def main() -> None:
        placement, other = Placement(), Placement()
        try:
            plan = planned()
            await placement.reserve(plan, LONG, print)
            nodes = living_nodes()
            at = {
                name: [nodes[berth.node or ""]["Labels"] for berth in own]
                for name, own in placement.berths.items()
            }
            stands = [(labels[SLICE], labels[WORKER]) for labels in at["trainer"]]
            assert stands == [("north", "0"), ("north", "1")], "in rank order"
            samplers = [labels[SLICE] for name in ("sampler-0", "sampler-1") for labels in at[name]]
            assert sorted(samplers) == ["one", "two"]
            assert at["orchestrator"] == at["trainer"][:1]
            moved, hosts = as_placed(plan, placement.berths)
            assert [p.host for g in moved.groups for p in g.processes] == [0, 1, 0, 2, 3]
            assert len(hosts) == 4
            write_format(tmp_path)
            await check_devices(RayEngine(tmp_path, placement.berths))
            only = plan.model_copy(update={"groups": plan.groups[:1]})
            lacks = "trainer needs 2 x 4 TPU, the cluster has 4 free of 20"
            with pytest.raises(UserError, match=lacks):
                await other.reserve(only, 5.0, print)
        finally:
            other.release()
            placement.release()

    async def check_devices(engine: Any) -> None:
        """Of a process with a slice's host, and of one without."""
        try:
            trainer = await engine.start_group(group("trainer", process(), process()))
            env = await trainer.call("environment", {}, deadline=LONG)
            assert env["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
            assert not [name for name in env if name.startswith("RAY_")], "the token least of all"
            beside = await engine.start_group(group("orchestrator"))
            assert await beside.call("echo", {"value": 1}, deadline=LONG) == 1
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.ray
def test_roles_of_one_host_have_their_own_gpus(pods: Any, tmp_path: Path) -> None:
    from launch.engine.ray import RayEngine
    from launch.ray.placement import Placement, as_placed

    plan = planned(
        launch={"chip": "h200", "trainer": {"devices": 2}}, mesh={}, processes={"samplers": 1}
    )

    async def main() -> None:
        placement = Placement()
        try:
            await placement.reserve(plan, LONG, print)
            moved, _ = as_placed(plan, placement.berths)
            assert not any("CUDA_VISIBLE_DEVICES" in g.processes[0].env for g in moved.groups)
            write_format(tmp_path)
            engine = RayEngine(tmp_path, placement.berths)
            try:
                own = [await engine.start_group(group(name)) for name in ("trainer", "sampler-0")]
                envs = [await each.call("environment", {}, deadline=LONG) for each in own]
                assert {env["CUDA_VISIBLE_DEVICES"] for env in envs} == {"0", "1"}
            finally:
                await engine.close()
        finally:
            placement.release()

    asyncio.run(main())


@pytest.mark.ray
def test_what_has_no_place_is_told(pods: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from launch.ray import placement

    monkeypatch.setattr(placement, "PATIENCE_S", 0.1)
    notes: list[str] = []
    plan = planned(
        launch={"chip": "cpu", "trainer": {"devices": 3}, "sampler": {"devices": 1}},
        mesh={"trainer": {"data": 3}},
        trainer={"rows_per_microbatch": 3},
        processes={},
    )

    async def main() -> None:
        own = placement.Placement()
        try:
            await own.reserve(plan, 1.0, notes.append)
        finally:
            own.release()

    lacks = "trainer needs 1 x 3 CPU, the cluster has 6 free of 6 (nodes: 4 of 1, 1 of 2)"
    with pytest.raises(UserError) as told:
        asyncio.run(main())
    assert str(told.value) == f"{lacks}; given up after 1 s"
    assert notes == [f"waiting for room: {lacks}"]


@pytest.mark.ray
def test_a_slice_without_a_topology_is_refused(pods: Any) -> None:
    from launch.ray.placement import Placement

    launch = {**CONFIG["launch"], "trainer": {"count": 2, "devices": 4}}  # type: ignore[dict-item]
    with pytest.raises(UserError, match=r"launch.trainer.topology: left out, but Ray finds"):
        asyncio.run(Placement().reserve(planned(launch=launch), LONG, print))


@pytest.mark.ray
def test_a_run_that_loses_its_place_too_often_is_lost(
    pods: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.engine.ray import Displaced
    from launch.ray import run

    waits: list[float] = []
    config = RunConfig.model_validate({**CONFIG, "processes": {"trainers": 2, "restarts": 2}})
    quiet = Quiet()
    own = run._Run(config, planned(), tmp_path, "token", count(), quiet)

    async def displaced(own: Any, delay_s: float) -> None:
        waits.append(delay_s)
        notice = len(waits) in (1, 3, 4)
        raise run._Leaving("node b goes") if notice else Displaced("node a is lost")

    monkeypatch.setattr(run, "_at_one_place", displaced)
    with pytest.raises(RoleFailed, match=r"node a is lost, after 2 new placements within 600 s"):
        asyncio.run(run._keep(own))
    assert waits == [0.0, 0.0, LEASE_S, 0.0, 0.0, LEASE_S], "who may live on is waited for"
    told = [note.partition(":")[0] for note in quiet.notes]
    assert told == ["node b goes", "node a is lost", "node b goes", "node b goes", "node a is lost"]


@pytest.mark.ray
def test_a_node_about_to_go_stops_the_run(pods: Any) -> None:
    """As a cloud's notice of preemption does; the last test here, as the node stays closed."""
    import ray

    from launch.ray.placement import Placement, leaving
    from launch.ray.run import _look

    class Stopping:
        stopped = False

        def stop(self) -> None:
            self.stopped = True

    async def main() -> None:
        placement, supervisor = Placement(), Stopping()
        try:
            await placement.reserve(planned(), LONG, print)
            assert leaving(placement.berths) == ""
            looking = asyncio.create_task(_look(placement, cast(Supervisor, supervisor)))
            going = placement.berths["sampler-1"][0]
            client = ray._raylet.GcsClient(address=pods.address)
            preempted, deadline = 2, int(1000 * (time.time() + 600))
            assert client.drain_node(going.node, preempted, "notice", deadline)[0]
            async with asyncio.timeout(LONG):
                assert await looking == going.host
            assert supervisor.stopped
        finally:
            placement.release()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "RAY_AUTH_MODE = not set: needs token, here and on every node"),
        ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE = disabled: needs token"),
        (AUTH, "RAY_AUTH_TOKEN_PATH is not set: it names a file of mode 600"),
        ({**AUTH, "RAY_AUTH_TOKEN_PATH": "open"}, "open has mode 644, so others may read"),
        ({**AUTH, "RAY_AUTH_TOKEN_PATH": "none"}, "RAY_AUTH_TOKEN_PATH = none: cannot be read"),
    ],
)
def test_no_cluster_without_a_token(
    env: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launch.ray.cluster.find_spec", lambda name: name)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_PLATFORMS", os.environ["JAX_PLATFORMS"])
    Path("open").write_text("x")
    Path("open").chmod(0o644)
    Path("small.toml").write_text('name = "small"\n')
    assert main(["run", "small.toml", "--target", "ray", "--out", "run"]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not Path("run").exists()


def test_an_address_where_nobody_listens_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    text = rf"--address 127.0.0.1:{port}: nobody answers there \(Connection refused\)"
    with pytest.raises(UserError, match=text), connected_driver(f"127.0.0.1:{port}"):
        pass
