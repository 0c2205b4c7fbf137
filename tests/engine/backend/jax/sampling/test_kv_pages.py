"""Pages are allocated, shared by prompts with equal starts, and evicted in order of their use."""

import numpy as np

from tuneserve_engine.backend.jax.sampling.kv_pages import (
    KvPageAllocator,
    PrefixPage,
    least_pages,
    most_pages,
    prefix_hashes,
)
from tuneserve_engine.core.shapes import StaticShapes

A, B, C = b"a", b"b", b"c"


def written(parts: list[PrefixPage]) -> list[PrefixPage]:
    for part in parts:
        part.written = True
    return parts


def reserved(pages: KvPageAllocator, hashes: list[bytes], private: int) -> tuple[list[int], ...]:
    """The numbers of the prompt pages and of the private pages."""
    found = pages.reserve(hashes, private)
    assert found is not None
    return [part.page for part in found[0]], found[1]


def test_every_page_but_the_unused_one_is_allocated_once() -> None:
    pages = KvPageAllocator(5)
    assert pages.room == 4
    assert reserved(pages, [A, B], 2) == ([1, 2], [3, 4])
    assert pages.room == 0
    assert pages.reserve([], 1) is None


def test_a_prompt_page_is_shared_while_it_is_in_use_and_kept_afterwards() -> None:
    pages = KvPageAllocator(5)
    first = pages.reserve([A], 1)
    second = pages.reserve([A, B], 0)
    assert first is not None and second is not None
    assert [part.page for part in second[0]] == [1, 3]
    assert (second[0][0].users, pages.room) == (2, 1)
    pages.release(written(second[0]), second[1])
    assert pages.room == 2  # the page of B, and an unused one
    pages.release(*first)
    assert pages.room == 4
    assert reserved(pages, [A, B], 0) == ([1, 3], [])


def test_a_page_that_was_never_written_is_forgotten() -> None:
    pages = KvPageAllocator(3)
    found = pages.reserve([A], 0)
    assert found is not None
    pages.release(*found)
    again = pages.reserve([A], 0)
    assert again is not None
    assert again[0][0] is not found[0][0]


def test_the_least_recently_used_page_is_evicted_and_the_end_of_a_prompt_before_its_start() -> None:
    pages = KvPageAllocator(4)
    for hashes in ([A, B], [C]):
        found = pages.reserve(hashes, 0)
        assert found is not None
        pages.release(written(found[0]), found[1])
    assert reserved(pages, [A], 1) == ([1], [2])  # the page of B
    assert reserved(pages, [C], 0) == ([3], [])


def test_a_reservation_never_evicts_its_own_pages() -> None:
    pages = KvPageAllocator(3)
    found = pages.reserve([A, B], 0)
    assert found is not None
    pages.release(written(found[0]), found[1])
    assert pages.reserve([A, B], 1) is None
    assert pages.room == 2
    assert reserved(pages, [A, B], 0) == ([1, 2], [])


def test_a_digest_depends_on_the_scope_and_on_all_tokens_up_to_the_parts_end() -> None:
    tokens = np.array([5, 6, 7, 8, 9], np.int32)
    whole = prefix_hashes("m", tokens, 2)
    assert len(set(whole)) == 3
    assert prefix_hashes("m", tokens[:4], 2) == whole[:2]
    assert not set(prefix_hashes("n", tokens, 2)) & set(whole)
    changed = prefix_hashes("m", np.array([5, 6, 0, 8, 9], np.int32), 2)
    assert (changed[0], len(set(changed) & set(whole))) == (whole[0], 1)


def test_the_pages_suffice_for_a_context_in_every_slot() -> None:
    """A context of 256 tokens takes 4 pages of 64. A slot has one more, and one is unused."""
    assert most_pages(StaticShapes(256), 8) == 8 * 5 + 1
    assert least_pages(StaticShapes(256)) == 5 + 1


def test_spare_pages_stay_free_and_further_pages_are_taken_one_by_one() -> None:
    pages = KvPageAllocator(5)  # four beside the unused one
    assert pages.reserve([], 2, spare=3) is None
    reserved = pages.reserve([], 2, spare=2)
    assert reserved is not None
    taken = [pages.take_page(), pages.take_page()]
    assert {*reserved[1], *taken} == {1, 2, 3, 4}
    assert pages.take_page() is None
