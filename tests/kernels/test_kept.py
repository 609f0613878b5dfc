"""What is kept is what would be made now."""

from __future__ import annotations

from pallas_kernels.kept import kept


def test_it_is_made_again_when_the_key_or_a_source_changes(cache, tmp_path):
    source, made = tmp_path / "source", []

    def make() -> bytes:
        made.append(source.read_bytes())
        return made[-1]

    source.write_bytes(b"one")
    assert [kept("k", (1,), [source], make) for _ in range(2)] == [b"one"] * 2 and len(made) == 1
    source.write_bytes(b"two")
    assert kept("k", (1,), [source], make) == b"two"
    assert kept("k", (2,), [source], make) == b"two" and len(made) == 3


def test_where_nothing_can_be_written_it_is_made_every_time(cache):
    (cache / "kernels").write_text("a file is in the way")
    assert [kept("k", (1,), [], lambda: b"one") for _ in range(2)] == [b"one"] * 2
