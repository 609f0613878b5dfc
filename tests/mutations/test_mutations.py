"""The tables fit the code. That the tests notice, ``python -m tests.mutations`` shows."""

from __future__ import annotations

import pytest

from tests.mutations.catalogue import files_by_id, known_mutations, mutated

KNOWN = known_mutations()


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_mutation_fits_the_code_and_has_a_test(name: str) -> None:
    mutation = KNOWN[name]
    compile(mutated(mutation), mutation.file, "exec")
    assert mutation.old != mutation.new
    assert files_by_id().get(name), "no test carries this id"
