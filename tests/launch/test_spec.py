"""A launch's plan: whatever is planned fits, and what does not fit is one line."""

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.site import Site, addresses_of, ports_of, world_of
from launch.spec import LaunchPlan, RunSpec, make_plan, members
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig


def config(**sections) -> RunConfig:
    return RunConfig.model_validate({"name": "x", **sections})


def planned(**sections) -> LaunchPlan:
    return make_plan(RunSpec(config(**sections), "/shared/x"))


def hosts(count: int, devices: int, topology: str | None = None) -> dict:
    return {"count": count, "devices": devices, "topology": topology}


@st.composite
def launches(draw) -> dict:
    """Configurations of every chip, most of which fit."""
    chip = draw(st.sampled_from(["cpu", "h200", "v5p", "v6e"]))
    devices, count = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 4))
    whole = chip in ("v5p", "v6e")
    trainer = devices * count if whole else draw(st.integers(1, devices * count))
    own = hosts(draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 8])))
    shared = not whole and draw(st.booleans())
    sampler = own["devices"] if whole else draw(st.sampled_from([1, 2, 4]))
    trainers = draw(st.sampled_from([n for n in range(1, trainer + 1) if trainer % n == 0]))
    return {
        "model": {"heads": 8, "head_dim": 16},
        "trainer": {"rows_per_microbatch": trainer},
        "mesh": {"trainer": {"data": trainer}, "sampler": {"tensor": sampler}},
        "processes": {"samplers": draw(st.integers(1, 6)), "trainers": trainers},
        "launch": {
            "chip": chip,
            "trainer": hosts(count, devices),
            **({} if shared else {"sampler": own}),
            "first_port": draw(st.integers(1024, 8400)),
        },
    }


@given(launches())
@settings(deadline=None)
def test_whatever_is_planned_fits(sections: dict) -> None:
    try:
        plan = planned(**sections)
    except UserError as error:
        assert "\n" not in str(error) and ("mesh." in str(error) or "processes." in str(error))
        return
    taken = Counter(
        (process.host, device)
        for group in plan.groups
        for process in group.processes
        for device in process.devices
    )
    assert set(taken.values()) == {1}, "a device belongs to one process"
    assert all(device < plan.hosts[host].devices for host, device in taken)
    mesh = sections["mesh"]
    assert sum(taken.values()) == (
        mesh["trainer"]["data"] + mesh["sampler"]["tensor"] * sections["processes"]["samplers"]
    )
    ports = Counter(
        port
        for group in plan.groups
        for process in group.processes
        for served in process.ports.values()
        for port in served
    )
    assert set(ports.values()) == {1} and max(ports) < 9000
    for group in plan.groups:
        own = group.deadlines
        assert min(own.start_s, own.stop_s) > 0
        assert all(process.env["JAX_PLATFORMS"] for process in group.processes)
    standing = [process for host in plan.hosts for _, process in members(plan, host.index)]
    assert len(standing) == sum(len(group.processes) for group in plan.groups)
    assert LaunchPlan.model_validate_json(plan.model_dump_json()) == plan


def test_one_box_of_eight() -> None:
    plan = planned(
        model={"heads": 8, "head_dim": 16},
        mesh={"trainer": {"fsdp": 4}, "sampler": {"tensor": 2}},
        trainer={"rows_per_microbatch": 4},
        processes={"samplers": 2},
        launch={"chip": "h200", "trainer": hosts(1, 8)},
    )
    masks = {g.name: g.processes[0].env.get("CUDA_VISIBLE_DEVICES") for g in plan.groups}
    assert masks == {
        "trainer": "0,1,2,3", "orchestrator": None, "sampler-0": "4,5", "sampler-1": "6,7",
    }  # fmt: skip
    assert plan.group("orchestrator").processes[0].env["JAX_PLATFORMS"] == "cpu"
    assert "XLA_FLAGS" not in plan.group("sampler-0").processes[0].env
    assert addresses_of(plan, ["box"]) == (
        "tcp:box:7400", "tcp:box:7401", ("tcp:box:7500", "tcp:box:7501"),
    )  # fmt: skip


def test_a_world_of_several_processes() -> None:
    plan = planned(
        processes={"trainers": 2},
        mesh={"trainer": {"data": 16}},
        launch={"chip": "h200", "trainer": hosts(2, 8), "sampler": hosts(1, 8)},
    )
    trainer = plan.group("trainer")
    assert [(p.host, p.devices) for p in trainer.processes] == [
        (0, tuple(range(8))), (1, tuple(range(8))),
    ]  # fmt: skip
    assert trainer.restarted_with == "job"
    assert plan.group("sampler-0").restarted_with == "host"
    site = Site(("a", "b", "c"), "secret", attempt=17)
    told = world_of(trainer, trainer.processes[1], site)
    assert told == {"RL_JAX_WORLD": '[1, 2, "a:7403", "a:7419"]'}, "the second ports again"


def stands(**sections) -> dict[str, list[tuple[int, tuple[int, ...]]]]:
    plan = planned(**sections)
    return {g.name: [(p.host, p.devices) for p in g.processes] for g in plan.groups}


def test_a_world_beside_samplers_on_both_hosts() -> None:
    """A host of 3 holds one process of 2 devices."""
    assert stands(
        processes={"trainers": 2, "samplers": 2},
        mesh={"trainer": {"data": 4}},
        trainer={"rows_per_microbatch": 4},
        launch={"trainer": hosts(2, 3)},
    ) == {
        "trainer": [(0, (0, 1)), (1, (0, 1))], "orchestrator": [(0, ())],
        "sampler-0": [(0, (2,))], "sampler-1": [(1, (2,))],
    }  # fmt: skip


def test_a_world_that_fits_a_host_leaves_the_other_one_whole() -> None:
    eight = tuple(range(8))
    assert stands(
        model={"heads": 8, "head_dim": 16},
        processes={"trainers": 2, "samplers": 1},
        mesh={"trainer": {"data": 8}, "sampler": {"tensor": 8}},
        trainer={"rows_per_microbatch": 8},
        launch={"chip": "h200", "trainer": hosts(2, 8)},
    ) == {
        "trainer": [(0, eight[:4]), (0, eight[4:])], "orchestrator": [(0, ())],
        "sampler-0": [(1, eight)],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"launch": {"chip": "h200", "trainer": hosts(1, 8)},
             "mesh": {"trainer": {"data": 16}}},
            "mesh.trainer = data 16 x tensor 1 x fsdp 1 x expert 1 x context 1: 16 devices do not "
            "fit launch.trainer = 1 hosts of 8: at most 8",
        ),
        (
            {"launch": {"chip": "v5p", "trainer": hosts(2, 4)}, "mesh": {"trainer": {"data": 4}}},
            "a slice is used whole, so it needs 8",
        ),
        (
            {"launch": {"chip": "v5p", "trainer": hosts(1, 4, "2x2x2"), "sampler": hosts(1, 4)},
             "mesh": {"trainer": {"data": 4}, "sampler": {"data": 4}}},
            'launch.trainer.topology = "2x2x2": has 8 chips, its hosts have 4',
        ),
        (
            {"launch": {"chip": "v5p", "trainer": hosts(1, 4)}, "mesh": {"trainer": {"data": 4}}},
            "launch.sampler: left out, but a TPU host belongs to one process",
        ),
        (
            {"launch": {"chip": "v6e", "trainer": hosts(1, 4), "sampler": hosts(1, 8)},
             "mesh": {"trainer": {"data": 4}, "sampler": {"data": 4}}},
            "needs launch.sampler.devices = 8 devices, not 4",
        ),
        (
            {"launch": {"chip": "h200", "trainer": hosts(1, 2)}, "processes": {"samplers": 2}},
            "processes.samplers = 2 of 1 devices: launch.trainer = 1 hosts of 2 leave room for 1",
        ),
        (
            {"launch": {"env": ["JAX_PLATFORMS=cpu"]}},
            "launch.env: JAX_PLATFORMS says where a role stands: leave it out",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(sections: dict, said: str) -> None:
    with pytest.raises(UserError) as told:
        planned(**sections)
    assert said in str(told.value) and "\n" not in str(told.value)


def with_fewer(sections: dict) -> LaunchPlan | None:
    """The plan with as many hosts as errors say are right; None where something else is wrong."""
    try:
        return planned(**sections)
    except UserError as error:
        told = re.fullmatch(r"launch\.(\w+)\.count = .*: needs (\d+)", str(error))
    if told is None:
        return None
    launch, pool, right = sections["launch"], told[1], int(told[2])
    assert 1 <= right < launch[pool]["count"]
    own = {**launch, pool: {**launch[pool], "count": right}}
    plan = with_fewer({**sections, "launch": own})
    assert plan is not None, "no other mistake comes of it"
    return plan


@given(launches())
@settings(deadline=None)
def test_something_stands_on_every_host(sections: dict) -> None:
    if plan := with_fewer(sections):
        standing = {process.host for group in plan.groups for process in group.processes}
        assert standing == {host.index for host in plan.hosts}


@pytest.mark.parametrize(
    ("launch", "processes", "said"),
    [
        ({"trainer": hosts(3, 8)}, {"samplers": 8},
         "launch.trainer.count = 3: processes.trainers = 1 and processes.samplers = 8 stand on 2 "
         "of these hosts, and nothing on the others: needs 2"),
        ({"trainer": hosts(2, 8), "sampler": hosts(1, 8)}, {"samplers": 1},
         "launch.trainer.count = 2: processes.trainers = 1 stand on 1 of these hosts, and nothing "
         "on the others: needs 1"),
        ({"trainer": hosts(1, 8), "sampler": hosts(4, 2)}, {"samplers": 5},
         "launch.sampler.count = 4: processes.samplers = 5 stand on 3 of these hosts, and nothing "
         "on the others: needs 3"),
    ],
)  # fmt: skip
def test_the_right_number_of_hosts_is_told(launch: dict, processes: dict, said: str) -> None:
    with pytest.raises(UserError) as told:
        planned(launch={"chip": "h200", **launch}, processes=processes)
    assert str(told.value) == said


def test_ports_of_one_attempt_alone_are_tried() -> None:
    """Others of a world may still be held by an attempt before."""
    plan = planned(
        processes={"trainers": 2},
        mesh={"trainer": {"data": 16}},
        launch={"chip": "h200", "trainer": hosts(2, 8), "sampler": hosts(1, 8)},
    )
    first, other = plan.group("trainer").processes
    site = Site(("a", "b", "c"), "secret", attempt=17)
    assert ports_of(first, site) == {
        "link": 7400, "queue": 7401, "coordinator": 7403, "channel": 7419,
    }  # fmt: skip
    assert ports_of(other, site) == {}
    assert ports_of(plan.group("sampler-0").processes[0], site) == {"serve": 7500}
