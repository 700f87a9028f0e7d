"""[N] The commands of `rl-jax`, as its help tells of them."""

COMMANDS = {
    "run": (
        "train the agent that a configuration describes",
        "Trains the agent that CONFIG describes and leaves the run's whole record in its "
        "directory. Ctrl-C or SIGTERM stops it with a checkpoint.",
        "configs/quickstart.toml --set seed=1 --out runs/seed-1",
    ),
    "resume": (
        "go on with a run that was stopped or killed",
        "Goes on where RUN's last checkpoint and its journal end; no prompt is repeated or "
        "skipped.",
        "runs/quickstart",
    ),
    "status": (
        "say what a run is doing, and who ended badly",
        "Prints the state of RUN, its newest update and version, its processes and the last error, "
        "from its files alone: whether it goes on, is over or crashed.",
        "runs/quickstart",
    ),
    "logs": (
        "print what a run's roles printed",
        "Prints the end of each role's log, or of ROLE's alone, and with --follow what comes until "
        "the run ends.",
        "runs/quickstart trainer --follow",
    ),
    "watch": (
        "show a run as the terminal that started it does",
        "Shows every update of RUN, and those that come until it ends; on a terminal the newest, "
        "drawn in place.",
        "runs/quickstart",
    ),
    "stop": (
        "end a run with a checkpoint",
        "Ends RUN wherever it was started, and waits for its end. Exit status 1 where it had to "
        "be killed.",
        "runs/quickstart",
    ),
    "replay": (
        "rebuild every update of a run and compare digests",
        "Rebuilds every update of RUN from version 0 and the record alone and compares every "
        "published version: bit for bit on a machine with the same numerics. Exit status 1 where "
        "they differ.",
        "runs/quickstart",
    ),
    "report": (
        "write a run's report.html",
        "Writes one self-contained page about RUN, which may still be going on.",
        "runs/quickstart",
    ),
    "show": (
        "print one trajectory turn by turn",
        "Prints a trajectory of RUN turn by turn: text, token ids, versions, log-probabilities.",
        "runs/quickstart lookup/12/3",
    ),
    "events": (
        "print a run's journal as JSON lines",
        "Prints the events of all programs of RUN in the run's order.",
        "runs/quickstart | head",
    ),
    "import": (
        "take in a checkpoint of Hugging Face's or a GGUF file",
        "Makes of SOURCE, a Hugging Face directory or a GGUF file of architecture llama with "
        "byte-level BPE, a version that a run can start from: DIR/0 is for warm_start.snapshot, "
        "DIR/model.toml holds the section [model], DIR is for task.tokenizer. Killed, it goes on "
        "where it stopped when called again.",
        "SmolLM2-135M-Instruct --out checkpoints/smollm2",
    ),
    "export": (
        "write a version as a Hugging Face directory",
        "Writes SNAPSHOT, a version that came from an import or from a run that began with one, as "
        "a Hugging Face directory. Killed, it goes on where it stopped when called again.",
        "runs/smollm2/snapshots/12 --out exported",
    ),
    "list": ("list runs", "Lists the runs in DIR with their state.", "runs"),
    "plan": (
        "say what a run will take and give: bytes, speed, idle shares, lag",
        "Prints what trainer and sampler of a configuration hold on one device of their meshes: "
        "parameters, optimizer and caches are exact, what has a ~ is estimated. Then, from rates "
        "of a chip or a fitted run, what the run will come to, by formulas and by a seeded "
        "simulation. Needs no devices.",
        "quickstart --chip v6e --picture plan.png",
    ),
    "render": (
        "write a launch's scripts or manifests, and start nothing",
        "Writes the plan of CONFIG's launch, its environment and what starts it on Slurm, GKE or "
        "TPU VMs into DIR.",
        "configs/pods/qwen3_8b_h200_8.toml --target slurm --out rendered",
    ),
    "preflight": (
        "check a machine, or all of a launch together, before a run",
        "Checks versions, clocks, the shared disk, the store of snapshots, ports, shared memory, "
        "devices and one sum over them; one line each.",
        "configs/quickstart.toml",
    ),
    "role": (
        "play one machine's part of a launch; called by what render writes",
        "Plays all roles of a machine (--host) or one (NAME) to the end of the run. Exit status 42 "
        "where it was stopped and can be started again, 134 where a peer is lost.",
        "--plan plan.json --host 0",
    ),
}
"""Name -> summary, description, arguments of an example."""
