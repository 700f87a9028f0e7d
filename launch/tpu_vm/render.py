"""[H] A plan as scripts for TPU VMs: create, set up, start, keep."""

from collections.abc import Mapping
from pathlib import Path

from launch.gke.pods import name_of
from launch.sourced import sourced
from launch.spec import LaunchPlan
from rl_jax.config.base import UserError

FOLDER = Path(__file__).parent
MACHINES = {
    ("v5p", 4): "ct5p-hightpu-4t",
    ("v6e", 1): "ct6e-standard-1t",
    ("v6e", 4): "ct6e-standard-4t",
    ("v6e", 8): "ct6e-standard-8t",
}
"""(chip, devices of a host) -> the type of its machine."""
SCRIPTS = ("create.sh", "hosts.sh", "ssh.sh", "setup.sh", "host.sh", "start.sh", "babysit.sh")


def files(plan: LaunchPlan) -> Mapping[str, str]:
    """Name -> text. UserError where there is no such machine."""
    settings: dict[str, object] = {
        "NAME": name_of(plan),
        "MAX_RESTARTS": plan.group("trainer").restarts,
        "DEFAULT_IMAGE_FAMILY": f"ubuntu-accelerator-2404-amd64-tpu-{plan.chip}",
    }
    topologies = {"trainer": plan.trainer_topology, "sampler": plan.sampler_topology}
    for pool, topology in topologies.items():
        hosts = [host for host in plan.hosts if host.pool == pool]
        key = plan.chip, hosts[0].devices
        if key not in MACHINES:
            known = ", ".join(f"{chip} x {count}" for chip, count in MACHINES)
            raise UserError(f"launch.{pool}: no TPU VM of {key[1]} {key[0]}; there is {known}")
        settings |= {
            f"{pool.upper()}_HOSTS": len(hosts),
            f"{pool.upper()}_MACHINE": MACHINES[key],
            f"{pool.upper()}_TOPOLOGY": topology or "",
        }
    scripts = {name: (FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS}
    return scripts | {"launch.env": sourced(settings)}
