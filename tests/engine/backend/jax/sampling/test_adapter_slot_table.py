"""Which adapter slot a snapshot gets, by hand."""

from tuneserve_engine.backend.jax.sampling.adapter_slot_table import AdapterSlotTable


def test_users_of_a_snapshot_share_its_slot() -> None:
    table = AdapterSlotTable(2, is_shared=True)
    assert table.find("a", 5) == 0
    assert table.add_user(0, "a")
    assert table.find("a", 1) == 0
    assert not table.add_user(0, "a")
    assert table.find("b", 0) == 1


def test_a_snapshot_waits_until_all_users_of_another_have_ended() -> None:
    table = AdapterSlotTable(1, is_shared=True)
    table.add_user(0, "a")
    table.add_user(0, "a")
    table.remove_user(0)
    assert table.find("b", 0) is None
    table.remove_user(0)
    assert table.find("b", 0) == 0
    assert table.add_user(0, "b")


def test_the_least_recently_used_snapshot_goes_first_and_the_others_stay() -> None:
    table = AdapterSlotTable(3, is_shared=True)
    for slot, name in enumerate("abc"):
        table.add_user(slot, name)
    for slot in (1, 2, 0):
        table.remove_user(slot)
    assert table.find("c", 0) == 2
    assert not table.add_user(2, "c")
    table.remove_user(2)
    assert [table.find(name, 0) for name in "dabc"] == [1, 0, 1, 2]
    assert table.add_user(1, "d")
    assert table.find("b", 0) == 0


def test_slots_that_are_not_shared_go_by_their_number() -> None:
    table = AdapterSlotTable(2, is_shared=False)
    assert [table.find("a", slot) for slot in (0, 1)] == [0, 1]
    assert table.add_user(0, "a") and table.add_user(1, "a")
    table.remove_user(0)
    assert not table.add_user(0, "a")


def test_snapshots_in_use_are_in_the_order_in_which_they_started() -> None:
    table = AdapterSlotTable(3, is_shared=True)
    for slot, name in ((0, "a"), (1, "b"), (0, "a"), (2, "c")):
        table.add_user(slot, name)
    table.remove_user(0)
    assert table.in_use == ["a", "b", "c"]
    table.remove_user(0)
    table.add_user(0, "a")
    assert table.in_use == ["b", "c", "a"]
