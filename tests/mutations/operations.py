"""Of processes and who looks after them: area OP."""

from __future__ import annotations

from tests.mutations import Mutation

LAUNCH = "jaxserve/server/launch.py"

MUTATIONS = {
    # What has finished all it ran stays for the rest of the shutdown timeout.
    "OP02": Mutation("jaxserve/server/process.py", "self.should_exit = True", "self.should_exit = False"),
    # Health is good before the model is there.
    "OP05": Mutation(
        "jaxserve/server/operations.py", "context.check_serving()\n    if not", "if context.draining and not"
    ),
    # A long step passes for a fault.
    "OP06": Mutation("jaxserve/engine/client.py", "SILENCE_LIMIT = 120.0", "SILENCE_LIMIT = 1.0"),
    # What a preempted request finds of its own counts as found.
    "OP11": Mutation("jaxserve/scheduling/scheduler.py", "if not request.num_preemptions and self", "if self"),
    # A key guards what lies below /v1.
    "OP12": Mutation("jaxserve/server/auth.py", "or path in OPEN_PATHS or", 'or not path.startswith("/v1/") or'),
    # All servers of a machine share one engine's address.
    "OP14": Mutation(LAUNCH, 'f"ipc://{scratch}/engine"', 'f"ipc://{tempfile.gettempdir()}/jaxserve-engine"'),
    # Ctrl-C waits for streams as long as SIGTERM does.
    "OP15": Mutation(LAUNCH, "if stop.interrupted:", "if stop.count > 9:"),
    # All of a device's memory counts as free.
    "OP16": Mutation("jaxserve/runner/plan.py", "return limit - used - param_bytes", "return limit - param_bytes"),
}
