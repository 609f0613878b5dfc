"""Of scheduler, prefix cache and sampling: areas SC and NU."""

from __future__ import annotations

from tests.mutations import Mutation

KV_MANAGER = "jaxserve/scheduling/kv_manager.py"
SCHEDULER = "jaxserve/scheduling/scheduler.py"

MUTATIONS = {
    # A request that needs the whole pool is never admitted.
    "SC02": Mutation(KV_MANAGER, "+ spare <= self.pool.num_free", "+ spare < self.pool.num_free"),
    # A preempted request that goes on leaves one token's KV out.
    "SC04": Mutation(
        SCHEDULER,
        "request.num_computed_tokens = len(cached) * self.kv.block_size",
        "request.num_computed_tokens = len(cached) * self.kv.block_size + (request.num_preemptions > 0)",
    ),
    # A hit of the whole prompt leaves nothing to compute what comes next from.
    "SC05": Mutation(KV_MANAGER, "range(min((request.num_tokens - 1) //", "range(min(request.num_tokens //"),
    # A block's name says nothing of what is before it.
    "SC08": Mutation("jaxserve/scheduling/block_hash.py", "blake2b(parent + array(", "blake2b(array("),
    # A salt can pass for something else that goes into a name.
    "SC09": Mutation(
        "jaxserve/scheduling/block_hash.py",
        'for part in (tag.encode(), value.encode("utf-8", "surrogatepass")):',
        'for part in (value.encode("utf-8", "surrogatepass"),):',
    ),
    # Who is preempted goes behind everybody who waits.
    "SC12": Mutation(
        SCHEDULER,
        "request.num_preemptions += 1",
        "request.num_preemptions += 1; request.rank = (request.rank[0], request.rank[1] + 10**9)",
    ),
    # A long prompt takes the whole budget of a step.
    "SC14": Mutation(
        SCHEDULER, "share = -(-draft.budget // 2) if request is first else draft.budget", "share = draft.budget"
    ),
    # The first of several owners frees a shared block.
    "SC15": Mutation(
        "jaxserve/scheduling/block_pool.py", "self._references[block] -= 1", "self._references[block] = 0"
    ),
    # The noise depends on how many others are in the batch.
    "NU02": Mutation(
        "pallas_kernels/sampling.py", "= token_bits(rows.seeds,", "= token_bits(rows.seeds + len(logits),"
    ),
    # The choices of a seed are all the same.
    "NU04": Mutation("jaxserve/runner/batch.py", "words[6] = row.choice_index", "words[6] = 0"),
    # The noise depends on the slot.
    "NU05": Mutation(
        "jaxserve/runner/batch.py",
        "words[row, 1:] = sampling_words(item.sampling)",
        "words[row, 1:] = sampling_words(item.sampling) + item.slot * (np.arange(SAMPLING_WORDS) == 4)",
    ),
    # Unseeded requests differ, but are the same after each start.
    "NU06": Mutation(
        "jaxserve/request.py",
        "return secrets.randbits(64) - 2**63",
        'return fresh_seed.__dict__.setdefault("stream", random.Random(0)).getrandbits(64) - 2**63',
    ),
    # Tokens of the prompt count as generated.
    "NU08": Mutation(
        "pallas_kernels/adjust.py", "generated = counts & SEEN_MAX", "generated = (counts & SEEN_MAX) + (counts < 0)"
    ),
}
